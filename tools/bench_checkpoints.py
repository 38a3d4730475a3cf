"""What checkpoints cost: ResNet-50 with one every so many steps, and without, in turn.

    uv run --extra gpu python tools/bench_checkpoints.py --output=tools/results/checkpoints.json

The images are random and lie in the GPU's memory, so that nothing but the step and the checkpoints
takes time. The last line is JSON.
"""

import datetime
import json
import pathlib
import statistics
import sys
import tempfile

from absl import flags

OUTPUT = flags.DEFINE_string("output", None, "A new JSON file; none by default.")
MODEL = flags.DEFINE_string("model", "resnet50", "Of keras.applications, or tfaccel's own.")
SIZE = flags.DEFINE_integer("image_size", 224, "Pixels, height and width.")
BATCH = flags.DEFINE_integer("batch", 256, "Global batch.")
PRECISION = flags.DEFINE_string("precision", "mixed_float16", "Keras dtype policy.")
STEPS = flags.DEFINE_integer("steps", 200, "Of each stretch.")
EVERY = flags.DEFINE_integer("every", 100, "Steps between checkpoints.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Stretches with, and as many without.")
DIR = flags.DEFINE_string("dir", None, "For the checkpoints; a temporary folder by default.")


def main():
    """Measures, and prints what came of it."""
    import keras
    import numpy as np

    import tfaccel
    from tfaccel import models, runtime, sources
    from tfaccel.callbacks.throughput import Throughput

    run = tfaccel.setup(precision=PRECISION.value)
    size = (SIZE.value, SIZE.value)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (4 * BATCH.value, *size, 3), dtype=np.uint8)
    labels = random.integers(0, 100, len(images))
    train = run.loader(
        sources.arrays(images, labels),
        image_size=size,
        global_batch_size=BATCH.value,
        loader="memory",
        shuffle=True,
    )
    with run.scope():
        model = models.build(MODEL.value, image_shape=(*size, 3), num_outputs=100)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, keras.optimizers.SGD(1e-3, momentum=0.9), loss)
    throughput = Throughput(train)

    def stretch(callbacks):
        epochs = STEPS.value // len(train)
        model.fit(train, epochs=epochs, callbacks=[throughput, *callbacks], verbose=0)
        return throughput.images_per_second

    rates = {"without": [], "with": []}
    stretch([])  # compiles, and warms up
    with tempfile.TemporaryDirectory(dir=DIR.value) as folder:
        for number in range(ROUNDS.value):
            rates["without"].append(stretch([]))
            config = tfaccel.CheckpointConfig(every_steps=EVERY.value, every_epochs=10**6)
            path = pathlib.Path(folder) / str(number)
            train.start_at(epoch=0)
            rates["with"].append(stretch([run.checkpoints(path, config, monitor="loss")]))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "command": " ".join(["python", "tools/bench_checkpoints.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "environment": runtime.describe_environment(),
        "state_mib": round(sum(each.value.numpy().nbytes for each in model.variables) / 2**20),
        "images_per_second": rates,
        "with / without": medians["with"] / medians["without"],
    }
    if OUTPUT.value:
        pathlib.Path(OUTPUT.value).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    # Not by absl's `app.run`, after which TensorFlow looks for GPUs as it is imported: too early.
    flags.FLAGS(sys.argv)
    main()
