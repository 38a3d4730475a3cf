"""Gives a subclassed model, which has no known inputs, a functional model around it.

`with_inputs` returns a functional model that calls the subclassed model and shares its weights. It
returns a model with known inputs unchanged.

    known = with_inputs(model, loader=test)

The shapes are those of `images`; else those of the loader; else those that `fit` or `evaluate` last
gave the model; else the input shape that Keras stored when it built the model, as float32.
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
    """Returns a model with known `inputs` and `outputs`.

    If the model is not built yet, it is built in its strategy's scope. `loader`, or the batch
    `images`, has the model's inputs.

    Raises:
      UserError: the model has no `call`, its inputs are not known, it cannot be called on them, or
        it is not built yet and there are several workers.
    """
    if inputs_of(model):
        return model
    if not isinstance(model, keras.Sequential) and type(model).call is keras.Model.call:
        raise UserError(
            f"model {model.name} has no call(), which an export needs; write one in "
            f"{type(model).__name__}, or export a model within it"
        )
    specs = _specs(model, loader, images)
    if specs is None:
        raise UserError(
            f"model {model.name} has no known inputs yet; train it first, use images=, a batch of "
            "its inputs, or start it with keras.Input(shape=...)"
        )
    for each in tf.nest.flatten(specs):
        if not isinstance(each, tf.TensorSpec) or each.shape.rank in (None, 0):
            raise UserError(
                f"model {model.name} was trained on {each}, which a signature cannot take; use "
                "images=, a batch of its inputs as plain arrays"
            )
    strategy = model.distribute_strategy
    if not model.built and len(strategy.extended.worker_devices) < strategy.num_replicas_in_sync:
        raise UserError(  # one worker alone would wait for the others to share the first weights
            f"model {model.name} is not built yet; with several workers call it once on a batch, "
            "in `with run.scope():`, in each worker"
        )
    try:
        with strategy.scope():
            inputs = _inputs(specs)
            return keras.Model(inputs, called(model, inputs), name=model.name)
    except Exception as error:  # the model's call may raise anything
        shapes = ", ".join(str((None, *each.shape[1:])) for each in tf.nest.flatten(specs))
        raise UserError(
            f"model {model.name} cannot be called on inputs of shapes {shapes}, as the export does "
            f"({cleaned(str(error)).strip() or type(error).__name__}); fix its call, or use "
            "images=, a batch of its inputs"
        ) from error


def called(model: keras.Model, inputs):
    """Returns a model's output outside training. Its `call` need not have a `training` argument."""
    knows = "training" in inspect.signature(model.call).parameters
    return model(inputs, **({"training": False} if knows else {}))


def _specs(model, loader: Loader | None, images):
    """Returns the specs of the model's inputs, in the model's structure; None if not known."""
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
    """Returns an Input for each spec, in their structure. A dict's inputs are named by its keys."""

    def named(path: tuple, spec: tf.TensorSpec) -> keras.KerasTensor:
        # Every float becomes float32, as in Keras: the layers cast it.
        dtype = "float32" if spec.dtype.is_floating else spec.dtype.name
        name = "_".join(map(str, ("inputs", *path) if not path or _are_numbers(path) else path))
        return keras.Input(tuple(spec.shape[1:]), dtype=dtype, name=name)

    with_path = keras.tree.flatten_with_path(specs)
    return keras.tree.pack_sequence_as(specs, [named(*each) for each in with_path])


def _are_numbers(path: tuple) -> bool:
    return all(isinstance(each, int) for each in path)
