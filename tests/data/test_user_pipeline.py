import itertools
import logging
import time

import numpy as np
import PIL.Image
import psutil
import pytest
import tensorflow as tf
from nvidia.dali import fn, pipeline_def, types

from tfaccel import UserError
from tfaccel.data import user_pipeline
from tfaccel.data.placement import Placement
from tfaccel.data.user_pipeline import open_pipeline
from tfaccel.runtime.devices import Device

NUM_EXAMPLES = 37
CPU = Device("/cpu:0", None)
READER = {"pad_last_batch": True, "stick_to_shard": True, "name": "reader"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """37 paths of PNG files of 4 x 4 pixels, all of the colour of their place."""
    root = tmp_path_factory.mktemp("pipeline")
    for index in range(NUM_EXAMPLES):
        PIL.Image.new("L", (4, 4), index).save(root / f"{index:02d}.png")
    return [str(path) for path in sorted(root.iterdir())]


@pipeline_def
def pipe(files, shard_id, num_shards, device, reader=READER):
    """Images, and their places as labels."""
    encoded, label = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        shard_id=shard_id,
        num_shards=num_shards,
        **reader,
    )
    return fn.decoders.image(encoded, device="mixed" if device == "gpu" else "cpu"), label


@pipeline_def
def noise():
    return fn.random.uniform(shape=(3,))


def opened(function, *, replicas=1, rows=8, last_batch="pad", steps=None, device=CPU, **arguments):
    return open_pipeline(
        function,
        arguments,
        global_batch_size=rows * replicas,
        num_replicas=replicas,
        last_batch=last_batch,
        steps_per_epoch=steps,
        device=device,
        num_threads=2,
        prefetch_batches=2,
    )


def stream_of(data, *, replica=0, first=0, device=CPU):
    placement = Placement(device, num_threads=2, seed=1 + replica)
    return data.stream(placement, data.feed(replica, first=first))


def real_labels(data, replica, *, num_epochs):
    """Each epoch's labels that count, of one replica."""
    stream, real = stream_of(data, replica=replica), data.plan.real
    return [
        [
            label
            for step in range(data.plan.num_steps)
            for label in next(stream)[1].numpy()[
                real(step=step, epoch=epoch, replica_index=replica)
            ]
        ]
        for epoch in range(num_epochs)
    ]


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def draw(stream, num_batches):
    return [next(stream) for _ in range(num_batches)]


@pytest.mark.parametrize("stick", [True, False])
@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_example_counts_once_in_each_of_three_epochs(files, replicas, rows, stick):
    reader = {"pad_last_batch": True, "stick_to_shard": stick}
    data = opened(pipe, files=files, replicas=replicas, rows=rows, reader=reader)
    assert data.plan.num_steps == -(-NUM_EXAMPLES // (rows * replicas))
    parts = [real_labels(data, replica, num_epochs=3) for replica in range(replicas)]
    for epoch in range(3):
        for replica in range(replicas):
            shard = replica if stick else (replica + epoch) % replicas
            bounds = [NUM_EXAMPLES * each // replicas for each in (shard, shard + 1)]
            assert parts[replica][epoch] == list(range(*bounds))
        assert sorted(joined(part[epoch] for part in parts)) == list(range(NUM_EXAMPLES))


@pytest.mark.parametrize(
    "shuffle",
    [
        {"random_shuffle": True, "initial_fill": 7},
        {"random_shuffle": True, "stick_to_shard": True},
        {"shuffle_after_epoch": True},  # DALI then sticks to the shard, and says so
    ],
)
def test_shuffled_examples_count_once_and_change_their_order(files, shuffle):
    # Each replica has its own seed: the shards are disjoint all the same.
    reader = {"pad_last_batch": True, **shuffle}
    data = opened(pipe, files=files, replicas=3, rows=5, reader=reader)
    parts = [real_labels(data, replica, num_epochs=3) for replica in range(3)]
    for epoch in range(3):
        assert sorted(joined(part[epoch] for part in parts)) == list(range(NUM_EXAMPLES))
    assert len({tuple(labels) for labels in parts[0]}) == 3


def test_a_replica_whose_shard_has_ended_gets_padding(files):
    data = opened(pipe, files=files, replicas=3, rows=12)  # shards of 12, 12 and 13
    assert data.plan.num_steps == 2
    real = [data.plan.real(step=1, epoch=0, replica_index=replica) for replica in range(3)]
    assert [each.sum() for each in real] == [0, 0, 1]
    stream = stream_of(data)
    next(stream)
    assert next(stream)[1].numpy().tolist() == [11] * 12  # copies of the shard's last


def test_batches_are_the_outputs_with_labels_flat(files, caplog):
    with caplog.at_level(logging.INFO, "tfaccel"):
        data = opened(pipe, files=files, rows=5)
    assert "labels [rows]" in caplog.text
    image, label = next(stream_of(data))
    assert data.spec == (
        tf.TensorSpec((5, 4, 4, 3), tf.uint8),
        tf.TensorSpec((5,), tf.int32),
    )
    assert (image.shape, image.dtype) == (data.spec[0].shape, tf.uint8)
    assert (label.shape, label.dtype) == (data.spec[1].shape, tf.int32)
    np.testing.assert_array_equal(image[:, 0, 0, 0], label)


def test_every_pipeline_is_told_its_place(files):
    told = []

    @pipeline_def(batch_size=1, num_threads=1)  # which the run's own replace
    def function(shard_id, num_shards, replica_index, device, own):
        told.append((shard_id, num_shards, replica_index, device, own))
        return fn.random.uniform()

    data = opened(function, replicas=3, steps=2, own="mine")
    stream_of(data, replica=1)
    assert told == [(2, 3, 2, "cpu", "mine"), (1, 3, 1, "cpu", "mine")]


def test_replicas_draw_differently_and_a_seed_repeats():
    data = opened(noise, replicas=2, rows=3, steps=4)
    assert data.plan.num_examples is None
    assert data.plan.num_steps == 4
    first, second = (next(stream_of(data, replica=replica))[0] for replica in range(2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, next(stream_of(data, replica=0))[0])


@pytest.mark.parametrize("last_batch", ["pad", "drop"])
def test_a_late_start_gives_what_an_uninterrupted_run_has(files, last_batch, caplog):
    @pipeline_def
    def function(shard_id, num_shards):
        _, label = fn.readers.file(
            files=files,
            labels=list(range(len(files))),
            random_shuffle=True,
            shard_id=shard_id,
            num_shards=num_shards,
            **READER,
        )
        return fn.random.uniform(), label

    data = opened(function, replicas=2, rows=5, last_batch=last_batch)
    stream = stream_of(data, replica=1)
    batches = draw(stream, 3 * data.plan.num_steps)
    first = data.plan.num_steps + 2
    with caplog.at_level(logging.INFO, "tfaccel"):
        late = stream_of(data, replica=1, first=first)
    assert f"makes and drops {data.plan.batches_per_epoch + 2} batches" in caplog.text
    for expected in batches[first:]:
        for one, other in zip(expected, next(late), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("last_batch", ["pad", "drop"])
def test_a_live_stream_skips_to_a_later_batch(files, last_batch):
    data = opened(pipe, files=files, rows=8, last_batch=last_batch)
    labels = [batch[1].numpy().tolist() for batch in draw(stream_of(data), 12)]
    stream = stream_of(data)
    draw(stream, 2)
    for first in (2, data.plan.num_steps, 2 * data.plan.num_steps + 1):
        assert stream.skip_to(first)
        assert next(stream)[1].numpy().tolist() == labels[first]
        assert not stream.skip_to(first)


def test_a_skip_makes_each_batch_once():
    made = []

    def source(number):
        made.append(number)
        return np.full((3, 2), number, np.float32)

    @pipeline_def
    def function():
        return fn.external_source(source=source)

    data = opened(function, rows=3, steps=5)
    made.clear()
    stream = stream_of(data)
    for epoch in range(6):
        assert stream.skip_to(5 * epoch)
        assert [batch[0].numpy()[0, 0] for batch in draw(stream, 2)] == [5 * epoch, 5 * epoch + 1]
    assert made == list(range(len(made)))
    assert len(made) <= 5 * 5 + 2 + 3  # and what is made ahead


def test_a_stream_that_has_failed_skips_nowhere(files, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    stream = stream_of(opened(pipe, files=[*files[:8], str(bad)], rows=8))
    with pytest.raises(UserError):
        draw(stream, 2)
    assert not any(stream.skip_to(first) for first in (0, 1, 2, 4))


def test_drop_leaves_out_each_epochs_padded_batch(files):
    data = opened(pipe, files=files, rows=8, last_batch="drop")
    assert (data.plan.num_steps, data.plan.batches_per_epoch) == (4, 5)
    assert real_labels(data, 0, num_epochs=2) == [list(range(32))] * 2


@pytest.mark.parametrize(("last_batch", "num_steps"), [("drop", 4), ("repeat", 5)])
def test_a_reader_that_does_not_pad_runs_on(files, last_batch, num_steps):
    data = opened(pipe, files=files, rows=8, last_batch=last_batch, reader={})
    assert data.plan.num_steps == num_steps
    labels = joined(real_labels(data, 0, num_epochs=2))
    assert labels == [each % NUM_EXAMPLES for each in range(2 * 8 * num_steps)]


def test_repeat_says_that_examples_count_again(files, caplog):
    with caplog.at_level(logging.INFO, "tfaccel"):
        data = opened(pipe, files=files, rows=8, last_batch="repeat")
    assert "some examples count twice" in caplog.text
    assert real_labels(data, 0, num_epochs=1)[0][-4:] == [36] * 4  # DALI's padding counts


def test_pad_needs_no_padding_reader_where_batches_come_out_even(files):
    data = opened(pipe, files=files[:32], rows=8, replicas=2, reader={})
    parts = [real_labels(data, replica, num_epochs=2) for replica in range(2)]
    for epoch in range(2):
        assert sorted(parts[0][epoch] + parts[1][epoch]) == list(range(32))


# External sources.


def test_an_external_source_is_endless():
    @pipeline_def
    def function(shard_id):
        def source(info):
            return np.array([shard_id, info.idx_in_epoch], np.int32)

        return fn.external_source(source=source, batch=False, dtype=types.INT32)

    data = opened(function, replicas=2, rows=3, steps=2)
    stream = stream_of(data, replica=1)
    for step in range(4):
        (batch,) = next(stream)
        assert batch.numpy().tolist() == [[1, 3 * step + row] for row in range(3)]


def test_an_external_source_of_batches_is_asked_for_one_batch_when_tried():
    asked = []

    def source(number):
        asked.append(number)
        return np.full((3, 2), number, np.float32)

    @pipeline_def
    def function():
        return fn.external_source(source=source)

    data = opened(function, rows=3, steps=2)
    assert asked == [0]
    assert [next(stream_of(data))[0].numpy()[0, 0]] == [0.0]


def test_an_external_source_that_ends_is_an_error():
    @pipeline_def
    def finite():
        return fn.external_source(source=[np.zeros((3, 2), np.float32)] * 2)

    stream = stream_of(opened(finite, rows=3, steps=5))
    with pytest.raises(UserError, match=r"source of finite\(\) has ended; .* cycle=True"):
        draw(stream, 3)


def test_an_external_source_that_fails_is_an_error_with_its_cause():
    @pipeline_def
    def function():
        def source(info):
            if info.idx_in_epoch > 12:
                raise KeyError("gone")
            return np.zeros(2, np.float32)

        return fn.external_source(source=source, batch=False)

    stream = stream_of(opened(function, rows=3, steps=5))
    with pytest.raises(UserError, match=r"function\(\) failed: UnknownError: KeyError: 'gone'$"):
        draw(stream, 5)


# Mistakes.


def test_functions_that_are_not_pipelines_are_refused(files):
    def plain():
        return fn.random.uniform()

    with pytest.raises(UserError, match=r"plain\(\) is not a DALI pipeline function; decorate it"):
        opened(plain)
    built = noise(batch_size=1, num_threads=1, device_id=None)
    with pytest.raises(
        UserError, match=r"Pipeline\(\) is not a DALI pipeline function.*without calling it"
    ):
        opened(built)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"pipe\(\) needs 'files'; give files=\.\.\."),
        ({"files": [], "raeder": {}}, r"no parameter 'raeder'; did you mean 'reader'\?"),
        ({"files": [], "shard_id": 0}, r"the run itself gives 'shard_id' to pipe"),
        ({"files": [], "seed": 0}, r"the run itself gives 'seed' to pipe"),
    ],
)
def test_arguments_must_fit(arguments, message):
    with pytest.raises(UserError, match=message):
        opened(pipe, **arguments)


def test_variadic_parameters():
    @pipeline_def
    def positional(*args, shape=(1,)):
        assert args == ()
        return fn.random.uniform(shape=shape)

    @pipeline_def
    def by_name(**others):
        return fn.random.uniform()

    assert opened(positional, steps=1, shape=(3,)).spec[0].shape == (8, 3)
    for arguments in ({}, {"shape": (3,)}):
        with pytest.raises(
            UserError, match=r"by_name\(\) takes \*\*others, which DALI does not allow"
        ):
            opened(by_name, steps=1, **arguments)


def test_a_parameter_must_not_hide_dalis_own():
    @pipeline_def
    def function(batch_size):
        return fn.random.uniform(shape=(batch_size,))

    with pytest.raises(UserError, match=r"parameter 'batch_size' of function\(\) hides DALI's own"):
        opened(function, steps=1)


def test_batches_must_divide_by_the_replicas():
    with pytest.raises(UserError, match="global_batch_size=5 is not divisible by 2 replicas"):
        open_pipeline(
            noise,
            {},
            global_batch_size=5,
            num_replicas=2,
            last_batch="pad",
            steps_per_epoch=1,
            device=CPU,
            num_threads=1,
            prefetch_batches=1,
        )


def test_a_reader_must_be_sharded(files):
    @pipeline_def
    def whole():
        return fn.readers.file(files=files)[1]

    @pipeline_def
    def same(num_shards):
        return fn.readers.file(files=files, num_shards=num_shards)[1]

    with pytest.raises(UserError, match="shard 0 of 1 on replica 1 of 2; add shard_id=shard_id"):
        opened(whole, replicas=2)
    with pytest.raises(UserError, match="shard 0 of 2 on replica 1 of 2; add shard_id=shard_id"):
        opened(same, replicas=2)


def test_readers_must_have_one_length(files):
    @pipeline_def
    def function():
        return fn.readers.file(files=files)[1], fn.readers.file(files=files[1:])[1]

    with pytest.raises(UserError, match=r"readers differ in .*: \(36, 0, 0\) and \(37, 0, 0\)"):
        opened(function, last_batch="repeat")


def test_pad_needs_a_reader_that_pads(files):
    with pytest.raises(
        UserError, match=r"add pad_last_batch=True to the reader, or use last_batch="
    ):
        opened(pipe, files=files, reader={})


def test_drop_must_leave_a_step(files):
    with pytest.raises(UserError, match="global_batch_size=40 is more than the 37 examples"):
        opened(pipe, files=files, rows=40, last_batch="drop")


def test_steps_per_epoch_is_for_what_has_no_end(files):
    with pytest.raises(
        UserError, match=r"steps_per_epoch=None for noise\(\), but it has no reader"
    ):
        opened(noise)
    with pytest.raises(UserError, match=r"steps_per_epoch=3 for pipe\(\), but its reader gives"):
        opened(pipe, files=files, steps=3)


def test_samples_must_have_one_shape():
    @pipeline_def
    def function():
        size = fn.random.uniform(range=(2, 30), dtype=types.INT32)
        return fn.random.uniform(shape=fn.stack(size))

    with pytest.raises(
        UserError, match=r"output 0 of function\(\) has samples of different shapes"
    ):
        opened(function, steps=1)


def test_sources_must_fill_the_batch():
    @pipeline_def
    def function():
        return fn.external_source(source=lambda number: np.zeros((2, 5), np.float32))

    with pytest.raises(UserError, match="has 2 samples, expected 8, the rows of a batch"):
        opened(function, steps=1)


def test_a_shape_that_changes_later_is_an_error(files, tmp_path):
    PIL.Image.new("L", (5, 4)).save(tmp_path / "large.png")
    others = [*files[:16], str(tmp_path / "large.png")]
    stream = stream_of(opened(pipe, files=others))
    with pytest.raises(UserError, match=r"pipe\(\) failed: .*shape"):
        draw(stream, 3)


def test_faults_at_the_start_are_errors_with_their_cause(files, tmp_path):
    with pytest.raises(UserError, match=r"pipe\(\) failed: .*readers.file: .*no-such-file"):
        opened(pipe, files=["/no-such-file.png"] * 8)

    @pipeline_def
    def fails():
        raise KeyError("own")

    with pytest.raises(UserError, match=r"fails\(\) failed: KeyError: 'own'$") as caught:
        opened(fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_faults_on_the_way_are_errors_with_their_cause(files, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    stream = stream_of(opened(pipe, files=[*files[:20], str(bad)]))
    with pytest.raises(UserError, match=r"pipe\(\) failed: .*decoders.image: nvImageCodec failure"):
        draw(stream, 3)


def test_a_dropped_stream_takes_its_threads_along(files, no_collector):
    running = psutil.Process().num_threads
    data = opened(pipe, files=files)
    next(stream_of(data))
    before = running()
    streams = [stream_of(data) for _ in range(4)]
    for stream in streams:
        next(stream)
    assert running() > before
    del stream, streams
    deadline = time.monotonic() + 60
    while running() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # they end by themselves, in a moment
    assert running() <= before


def test_what_is_on_the_cpu_is_copied_to_a_gpu(files):
    # The graph alone: it is not built, so it needs no GPU.
    given = {"batch_size": 2, "num_threads": 1, "device_id": 0, "seed": 0}
    arguments = {"files": files, "shard_id": 0, "num_shards": 1, "device": "gpu"}
    outputs = user_pipeline._make(pipe, given, arguments)._graph_out
    assert [each.device for each in outputs] == ["gpu", "gpu"]
    outputs = user_pipeline._make(pipe, given | {"device_id": None}, arguments | {"device": "cpu"})
    assert [each.device for each in outputs._graph_out] == ["cpu", "cpu"]


@pytest.mark.gpu
def test_on_a_gpu(files):
    gpu = Device("/gpu:0", 0)
    data = opened(pipe, files=files, replicas=2, rows=5, device=gpu)
    labels = []
    for replica in range(2):
        stream = stream_of(data, replica=replica, device=gpu)
        for number in range(data.plan.num_steps):
            image, label = next(stream)
            assert "GPU:0" in image.device
            np.testing.assert_array_equal(image[:, 0, 0, 0], label)  # the label comes from the CPU
            real = data.plan.real(step=number, epoch=0, replica_index=replica)
            labels += label.numpy()[real].tolist()
    assert labels == list(range(NUM_EXAMPLES))


@pytest.mark.gpu
def test_an_external_source_on_a_gpu():
    @pipeline_def
    def function(device):
        assert device == "gpu"
        data = fn.external_source(source=lambda i: np.full((3, 2), i, np.float32))
        return data.gpu() + 1, data

    gpu = Device("/gpu:0", 0)
    stream = stream_of(opened(function, rows=3, steps=2, device=gpu), device=gpu)
    for step in range(3):
        more, same = next(stream)
        assert "GPU:0" in more.device
        np.testing.assert_array_equal(more, np.full((3, 2), step + 1))
        np.testing.assert_array_equal(same, np.full((3, 2), step))
