"""Measures what checkpoints cost: trains ResNet-50 with and without them, in turn.

    uv run --extra gpu python tools/bench_checkpoints.py --output=tools/results/checkpoints.json

The images are random and stay in GPU memory, so only the step and the checkpoints take time. The
time covers all of `fit`, including the last checkpoint and the wait until all checkpoints are on
the disk. The last line is JSON. Exit codes: 0 done; 2 a mistake in the call.
"""

import argparse
import datetime
import json
import math
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from bench_arms.call import whole

# Steps of an epoch. 7 divides no usual --every, so most checkpoints fall within an epoch.
NUM_BATCHES = 7


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the result, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    import tfaccel
    from tfaccel.runtime import devices as runtime
    from tfaccel.training.checkpoint import state

    run = tfaccel.setup(precision=options.precision)
    train = make_loader(run, options)
    model = make_model(run, options)
    epochs = math.ceil(options.steps / NUM_BATCHES)

    def stretch(callbacks):
        train.start_at(epoch=0)
        began = time.perf_counter()
        model.fit(train, epochs=epochs, callbacks=callbacks, verbose=0)
        return epochs * train.num_examples / (time.perf_counter() - began)

    config = tfaccel.CheckpointConfig(every_steps=options.every, every_epochs=10**6)
    rates = measure(
        stretch, lambda folder: run.checkpoints(folder, config, monitor="loss"), options
    )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "command": shlex.join(["python", "tools/bench_checkpoints.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "environment": runtime.describe_environment(),
        "state_mib": round(state.num_bytes(model) / 2**20),  # including the optimizer
        "images_per_second": rates,
        "with / without": medians["with"] / medians["without"],
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=new_file, help="a new JSON file; default: write no file")
    add("--model", default="resnet50", help="a model of keras.applications or tfaccel")
    add("--image-size", type=whole(1), default=224, help="height and width")
    add("--batch", type=whole(1), default=256, help="images of a step on all GPUs together")
    add("--precision", default="mixed_float16", help="a Keras dtype policy")
    add("--steps", type=whole(1), default=200, help="steps of a stretch, rounded up to epochs")
    add("--every", type=whole(1), default=100, help="steps between checkpoints")
    add(
        "--rounds",
        type=whole(1),
        default=3,
        help="stretches with and stretches without checkpoints",
    )
    add("--dir", help="a folder for the checkpoints; default: the system's temporary folder")
    return parser.parse_args(arguments)


def new_file(text: str) -> pathlib.Path:
    """Checks that a file does not exist but its folder does, and returns the path."""
    path = pathlib.Path(text)
    if path.exists() or not path.absolute().parent.is_dir():
        wrong = "exists" if path.exists() else "has no folder"
        raise argparse.ArgumentTypeError(f"{path} {wrong}; give a new file in an existing folder")
    return path


def make_loader(run, options: argparse.Namespace):
    """Returns a loader of random images."""
    import numpy as np
    from bench_arms.timed_fit import random_images

    from tfaccel import sources

    images = random_images(NUM_BATCHES * options.batch, options.image_size)
    labels = np.random.default_rng(0).integers(0, 100, len(images))
    return run.loader(
        sources.arrays(images, labels),
        image_size=images.shape[1:3],
        global_batch_size=options.batch,
        loader="memory",
        shuffle=True,
    )


def make_model(run, options: argparse.Namespace):
    """Returns a compiled model."""
    import keras

    from tfaccel.experiment import models

    shape = (options.image_size, options.image_size, 3)
    with run.scope():
        model = models.build(options.model, image_shape=shape, num_outputs=100)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run.compile(model, keras.optimizers.SGD(1e-3, momentum=0.9), loss)
    return model


def measure(
    stretch: Callable, make_callback: Callable, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns the images per second of each stretch, with and without checkpoints.

    The two kinds alternate, and take turns at being first. So a machine that becomes slower affects
    both.
    """
    rates = {"without": [], "with": []}
    stretch([])  # compiles, and warms up
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for number in range(options.rounds):
            for name in sorted(rates, reverse=number % 2 == 0):
                saves = [make_callback(pathlib.Path(folder) / str(number))]
                rates[name].append(stretch(saves if name == "with" else []))
    return rates


if __name__ == "__main__":
    sys.exit(main())
