"""`tfaccel.lint` and `tfaccel lint` on real models: the three exercises, and a clean ResNet-50."""

import json

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compiled, strategy_of
from keras import layers

import tfaccel
from tfaccel.cli import main
from tfaccel.common.errors import UserError
from tfaccel.config import StepConfig
from tfaccel.diagnostics.lint.facts import OUTSIDE
from tfaccel.diagnostics.lint.findings import Finding, Table
from tfaccel.diagnostics.lint.read_data import read_data
from tfaccel.diagnostics.lint.read_model import read_model
from tfaccel.experiment import models
from tfaccel.keras_internals.variables import is_distributed

pytestmark = pytest.mark.usefixtures("terminal")  # lines of 80 columns

RNG = np.random.default_rng(0)
LOADER_PASSED = "loader = x.batch(64)\noutputs = model(loader)\n"


def features(rows, width):
    return RNG.normal(size=(rows, width)).astype("float32")


def expect(table, *texts):
    """Exactly these findings, by their first words."""
    found = sorted(f"{each.severity} {each.where}: {each.what}" for each in table)
    assert len(found) == len(texts), "\n".join(found)
    for one, text in zip(found, sorted(texts), strict=True):
        assert one.startswith(text)
    assert max(map(len, str(table).splitlines())) <= 80


@pytest.mark.parametrize("first", ["an Input", "a layer that is built"])
@pytest.mark.parametrize("batch", [None, 8])
def test_exercise_1_dense_layers_that_fit_nothing(first, batch):
    dense = [layers.Dense(each, name=f"dense{each}") for each in (64, 32, 16, 8, 4, 5)]
    if first != "an Input":
        dense[0].build((None, 128))
    model = keras.Sequential([keras.Input((128,)), *dense] if first == "an Input" else dense)
    data = (features(128, 15), np.arange(128) % 3)
    if batch is not None:
        data = tf.data.Dataset.from_tensor_slices(data).shuffle(128).batch(batch)
    expect(
        tfaccel.lint(model, data),
        "error data: 15 features, but the model is built for 128",
        "error dense64, dense32, dense16 and 3 more: 6 dense layers with no activation",
        "warning dense5: 5 outputs for 3 classes",
        "note data: 15 features, not a multiple of 8",
        "note dense4: 4 units, not a multiple of 8",
        "note dense5: 5 outputs, not a multiple of 8",
    )


def test_exercise_2_a_tail_batch_and_a_loader_passed():
    data = tf.data.Dataset.from_tensor_slices((features(123, 16), np.arange(123) % 8))
    model = keras.Sequential(
        [keras.Input((128,)), layers.Dense(64, activation="relu"), layers.Dense(8)]
    )
    expect(
        tfaccel.lint(model, data.shuffle(123).batch(64), script=LOADER_PASSED),
        "error script:2: model(loader) passes the loader itself",
        "error data: 16 features, but the model is built for 128",
        "warning data: the last of 2 batches has 59 rows, not 64",
    )


def test_exercise_3_convolutions_smaller_than_the_masks(tmp_path):
    images = RNG.random((16, 26, 26, 3), "float32")
    masks = RNG.integers(0, 2, (16, 26, 26, 1))
    model = keras.Sequential(
        [keras.Input((26, 26, 3)), *(layers.Conv2D(each, 3) for each in (64, 128, 64, 1))]
    )
    script = tmp_path / "train.py"
    script.write_text(LOADER_PASSED)
    data = tf.data.Dataset.from_tensor_slices((images, masks)).shuffle(16).batch(8)
    table = tfaccel.lint(model, data, script=script)
    conv = [each.name for each in model.layers]
    expect(
        table,
        "error train.py:2: model(loader) passes the loader itself",
        f"error {conv[3]}: 18 x 18 x 1, but the targets are 26 x 26 x 1",
        f"error {', '.join(conv[:3])} and {conv[3]}: 4 layers with no activation",
        f"note {conv[3]}: 1 filter, not a multiple of 8",
    )
    assert "3 input channels" in str(table)
    assert not table.ok


@pytest.mark.slow  # to build and to trace it takes a while; smaller clean models are below
def test_a_clean_resnet_50_has_no_finding(setup):
    run = setup(precision="mixed_float16")
    with run.scope():
        model = models.build("resnet50", image_shape=(224, 224, 3), num_outputs=1000)
    images = tf.data.Dataset.from_tensors(tf.zeros((224, 224, 3), tf.float16)).repeat(64)
    data = tf.data.Dataset.zip((images, tf.data.Dataset.range(64))).shuffle(64).batch(32)
    table = tfaccel.lint(model, data, num_classes=1000, xla=True)
    assert not list(table), str(table)
    assert table.ok
    assert "3 input channels" in str(table)
    read = read_model(model)
    # 3.8 billion multiplications by He et al. 2016, table 1; Keras strides elsewhere.
    assert 3.7e9 < sum(each.multiplies for each in read.layers) < 4.2e9
    assert not read.unknown


# Models of every kind.


class Net(keras.Model):
    def __init__(self, linear=False):
        super().__init__(name="net")
        self.first = layers.Dense(16, name="first")
        self.second = layers.Dense(8, name="second")
        self.linear = linear

    def call(self, inputs):
        x = self.first(inputs)
        return self.second(x if self.linear else keras.ops.relu(x))


def test_a_subclassed_model_that_is_not_built():
    data = (features(64, 16), np.arange(64) % 8)
    assert not list(tfaccel.lint(Net(), data))
    expect(tfaccel.lint(Net(linear=True), data), "error first and second: 2 dense layers")
    expect(tfaccel.lint(Net()), "error net: cannot be called")


def test_a_subclassed_model_that_was_built_for_other_data():
    model = Net()
    model(np.zeros((1, 128), "float32"))
    expect(
        tfaccel.lint(model, (features(64, 16), np.arange(64) % 8)),
        "error data: 16 features, but the model is built for 128",
    )


def test_a_fault_is_told_in_plain_words():
    fault = read_model(Net(), data_specs=tf.TensorSpec((None, 16), tf.string)).fault
    assert fault.endswith("dtype='string' is not a valid dtype for Keras type promotion.")
    assert fault.isprintable()
    assert "[1m" not in fault


class Named(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.head = layers.Dense(16, activation="relu"), layers.Dense(8)

    def call(self, inputs):
        return self.head(self.first(inputs["wide"]) + inputs["bias"])


def test_a_subclassed_model_takes_its_inputs_by_name():
    named = {"wide": features(64, 16), "bias": features(64, 1)}
    data, model = (named, np.arange(64) % 8), Named()
    assert not list(tfaccel.lint(model, data, batch_size=64))
    assert not list(tfaccel.lint(model, data, batch_size=64))  # now that it is built


def test_the_model_is_as_it_was():
    model = Net()
    model(np.zeros((1, 16), "float32"))
    tfaccel.lint(model, (features(64, 16), np.arange(64) % 8))

    def broken(inputs):
        raise ValueError("broken on purpose")

    model.second.call = broken  # the user's own, which fails
    expect(tfaccel.lint(model), "error net: cannot be called")
    assert "call" not in vars(model.first)
    assert model.second.call is broken


def test_layers_are_read_with_their_neighbours():
    image = keras.Input((8, 8, 4))
    x = layers.Conv2D(16, 3, padding="same", activation="relu", name="c")(image)
    y = layers.Conv2D(16, 1, name="skip")(x)
    x = x + y
    x = layers.SeparableConv2D(8, 3, name="s")(x)
    x = layers.LSTM(8, name="lstm")(layers.Reshape((36, 8))(x))
    outputs = layers.Dense(3, activation="softmax", name="head")(x)
    read = read_model(keras.Model(image, outputs))
    by_name = {each.name: each for each in read.layers}
    assert by_name["c"].multiplies == 64 * 9 * 4 * 16
    assert by_name["skip"].feeds == (OUTSIDE,)
    assert set(by_name["c"].feeds) == {1, OUTSIDE}
    assert (by_name["s"].features_in, by_name["s"].features_out) == (16, 8)
    assert by_name["lstm"].multiplies == 36 * 2 * 8 * 32
    assert (by_name["head"].activation, by_name["head"].is_output) == ("softmax", True)
    assert by_name["c"].is_input
    assert not read.unknown
    assert (read.inputs, [each.shape for each in read.outputs]) == (((8, 8, 4),), [(3,)])
    assert by_name["head"] is read.layers[read.outputs[0].layer]


def test_transposed_convolutions_multiply_each_input_pixel():
    up = layers.Conv2DTranspose(16, 3, strides=2, name="up")
    (read,) = read_model(keras.Sequential([keras.Input((8, 8, 4)), up])).layers
    assert (read.features_in, read.features_out) == (4, 16)
    assert read.multiplies == 64 * 9 * 4 * 16


def test_inputs_by_name_and_models_in_models():
    one, other = keras.Input((16,), name="one"), keras.Input((8,), name="other")
    x = layers.Concatenate()([layers.Dense(8, name="left")(one), layers.Dense(8)(other)])
    inner = keras.Model({"other": other, "one": one}, x)
    outer = keras.Model([other, one], layers.Dense(8)(inner({"one": one, "other": other})))
    read = read_model(outer)
    assert read.fault is None
    assert [each.features_in for each in read.layers if each.kind == "Dense"] == [16, 8, 16]
    named = {"other": features(64, 8), "one": features(64, 16)}
    by_place = keras.Model([other, one], x)  # in another order than the names'
    for model, given in [
        (inner, named),
        (by_place, named),
        (by_place, named | {"unused": features(64, 3)}),
        (by_place, [named["other"], named["one"]]),
    ]:
        table = tfaccel.lint(model, (given, features(64, 16)), batch_size=64)
        assert not list(table), str(table)
    expect(
        tfaccel.lint(outer, (features(64, 8), features(64, 8)), batch_size=64),
        "error data: 1 input, but the model takes 2",
    )


@pytest.mark.parametrize("nested", [list, dict])
def test_targets_by_name(nested):
    inputs = keras.Input((16,))
    heads = {each: layers.Dense(8, name=each)(inputs) for each in ("probs", "box")}
    model = keras.Model(inputs, heads if nested is dict else list(heads.values()))
    labels = np.arange(64)

    def found(targets):
        table = tfaccel.lint(model, (features(64, 16), targets), batch_size=64)
        return [f"{each.where}: {each.what}" for each in table]

    assert not found({"box": features(64, 8), "probs": labels % 8})
    assert found({"box": features(64, 6), "probs": labels % 9}) == [
        "probs: 8 outputs for 9 classes",
        "box: 8 outputs, but targets of 6",
    ]


@pytest.mark.parametrize(
    "last",
    [
        lambda x: layers.Activation("linear", dtype="float32")(x),
        lambda x: keras.ops.cast(x, "float32"),
    ],
)
@pytest.mark.parametrize("activation", ["softmax", "linear"])
def test_a_softmax_in_float16_is_found_before_a_cast(activation, last):
    inputs = keras.Input((16,))
    x = layers.Dense(8, activation=activation, dtype="mixed_float16", name="head")(inputs)
    model = keras.Model(inputs, last(x))
    words = ["error head: softmax in float16"] if activation == "softmax" else []
    expect(tfaccel.lint(model, (features(64, 16), np.arange(64) % 8), batch_size=64), *words)


def decoder(reversible, **settings):
    ids = keras.Input((6,), dtype="int32")
    tokens = reversible(16, 8, name="tokens", **settings)
    logits = tokens(tokens(ids), reverse=True)
    return keras.Model(ids, layers.Activation("linear", dtype="float32")(logits))


@pytest.mark.parametrize("library", ["keras", "keras_hub"])
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_a_head_in_float32_is_found_where_the_rest_is_in_16_bits(setup, library, precision):
    reversible = pytest.importorskip(library).layers.ReversibleEmbedding
    setup(precision=precision)
    dtype = precision.removeprefix("mixed_")
    what = (
        f"warning tokens: a head (reverse=True) in float32, though its policy computes in {dtype}"
    )
    expect(tfaccel.lint(decoder(reversible)), *([] if precision == "float32" else [what]))
    for given in (dtype, "float32"):  # float32 may be meant
        expect(tfaccel.lint(decoder(reversible, reverse_dtype=given)))
    set_later = decoder(reversible)
    set_later.get_layer("tokens").reverse_dtype = dtype
    expect(tfaccel.lint(set_later))
    untied = decoder(reversible, tie_weights=False)
    expect(tfaccel.lint(untied), *([] if precision == "float32" else [what]))


def test_attention_is_read_as_products():
    x = keras.Input((10, 32))
    model = keras.Model(x, layers.MultiHeadAttention(4, 8, name="mha")(x, x))
    read = read_model(model)
    by_name = {each.name: each for each in read.layers}
    assert by_name["query"].multiplies == 10 * 32 * 32
    assert (by_name["query"].features_in, by_name["query"].features_out) == (32, 32)
    assert by_name["attention_output"].multiplies == 10 * 32 * 32


def test_layers_outside_the_scope():
    strategy = strategy_of(2)
    model = keras.Sequential([keras.Input((16,)), layers.Dense(8, name="lost")])
    data = (features(64, 16), np.arange(64) % 8)
    table = tfaccel.lint(model, data, batch_size=64, strategy=strategy)
    assert [each.what for each in table] == ["2 variables made outside the strategy's scope"]
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), layers.Dense(8)])
    assert not list(tfaccel.lint(model, data, batch_size=64))


@pytest.mark.parametrize("given", [True, False])
def test_a_model_that_is_not_built_is_built_in_its_scope(given):
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(8)])
    data = (features(64, 16), np.arange(64) % 8)
    assert not list(tfaccel.lint(model, data, batch_size=64, strategy=strategy if given else None))
    assert all(map(is_distributed, model.variables))


def test_what_compile_was_told():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(8)])
    data = (features(64, 16), np.arange(64) % 8)
    for settings, words in [
        ({"jit_compile": True}, []),
        ({"jit_compile": False}, []),  # on a CPU most steps are quicker so
        ({"run_eagerly": True}, ["run_eagerly=True"]),
    ]:
        model.compile(loss="sparse_categorical_crossentropy", **settings)
        assert [each.what for each in tfaccel.lint(model, data)] == words


def test_what_run_compile_was_told():
    def make():
        norm = layers.BatchNormalization(name="norm")
        return keras.Sequential([keras.Input((16,)), layers.Dense(8), norm])

    settings = {"optimizer": "sgd", "loss": "mse", "config": StepConfig(sync_batchnorm=True)}
    data = (features(64, 16), features(64, 8))
    model = compiled(make, 2, **settings)
    (found,) = tfaccel.lint(model, data, batch_size=64)
    assert found.what.startswith("training runs without XLA: values of all replicas are joined")
    assert "(synchronized batch norm)" in found.what
    for replicas, xla, words in ((1, True, []), (2, True, []), (1, False, [])):
        model = compiled(make, replicas, xla=xla, optimizer="sgd", loss="mse")
        table = tfaccel.lint(model, data, batch_size=64)
        assert [each.what for each in table] == words
        assert "XLA: not checked" not in str(table)


# Data of every kind.


def test_data_of_every_kind(setup, folder):
    x, y = features(20, 16), np.arange(20) % 5

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    slices = tf.data.Dataset.from_tensor_slices((x, y))
    for given in (
        Batches(),
        slices.batch(8),
        slices.batch(8).prefetch(1),
        slices.shuffle(9).batch(8),
    ):
        data, specs = read_data(given)
        (target,) = data.targets
        assert (data.num_examples, data.global_batch_size, target.num_classes) == (20, 8, 5), given
        assert (data.inputs, target.shape, specs.shape[-1]) == (((16,),), (), 16)
    assert read_data(slices.batch(8))[0].shuffles is False
    assert read_data(slices.shuffle(9).batch(8))[0].shuffles
    assert read_data(slices.batch(8, drop_remainder=True))[0].last_batch == "drop"
    assert read_data(slices.batch(2))[0].targets[0].num_labels is None  # all of them
    many = slices.repeat(100)
    assert read_data(many.batch(2))[0].targets[0].num_labels == 512
    assert read_data(many.batch(100))[0].targets[0].num_labels == 800  # of eight batches
    assert read_data((x, y))[0].targets[0].num_labels is None
    assert read_data(slices.batch(8).unbatch())[0].global_batch_size is None
    assert read_data(slices.batch(3).rebatch(8))[0].global_batch_size is None
    assert read_data(slices.batch(8).take(2))[0].num_examples is None
    assert read_data(slices.batch(8).repeat())[0].num_examples == 20
    tokens, _ = read_data((x, np.zeros((20, 6), int)), num_classes=7)
    assert tokens.targets[0].num_classes == 7
    named, _ = read_data((x, {"b": y, "a": x}), num_classes=7)
    assert [(each.name, each.num_classes) for each in named.targets] == [("a", None), ("b", 7)]
    assert read_data(x)[0].targets == ()
    assert read_data(x)[0].global_batch_size == 20  # fewer than a batch are one
    generator = tf.data.Dataset.from_generator(lambda: x, output_signature=tf.TensorSpec((16,)))
    data, _ = read_data(generator.batch(8))
    assert (data.num_examples, data.shuffles, data.global_batch_size) == (None, None, 8)
    run = setup()
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=16)
    data, _ = read_data(loader)
    assert (data.num_examples, data.global_batch_size) == (37, 16)
    assert data.targets[0].num_classes == 3
    assert (data.last_batch, data.shuffles, data.inputs) == ("pad", False, ((12, 10, 1),))
    assert loader.position == 0
    with pytest.raises(UserError, match=r"expected a tf\.data\.Dataset"):
        read_data(iter([1]))
    with pytest.raises(UserError, match=r"contains a float"):
        read_data(([[1.0, 2.0]], [0]))
    with pytest.raises(UserError, match=r"expected a keras\.Model"):
        tfaccel.lint("model.keras", (x, y))


# How it looks.


def test_a_table_is_sorted_narrow_and_safe_in_html():
    note = Finding("note", "a", "x < y", "why", "gain", "fix " * 40)
    error = Finding("error", "b", "z", "why", "gain", "fix", "--config.runtime.xla=True")
    table = Table((note, error), "t", ("a remark",))
    assert [each.severity for each in table] == ["error", "note"]
    assert (len(table), bool(Table(())), table.ok) == (2, True, False)
    text = str(table)
    assert text.startswith("lint: 1 error, 1 note: t\n")
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    said = json.loads(json.dumps(table.as_dict()))
    assert (said["about"], said["errors"], said["warnings"], said["notes"]) == ("t", 1, 0, 1)
    assert said["findings"][0]["change"] == "--config.runtime.xla=True"
    page = table._repr_html_()
    assert "x &lt; y" in page
    assert "flag: --config.runtime.xla=True</td>" in page
    assert "no finding" in str(Table(()))


# The command.


def test_the_command_on_digits(capsys, setup):
    setup()
    flags = ["--config=configs/digits.py", "--config.runtime.gpu_ids=", "--fix"]
    flags += ["--config.data.global_batch_size=8", "--config.runtime.xla=False"]
    assert main.main(["lint", *flags]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lint: 1 note: mnist_cnn, 1,437 examples of 8 x 8 x 1, batches of 8\n")
    assert "xla" not in out.lower().replace("cudnn and xla pad", "")  # a CPU is quicker without it
    assert "logits padded from 10 to 16 units" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_command_reads_data_with_a_bad_file_if_the_config_skips_it(capsys, setup, tmp_path):
    setup()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    for name in ("training/a", "training/b", "testing/a", "testing/b"):
        (tmp_path / name).mkdir(parents=True)
        for index, image in enumerate(pixels):
            PIL.Image.fromarray(image).save(tmp_path / name / f"{index}.png")
    (tmp_path / "training" / "b" / "0.png").write_bytes(b"no image")
    flags = ["--config=configs/digits.py", "--config.runtime.gpu_ids=", "--json"]
    flags += [f"--config.data.root={tmp_path}", "--config.data.global_batch_size=4"]
    with pytest.raises(UserError, match=r"b/0\.png"):
        main.main(["lint", *flags])
    main.main(["lint", *flags, "--config.data.bad_files=skip"])
    assert "11 examples" in json.loads(capsys.readouterr().out)["about"]


def test_the_command_as_json(capsys, setup):
    setup()
    flags = ["--config=configs/digits.py", "--config.runtime.gpu_ids=", "--fix", "--json"]
    assert main.main(["lint", *flags, "--config.runtime.xla=False"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["about"].startswith("mnist_cnn, 1,437 examples")
    assert [each["change"] for each in said["findings"]] == [None]
    assert said["fix"]["heads"] == ["logits padded from 10 to 16 units"]
    assert said["fix"]["before"] is None
    assert said["fix"]["verdict"].startswith("not timed and not kept, because the gain is next to")


def test_the_command_fails_on_an_error_and_looks_at_a_script(capsys, setup, tmp_path):
    setup()
    script = tmp_path / "mine.py"
    script.write_text(LOADER_PASSED)
    flags = ["--config=configs/digits.py", "--config.runtime.gpu_ids=", f"--script={script}"]
    flags += ["--config.runtime.xla=False", "--config.data.global_batch_size=60"]
    assert main.main(["lint", *flags]) == 1
    out = capsys.readouterr().out
    assert "mine.py:2" in out
    assert "--config.runtime.xla=True" not in out  # on a CPU
    assert "--config.data.global_batch_size=64" in out
    with pytest.raises(UserError, match="cannot be read"):
        main.main(["lint", "--config=configs/digits.py", "--script=nowhere.py"])
