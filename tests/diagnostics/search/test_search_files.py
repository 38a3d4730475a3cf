"""What a search needs no Optuna for: config files and GPUs."""

import pytest

from tfaccel.cli.flags import load
from tfaccel.common.errors import UserError
from tfaccel.config import default_config, parse
from tfaccel.diagnostics.search import config_files, slots


def test_a_config_file_gives_the_same_config(tmp_path):
    config = default_config()
    config.data.root, config.data.image_size = 'a "quoted" \\ root', (8, 8)
    config.train.learning_rate, config.model.freeze = 1.5e-7, ("a_*", "b")
    config.log.trackers = "mlflow"
    written = parse(config)
    config_files.write(tmp_path / "a.py", written, said='trial "7" \\ """ of\na search')
    assert parse(load(str(tmp_path / "a.py"))) == written
    config_files.copy(tmp_path / "a.py", tmp_path / "best.py", said="the best")
    assert parse(load(str(tmp_path / "best.py"))) == written
    assert (tmp_path / "best.py").read_text().startswith('"""the best.\n')


@pytest.mark.parametrize(
    ("visible", "gpu_ids", "names"),
    [
        (None, None, ["0", "1", "2"]),
        (None, (2, 0), ["2", "0"]),
        (None, (), []),
        ("4, 6", None, ["4", "6"]),
        ("4,6", (1,), ["6"]),
        ("GPU-ab,GPU-cd", None, ["GPU-ab", "GPU-cd"]),
        ("-1", None, []),
        ("", None, []),
    ],
)
def test_each_trial_gets_a_gpu_of_those_that_can_be_seen(monkeypatch, visible, gpu_ids, names):
    monkeypatch.setattr(slots, "_num_installed", lambda: 3)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert slots.gpus(environment, gpu_ids=gpu_ids) == names


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(UserError, match="gpu_ids has GPU 2, but 2 GPUs can be seen"):
        slots.gpus({"CUDA_VISIBLE_DEVICES": "4,6"}, gpu_ids=(0, 2))


def test_trials_share_the_cores():
    shares = [slots.share_of_cores({1, 2, 3, 5, 8, 13, 21}, index, 3) for index in range(3)]
    assert shares == [{1, 2}, {3, 5}, {8, 13}]
    assert slots.share_of_cores({0, 1}, 2, 3) == {0, 1}
    assert slots.share_of_cores({0, 1}, 0, 1) == {0, 1}


def test_a_process_sees_one_gpu():
    assert slots.of_one(None) == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert slots.of_one("GPU-ab") == {"CUDA_VISIBLE_DEVICES": "GPU-ab"}
    assert slots.of_one("3") == {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
