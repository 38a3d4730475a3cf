"""Measures images per CPU second of each loader, and of hand-written tf.data and torch pipelines.

    uv run python tools/bench_loaders.py --jpegs=/data/imagenet/train --pngs=/data/mnist_png
    uv run python tools/bench_loaders.py        # makes its own images

The program prints three tables. "jpeg" decodes JPEG files to random crops of 224x224, and flips
them at random. Its arms are: tf.data as the community writes it (decode_and_crop_jpeg), with the
usual random crops; the same with sample_distorted_bounding_box, which draws smaller crops; each
loader of tfaccel; and torchvision's pipeline, if torch is installed. If pyarrow is installed, the
loader tf_data also reads the same images from an Arrow file, and so does Hugging Face's library
(datasets) with Pillow, if it is installed. In the same way tf_data reads them from a web server on
this machine (from the cache, which holds all files before the first run), from an ArrayRecord file,
and from Grain's data source, beside Grain's own loader with Pillow. "png" and "png_rotated" decode
PNG files of 28x28, without and with random rotation, with the same kinds of arms.

All arms give normalised float32 batches on the CPU. The CPU seconds are those of the whole process
with its threads, so the load of other programs matters less. The arms take turns, and the median of
an arm's runs counts. Work that is done once (the cache, the images in memory) does not count.

The last line of standard output is JSON. Exit codes: 0 done; 2 a mistake in the call.
"""

import argparse
import functools
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

if __name__ == "__main__":  # before TensorFlow starts
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # this program compares loaders on the CPU
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import PIL.Image
import tensorflow as tf
from bench_arms.machine import JPEG_SUFFIXES, files_below

from tfaccel.config import AugmentConfig, DaliConfig, ImageConfig
from tfaccel.config.presets import preset
from tfaccel.data import sources
from tfaccel.data.choose import choose_loader
from tfaccel.data.feed import Feed
from tfaccel.data.loaders.cache import cached
from tfaccel.data.loaders.dali import DaliStream
from tfaccel.data.loaders.memory import MemoryStream, decode_all
from tfaccel.data.loaders.tf_data import TfDataStream
from tfaccel.data.placement import Placement
from tfaccel.data.shards import Plan
from tfaccel.data.source import Blobs, ImageSource
from tfaccel.runtime.devices import Device

CPU = Device("/cpu:0", None)
MEAN, STD = 0.5, 0.25
STORED_SIZE = (256, 256)  # of JPEG images in the cache

Run = Callable[[float], float]  # draws batches for some seconds; returns images per CPU second
Arms = dict[str, Callable[[], Run]]


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the tables, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jpegs", type=pathlib.Path, help="a folder with JPEG files at any depth")
    parser.add_argument("--pngs", type=pathlib.Path, help="a folder with 28x28 PNG files")
    parser.add_argument("--seconds", type=float, default=3, help="seconds of each run of an arm")
    parser.add_argument("--runs", type=int, default=5, help="runs of each arm")
    parser.add_argument("--arms", default="", help="only arms whose names begin with this text")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch-size", type=int, default=64, help="for JPEG; PNG: 4 times as many")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        try:
            jpegs = flags.jpegs or make_images(scratch / "jpegs", "jpg", 200, (375, 500, 3))
            pngs = flags.pngs or make_images(scratch / "pngs", "png", 2000, (28, 28))
            jpegs, pngs = files_below(jpegs, JPEG_SUFFIXES), files_below(pngs, (".png",))
        except ValueError as error:
            print(f"bench_loaders: error: {error}", file=sys.stderr)
            return 2
        run = {"seconds": flags.seconds, "num_runs": flags.runs, "begin": flags.arms}
        settings = {"batch_size": flags.batch_size, "num_threads": flags.threads}
        tables = {"jpeg": measure(jpeg_arms(jpegs, scratch, **settings), **run)}
        settings["batch_size"] *= 4
        for name, augment in (("png", preset("none")), ("png_rotated", preset("mnist"))):
            tables[name] = measure(png_arms(pngs, augment, scratch, **settings), **run)
    for name, table in tables.items():
        print_table(name, table)
    machine = {"threads": flags.threads, "jpegs": len(jpegs), "pngs": len(pngs)}
    print(json.dumps({"images_per_cpu_second": tables, **machine}))
    return 0


def jpeg_arms(
    files: tuple[str, ...], scratch: pathlib.Path, *, batch_size: int, num_threads: int
) -> Arms:
    """Returns functions that make each JPEG pipeline, by name; the first one is the baseline."""
    source = ImageSource(Blobs(files), np.zeros(len(files), np.int32))
    images = ImageConfig(image_size=(224, 224), mean=MEAN, std=STD)
    ours = functools.partial(
        our_arms,
        stored_size=STORED_SIZE,
        folder=scratch,
        batch_size=batch_size,
        num_threads=num_threads,
    )
    crops = preset("imagenet")
    arms = ours(("tf_data", "dali_cpu", "cache", "auto"), source, images, crops)
    rivals = {
        name: lambda window=window: timed(tf_data_of_jpegs(files, batch_size, window), batch_size)
        for name, window in (("tf.data", uniform_window), ("tf.data sdbb", distorted_window))
    }
    if importlib.util.find_spec("pyarrow") is not None:
        table = scratch / "images.arrow"
        write_arrow(files, table)
        (arms["tf_data, Arrow"],) = ours(("tf_data",), sources.arrow(table), images, crops).values()
        if importlib.util.find_spec("datasets") is not None:
            arms["datasets"] = lambda: timed(datasets_of_arrow(table, batch_size), batch_size)
    if importlib.util.find_spec("aiohttp") is not None:
        source = fetched(files, scratch / "web")
        (arms["tf_data, fetched"],) = ours(("tf_data",), source, images, crops).values()
    if importlib.util.find_spec("array_record") is not None:
        records = scratch / "images.array_record"
        write_array_record(files, records)
        source = sources.array_record(records, image_key="image", label_key="label")
        (arms["tf_data, ArrayRecord"],) = ours(("tf_data",), source, images, crops).values()
    if importlib.util.find_spec("grain") is not None:
        items = grain_items(files)
        source = sources.random_access(items)
        (arms["tf_data, Grain"],) = ours(("tf_data",), source, images, crops).values()
        arms["grain"] = lambda: timed(grain_of_items(items, batch_size, num_threads), batch_size)
    return rivals | arms | torch_arm(files, 3, None, batch_size=batch_size)


def fetched(files: tuple[str, ...], folder: pathlib.Path) -> ImageSource:
    """Returns the images from a web server in another process, all of which have been fetched."""
    for number, each in enumerate(files):
        place = folder / "any" / f"{number}{pathlib.Path(each).suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(pathlib.Path(each).absolute())
    serve = ["http.server", "0", "--bind=127.0.0.1", f"--directory={folder}"]
    program = [sys.executable, "-um", *serve]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    own_cache = {"XDG_CACHE_HOME": str(folder.parent / "fetched")}
    with subprocess.Popen(program, **settings) as server, mock.patch.dict(os.environ, own_cache):
        try:
            port = re.search(r"port (\d+)", server.stdout.readline())[1]
            source = sources.class_folders(f"http://127.0.0.1:{port}")
            for index in range(len(source)):
                source.images.read(index)
        finally:
            server.terminate()
    return source


def write_array_record(files: tuple[str, ...], path: pathlib.Path) -> None:
    """Writes the encoded images as Examples, in the form of TFDS."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for each in files:
        image = tf.train.BytesList(value=[pathlib.Path(each).read_bytes()])
        label = tf.train.Int64List(value=[0])
        features = {
            "image": tf.train.Feature(bytes_list=image),
            "label": tf.train.Feature(int64_list=label),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        writer.write(example.SerializeToString())
    writer.close()


def grain_items(files: tuple[str, ...]):
    """Returns a data set of Grain that gives a file's bytes and a label."""
    import grain

    return grain.MapDataset.source(files).map(lambda each: (pathlib.Path(each).read_bytes(), 0))


def grain_of_items(items, batch_size: int, num_threads: int) -> Iterator:
    """Yields random windows of 224x224 by Grain's own loader, with threads, and Pillow."""
    import grain

    def transformed(item, random):
        with PIL.Image.open(io.BytesIO(item[0])) as image:
            return pillow_window(image.convert("RGB"), random)

    data = items.shuffle(seed=0).repeat().random_map(transformed, seed=0)
    reading = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * batch_size)
    return iter(data.to_iter_dataset(reading).batch(batch_size, drop_remainder=True))


def write_arrow(files: tuple[str, ...], path: pathlib.Path) -> None:
    """Writes the encoded images into one Arrow file, each in a batch of its own."""
    import pyarrow as pa

    schema = pa.schema([("image", pa.binary()), ("label", pa.int64())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for each in files:
            row = {"image": [pathlib.Path(each).read_bytes()], "label": [0]}
            stream.write_table(pa.table(row, schema=schema))


def png_arms(
    files: tuple[str, ...],
    augment: AugmentConfig,
    scratch: pathlib.Path,
    *,
    batch_size: int,
    num_threads: int,
) -> Arms:
    """Returns functions that make each PNG pipeline, by name; the first one is the baseline."""
    source = ImageSource(Blobs(files), np.zeros(len(files), np.int32))
    images = ImageConfig(image_size=(28, 28), channels=1, mean=MEAN, std=STD)
    arms = our_arms(
        ("memory", "tf_data", "dali_cpu"),
        source,
        images,
        augment,
        stored_size=(28, 28),
        folder=scratch,
        batch_size=batch_size,
        num_threads=num_threads,
    )
    degrees = augment.rotation_degrees
    rival = {"tf.data": lambda: timed(tf_data_of_pngs(files, degrees, batch_size), batch_size)}
    return rival | arms | torch_arm(files, 1, degrees, batch_size=batch_size)


def our_arms(names, source, images, augment, *, batch_size, **settings) -> Arms:
    """Returns functions that make each of tfaccel's streams, by the name of its loader."""
    plan = Plan(len(source), batch_size, num_replicas=1, shuffle=True)
    feed = Feed(plan, augment, images.image_size, replica_index=0)
    return {
        name: lambda name=name: timed(
            make_stream(name, source, images, feed=feed, **settings), batch_size
        )
        for name in names
    }


def make_stream(
    name: str,
    source: ImageSource,
    images: ImageConfig,
    *,
    feed: Feed,
    num_threads: int,
    stored_size: tuple[int, int],
    folder: pathlib.Path,
) -> Iterator:
    """Returns one of tfaccel's streams on the CPU.

    Args:
      name: one of config.LOADERS.
      source: the encoded images.
      images: how the images become batches.
      feed: gives the indices of each batch.
      num_threads: the threads of the stream.
      stored_size: the image size that "memory" and "cache" store.
      folder: the folder of the cache.
    """
    if name == "auto":
        name, reason, _ = choose_loader(source, images, feed.augment, device=CPU)
        print(f"auto: {name}, because {reason}", file=sys.stderr)
    placement = Placement(CPU, num_threads, seed=0)
    settings = {"feed": feed, "placement": placement, "dtype": "float32"}
    if name == "tf_data":
        return TfDataStream(source, images, **settings)
    if name == "dali_cpu":
        return DaliStream(source, images, dali=DaliConfig(), decode_on_gpu=False, **settings)
    stored = {
        "stored_size": stored_size,
        "channels": images.channels,
        "targets": images.targets,
        "num_threads": num_threads,
    }
    if name == "cache":
        arrays = cached(source, folder=folder, **stored)
    else:
        arrays = decode_all(source, **stored)
    return MemoryStream(arrays, images, on_device=name == "memory", **settings)


# Pipelines as their communities write them, except that they do not use prefetch(AUTOTUNE): its
# growing buffer would be filled in one run and used in the next.

PREFETCH_BATCHES = 2


def tf_data_of_jpegs(files: tuple[str, ...], batch_size: int, window_of: Callable) -> Iterator:
    """Returns a tf.data pipeline as in TensorFlow's ResNet recipes.

    Args:
      files: the image files.
      batch_size: the images of a batch.
      window_of: takes an image's shape, and returns (top, left, height, width) of a random crop.
    """

    def decode(path, label):
        data = tf.io.read_file(path)
        window = window_of(tf.io.extract_jpeg_shape(data))
        image = tf.io.decode_and_crop_jpeg(data, window, channels=3, dct_method="INTEGER_FAST")
        image = tf.image.random_flip_left_right(tf.image.resize(image, (224, 224)))
        return (image / 255 - MEAN) / STD, label

    dataset = tf.data.Dataset.from_tensor_slices((list(files), np.zeros(len(files), np.int32)))
    dataset = dataset.shuffle(len(files)).repeat().map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return iter(dataset.batch(batch_size, drop_remainder=True).prefetch(PREFETCH_BATCHES))


def datasets_of_arrow(path: pathlib.Path, batch_size: int) -> Iterator:
    """Yields random windows of 224x224, as the guide of Hugging Face's library transforms images.

    Args:
      path: an Arrow file with the encoded images.
      batch_size: the images of a batch.
    """
    import datasets

    random = np.random.default_rng(0)
    data = datasets.Dataset.from_file(str(path)).cast_column("image", datasets.Image())

    def transformed(batch):
        return {"image": [pillow_window(each.convert("RGB"), random) for each in batch["image"]]}

    data = data.with_transform(transformed)
    while True:
        order = random.permutation(len(data))
        for first in range(0, len(order) - batch_size + 1, batch_size):
            yield np.stack(data[order[first : first + batch_size]]["image"])


def pillow_window(image: PIL.Image.Image, random: np.random.Generator) -> np.ndarray:
    """Returns a random window of an image: [224, 224, 3] float32, normalised."""
    size = np.array([image.width, image.height])
    for _ in range(10):
        area, ratio = random.uniform(0.08, 1.0), np.exp(random.uniform(*np.log([3 / 4, 4 / 3])))
        own = np.sqrt(area * size.prod() * np.array([ratio, 1 / ratio]))
        if (own <= size).all():
            break
    own = np.minimum(own, size)
    start = random.random(2) * (size - own)
    box = (*start, *(start + own))
    pixels = image.resize((224, 224), PIL.Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(pixels, np.float32) / 255
    return ((pixels[:, ::-1] if random.random() < 0.5 else pixels) - MEAN) / STD


def uniform_window(shape):
    """Returns a crop as torchvision and tfaccel's loaders draw it: on average 43% of 500x375."""
    source = tf.cast(shape[:2], tf.float32)
    area = tf.random.uniform([10], 0.08, 1.0) * tf.reduce_prod(source)
    ratio = tf.exp(tf.random.uniform([10], math.log(3 / 4), math.log(4 / 3)))
    sizes = tf.sqrt(tf.stack([area / ratio, area * ratio], axis=1))
    first = tf.argmax(tf.cast(tf.reduce_all(sizes <= source, axis=1), tf.int32))
    size = tf.minimum(sizes[first], source)
    start = tf.random.uniform([2]) * (source - size)
    return tf.cast(tf.concat([start, size], 0), tf.int32)


def distorted_window(shape):
    """Returns a crop as TensorFlow's own operation draws it: 38% of 500x375, so less to decode."""
    start, size, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([1, 0, 4]),
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.concat([start[:2], size[:2]], 0)


def tf_data_of_pngs(files: tuple[str, ...], degrees: float, batch_size: int) -> Iterator:
    """Returns a tf.data pipeline that decodes and rotates images one by one."""

    def decode(path, label):
        image = tf.cast(tf.io.decode_png(tf.io.read_file(path), channels=1), tf.float32)
        image = tf.ensure_shape(image, (28, 28, 1))
        if degrees:
            image = turned(image)
        return (image / 255 - MEAN) / STD, label

    def turned(image):
        angle = tf.random.uniform([], -degrees, degrees) * math.pi / 180
        cosine, sine, center = tf.cos(angle), tf.sin(angle), 13.5
        matrix = [
            *(cosine, -sine, center - center * cosine + center * sine),
            *(sine, cosine, center - center * sine - center * cosine),
            *(0.0, 0.0),
        ]
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=image[None],
            transforms=tf.stack(matrix)[None],
            output_shape=(28, 28),
            fill_value=0.0,
            interpolation="BILINEAR",
        )[0]

    dataset = tf.data.Dataset.from_tensor_slices((list(files), np.zeros(len(files), np.int32)))
    dataset = dataset.shuffle(len(files)).repeat().map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return iter(dataset.batch(batch_size, drop_remainder=True).prefetch(PREFETCH_BATCHES))


def torch_arm(
    files: tuple[str, ...],
    channels: int,
    degrees: float | None,
    *,
    batch_size: int,
) -> Arms:
    """Returns an arm for torchvision's pipeline; no arm if torch is not installed.

    Args:
      files: the image files.
      channels: 1 or 3.
      degrees: the largest random rotation; None for random crops of 224x224.
      batch_size: the images of a batch.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("torchvision") is None:
        return {}
    settings = {
        "files": files,
        "channels": channels,
        "degrees": degrees,
        "mean": MEAN,
        "std": STD,
        "batch_size": batch_size,
    }

    def make():
        program = pathlib.Path(__file__).with_name("bench_torch.py")
        process = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def ask(line):
            print(json.dumps(line), file=process.stdin, flush=True)

        def run(seconds):
            ask(seconds)
            return float(process.stdout.readline())

        ask(settings)
        weakref.finalize(run, process.kill)
        return run

    return {"torch": make}


# Measuring.


def measure(
    arms: Arms, *, seconds: float, num_runs: int, begin: str = ""
) -> dict[str, list[float]]:
    """Returns the images per CPU second of every run of each arm; the arms take turns."""
    ready = {name: make() for name, make in arms.items() if name.startswith(begin)}
    results = {name: [] for name in ready}
    for number in range(num_runs + 1):
        for name, run in ready.items():
            found = run(seconds)
            if number > 0:  # the first warms up
                results[name].append(found)
    return results


def timed(stream: Iterator, batch_size: int) -> Run:
    """Returns a function that draws from a stream for some seconds."""
    return functools.partial(images_per_cpu_second, stream, batch_size)


def images_per_cpu_second(stream: Iterator, batch_size: int, seconds: float) -> float:
    """Draws batches for some seconds; counts all CPU time until the queues are full again."""
    wait_until_idle()
    cpu, ends, num_batches = time.process_time(), time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        next(stream)
        num_batches += 1
    wait_until_idle()
    return num_batches * batch_size / (time.process_time() - cpu)


def wait_until_idle() -> None:
    """Waits until this process has used less than 3 ms of CPU time in 50 ms."""
    while True:
        before = time.process_time()
        time.sleep(0.05)
        if time.process_time() - before < 0.003:
            return


def print_table(name: str, table: dict[str, list[float]]) -> None:
    """Prints each arm's median, its ratio to the first arm's, and its runs."""
    base = statistics.median(next(iter(table.values())))
    print(f"\n{name:12} images/CPU s   ratio   runs")
    for arm, runs in table.items():
        median = statistics.median(runs)
        listed = " ".join(f"{each:,.0f}" for each in runs)
        print(f"{arm:12} {median:12,.0f} {median / base:7.2f}   {listed}")


def make_images(
    folder: pathlib.Path, suffix: str, number: int, shape: tuple[int, ...]
) -> pathlib.Path:
    """Makes images of smooth colours with some noise, and returns their folder."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for index in range(number):
        coarse = random.integers(0, 256, (8, 8, *shape[2:]), dtype=np.uint8)
        smooth = PIL.Image.fromarray(coarse).resize(shape[1::-1], PIL.Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth) + random.normal(0, 12, shape)
        image = PIL.Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
        image.save(folder / f"{index}.{suffix}", quality=92)
    return folder


if __name__ == "__main__":
    sys.exit(main())
