"""The device, threads and seed of one replica's stream."""

import dataclasses

import tensorflow as tf

from tfaccel.runtime.devices import Device


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how one replica's stream runs.

    Attributes:
      device: the replica's device, on which the batches are given.
      num_threads: CPU threads of the stream.
      seed: seed for the random operators of a user's own pipeline; ours have none.
    """

    device: Device
    num_threads: int
    seed: int


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data set without TensorFlow's tuner, which has nothing to tune in our streams.

    With the tuner, the end of an iterator may wait for the tuner's next turn, up to a minute:
    TensorFlow 2.21 wakes the tuner's thread before it marks the iterator as cancelled. Of 40
    iterators that were 12 s old, one waited 8 s (2026-11-21).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
