"""A network that begins from trained weights, as a config asks for it."""

import pytest

from tfaccel.config import default_config, parse
from tfaccel.data.digits import ensure_digits
from tfaccel.experiment.train import prepare

CHIEF_STEPS = 8


def digits_config(root, **changes):
    config = default_config()
    config.data.root = str(root)
    config.data.image_size, config.data.channels = (8, 8), 1
    config.data.global_batch_size = 64
    config.data.loader = "memory"
    config.model.name = "mnist_cnn"
    config.train.learning_rate = 2e-3
    config.update_from_flattened_dict(changes)
    return parse(config)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The folders of the digits 0 to 4 and of 5 to 9."""
    roots = []
    for first in (0, 5):
        root = tmp_path_factory.mktemp(f"from{first}")
        for split in ("training", "testing"):
            (root / split).mkdir()
            for digit in range(first, first + 5):
                (root / split / str(digit)).symlink_to(ensure_digits() / split / str(digit))
        roots.append(root)
    return roots


def test_trained_weights_beat_random_ones_in_the_same_number_of_steps(halves, tmp_path, setup):
    """The digits 5 to 9, after one epoch, from a network that has seen only 0 to 4, or nothing."""

    def accuracy(root, epochs, **changes):
        run = setup(xla=False)
        train, test, model = prepare(run, digits_config(root, **changes))
        model.fit(train, epochs=epochs, verbose=0)
        return model.evaluate(test, verbose=0, return_dict=True)["accuracy"], model

    before, first = accuracy(halves[0], epochs=8)
    assert before > 0.95
    file = tmp_path / "zero_to_four.weights.h5"
    first.save_weights(file)
    tuned, _ = accuracy(halves[1], epochs=1, **{"model.weights": str(file)})
    fresh, _ = accuracy(halves[1], epochs=1)
    assert tuned > fresh + 0.9, (before, tuned, fresh)
