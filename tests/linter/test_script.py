"""What a script's source shows: loaders passed to models, waits, and what Python cannot read."""

import pytest

from tfaccel.linter.script import read_script

FOUND = [
    "loader = DataLoader(data, batch_size=64)\nmodel(loader)",
    "ds = tf.data.Dataset.from_tensor_slices(x).batch(64)\nout = net(ds)",
    "ds = make().batch(8)\nds = ds.shuffle(9)\nm = keras.Sequential([])\nm(ds, training=True)",
    "train = run.image_folder('x')\nmodel.train_on_batch(train)",
    "def step(model, train_loader):\n    return model(train_loader)",
    "ds = image_dataset_from_directory('x')\nself.model = keras.Model(a, b)\nself.model(ds)",
    "data = load_dataset('x')\nthing.fit(data)\nthing(data)",
]
NOT_FOUND = [
    "ds = x.batch(8)\nfor x, y in ds:\n    model(x)",
    "ds = x.batch(8)\nmodel.fit(ds)\nmodel.predict(ds)\nmodel.evaluate(ds)",
    "x = np.repeat(x, 2)\nmodel(x)",
    "ds = x.batch(8)\nbatch = next(iter(ds))\nmodel(batch)",
    "loader = x.batch(8)\nloader = next(iter(loader))\nmodel(loader)",  # given another value
    "ds = x.batch(8)\nprint(ds)\nlen(ds)\ntfaccel.lint(model, ds)",
    "def loader(path): return 1\nmodel(loader('x'))",
    "text = 'model(loader)'",
]


@pytest.mark.parametrize("source", FOUND)
def test_a_loader_passed_to_a_model(source):
    (found,) = read_script(source, "train.py")
    assert found.severity == "error"
    assert found.where == f"train.py:{1 + source.count(chr(10))}"
    assert "passes the loader itself" in found.what


@pytest.mark.parametrize("source", NOT_FOUND)
def test_what_is_in_order(source):
    assert not read_script(source)


def test_a_missing_comma():
    (found,) = read_script("layers = [\n    Conv2D(64, 3)\n    Conv2D(128, 3)\n]\n", "net.py")
    assert (found.severity, found.where) == ("error", "net.py:2")
    assert "comma" in found.what
    assert "commas" in found.fix


def test_waits_in_a_loop():
    source = "ds = x.batch(8)\nfor step, batch in enumerate(ds):\n    total += loss.numpy()\n"
    (found,) = read_script(f"{source}print(total.numpy())\n")
    assert (found.severity, found.where) == ("warning", "script:3")
    (eager,) = read_script("tf.config.run_functions_eagerly(True)")
    assert eager.severity == "warning"
