"""Decides whether the batches of a `fit` are gathered for launches of several steps.

    gather = gathering(model, dataset.element_spec, allowance)    # None: they go one by one
    dataset = strategy.experimental_distribute_dataset(dataset, on_host(gather))
    batches = gather(lambda has_unread: iter(dataset))            # for `model.train_function`

What decides is in the model's execution (tfaccel/step/functions.py: `launches`, `why_one_by_one`)
and in the specs of a batch. It is logged once.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfaccel.data.gathered import Allowance, Gathered, Places, why_not
from tfaccel.keras_internals.replica import local_batches, local_replicas


def may_gather(model) -> bool:
    """Returns whether executions of the model have several steps that may be one launch.

    If they have several steps that may not, the log says why.
    """
    if not _has_several_steps(model):
        return False
    why = model.train_function.why_one_by_one()
    if why is not None:
        model.train_function.launches.say(why)
    return why is None


def go_one_by_one(model, why: str) -> None:
    """Logs why the batches of an execution go one by one, if it has several."""
    if _has_several_steps(model):
        model.train_function.launches.say(why)


def gathering(
    model, element_spec, allowance: Allowance | None
) -> Callable[[Callable], Gathered] | None:
    """Returns what gathers the batches of an iterator; None if they go one by one.

    Args:
      model: the model that is trained on them.
      element_spec: of a batch of all replicas.
      allowance: how far batches may be read ahead; None for a model that is not trained.
    """
    if allowance is None or not _has_several_steps(model):
        return None
    execution = model.train_function
    why = execution.why_one_by_one() or why_not(element_spec)
    execution.launches.say(why)
    if why is not None:
        return None
    strategy = model.distribute_strategy
    devices = tuple(each.device for each in local_replicas(strategy))
    places = Places(
        devices=devices,
        cut=lambda batch: local_batches(strategy, batch, len(devices)),
        join=functools.partial(_joined, strategy),
    )
    settings = {"launches": execution.launches, "allowance": allowance, "places": places}
    return functools.partial(Gathered, **settings)


def on_host(gather: Callable | None) -> tf.distribute.InputOptions | None:
    """Returns the options of a distributed data set: batches to gather stay on the host."""
    if gather is None:
        return None
    return tf.distribute.InputOptions(experimental_fetch_to_device=False)


def _has_several_steps(model) -> bool:
    execution = model.train_function
    is_ours = hasattr(type(execution), "why_one_by_one")  # else it is stock Keras's
    return is_ours and model.steps_per_execution > 1


def _joined(strategy: tf.distribute.Strategy, parts: list):
    """Returns the batch that has these parts on the replicas of this process."""
    if len(parts) == 1:
        return parts[0]

    def per_replica(*leaves):
        if leaves[0] is None:
            return None
        return strategy.experimental_distribute_values_from_function(
            lambda context: leaves[context.replica_id_in_sync_group]
        )

    return tf.nest.map_structure(per_replica, *parts)
