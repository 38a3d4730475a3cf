import types

import numpy as np
import PIL.Image

from tfaccel.config import ImageConfig
from tfaccel.training.logs.contact_sheet import CAPTION_HEIGHT, MARGIN
from tfaccel.training.logs.first_batch import NUM_SHOWN, FirstBatch


class Loader:
    """What a loader of grey images, 128 x 128, tells of itself."""

    class_names = ("cat", "dog")
    data = types.SimpleNamespace(
        images=ImageConfig(image_size=(128, 128), channels=1),
        source=types.SimpleNamespace(target_names=()),
    )
    kept = None

    def keep_next(self, num_rows):
        self.asked = num_rows

    def give(self, num_rows, *, num_padding=0):
        weight = np.ones(num_rows, np.float32)
        weight[num_rows - num_padding :] = 0
        self.kept = np.zeros((num_rows, 128, 128, 1)), np.zeros(num_rows, np.int32), weight


def test_writes_the_first_batch_without_its_padding(tmp_path):
    loader = Loader()
    path = tmp_path / "first_batch.png"
    writer = FirstBatch(path, loader)
    assert loader.asked == NUM_SHOWN
    loader.give(4, num_padding=3)
    writer.steps({"step": 1})
    with PIL.Image.open(path) as sheet:
        assert sheet.size == (128 + 2 * MARGIN, 128 + CAPTION_HEIGHT + 2 * MARGIN)
    path.unlink()
    writer.steps({"step": 51})
    assert not path.exists()


def test_a_resumed_run_keeps_its_sheet(tmp_path):
    loader = Loader()
    writer = FirstBatch(tmp_path / "first_batch.png", loader)
    loader.give(1)
    writer.resume_at(step=10, epoch=1)
    writer.steps({"step": 11})
    assert list(tmp_path.iterdir()) == []
