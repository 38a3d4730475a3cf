"""Ray: its TensorFlow trainer gives each worker TF_CONFIG, and asks for the Keras of before 3.

Takes the environment; takes back what it says of Keras, which tfaccel's models cannot be of.

    undo_legacy_keras(os.environ)   # before TensorFlow is imported, if it can be
"""

import logging
import sys
from collections.abc import MutableMapping

from tfaccel.common.errors import UserError

log = logging.getLogger("tfaccel")

NAME = "TF_USE_LEGACY_KERAS"


def undo_legacy_keras(environment: MutableMapping[str, str]) -> None:
    """Unsets TF_USE_LEGACY_KERAS, by which `tf.keras` is the package tf_keras, and says so.

    Raises:
      UserError: it is too late, because TensorFlow has imported tf_keras.
    """
    if environment.get(NAME) not in ("true", "True", "1"):  # what TensorFlow 2.21 takes for yes
        return
    if "tf_keras" in sys.modules:
        raise UserError(
            f"{NAME}={environment[NAME]}, which Ray's TensorFlow trainer sets, and tf.keras is the "
            f"old Keras already; unset it before anything imports TensorFlow: "
            f"os.environ.pop({NAME!r}, None)"
        )
    del environment[NAME]
    # A warning, because it may come before there is a log.
    log.warning(
        "keras: %s is unset again, as Ray's TensorFlow trainer sets it: tf.keras is Keras 3", NAME
    )
