"""Image restoration: sharpens a blurred photograph, on any machine.

    uv run tfaccel train --config=configs/restoration.py

Result: 37.2 dB PSNR on the test crops, compared with 31.7 dB for the blurred crops, on 2 CPU cores
(2026-11-23).

tfaccel/data/blurred.py makes the pairs from Matplotlib's sample photograph. For your own pairs, use
`--config.data.root=DIR`. The folders `train/blurry` and `train/sharp` must have equal paths below
them, and so must `test/blurry` and `test/sharp`.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, is_smoke
from tfaccel.data.blurred import ensure_blurred


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` gives a single epoch."""
    config = default_config()
    config.data.root = str(ensure_blurred())
    config.data.source = "pairs"
    config.data.train = "train/blurry"
    config.data.train_targets = "train/sharp"
    config.data.test = "test/blurry"
    config.data.test_targets = "test/sharp"
    config.data.image_size = (64, 64)
    config.data.mean = 0.5
    config.data.std = 0.5  # pixels become -1..1
    config.data.global_batch_size = 4
    config.train_images.update(preset_fields("restoration"))
    config.test_images.update(preset_fields("restoration_eval"))
    config.model.name = "restoration_cnn"
    config.train.epochs = 1 if is_smoke(size) else 12
    config.train.optimizer = "adamw"
    config.train.learning_rate = 1e-3
    return config
