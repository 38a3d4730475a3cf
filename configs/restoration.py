"""Image restoration: a blurred photograph made sharp again, on any machine.

    uv run tfaccel train --config=configs/restoration.py

37.2 dB PSNR on the test crops, of which the blurred ones have 31.7 dB, on 2 CPU cores (2026-11-23).

The pairs are made here, from Matplotlib's sample photograph: tfaccel/data/blurred.py. Your own:
`--config.data.root=DIR`, with equal paths below `train/blurry` and `train/sharp`, and likewise
below `test`.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, is_smoke
from tfaccel.data.blurred import ensure_blurred


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` for a single epoch."""
    config = default_config()
    config.data.root = str(ensure_blurred())
    config.data.source = "pairs"
    config.data.train = "train/blurry"
    config.data.train_targets = "train/sharp"
    config.data.test = "test/blurry"
    config.data.test_targets = "test/sharp"
    config.data.image_size = (64, 64)
    config.data.mean = 0.5
    config.data.std = 0.5  # pixels in -1..1
    config.data.global_batch_size = 4
    config.train_images.update(preset_fields("restoration"))
    config.test_images.update(preset_fields("restoration_eval"))
    config.model.name = "restoration_cnn"
    config.train.epochs = 1 if is_smoke(size) else 12
    config.train.optimizer = "adamw"
    config.train.learning_rate = 1e-3
    return config
