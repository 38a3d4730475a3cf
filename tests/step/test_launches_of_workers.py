"""Launches of several steps in two processes, as on GPUs, whose sums are part of XLA's program."""

import json
import pathlib

import numpy as np
import pytest
from conftest import in_workers

WORKER = """
import json, os, sys
rank, on_gpu = json.loads(os.environ["TF_CONFIG"])["task"]["index"], {gpus}
sys.path.insert(0, {tests!r})
if on_gpu:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
else:
    import pytest
    from conftest import sum_in_one_function
    sum_in_one_function(pytest.MonkeyPatch())
import keras, numpy as np, tfaccel
from tfaccel.data.images import ImageData
from tfaccel.data.user_examples import ExamplesData
from tfaccel.step import functions

launches, of_one, of_several = [], functions._Step.__call__, functions._Step.in_a_row

def on(step, *args, **kwargs):
    launches.append(1)
    return of_one(step, *args, **kwargs)

def in_a_row(step, deferred, **kwargs):
    launches.append(len(deferred[0]))
    return of_several(step, deferred, **kwargs)

functions._Step.__call__, functions._Step.in_a_row = on, in_a_row
at_a_time = ExamplesData.at_a_time

def fewer(data, devices, most):
    number, why = at_a_time(data, devices, most)
    return (number, why) if rank == 0 else (min(number, {most_of_rank_1}), "a test says so")

ExamplesData.at_a_time = fewer
if not on_gpu:
    ImageData.at_a_time = lambda data, devices, most: (most, "")  # as for images on a GPU

class Rows:
    def __len__(self):
        return 42

    def __getitem__(self, index):
        x = np.random.default_rng(index).normal(size=5).astype("float32")
        return x, x[:2] * 3

def examples():
    return run.examples(Rows(), global_batch_size=8, last_batch="pad", shuffle=False)

def images():
    draw = np.random.default_rng(0)
    source = tfaccel.sources.arrays(
        draw.integers(0, 256, (42, 4, 4, 3), dtype=np.uint8), draw.integers(0, 2, 42))
    return run.loader(source, image_size=(4, 4), global_batch_size=8, loader="memory",
                      augment="cifar", last_batch="pad", shuffle=True)

run = tfaccel.setup(
    gpu_ids=None if on_gpu else (), xla=True, tf32=False, memory="growth", begin_without_xla=False)
of_images = {data!r} == "images"
optimizer = lambda: keras.optimizers.SGD(0.05, momentum=0.9)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if of_images else "mse"

def trained(steps):
    launches.clear()
    with run.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((4, 4, 3) if of_images else (5,)), keras.layers.Flatten(),
            keras.layers.Dense(4), keras.layers.Dense(2, dtype="float32")])
    run.compile(model, optimizer(), loss, steps_per_execution=steps)
    losses = model.fit({data}(), validation_data={data}(), epochs=2, verbose=0).history
    return list(launches), losses, [each.numpy().tolist() for each in model.trainable_variables]

print(json.dumps([trained(4), trained(1)]))
"""


def check(launches, *, rtol, data="examples", most_of_rank_1=100, gpus=False):
    """Raises AssertionError unless both train in these launches as one by one."""
    settings = {"data": data, "most_of_rank_1": most_of_rank_1, "gpus": gpus}
    program = WORKER.format(tests=str(pathlib.Path(__file__).parents[1]), **settings)
    (first, wanted), (second, others) = map(json.loads, in_workers(program, 2))
    assert first == second
    assert wanted == others
    assert first[0] == 2 * launches
    assert wanted[0] == 24 * [1]
    for name, values in first[1].items():
        np.testing.assert_allclose(values, wanted[1][name], rtol=rtol)
    for ours, theirs in zip(first[2], wanted[2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=10 * rtol, atol=rtol)


# Finished batches of a test are not worth a launch. Images in memory are gathered within the step.
TESTS = 6 * [1]


def test_both_processes_launch_as_many_steps_as_the_one_that_can_take_fewer():
    check([2, 2, 2, *TESTS], rtol=1e-6, most_of_rank_1=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "launches"), [("examples", [4, 2, *TESTS]), ("images", [4, 2, 4, 2])]
)
def test_both_processes_launch_all_steps_of_an_execution(data, launches):
    check(launches, rtol=2e-6, data=data)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("data", "launches"), [("examples", [4, 2, *TESTS]), ("images", [4, 2, 4, 2])]
)
def test_two_gpus_launch_all_steps_of_an_execution_by_a_process_each(data, launches):
    check(launches, rtol=1e-5, data=data, gpus=True)
