"""Several classes an image, or numbers, through every loader, to the end of an epoch."""

import keras
import numpy as np
import PIL.Image
import pytest
from conftest import compiled, strategy_of

from tfaccel import DaliConfig, ImageConfig, UserError, preset, sources
from tfaccel.data.distribute import Loader
from tfaccel.data.images import open_images
from tfaccel.experiment.metrics import metrics_of_numbers
from tfaccel.runtime.devices import Device, Runtime
from tfaccel.training.logs import contact_sheet

NUM, COLUMNS = 23, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Grey images, each of the level of its number, and a list with two labels for each."""
    root = tmp_path_factory.mktemp("list")
    lines = ["path,even,value"]
    for index in range(NUM):
        PIL.Image.new("L", (12, 10), 10 * index).save(root / f"{index:02d}.png")
        lines.append(f"{index:02d}.png,{int(index % 2 == 0)},{index / 8 - 1}")
    (root / "list.csv").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize(
    ("loader", "task"),
    [
        ("memory", "regression"),
        ("cache", "multilabel"),
        ("tf_data", "regression"),
        ("dali_cpu", "multilabel"),
        pytest.param("memory", "multilabel", marks=pytest.mark.slow),
        pytest.param("cache", "regression", marks=pytest.mark.slow),
        pytest.param("tf_data", "multilabel", marks=pytest.mark.slow),
        pytest.param("dali_cpu", "regression", marks=pytest.mark.slow),
    ],
)
def test_every_loader_gives_each_image_its_own_labels(setup, root, loader, task):
    columns = ["even", "value"] if task == "regression" else ["even"]
    source = sources.image_list(root / "list.csv", label_columns=columns)
    assert source.task == task
    run = setup()
    made = run.loader(
        source,
        shuffle=True,
        image_size=(8, 8),
        channels=1,
        global_batch_size=10,
        augment="imagenet",
        loader=loader,
    )
    assert made.element_spec[1].shape == (10, len(columns))
    assert made.element_spec[1].dtype == "float32"
    said = "numbers, even, value" if task == "regression" else "any number of classes an image"
    assert f"labels: {said}" in repr(made)
    seen = []
    for x, y, weight in made:
        x, y, weight = (np.asarray(each) for each in (x, y, weight))
        for image, label, counts in zip(x, y, weight, strict=True):
            if counts:
                index = round(float(image.mean()) * 25.5)
                seen.append(index)
                np.testing.assert_array_equal(label, source.labels[index])
    assert sorted(seen) == list(range(NUM))


def test_class_weight_is_for_one_class_an_image(setup, root):
    source = sources.image_list(root / "list.csv", label_columns=["even"])
    loader = setup().loader(source, image_size=(8, 8), channels=1, global_batch_size=10)
    with (
        pytest.raises(UserError, match="class_weight is for images of one class each"),
        loader.class_weights({0: 2.0}),
    ):
        pass


def test_captions_name_the_classes_or_the_numbers():
    names = {"class_names": ("a", "b"), "target_names": ()}
    said = [contact_sheet._caption(np.array(each), **names) for each in ([1, 1], [0, 1], [0, 0])]
    assert said == ["a, b", "b", "none"]
    numbers = {"class_names": (), "target_names": ("x", "y")}
    assert contact_sheet._caption(np.array([0.5, 2.0]), **numbers) == "x 0.5, y 2"
    numbers["target_names"] = ("x",)
    assert contact_sheet._caption(np.array([0.25]), **numbers) == "0.25"


def test_a_model_needs_an_output_for_each_label(setup, root):
    run = setup()
    source = sources.image_list(root / "list.csv", label_columns=["even", "value"])
    loader = run.loader(source, image_size=(8, 8), channels=1, global_batch_size=10)
    with run.scope():
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
    run.compile(model, loss="mse")
    with pytest.raises(UserError, match="gives 1 outputs, but each example of the loader has 2 la"):
        model.fit(loader, verbose=0)


def fitted(root, num_replicas):
    """The history of an epoch over 23 images in batches of 10, with padding at the end."""
    devices = tuple(Device(f"/cpu:{index}", None) for index in range(num_replicas))
    source = sources.image_list(root / "list.csv", label_columns=["even", "value"])
    data = open_images(
        source,
        ImageConfig(image_size=(8, 8), channels=1, global_batch_size=10, loader="memory"),
        preset("none"),
        shuffle=True,
        num_replicas=num_replicas,
        runtime=Runtime(devices, "float32", xla=False, seed=0, loader_threads=1),
        num_local=1,
        num_threads=1,
        dali=DaliConfig(),
    )
    strategy = strategy_of(num_replicas)
    how = {"seed": 0, "num_threads": 1, "first_replica": 0, "strategy": strategy}
    loader = Loader(data, devices=devices, **how)
    keras.utils.set_random_seed(0)

    def make():
        image = keras.Input((8, 8, 1))
        return keras.Model(image, keras.layers.Dense(2)(keras.layers.Flatten()(image)))

    model = compiled(
        make,
        num_replicas,
        optimizer=keras.optimizers.SGD(0.01),
        xla=False,
        loss="mse",
        metrics=metrics_of_numbers(),
    )
    return model.fit(loader, validation_data=loader, verbose=0).history


def test_two_replicas_learn_what_one_learns_from_a_loader(root):
    one, two = (fitted(root, each) for each in (1, 2))
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-4), name
