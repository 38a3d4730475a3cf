import importlib.util
import itertools
import json
import time

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from loaded_tool import loaded


@pytest.fixture(scope="module")
def bench_loaders():
    with loaded("bench_loaders") as module:
        yield module


@pytest.fixture
def small(bench_loaders, tmp_path):
    jpegs = bench_loaders.make_images(tmp_path / "jpegs", "jpg", 6, (60, 80, 3))
    return jpegs, bench_loaders.make_images(tmp_path / "pngs", "png", 20, (28, 28))


@pytest.mark.slow
def test_every_arm_is_measured(bench_loaders, small, capsys):
    flags = ["--seconds=0.01", "--runs=1", "--threads=1", "--batch-size=4"]
    assert bench_loaders.main([f"--jpegs={small[0]}", f"--pngs={small[1]}", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    tables = json.loads(printed[-1])["images_per_cpu_second"]
    with_torch = {"torch"} & set(tables["jpeg"])
    with_others = {"datasets"} & set(tables["jpeg"])
    for name, library in {
        "tf_data, Arrow": "pyarrow",
        "tf_data, fetched": "aiohttp",
        "tf_data, ArrayRecord": "array_record",
        "tf_data, Grain": "grain",
        "grain": "grain",
    }.items():
        with_others |= {name} if importlib.util.find_spec(library) is not None else set()
    assert {name: set(table) for name, table in tables.items()} == {
        "jpeg": {"tf.data", "tf.data sdbb", "tf_data", "dali_cpu", "cache", "auto"}
        | with_torch
        | with_others,
        "png": {"tf.data", "memory", "tf_data", "dali_cpu"} | with_torch,
        "png_rotated": {"tf.data", "memory", "tf_data", "dali_cpu"} | with_torch,
    }
    assert all(runs[0] > 0 for table in tables.values() for runs in table.values())
    assert any(line.startswith("jpeg ") and "ratio" in line for line in printed)


def test_what_is_made_ahead_is_counted(bench_loaders):
    def work(seconds):
        ends = time.process_time() + seconds
        while time.process_time() < ends:
            pass

    stream = (work(0.02) for _ in itertools.count())
    found = bench_loaders.images_per_cpu_second(stream, 10, 0.1)
    assert found == pytest.approx(10 / 0.02, rel=0.3)


@pytest.mark.parametrize(("name", "mean"), [("uniform_window", 0.43), ("distorted_window", 0.38)])
def test_windows_of_the_rivals_are_as_large_as_said(bench_loaders, name, mean):
    draw = getattr(bench_loaders, name)
    drawn = tf.data.Dataset.range(2000).map(lambda _: draw(tf.constant([375, 500, 3])))
    windows = drawn.batch(2000).get_single_element().numpy()
    assert (windows[:, :2] >= 0).all()
    assert (windows[:, :2] + windows[:, 2:] <= [375, 500]).all()
    assert windows[:, 2:].prod(1).mean() / (375 * 500) == pytest.approx(mean, abs=0.025)


def test_images_are_what_the_tables_say(small):
    with PIL.Image.open(next(small[0].iterdir())) as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (80, 60), "RGB")
    with PIL.Image.open(next(small[1].iterdir())) as image:
        assert (image.format, image.size, image.mode) == ("PNG", (28, 28), "L")
        assert np.asarray(image).std() > 10


def test_a_folder_without_images_is_a_mistake_in_the_call(bench_loaders, small, tmp_path, capsys):
    assert bench_loaders.main([f"--jpegs={small[1]}", f"--pngs={small[1]}"]) == 2
    assert f"{small[1]} has no .jpg or .jpeg files at any depth" in capsys.readouterr().err
