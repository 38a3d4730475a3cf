"""Each experiment in configs/ at its smallest size, and changed from the command line."""

import pathlib
import runpy

import keras
import numpy as np
import PIL.Image
import pytest
from absl import flags
from ml_collections import config_flags

from tfaccel import UserError
from tfaccel.config import parse
from tfaccel.config.presets import preset
from tfaccel.data.blurred import ensure_blurred
from tfaccel.data.digits import ensure_digits
from tfaccel.experiment import train
from tfaccel.experiment.metrics import PSNR

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def get_config(name, size):
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"](size)


@pytest.fixture(autouse=True)
def _tidy(monkeypatch, tmp_path):
    """The embedded data sets are written to the test's own folder; the dtype policy is put back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    keras.config.set_dtype_policy("float32")


def write_images(folder, suffix, count, sizes, *, channels=3):
    """Writes images in class folders, as the data set has them; (height, width) in turn."""
    random = np.random.default_rng(0)
    for index in range(count):
        shape = (*sizes[index % len(sizes)], channels)
        pixels = random.integers(0, 256, shape, dtype=np.uint8)
        file = folder / f"n0{index % 2}" / f"{index:04d}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(pixels.squeeze()).save(file)


def cifar10_png(root):
    write_images(root / "train", ".png", 40, [(32, 32)])
    write_images(root / "test", ".png", 20, [(32, 32)])
    return root


def mnist(root):
    write_images(root / "training", ".png", 70, [(28, 28)], channels=1)
    write_images(root / "testing", ".png", 10, [(28, 28)], channels=1)
    return root


def cifar10(root):
    write_images(root / "train", ".jpg", 40, [(32, 32)])
    write_images(root / "test", ".jpg", 20, [(32, 32)])
    return root


def imagenet(root):
    write_images(root / "train", ".JPEG", 20, [(50, 80), (64, 40), (33, 33)])
    write_images(root / "val", ".JPEG", 9, [(50, 80), (64, 40), (20, 33)])
    return root


# What makes the data (None where they are embedded), the steps of an epoch, and what is measured
# beside the loss. The digits are trained in tests/cli/test_main.py.
EXPERIMENTS = {
    "mnist": (mnist, 2, "accuracy"),
    "cifar10": (cifar10, 3, "accuracy"),
    "imagenet_resnet50": (imagenet, 3, "accuracy"),
    "restoration": (None, 54, "psnr"),
    "segmentation": (None, 15, "mean_iou"),
    "photos": (None, 23, "accuracy"),
    "vit": (cifar10, 3, "accuracy"),
    "digit_tags": (None, 23, "f1_score"),
    "digit_numbers": (None, 23, "r2_score"),
}


def test_every_config_is_tried_here():
    assert {each.stem for each in CONFIGS.glob("*.py")} == {"digits", *EXPERIMENTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mnist", {}),
        ("restoration", {}),
        ("segmentation", {"runtime.xla": False}),
        ("segmentation", {"runtime.xla": False, "model.name": "deeplab_mobilenetv2"}),
        ("photos", {}),
        ("cifar10", {}),  # half a minute
        ("imagenet_resnet50", {"runtime.xla": False}),
        ("vit", {}),
        ("digit_tags", {}),
        ("digit_numbers", {}),
    ],
)
def test_trains_measures_and_exports_at_its_smoke_size(name, changes, tmp_path):
    make_data, steps, metric = EXPERIMENTS[name]
    config = get_config(name, "smoke")
    if make_data:
        config.data.root = str(make_data(tmp_path / "data"))
    config.update_from_flattened_dict({"runtime.xla": True, **changes})
    result = train.run(parse(config), workdir=tmp_path / "run")
    assert result["steps"] == steps
    assert set(result["metrics"]) >= {"loss", metric, "val_loss", f"val_{metric}"}
    assert all(map(np.isfinite, result["metrics"].values()))
    assert (pathlib.Path(result["export"]) / "saved_model.pb").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "make_data", "steps"),
    [
        ("tiny_smoke", cifar10_png, 3),
        ("small_smoke", imagenet, 2),
        ("base_smoke", imagenet, 2),
        ("deit_small_smoke", imagenet, 2),
    ],
)
def test_the_vit_trains_on_each_kind_of_files(size, make_data, steps, tmp_path):
    config = get_config("vit", size)
    config.data.root = str(make_data(tmp_path / "data"))
    result = train.run(parse(config), workdir=tmp_path / "run")
    assert result["steps"] == steps
    assert all(map(np.isfinite, result["metrics"].values()))
    assert (pathlib.Path(result["export"]) / "saved_model.pb").is_file()


def vit_on_digits(epochs):
    """The ViT's config with the embedded digits: 16 patches of 2 x 2, four blocks."""
    config = get_config("vit", "")
    changes = {
        "runtime.precision": "float32",
        "data.root": str(ensure_digits()),
        "data.train": "training",
        "data.test": "testing",
        "data.image_size": (8, 8),
        "data.channels": 1,
        "data.mean": 0.5,
        "data.std": 0.5,
        "data.global_batch_size": 64,
        "train_images.horizontal_flip": False,
        "train_images.shift_pixels": 0,  # a pixel is much of 8 x 8
        "train_images.saturation": 0.0,
        "vit.patch_size": 2,
        "vit.width": 64,
        "vit.heads": 4,
        "vit.depth": 4,
        "vit.mlp_width": 128,
        "train.epochs": epochs,
        "train.learning_rate": 2e-3,
        "train.base_batch_size": None,
        "train.steps_per_execution": None,
        "checkpoint.every_epochs": epochs,
        "step.mixup_alpha": 0.2,
        "step.cutmix_alpha": 0.0,
        "vit.stochastic_depth": 0.0,
    }
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    return config


@pytest.mark.slow
def test_the_vit_learns_digits(tmp_path):
    result = train.run(parse(vit_on_digits(40)), workdir=tmp_path / "run")
    # 97.2% on 2 CPU cores, 2026-11-28.
    assert result["metrics"]["val_accuracy"] > 0.95


@pytest.mark.slow
def test_the_vit_resumes_with_the_same_bits(tmp_path):
    config = get_config("vit", "smoke")
    config.data.root = str(cifar10_png(tmp_path / "data"))
    config.runtime.deterministic = True
    config.vit.dropout = 0.1  # the draws of which go on, as those of stochastic depth
    config.train.decay, config.train.warmup_epochs = "constant", 0.0  # so that epochs may change
    train.run(parse(config), workdir=tmp_path / "stopped")
    config.train.epochs = 2
    resumed = train.run(parse(config), workdir=tmp_path / "stopped", resume="required")
    whole = train.run(parse(config), workdir=tmp_path / "whole")
    assert resumed["metrics"] == whole["metrics"]
    config.vit.depth = 3
    with pytest.raises(UserError, match=r"is of another run: vit.depth 2 -> 3; undo"):
        train.run(parse(config), workdir=tmp_path / "stopped")


@pytest.mark.parametrize(
    ("size", "name", "patch_size", "side", "epochs", "cutmix"),
    [
        ("", "vit_tiny", 4, 32, 300, 1.0),
        ("tiny", "vit_tiny", 4, 32, 300, 1.0),
        ("small", "vit_small", 16, 224, 90, 0.0),
        ("base", "vit_base", 16, 224, 300, 1.0),
    ],
)
def test_the_sizes_of_the_vit(size, name, patch_size, side, epochs, cutmix):
    config = parse(get_config("vit", size))
    assert config.model.name == name
    assert (config.vit.patch_size, config.data.image_size) == (patch_size, (side, side))
    assert (config.train.epochs, config.train.warmup_epochs) == (epochs, epochs / 10)
    assert config.step.cutmix_alpha == cutmix
    smoke = parse(get_config("vit", f"{size}_smoke" if size else "smoke"))
    assert (smoke.model.name, smoke.train.epochs, smoke.vit.depth) == (name, 1, 2)
    assert smoke.data.image_size == config.data.image_size


@pytest.mark.parametrize("network", ["tiny", "small", "base"])
def test_the_sizes_of_deit(network):
    config = parse(get_config("vit", f"deit_{network}"))
    assert (config.model.name, config.vit.pooling) == (f"vit_{network}", "class_token")
    assert config.train_images == preset("deit")
    train = config.train
    assert (train.epochs, train.weight_decay) == (300, 0.05)
    assert train.warmup_epochs == pytest.approx(5)
    assert (train.global_clipnorm, config.step.label_smoothing) == (None, 0.1)
    assert parse(get_config("vit", f"deit_{network}_smoke")).train.epochs == 1


@pytest.mark.parametrize(
    ("size", "epochs", "side", "rate", "decay", "mixup", "magnitude"),
    [
        ("a1", 600, 224, 5e-3, 0.01, 0.2, 7),
        ("a2", 300, 224, 5e-3, 0.02, 0.1, 7),
        ("a3", 100, 160, 8e-3, 0.02, 0.1, 6),
    ],
)
def test_the_recipes_of_resnet_strikes_back(size, epochs, side, rate, decay, mixup, magnitude):
    config = parse(get_config("imagenet_resnet50", size))
    assert config.data.image_size == (side, side)
    assert config.data.global_batch_size == 2048
    train, step, images = config.train, config.step, config.train_images
    assert (train.epochs, train.warmup_epochs, train.decay) == (epochs, 5, "cosine")
    assert (train.optimizer, train.learning_rate, train.weight_decay) == ("lamb", rate, decay)
    assert (train.loss, train.bce_target_threshold) == ("binary_cross_entropy", 0.2)
    assert (step.mixup_alpha, step.cutmix_alpha, step.label_smoothing) == (mixup, 1.0, 0.0)
    assert (images.policy, images.policy_magnitude) == ("randaugment_timm", magnitude)
    assert config.test_images.center_fraction == 0.95


@pytest.mark.slow
def test_the_recipe_a3_trains_and_exports(tmp_path):
    config = get_config("imagenet_resnet50", "a3_smoke")
    config.data.root = str(imagenet(tmp_path / "data"))
    result = train.run(parse(config), workdir=tmp_path / "run")
    assert result["steps"] == 3
    assert all(map(np.isfinite, result["metrics"].values()))
    assert (pathlib.Path(result["export"]) / "saved_model.pb").is_file()


@pytest.mark.parametrize("name", ["digits", *EXPERIMENTS])
def test_it_can_be_changed_on_the_command_line(name, monkeypatch, tmp_path):
    # Which writes 516 files.
    monkeypatch.setattr("tfaccel.data.blurred.ensure_blurred", lambda: tmp_path)
    monkeypatch.setattr("tfaccel.data.digits.ensure_listed_digits", lambda: tmp_path)
    monkeypatch.setattr("tfaccel.data.digit_scenes.ensure_digit_scenes", lambda: tmp_path)
    argv = [
        "tfaccel",
        f"--config={CONFIGS / name}.py",
        "--config.train_images.rotation_degrees=5",
        "--config.train_images.window=random_resized_crop",
        "--config.train_images.crop_area=0.25,1",
        "--config.train_images.horizontal_flip",
        "--config.test_images.window=resized_center_crop",
        "--config.data.mean=0.5",
        "--config.data.stored_size=40,48",
        "--config.data.global_batch_size=None",
        "--config.data.batch_per_replica=32",
        "--config.model.num_outputs=None",
        "--config.dali.threads=None",
    ]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv, lock_config=True)
    assert values(argv)[1:] == []
    config = parse(values.config)
    assert config.train_images.rotation_degrees == 5
    assert config.train_images.crop_area == (0.25, 1)
    assert config.train_images.horizontal_flip
    assert config.test_images.window == "resized_center_crop"
    assert config.data.mean == (0.5,) * config.data.channels
    assert config.data.stored_size == (40, 48)
    assert (config.data.global_batch_size, config.data.batch_per_replica) == (None, 32)


@pytest.mark.parametrize(
    ("given", "warmup_epochs"),
    [(["epochs=40"], 4), (["warmup_epochs=2.5"], 2.5), (["warmup_epochs=1", "epochs=40"], 1)],
)
def test_cifar10_warms_up_for_a_tenth_of_however_many_epochs(given, warmup_epochs):
    argv = ["tfaccel", f"--config={CONFIGS / 'cifar10'}.py"]
    argv += [f"--config.train.{each}" for each in given]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv, lock_config=True)
    values(argv)
    assert parse(values.config).train.warmup_epochs == warmup_epochs


@pytest.mark.slow
def test_restoration_makes_photographs_sharper(tmp_path):
    blurred = PSNR()
    test = ensure_blurred() / "test"
    for file in sorted((test / "blurry").glob("*")):
        pair = [
            np.asarray(PIL.Image.open(test / each / file.name)) / 255
            for each in ("sharp", "blurry")
        ]
        sharp, blurry = (each[None, 16:80, 16:80] for each in pair)  # as center_crop does
        blurred.update_state(sharp, blurry)
    result = train.run(parse(get_config("restoration", "")), workdir=tmp_path / "run")
    # 31.7 dB and 37.2 dB on 2 CPU cores, 2026-11-23.
    assert result["metrics"]["val_psnr"] > float(blurred.result()) + 2
