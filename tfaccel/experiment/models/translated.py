"""Weights of networks that other libraries name in their own way.

Takes a model and a file's arrays by name; gives what each layer of the model takes.

    tensors = Tensors(safetensors_file.read(path))
    translated(model, tensors)          # {"conv1_conv": [kernel], "conv1_bn": [gamma, ...], ...}

Known are torchvision's and timm's names (`.safetensors`) of the networks whose functions are the
same here: ResNet v1.5, VGG, DenseNet, ConvNeXt and Vision Transformers; and the names of KerasHub's
presets (`model.weights.h5`) of ResNet and Vision Transformers.
"""

import logging
import math
import pathlib
import re
from collections.abc import Callable, Mapping

import h5py
import keras
import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.config.segmentation import backbone_name, is_of_decoder

log = logging.getLogger("tfaccel")

HEAD = "logits"  # the layer of every model here that gives the classes
# A classifier of another library, numbers that no model here has, and those that count batches.
_HEADS = re.compile(r"(fc|head|heads|classifier|pre_logits)\.|.*num_batches_tracked$")

_VIT_PART = re.compile(r".*vi_t_(encoder_block(?:_\d+)?/.+|encoder/.+|patching_and_embedding.*)")

Arrays = list[np.ndarray]


class Tensors(Mapping):
    """A file's arrays by name. It notes which of them were taken."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        """Takes arrays in the order and layout of the file."""
        self._arrays, self._taken = arrays, set()

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns an array and notes its name; KeyError if there is none."""
        value = self._arrays[name]
        self._taken.add(name)
        return value

    def __iter__(self):
        """Yields the names."""
        return iter(self._arrays)

    def __len__(self):
        """Returns the number of arrays."""
        return len(self._arrays)

    def first(self, *prefixes: str) -> str:
        """Returns the first prefix that an array's name begins with, or the last one."""
        return next((each for each in prefixes if any(_below(each, self._arrays))), prefixes[-1])

    @property
    def left(self) -> list[str]:
        """The names that were not taken."""
        return [each for each in self._arrays if each not in self._taken]


def _below(prefix: str, names) -> list[str]:
    return [each for each in names if each == prefix or each.startswith(f"{prefix}.")]


def is_head(name: str) -> bool:
    """Returns whether an array belongs to another library's classifier, or only counts batches."""
    return _HEADS.match(name) is not None


def units_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that take weights as one: leaves, and attentions with all they have."""
    units = []
    for each in model.layers:
        units += units_of(each) if isinstance(each, keras.Model) else [each] if each.weights else []
    return units


def translated(model: keras.Model, tensors: Tensors) -> dict[str, Arrays]:
    """Returns the weights of the model's layers, by the layer's name.

    A layer that the file does not have is left out. Shapes are not compared.

    Raises:
      UserError: no names are known for this model.
    """
    family = _family(backbone_name(model.name), tensors)
    found = {}
    for layer in units_of(model):
        if is_of_decoder(layer.name):  # no other library has it
            continue
        try:
            found[layer.name] = family(layer, tensors, model)
        except KeyError:
            continue
    return found


def _family(name: str, tensors: Tensors) -> Callable[..., Arrays]:
    of_keras_hub = is_keras_hub(tensors)
    if re.fullmatch(r"resnet(50|101|152)", name):
        raise UserError(
            f"model.weights has the names of ResNet v1.5, which halves images in 3x3 convolutions; "
            f"{name} of keras.applications does so in 1x1 ones, so these weights do not suit it; "
            f"use model.name={name}_v1_5"
        )
    for pattern, of_torch, of_hub in _FAMILIES:
        family = of_hub if of_keras_hub else of_torch
        if re.fullmatch(pattern, name) and family is not None:
            return family
    kind = "KerasHub" if of_keras_hub else "torchvision and timm"
    known = "ResNet v1.5 and Vision Transformers"
    if not of_keras_hub:
        known = "ResNet v1.5, VGG, DenseNet, ConvNeXt and Vision Transformers"
    raise UserError(
        f"model.weights has names of {kind}, which are known for {known}, but not for {name}; use "
        "one of these models, or a file of Keras"
    )


# PyTorch: kernels are [out, in, height, width] and [out, in].


def _torch(layer: keras.layers.Layer, prefix: str, tensors: Tensors) -> Arrays:
    """Returns the weights of a convolution, dense layer, norm or scale at a prefix."""
    if type(layer).__name__ == "LayerScale":
        return [tensors[prefix].reshape(-1)]
    names = {each.name for each in layer.weights}
    kernel = tensors[f"{prefix}.weight"]
    arrays = [kernel.transpose(2, 3, 1, 0) if kernel.ndim == 4 else kernel.T]
    if names & {"bias", "beta"}:
        arrays.append(tensors[f"{prefix}.bias"])
    elif f"{prefix}.bias" in tensors:
        raise KeyError(f"{layer.name} has no bias")
    if "moving_mean" in names:
        arrays += [tensors[f"{prefix}.running_mean"], tensors[f"{prefix}.running_var"]]
    return arrays


def _resnet(layer, tensors: Tensors, _) -> Arrays:
    part = re.fullmatch(r"conv(\d+)_block(\d+)_(\d)_(conv|bn)", layer.name)
    if part is None:
        return _torch(
            layer, {"conv1_conv": "conv1", "conv1_bn": "bn1", HEAD: "fc"}[layer.name], tensors
        )
    stage, block, number, kind = part.groups()
    own = f"{kind}{number}"
    if number == "0":
        own = "downsample.0" if kind == "conv" else "downsample.1"
    return _torch(layer, f"layer{int(stage) - 1}.{int(block) - 1}.{own}", tensors)


def _vgg(layer, tensors: Tensors, model) -> Arrays:
    if layer.name == HEAD:  # torchvision has three dense layers, and no average before them
        raise KeyError(layer.name)
    steps = [  # torchvision has a layer for each ReLU
        each.name
        for layer in model.layers
        for each in ([layer, layer] if layer.weights else [layer])
        if isinstance(each, keras.layers.Conv2D | keras.layers.MaxPooling2D)
    ]
    return _torch(layer, f"features.{steps.index(layer.name)}", tensors)


def _densenet(layer, tensors: Tensors, _) -> Arrays:
    if part := re.fullmatch(r"conv(\d+)_block(\d+)_(\d)_(conv|bn)", layer.name):
        stage, block, number, kind = part.groups()
        own = {"0bn": "norm1", "1conv": "conv1", "1bn": "norm2", "2conv": "conv2"}[number + kind]
        prefix = f"features.denseblock{int(stage) - 1}.denselayer{block}.{own}"
    elif part := re.fullmatch(r"pool(\d+)_(conv|bn)", layer.name):
        own = {"bn": "norm", "conv": "conv"}[part[2]]
        prefix = f"features.transition{int(part[1]) - 1}.{own}"
    else:
        own = {"conv1_conv": "conv0", "conv1_bn": "norm0", "bn": "norm5"}
        prefix = "classifier" if layer.name == HEAD else f"features.{own[layer.name]}"
    return _torch(layer, prefix, tensors)


def _convnext(layer, tensors: Tensors, model) -> Arrays:
    """Takes timm's name or, if the file does not have it, torchvision's."""
    name = layer.name.removeprefix(f"{backbone_name(model.name)}_")
    if part := re.fullmatch(r"stage_(\d+)_block_(\d+)_(.+)", name):
        stage, block, own = int(part[1]), part[2], part[3]
        timm, vision = {
            "depthwise_conv": ("conv_dw", "block.0"),
            "layernorm": ("norm", "block.2"),
            "pointwise_conv_1": ("mlp.fc1", "block.3"),
            "pointwise_conv_2": ("mlp.fc2", "block.5"),
            "layer_scale": ("gamma", "layer_scale"),
        }[own]
        timm = f"stages.{stage}.blocks.{block}.{timm}"
        vision = f"features.{2 * stage + 1}.{block}.{vision}"
    elif part := re.fullmatch(r"downsampling_(layernorm|conv)_(\d+)", name):
        own, index = ("layernorm", "conv").index(part[1]), int(part[2])
        timm, vision = f"stages.{index + 1}.downsample.{own}", f"features.{2 * index + 2}.{own}"
    elif re.fullmatch(r"layer_normalization(_\d+)?", name):  # Keras gives it no other name
        timm, vision = "head.norm", "classifier.0"
    else:
        timm, vision = {
            "stem_conv": ("stem.0", "features.0.0"),
            "stem_layernorm": ("stem.1", "features.0.1"),
            HEAD: ("head.fc", "classifier.2"),
        }[name]
    return _torch(layer, tensors.first(timm, vision), tensors)


def _vit(layer, tensors: Tensors, model) -> Arrays:
    name = layer.name
    part = re.fullmatch(r"block(\d+)_(.+)", name)
    if name == "tokens":
        patches = tensors.first("patch_embed.proj", "conv_proj")
        token, places = "class_token", "encoder.pos_embedding"
        if patches == "patch_embed.proj":
            token, places = "cls_token", "pos_embed"
        kernel = tensors[f"{patches}.weight"].transpose(2, 3, 1, 0)
        given = (kernel, tensors[f"{patches}.bias"], tensors[places], tensors[token])
        return _tokens(layer, *given, has_token=_has_class_token(model))
    if name == HEAD:
        _check_pooling(model)
        return _torch(layer, tensors.first("head", "heads.head"), tensors)
    if part is None:
        return _torch(layer, tensors.first(*{"norm": ("norm", "encoder.ln")}[name]), tensors)
    index, own = int(part[1]) - 1, part[2]
    before = tensors.first(f"blocks.{index}", f"encoder.layers.encoder_layer_{index}")
    if own == "attention":
        return _attention(layer, tensors, before)
    prefixes = {
        "attention_norm": ("norm1", "ln_1"),
        "mlp_norm": ("norm2", "ln_2"),
        "mlp_hidden": ("mlp.fc1", "mlp.linear_1", "mlp.0"),
        "mlp": ("mlp.fc2", "mlp.linear_2", "mlp.3"),
    }[own]
    return _torch(layer, tensors.first(*(f"{before}.{each}" for each in prefixes)), tensors)


def _attention(layer, tensors: Tensors, before: str) -> Arrays:
    """Returns kernel and bias of query, key, value and output."""
    if f"{before}.attn.qkv.weight" in tensors:
        kernel, bias = (tensors[f"{before}.attn.qkv.{each}"] for each in ("weight", "bias"))
        output = f"{before}.attn.proj"
    else:
        own = f"{before}.self_attention"
        kernel, bias = (tensors[f"{own}.in_proj_{each}"] for each in ("weight", "bias"))
        output = f"{own}.out_proj"
    width, heads = kernel.shape[1], layer.num_heads
    arrays = []
    for each in range(3):  # query, key and value are one product there
        rows = slice(each * width, (each + 1) * width)
        arrays += [kernel[rows].T.reshape(width, heads, -1), bias[rows].reshape(heads, -1)]
    after = tensors[f"{output}.weight"].T.reshape(heads, -1, width)
    return [*arrays, after, tensors[f"{output}.bias"]]


def _check_pooling(model: keras.Model) -> None:
    """Raises KeyError if the head here gets a mean: it was trained on the class token."""
    if not _has_class_token(model):
        raise KeyError("the head was trained on the class token")


def _has_class_token(model: keras.Model) -> bool:
    return any(each.name == "class_token" for each in model.layers)


def _tokens(layer, kernel, bias, places, token, *, has_token: bool) -> Arrays:
    """Returns the kernel and the learned positions of a Vision Transformer's first layer.

    Args:
      layer: the layer "tokens", whose bias is [tokens, width].
      kernel: [patch_size, patch_size, channels, width].
      bias: [width], which each patch gets.
      places: [1, 1 + patches, width] positions; the first is the class token's.
      token: [1, 1, width], the class token.
      has_token: whether the model has a class token, too.
    """
    places = places.reshape(-1, places.shape[-1])
    first, body = places[:1] + token.reshape(1, -1), places[1:]
    here = layer.weights[1].shape[0] - has_token
    if here != len(body) and _is_square(here) and _is_square(len(body)):
        log.info("model: resized the positions of %d patches to %d", len(body), here)
        body = _resized(body, math.isqrt(here))
    if not has_token:
        log.info("model: left out the class token of the weights, because vit.pooling is 'mean'")
    whole = [first, body + bias] if has_token else [body + bias]
    return [kernel.reshape(-1, kernel.shape[-1]), np.concatenate(whole)]


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _resized(places: np.ndarray, side: int) -> np.ndarray:
    """Returns positions for side x side patches, by bicubic interpolation, as timm does."""
    old = math.isqrt(len(places))
    grid = np.asarray(places, np.float32).reshape(old, old, -1)
    new = keras.ops.image.resize(grid, (side, side), interpolation="bicubic", antialias=True)
    return keras.ops.convert_to_numpy(new).reshape(side * side, -1)


# KerasHub: kernels are Keras's, and only names differ.


def read_keras_hub(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    """Returns the arrays of a file of KerasHub's ResNet or ViT backbone; None for another file.

    A name is "conv1_conv.0", or for a Vision Transformer, "encoder_block_1/mlp/dense_1.0".
    """
    places = {}

    def look(place, each):
        if isinstance(each, h5py.Dataset) and "/vars/" in place:
            before, _, index = place.rpartition("/vars/")
            part = _VIT_PART.search(before)
            name = part[1] if part else str(each.parent.attrs.get("name", before))
            places[f"{name}.{index}"] = place

    with h5py.File(path, "r") as file:
        file.visititems(look)
        if not is_keras_hub(places):
            return None
        return {name: file[place][()] for name, place in places.items()}


def is_keras_hub(names) -> bool:
    """Returns whether these are names of `read_keras_hub`."""
    return any(
        re.match(r"stack\d+_block\d+_|encoder_block/|patching_and_embedding", each)
        for each in names
    )


def _hub(layer, prefix: str, tensors: Tensors) -> Arrays:
    return [tensors[f"{prefix}.{index}"] for index in range(len(layer.weights))]


def _hub_resnet(layer, tensors: Tensors, _) -> Arrays:
    part = re.fullmatch(r"conv(\d+)_block(\d+)_(.+)", layer.name)
    name = layer.name
    if part is not None:
        name = f"stack{int(part[1]) - 2}_block{int(part[2]) - 1}_{part[3]}"
    return _hub(layer, name, tensors)


def _hub_vit(layer, tensors: Tensors, model) -> Arrays:
    part = re.fullmatch(r"block(\d+)_(.+)", layer.name)
    if layer.name == "tokens":
        own = "patching_and_embedding"
        kernel, bias = (tensors[f"{own}/patch_embedding.{each}"] for each in (0, 1))
        places, token = tensors[f"{own}/position_embedding.0"], tensors[f"{own}.0"]
        return _tokens(layer, kernel, bias, places, token, has_token=_has_class_token(model))
    if part is None:
        return _hub(layer, {"norm": "encoder/layer_norm"}[layer.name], tensors)
    index, own = int(part[1]) - 1, part[2]
    block = f"encoder_block_{index}" if index else "encoder_block"
    if own == "attention":
        parts = [f"{block}/mha/{each}_dense" for each in ("query", "key", "value", "output")]
        return [tensors[f"{each}.{index}"] for each in parts for index in (0, 1)]
    names = {
        "attention_norm": "layer_norm_1",
        "mlp_norm": "layer_norm_2",
        "mlp_hidden": "mlp/dense_1",
        "mlp": "mlp/dense_2",
    }
    return _hub(layer, f"{block}/{names[own]}", tensors)


_FAMILIES = (
    (r"resnet(50|101|152)_v1_5", _resnet, _hub_resnet),
    (r"vgg(16|19)", _vgg, None),
    (r"densenet(121|169|201)", _densenet, None),
    (r"convnext_(tiny|small|base|large|xlarge)", _convnext, None),
    (r"vit_(tiny|small|base|large)", _vit, _hub_vit),
)
