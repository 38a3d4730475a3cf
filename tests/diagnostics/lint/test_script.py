"""What a script's source shows: loaders passed to models, waits, and what Python cannot read."""

import pytest

from tfaccel.diagnostics.lint.script import read_script

FOUND = [
    "loader = DataLoader(data, batch_size=64)\nmodel(loader)",
    "ds = tf.data.Dataset.from_tensor_slices(x).batch(64)\nout = net(ds)",
    "ds = make().batch(8)\nds = ds.shuffle(9)\nm = keras.Sequential([])\nm(ds, training=True)",
    "train = run.image_folder('x')\nmodel.train_on_batch(train)",
    "def step(model, train_loader):\n    return model(train_loader)",
    "ds = image_dataset_from_directory('x')\nself.model = keras.Model(a, b)\nself.model(ds)",
    "data = load_dataset('x')\nthing.fit(data)\nthing(data)",
    "class MLP(keras.Model): pass\nclass Mine(MLP): pass\nm = Mine()\nds = x.batch(3)\nm(ds)",
    "train, test = image_dataset_from_directory('x', subset='both')\nmodel(train)",
    "ds = x.batch(8)\nmodel(training=True, inputs=ds)",
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
    "images, labels = make_dataset()\nmodel(images)",
    "ds = x.batch(8)\nfor x, y in ds.take(3):\n    show(x[0].numpy(), float(y))",
    "for step, x in enumerate(x.batch(8)):\n    rate = float(step) + float('nan')",
    "tf.config.run_functions_eagerly(False)\ntf.config.run_functions_eagerly(run_eagerly=False)",
]


@pytest.mark.parametrize("source", FOUND)
def test_a_loader_passed_to_a_model(source):
    (found,) = read_script(source, "train.py")
    assert found.severity == "error"
    assert found.where == f"train.py:{1 + source.count(chr(10))}"
    assert "passes the loader itself" in found.what
    assert "(True)" not in found.what


@pytest.mark.parametrize("source", NOT_FOUND)
def test_what_is_in_order(source):
    assert not read_script(source)


def test_a_missing_comma():
    (found,) = read_script("layers = [\n    Conv2D(64, 3)\n    Conv2D(128, 3)\n]\n", "net.py")
    assert (found.severity, found.where) == ("error", "net.py:2")
    assert "comma" in found.what
    assert "commas" in found.fix


@pytest.mark.parametrize("over", ["enumerate(ds)", "ds.take(3)"])
@pytest.mark.parametrize("wait", ["loss.numpy()", "float(loss)"])
def test_waits_in_a_loop(over, wait):
    source = f"ds = x.batch(8)\nfor step, batch in {over}:\n    total += {wait}\n"
    (found,) = read_script(f"{source}print(total.numpy(), float(total))\n")
    assert (found.severity, found.where) == ("warning", "script:3")
    assert found.what == f"{wait} in the loop over {over}"


@pytest.mark.parametrize("told", ["True", "run_eagerly=True"])
def test_steps_that_are_not_compiled(told):
    (eager,) = read_script(f"tf.config.run_functions_eagerly({told})")
    assert (eager.severity, eager.what) == ("warning", "tf.config.run_functions_eagerly(True)")
