"""All that relies on private names of Keras and TensorFlow, or that replaces a layer of Keras.

The import checks the version of Keras, before any module here asks for a private name.
"""

import keras

from tfaccel.common.errors import UserError
from tfaccel.common.version import KERAS


def check_keras(version: str) -> None:
    """Raises UserError unless tfaccel was tried with this version of Keras."""
    if ".".join(version.split(".")[:2]) not in KERAS:
        lines = " and ".join(f"{each}.x" for each in KERAS)
        raise UserError(
            f"Keras {version} is installed, but tfaccel's distributed step works with Keras "
            f"{lines} only; install it: pip install 'keras=={KERAS[0]}.*'"
        )


check_keras(keras.__version__)
