"""What LiteRT's interpreter reads answers as the SavedModel does, or as near as 8 bits allow."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfaccel import RunError, UserError
from tfaccel.data import sources
from tfaccel.export import card, litert, parity

pytestmark = [
    pytest.mark.usefixtures("export_decodes_png"),
    pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated"),
]

IMAGES = {"image_size": (12, 10), "channels": 1, "mean": 0.4, "std": 0.3, "global_batch_size": 8}
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12, 10, 1)).astype(np.float32)


def trained(run, head, width=64):
    """A model whose batch norm has seen something."""
    keras.utils.set_random_seed(0)
    with run.scope():
        norm = [layers.Conv2D(width, 3, padding="same"), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((12, 10, 1)), *norm, layers.ReLU(), *head])
    model(np.random.default_rng(1).normal(2, 3, (8, 12, 10, 1)), training=True)
    return model


def classifier(run):
    model = trained(run, [layers.Flatten(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, "sgd", loss)
    return model


def litert_of(path):
    """What calls model.tflite, answers by name."""
    interpreter = tf.lite.Interpreter(model_path=str(path / "model.tflite"))
    return interpreter.get_signature_runner("serving_default")


def saved_model_of(path):
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    return lambda **given: {name: each.numpy() for name, each in signature(**given).items()}


@pytest.mark.parametrize(
    ("how", "precision", "tolerance", "size"),
    [
        # The pixels are noise, while those of the calibration are of plain images.
        ("int8", "float32", 0.3, 0.35),
        pytest.param("float16", "mixed_float16", 1e-2, 0.55, marks=pytest.mark.slow),
        pytest.param("float32", "mixed_bfloat16", 5e-2, 1.05, marks=pytest.mark.slow),
    ],
)
def test_it_answers_as_the_saved_model_does(
    setup, folder, tmp_path, how, precision, tolerance, size
):
    run = setup(precision=precision)
    model = classifier(run)
    loader = run.image_folder(folder, **IMAGES, loader="memory")
    path = run.export(model, tmp_path / "1", loader=loader, samples=16, litert=how)
    ask, served = litert_of(path), saved_model_of(path)
    answers, wanted = ask(image=PIXELS), served(image=PIXELS)
    assert set(answers) == {"logits", "probabilities"}
    for name, each in wanted.items():
        assert answers[name].dtype == np.float32
        largest = max(np.abs(each).max(), 1e-3)
        assert np.abs(answers[name] - each).max() / largest < tolerance
    # Any number of rows.
    many = litert_of(path)(image=np.repeat(PIXELS, 20, axis=0))["logits"]
    np.testing.assert_allclose(many[::20], answers["logits"], rtol=1e-3, atol=1e-3)
    # The weights have fewer bytes, and the card says what was compared.
    num_bytes = 4 * sum(int(np.prod(each.shape)) for each in model.trainable_variables)
    assert (path / "model.tflite").stat().st_size < size * num_bytes + 12_000
    names = [each["name"] for each in card.read(path)["parity"]["checks"]]
    assert ("LiteRT" in names) == (how != "int8")
    assert names[-2:] == ["LiteRT answers", "LiteRT top-1"]


def test_a_restored_image_and_a_model_alone(setup, folder, tmp_path):
    run = setup()
    model = trained(run, [layers.Conv2D(1, 1)], width=4)
    run.compile(model, "sgd", "mae")
    pairs = sources.image_pairs(folder / "a", _copied(folder / "a", tmp_path / "targets"))
    loader = run.loader(pairs, **IMAGES, loader="memory")
    settings = {"samples": 4, "pixel_dtype": "uint8", "litert": "float32"}
    path = run.export(model, tmp_path / "1", loader=loader, **settings)
    pixels = PIXELS.astype(np.uint8)
    (found,) = litert_of(path)(image=pixels).items()
    assert found[0] == "image_output"
    (wanted,) = saved_model_of(path)(image=pixels).values()
    np.testing.assert_allclose(found[1], wanted, atol=1e-2)

    x, y = keras.Input((4,), name="x"), keras.Input((4,), name="y")
    both = keras.Model([x, y], {"sum": layers.Dense(3)(x + y), "product": x * y})
    path = run.export(both, tmp_path / "2", litert="int8")
    given = {name: np.random.default_rng(2).random((5, 4)).astype("float32") for name in "xy"}
    found = litert_of(path)(**given)
    for name, wanted in both(given).items():
        np.testing.assert_allclose(found[name], wanted, atol=0.1)


def _copied(folder, to):
    to.mkdir()
    for each in folder.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    return to


def test_other_answers_are_not_exported(setup, tmp_path, monkeypatch):
    run, write = setup(), litert.write

    def wrong(model, *args, **settings):
        copy = keras.models.clone_model(model)
        copy.set_weights([-each for each in model.get_weights()])
        write(copy, *args, **settings)

    monkeypatch.setattr(litert, "write", wrong)
    with pytest.raises(
        RunError, match=r"does not answer as the trained model does: LiteRT: differs"
    ):
        run.export(classifier(run), tmp_path / "1", images=PIXELS, litert="int8")
    assert not (tmp_path / "1").exists()


def test_what_litert_cannot_say_is_one_sentence(setup, tmp_path):
    run = setup()
    x = keras.Input((4, 4), name="x")
    model = keras.Model(x, keras.ops.erfinv(x))
    with pytest.raises(UserError, match=r"cannot be written for LiteRT .*Erfinv"):
        run.export(model, tmp_path / "1", litert="float32")
    with pytest.raises(UserError, match="litert='half'; expected one of: float16, float32, int8"):
        run.export(model, tmp_path / "1", litert="half")
    assert list(tmp_path.iterdir()) == []


def test_limits_of_integers_are_wider_than_others():
    assert parity.INT8_LIMITS["top-1"] > parity.DISAGREEMENT_LIMIT
