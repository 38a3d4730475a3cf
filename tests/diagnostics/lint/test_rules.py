"""Each rule, over planted facts: what it finds, and what it lets pass."""

import dataclasses

import pytest

from tfaccel.diagnostics.lint import batches, fits, layers, speed, tensor_cores
from tfaccel.diagnostics.lint.facts import OUTSIDE, Data, Facts, Layer, Model, Output, Step, Target
from tfaccel.diagnostics.lint.products import firsts, heads, tile_work
from tfaccel.diagnostics.lint.words import percent


def dense(units, features=64, *, feeds=(), **settings):
    """A Dense layer of one product."""
    facts = {
        "name": f"dense{units}",
        "inputs": (features,),
        "outputs": (units,),
        "features_in": features,
        "features_out": units,
        "multiplies": features * units,
        "activation": "linear",
    }
    return Layer(**(facts | {"feeds": feeds, **settings}))


def conv(filters, channels=64, *, side=26, **settings):
    """A 3 x 3 convolution without padding."""
    facts = {
        "name": f"conv{filters}",
        "kind": "Conv2D",
        "inputs": (side, side, channels),
        "outputs": (side - 2, side - 2, filters),
        "features_in": channels,
        "features_out": filters,
        "positions": (side - 2) ** 2,
        "multiplies": 9 * channels * filters * (side - 2) ** 2,
        "activation": "relu",
        "padding": "valid",
        "window": (3, 3),
    }
    return Layer(**(facts | settings))


def facts_of(*layers, data=None, step=None, **model):
    return Facts(Model(layers=layers, **model), data or Data(), step or Step())


def said(rule, facts):
    """The findings of a rule as text."""
    return [f"{each.severity} {each.where}: {each.what}" for each in rule(facts)]


# Tiles.


def test_widths_are_multiples_of_8_or_16_in_int8():
    assert not said(tensor_cores.widths, facts_of(dense(64), dense(1000, is_output=True)))
    (odd,) = tensor_cores.widths(facts_of(dense(100, feeds=(1,)), dense(64, 100)))
    # 100 of 104 columns are used, by it and by the next one: all of the model's tiles.
    assert odd.severity == "note"
    assert odd.gain.startswith("3.8% of the model's tiles")
    assert odd.fix == "use 96 or 104 units"
    int8 = facts_of(dense(24, dtype="int8", feeds=(1,)), dense(16, 24, dtype="int8"))
    assert said(tensor_cores.widths, int8) == [
        "warning dense24: 24 units, not a multiple of 16"  # of 32 columns 8 are padding
    ]


def test_severity_goes_by_the_share_of_the_arithmetic():
    (small,) = tensor_cores.widths(facts_of(dense(4096, 4096, feeds=(1,)), dense(10, 4096)))
    assert (small.severity, small.gain[:15]) == ("note", "next to nothing")
    (large,) = tensor_cores.widths(facts_of(dense(10, 4096)))
    assert large.severity == "warning"
    assert "38% of the model's tiles" in large.gain  # 6 of 16


def test_what_cannot_be_changed_is_no_warning():
    (head,) = tensor_cores.widths(facts_of(conv(1)))
    assert (head.severity, head.fix[:8]) == ("note", "leave it")


def test_many_sizes_that_cost_nothing_are_one_finding():
    def found(*sizes):
        after = len(sizes) + 1
        large = dense(4096, 4096, feeds=tuple(range(1, after)))
        small = [dense(each, 8, feeds=(after,)) for each in sizes]
        return said(tensor_cores.widths, facts_of(large, *small, dense(8)))

    assert len(found(4, 6)) == 2
    assert found(4, 6, 10) == [
        "note dense4, dense6 and dense10: 4, 6, 10 units or filters, not multiples of 8"
    ]


def test_tile_work_counts_both_sides():
    assert tile_work(dense(5, 15)) == pytest.approx(8 * 16)
    assert percent(0.0001) == "under 0.1%"


def test_a_head_is_what_no_product_follows():
    body, head = dense(8, feeds=(1,)), dense(10, 8, feeds=(2,))
    add = Layer(name="add", kind="Add", is_output=True)
    assert heads(Model(layers=(body, head, add))) == (head,)
    outside = dense(8, feeds=(OUTSIDE,))  # it may lead anywhere
    assert heads(Model(layers=(outside, head, add))) == (head,)


def test_the_first_products_are_those_that_none_comes_before():
    pad, stem = Layer("pad", "ZeroPadding2D", feeds=(1,)), conv(64, 3, feeds=(2,))
    body = conv(64)
    assert firsts(Model(layers=(pad, stem, body))) == (stem,)
    outside = conv(64, 3, feeds=(OUTSIDE,))
    assert firsts(Model(layers=(outside, body))) == (outside,)


def test_the_datas_own_features():
    data = Data(inputs=((15,),))
    model = (dense(64, 128, is_input=True), dense(64))
    assert said(tensor_cores.input_features, facts_of(*model, data=data)) == [
        "note data: 15 features, not a multiple of 8"
    ]
    rgb = facts_of(conv(64, 3, is_input=True), data=Data(inputs=((26, 26, 3),)))
    assert not said(tensor_cores.input_features, rgb)
    (remark,) = tensor_cores.few_channels(rgb)
    assert "3 input channels" in remark
    # Four groups of an 8-channel image: its own channels are in order.
    grouped = facts_of(conv(64, 2, inputs=(26, 26, 8), is_input=True))
    assert not [*tensor_cores.few_channels(grouped), *said(tensor_cores.input_features, grouped)]
    five = facts_of(conv(64, 5, is_input=True), data=Data(inputs=((26, 26, 5),)))
    assert said(tensor_cores.input_features, five) == [
        "warning data: 5 features, not a multiple of 8"
    ]


def test_batches_are_multiples_of_8_on_each_replica():
    def found(batch, *model, replicas=1):
        data, step = Data(global_batch_size=batch), Step(num_replicas=replicas, from_config=True)
        return list(batches.batch_rows(facts_of(*model, data=data, step=step)))

    assert not found(64, dense(64))
    (odd,) = found(250, dense(64))
    assert (odd.severity, odd.change) == ("note", "--config.data.global_batch_size=248")
    few = Data(global_batch_size=1437, num_examples=1437)
    (all_of_few,) = batches.batch_rows(facts_of(dense(64), data=few, step=Step(from_config=True)))
    assert all_of_few.change == "--config.data.global_batch_size=1432"
    (four,) = found(32, dense(64), replicas=8)
    assert (four.severity, four.fix) == ("warning", "use a batch size of 64")  # half of each tile
    # A convolution's rows are pixels too: 4 x 24 x 24 is a multiple of 8.
    pixels = facts_of(conv(64), data=Data(global_batch_size=4))
    assert not list(batches.batch_rows(pixels))
    assert list(batches.rows_of_pixels(pixels))


@pytest.mark.parametrize(
    ("num_examples", "last_batch", "expected"),
    [
        (128, "smaller", []),
        (None, "smaller", []),
        (123, "drop", []),
        (23, "drop", ["error data: 23 examples do not fill one batch of 64"]),
        (
            123,
            "smaller",
            ["warning data: the last of 2 batches has 59 rows, not 64 (123 examples)"],
        ),
        (123, "pad", []),  # 5 of 128 rows
        (70, "pad", ["note data: 58 of an epoch's 128 rows are padding"]),
    ],
)
def test_tail_batch(num_examples, last_batch, expected):
    data = Data(num_examples=num_examples, global_batch_size=64, last_batch=last_batch)
    assert said(batches.tail_batch, facts_of(data=data)) == expected


# Model and data.


@pytest.mark.parametrize(
    ("built", "given", "words"),
    [
        ((128,), (15,), "15 features, but the model is built for 128 features"),
        ((26, 26, 3), (3, 26, 26), "channels first (NCHW)"),
        ((16,), (), "batch the data"),
        ((128,), (128,), None),
        ((None, None, 3), (26, 26, 3), None),
        ((26, 26, 3), (26, 26), "examples of 26 x 26, but"),
        ((28, 28, 1), (28, 28), None),  # Keras adds that side
        ((28, 28), (28, 28, 1), None),  # and leaves it out
    ],
)
def test_inputs_suit_the_data(built, given, words):
    facts = facts_of(inputs=(built,), data=Data(inputs=(given,)))
    found = list(fits.takes_the_data(facts))
    assert all(each.severity == "error" for each in found)
    if words is None:
        assert not found
    else:
        assert words in f"{found[0].what} {found[0].fix}"


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (Data(), "pass a dataset to lint, or build the model"),
        (Data(inputs=((15,),)), "batch the data: dataset.batch(...)"),
        (Data(inputs=((15,),), global_batch_size=64), "make the layers fit each other"),
    ],
)
def test_a_model_that_cannot_be_called_is_a_finding(data, fix):
    facts = facts_of(fault="matmul of 15 and 128", name="mine", data=data)
    (found,) = fits.takes_the_data(facts)
    assert f"{found.where}: {found.what}".startswith("mine: cannot be called")
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(
    ("outputs", "classes", "looked_at", "expected"),
    [
        (3, 3, None, []),
        (5, 3, None, ["warning head: 5 outputs for 3 classes"]),
        (5, 3, 64, []),  # later labels may be of other classes
        (2, 3, None, ["error head: 2 outputs for 3 classes"]),
        (2, 3, 64, ["error head: 2 outputs for 3 classes in the first 64 labels"]),
        (1, 2, None, []),  # a sigmoid
        (1, 100, None, []),  # a regression
    ],
)
def test_as_many_outputs_as_classes(outputs, classes, looked_at, expected):
    target = Target((), is_integer=True, num_classes=classes, num_labels=looked_at)
    given = (Output((outputs,), layer=0),)
    data = Data(targets=(target,))
    facts = facts_of(dense(outputs, name="head"), outputs=given, data=data)
    assert said(fits.gives_the_classes, facts) == expected


def test_each_output_has_its_own_target():
    outputs = (Output((8,), name="cls", layer=1), Output((4,), name="box", layer=0))
    heads = (dense(4, name="box"), dense(8, name="cls"))

    def found(*targets):
        facts = facts_of(*heads, outputs=outputs, data=Data(targets=targets))
        return [*said(fits.gives_the_classes, facts), *said(fits.gives_the_targets, facts)]

    labels = {"is_integer": True, "num_classes": 9}
    few = "error cls: 8 outputs for 9 classes"
    # By name in any order; by place where there are no names.
    assert found(Target((4,), "box"), Target((), "cls", **labels)) == [few]
    assert found(Target((), **labels), Target((4,))) == [few]
    assert found(Target((8,)), Target((6,))) == ["error box: 4 outputs, but targets of 6"]
    assert not found(Target((3,), "other"), Target((2,), "names"))


def test_outputs_are_as_large_as_the_targets():
    data = Data(targets=(Target((26, 26, 1), is_integer=True, num_classes=2),))
    shrinking = [conv(64, 3), conv(1, 64, side=24)]
    outputs = (Output((22, 22, 1), layer=1),)
    (wrong,) = fits.gives_the_targets(facts_of(*shrinking, outputs=outputs, data=data))
    assert (wrong.where, wrong.what) == ("conv1", "22 x 22 x 1, but the targets are 26 x 26 x 1")
    assert wrong.fix == "use padding='same' in conv64 and conv1"
    assert "remove 4 x 4 pixels" in wrong.why
    strided = (Output((11, 11, 1), layer=1),)
    (wrong,) = fits.gives_the_targets(facts_of(*shrinking, outputs=strided, data=data))
    assert wrong.why == "the loss compares pixel by pixel"


@pytest.mark.parametrize(
    ("target", "output", "words"),
    [
        (Target((26, 26, 1)), (26, 26, 1), None),
        (Target((26, 26)), (26, 26, 8), None),  # a class for each pixel
        (Target((26, 26)), (18, 18, 8), "18 x 18 x 8, but the targets are 26 x 26"),
        (Target((26, 26, 1)), (26, 26), None),
        (Target((26, 26, 1)), (4,), "4, but the targets are 26 x 26 x 1"),
        (Target((), is_integer=True), (26, 26, 8), "26 x 26 x 8, but the targets are one value"),
        (Target((8,)), (26, 26, 8), "26 x 26 x 8, but the targets are 8"),
        (Target((), is_integer=True), (8,), None),
        (Target(()), (1,), None),
        (Target((1,), is_integer=True), (5,), None),
        (Target((3,)), (5,), "5 outputs, but targets of 3"),
        (Target((None,)), (5,), None),
        (Target((3,)), (), None),  # an output of which no shape is known
    ],
)
def test_outputs_have_the_targets_shape(target, output, words):
    facts = facts_of(outputs=(Output(output),), data=Data(targets=(target,)))
    expected = [] if words is None else [f"error output: {words}"]
    assert said(fits.gives_the_targets, facts) == expected


# Layers.


def test_linear_chains():
    chain = [dense(64, feeds=(1,)), Layer("drop", "Dropout", feeds=(2,)), dense(32, 64, feeds=(3,))]
    last = dense(8, 32, is_output=True)
    (found,) = layers.linear_chains(facts_of(*chain, last))
    assert (found.severity, found.where) == ("error", "dense64, dense32 and dense8")
    assert found.fix == "set activation='relu' in dense64 and dense32"
    # 64 x 64 + 64 x 32 + 32 x 8 = 6,400, and as one 64 x 8 = 512.
    assert "92% of the multiplications" in found.gain


def test_no_chain_where_something_is_between_or_beside():
    passing = {
        "an activation": [dense(64, feeds=(1,), activation="relu"), dense(8)],
        "an activation layer": [
            dense(64, feeds=(1,)),
            Layer("a", "Activation", activation="relu", feeds=(2,)),
            dense(8),
        ],
        "batch norm": [
            dense(64, feeds=(1,)),
            Layer("n", "BatchNormalization", feeds=(2,)),
            dense(8),
        ],
        "a way around it": [conv(64, feeds=(1, 2)), conv(64, feeds=(2,)), Layer("add", "Add")],
        "an operation": [dense(64, feeds=(OUTSIDE,)), dense(8)],
        "an output": [dense(64, feeds=(1,), is_output=True), dense(8)],
        "depthwise": [conv(64, kind="DepthwiseConv2D", feeds=(1,)), conv(64)],
    }
    for name, model in passing.items():
        assert not said(layers.linear_chains, facts_of(*model)), name
    low_rank = facts_of(dense(8, 512, feeds=(1,)), dense(512, 8))
    assert [each.severity for each in layers.linear_chains(low_rank)] == ["note"]


def test_saturating_activations_between_weights():
    hidden = facts_of(dense(64, feeds=(1,), activation="tanh"), dense(8, is_output=True))
    assert said(layers.saturating, hidden) == ["note dense64: tanh between layers with weights"]
    output = facts_of(dense(1, activation="sigmoid", is_output=True))
    gate = facts_of(dense(64, activation="sigmoid", feeds=(1,)), Layer("m", "Multiply"))
    assert not said(layers.saturating, output)
    assert not said(layers.saturating, gate)


def test_outputs_in_16_bits():
    def found(activation, dtype, inside=None):
        head = dense(8, activation=activation, dtype=inside or dtype)
        facts = facts_of(head, outputs=(Output((8,), dtype, layer=0),))
        return [each.severity for each in layers.narrow_outputs(facts)]

    assert found("softmax", "float16") == ["error"]
    assert found("linear", "float16") == ["warning"]
    assert found("linear", "bfloat16") == ["warning"]
    assert not found("softmax", "float32")
    assert found("softmax", "float32", inside="float16") == ["error"]  # a cast comes too late
    assert not found("linear", "float32", inside="float16")


def test_a_head_in_float32_whose_policy_is_mixed():
    def found(dtype, unset):
        tokens = Layer("tokens", "ReversibleEmbedding", dtype=dtype, unset_reverse_dtype=unset)
        return said(layers.float32_heads, facts_of(tokens))

    what = "warning tokens: a head (reverse=True) in float32, though its policy computes in "
    assert found("bfloat16", "float32") == [what + "bfloat16"]
    assert found("float16", "float32") == [what + "float16"]
    assert not found("float32", "float32")
    assert not found("bfloat16", "bfloat16")  # a Keras that does as it says
    assert not found("bfloat16", None)  # a table of embeddings, or a reverse_dtype is given


def test_channels_first_and_scope():
    nchw = facts_of(conv(64, channels_first=True), conv(64))
    assert said(layers.channels_first, nchw) == [
        "warning conv64: 1 layer with data_format='channels_first' (NCHW)"
    ]
    outside = facts_of(outside_scope=("dense/kernel", "dense/bias"), step=Step(num_replicas=2))
    assert said(layers.outside_scope, outside) == [
        "error dense: 2 variables made outside the strategy's scope"
    ]


@pytest.mark.parametrize(
    ("batch", "step", "found"),
    [
        (64, Step(), False),
        (8, Step(), True),
        (64, Step(num_replicas=8), True),
        (64, Step(num_replicas=8, sync_batchnorm=True), False),
        (64, Step(accumulation_steps=8), True),
    ],
)
def test_batch_norm_of_few_rows(batch, step, found):
    layer = Layer("norm", "BatchNormalization")
    facts = facts_of(layer, data=Data(global_batch_size=batch), step=step)
    assert bool(list(batches.few_rows_in_batch_norm(facts))) == found


@pytest.mark.parametrize(
    ("epochs", "data", "kept"),
    [
        (6, {}, "62%"),  # 48 steps: 0.99 ** 48
        (6, {"last_batch": "drop"}, "66%"),  # 42
        (30, {}, None),  # 240
        (None, {}, None),
        (6, {"num_examples": None}, None),
    ],
)
def test_batch_norm_whose_averages_see_few_steps(epochs, data, kept):
    layer = Layer("norm", "BatchNormalization", momentum=0.99)
    data = Data(**{"num_examples": 500, "global_batch_size": 64} | data)
    facts = facts_of(layer, data=data, step=Step(epochs=epochs))
    found = list(batches.late_averages(facts))
    assert [f"{kept} of them is still the initial value" in each.why for each in found] == [
        True
    ] * bool(kept)
    frozen = Layer("norm", "BatchNormalization")
    assert not list(batches.late_averages(facts_of(frozen, data=data, step=facts.step)))


# Step and input.


def test_precision_where_there_are_tensor_cores():
    for gpu, tf32, expected in [
        (None, True, []),
        ((6, 1), True, []),
        ((7, 0), True, ["warning precision: float32: Tensor Cores are idle"]),
        ((9, 0), False, ["warning precision: float32: Tensor Cores are idle"]),
        ((9, 0), True, ["note precision: float32 with products in TF32"]),
    ]:
        assert said(speed.precision, facts_of(step=Step(gpu=gpu, tf32=tf32))) == expected
    assert not said(speed.precision, facts_of(step=Step("float16", gpu=(9, 0))))


def test_xla_off_and_falling_back():
    gpu = {"gpu": (9, 0), "from_config": True}
    (off,) = speed.xla(facts_of(step=Step(xla=False, **gpu)))
    assert (off.severity, off.change) == ("warning", "--config.runtime.xla=True")
    (back,) = speed.xla(facts_of(step=Step(xla=True, without_xla="of the layer x", **gpu)))
    assert back.what == "training runs without XLA: of the layer x"
    for fine in (Step(xla=True), Step(), Step(xla=False, run_eagerly=True)):
        assert not said(speed.xla, facts_of(step=fine))


def test_xla_is_not_advised_for_what_it_cannot_compile():
    reason = "the layer lstm (LSTM) is not for XLA (supports_jit=False)"
    gpu = {"gpu": (9, 0), "from_config": True, "not_for_xla": reason}
    for step in (Step(xla=False, **gpu), Step(xla=True, without_xla=reason, **gpu)):
        (found,) = speed.xla(facts_of(step=step))
        assert (found.severity, found.change) == ("note", None)
        assert found.what == f"training runs without XLA: {reason}"
        assert not step.compiles
    assert not said(speed.xla, facts_of(step=Step(xla=False, not_for_xla=reason)))  # on a CPU
    assert Step(gpu=(9, 0)).compiles
    assert Step(xla=True).compiles
    assert not Step().compiles
    assert not Step(xla=False, gpu=(9, 0)).compiles


def test_waits_for_python():
    assert said(speed.sync_points, facts_of(step=Step(run_eagerly=True))) == [
        "warning step: run_eagerly=True"
    ]
    small = facts_of(
        dense(64),
        data=Data(global_batch_size=64, num_examples=640),
        step=Step(gpu=(9, 0), steps_per_execution=1, from_config=True),
    )
    (found,) = speed.sync_points(small)
    assert found.change == "--config.train.steps_per_execution=10"
    large = dataclasses.replace(small, model=Model(layers=(dense(64, multiplies=4 * 10**9),)))
    assert not said(speed.sync_points, dataclasses.replace(large, data=Data(global_batch_size=256)))
    on_cpu = dataclasses.replace(small, step=Step(steps_per_execution=1))
    assert not said(speed.sync_points, on_cpu)
    without_xla = dataclasses.replace(small.step, not_for_xla="strings")
    assert not said(speed.sync_points, dataclasses.replace(small, step=without_xla))


def test_shuffling():
    assert said(speed.shuffling, facts_of(data=Data(shuffles=False)))
    for fine in (True, None):
        assert not said(speed.shuffling, facts_of(data=Data(shuffles=fine)))
