"""Handoff over a pipeline that only adds numbers, on the CPU and, with -m gpu, on a GPU."""

import concurrent.futures
import ctypes
import gc
import itertools
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf
from conftest import in_new_process
from nvidia.dali import fn, pipeline_def, types

from tfaccel.data.loaders import dali_handoff
from tfaccel.data.loaders.dali_handoff import COPIES_AHEAD, GROUPS_AHEAD, Handoff
from tfaccel.runtime.devices import Device

pytestmark = pytest.mark.usefixtures("quick_collector")

CPU, ROWS, DEPTH = Device("/cpu:0", None), 3, 2
NON_BLOCKING, THREAD_LOCAL = 1, 1  # CUDA's cudaStreamNonBlocking, cudaStreamCaptureModeThreadLocal


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return CPU if request.param == "cpu" else Device("/gpu:0", 0)


@pipeline_def(batch_size=ROWS, num_threads=1, prefetch_queue_depth=DEPTH)
def pipeline(device, side, dtype):
    number = fn.external_source(name="number", ndim=0, dtype=types.INT32)
    of_device = number if device.cuda_ordinal is None else number.gpu()
    image = fn.constant(fdata=0.25, shape=(side, side), device=of_device.device)
    # As it is, as labels are. (TensorFlow's int32 is on the host in most of its operations.)
    label = fn.external_source(name="label", device=image.device, ndim=0, dtype=types.INT64)
    return fn.cast(image + of_device, dtype=dtype), label


def numbers(number):
    values = np.arange(ROWS, dtype=np.int32) + 10 * number
    return {"number": values, "label": values.astype(np.int64)}


def handoff(device, read=numbers, *, side=4, dtype=types.FLOAT, to=None, **settings):
    built = pipeline(device, side, dtype, device_id=device.cuda_ordinal)
    return Handoff(built, read, first=numbers(0), device=to or device, **settings)


def are_of(batch, number, *, whole=False):
    image, label = batch
    np.testing.assert_array_equal(label, numbers(number)["number"])
    fraction = 0 if whole else 0.25  # which DALI rounds down for whole numbers
    wanted = numbers(number)["number"][:, None, None] + np.full((1, 4, 4), fraction)
    np.testing.assert_array_equal(image, wanted)
    return True


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("dali-")]


def all_end():
    """Whether no thread is left: another one ends them."""
    ends = time.monotonic() + 60
    while threads() and time.monotonic() < ends:
        time.sleep(0.01)
    return not threads()


@pytest.fixture(autouse=True)
def _nothing_of_a_test_before():
    """Waits for what earlier tests dropped: it ends in another thread, by these very functions."""
    gc.collect()
    assert all_end()


@pytest.mark.parametrize("dtype", [types.FLOAT, types.FLOAT16])
def test_batches_come_in_order_and_stay_as_they_are(device, dtype):
    batches = handoff(device, dtype=dtype)
    kept = [next(batches) for _ in range(40)]
    del batches
    assert all(are_of(batch, number) for number, batch in enumerate(kept))
    image, label = kept[0]
    assert image.dtype == {types.FLOAT: tf.float32, types.FLOAT16: tf.float16}[dtype]
    assert label.dtype == tf.int64
    for each in (image, label):
        assert device.name[1:].upper() in each.device


@pytest.mark.parametrize("dtype", [types.FLOAT, types.FLOAT16, types.UINT8])
def test_several_come_together_as_they_would_one_by_one(device, dtype):
    # As far as the dtype can count.
    sizes = [3, 1, 4, 1, 5, 9, 2] if dtype == types.UINT8 else [20, 30]
    batches = handoff(device, dtype=dtype, sizes=iter(sizes))
    kept, number = [next(batches) for _ in sizes], 0
    for size, (images, labels) in zip(sizes, kept, strict=True):
        assert images.shape[:2] == labels.shape == (size, ROWS)
        for image, label in zip(images, labels, strict=True):
            assert are_of((image, label), number, whole=dtype == types.UINT8)
            number += 1
        for each in (images, labels):
            assert device.name[1:].upper() in each.device


def test_the_first_inputs_are_not_held():  # which of images are megabytes
    inputs = numbers(0)
    held = weakref.ref(inputs["number"])
    batches = Handoff(pipeline(CPU, 4, types.FLOAT), numbers, first=inputs, device=CPU)
    del inputs
    assert held() is None
    assert are_of(next(batches), 0)


def test_batches_are_copied_to_another_device():
    batches = handoff(CPU, to=Device("/cpu:1", None))
    for number in range(9):
        batch = next(batches)
        assert are_of(batch, number)
        assert all(each.device.endswith("CPU:1") for each in batch)


@pytest.mark.parametrize(("size", "most"), [(None, DEPTH + COPIES_AHEAD), (3, GROUPS_AHEAD)])
def test_what_dali_holds_is_kept_until_it_was_copied_and_is_bounded(
    device, size, most, monkeypatch
):
    runs, make_wait = threading.Event(), dali_handoff._make_wait

    def make_slow(device):
        wait = make_wait(device)
        return lambda: (runs.wait(), wait())

    monkeypatch.setattr(dali_handoff, "_make_wait", make_slow)
    batches, viewed, view_of = None, [], dali_handoff.view_of

    def noted(output, device):
        viewed.append(weakref.ref(output))
        return view_of(output, device)

    monkeypatch.setattr(dali_handoff, "view_of", noted)
    try:
        batches = handoff(device, sizes=size and itertools.repeat(size))
        kept = [next(batches) for _ in range(most)]
        with pytest.raises(TimeoutError):  # the GPU is too far behind for another one
            batches._next.result(timeout=0.5)
        assert len(viewed) == 2 * most * (size or 1)
        assert all(each() is not None for each in viewed)
    finally:
        runs.set()
    kept += [next(batches) for _ in range(20)]
    one_by_one = (
        kept if size is None else [pair for group in kept for pair in zip(*group, strict=True)]
    )
    assert all(are_of(batch, number) for number, batch in enumerate(one_by_one))
    del batches
    assert all_end()
    assert all(each() is None for each in viewed)


def test_reading_is_ahead_of_the_pipeline():
    read = []

    def noted(number):
        read.append(number)
        return numbers(number)

    batches = handoff(CPU, noted)
    assert are_of(next(batches), 0)
    assert are_of(next(batches), 1)
    batches._next.result()
    batches._end()
    assert all_end()
    assert read == [1, 2, 3, 4, 5]  # 0 was given, and 2 is there to be taken


@pytest.mark.parametrize("kind", ["read", "pipeline"])
def test_a_fault_comes_out_of_next_and_ends_all(device, kind):
    def fails(number):
        if number == 7 and kind == "read":
            raise OSError("no such disk")
        return {"number": np.zeros(2 * ROWS, np.int32)} if number == 7 else numbers(number)

    batches = handoff(device, fails)
    error, said = (OSError, "disk") if kind == "read" else (RuntimeError, "batch size")
    drawn = []
    with pytest.raises(error, match=said):
        drawn.extend(batches)
    assert 7 - DEPTH <= len(drawn) <= 7
    assert all(are_of(batch, number) for number, batch in enumerate(drawn))
    with pytest.raises(error, match=said):
        next(batches)
    assert all_end()


def test_a_fault_in_the_first_batch_is_raised_at_once(device):
    with pytest.raises(OSError, match="disk"):
        handoff(device, lambda _: (_ for _ in ()).throw(OSError("no such disk")))
    assert all_end()


def test_threads_and_pipeline_end_with_it(device):
    batches = handoff(device)
    next(batches)
    assert len(threads()) == 3
    dropped = [weakref.ref(batches), weakref.ref(batches._batches)]
    del batches
    assert all_end()
    assert [each() for each in dropped] == [None, None]


def test_it_may_be_collected_in_a_thread_of_its_own(device):
    held, waited_for = {}, threading.Event()

    def read(number):
        if number == 4:  # for which the thread that makes batch 2 waits
            waited_for.wait()
            held.clear()  # as the garbage collector does, anywhere
        return numbers(number)

    held["batches"] = handoff(device, read)
    for number in range(2):
        assert are_of(next(held["batches"]), number)
    dropped = weakref.ref(held["batches"])
    waited_for.set()
    assert all_end()
    assert dropped() is None


def test_it_may_be_collected_in_the_middle_of_a_submit(device):
    """There, its thread holds a lock that its pool's end needs; of old, nothing ever went on."""
    held = {"batches": handoff(device)}
    locks = [pool._shutdown_lock for pool in held["batches"]._end.peek()[2][0]]

    def collect():
        with locks[0], locks[1], locks[2], concurrent.futures.thread._global_shutdown_lock:
            held.clear()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(60)
    assert not collecting.is_alive()
    assert all_end()


def test_python_ends_with_a_stream_that_is_in_use():
    program = """
import sys
sys.path[:0] = ["tests", "tests/data/loaders"]
import test_dali_handoff as here
batches = here.handoff(here.CPU, side=1000)
for number in range(5):
    next(batches)
print("drawn")
"""
    assert in_new_process(program) == "drawn\n"


@pytest.mark.gpu
def test_batches_wait_for_no_work_that_is_queued():
    device = Device("/gpu:0", 0)
    batches = handoff(device)
    with tf.device(device.name):
        matrix = tf.random.normal((8192, 8192))
        queue = tf.function(lambda: tf.reduce_sum(tf.matmul(matrix, matrix)), autograph=False)
        queue().numpy()  # traced
        kept = [next(batches) for _ in range(2 * DEPTH)]
        began = time.monotonic()
        queued = [queue() for _ in range(60)]
        kept.append(next(batches))
        drawn = time.monotonic() - began
        [each.numpy() for each in queued]
        done = time.monotonic() - began
        for _ in range(100):
            queue()
            kept.append(next(batches))
    assert drawn < done / 4
    assert all(are_of(batch, number) for number, batch in enumerate(kept))


@pytest.mark.gpu
def test_a_graph_that_is_recorded_meanwhile_is_whole():
    """DALI's own export waits for the device when it is dropped, which ends what is recorded."""
    batches = handoff(Device("/gpu:0", 0))
    kept = [next(batches) for _ in range(9)]
    runtime = ctypes.CDLL("libcudart.so.12")
    stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert runtime.cudaSetDevice(0) == 0
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), NON_BLOCKING) == 0
    assert runtime.cudaStreamBeginCapture(stream, THREAD_LOCAL) == 0
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:  # here little may be asked for
            kept += elsewhere.submit(lambda: [next(batches) for _ in range(50)]).result()
        time.sleep(0.5)  # for what is dropped in threads of DALI's
    finally:
        ended = runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))
    assert ended == 0
    assert all(are_of(batch, number) for number, batch in enumerate(kept))
