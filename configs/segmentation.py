"""Segmentation: a U-Net over EfficientNetV2-B0, for handwritten digits in small pictures.

    uv run tfaccel train --config=configs/segmentation.py

tfaccel/data/digit_scenes.py makes the pictures and masks from digits that tfaccel contains, so it
needs no data. For your own, use `--config.data.root=DIR`. The folders `train/images` and
`train/masks` must have equal paths below them, and so must `test/images` and `test/masks`.

Result without trained weights: a mean IoU of 0.42 and a loss of 1.07 on the test pictures, and 0.70
and 0.92 on the training pictures, after 20 min on 2 CPU cores that other programs used too
(2026-11-30). 240 pictures are few for such a network, so it knows the digits that it has seen
better than new ones. Begin from weights of EfficientNetV2-B0 with `--config.model.weights=FILE`.
"""

import ml_collections

from tfaccel.config import default_config, is_smoke
from tfaccel.data.digit_scenes import NUM_CLASSES, ensure_digit_scenes


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` gives a single epoch."""
    config = default_config()
    config.data.root = str(ensure_digit_scenes())
    config.data.source = "pairs"
    config.data.targets = "mask"
    config.data.train = "train/images"
    config.data.train_targets = "train/masks"
    config.data.test = "test/images"
    config.data.test_targets = "test/masks"
    config.data.image_size = (64, 64)
    # Pixels are 0..1 or, with --config.model.weights, as these weights were trained.
    config.data.mean = config.data.std = None
    config.data.global_batch_size = 16
    config.train_images.shift_pixels = 4  # of image and mask alike
    config.model.name = "unet_efficientnetv2b0"
    config.model.num_outputs = NUM_CLASSES
    config.train.loss = "cross_entropy_dice"
    config.train.epochs = 1 if is_smoke(size) else 60
    config.train.optimizer = "adamw"
    config.train.learning_rate = 1e-3
    config.train.warmup_epochs = config.train.get_ref("epochs").to_float() * 0.1
    config.train.decay = "cosine"
    config.train.monitor = "val_mean_iou"
    return config
