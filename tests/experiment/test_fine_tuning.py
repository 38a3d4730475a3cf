"""A network that begins from trained weights, as a config asks for it."""

import keras
import numpy as np
import pytest

from tfaccel.cli.asked_experiment import check_run
from tfaccel.common.errors import UserError
from tfaccel.config import default_config, parse
from tfaccel.data.digits import ensure_digits
from tfaccel.experiment.train import make_model, prepare, run


def digits_config(root, **changes):
    config = default_config()
    config.data.root = str(root)
    config.data.image_size, config.data.channels = (8, 8), 1
    config.data.global_batch_size = 64
    config.model.name = "mnist_cnn"
    config.train.learning_rate = 2e-3
    config.update_from_flattened_dict(changes)
    return parse(config)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The folders of the digits 0 to 4, and of 5 to 9 with only 10 images of each to train on."""
    roots = []
    for first, most in ((0, None), (5, 10)):
        root = tmp_path_factory.mktemp(f"from{first}")
        for split in ("training", "testing"):
            for digit in range(first, first + 5):
                folder = root / split / str(digit)
                folder.mkdir(parents=True)
                images = sorted((ensure_digits() / split / str(digit)).iterdir())
                for each in images[: most if split == "training" else None]:
                    (folder / each.name).symlink_to(each)
        roots.append(root)
    return roots


def test_trained_weights_beat_random_ones_in_the_same_number_of_steps(halves, tmp_path, setup):
    """Three steps on the digits 5 to 9, from convolutions that saw only 0 to 4, or from nothing."""

    def accuracy(root, epochs, **changes):
        train, test, model = prepare(setup(xla=False), digits_config(root, **changes))
        model.fit(train, epochs=epochs, verbose=0)
        return model.evaluate(test, verbose=0, return_dict=True)["accuracy"], model

    before, first = accuracy(halves[0], epochs=8)
    assert before > 0.95
    file = tmp_path / "zero_to_four.weights.h5"
    first.save_weights(file)
    begin = {"model.weights": str(file), "model.new_layers": ("dense*", "head")}
    short = {"epochs": 3, "train.learning_rate": 1e-3}
    tuned, _ = accuracy(halves[1], **short, **begin)
    fresh, _ = accuracy(halves[1], **short)
    assert tuned > fresh + 0.1, (tuned, fresh)


def test_a_run_that_continues_needs_no_weights(halves, tmp_path, setup, caplog):
    file = tmp_path / "gone.weights.h5"
    config = digits_config(halves[0], **{"model.weights": str(file), "model.freeze": "backbone"})
    this_run = setup(xla=False)
    with pytest.raises(UserError, match="is no file that ends in"):
        make_model(this_run, config, num_outputs=5)
    model = make_model(this_run, config, num_outputs=5, continues=True)
    assert len(model.trainable_weights) == 2
    assert "model.weights is not read again" in caplog.text
    assert "stay random" not in caplog.text


@pytest.mark.parametrize(
    ("checkpoint", "continues"),
    [("step-00000012", True), ("step-00000012.tmp-77", False), ("notes", False), (None, False)],
)
def test_a_complete_checkpoint_stands_for_the_weights_from_the_start_on(
    halves, tmp_path, checkpoint, continues
):
    config = digits_config(halves[0], **{"model.weights": str(tmp_path / "gone.weights.h5")})
    if checkpoint:
        (tmp_path / "run" / "checkpoints" / checkpoint).mkdir(parents=True)
    if continues:
        check_run(config, tmp_path / "run")
        return
    with pytest.raises(UserError, match="is no file that ends in"):
        check_run(config, tmp_path / "run")


@pytest.mark.slow  # three whole runs
def test_a_run_that_goes_on_without_its_file_ends_as_one_that_was_not_cut(halves, tmp_path, setup):
    _, _, model = prepare(setup(xla=False), digits_config(halves[0]))
    file = tmp_path / "begin.weights.h5"
    model.save_weights(file)

    def weights_after(workdir, epochs):
        more = {"train.epochs": epochs, "runtime.xla": False, "runtime.gpu_ids": ()}
        more |= {"runtime.deterministic": True, "model.weights": str(file)}
        result = run(digits_config(halves[0], **more), workdir=workdir)
        return keras.models.load_model(f"{result['export']}/model.keras").get_weights()

    whole = weights_after(tmp_path / "whole", 2)
    weights_after(tmp_path / "cut", 1)
    file.unlink()
    for mine, other in zip(weights_after(tmp_path / "cut", 2), whole, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("name", ["a.keras", "a.weights.json"])
def test_a_new_head_is_not_the_one_that_the_weights_began_with(halves, tmp_path, setup, name):
    """Two runs have one seed, and the second one begins with weights of the first one."""

    def made(seed=0, **changes):
        config = digits_config(halves[0], **changes)
        return make_model(setup(xla=False, seed=seed), config, num_outputs=5)

    def head(model):
        return model.layers[-1].get_weights()[0].ravel()

    def save(model):
        if name == "a.keras":
            model.save(file)
        else:
            model.save_weights(file, max_shard_size=1e-3)

    first, file = made(), str(tmp_path / name)
    save(first)
    begin = {"model.weights": file, "model.new_layers": "head"}
    second = made(**begin)
    for mine, wanted in zip(second.layers[:-1], first.layers[:-1], strict=True):
        for one, other in zip(mine.get_weights(), wanted.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    assert abs(np.corrcoef(head(second), head(first))[0, 1]) < 0.2  # of 640 numbers: 5 sigma
    np.testing.assert_array_equal(head(second), head(made(**begin)))
    assert not np.array_equal(head(second), head(made(seed=1, **begin)))
    first.layers[1].set_weights([0 * each for each in first.layers[1].get_weights()])
    save(first)
    assert not np.array_equal(head(second), head(made(**begin)))  # other weights, another head
