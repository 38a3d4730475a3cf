"""Each task by its commands alone, on the CPU, one GPU and two: train, evaluate and predict."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

ROOT = pathlib.Path(__file__).parents[2]
GPUS = [
    pytest.param("", marks=pytest.mark.slow, id="CPU"),
    pytest.param("0", marks=pytest.mark.gpu, id="one GPU"),
    pytest.param("0,1", marks=pytest.mark.multi_gpu, id="two GPUs"),
]
# A config, its folder of images to predict, further flags, and the least value of a metric.
TASKS = {
    "one class": ("digits", "digits/testing", [], "accuracy", 0.9),
    "several classes": ("digit_tags", "listed_digits/testing", [], "mean_average_precision", 0.9),
    "numbers": ("digit_numbers", "listed_digits/testing", [], "r2_score", 0.2),
    "masks": ("segmentation", "digit-scenes/test/images", [], "mean_iou", 0.08),
    "images": ("restoration", "portrait/test/blurry", [], "psnr", 20),
    "balanced draws and random erasing": (
        "digits",
        "digits/testing",
        [
            "--config.data.sampling=square_root",
            "--config.train_images.erase_probability=0.3",
        ],
        "accuracy",
        0.8,
    ),
}


def command(*arguments, cache, home, **variables):
    """What a command prints; it ends well."""
    places = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **places, **variables}
    done = subprocess.run(
        [sys.executable, "-m", "tfaccel", *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


def answers_in(path):
    """The numbers and names of a CSV file; or the pixels of a folder's images, by their names."""
    if path.is_dir():
        return {each.name: np.asarray(PIL.Image.open(each)) for each in path.rglob("*.png")}
    with path.open(newline="") as file:
        return {row.pop("image"): row for row in csv.DictReader(file)}


def share_alike(found, wanted):
    """The share of pixels or values that are alike: within 0.03, or 3 of 255 grey levels."""
    assert found.keys() == wanted.keys()
    alike = []
    for name, other in wanted.items():
        if isinstance(other, dict):
            for column, value in other.items():
                try:
                    alike.append(abs(float(found[name][column]) - float(value)) <= 0.03)
                except ValueError:
                    alike.append(found[name][column] == value)
        else:
            apart = np.abs(found[name].astype(int) - other.astype(int))
            alike.append((apart <= (3 if other.max() > 20 else 0)).mean())
    return np.mean(alike)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_and_its_export_answers_alike_without_a_gpu(task, gpus, tmp_path):
    config, folder, flags, metric, least = TASKS[task]
    cache, places = tmp_path / "cache", {"cache": tmp_path / "cache", "home": tmp_path}
    ids = f"--config.runtime.gpu_ids=({gpus}{',' if gpus else ''})"
    given = [f"--config={ROOT}/configs/{config}.py:smoke", "--workdir=run", ids, *flags]
    if task != "images":
        given.append("--config.train.epochs=3")
    out, said = command("train", *given, **places)
    result = json.loads(out.splitlines()[-1])
    assert result["metrics"][f"val_{metric}"] > least
    device = f"GPU {gpus.replace(',', ', ')} of" if gpus else "CPU, set by gpu_ids"
    assert f"device: {device}" in said

    asked = ["--workdir=run", "--checkpoint=newest", "--json", f"--gpu-ids={gpus}"]
    out, _ = command("evaluate", *asked, **places)
    found, measured = json.loads(out)["overall"], result["metrics"]
    both = [name for name in found if f"val_{name}" in measured]
    assert both
    for name in both:
        assert found[name] == pytest.approx(measured[f"val_{name}"], rel=0.01, abs=0.01), name

    images = str(cache / "tfaccel" / folder)
    kind = ".csv" if config.startswith("digit") else ""
    for name, seen in {"here": gpus, "CPU": ""}.items():
        asked = ["predict", "--model=run", f"--output={name}{kind}", images]
        command(*asked, **places, CUDA_VISIBLE_DEVICES=seen)
    here, plain = (answers_in(tmp_path / f"{name}{kind}") for name in ("here", "CPU"))
    assert len(plain) > 10
    assert share_alike(here, plain) > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_two_workers_train_as_one(task, tmp_path):
    """Without dropout: each worker draws its own, as Keras's do."""
    config, _, flags, *_ = TASKS[task]
    of_vit = {"width": 48, "depth": 2, "heads": 3, "patch_size": 4}
    found = []
    for number in (1, 2):
        given = [f"--config={ROOT}/configs/{config}.py:smoke", f"--workdir=run{number}", *flags]
        given += ["--config.runtime.gpu_ids=()", "--config.step.sync_batchnorm=True"]
        if config.startswith("digit"):
            given.append("--config.model.name=vit_tiny")
            given += [f"--config.vit.{name}={value}" for name, value in of_vit.items()]
        launch = [] if number == 1 else ["launch", f"--nproc-per-node={number}"]
        out, _ = command(*launch, "train", *given, cache=tmp_path / "cache", home=tmp_path)
        found.append(json.loads(out.splitlines()[-1].removeprefix("[rank 0] "))["metrics"])
    one, two = found
    assert two.keys() == one.keys()
    # Batch norm of a deep network makes more of what rounding changes.
    tolerance = {"rel": 0.02, "abs": 0.03} if task == "masks" else {"rel": 1e-3, "abs": 1e-3}
    assert two == pytest.approx(one, **tolerance)
