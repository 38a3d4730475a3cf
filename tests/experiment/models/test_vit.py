"""The Vision Transformer: against NumPy, its sizes, its dropout, and what of it decays."""

import keras
import numpy as np
import pytest
import scipy.special

from tfaccel import UserError
from tfaccel.config import TrainConfig, VitConfig
from tfaccel.experiment import models
from tfaccel.experiment.recipe import make_optimizer, make_schedule
from tfaccel.training.own_scaling import unscaled

SMALL = {"patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_width": 24}
SHAPE = (8, 12, 3)


def small(**settings):
    """A Vision Transformer of two narrow blocks, whose weights are no zeros."""
    keras.utils.set_random_seed(0)
    vit = VitConfig(**(SMALL | settings))
    model = models.build("vit_tiny", image_shape=SHAPE, num_outputs=5, vit=vit)
    random = np.random.default_rng(0)
    for each in model.trainable_variables:
        each.assign(each + 0.1 * random.standard_normal(each.shape).astype(np.float32))
    return model


def images_of(rows):
    return np.random.default_rng(1).standard_normal((rows, *SHAPE)).astype(np.float32)


def norm(x, layer):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * layer.gamma.numpy() + layer.beta.numpy()


def attention(x, layer):
    query, key, value, output = (
        (each.kernel.numpy().astype(np.float64), each.bias.numpy())
        for each in (
            layer.query_dense,
            layer.key_dense,
            layer.value_dense,
            layer.output_dense,
        )
    )
    query, key, value = (
        np.einsum("btw,wnh->bnth", x, kernel) + bias[:, None]
        for kernel, bias in (query, key, value)
    )
    scores = np.einsum("bnth,bnsh->bnts", query, key) / np.sqrt(query.shape[-1])
    seen = np.einsum("bnts,bnsh->btnh", scipy.special.softmax(scores, axis=-1), value)
    return np.einsum("btnh,nhw->btw", seen, output[0]) + output[1]


def dense(x, layer):
    return x @ layer.kernel.numpy().astype(np.float64) + layer.bias.numpy()


def expected(model, images, *, pooling):
    """The network in float64, with a convolution's patches cut one by one."""
    size, get = SMALL["patch_size"], model.get_layer
    x = np.stack(
        [
            images[:, top : top + size, left : left + size].reshape(len(images), -1)
            for top in range(0, SHAPE[0], size)
            for left in range(0, SHAPE[1], size)
        ],
        axis=1,
    ).astype(np.float64)
    x = x @ get("tokens").kernel.numpy().astype(np.float64)
    positions = get("tokens").bias.numpy().astype(np.float64)
    if pooling == "class_token":
        token = np.broadcast_to(positions[0], (len(x), 1, x.shape[-1]))
        x = np.concatenate([token, x + positions[1:]], axis=1)
    else:
        x = x + positions
    for index in (1, 2):
        block = f"block{index}"
        x = x + attention(norm(x, get(f"{block}_attention_norm")), get(f"{block}_attention"))
        hidden = dense(norm(x, get(f"{block}_mlp_norm")), get(f"{block}_mlp_hidden"))
        x = x + dense(hidden * scipy.special.ndtr(hidden), get(f"{block}_mlp"))
    x = norm(x, get("norm"))
    return dense(x[:, 0] if pooling == "class_token" else x.mean(axis=1), get("logits"))


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
def test_the_network_is_that_of_the_paper(pooling):
    # Dropout and stochastic depth do nothing outside training.
    model = small(pooling=pooling, dropout=0.5, stochastic_depth=0.5)
    images = images_of(3)
    wanted = expected(model, images, pooling=pooling)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(model(images), wanted, rtol=0, atol=2e-5)
    # The class token's place and each patch's own position count.
    positions = model.get_layer("tokens").bias
    assert positions.shape == (6 + (pooling == "class_token"), 16)
    positions.assign(keras.ops.flip(positions, 0))
    assert np.abs(model(images) - wanted).max() > 1e-2


# What the papers' implementations have with a class token at 224 x 224. Theirs have two more rows:
# the convolution's bias, and the class token apart from its position.
PUBLISHED = {"vit_tiny": 5_717_416, "vit_small": 22_050_664, "vit_base": 86_567_656}


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("vit_tiny", 192),
        pytest.param("vit_small", 384, marks=pytest.mark.slow),
        pytest.param("vit_base", 768, marks=pytest.mark.slow),
    ],
)
def test_each_size_has_the_parameters_of_its_paper(name, width):
    model = models.build(
        name,
        image_shape=(224, 224, 3),
        num_outputs=1000,
        vit=VitConfig(pooling="class_token"),
    )
    assert model.count_params() == PUBLISHED[name] - 2 * width


def test_weights_begin_as_in_the_papers_code():
    vit = VitConfig(patch_size=8, depth=1)
    model = models.build("vit_tiny", image_shape=(64, 64, 3), num_outputs=10, vit=vit)
    attention = model.get_layer("block1_attention")
    kernels = [attention.query_dense.kernel, attention.key_dense.kernel]
    kernels += [attention.value_dense.kernel, attention.output_dense.kernel]
    for each in kernels:  # Glorot's deviation for width x width
        assert np.std(each) == pytest.approx((2 / (192 + 192)) ** 0.5, rel=0.03)
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01
    patches = model.get_layer("tokens")
    assert np.std(patches.kernel) == pytest.approx((8 * 8 * 3) ** -0.5, rel=0.03)
    assert np.std(patches.bias) == pytest.approx(0.02, rel=0.05)
    assert not np.any(model.get_layer("logits").kernel)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_logits_are_float32_and_all_but_the_head_computes_in_two_bytes(policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = small(dropout=0.1, stochastic_depth=0.1)
    finally:
        keras.config.set_dtype_policy("float32")
    logits = model(images_of(2), training=True)
    assert (logits.shape, logits.dtype) == ((2, 5), "float32")
    computed = {each.name: each.compute_dtype for each in model.layers}
    wide = {name for name, dtype in computed.items() if dtype == "float32"}
    assert wide - {"image"} == {"pool", "logits"}
    assert {each.dtype for each in model.trainable_variables} == {"float32"}


def test_stochastic_depth_leaves_out_branches_of_single_images():
    model = small(depth=2, stochastic_depth=0.5)
    rates = [each.rate for each in model.layers if isinstance(each, keras.layers.Dropout)]
    assert rates == [0.5, 0.5]  # none in the first block, and both branches of the last
    images = np.repeat(images_of(1), 64, axis=0)
    found = np.unique(np.round(model(images, training=True), 4), axis=0)
    assert len(found) == 4  # with and without each branch
    deeper = small(depth=5, stochastic_depth=0.2)
    rates = [each.rate for each in deeper.layers if isinstance(each, keras.layers.Dropout)]
    np.testing.assert_allclose(rates, np.repeat([0.05, 0.1, 0.15, 0.2], 2))


def test_dropout_follows_each_dense_layer_but_those_of_query_key_and_value():
    model = small(depth=1, dropout=0.25)
    names = [each.name for each in model.layers if isinstance(each, keras.layers.Dropout)]
    assert names == [
        "tokens_dropout",
        "block1_attention_dropout",
        "block1_mlp_hidden_dropout",
        "block1_mlp_dropout",
    ]
    assert {model.get_layer(each).rate for each in names} == {0.25}
    # So that the flash kernels, which have no dropout, compute the attention.
    assert model.get_layer("block1_attention").dropout == 0


def test_kernels_alone_decay():
    model = small(pooling="class_token")
    train = TrainConfig(optimizer="adamw", learning_rate=0.5, weight_decay=0.2)
    schedule = make_schedule(train, global_batch_size=8, num_steps=1)
    optimizer = make_optimizer(train, schedule)
    variables = model.trainable_variables
    before = [each.numpy() for each in variables]
    optimizer.build(variables)
    optimizer.apply([keras.ops.zeros_like(each) for each in variables])
    for each, old in zip(variables, before, strict=True):
        factor = 0.9 if each.name == "kernel" else 1.0
        np.testing.assert_allclose(each, old * factor, rtol=1e-6, err_msg=each.path)
    assert {each.name for each in variables} == {"kernel", "bias", "gamma", "beta"}


def test_any_program_reads_its_file(tmp_path):
    model = small(pooling="class_token", dropout=0.1, stochastic_depth=0.1)
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")  # in Keras's safe mode
    np.testing.assert_array_equal(read(images_of(2)), model(images_of(2)))
    # No layer of tfaccel's own, which a program would have to import.
    assert {type(each).__module__.partition(".")[0] for each in model.layers} == {"keras"}


def test_pixels_of_0_to_255_are_noticed():
    assert "does not scale them before layer tokens" in unscaled(small(), (0.0, 255.0))
    assert not unscaled(small(pooling="class_token"), (-1.0, 1.0))


@pytest.mark.parametrize(
    ("shape", "settings", "words"),
    [
        ((224, 200, 3), {}, "vit.patch_size=16 does not divide image_size=224,200; use images"),
        ((32, 32, 3), {"width": 64}, "vit_tiny has a width of 64 and 3 heads, which cannot"),
    ],
)
def test_each_mistake_is_one_sentence(shape, settings, words):
    with pytest.raises(UserError) as error:
        models.build("vit_tiny", image_shape=shape, num_outputs=2, vit=VitConfig(**settings))
    assert str(error.value).startswith(words)
