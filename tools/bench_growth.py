"""Measures how the cost of a start grows with the number of files, in CPU seconds and memory.

    uv run python tools/bench_growth.py --output=tools/results/growth-2-cores

The program makes trees of 10,000, 100,000 and 1,000,000 images, as hard links to a few files, and
shards in the same way. They are in a temporary folder, which is deleted at the end.

Every arm runs in its own process on the CPU. The time of a stage is the CPU time of the process
with all its threads, so the load of other programs matters less. The memory is the peak of the
process, minus what it had after the import of TensorFlow. The exponent compares the last two sizes.
It is 1.0 if ten times as many files take ten times as long. A stage below 50 ms has no exponent.

Arms:
  list          lists class folders (1,000 of them)
  classes       lists a tenth as many class folders as there are files, with one image in each
  csv, pairs    reads a list of all images; lists two trees of images
  tfrecord, webdataset     makes the indexes of shards of 10,000 examples, then reads the indexes
  tf_data, dali_cpu, memory, cache, auto    lists files, opens the loader, gives the first batch,
                resumes in the middle of an epoch; `auto` starts twice, and its second start finds
                what the first one stored
  scan          examines every image; then again, with the stored results

The program prints a table, and writes it to OUTPUT.md and all numbers to OUTPUT.json. Exit codes: 0
done; 1 an arm failed; 2 a mistake in the call.
"""

import argparse
import datetime
import json
import logging
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

from tfaccel.process.signals import exiting_on_sigterm

SIZES = (10_000, 100_000, 1_000_000)
NUM_ORIGINALS = 64  # more than one, because ext4 allows 65,000 links to a file
SHARD = 10_000  # examples
LOADERS = ("tf_data", "dali_cpu", "memory", "cache", "auto")
ARMS = ("list", "classes", "csv", "pairs", "tfrecord", "webdataset", *LOADERS, "auto_again")
ARMS = (*ARMS, "scan", "scan_again")
LEAST_S = 0.05  # the exponent of a shorter time would be noise


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    if options.child:
        print(json.dumps(run_arm(options.child, pathlib.Path(options.dir), options.sizes[0])))
        return 0
    found = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="growth-") as folder:
            make_data(pathlib.Path(folder), size, options.arms)
            for arm in options.arms:
                found.setdefault(arm, {})[size] = measure(arm, folder, size)
                print(f"{size:,} {arm}: {found[arm][size]}", file=sys.stderr, flush=True)
    result = {
        "command": shlex.join(["python", "tools/bench_growth.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "arms": found,
    }
    text = table(found, options.sizes)
    print(text)
    if options.output:
        pathlib.Path(f"{options.output}.json").write_text(json.dumps(result, indent=2) + "\n")
        pathlib.Path(f"{options.output}.md").write_text(f"{heading(result)}\n\n{text}")
    return 0 if all(each for sizes in found.values() for each in sizes.values()) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", help="the path of the results, without .md or .json; default: none")
    add("--sizes", type=int, nargs="+", default=SIZES, help="numbers of images")
    add("--arms", nargs="+", choices=ARMS, default=ARMS, help="the arms to measure; default: all")
    add("--dir", help="a folder for the trees; default: the system's temporary folder")
    add("--child", choices=ARMS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(arm: str, folder: str, size: int) -> dict | None:
    """Runs an arm in its own process, and returns its figures; None if it failed."""
    own = [sys.executable, __file__, f"--child={arm}", f"--dir={folder}", f"--sizes={size}"]
    cache = {"XDG_CACHE_HOME": f"{folder}/cache", "CUDA_VISIBLE_DEVICES": "-1"}
    environment = {**os.environ, **cache, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(own, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


# The data.


def make_data(folder: pathlib.Path, size: int, arms) -> None:
    """Makes the trees, lists and shards that the arms need."""
    originals = make_originals(folder / "originals")
    make_tree(folder / "tree", originals, size, num_classes=min(1000, size // 10))
    if "classes" in arms:
        make_tree(folder / "classes", originals, size // 10, num_classes=size // 10)
    if "pairs" in arms:
        make_tree(folder / "targets", originals, size, num_classes=min(1000, size // 10))
    if "csv" in arms:
        lines = (
            f"tree/{each.relative_to(folder / 'tree')},{each.parent.name}\n"
            for each in (folder / "tree").glob("*/*")
        )
        (folder / "list.csv").write_text("path,label\n" + "".join(lines))
    if "tfrecord" in arms:
        write_tfrecord(folder / "one.tfrecord", originals)
        repeat(folder / "one.tfrecord", folder / "tfrecord", size)
    if "webdataset" in arms:
        write_tar(folder / "one.tar", originals)
        repeat(folder / "one.tar", folder / "webdataset", size)


def make_originals(folder: pathlib.Path) -> list[pathlib.Path]:
    """Makes PNG files of 28x28 pixels, as in MNIST, and returns their paths."""
    import numpy as np
    import PIL.Image

    folder.mkdir()
    random = np.random.default_rng(0)
    files = [folder / f"{index}.png" for index in range(NUM_ORIGINALS)]
    for file in files:
        small = PIL.Image.fromarray(random.integers(0, 256, (7, 7), np.uint8))
        small.resize((28, 28)).save(file)
    return files


def make_tree(root: pathlib.Path, originals, size: int, *, num_classes: int) -> None:
    """Makes class folders with hard links to the originals."""
    each = size // num_classes
    for label in range(num_classes):
        folder = root / f"class_{label:06d}"
        folder.mkdir(parents=True)
        for index in range(each):
            os.link(originals[(label + index) % len(originals)], folder / f"image_{index:07d}.png")


def write_tfrecord(file: pathlib.Path, originals) -> None:
    """Writes a shard of SHARD examples."""
    import tensorflow as tf

    def feature(**kind):
        return tf.train.Feature(**kind)

    with tf.io.TFRecordWriter(str(file)) as writer:
        for index in range(SHARD):
            image = originals[index % len(originals)].read_bytes()
            features = {
                "image/encoded": feature(bytes_list=tf.train.BytesList(value=[image])),
                "image/class/label": feature(int64_list=tf.train.Int64List(value=[index % 10])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def write_tar(file: pathlib.Path, originals) -> None:
    """Writes a shard of SHARD samples."""
    import io
    import tarfile

    with tarfile.open(file, "w") as tar:
        for index in range(SHARD):
            image = originals[index % len(originals)].read_bytes()
            for extension, data in (("png", image), ("cls", b"%d" % (index % 10))):
                member = tarfile.TarInfo(f"{index:06d}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def repeat(shard: pathlib.Path, folder: pathlib.Path, size: int) -> None:
    """Makes so many hard links to a shard that they have `size` examples."""
    folder.mkdir()
    for index in range(size // SHARD):
        os.link(shard, folder / f"{index:05d}{shard.suffix}")


# One arm, in a process of its own.


def run_arm(arm: str, folder: pathlib.Path, size: int) -> dict[str, float]:
    """Returns the CPU seconds of each stage, and the peak memory as "mib"."""
    import tfaccel

    logging.getLogger("tfaccel").setLevel(logging.ERROR)
    run = tfaccel.setup(xla=False, gpu_ids=())
    before = memory_mib("VmRSS")
    seconds = _stages(arm, folder, run, tfaccel.sources)
    return {**seconds, "mib": round(memory_mib("VmHWM") - before)}


def _stages(arm, folder, run, sources) -> dict[str, float]:
    clock = Clock()
    if arm == "classes":
        sources.class_folders(folder / "classes")
        return clock.lap("list")
    if arm == "csv":
        sources.image_list(folder / "list.csv")
        return clock.lap("list")
    if arm == "pairs":
        sources.image_pairs(folder / "tree", folder / "targets")
        return clock.lap("list")
    if arm in ("tfrecord", "webdataset"):
        find = getattr(sources, arm)
        pattern = folder / arm / ("*.tar" if arm == "webdataset" else "*.tfrecord")
        images = {"image_ext": "png"} if arm == "webdataset" else {}
        find(pattern, **images)
        clock.lap("make index")
        find(pattern, **images)
        return clock.lap("read index")
    source = sources.class_folders(folder / "tree")
    clock.lap("list")
    if arm == "list":
        source.facts()
        return clock.lap("digest")
    if arm.startswith("scan"):
        from tfaccel.data.scan.files import scan_files

        scan_files(source, num_workers=2, progress=False)
        return clock.lap("scan")
    loader = run.loader(
        source,
        image_size=(28, 28),
        channels=1,
        global_batch_size=256,
        shuffle=True,
        loader=arm.removesuffix("_again"),
    )
    clock.lap("open")
    next(iter(loader))
    clock.lap("first batch")
    loader.start_at(epoch=1, step=loader.num_batches // 2)
    next(iter(loader))
    return clock.lap("resume")


class Clock:
    """Measures the CPU seconds of stages, for this process with all its threads."""

    def __init__(self):
        """Starts the first stage."""
        self._laps, self._last = {}, time.process_time()

    def lap(self, name: str) -> dict[str, float]:
        """Ends a stage, names it, and returns the rounded seconds of all stages so far."""
        now = time.process_time()
        self._laps[name], self._last = round(now - self._last, 3), now
        return self._laps


def memory_mib(name: str) -> float:
    """Returns the memory of this process: "VmRSS" at present, or its peak "VmHWM".

    getrusage is not used, because its peak includes that of the process that started this one.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024


# The report.


def table(found: dict, sizes) -> str:
    """Returns the stages of all arms as a Markdown table."""
    columns = [f"{size:,}" for size in sizes]
    lines = [f"| arm | stage | {' | '.join(columns)} | exponent |", "|---" * (len(sizes) + 3) + "|"]
    for arm, by_size in found.items():
        stages = next((list(each) for each in by_size.values() if each), ["failed"])
        for stage in stages:
            values = [(by_size[size] or {}).get(stage) for size in sizes]
            unit, kind = (" MiB", "memory") if stage == "mib" else (" s", stage)
            cells = ["failed" if each is None else f"{each:,.4g}{unit}" for each in values]
            power = "" if stage == "mib" else exponent(values, sizes)
            lines.append(f"| {arm} | {kind} | {' | '.join(cells)} | {power} |")
    return "\n".join(lines) + "\n"


def exponent(values, sizes) -> str:
    """Returns the exponent of growth between the last two sizes; "" if it is unknown."""
    if len(values) < 2 or None in values[-2:] or values[-2] < LEAST_S:
        return ""
    return f"{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.2f}"


def heading(result: dict) -> str:
    """Returns the text above the table."""
    return (
        f"`{result['command']}`, {result['date']}, {result['cores']} cores. CPU seconds of each "
        "stage, and the peak memory of the process without TensorFlow's own. `classes` has a tenth "
        "as many folders as the column's number, with one image in each."
    )


if __name__ == "__main__":
    with exiting_on_sigterm():  # deletes the trees
        sys.exit(main())
