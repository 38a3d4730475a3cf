"""Where and how one replica's stream runs."""

import dataclasses

import tensorflow as tf

from tfaccel.runtime.devices import Device


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and how one replica's stream runs.

    Attributes:
      device: of the replica: batches are given there.
      num_threads: CPU threads of the stream.
      seed: for random operators that a user's own pipeline has; ours draw nothing.
    """

    device: Device
    num_threads: int
    seed: int


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data set without TensorFlow's tuner, to which streams leave nothing.

    With it, an iterator's end may wait for the tuner's next turn, up to a minute off: TensorFlow
    2.21 wakes the tuner's thread before it says that the iterator is cancelled. Of 40 iterators
    that were 12 s old one waited 8 s (2026-11-21).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
