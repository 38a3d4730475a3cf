import functools
import io
import struct
import zlib

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from conftest import compare_here
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

import tfaccel
from tfaccel import UserError, preset
from tfaccel.export import card
from tfaccel.export.preprocessing import MAX_PIXELS

SIZE = (8, 10)


def build(run, num_outputs=3, **last):
    """A compiled classifier of images of SIZE; its kernels are random and not small."""
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((*SIZE, 3), name="image"),
                layers.Conv2D(4, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(num_outputs, dtype="float32", **last),
            ]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits="activation" not in last)
    run.compile(model, loss=loss)
    return model


def files(num=5):
    """JPEG and PNG files of several sizes, colours and kinds."""
    random = np.random.default_rng(0)
    encoded = []
    for index in range(num):
        small = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        image = PIL.Image.fromarray(small).resize((40 + 7 * index, 33 + 5 * index))
        mode, kind = [("RGB", "JPEG"), ("RGBA", "PNG"), ("L", "PNG"), ("L", "JPEG")][index % 4]
        file = io.BytesIO()
        image.convert(mode).save(file, kind)
        encoded.append(file.getvalue())
    return encoded


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for index, each in enumerate(files(9)):
        path = root / "abc"[index % 3] / f"{index}.png"  # by content, not by name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(each)
    return root


def evaluation(run, root, **changes):
    settings = {"image_size": SIZE, "mean": 0.4, "std": (0.2, 0.3, 0.4), "global_batch_size": 4}
    return run.image_folder(root, **settings | {"loader": "dali_cpu"} | changes)


@pytest.fixture(scope="module")
def exported(root, tmp_path_factory):
    """Exports once for each precision and XLA; gives the model, the path, and what it loads."""

    @functools.cache
    def export(precision, xla):
        run, path = tfaccel.setup(gpu_ids=(), precision=precision), tmp_path_factory.mktemp("of")
        model = build(run)
        keras.config.set_dtype_policy("float32")
        path = run.export(model, path / "1", loader=evaluation(run, root), xla=xla)
        return model, path, tf.saved_model.load(path)

    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)  # as conftest does it for each test
        yield export


@pytest.fixture(scope="module")
def other(root, tmp_path_factory):
    """The path of an export of other settings."""
    with pytest.MonkeyPatch.context() as patch:
        compare_here(patch)
        run = tfaccel.setup(gpu_ids=(), precision="mixed_bfloat16")
        model, loader = build(run), evaluation(run, root, augment=preset("imagenet_eval"))
        keras.config.set_dtype_policy("float32")
        path = tmp_path_factory.mktemp("other") / "1"
        return run.export(model, path, loader=loader, samples=5, pixel_dtype="uint8")


@pytest.mark.parametrize(
    "precision", ["float32", pytest.param("mixed_float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_files_and_pixels_are_answered_alike(exported, precision, xla):
    model, path, loaded = exported(precision, xla)
    signatures = loaded.signatures
    assert set(signatures) == {"serve", "serving_default", "predict_bytes", "preprocess"}

    encoded = tf.constant(files())
    answers = signatures["predict_bytes"](image_bytes=encoded)
    assert {name: (each.dtype, each.shape) for name, each in answers.items()} == {
        "logits": (tf.float32, (5, 3)),
        "probabilities": (tf.float32, (5, 3)),
        "class_name": (tf.string, (5,)),
    }
    best = answers["probabilities"].numpy().argmax(1)
    assert [each.decode() for each in answers["class_name"].numpy()] == ["abc"[i] for i in best]
    np.testing.assert_allclose(
        answers["probabilities"], tf.nn.softmax(answers["logits"]), atol=1e-6
    )

    seen = signatures["preprocess"](image_bytes=encoded)
    assert seen["pixels"].dtype == tf.uint8
    same = signatures["serving_default"](image=tf.cast(seen["pixels"], tf.float32))
    np.testing.assert_array_equal(same["logits"], answers["logits"])
    own = (seen["pixels"] / np.float32(255) - np.float32(0.4)) / np.float32([0.2, 0.3, 0.4])
    np.testing.assert_allclose(seen["inputs"], own, atol=1e-5)
    np.testing.assert_allclose(
        model(own), answers["logits"], atol=2e-2 if "16" in precision else 1e-4
    )

    compiled = any("_XlaMustCompile" in each.attr for each in _functions(path))
    assert compiled == xla


def _functions(folder):
    parsed = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    return parsed.meta_graphs[0].graph_def.library.function


def test_requests_of_any_number_of_files(exported):
    *_, loaded = exported("float32", False)
    answer = loaded.signatures["predict_bytes"]
    all_at_once = answer(image_bytes=tf.constant(files(7)))["logits"]
    one_by_one = [answer(image_bytes=tf.constant([each]))["logits"][0] for each in files(7)]
    np.testing.assert_allclose(all_at_once, np.stack(one_by_one), atol=1e-5)


def test_pixels_may_be_uint8(other):
    loaded = tf.saved_model.load(other)
    signatures = loaded.signatures
    seen = signatures["preprocess"](image_bytes=tf.constant(files()))["pixels"]
    answers = signatures["predict_bytes"](image_bytes=tf.constant(files()))
    np.testing.assert_array_equal(
        signatures["serving_default"](image=seen)["logits"], answers["logits"]
    )


def test_it_says_what_it_is(other):
    facts = card.read(other)
    assert facts["class_names"] == ["a", "b", "c"]
    assert facts["computes_in"] == "bfloat16"
    assert facts["preprocessing"]["window"] == "resized_center_crop"
    assert facts["preprocessing"]["image_size"] == [8, 10]
    assert facts["preprocessing"]["std"] == [0.2, 0.3, 0.4]
    assert facts["parity"]["samples"] == 5
    names = [each["name"] for each in facts["parity"]["checks"]]
    assert names == ["decoded", "pixels", "normalisation", "model", "answers", "top-1"]
    assert facts["parity"]["loader"] == "dali_cpu"
    assert all(each["value"] <= each["limit"] for each in facts["parity"]["checks"])


def bomb():
    """A PNG of 200 bytes that says it has 60,000 x 60,000 pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000)))


def large_jpeg():
    """A JPEG whose header says that it has 65,500 x 65,500 pixels."""
    data = bytearray(files(1)[0])
    start = data.index(b"\xff\xc0")  # SOF0: length, precision, height, width
    data[start + 5 : start + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (b"", "not a JPEG or PNG file"),
        (b"<script>", "not a JPEG or PNG file"),
        (b"GIF89a" + bytes(50), "not a JPEG or PNG file"),
        (b"\x89PNG\r\n\x1a\n", f"more than {MAX_PIXELS} pixels, or none"),
        (files(1)[0][:300], "Invalid JPEG data"),
        (files(2)[1][:300], "Invalid PNG data"),
        (bomb(), f"more than {MAX_PIXELS} pixels"),
        (large_jpeg(), f"more than {MAX_PIXELS} pixels"),
    ],
    ids=["empty", "text", "gif", "header", "cut jpeg", "cut png", "bomb", "large jpeg"],
)
def test_a_hostile_image_is_an_error_of_its_request_alone(exported, hostile, said):
    *_, loaded = exported("float32", False)
    answer, good = loaded.signatures["predict_bytes"], files(2)
    before = answer(image_bytes=tf.constant(good))["logits"]
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        answer(image_bytes=tf.constant([good[0], hostile]))
    np.testing.assert_array_equal(answer(image_bytes=tf.constant(good))["logits"], before)


def test_a_loader_that_draws_is_refused(setup, tmp_path, root):
    run = setup()
    with pytest.raises(
        UserError, match=r"changes images at random .*mirror.*loader for evaluation"
    ):
        run.export(build(run), tmp_path / "1", loader=evaluation(run, root, augment="imagenet"))
    assert not list(tmp_path.glob("*1*"))


def test_a_loader_of_ones_own_code_is_refused(setup, tmp_path):
    run = setup()
    images = np.zeros((4, *SIZE, 3), np.float32)
    loader = run.examples(list(zip(images, [0, 1, 2, 0], strict=True)), global_batch_size=2)
    with pytest.raises(UserError, match=r"your own code, so.*images="):
        run.export(build(run), tmp_path / "1", loader=loader)


def test_an_option_that_is_none_is_named(setup, tmp_path):
    run = setup()
    with pytest.raises(UserError, match="export has no field 'sample'; did you mean 'samples'"):
        run.export(build(run), tmp_path / "1", sample=3)
    with pytest.raises(UserError, match="samples=0; expected a whole number of at least 1"):
        run.export(build(run), tmp_path / "1", samples=0)
