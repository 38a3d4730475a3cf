"""Ray: its TensorFlow trainer sets TF_CONFIG, but also selects the old Keras 2.

tfaccel's models need Keras 3, so this removes the variable that selects Keras 2.

    undo_legacy_keras(os.environ)   # before TensorFlow is imported, if possible
"""

import logging
import sys
from collections.abc import MutableMapping

from tfaccel.common.errors import UserError

log = logging.getLogger("tfaccel")

NAME = "TF_USE_LEGACY_KERAS"


def undo_legacy_keras(environment: MutableMapping[str, str]) -> None:
    """Unsets TF_USE_LEGACY_KERAS, which makes `tf.keras` the package tf_keras, and logs this.

    Raises:
      UserError: it is too late, because TensorFlow has imported tf_keras.
    """
    if environment.get(NAME) not in ("true", "True", "1"):  # TensorFlow 2.21's true values
        return
    if "tf_keras" in sys.modules:
        raise UserError(
            f"{NAME}={environment[NAME]}, which Ray's TensorFlow trainer sets, has already made "
            f"tf.keras the old Keras 2; unset it before TensorFlow is imported: "
            f"os.environ.pop({NAME!r}, None)"
        )
    del environment[NAME]
    # This is a warning because the log may not be set up yet.
    log.warning(
        "keras: unset %s, which Ray's TensorFlow trainer had set, so that tf.keras is Keras 3", NAME
    )
