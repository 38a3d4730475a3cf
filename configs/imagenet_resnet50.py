"""ImageNet from JPEG files of any size: ResNet-50, mixed_float16, XLA.

    uv run --extra gpu tfaccel train --config=configs/imagenet_resnet50.py \\
        --config.data.root=/data/imagenet

The root holds `train/<wnid>/*.JPEG` (1,281,167 images) and `val/<wnid>/*.JPEG` (50,000). Crops and
epochs are those of He et al., "Deep Residual Learning for Image Recognition" (2016), and of
torchvision; the learning rate is constant, so the accuracy is not theirs.
"""

import ml_collections

from tfaccel.config import default_config, is_smoke
from tfaccel.presets import preset_fields


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` for an epoch of small batches, so that a CPU can run it."""
    config = default_config()
    # On 2 CPU cores XLA compiles this model in 36 s, and without XLA float16 is slow.
    config.runtime.precision = "float32" if is_smoke(size) else "mixed_float16"
    config.runtime.xla = not is_smoke(size)
    config.data.root = "data/imagenet"
    config.data.train = "train"
    config.data.test = "val"
    config.data.image_size = (32, 32) if is_smoke(size) else (224, 224)
    config.data.mean = (0.485, 0.456, 0.406)  # of the training images
    config.data.std = (0.229, 0.224, 0.225)
    config.data.global_batch_size = 8 if is_smoke(size) else 256
    config.train_images.update(preset_fields("imagenet"))
    config.test_images.update(preset_fields("imagenet_eval"))
    config.model.name = "resnet50"
    config.train.epochs = 1 if is_smoke(size) else 90
    config.train.optimizer = "adamw"
    config.train.learning_rate = 1e-3 * config.data.global_batch_size / 256
    return config
