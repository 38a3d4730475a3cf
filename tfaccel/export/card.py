"""What an export is, beside it as JSON: classes, preprocessing, signatures, proof.

Takes the parts; writes `tfaccel.json`, and reads it for whoever has the folder alone.

    write(folder, model, images, parity, config, precision="float32", loader="dali_gpu")
    classes = read(folder)["class_names"]

Needs no TensorFlow to read.
"""

import datetime
import json
import pathlib
from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular
from tfaccel.common.version import __version__
from tfaccel.config import ExportConfig

NAME = "tfaccel.json"


def write(
    folder: pathlib.Path,
    model,
    images,
    parity,
    config: ExportConfig,
    *,
    precision: str,
    loader: str | None,
) -> None:
    """Writes what is known of an export.

    Args:
      folder: of the export.
      model: the Keras model that is in it.
      images: what surrounds it, a `saved_model.Images`; None for the model alone.
      parity: a `Parity`.
      config: how it was made.
      precision: that it computes in.
      loader: which one's images it was compared on; None where there was none.
    """
    import keras
    import tensorflow as tf

    card = {
        "tfaccel": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.name,
        "weights": config.weights,
        "computes_in": precision,
        "xla": config.xla,
        "class_names": list(images.answers.class_names) if images else [],
        "answers": images.answers.kind if images else None,
        "pixel_dtype": images.pixel_dtype if images else None,
        "preprocessing": images.preprocessing.as_dict() if images else None,
        "parity": {"loader": loader, **parity.as_dict()},
    }
    (folder / NAME).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def read(folder: pathlib.Path) -> dict[str, object]:
    """Returns what was written.

    Raises:
      UserError: the folder is no export of tfaccel.
    """
    try:
        card = json.loads(read_regular(folder / NAME))
        if isinstance(card, dict) and "class_names" in card:
            return card
        found = "is of something else"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        found = f"is no JSON ({error})"
    raise UserError(f"{folder / NAME} {found}; expected the folder of a `tfaccel export`")


def completed(class_names: Sequence[str], num: int) -> tuple[str, ...]:
    """Returns names for as many classes as a model gives, which may be more than its data have."""
    are_numbers = class_names and all(each.isdigit() for each in class_names)
    prefix = "" if are_numbers else "class "
    return (*class_names, *(f"{prefix}{index}" for index in range(len(class_names), num)))
