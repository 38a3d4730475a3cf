"""ImageNet from JPEG files of any size: ResNet-50, mixed_float16, XLA.

    uv run --extra gpu tfaccel train --config=configs/imagenet_resnet50.py \\
        --config.data.root=/data/imagenet

The root holds `train/<wnid>/*.JPEG` (1,281,167 images) and `val/<wnid>/*.JPEG` (50,000). Crops and
epochs follow He et al., "Deep Residual Learning for Image Recognition" (2016), and torchvision. The
rest of the recipe follows Goyal et al., "Accurate, Large Minibatch SGD" (2017, arXiv:1706.02677),
in the terms of Keras:

- Learning rate: 0.1 for a batch of 256, and in proportion for any other batch up to 8,192. It rises
  in each step of a warm-up of 5 epochs. After 30, 60 and 80 of 90 epochs it is divided by 10.
- Weight decay: Goyal et al. add 1e-4 times the weights to the gradient. Momentum 0.9 makes that
  1 / (1 - 0.9) = 10 times as large in the end. Keras subtracts the decay from the weights, without
  momentum, so it is 1e-3 times the rate in each step. Like theirs, it leaves out batch norm's scale
  and offset. Unlike theirs, it also leaves out biases.
- Momentum: 0.9. Goyal et al. write that Nesterov and standard momentum perform equally well.
- Network: unlike theirs, Keras's ResNet-50 has a bias in each convolution. Its strides are in the
  first convolution of a block. Batch norm's scale at the end of a block starts from 1, not 0.

Three recipes from "ResNet strikes back" (Wightman et al. 2021, arXiv:2110.00476, table 2) are sizes
of this file, which come after a colon:

    uv run --extra gpu tfaccel train --config=configs/imagenet_resnet50.py:a3 \\
        --config.data.root=/data/imagenet

- `a1`: 600 epochs, RandAugment of magnitude 7, mixup 0.2, weight decay 0.01.
- `a2`: 300 epochs, RandAugment of magnitude 7, mixup 0.1, weight decay 0.02.
- `a3`: 100 epochs at 160 x 160 pixels, RandAugment of magnitude 6, mixup 0.1, weight decay 0.02.

All three have LAMB for batches of 2,048 with a rate of 5e-3 (8e-3 in `a3`), 5 epochs of warm-up, a
cosine to 0, cutmix 1, and the binary cross entropy of each class, where a class counts as present
if it is more than a fifth of the mixed image. 2,048 images need several GPUs, or
`--config.step.accumulation_steps=8`. What differs from theirs:

- Repeated augmentation (`a1`, `a2`) and stochastic depth in a ResNet (0.05 in `a1`, `a2`) do not
  exist in tfaccel. `a3` has neither of them in the paper.
- `a1` has a label smoothing of 0.1 there. Here it has none, because each target is 0 or 1.
- `a3` is tested at 224 pixels there, and here at the 160 of the training.
- Keras's LAMB subtracts the weight decay by itself, at the learning rate. timm's adds it to the
  update, whose norm LAMB then scales.
- RandAugment and windows interpolate linearly here, and there by a cubic too.

No version has been trained to the end, so no accuracy is known. (The paper has 80.4%, 79.8% and
78.1% for its own `a1`, `a2` and `a3`.)
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, sized

SIZES = ("goyal", "a1", "a2", "a3")


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` gives one epoch of small batches, which a CPU can run."""
    recipe, is_smoke = sized(size, SIZES)
    config = default_config()
    # The smoke size avoids XLA, which takes 36 s to compile this model on 2 CPU cores. Float16 is
    # slow without XLA.
    config.runtime.precision = "float32" if is_smoke else "mixed_float16"
    config.runtime.xla = not is_smoke
    config.data.root = "data/imagenet"
    config.data.train = "train"
    config.data.test = "val"
    side = 32 if is_smoke else 160 if recipe == "a3" else 224
    config.data.image_size = (side, side)
    config.data.mean = (0.485, 0.456, 0.406)  # the mean of the training images
    config.data.std = (0.229, 0.224, 0.225)
    config.model.name = "resnet50"
    if recipe == "goyal":
        _follow_goyal(config)
    else:
        _strike_back(config, recipe)
    if is_smoke:
        config.data.global_batch_size = 8
        config.train.epochs = 1
        config.train.warmup_epochs = 1
    return config


def _follow_goyal(config: ml_collections.ConfigDict) -> None:
    config.data.global_batch_size = 256
    config.train_images.update(preset_fields("imagenet"))
    config.test_images.update(preset_fields("imagenet_eval"))
    config.train.epochs = 90
    config.train.optimizer = "sgd"
    config.train.learning_rate = 0.1
    config.train.base_batch_size = 256
    config.train.warmup_epochs = 5
    config.train.decay = "step"
    config.train.decay_epochs = (30, 60, 80)
    config.train.decay_factor = 0.1
    config.train.momentum = 0.9
    config.train.weight_decay = 10 * 1e-4


def _strike_back(config: ml_collections.ConfigDict, recipe: str) -> None:
    config.data.global_batch_size = 2048
    config.train_images.update(preset_fields(f"resnet_{recipe}"))
    config.test_images.update(preset_fields("resnet_eval"))
    config.train.epochs = {"a1": 600, "a2": 300, "a3": 100}[recipe]
    config.train.optimizer = "lamb"
    config.train.learning_rate = 8e-3 if recipe == "a3" else 5e-3
    config.train.warmup_epochs = 5
    config.train.decay = "cosine"
    config.train.weight_decay = 0.01 if recipe == "a1" else 0.02
    config.train.loss = "binary_cross_entropy"
    config.train.bce_target_threshold = 0.2
    config.step.mixup_alpha = 0.2 if recipe == "a1" else 0.1
    config.step.cutmix_alpha = 1.0
