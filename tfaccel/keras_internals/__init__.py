"""All that relies on private names of Keras and TensorFlow, or that replaces a layer of Keras.

The import checks the version of Keras, before any module here asks for a private name.
"""

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.version import KERAS


def check_keras(version: str) -> None:
    """Raises UserError unless tfaccel was tried with this version of Keras."""
    if version.split(".")[:2] != KERAS.split("."):
        raise UserError(
            f"Keras {version} is installed, but tfaccel's distributed step works with Keras "
            f"{KERAS}.x only; install it: pip install 'keras=={KERAS}.*'"
        )


check_keras(keras.__version__)
