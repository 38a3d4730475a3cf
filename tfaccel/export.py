"""A trained model to files that need neither tfaccel nor DALI, and proof that they answer alike.

Takes a Keras model and a folder; gives, in that folder, a SavedModel and `model.keras`. The
SavedModel is loaded back with plain `tf.saved_model.load` and compared on one batch.

    export_model(model, "exported/1", images=images)
"""

import logging
import os
import pathlib
import shutil
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tfaccel import progress
from tfaccel.errors import RunError, UserError

log = logging.getLogger("tfaccel")

# Largest difference between exported and trained outputs, relative to the largest output. Loaded
# and live model run the same layers in the same precision, but other algorithms may be picked for
# them, whose sums differ: by 2.7e-4 in float32 with TF32 on an H200. TF32 has float16's mantissa.
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
NUM_COMPARED = 32  # rows of random input, where no images are given


@progress.within("export")
def export_model(model: keras.Model, path: str | os.PathLike, *, images=None) -> pathlib.Path:
    """Writes `path` whole or not at all, and compares before it appears.

    The SavedModel has the signature `serving_default`: from the model's own inputs, [batch, ...],
    to float32 outputs, whatever the policy.

    Args:
      model: built; functional or Sequential, so that its inputs are known.
      path: a folder that does not exist yet. For TensorFlow Serving its name is a whole number.
      images: one batch of inputs to compare on; random ones in 0..2 where none is given.

    Returns:
      The path, absolute.

    Raises:
      UserError: the path exists or cannot be made, or the model's inputs are unknown.
      RunError: it cannot be written, as on a full disk.
      RuntimeError: the loaded model's outputs differ by more than the precision explains. What was
        written stays beside `path`, as `<name>.<random>.rejected`.
    """
    path = pathlib.Path(path).expanduser().absolute()
    if path.exists():
        raise UserError(f"export path {path} exists; give one that does not, or remove it")
    if not getattr(model, "inputs", None):
        raise UserError(
            f"model {model.name} has no known inputs; expected a functional or built Sequential "
            "model: start it with keras.Input(shape=...)"
        )
    if images is None:
        images = _random_inputs(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UserError(
            f"export path {path} cannot be made ({error.strerror}); give another"
        ) from error
    try:
        _write(model, unfinished)
        difference, tolerance = _compare(model, unfinished, images), _tolerance(model)
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from a server
        if difference > tolerance:
            rejected = unfinished.rename(path.with_name(f"{unfinished.name[1:]}.rejected"))
            raise RuntimeError(
                f"the SavedModel's outputs differ from the trained model's by {difference:.1e} of "
                f"the largest; expected at most {tolerance:.0e}: it is not exported, but "
                f"kept in {rejected}"
            )
        unfinished.rename(path)
    except (OSError, tf.errors.ResourceExhaustedError) as error:
        raise RunError(
            f"export path {path} cannot be written ({error}); make room, or give another"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # it is there only after a failure
    log.info("export: %s, loaded back, outputs differ by at most %.1e", path, difference)
    return path


def _write(model, folder: pathlib.Path) -> None:
    def serve(*inputs):
        outputs = model(_structured(model, inputs), training=False)
        return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

    signature = [
        tf.TensorSpec((None, *each.shape[1:]), each.dtype, name=each.name) for each in model.inputs
    ]
    archive = keras.export.ExportArchive()
    archive.track(model)
    # The first endpoint also becomes `serving_default`.
    archive.add_endpoint("serve", serve, input_signature=signature)
    archive.write_out(folder, verbose=False)
    _without_training_state(model).save(folder / "model.keras")


def _without_training_state(model) -> keras.Model:
    """Returns a copy that plain Keras loads: not compiled, so without optimizer or loss of ours."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def _compare(model, folder: pathlib.Path, images) -> float:
    """Returns the largest difference of any output, relative to the largest output."""
    loaded = tf.saved_model.load(folder)
    flat = zip(tf.nest.flatten(images), model.inputs, strict=True)
    inputs = [tf.cast(each, own.dtype) for each, own in flat]
    expected = tf.nest.flatten(model(_structured(model, inputs), training=False))
    received = tf.nest.flatten(loaded.serve(*inputs))
    worst = 0.0
    for want, got in zip(expected, received, strict=True):
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        scale = max(1.0, np.abs(want).max())
        difference = float(np.abs(want - got).max() / scale)
        worst = max(worst, difference if np.isfinite(difference) else np.inf)
    return worst


def _tolerance(model) -> float:
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    return TOLERANCE[
        "tf32" if model.compute_dtype == "float32" and tf32 and on_gpu else model.compute_dtype
    ]


def _structured(model, inputs):
    """Returns the flat inputs as the model takes them: alone, or in its own list or dict."""
    if isinstance(model, keras.Sequential):
        return inputs[0]
    return tf.nest.pack_sequence_as(model.input, inputs)


def _random_inputs(model) -> list[np.ndarray]:
    if any(None in each.shape[1:] for each in model.inputs):
        raise UserError(
            f"model {model.name} takes inputs of any size; give images=, a batch to compare on"
        )
    random = np.random.default_rng(0)
    # Cast to whole numbers, this is a valid 0 or 1 for any vocabulary and any pixel.
    return [2 * random.random((NUM_COMPARED, *each.shape[1:])) for each in model.inputs]
