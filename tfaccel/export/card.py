"""The description of an export, in `tfaccel.json`: classes, preprocessing, signatures, parity.

    write(folder, model, images, parity, config, precision="float32", loader="dali_gpu")
    classes = read(folder)["class_names"]

`read` does not need TensorFlow.
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
    """Writes the description of an export.

    Args:
      folder: the export's folder.
      model: the exported Keras model.
      images: a `saved_model.Images`; None for the model alone.
      parity: a `Parity`.
      config: how it was exported.
      precision: the precision that it computes in.
      loader: the name of the loader of the samples; None if there was no loader.
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
        "task": images.answers.task if images else None,
        "target_names": list(images.answers.target_names) if images else [],
        "answers": images.answers.kind if images else None,
        "exclusive": images.answers.exclusive if images else None,
        "pixel_dtype": images.pixel_dtype if images else None,
        "preprocessing": images.preprocessing.as_dict() if images else None,
        "parity": {"loader": loader, **parity.as_dict()},
    }
    (folder / NAME).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def read(folder: pathlib.Path) -> dict[str, object]:
    """Returns the description.

    Raises:
      UserError: the folder is not an export of tfaccel.
    """
    try:
        card = json.loads(read_regular(folder / NAME))
        if isinstance(card, dict) and "class_names" in card:
            return card
        found = "has other content"
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        found = f"is not valid JSON ({error})"
    raise UserError(f"{folder / NAME} {found}; expected the folder of a `tfaccel export`")


def completed(class_names: Sequence[str], num: int) -> tuple[str, ...]:
    """Returns `num` class names. A model may have more classes than its data has names."""
    are_numbers = class_names and all(each.isdigit() for each in class_names)
    prefix = "" if are_numbers else "class "
    return (*class_names, *(f"{prefix}{index}" for index in range(len(class_names), num)))
