"""Your own photographs: a ResNet-50 for images in one folder per class.

    uv run tfaccel train --config=configs/photos.py --config.data.root=photos

The folder `photos` holds `training` and `testing`, and each holds one folder of images per class.
`:smoke` trains a small network for one epoch on the digits that tfaccel contains, so it needs no
data.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, is_smoke


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` gives a small network and one epoch on the digits."""
    config = default_config()
    config.data.root = None if is_smoke(size) else "photos"
    config.data.image_size = (32, 32) if is_smoke(size) else (224, 224)
    # Pixels are 0..1 or, with --config.model.weights, as these weights were trained.
    config.data.mean = config.data.std = None
    config.data.global_batch_size = 64
    config.train_images.update(preset_fields("imagenet"))
    config.test_images.update(preset_fields("imagenet_eval"))

    config.model.name = "mnist_cnn" if is_smoke(size) else "resnet50"

    config.train.epochs = 1 if is_smoke(size) else 30
    config.train.optimizer = "adamw"
    config.train.learning_rate = 1e-3
    # get_ref makes a reference, so that the warm-up follows --config.train.epochs.
    config.train.warmup_epochs = config.train.get_ref("epochs").to_float() * 0.1
    config.train.decay = "cosine"
    return config
