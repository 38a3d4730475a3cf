"""The script that the README shows, as a user writes it."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import in_new_process

import tfaccel


def train(run, folder, tmp_path):
    images = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8}
    train = run.image_folder(folder, **images, shuffle=True)
    test = run.image_folder(folder, **images)
    with run.scope():
        model = keras.Sequential(
            [
                keras.Input((12, 10, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(3, dtype="float32"),
            ]
        )
    run.compile(
        model,
        optimizer=keras.optimizers.AdamW(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(train, validation_data=test, epochs=30, verbose=0)
    return model, test, history, run.export(model, tmp_path / "exported" / "1", loader=test)


def check(model, test, history, exported, in_file_order):
    # The images are noise: to know them by heart is all there is to learn.
    assert isinstance(history, keras.callbacks.History)
    assert history.history["val_accuracy"][-1] > 0.9
    loss, accuracy = model.evaluate(test, verbose=0)
    np.testing.assert_allclose(loss, history.history["val_loss"][-1], rtol=1e-3)
    images, labels = in_file_order
    logits = model.predict(test, verbose=0)
    assert logits.shape == (37, 3)
    np.testing.assert_allclose((logits.argmax(1) == labels).mean(), accuracy, atol=1e-6)
    loaded = tf.saved_model.load(exported)
    served = loaded.signatures["serving_default"](image=images[..., None].astype(np.float32))
    assert (served["probabilities"].numpy().argmax(1) == logits.argmax(1)).all()


@pytest.mark.parametrize(
    "precision", [pytest.param("float32", marks=pytest.mark.slow), "mixed_float16"]
)
def test_a_keras_script_trains_evaluates_predicts_and_exports(
    setup, folder, in_file_order, tmp_path, precision
):
    check(*train(setup(precision=precision), folder, tmp_path), in_file_order)


def test_a6_more_threads_than_cores_are_warned_of_once(setup, folder, caplog):
    run, cores = setup(), len(os.sched_getaffinity(0))
    images = {"image_size": (12, 10), "channels": 1, "global_batch_size": 8, "loader": "tf_data"}
    for threads, num_said in ((None, 0), (cores, 0), (cores + 1, 1)):
        for _ in range(2):  # loaders, to train and to test
            run.image_folder(folder, **images, dali=tfaccel.DaliConfig(threads=threads))
        assert caplog.text.count("they will wait for each other") == num_said
    words = f"loader: {cores + 1} threads for each of 1 replicas, but {cores} cores"
    assert words in caplog.text


@pytest.mark.multi_gpu
@pytest.mark.parametrize("gpu_ids", [[1], [1, 0]])
def test_the_gpus_that_are_chosen_train_alike(folder, gpu_ids):
    # In processes of their own: which GPUs are visible is settled once.
    program = f"""
import keras, numpy as np, pynvml, tfaccel
pynvml.nvmlInit()
def users(gpu):
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    return len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
before = [users(gpu) for gpu in range(2)]
run = tfaccel.setup(gpu_ids={gpu_ids})
loader = run.image_folder({str(folder)!r}, image_size=(12, 10), channels=1, global_batch_size=12)
with run.scope():
    model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(3))
run.compile(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
print(*model.fit(loader, epochs=3, verbose=0).history["loss"])
for gpu in range(2):
    if users(gpu) > before[gpu]:
        print("on", gpu)
"""
    losses, *seen = in_new_process(program).splitlines()
    (reference, *_) = in_new_process(program.replace(str(gpu_ids), "()")).splitlines()
    np.testing.assert_allclose(
        *(np.array(each.split(), float) for each in (losses, reference)), rtol=1e-3
    )
    # Where the driver tells which processes are on a GPU.
    assert not seen or set(seen) == {f"on {gpu}" for gpu in gpu_ids}


LONG_STEP = """
import time, keras, numpy as np, tfaccel
from tfaccel import sources
run = tfaccel.setup(gpu_ids={gpu_ids}, precision="mixed_float16", xla=True)
images = np.zeros((98304, 32, 32, 3), np.uint8)
loader = run.loader(sources.arrays(images, np.zeros(len(images), np.int32)), image_size=(32, 32),
                    mean=(0.5,) * 3, std=(0.25,) * 3, global_batch_size={batch}, loader="memory")
with run.scope():
    model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten()])
    for _ in range(8):
        model.add(keras.layers.Dense(8192, activation="relu"))
    model.add(keras.layers.Dense(3, dtype="float32"))
run.compile(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(loader, verbose=0)
batches = iter(loader)
def seconds_of_one():
    began = time.perf_counter()
    model.train_function(batches)
    launched = time.perf_counter()
    keras.ops.convert_to_numpy(model.optimizer.iterations)  # waits for the step
    return launched - began, time.perf_counter() - began
print(*np.median([seconds_of_one() for _ in range(10)], axis=0))
"""


@pytest.mark.parametrize(
    "gpu_ids",
    [pytest.param([0], marks=pytest.mark.gpu), pytest.param([0, 1], marks=pytest.mark.multi_gpu)],
)
def test_a_step_is_launched_and_not_waited_for(gpu_ids):
    # 13 TFLOP on each GPU: some 30 ms of one that has 400 TFLOP/s, where a launch takes a few.
    program = LONG_STEP.format(gpu_ids=gpu_ids, batch=4096 * len(gpu_ids))
    launched, done = map(float, in_new_process(program).split())
    assert launched < done / 2


@pytest.mark.gpu
def test_steps_of_an_execution_copy_nothing_from_or_to_the_host(setup, folder):
    # Each such copy would wait for the steps before it, and the GPU for the next one.
    run = setup(gpu_ids=[0], precision="mixed_float16", memory="growth")
    loader = run.image_folder(
        folder, image_size=(12, 10), channels=1, global_batch_size=4, loader="dali_gpu"
    )
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(3, dtype="float32"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, "sgd", loss, steps_per_execution=2)
    model.fit(loader, verbose=0)
    iterator = iter(loader)
    before = tf.config.experimental.get_device_policy()
    tf.config.experimental.set_device_policy("explicit")  # of this thread
    try:
        logs = model.train_function(iterator)
    finally:
        tf.config.experimental.set_device_policy(before)
    assert "skipped_steps" in logs


@pytest.mark.gpu
def test_the_same_on_a_gpu(folder, in_file_order, tmp_path):
    run = tfaccel.setup(gpu_ids=[0], precision="mixed_float16", memory="growth")
    model, test, *rest = train(run, folder, tmp_path)
    image, label, _ = next(iter(test))
    assert "GPU:0" in image.device
    assert "GPU:0" in label.device
    # PNG decodes exactly on any device; 1e-3 is float16's rounding.
    np.testing.assert_allclose(image.numpy()[..., 0], in_file_order[0][:8] / 255, atol=1e-3)
    check(model, test, *rest, in_file_order)
    keras.config.set_dtype_policy("float32")


def test_a_batch_is_said_in_one_way(setup, folder):
    run, images = setup(), {"image_size": (12, 10), "channels": 1}
    assert run.image_folder(folder, **images).global_batch_size == 256
    assert run.image_folder(folder, **images, batch_per_replica=8).global_batch_size == 8
    rows = np.zeros((16, 3))
    assert len(run.examples(rows, batch_per_replica=8)) == 2
    for wrong in ({}, {"global_batch_size": 8, "batch_per_replica": 8}):
        with pytest.raises(tfaccel.UserError, match="expected one of the two, and None for the"):
            run.examples(rows, **wrong)
    with pytest.raises(tfaccel.UserError, match="batch_per_replica=0; expected a whole number"):
        run.examples(rows, batch_per_replica=0)


def test_stock_keras_is_not_let_count_padding(setup, folder, tmp_path):
    run, images = setup(), {"image_size": (12, 10), "channels": 1, "global_batch_size": 8}
    loader = run.image_folder(folder, **images)
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(3))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for use in (model.evaluate, model.predict, model.fit):
        with pytest.raises(tfaccel.UserError, match=r"compile the model with run\.compile\(model"):
            use(loader, verbose=0)
    assert len(model.predict(run.image_folder(folder, **images, last_batch="drop"))) == 32
    run.compile(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert len(model.predict(loader, verbose=0)) == 37
    keras.Sequential(model.layers).predict(np.zeros((2, 12, 10, 1)), verbose=0)


@pytest.mark.parametrize("wrong", [{"a": 2.0}, {3: 2.0}, [1.0, 2.0, 3.0]])
def test_class_weights_that_no_class_has_are_refused(setup, folder, wrong):
    run = setup()
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=8)
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(3))
    run.compile(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tfaccel.UserError, match="expected a dict of class indices, 0 to 2"):
        model.fit(loader, class_weight=wrong, verbose=0)


def test_another_precision_in_the_same_process_is_said(setup, caplog):
    setup(precision="mixed_float16")
    caplog.clear()  # of what another test's run had
    setup(precision="mixed_float16")
    assert "from now on" not in caplog.text
    setup(precision="float32")
    assert "float32 from now on, in the scopes of earlier runs, too, which had mixed" in caplog.text


def test_images_of_another_shape_than_the_model_takes_are_refused(setup, folder):
    run = setup()
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=8)
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 3)), keras.layers.Flatten()], name="rgb")
        model.add(keras.layers.Dense(3))
    run.compile(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    sentence = r"the loader gives \(12, 10, 1\) float32, but model rgb takes \(12, 10, 3\); "
    for method in (model.fit, model.evaluate):
        with pytest.raises(tfaccel.UserError, match=sentence):
            method(loader, verbose=0)


@pytest.mark.parametrize(
    "loss",
    ["sparse_categorical_crossentropy", keras.losses.SparseCategoricalCrossentropy()],
    ids=["by name", "object"],
)
def test_fewer_outputs_than_classes_are_refused(setup, folder, loss):
    run = setup()
    loader = run.image_folder(folder, image_size=(12, 10), channels=1, global_batch_size=8)
    with run.scope():
        model = keras.Sequential([keras.Input((12, 10, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(2, activation="softmax"))
    run.compile(model, "sgd", loss)
    with pytest.raises(tfaccel.UserError, match="gives 2 outputs, but the data have 3 classes"):
        model.fit(loader, verbose=0)


def test_every_public_name_is_there():
    assert {"Run", "RunError", "UserError"} < set(tfaccel.__all__)
    assert all(getattr(tfaccel, name) is not None for name in tfaccel.__all__)
    with pytest.raises(AttributeError, match="module 'tfaccel' has no attribute 'steup'"):
        _ = tfaccel.steup


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"step": {"accumulation_steps": 2}}, r"step=\{.*expected tfaccel\.StepConfig"),
        ({"accumulation_steps": 2}, r"give step=tfaccel\.StepConfig\(accumulation_steps="),
    ],
)
def test_settings_of_the_step_in_the_wrong_place_are_refused(setup, settings, words):
    run = setup()
    with run.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(tfaccel.UserError, match=words):
        run.compile(model, "sgd", "mse", **settings)


def test_settings_of_another_kind_are_refused(setup, folder, tmp_path):
    run, images = setup(), {"image_size": (12, 10), "channels": 1, "global_batch_size": 8}
    with pytest.raises(tfaccel.UserError, match=r"dali=\{.*expected tfaccel\.DaliConfig"):
        run.image_folder(folder, **images, dali={})
    with pytest.raises(tfaccel.UserError, match=r"config=\{.*expected tfaccel\.CheckpointConfig"):
        run.checkpoints(tmp_path, {"every_steps": 5})


class OwnCompile(keras.Model):
    """Of Keras's guides: a loss of its own, and a `compile` that takes an optimizer alone."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, dtype="float32")

    def compile(self, optimizer):
        super().compile(optimizer=optimizer)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred))


@pytest.mark.parametrize("loss_scale", ["dynamic", 64.0])
def test_a_model_with_a_compile_of_its_own_trains(setup, loss_scale):
    run = setup(precision="mixed_float16")
    x, y = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")
    with run.scope():
        model = OwnCompile()
    optimizer = keras.optimizers.SGD(0.1)
    run.compile(model, optimizer, step=tfaccel.StepConfig(loss_scale=loss_scale))
    losses = model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert (model.optimizer is optimizer) == (loss_scale == 64.0)
    keras.config.set_dtype_policy("float32")


def test_examples_one_by_one_are_refused(setup):
    run, examples = setup(), tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.zeros(8)))
    with run.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    run.compile(model, "sgd", "mse")
    with pytest.raises(
        tfaccel.UserError, match=r"not batched: .* shapes \(3,\), \(\); call dataset.batch"
    ):
        model.fit(examples, verbose=0)
    model.fit(examples.batch(4), verbose=0)


def test_what_a_user_prints_says_what_it_is(setup, folder, tmp_path):
    run = setup(gpu_ids=())
    images = {"image_size": (8, 6), "channels": 1, "global_batch_size": 8, "loader": "tf_data"}
    loader = run.image_folder(folder, mean=0.5, std=0.5, augment="mnist", **images)
    said = repr(loader)
    assert f"{loader.num_examples:,} examples" in said
    assert "3 classes: a, b, c" in said
    assert f"{loader.num_batches} steps of 8 an epoch, 8 rows on each of 1 replica" in said
    assert "images: 8 x 6 x 1, float32, pixels -1 to 1" in said
    assert "loader: tf_data" in said
    assert "rotation_degrees=" in said
    assert repr(run).startswith("<tfaccel run: 1 replica in 1 worker (here /cpu:0), float32, XLA ")
    examples = run.examples([(np.zeros((4, 4), np.float32), 1)] * 5, global_batch_size=2)
    assert "5 examples" in repr(examples)
    assert "a replica's batch: (2, 4, 4) float32, (2,) int" in repr(examples)
    source = tfaccel.sources.class_folders(folder)
    assert repr(source) == f"<tfaccel source: {len(source)} images, 3 classes, in {folder}>"
    assert len(repr(source.images)) < 200
    arrays = tfaccel.sources.arrays(np.zeros((9, 4, 4, 1), np.uint8), np.zeros(9, np.int32))
    assert repr(arrays).startswith("<tfaccel source: uint8 array (9, 4, 4, 1)")
    checkpoints = run.checkpoints(tmp_path / "kept", tfaccel.CheckpointConfig(every_steps=5))
    assert f"checkpoints in {tmp_path / 'kept'}: every 5 steps and every 1 epoch" in repr(
        checkpoints
    )
    for each in (loader, run, examples, source, arrays, checkpoints):
        assert " object at 0x" not in repr(each)
        assert len(repr(each)) < 600
