import pytest

from tfaccel import UserError
from tfaccel.export import card
from tfaccel.runtime.cluster import tf_config
from tfaccel.training.checkpoint import manifest
from tfaccel.training.logs import json_lines

DEEP = "[" * 200_000  # Python's parser raises RecursionError, which is no ValueError


def test_nested_json_is_a_sentence_wherever_a_file_or_variable_holds_it(tmp_path):
    (tmp_path / card.NAME).write_text(DEEP)
    with pytest.raises(UserError, match="is not valid JSON"):
        card.read(tmp_path)
    (tmp_path / manifest.MANIFEST).write_text(DEEP)
    with pytest.raises(manifest.CheckpointError, match="is not JSON"):
        manifest.read_manifest(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read"):
        tf_config._read(DEEP)
    assert json_lines._record(DEEP.encode()) is None
