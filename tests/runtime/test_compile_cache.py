import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import pytest
from conftest import in_new_process
from tensorflow.python.eager import context

from tfaccel.runtime import compile_cache

# Fields 1 to 3, of bytes: "ab", 200 times "c", "d".
ENTRY = b"\x0a\x02ab" + b"\x12\xc8\x01" + b"c" * 200 + b"\x1a\x01d"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_clustering_debug")
    begin_process(monkeypatch)
    return tmp_path / "tfaccel" / "xla"


def begin_process(monkeypatch, *, devices=None):
    """As if this were another process, which has asked TensorFlow for its devices or not."""
    compile_cache._link.cache_clear()
    monkeypatch.setattr(context.context(), "_physical_devices", devices)


def use(decides):
    """As `setup` does."""
    compile_cache.prepare(wanted=True)
    compile_cache.use(decides)


def place():
    """Where TensorFlow would look."""
    flags = os.environ["TF_XLA_FLAGS"]
    assert flags.startswith("--tf_xla_clustering_debug ")
    assert flags.count(compile_cache.FLAG) == flags.count("_device_types=GPU") == 1
    return os.path.realpath(re.search(rf"{compile_cache.FLAG}=(\S+)", flags)[1])


def test_each_set_of_settings_has_a_folder_and_keeps_it(own_cache):
    folders = []
    for tf32 in (True, False, True):
        use({"tf32": tf32})
        folders.append(place())
        assert json.loads((own_cache / folders[-1] / "settings.json").read_text()) == {"tf32": tf32}
    assert folders[0] == folders[2] != folders[1]
    assert {each.name for each in own_cache.iterdir()} == set(map(os.path.basename, folders))


def test_once_it_is_left_out_nothing_more_comes_there(own_cache, caplog):
    caplog.set_level("INFO", "tfaccel")
    use({})
    used = place()
    compile_cache.leave_out("of a reason")
    assert place() != used
    assert os.path.isdir(place())  # or TensorFlow ends the run
    assert "compile cache: off, because of a reason" in caplog.messages
    use({})
    assert place() == used


def test_a_child_that_leaves_it_out_does_not_use_its_parents(monkeypatch):
    use({})
    begin_process(monkeypatch)
    compile_cache.prepare(wanted=False)
    assert os.environ["TF_XLA_FLAGS"] == "--tf_xla_clustering_debug"
    compile_cache.leave_out("of a reason")
    assert os.environ["TF_XLA_FLAGS"] == "--tf_xla_clustering_debug"


def test_it_is_said_where_tensorflow_has_read_its_flags(monkeypatch, caplog):
    caplog.set_level("INFO", "tfaccel")
    begin_process(monkeypatch, devices=[])
    use({})
    assert os.environ["TF_XLA_FLAGS"] == "--tf_xla_clustering_debug"
    assert caplog.messages[-1].startswith("compile cache: off, because TensorFlow has read its")


def test_tensorflow_reads_its_flags_when_it_is_asked_for_devices():
    """What `_is_prepared` and the order in `setup` are for."""
    with tempfile.TemporaryDirectory() as folder:
        in_new_process(
            "import os, tensorflow as tf\n"
            "from tensorflow.python.eager import context\n"
            "assert context.context()._physical_devices is None\n"
            "tf.config.list_physical_devices('GPU')\n"
            "assert context.context()._physical_devices is not None\n"
            f"os.environ['TF_XLA_FLAGS'] = '{compile_cache.FLAG}={folder}'\n"
            "tf.function(tf.sin, jit_compile=True)(1.0)\n"
        )
        assert not os.listdir(folder)


def test_a_process_knows_which_programs_are_there(own_cache, monkeypatch):
    assert not compile_cache.has("a model")
    use({})
    (folder,) = own_cache.iterdir()
    before = compile_cache.programs()
    compile_cache.note("a model", before)
    assert not compile_cache.has("a model")  # nothing was compiled
    for name in ("step.pb", "more.pb"):
        (folder / name).write_bytes(ENTRY)
    compile_cache.note("a model", before)
    assert compile_cache.programs() == {"step.pb", "more.pb"}
    begin_process(monkeypatch)
    assert not compile_cache.has("a model")
    use({})
    assert compile_cache.has("a model")
    assert not compile_cache.has("another model")
    (folder / "more.pb").unlink()
    assert not compile_cache.has("a model")


def test_without_a_folder_no_program_is_there(monkeypatch):
    use({})
    compile_cache.leave_out("a test asks for it")
    compile_cache.note("a model", frozenset())
    assert compile_cache.programs() == frozenset()
    assert not compile_cache.has("a model")


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"[1]", b"\xff"])
def test_a_damaged_list_of_programs_knows_none(own_cache, text):
    use({})
    (folder,) = own_cache.iterdir()
    (folder / "step.pb").write_bytes(ENTRY)
    compile_cache.note("a model", frozenset())
    (path,) = folder.glob("*.programs.json")
    path.write_bytes(text)
    assert not compile_cache.has("a model")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_not_used(own_cache, caplog, mode):
    caplog.set_level("INFO", "tfaccel")
    use({})
    own_cache.chmod(mode)
    use({})
    assert f"other users can write to {own_cache}" in caplog.messages[-1]
    assert not place().startswith(str(own_cache))


def test_folders_are_the_users_alone(own_cache):
    mask = os.umask(0o002)
    try:
        use({})
    finally:
        os.umask(mask)
    for each in (own_cache, *own_cache.iterdir()):
        assert each.stat().st_mode & 0o077 == 0


def test_what_killed_processes_left_goes_after_a_day(own_cache):
    use({})
    (folder,) = own_cache.iterdir()
    old, new = folder / "old.pb1.tmp", folder / "new.pb2.tmp"
    for each in (old, new):
        each.touch()
    os.utime(old, (0, 0))
    use({})
    assert new.exists()
    assert not old.exists()


def test_a_child_takes_its_own_link_and_a_user_s_choice_stays(monkeypatch, caplog):
    caplog.set_level("INFO", "tfaccel")
    use({})
    of_parent = os.environ["TF_XLA_FLAGS"]
    begin_process(monkeypatch)
    use({})
    assert os.environ["TF_XLA_FLAGS"] != of_parent
    place()
    monkeypatch.setenv("TF_XLA_FLAGS", f"{compile_cache.FLAG}=/elsewhere")
    use({})
    assert os.environ["TF_XLA_FLAGS"] == f"{compile_cache.FLAG}=/elsewhere"
    assert caplog.messages[-1] == "compile cache: set by TF_XLA_FLAGS"


@pytest.mark.parametrize(
    "damaged",
    [
        *(pytest.param(ENTRY[:size], id=f"{size} bytes") for size in (0, 1, 3, 5, 50, 206, 209)),
        pytest.param(bytes(len(ENTRY)), id="zeros"),
        pytest.param(ENTRY + b"\0", id="longer"),
    ],
)
def test_a_damaged_entry_is_named_and_removed(own_cache, caplog, damaged):
    use({})
    (folder,) = own_cache.iterdir()
    whole, cut_off = folder / "a.pb", folder / "b.pb"
    whole.write_bytes(ENTRY)
    cut_off.write_bytes(damaged)
    use({})
    assert whole.exists()
    assert not cut_off.exists()
    assert f"compile cache: removed {cut_off}, which was damaged" in caplog.messages


def test_what_was_not_read_for_longest_makes_room(own_cache, monkeypatch):
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 2 * len(ENTRY))
    use({"of": "others"})
    (folder,) = own_cache.iterdir()
    for age_s, name in enumerate("dabc"):
        path = folder / f"{name}.pb"
        path.write_bytes(ENTRY)
        os.utime(path, (time.time() - 100 * age_s, time.time() - 10000))
    begin_process(monkeypatch)
    use({})
    assert sorted(each.name for each in folder.glob("*.pb")) == ["a.pb", "d.pb"]


def test_a_place_that_cannot_be_written_is_said(own_cache, caplog):
    caplog.set_level("INFO", "tfaccel")
    own_cache.parent.mkdir()
    own_cache.write_text("a file")
    use({})
    assert "cannot be used (File exists)" in caplog.messages[-1]
    assert compile_cache.FLAG not in os.environ["TF_XLA_FLAGS"]


def test_what_is_too_much_is_removed_before_room_is_looked_for(own_cache, monkeypatch):
    use({"of": "others"})
    (folder,) = own_cache.iterdir()
    (folder / "a.pb").write_bytes(ENTRY)
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 0)
    looked = []
    monkeypatch.setattr(
        compile_cache, "check_room", lambda _: looked.append([*own_cache.glob("*/*.pb")])
    )
    begin_process(monkeypatch)
    use({})
    assert looked[0] == []


def test_too_little_room_is_said(monkeypatch, caplog):
    caplog.set_level("INFO", "tfaccel")
    monkeypatch.setattr(compile_cache, "LEAST_FREE_BYTES", 1 << 60)
    use({})
    assert "MiB are free)" in caplog.messages[-1]


def test_a_full_quota_is_said(monkeypatch, caplog):
    caplog.set_level("INFO", "tfaccel")

    def over_quota(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "posix_fallocate", over_quota)
    use({})
    assert "cannot be used (Disk quota exceeded)" in caplog.messages[-1]


on_cpu_and_gpus = pytest.mark.parametrize(
    "gpu_ids",
    [
        pytest.param([], marks=pytest.mark.slow, id="cpu"),
        pytest.param(["0"], marks=pytest.mark.gpu, id="gpu"),
        pytest.param(["0", "1"], marks=pytest.mark.multi_gpu, id="gpus"),
    ],
)

# How programs begin whose arguments are the GPUs.
WITH_CACHE = """
import sys
from tfaccel.runtime import compile_cache, devices as runtime
gpu_ids = [int(each) for each in sys.argv[1:]]
if not gpu_ids:     # which the product leaves out: as if it were a GPU
    compile_cache.DEVICE_TYPE = "CPU"
    keep = runtime._keep_programs
    runtime._keep_programs = lambda config, gpu_ids, *, xla: keep(config, [0], xla=xla)
"""

PROGRAM = """
import keras, numpy as np, tfaccel
run = tfaccel.setup(gpu_ids=gpu_ids, xla=True, deterministic=True)
rows = [(np.full(3, index, np.float32), np.ones(1, np.float32)) for index in range(8)]
with run.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
run.compile(model, "sgd", "mse")
model.fit(run.examples(rows, global_batch_size=4), verbose=0)
print([each.tolist() for each in model.get_weights()])
"""


@on_cpu_and_gpus
def test_the_next_process_finds_what_was_compiled_and_mends_what_was_damaged(
    own_cache, gpu_ids, monkeypatch
):
    monkeypatch.setenv("TFACCEL_VERBOSE", "1")

    def trained():
        done = subprocess.run(
            [sys.executable, "-c", WITH_CACHE + PROGRAM, *gpu_ids],
            capture_output=True,
            text=True,
            check=True,
        )
        (folder,) = own_cache.iterdir()
        entries = {each: each.stat().st_mtime_ns for each in folder.glob("*.pb")}
        assert entries
        return done.stdout, done.stderr, entries

    first, log, entries = trained()
    assert ", 0 programs" in log
    second, log, again = trained()
    assert again == entries  # written once
    assert f", {len(entries)} programs" in log
    for each in entries:
        os.truncate(each, 1000)
    third, log, anew = trained()
    assert log.count("which was damaged") == len(entries)
    assert anew.keys() == entries.keys()
    assert first == second == third


IMAGES = """
import keras, numpy as np, tfaccel
layers = keras.layers
run = tfaccel.setup(
    gpu_ids=gpu_ids, xla=True, precision="mixed_bfloat16", begin_without_xla=True)
with run.scope():
    x = inputs = keras.Input((32, 32, 3))
    for filters in (8, 16, 16):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(10, dtype="float32")(x))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
run.compile(model, keras.optimizers.SGD(0.1, momentum=0.9), loss, steps_per_execution=3)
images = np.random.default_rng(0).integers(0, 255, (48, 32, 32, 3)).astype(np.uint8)
source = tfaccel.sources.arrays(images, np.arange(48) % 10)
train = run.loader(source, image_size=(32, 32), global_batch_size=8, loader="memory", shuffle=True)
for _ in range(10_000):
    model.fit(train, verbose=0)
    if not model.train_function.is_without_xla_yet:
        break
"""


@pytest.mark.parametrize(
    "gpu_ids",
    [
        pytest.param([], marks=pytest.mark.slow, id="cpu"),
        pytest.param(["0"], marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_the_next_process_waits_for_the_program_that_was_compiled_beside_training(
    own_cache, gpu_ids, monkeypatch
):
    monkeypatch.setenv("TFACCEL_VERBOSE", "1")

    def trained():
        done = subprocess.run(
            [sys.executable, "-c", WITH_CACHE + IMAGES, *gpu_ids],
            capture_output=True,
            text=True,
            check=True,
        )
        (folder,) = own_cache.iterdir()
        return done.stderr, {each: each.stat().st_mtime_ns for each in folder.glob("*.pb")}

    log, entries = trained()
    assert "training has begun without XLA" in log
    assert "now it is used" in log
    log, again = trained()
    assert "it waits for XLA: the compile cache has a program of such a step" in log
    assert again == entries


# A step in which XLA calls libraries of many kinds, and has branches, loops and random numbers.
KINDS = """
import keras, numpy as np, tensorflow as tf, tfaccel
layers = keras.layers
run = tfaccel.setup(
    gpu_ids=gpu_ids, xla=True, precision="mixed_float16", flash_attention=not not gpu_ids)

class Signals(layers.Layer):
    def call(self, x):
        x = tf.cast(x, tf.float32)
        spectrum = tf.math.abs(tf.signal.fft2d(tf.cast(x, tf.complex64)))
        grams = tf.matmul(x, x, transpose_a=True) + 8 * tf.eye(x.shape[-1])
        triangle = tf.linalg.cholesky(grams)
        solved = tf.linalg.triangular_solve(triangle, tf.transpose(x, (0, 2, 1)))
        highest, places = tf.math.top_k(spectrum, 8)
        ordered = tf.sort(tf.gather(x, places[:, 0] % x.shape[1], axis=1, batch_dims=1), axis=1)
        return tf.concat([highest, ordered[:, :, :8], tf.transpose(solved, (0, 2, 1))[:, :8, :8],
            tf.math.cumsum(x, axis=1)[:, :8, :8]], axis=1)

with run.scope():
    x = inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(synchronized=True)(x))
    x = layers.DepthwiseConv2D(3, padding="same")(layers.MaxPooling2D()(x))
    x = layers.Reshape((64, 32))(layers.Dropout(0.1)(x))
    x = layers.MultiHeadAttention(2, 32)(x, x)
    x = layers.Concatenate(axis=1)([layers.LSTM(8, return_sequences=True)(x), Signals()(x)])
    x = layers.LayerNormalization()(layers.GRU(16)(x))
    model = keras.Model(inputs, layers.Dense(10, dtype="float32")(x))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
run.compile(model, keras.optimizers.AdamW(1e-3, global_clipnorm=1.0), loss, steps_per_execution=2)
images = np.random.default_rng(0).random((32, 16, 16, 3)).astype(np.float32)
rows = [(image, np.int32(index % 10)) for index, image in enumerate(images)]
for _ in range(2):
    history = model.fit(run.examples(rows, global_batch_size=8), verbose=0)
    print(history.history["loss"], all(np.isfinite(each).all() for each in model.get_weights()))
"""


@on_cpu_and_gpus
def test_a_step_of_operations_of_all_kinds_is_kept_and_loaded(own_cache, gpu_ids, monkeypatch):
    monkeypatch.setenv("TFACCEL_VERBOSE", "1")

    def trained():
        done = subprocess.run(
            [sys.executable, "-c", WITH_CACHE + KINDS, *gpu_ids], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (folder,) = own_cache.iterdir()
        programs = {each: each.stat().st_mtime_ns for each in folder.glob("*.pb")}
        assert programs
        losses = [line.split("]")[0].strip("[") for line in done.stdout.splitlines()]
        assert done.stdout.count("True") == len(losses) == 2
        return [float(each) for each in losses], programs

    losses, programs = trained()
    again, kept = trained()
    assert kept == programs
    assert again == pytest.approx(losses, rel=0.02)  # atomic additions are in any order


@pytest.mark.slow
def test_two_processes_that_compile_the_same_at_once_leave_what_a_third_one_reads(
    own_cache, monkeypatch
):
    monkeypatch.setenv("TFACCEL_VERBOSE", "1")
    settings = {"stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([sys.executable, "-c", WITH_CACHE + IMAGES], **settings) for _ in range(2)
    ]
    for each in both:
        _, log = each.communicate()
        assert each.returncode == 0, log
        assert "training has begun without XLA" in log
    done = subprocess.run([sys.executable, "-c", WITH_CACHE + IMAGES], check=True, **settings)
    assert "it waits for XLA: the compile cache has a program of such a step" in done.stderr
    assert "damaged" not in done.stderr
