"""The seeds and default names that Keras, NumPy and Python draw."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
from keras.src.backend.common import global_state
from keras.src.utils.rng_utils import get_random_seed


def global_seed() -> int:
    """Returns the seed that `keras.utils.set_random_seed` was given last; 0 without a seed."""
    return get_random_seed() or 0


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """Within the context, new objects and random draws do not change later seeds and names.

    Keras draws the seed of a layer from Python's generator. It keeps the numbers of unnamed layers
    and the generator for draws without a seed in two attributes of the thread.
    """
    names = "global_seed_generator", "object_name_uids"
    drawn, of_numpy = random.getstate(), np.random.get_state()
    kept = {name: global_state.get_global_attribute(name) for name in names}
    global_state.set_global_attribute(names[0], None)  # draws within the context make a new one
    if kept[names[1]] is not None:
        global_state.set_global_attribute(names[1], kept[names[1]].copy())
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(of_numpy)
        for name, each in kept.items():
            global_state.set_global_attribute(name, each)
