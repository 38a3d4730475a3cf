"""Scripts whose pixels are scaled once, twice or never, as in tutorials and moved scripts."""

import pytest

from tfaccel.diagnostics.lint.script import read_script

CNN = "model = keras.Sequential([{}layers.Conv2D(8, 3), layers.Flatten(), layers.Dense(2)])\n"
FIT = "model.fit(train)\n"
OURS = "train = run.image_folder('photos', image_size=(64, 64), global_batch_size=8{})\n"
KERAS = "train = keras.utils.image_dataset_from_directory('photos', image_size=(64, 64))\n"
RESCALING = CNN.format("layers.Rescaling(1./255), ")


@pytest.mark.parametrize(
    ("loader", "gives"),
    [
        (OURS.format(""), "0 to 1"),
        (OURS.format(", mean=0.5, std=0.5"), "-1 to 1"),
        (OURS.format(", mean=(0.485, 0.456, 0.406), std=[0.229, 0.224, 0.225]"), "-2.118 to 2.64"),
        (
            "images = dict(image_size=(64, 64), std=1)\ntrain = run.image_folder('x', **images)\n",
            "0",
        ),
        ("images = {'image_size': (64, 64)}\ntrain = run.loader(source, **images)\n", "0 to 1"),
    ],
)
@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (RESCALING, "Rescaling(1.0 / 255)"),
        (CNN.format("layers.Rescaling(scale=1/127.5, offset=-1), "), "Rescaling(scale=1 / 127.5"),
        ("model = keras.applications.EfficientNetB0(classes=2, weights=None)\n", "EfficientNetB0"),
        ("model = ConvNeXtTiny(include_top=False)\n", "ConvNeXtTiny"),
        ("x = keras.applications.resnet50.preprocess_input(x)\n", "preprocess_input"),
        ("SCALE = 255.0\nimages = images / SCALE\n", "images / SCALE"),
    ],
)
def test_what_scales_behind_a_loader_that_has_scaled(loader, gives, scaling, text):
    loader = loader.replace("images", "settings") if "images = images" in scaling else loader
    (found,) = read_script(loader + scaling + FIT, "train.py")
    assert found.severity == "error"
    assert found.what.startswith(text)
    assert gives in found.what
    assert "scaled twice" in found.why
    assert "mean=0 and std=1/255" in found.fix


@pytest.mark.parametrize(
    "source",
    [
        OURS.format(", std=1/255") + RESCALING + FIT,
        OURS.format(", std=1 / 255.0, mean=0.0") + RESCALING + FIT,
        OURS.format("") + CNN.format("") + FIT,
        OURS.format(", std=std_of(x)") + RESCALING + FIT,  # not known
        OURS.format(", **settings()") + RESCALING + FIT,
        OURS.format("") + CNN.format("layers.Rescaling(2.0), ") + FIT,
        OURS.format("") + "model = EfficientNetV2B0(include_preprocessing=False)\n" + FIT,
        OURS.format("") + CNN.format("") + "plt.imshow(image / 255)\nhalf = x / 2\n" + FIT,
        OURS.format(", std=1/255") + CNN.format("layers.BatchNormalization(), ") + FIT,
        KERAS + RESCALING,  # nothing is trained
        "loader = other.loader(x)\nx = x / 255\n" + FIT,
    ],
)
def test_what_is_in_order(source):
    assert not read_script(source)


def test_pixels_that_nothing_scales():
    (found,) = read_script(OURS.format(", std=1/255") + CNN.format("") + FIT, "train.py")
    assert (found.severity, found.where) == ("warning", "train.py:1")
    assert "gives pixels of 0 to 255, and nothing here scales them" in found.what


GENERATOR = "data = ImageDataGenerator({})\ntrain = data.flow_from_directory('photos')\n"
DECODED = """def load(path, label):
    image = tf.io.decode_jpeg(tf.io.read_file(path))
    return {}, label
train = tf.data.Dataset.from_tensor_slices((paths, labels)).map(load).batch(8)
"""


@pytest.mark.parametrize(
    ("source", "where", "gives", "fix"),
    [
        (KERAS + RESCALING, 1, "0 to 255", "with mean=0 and std=1/255 it gives the same pixels"),
        (KERAS + CNN.format(""), 1, "0 to 255", "with mean=0 and std=1/255 it gives the same"),
        (GENERATOR.format("rescale=1./255"), 1, "0 to 1", "gives 0 to 1; it gives the same pixels"),
        (GENERATOR.format("rescale=1/127.5"), 1, "0 to 2", "with std=0.5 it gives the same"),
        (GENERATOR.format(""), 1, "0 to 255", "with mean=0 and std=1/255 it gives the same"),
        (
            GENERATOR.format("preprocessing_function=keras.applications.resnet.preprocess_input"),
            1,
            "-123.7 to 151.1",
            "with mean=(0.48502, 0.457957, 0.407604)",
        ),
        (
            GENERATOR.format("preprocessing_function=mobilenet_v2.preprocess_input"),
            1,
            "-1 to 1",
            "with mean=(0.5, 0.5, 0.5) and std=(0.5, 0.5, 0.5)",
        ),
        ("train = tfds.load('cats', split='train')\n", 1, "0 to 255", "std=1/255 it gives"),
        (
            DECODED.format("tf.cast(image, tf.float32) / 255"),
            2,
            "0 to 255",
            "in line 3 needs; or remove both",
        ),
        (DECODED.format("image"), 2, "0 to 255", "with mean=0 and std=1/255"),
    ],
)
def test_what_would_change_in_a_script_that_keeps_its_loader(source, where, gives, fix):
    (found,) = read_script(source + FIT, "train.py")
    assert (found.severity, found.where) == ("note", f"train.py:{where}")
    assert f"gives pixels of {gives}" in found.what
    assert "gets other pixels" in found.why
    assert fix in found.fix


def test_two_loaders_of_different_pixels():
    source = OURS.format("") + KERAS.replace("train", "test") + CNN.format("")
    (found,) = read_script(source + "model.fit(train, validation_data=test)\n")
    assert (found.severity, found.where) == ("error", "script:2")
    assert "gives pixels of 0 to 255, but run.image_folder in line 1 gives 0 to 1" in found.what
    assert not read_script(source.replace("size=8", "size=8, std=1/255").replace("Conv2D", "Own"))
