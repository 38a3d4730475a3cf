import csv
import json
import os
import runpy
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from loaded_tool import TOOLS, loaded

from tfaccel.config import ImageConfig, parse, presets
from tfaccel.data.loaders import pixels
from tfaccel.experiment import models, recipe
from tfaccel.step import blend

TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
CLASSES = [*"abcdefghij"]


@pytest.fixture(scope="module")
def tool():
    with loaded("bench_cifar") as module:
        yield module


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of 40 images for training and 20 for test, in ten classes, as the data set's."""
    random, root = np.random.default_rng(0), tmp_path_factory.mktemp("cifar")
    for split, count in (("train", 40), ("test", 20)):
        for index in range(count):
            file = root / split / CLASSES[index % 10] / f"{index:02d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            image = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            PIL.Image.fromarray(image).save(file)
    return root


# What comes of runs.


def write_workdir(folder, ends, accuracies):
    folder.mkdir()
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ("epoch", "seconds", "val_accuracy"))
        writer.writeheader()
        for epoch, (end, accuracy) in enumerate(zip(ends, accuracies, strict=True), 1):
            writer.writerow({"epoch": epoch, "seconds": end, "val_accuracy": accuracy})
    result = {"seconds": ends[-1], "export": "/somewhere"}
    for name, value in (("result", result), ("config", {"a": 1}), ("environment", {"b": 2})):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("accuracies", "epoch", "seconds", "with_compilation"),
    [
        ([0.5, 0.6, 0.93, 0.94, 0.93], 4, 8.0, 56.0),
        ([0.5, 0.6, 0.7, 0.8, 0.9399], None, None, None),
        ([0.95, 0.6, 0.7, 0.8, 0.9], 1, 2.0, 50.0),
    ],
)
def test_our_seconds_end_with_the_first_test_of_94_percent(
    tool, tmp_path, accuracies, epoch, seconds, with_compilation
):
    folder = write_workdir(tmp_path / "run", [50.0, 52.0, 54.0, 56.0, 58.0], accuracies)
    found = tool.of_ours(folder)
    assert found["epochs_to_target"] == epoch
    assert found["seconds_to_target"] == seconds
    assert found["seconds_to_target_with_compilation"] == with_compilation
    assert (
        found["training_seconds"] == 10.0
    )  # five epochs of the 2 s that those after the first take
    assert found["training_seconds_with_compilation"] == 58.0
    assert found["test_accuracy"] == accuracies[-1]
    assert "export" not in found["result"]


def test_of_a_single_epoch_it_is_not_known_what_was_compilation(tool, tmp_path):
    found = tool.of_ours(write_workdir(tmp_path / "run", [50.0], [0.95]))
    assert (found["seconds_to_target"], found["seconds_to_target_with_compilation"]) == (None, 50.0)


@pytest.mark.parametrize(("seconds", "with_compilation"), [(90.0, 120.0), (None, None)])
def test_the_rivals_lines_are_put_together(tool, seconds, with_compilation):
    lines = [
        "a warning",
        '{"decode_seconds": 4}',
        '{"compile_seconds": 30}',
        json.dumps({"training_seconds": 90.0, "seconds_to_target": seconds}),
    ]
    found = tool.of_rival("\n".join(lines))
    assert found["decode_seconds"] == 4
    assert found["training_seconds_with_compilation"] == 120.0
    assert found["seconds_to_target_with_compilation"] == with_compilation


# The driver, with arms that are fakes.


def a_run(seconds, accuracy=0.945):
    reached = accuracy >= 0.94
    return {
        "training_seconds": seconds,
        "training_seconds_with_compilation": seconds + 50,
        "seconds_to_target": seconds if reached else None,
        "seconds_to_target_with_compilation": seconds + 50 if reached else None,
        "test_accuracy": accuracy,
        "environment": {"python": "3"},
    }


@pytest.fixture
def measured(tool, root, tmp_path, monkeypatch):
    """Returns the exit code, the turns and the file of a call whose runs give what is said."""

    def call(*flags, **runs):
        turns, left = [], {name.replace("_", "-"): iter(each) for name, each in runs.items()}

        def run_arm(name, command, scratch, *, num_gpus):
            turns.append(name)
            found = next(left[name])
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(tool, "run_arm", run_arm)
        monkeypatch.setattr(tool, "has_torch", lambda _: True)
        monkeypatch.setattr(tool, "gpu_names", lambda: ["NVIDIA H200"] * 2)
        code = tool.main([f"--root={root}", f"--output={tmp_path}", *flags])
        file = tmp_path / "speed-T2-1xH200.json"
        return code, turns, json.loads(file.read_text()) if file.exists() else None

    return call


def test_arms_take_turns_and_the_best_rival_counts(measured, capsys):
    code, turns, found = measured(
        "--repeats=3",
        "--rivals=bfloat16,half",
        ours=[a_run(150), a_run(180), a_run(120)],
        bfloat16=[a_run(120), a_run(120), a_run(130)],
        half=[a_run(100), a_run(90), a_run(110)],
    )
    assert code == 0
    assert turns == ["ours", "bfloat16", "half"] * 3
    assert (found["ratio"], found["is_met"], found["repeats"]) == (1.5, True, 3)
    assert found["ratio with compilation"] == 200 / 150
    assert found["rivals"]["half"]["medians"]["seconds_to_target"] == 100
    assert (found["row"], found["goal"], found["hardware"]) == ("T2", 1.5, "1xH200")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"ratio": 1.5, "ratio with compilation": 200 / 150}


def test_a_side_that_does_not_come_to_94_percent_has_no_ratio(measured):
    for runs in (
        {"ours": [a_run(150)], "half": [a_run(100, 0.939)]},
        {"ours": [a_run(150, 0.9)], "half": [a_run(100)]},
    ):
        code, _, found = measured("--repeats=1", "--rivals=half", **runs)
        assert (code, found["ratio"], found["is_met"]) == (0, None, False)
        assert found["ratio with compilation"] is None
        assert found["ratio of training"] == 1.5


def test_a_run_that_fails_leaves_those_before_it_in_the_file(tool, measured, capsys):
    code, turns, found = measured(
        "--rivals=half",
        ours=[a_run(150), tool.ArmError("arm 'ours' ended with exit code 1")],
        half=[a_run(100)],
    )
    assert (code, turns) == (1, ["ours", "half", "ours"])
    assert "arm 'ours' ended with exit code 1" in capsys.readouterr().err
    assert found["ratio"] == 1.5


def test_a_later_call_adds_runs_of_the_same_flags_alone(measured, capsys):
    flags = ("--repeats=1", "--rivals=half")
    measured(*flags, ours=[a_run(150)], half=[a_run(100)])
    _, _, found = measured(*flags, "--add", ours=[a_run(170)], half=[a_run(100)])
    assert (found["ratio"], found["repeats"]) == (1.6, 2)
    code, turns, _ = measured(*flags, "--add", "--epochs=4")
    assert (code, turns) == (2, [])
    assert "has runs of other arms or flags; use the same ones" in capsys.readouterr().err
    _, _, found = measured(*flags, ours=[a_run(200)], half=[a_run(100)])
    assert (found["ratio"], found["repeats"]) == (2.0, 1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--root=/nowhere"], "--root=/nowhere has no folder train"),
        (["--rivals=quick"], "--rivals=quick: there is no such setting; use some of bfloat16, "),
        (["--torch-python=/no/python"], "/no/python has no torch and torchvision"),
    ],
)
def test_mistakes_in_the_call(tool, root, capsys, flags, sentence):
    assert tool.main([f"--root={root}", *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--repeats=0", "--repeats: '0'; expected a whole number of at least 1"),
        ("--epochs=-1", "--epochs: '-1'; expected a whole number of at least 1"),
        ("--ours=[1]", "--ours: '[1]'; expected a JSON list of flags"),
        ("--ours={", "value: '{'"),
    ],
)
def test_flags_that_are_not_what_they_may_be(tool, root, capsys, flag, sentence):
    with pytest.raises(SystemExit, match="2"):
        tool.main([f"--root={root}", flag])
    assert sentence in capsys.readouterr().err


def test_both_sides_have_the_same_data_and_epochs(tool, root):
    options = tool.parse([f"--root={root}", "--epochs=7", '--ours=["--config.runtime.xla=False"]'])
    ours, *rivals = tool.arms_of(options).values()
    assert {f"--config.data.root={root}", "--config.train.epochs=7"} < {*ours}
    assert ours[-1] == "--config.runtime.xla=False"
    assert len(rivals) == len(tool.RIVALS)
    for each in rivals:
        assert {f"--root={root}", "--epochs=7", "--target=0.94"} < {*each}
        assert (TOOLS.parent / each[1]).is_file()


def test_a_failed_arm_is_named_with_its_last_lines_but_no_stack(tool, tmp_path):
    stack = "    @     0x7f00dead  (unknown)\n" * 50
    program = f"import sys; sys.stderr.write('something about a GPU\\n' + {stack!r}); sys.exit(3)"
    with pytest.raises(tool.ArmError) as error:
        tool.run_arm("half", [sys.executable, "-c", program], tmp_path, num_gpus=0)
    expected = "arm 'half' ended with exit code 3; its last lines:\n  something about a GPU"
    assert str(error.value) == expected


def test_an_interrupted_driver_leaves_no_arm(tmp_path):
    write = f"open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid()))"
    program = f"import os, time; time.sleep(1); {write}"  # by then the driver waits for it
    driver = f"""
import signal, sys
sys.path.insert(0, {str(TOOLS)!r})
import bench_cifar, pathlib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
command = [sys.executable, "-c", {program + "; time.sleep(99)"!r}]
bench_cifar.run_arm("half", command, pathlib.Path({str(tmp_path)!r}), num_gpus=0)
"""
    process = subprocess.Popen([sys.executable, "-c", driver])
    ends = time.monotonic() + 300
    while not (tmp_path / "id").exists() or not (tmp_path / "id").read_text():
        assert time.monotonic() < ends
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "id").read_text()), 0)


# The rival itself, by the interpreter that has torch: TORCH_PYTHON, or this one.


@pytest.fixture
def in_torch(tool):
    if not tool.has_torch(TORCH_PYTHON):
        pytest.skip("torch and torchvision are not installed; TORCH_PYTHON may name another Python")

    def run(program):
        environment = os.environ | {"PYTHONPATH": str(TOOLS)}
        done = subprocess.run(
            [TORCH_PYTHON, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def augmented_by_torch(in_torch, root, path):
    """Returns the images, two epochs' draws and what torch made of them."""
    in_torch(f"""
import pathlib, numpy, torch
from bench_arms import torch_cifar_images as images
torch.manual_seed(0)
folder = pathlib.Path({str(root)!r}) / "train"
pixels, labels = images.read(folder, images.class_names_in(folder), "cpu")
found = {{"pixels": pixels, "labels": labels}}
mirrored = torch.rand(len(labels)) < 0.5
for epoch in (0, 1):
    draws = images.draw(mirrored, epoch=epoch, batch=12)
    made, targets = images.augmented(
        pixels, labels, draws, batch=12, num_classes=10, dtype=torch.float32)
    assert made[0].is_contiguous(memory_format=torch.channels_last)
    found |= {{f"{{name}} {{epoch}}": each for name, each in draws.items()}}
    found |= {{f"made {{epoch}}": made, f"targets {{epoch}}": targets}}
numpy.savez({str(path)!r}, **{{name: each.numpy() for name, each in found.items()}})
""")
    return np.load(path)


@pytest.mark.slow
def test_the_rival_augments_as_this_does(in_torch, root, tmp_path, monkeypatch):
    """The same draws, through tfaccel's operations."""
    found = augmented_by_torch(in_torch, root, tmp_path / "found.npz")
    assert found["pixels"].shape == (40, 40, 40, 3)
    assert found["labels"].tolist() == sorted([*range(10)] * 4)
    monkeypatch.setattr(blend, "_beta", lambda alpha, drawn: drawn)  # already so distributed
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    images = ImageConfig(image_size=(32, 32), mean=mean, std=std, global_batch_size=12)
    for epoch in ("0", "1"):
        draws = {name: found[f"{name} {epoch}"] for name in ("order", "mirrored", "shift", "color")}
        order = draws["order"]
        assert len(set(order)) == len(order) == 36
        saturation, contrast, brightness = draws["color"].T
        ours = pixels.augmented(
            tf.constant(found["pixels"][order][:, 4:-4, 4:-4]),
            {
                "warp": tf.constant(warp(draws["mirrored"], draws["shift"])),
                "color": np.stack([brightness, contrast, saturation, 0 * contrast], 1),
            },
            images=images,
            augment=presets.preset("cifar", brightness=0.3, contrast=0.3, saturation=0.3),
            dtype="float32",
        ).numpy()
        drawn = np.hstack([found[f"own part {epoch}"][:, None], found[f"center {epoch}"]])
        own, label = blend._cutmix(0.4, tf.constant(drawn), (32, 32))
        labels = np.eye(10)[found["labels"][order]] * 0.9 + 0.01
        expected = blended(ours, own.numpy())
        made = found[f"made {epoch}"].transpose(0, 1, 3, 4, 2).reshape(-1, 32, 32, 3)
        # The rival's axes of colour are exact; DALI's, and so tfaccel's, to three digits.
        np.testing.assert_allclose(made, expected, atol=0.01)
        targets = found[f"targets {epoch}"].reshape(-1, 10)
        np.testing.assert_allclose(targets, blended(labels, label.numpy()), atol=1e-6)
    mirrored = {
        epoch: dict(zip(found[f"order {epoch}"], found[f"mirrored {epoch}"], strict=True))
        for epoch in (0, 1)
    }
    both = {*mirrored[0]} & {*mirrored[1]}
    assert all(mirrored[0][each] != mirrored[1][each] for each in both)


def warp(mirrored, shift):
    sign = np.where(mirrored, -1.0, 1.0)
    matrix = np.zeros((len(shift), 2, 3), np.float32)
    matrix[:, 0, 0], matrix[:, 1, 1] = sign, 1
    matrix[:, 0, 2] = 16 - 16 * sign + shift[:, 1] - 4
    matrix[:, 1, 2] = shift[:, 0] - 4
    return matrix


def blended(rows, own):
    """Returns rows of batches of 12, blended with the next of their batch."""
    following = np.roll(rows.reshape(-1, 12, *rows.shape[1:]), -1, axis=1).reshape(rows.shape)
    return own * rows + (1 - own) * following


@pytest.mark.slow
def test_the_rivals_draws_are_distributed_as_ours(in_torch):
    found = json.loads(
        in_torch("""
import json, torch
from bench_arms import torch_cifar_images as images
torch.manual_seed(0)
draws = images.draw(torch.rand(50000) < 0.5, epoch=1, batch=1000)
label = images._boxes(draws["own part"], draws["center"]).float().mean((1, 2))
print(json.dumps({
    "mirrored": draws["mirrored"].float().mean().item(),
    "shifts": [(draws["shift"] == each).float().mean(0).tolist() for each in range(9)],
    "least": draws["color"].amin(0).tolist(), "most": draws["color"].amax(0).tolist(),
    "color": draws["color"].mean(0).tolist(),
    "of next": [label.mean().item(), label.std().item()],
}))
""")
    )
    drawn = tf.random.stateless_uniform((50000, 3), [1, 2])
    _, own = blend._cutmix(0.4, drawn, (32, 32))
    assert found["mirrored"] == pytest.approx(0.5, abs=0.01)
    np.testing.assert_allclose(found["shifts"], 1 / 9, atol=0.006)
    np.testing.assert_allclose(found["least"], 0.7, atol=0.001)
    np.testing.assert_allclose(found["most"], 1.3, atol=0.001)
    np.testing.assert_allclose(found["color"], 1, atol=0.005)
    expected = [1 - own.numpy().mean(), own.numpy().std()]
    np.testing.assert_allclose(found["of next"], expected, atol=0.01)


@pytest.mark.slow
def test_the_rivals_network_is_ours(in_torch, tmp_path):
    """Our weights give our logits, in training and in test."""
    ours = models.build("cifar_resnet", image_shape=(32, 32, 3), num_outputs=10)
    random = np.random.default_rng(0)
    for each in ours.weights:  # else batch norm would be of numbers that say nothing
        if "kernel" not in each.path:
            each.assign(random.uniform(0.5, 1.5, each.shape))
    images = random.normal(size=(4, 32, 32, 3)).astype(np.float32)
    weights = {f"{i:03d}": each.numpy() for i, each in enumerate(ours.weights)}
    np.savez(tmp_path / "ours.npz", images=images, **weights)
    in_torch(f"""
import numpy, torch
from bench_arms.torch_cifar_network import make_network, mean_with_mirrored
arrays = dict(numpy.load({str(tmp_path / "ours.npz")!r}))
images = torch.tensor(arrays.pop("images")).permute(0, 3, 1, 2)
network = make_network(width=1.0, num_classes=10)
state = network.state_dict()
names = [each for each in state if "num_batches" not in each]
for name, array in zip(names, arrays.values(), strict=True):
    array = array.transpose(*({{4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}}[array.ndim]))
    assert array.shape == state[name].shape
    state[name].copy_(torch.tensor(array))
with torch.no_grad():
    network.train(False)
    test = mean_with_mirrored(network, images)
    network.train(True)
    train = network(images)
numpy.savez({str(tmp_path / "rival.npz")!r}, test=test, train=train)
""")
    found = np.load(tmp_path / "rival.npz")
    scale = np.abs(found["test"]).max()
    np.testing.assert_allclose(ours(images).numpy(), found["test"], atol=1e-4 * scale)
    expected = ours(images, training=True).numpy()
    np.testing.assert_allclose(expected, found["train"], atol=1e-3 * np.abs(expected).max())


@pytest.mark.slow
def test_the_rivals_recipe_is_ours(in_torch):
    """The same gradients, by the schedule and the optimizer that the config asks for."""
    found = in_torch("""
import json, torch
from bench_arms import torch_cifar
network = torch.nn.Linear(1, 1)
for each in network.parameters():
    torch.nn.init.ones_(each)
optimizer = torch_cifar.make_optimizer(network, 512, "cpu")
for step in range(300):
    rate = torch_cifar.rate_at(step, 300) / torch_cifar.NESTEROV_SCALE / 1024
    for group in optimizer.param_groups:
        group["lr"] = rate
    for each in network.parameters():
        each.grad = torch.full_like(each, 512 * 0.01)  # of a sum over 512 images
    optimizer.step()
print(json.dumps([each.item() for each in network.parameters()]))
""")
    config = runpy.run_path(str(TOOLS.parent / "configs" / "cifar10.py"))["get_config"]()
    config.train.epochs, config.data.root = 10, "data"
    train = parse(config).train
    schedule = recipe.make_schedule(train, global_batch_size=512, num_steps=30)
    optimizer = recipe.make_optimizer(train, schedule)
    ours = [keras.Variable([[1.0]], name="kernel"), keras.Variable([1.0], name="bias")]
    for _ in range(300):
        optimizer.apply([tf.fill(each.shape, 0.01) for each in ours], ours)
    # Keras's momentum is of steps, torch's of gradients: they differ where the rate changes.
    np.testing.assert_allclose(json.loads(found), [each.numpy().item() for each in ours], rtol=0.02)


@pytest.mark.slow
def test_both_sides_run(tool, in_torch, root, tmp_path):
    ours = ["--config.model.name=mnist_cnn", "--config.data.global_batch_size=8"]
    ours += ["--config.train.steps_per_execution=1", "--config.runtime.precision=float32"]
    ours += ["--config.runtime.xla=False"]
    rival = ["--width=0.05", "--batch=8", "--mode=eager", "--precision=float32"]
    rival += ["--evaluate-each-epoch", "--target=0"]
    flags = [f"--torch-python={TORCH_PYTHON}", "--epochs=2", "--repeats=1", "--rivals=bfloat16"]
    flags += [f"--ours={json.dumps(ours)}", *(f"--rival={each}" for each in rival)]
    assert tool.main([f"--root={root}", f"--output={tmp_path}", *flags]) == 0
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    (run,) = found["rivals"]["bfloat16"]["runs"]
    assert run["steps_per_epoch"] == 5
    assert [*run["test_accuracies"]] == ["1", "2"]
    assert run["seconds_to_target"] == run["epoch_seconds"][0]  # of a target of 0
    assert run["training_seconds"] == pytest.approx(sum(run["epoch_seconds"]))
    assert run["decode_seconds"] > 0 < run["compile_seconds"]
    (run,) = found["arms"]["ours"]["runs"]
    assert len(run["test_accuracies"]) == 2
    assert run["training_seconds_with_compilation"] > run["training_seconds"] > 0
    assert found["ratio of training"] > 0
