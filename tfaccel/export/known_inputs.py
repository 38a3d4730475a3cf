"""A model of known inputs around one that has none: a subclassed model.

Takes the model and whatever tells what it takes; gives a functional model that calls it, with its
own weights. A model that knows its inputs is given back as it is.

    known = with_inputs(model, loader=test)

The shapes are those of `images`; else those that a loader gives; else those that `fit` or
`evaluate` gave last; else the one that Keras noted as the model was built, of float32.
"""

import inspect

import keras
import numpy as np
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.common.tables import cleaned
from tfaccel.data.distribute import Loader
from tfaccel.keras_internals.model_view import inputs_of
from tfaccel.keras_internals.symbolic_build import trained_on


def with_inputs(model: keras.Model, *, loader: Loader | None = None, images=None) -> keras.Model:
    """Returns a model whose `inputs` and `outputs` are known.

    Args:
      model: of any kind. One that is not built yet is built, in its strategy's scope.
      loader: that gives what the model takes; or None.
      images: a batch as the model takes it; or None.

    Raises:
      UserError: it has no `call`, nothing tells its inputs, it cannot be called on them, or it is
        not built yet and there are several workers.
    """
    if inputs_of(model):
        return model
    if not isinstance(model, keras.Sequential) and type(model).call is keras.Model.call:
        raise UserError(
            f"model {model.name} has no call(), which is what an export answers by; write one in "
            f"{type(model).__name__}, or export a model within it"
        )
    specs = _specs(model, loader, images)
    if specs is None:
        raise UserError(
            f"model {model.name} has no known inputs yet; train it first, give images=, a batch as "
            "it takes it, or start it with keras.Input(shape=...)"
        )
    for each in tf.nest.flatten(specs):
        if not isinstance(each, tf.TensorSpec) or each.shape.rank in (None, 0):
            raise UserError(
                f"model {model.name} was trained on {each}, which no signature of an export has; "
                "give images=, a batch of plain arrays as it takes it"
            )
    strategy = model.distribute_strategy
    if not model.built and len(strategy.extended.worker_devices) < strategy.num_replicas_in_sync:
        raise UserError(  # one worker alone would wait for the others, for the first weights
            f"model {model.name} is not built yet; with several workers call it once on a batch, "
            "in `with run.scope():`, in each of them"
        )
    try:
        with strategy.scope():
            inputs = _inputs(specs)
            return keras.Model(inputs, called(model, inputs), name=model.name)
    except Exception as error:  # whatever its call raises
        shapes = ", ".join(str((None, *each.shape[1:])) for each in tf.nest.flatten(specs))
        raise UserError(
            f"model {model.name} cannot be called on inputs of the shapes {shapes} "
            f"({cleaned(str(error)).strip() or type(error).__name__}), as an export "
            "does; mend its call, or give images=, a batch as it takes it"
        ) from error


def called(model: keras.Model, inputs):
    """Returns what a model answers outside training, whose `call` need not know of training."""
    knows = "training" in inspect.signature(model.call).parameters
    return model(inputs, **({"training": False} if knows else {}))


def _specs(model, loader: Loader | None, images):
    """Returns the specs of what the model takes, in its own structure; None if nothing tells."""
    if images is not None:
        arrays = tf.nest.map_structure(np.asarray, images)
        return tf.nest.map_structure(_of_array, arrays)
    if loader is not None:
        return keras.utils.unpack_x_y_sample_weight(loader.element_spec)[0]
    if (specs := trained_on(model)) is not None:
        return specs
    shape = (model.get_build_config() or {}).get("input_shape") if model.built else None
    if shape and all(each is None or isinstance(each, int) for each in shape):
        return tf.TensorSpec(shape, "float32")
    return None


def _of_array(array: np.ndarray) -> tf.TensorSpec:
    is_text = array.dtype.kind in "OSU"
    return tf.TensorSpec((None, *array.shape[1:]), "string" if is_text else array.dtype)


def _inputs(specs):
    """Returns an Input for each spec, in their structure; of a dict, each has its key's name."""

    def named(path: tuple, spec: tf.TensorSpec) -> keras.KerasTensor:
        # Floats as Keras has them, whatever a loader makes: the layers cast.
        dtype = "float32" if spec.dtype.is_floating else spec.dtype.name
        name = "_".join(map(str, ("inputs", *path) if not path or _are_numbers(path) else path))
        return keras.Input(tuple(spec.shape[1:]), dtype=dtype, name=name)

    with_path = keras.tree.flatten_with_path(specs)
    return keras.tree.pack_sequence_as(specs, [named(*each) for each in with_path])


def _are_numbers(path: tuple) -> bool:
    return all(isinstance(each, int) for each in path)
