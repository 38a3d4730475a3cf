"""One process for all GPUs of a host against a process for each: images/s of training a network.

    uv run --extra gpu python tools/bench_processes.py --gpus=2 --output=processes.json

MirroredStrategy is the first, MultiWorkerMirroredStrategy, by `tfaccel launch`, the second. Images
are random and lie in the GPUs' memory. The last line is JSON.
"""

import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import flags

GPUS = flags.DEFINE_integer("gpus", 2, "GPUs of this host to use.")
OUTPUT = flags.DEFINE_string("output", None, "A new JSON file; none by default.")
MODEL = flags.DEFINE_string("model", "resnet50", "Of keras.applications, or tfaccel's own.")
SIZE = flags.DEFINE_integer("image_size", 224, "Pixels, height and width.")
BATCH = flags.DEFINE_integer("batch", 256, "Images a GPU and step.")
PRECISION = flags.DEFINE_string("precision", "mixed_float16", "Keras dtype policy.")
STEPS = flags.DEFINE_integer("steps", 100, "Of each stretch.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Stretches, after one that compiles and warms up.")
MEASURE = flags.DEFINE_string("measure", None, "Of the child: where the chief writes its rates.")


def main():
    """Measures both, and prints what came of it."""
    if MEASURE.value:
        return measure(pathlib.Path(MEASURE.value))
    from tfaccel import runtime

    of_one = [sys.executable, __file__]
    launcher = [sys.executable, "-m", "tfaccel", "launch", f"--nproc-per-node={GPUS.value}"]
    rates = {
        "one process": _rates(of_one),
        "a process for each GPU": _rates([*launcher, __file__]),
    }
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "command": " ".join(["python", "tools/bench_processes.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "environment": runtime.describe_environment(),
        "images_per_second": rates,
        "a process for each GPU / one process": medians["a process for each GPU"]
        / medians["one process"],
    }
    if OUTPUT.value:
        pathlib.Path(OUTPUT.value).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def _rates(command: list[str]) -> list[float]:
    """Runs this program as `command` says and returns images/s of each stretch."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rates.json"
        subprocess.run([*command, f"--measure={path}", *sys.argv[1:]], check=True)
        return json.loads(path.read_text())


def measure(path: pathlib.Path) -> None:
    """Trains on this process's GPUs, as one worker of the job; the chief writes the rates."""
    import keras
    import numpy as np

    import tfaccel
    from tfaccel import models, sources
    from tfaccel.callbacks.throughput import Throughput

    # Of several processes each takes its share of all GPUs by itself.
    run = tfaccel.setup(precision=PRECISION.value)
    size, batch = (SIZE.value, SIZE.value), BATCH.value * GPUS.value
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (4 * batch, *size, 3), dtype=np.uint8)
    train = run.loader(
        sources.arrays(images, random.integers(0, 100, len(images))),
        image_size=size,
        global_batch_size=batch,
        loader="memory",
        shuffle=True,
    )
    with run.scope():
        model = models.build(MODEL.value, image_shape=(*size, 3), num_outputs=100)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, keras.optimizers.SGD(1e-3, momentum=0.9), loss)
    rates = []
    for _ in range(1 + ROUNDS.value):
        throughput = Throughput(train)
        model.fit(train, epochs=STEPS.value // len(train), callbacks=[throughput], verbose=0)
        rates.append(throughput.images_per_second)
    if run.cluster.is_chief:
        path.write_text(json.dumps(rates[1:]))


if __name__ == "__main__":
    # Not by absl's `app.run`, after which TensorFlow looks for GPUs as it is imported: too early.
    flags.FLAGS(sys.argv)
    main()
