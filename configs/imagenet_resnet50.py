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

This version has not been trained to the end, so no accuracy is known.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, is_smoke


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment; `:smoke` gives one epoch of small batches, which a CPU can run."""
    config = default_config()
    # The smoke size avoids XLA, which takes 36 s to compile this model on 2 CPU cores. Float16 is
    # slow without XLA.
    config.runtime.precision = "float32" if is_smoke(size) else "mixed_float16"
    config.runtime.xla = not is_smoke(size)
    config.data.root = "data/imagenet"
    config.data.train = "train"
    config.data.test = "val"
    config.data.image_size = (32, 32) if is_smoke(size) else (224, 224)
    config.data.mean = (0.485, 0.456, 0.406)  # the mean of the training images
    config.data.std = (0.229, 0.224, 0.225)
    config.data.global_batch_size = 8 if is_smoke(size) else 256
    config.train_images.update(preset_fields("imagenet"))
    config.test_images.update(preset_fields("imagenet_eval"))
    config.model.name = "resnet50"
    config.train.epochs = 1 if is_smoke(size) else 90
    config.train.optimizer = "sgd"
    config.train.learning_rate = 0.1
    config.train.base_batch_size = 256
    config.train.warmup_epochs = 1 if is_smoke(size) else 5
    config.train.decay = "step"
    config.train.decay_epochs = (30, 60, 80)
    config.train.decay_factor = 0.1
    config.train.momentum = 0.9
    config.train.weight_decay = 10 * 1e-4
    return config
