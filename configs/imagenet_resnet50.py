"""ImageNet from JPEG files of any size: ResNet-50, mixed_float16, XLA.

    uv run --extra gpu tfaccel train --config=configs/imagenet_resnet50.py \\
        --config.data.root=/data/imagenet

The root holds `train/<wnid>/*.JPEG` (1,281,167 images) and `val/<wnid>/*.JPEG` (50,000). Crops and
epochs are those of He et al., "Deep Residual Learning for Image Recognition" (2016), and of
torchvision; the rest of the recipe is that of Goyal et al., "Accurate, Large Minibatch SGD" (2017,
arXiv:1706.02677), in Keras's terms:

- Rate: 0.1 for a batch of 256, in proportion for any other, up to 8,192. 5 epochs of warm-up, step
  by step, then a tenth of it after 30, 60 and 80 of 90 epochs.
- Weight decay: 1e-4 of the weights, added to the gradient. Momentum 0.9 makes 1 / (1 - 0.9) = 10
  times as much of it in the end; Keras takes it off the weights, past the momentum: 1e-3, times the
  rate, in each step. Not of batch norm's scale and offset, as theirs; not of biases either.
- Momentum 0.9. They write that Nesterov's and the usual one do equally well.
- Unlike theirs: Keras's ResNet-50 has a bias in each convolution, its strides are in the first
  convolution of a block, and batch norm's scale at the end of a block starts from 1, not 0.

Nobody has trained it to the end with this version, so there is no accuracy to tell.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, is_smoke


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
