"""Weights with PyTorch's and KerasHub's names, compared with those libraries' own formulas."""

import json
import math
import re

import keras
import ml_dtypes
import numpy as np
import pytest

from tfaccel import UserError
from tfaccel.config import VitConfig
from tfaccel.experiment import models
from tfaccel.experiment.models import resnet_v1_5, safetensors_file
from tfaccel.experiment.models.translated import units_of
from tfaccel.experiment.models.weights import begin_from

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


@pytest.fixture(autouse=True)
def each_line(caplog):
    caplog.set_level("INFO", "tfaccel")


def write(path, tensors):
    """Writes a .safetensors file as its format's page describes it."""
    header, values = {"__metadata__": {"format": "pt"}}, b""
    for name, each in tensors.items():
        ends = [len(values), len(values) + each.nbytes]
        header[name] = {
            "dtype": NAMES[str(each.dtype)],
            "shape": list(each.shape),
            "data_offsets": ends,
        }
        values += each.tobytes()
    return write_raw(path, header, values)


def write_raw(path, header, values=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
    return str(path)


# ----- PyTorch's layers in NumPy, [batch, channels, height, width] float64. They make the state.


class State(dict):
    """A network's numbers by PyTorch's names. They are drawn when the network first uses them."""

    def __init__(self, seed=0):
        super().__init__()
        self.random = np.random.default_rng(seed)

    def draw(self, name, shape, low=None, high=None):
        if name not in self:
            if low is None:
                deviation = math.sqrt(2 / max(1, math.prod(shape[1:])))
                value = self.random.normal(0, deviation, shape)
            else:
                value = self.random.uniform(low, high, shape)
            self[name] = value.astype(np.float32)
        return self[name].astype(np.float64)

    def conv(self, x, name, channels, size, stride=1, pad=0, groups=1, bias=False):
        kernel = self.draw(f"{name}.weight", (channels, x.shape[1] // groups, size, size))
        x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))
        windows = windows[:, :, ::stride, ::stride]
        if groups > 1:  # depthwise
            y = np.einsum("nchwij,cij->nchw", windows, kernel[:, 0])
        else:
            y = np.einsum("nchwij,ocij->nohw", windows, kernel, optimize=True)
        if bias:
            y = y + self.draw(f"{name}.bias", (channels,), -0.1, 0.1)[:, None, None]
        return y

    def batch_norm(self, x, name):
        channels = x.shape[1]
        weight = self.draw(f"{name}.weight", (channels,), 0.5, 1.5)
        bias = self.draw(f"{name}.bias", (channels,), -0.2, 0.2)
        mean = self.draw(f"{name}.running_mean", (channels,), -0.2, 0.2)
        variance = self.draw(f"{name}.running_var", (channels,), 0.5, 1.5)
        self[f"{name}.num_batches_tracked"] = np.array(3, np.int64)
        scale = (weight / np.sqrt(variance + 1e-5))[:, None, None]
        return (x - mean[:, None, None]) * scale + bias[:, None, None]

    def linear(self, x, name, width):
        weight = self.draw(f"{name}.weight", (width, x.shape[-1]))
        return x @ weight.T + self.draw(f"{name}.bias", (width,), -0.1, 0.1)

    def layer_norm(self, x, name):  # of the last axis
        weight = self.draw(f"{name}.weight", x.shape[-1:], 0.5, 1.5)
        bias = self.draw(f"{name}.bias", x.shape[-1:], -0.2, 0.2)
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight + bias


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def max_pool(x, size, stride, pad=0):
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))
    return windows[:, :, ::stride, ::stride].max((-2, -1))


def resnet50(state, x, classes=3, depths=(3, 4, 6, 3)):
    x = relu(state.batch_norm(state.conv(x, "conv1", 64, 7, 2, 3), "bn1"))
    x = max_pool(x, 3, 2, 1)
    for stage, blocks in enumerate(depths, 1):
        for block in range(blocks):
            name, channels = f"layer{stage}.{block}", 32 * 2**stage
            stride = 2 if stage > 1 and block == 0 else 1
            y = relu(state.batch_norm(state.conv(x, f"{name}.conv1", channels, 1), f"{name}.bn1"))
            y = state.conv(y, f"{name}.conv2", channels, 3, stride, 1)
            y = relu(state.batch_norm(y, f"{name}.bn2"))
            y = state.batch_norm(state.conv(y, f"{name}.conv3", 4 * channels, 1), f"{name}.bn3")
            if block == 0:
                x = state.conv(x, f"{name}.downsample.0", 4 * channels, 1, stride)
                x = state.batch_norm(x, f"{name}.downsample.1")
            x = relu(x + y)
    return state.linear(x.mean((2, 3)), "fc", classes)


def vgg16(state, x, classes=3):
    step = 0
    for count, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            x = relu(state.conv(x, f"features.{step}", channels, 3, 1, 1, bias=True))
            step += 2
        x, step = max_pool(x, 2, 2), step + 1
    state.draw("classifier.6.weight", (classes, 8))  # of no use here
    return x.mean((2, 3))


def densenet121(state, x, classes=3):
    x = state.batch_norm(state.conv(x, "features.conv0", 64, 7, 2, 3), "features.norm0")
    x = max_pool(relu(x), 3, 2, 1)
    for block, count in enumerate((6, 12, 24, 16), 1):
        for layer in range(1, count + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            y = state.conv(relu(state.batch_norm(x, f"{name}.norm1")), f"{name}.conv1", 128, 1)
            y = relu(state.batch_norm(y, f"{name}.norm2"))
            x = np.concatenate([x, state.conv(y, f"{name}.conv2", 32, 3, 1, 1)], 1)
        if block < 4:
            name = f"features.transition{block}"
            x = relu(state.batch_norm(x, f"{name}.norm"))
            x = state.conv(x, f"{name}.conv", x.shape[1] // 2, 1)
            x = x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).mean((3, 5))
    x = relu(state.batch_norm(x, "features.norm5"))
    return state.linear(x.mean((2, 3)), "classifier", classes)


TIMM = {
    "stem": ("stem.0", "stem.1"),
    "down": lambda stage: (f"stages.{stage}.downsample.0", f"stages.{stage}.downsample.1"),
    "block": "stages.{}.blocks.{}.",
    "parts": ("conv_dw", "norm", "mlp.fc1", "mlp.fc2", "gamma"),
    "head": ("head.norm", "head.fc"),
}
VISION = {
    "stem": ("features.0.0", "features.0.1"),
    "down": lambda stage: (f"features.{2 * stage}.0", f"features.{2 * stage}.1"),
    "block": "features.{}.{}.",
    "parts": ("block.0", "block.2", "block.3", "block.5", "layer_scale"),
    "head": ("classifier.0", "classifier.2"),
}


def convnext_tiny(state, x, classes=3, names=TIMM):
    def channels_last_norm(x, name):
        return state.layer_norm(x.transpose(0, 2, 3, 1), name).transpose(0, 3, 1, 2)

    for stage, (depth, width) in enumerate(((3, 96), (3, 192), (9, 384), (3, 768))):
        if stage == 0:
            x = state.conv(x, names["stem"][0], width, 4, 4, bias=True)
            x = channels_last_norm(x, names["stem"][1])
        else:
            norm, conv = names["down"](stage)
            x = state.conv(channels_last_norm(x, norm), conv, width, 2, 2, bias=True)
        for block in range(depth):
            before = names["block"].format(stage if names is TIMM else 2 * stage + 1, block)
            conv, norm, one, two, scale = (before + each for each in names["parts"])
            y = state.conv(x, conv, width, 7, 1, 3, groups=width, bias=True)
            y = state.layer_norm(y.transpose(0, 2, 3, 1), norm)
            y = state.linear(gelu(state.linear(y, one, 4 * width)), two, width)
            shape = (width,) if names is TIMM else (width, 1, 1)
            y = y * state.draw(scale, shape, 0.2, 1).reshape(-1)
            x = x + y.transpose(0, 3, 1, 2)
    x = state.layer_norm(x.mean((2, 3)), names["head"][0])
    return state.linear(x, names["head"][1], classes)


def vit(state, x, classes=3, *, of_timm=True, width=16, heads=2, depth=2, token=True, side=4):
    batch = x.shape[0]
    names = ("patch_embed.proj", "cls_token", "pos_embed", "norm", "head")
    if not of_timm:
        names = ("conv_proj", "class_token", "encoder.pos_embedding", "encoder.ln", "heads.head")
    x = state.conv(x, names[0], width, side, side, bias=True)
    x = x.reshape(batch, width, -1).transpose(0, 2, 1)
    first = np.broadcast_to(state.draw(names[1], (1, 1, width)), (batch, 1, width))
    x = np.concatenate([first, x], 1)
    x = x + state.draw(names[2], (1, x.shape[1], width))
    x = x if token else x[:, 1:]
    for block in range(depth):
        if of_timm:
            parts = ("norm1", "norm2", "mlp.fc1", "mlp.fc2", "attn.proj")
            before, qkv = f"blocks.{block}", ("attn.qkv.weight", "attn.qkv.bias")
        else:
            parts = ("ln_1", "ln_2", "mlp.0", "mlp.3", "self_attention.out_proj")
            before = f"encoder.layers.encoder_layer_{block}"
            qkv = ("self_attention.in_proj_weight", "self_attention.in_proj_bias")
        norm1, norm2, one, two, out = (f"{before}.{each}" for each in parts)
        weight = state.draw(f"{before}.{qkv[0]}", (3 * width, width))
        y = state.layer_norm(x, norm1) @ weight.T
        y = y + state.draw(f"{before}.{qkv[1]}", (3 * width,), -0.5, 0.5)
        q, k, v = y.reshape(batch, -1, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads))
        y = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + state.linear(y.transpose(0, 2, 1, 3).reshape(x.shape), out, width)
        y = gelu(state.linear(state.layer_norm(x, norm2), one, 4 * width))
        x = x + state.linear(y, two, width)
    x = state.layer_norm(x, names[3])
    return state.linear(x[:, 0] if token else x.mean(1), names[4], classes)


SMALL_VIT = {"patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_width": 64}


def pictures(size=32):
    """[2, 3, size, size], as PyTorch has them."""
    return np.random.default_rng(1).normal(size=(2, 3, size, size))


def model_of(name, *, size=32, classes=3, **settings):
    if name.startswith("vit"):
        settings = {"vit": VitConfig(**{**SMALL_VIT, **settings})}
    return models.build(name, image_shape=(size, size, 3), num_outputs=classes, **settings)


def answers(model, images):
    return keras.ops.convert_to_numpy(model(images.transpose(0, 2, 3, 1).astype(np.float32)))


CASES = [
    ("resnet50_v1_5", resnet50, {"depths": (2, 1, 1, 1)}),
    pytest.param("resnet50_v1_5", resnet50, {}, marks=pytest.mark.slow),
    pytest.param("vgg16", vgg16, {}, marks=pytest.mark.slow),
    pytest.param("densenet121", densenet121, {}, marks=pytest.mark.slow),
    pytest.param("convnexttiny", convnext_tiny, {}, marks=pytest.mark.slow),
    pytest.param("convnexttiny", convnext_tiny, {"names": VISION}, marks=pytest.mark.slow),
    ("vit_tiny", vit, {}),
    ("vit_tiny", vit, {"of_timm": False}),
]


@pytest.mark.parametrize(("name", "network", "settings"), CASES)
def test_a_safetensors_file_gives_the_answers_of_pytorchs_network(
    tmp_path, caplog, monkeypatch, name, network, settings
):
    if "depths" in settings:
        monkeypatch.setitem(resnet_v1_5.BLOCKS, name, settings["depths"])
    state, images = State(), pictures()
    truth = network(state, images, **settings)
    model = model_of(name, **({"pooling": "class_token"} if name.startswith("vit") else {}))
    begin_from(write(tmp_path / "model.safetensors", state), model)
    if network is vgg16:  # its three dense layers have no place here
        model = keras.Model(model.input, model.layers[-2].output)
        assert "not in that file, so they start from random values: logits" in caplog.text
    else:
        assert "random values" not in caplog.text
    got = answers(model, images)
    np.testing.assert_allclose(got, truth, rtol=0, atol=2e-4 * np.abs(truth).max())


@pytest.mark.parametrize(("name", "network", "settings"), CASES[:5])
def test_a_network_for_masks_takes_the_body(tmp_path, caplog, monkeypatch, name, network, settings):
    if "depths" in settings:
        monkeypatch.setitem(resnet_v1_5.BLOCKS, name, settings["depths"])
    state = State()
    network(state, pictures(), **settings)
    file = write(tmp_path / "model.safetensors", state)
    whole, masks = model_of(name), model_of(f"unet_{name}")
    for each in (whole, masks):
        begin_from(file, each)
    theirs = {each.name: each for each in units_of(whole)}
    body = [each for each in units_of(masks) if not each.name.startswith("decoder_")][:-1]
    assert [each.name for each in body] == [each.name for each in units_of(whole)][:-1]
    for each in body:
        for one, other in zip(each.weights, theirs[each.name].weights, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=each.name)
    assert "so they start from random values: decoder_" in caplog.text


def test_a_vision_transformer_without_class_token_takes_all_but_it_and_the_head(tmp_path, caplog):
    state, images = State(), pictures()
    vit(state, images)
    model = model_of("vit_tiny")
    begin_from(write(tmp_path / "model.safetensors", state), model)
    head = model.get_layer("logits")
    assert not head.kernel.numpy().any()  # as it was initialised
    head.set_weights([state["head.weight"].T, state["head.bias"]])
    np.testing.assert_allclose(answers(model, images), vit(state, images, token=False), atol=1e-4)
    assert "left out the class token" in caplog.text
    assert "so they start from random values: logits" in caplog.text


def test_positions_are_resized_for_images_of_another_size(tmp_path, caplog):
    state = State()
    vit(state, pictures(32))  # 8 x 8 patches
    model = model_of("vit_tiny", size=16, pooling="class_token")
    state["pos_embed"][:, 1:] = 2.5  # equal positions stay equal
    begin_from(write(tmp_path / "model.safetensors", state), model)
    bias = model.get_layer("tokens").weights[1].numpy()
    truth = 2.5 + np.tile(state["patch_embed.proj.bias"], (16, 1))
    np.testing.assert_allclose(bias[1:], truth, atol=1e-5)
    first = state["pos_embed"][0, 0] + state["cls_token"][0, 0]
    np.testing.assert_allclose(bias[0], first, atol=1e-6)
    assert "resized the positions of 64 patches to 16" in caplog.text


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_of_other_classes_and_half_precision_the_body_is_taken(tmp_path, caplog, dtype):
    state = State()
    vit(state, pictures(), classes=5)
    halves = {name: each.astype(dtype) for name, each in state.items()}
    model = model_of("vit_tiny", pooling="class_token")
    begin_from(write(tmp_path / "model.safetensors", halves), model)
    kernel = model.get_layer("block2_mlp_hidden").kernel.numpy()
    np.testing.assert_array_equal(kernel, halves["blocks.1.mlp.fc1.weight"].T.astype(np.float32))
    assert "with other shapes in that file, so they start from random values: logits" in caplog.text
    num_parts = 3 + 2 * 8  # tokens, norm and head; an attention has four parts
    assert f"model: {num_parts - 1} of {num_parts} layers from" in caplog.text


def without(state, name):
    return {each: value for each, value in state.items() if each != name}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("vit_tiny", lambda s: without(s, "blocks.1.norm2.bias"), "block2_mlp_norm is not there"),
        (
            "vit_tiny",
            lambda s: s | {"blocks.2.norm1.weight": np.ones(16, np.float32)},
            "the file also has blocks.2.norm1.weight",
        ),
        (
            "vit_tiny",
            lambda s: s | {"norm.weight": np.ones(8, np.float32)},
            "of its layers, norm has other shapes",
        ),
        ("mobilenetv2", lambda s: s, "known for ResNet v1.5, VGG, DenseNet, ConvNeXt and Vision"),
        ("resnet50", lambda s: s, "use model.name=resnet50_v1_5"),
    ],
)
def test_another_architecture_is_refused_and_changes_nothing(tmp_path, name, change, words):
    state = State()
    vit(state, pictures())
    if name == "vit_tiny":
        model = model_of(name, pooling="class_token")
    else:  # whatever its layers are
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)], name=name)
    before = model.get_weights()
    with pytest.raises(UserError) as error:
        begin_from(write(tmp_path / "model.safetensors", change(dict(state))), model)
    assert words in str(error.value)
    for mine, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)


# ----- The file itself.

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BYTES = np.arange(2, dtype=np.float32).tobytes()


def test_tensors_are_read_by_name_with_their_dtype_and_shape(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(7, np.int64),
        "c": np.arange(3).astype(ml_dtypes.bfloat16),  # odd bytes, so that others are not aligned
        "d": np.zeros((0, 4), np.float16),
        "e": np.linspace(0, 1, 5, dtype=np.float32),
    }
    file = tmp_path / "a.safetensors"
    write(file, tensors)
    read = safetensors_file.read(file)
    assert list(read) == list(tensors)
    for name, each in tensors.items():
        assert read[name].dtype == each.dtype
        np.testing.assert_array_equal(read[name], each)
    assert safetensors_file.read(_written(tmp_path, {})) == {}


def _written(tmp_path, header, values=b""):
    write_raw(tmp_path / "b.safetensors", header, values)
    return tmp_path / "b.safetensors"


@pytest.mark.parametrize(
    ("header", "values", "words"),
    [
        (b"", b"", "does not begin with the length"),
        (b"[]", b"", "not a JSON object"),
        (b'{"a": 1, "a": 2}', b"", "a name twice"),
        ({"a": ONE}, BYTES[:-1], "describes 8 bytes of values, and 7 bytes follow"),
        ({"a": ONE}, BYTES + b"x", "describes 8 bytes of values, and 9 bytes follow"),
        ({"a": ONE | {"shape": [3]}}, BYTES, "a of shape [3] has 8 bytes"),
        ({"a": ONE | {"shape": [-2]}}, BYTES, "no shape and place of a"),
        ({"a": ONE | {"shape": [True, 2]}}, BYTES, "no shape and place of a"),
        ({"a": ONE | {"dtype": "F8_E4M3"}}, BYTES, "a has dtype F8_E4M3"),
        ({"a": ONE, "b": ONE}, BYTES, "a gap or share bytes"),
        ({"a": ONE | {"data_offsets": [4, 12]}}, BYTES + b"1234", "a gap or share bytes"),
        ({"a": [1]}, BYTES, "no shape and place of a"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, header, values, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        safetensors_file.read(_written(tmp_path, header, values))


def test_a_file_that_is_no_safetensors_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"PK" * 20)
    with pytest.raises(UserError, match=r"cannot be read for vit_tiny .it does not begin"):
        begin_from(str(tmp_path / "a.safetensors"), model_of("vit_tiny"))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "pytorch_model.bin", "A.PTH"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"pickle of PyTorch.*safetensors\.torch\.save_file"):
        begin_from(str(tmp_path / name), None)


# ----- KerasHub.


@pytest.fixture(scope="module")
def keras_hub():
    return pytest.importorskip("keras_hub")


def test_a_keras_hub_vision_transformer_gives_its_answers(tmp_path, keras_hub):
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.ViTBackbone((16, 16, 3), 4, 2, 2, 16, 64)
    for each in backbone.weights:
        each.assign(each + keras.random.normal(each.shape, stddev=0.3))
    backbone.save_weights(tmp_path / "model.weights.h5")
    model = model_of("vit_tiny", size=16, pooling="class_token")
    begin_from(str(tmp_path / "model.weights.h5"), model)
    images = pictures(16)
    norm = keras.Model(model.input, model.get_layer("pool").output)
    truth = answers(backbone, images)[:, 0]
    np.testing.assert_allclose(answers(norm, images), truth, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_keras_hub_resnet_gives_its_answers(tmp_path, keras_hub):
    keras.utils.set_random_seed(0)
    sizes = ([64], [7], [64, 128, 256, 512], [3, 4, 6, 3], [1, 2, 2, 2], "bottleneck_block")
    backbone = keras_hub.models.ResNetBackbone(*sizes, image_shape=(64, 64, 3))
    for each in backbone.weights:
        each.assign(each * keras.random.uniform(each.shape, 0.5, 1.5))
    backbone.save_weights(tmp_path / "model.weights.h5")
    model = model_of("resnet50_v1_5", size=64)
    begin_from(str(tmp_path / "model.weights.h5"), model)
    images = pictures(64)
    pooled = keras.Model(model.input, model.get_layer("avg_pool").output)
    truth = answers(backbone, images).mean((1, 2))
    np.testing.assert_allclose(answers(pooled, images), truth, atol=1e-4 * np.abs(truth).max())


def test_a_keras_hub_file_of_another_depth_is_refused(tmp_path, keras_hub):
    backbone = keras_hub.models.ViTBackbone((16, 16, 3), 4, 3, 2, 16, 64)
    backbone.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(UserError, match="the file also has encoder_block_2/"):
        begin_from(str(tmp_path / "model.weights.h5"), model_of("vit_tiny", size=16))
