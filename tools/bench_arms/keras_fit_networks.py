"""A rival of tools/bench.py: Keras alone trains a network of networks.py, compiled by XLA.

It talks to the driver through protocol.py. It is what a user of Keras writes: a dtype policy,
`jit_compile=True`, and batches from tf.data, which keeps them decoded. Settings:

    network, tiny           a key of networks.NETWORKS; true for its tiny size
    precision               the dtype policy
    batch, size             rows of a step; height and width of images
    epoch_steps             steps of an epoch
    first_steps, steps_of_mark
                            see timed_fit.start_arm
"""

import tensorflow as tf

from bench_arms import keras_networks, networks, ours_networks, protocol
from bench_arms.networks import Network
from bench_arms.timed_fit import MEAN, STD, random_images, start_arm, start_keras_alone


def begin(settings: dict) -> protocol.Arm:
    """Compiles the network, and trains its first steps."""
    network = networks.of_settings(settings)
    start_keras_alone(settings["precision"])
    model = keras_networks.build(network)
    model.compile(ours_networks.optimizer(network), ours_networks.loss(network), jit_compile=True)
    steps = settings["epoch_steps"]
    return start_arm(model, batches(network, steps), settings, steps_per_epoch=steps)


def batches(network: Network, number: int) -> tf.data.Dataset:
    """Returns endless batches of images and their labels, or masks."""
    images = random_images(network.batch, network.size)
    if network.kind == "mask":
        labels = ours_networks.masks(network, network.batch)
    else:
        labels = ours_networks.labels(network, network.batch)
    each = tf.data.Dataset.from_tensors((images, labels)).repeat(number).cache().repeat()

    def normalised(images, labels):
        scaled = tf.cast(images, tf.float32) / 255
        return (scaled - MEAN) / STD, labels

    return each.map(normalised, num_parallel_calls=tf.data.AUTOTUNE).prefetch(4)


if __name__ == "__main__":
    protocol.serve(begin)
