#!/usr/bin/env bash
# TensorFlow: a tf.function may run two assignments of a variable in the wrong order, if a tf.identity_n lies between
# them. Keras puts one into every update, so a train_step that updates twice (WGAN) may compute wrong weights.
#
# Versions: tensorflow-cpu 2.21.0, keras 3.15.1, Python 3.11 to 3.13.
#
# Behaviour: tf.function adds control dependencies, so that reads and assignments of a variable run in program order.
# Grappler's dependency optimizer removes those that another path implies. It lets a path lead from any input of an
# IdentityN to any of its outputs. In the same pass it then removes the IdentityN and connects each consumer with the
# one input that it uses. The path is gone, and the control dependency too: nothing orders the assignments any more.
# There is no error. (TransitiveReduction and OptimizeNode in grappler/optimizers/dependency_optimizer.cc.)
#
# tf.custom_gradient makes an IdentityN of all its inputs and outputs. `apply_gradients` of Keras calls
# ReplicaContext.all_reduce, which is such a function of all gradients, even on one device without a strategy. The
# order is lost if a variable's gradient does not depend on the variable, as with the loss of a Wasserstein critic.
#
# The first program assigns 1 to a variable (slowly), and then adds 2. The second is a train_step of Keras: it updates
# two layers, limits the weights of the last layer (slowly), and updates again. Eager runs, jit_compile=True and
# tf.config.optimizer.set_experimental_options({"dependency_optimization": False}) give the right numbers. WGANs with
# a fast limit (the usual tf.clip_by_value) were wrong in a quarter to a half of the runs, with SGD, RMSprop and Adam,
# and in 20 of 20 with one thread between operations.
#
# Output seen:
#   dependency_optimization on: TensorFlow wrong in 20 of 20, Keras wrong in 20 of 20
#   dependency_optimization off: TensorFlow wrong in 0 of 20, Keras wrong in 0 of 20
#
# The script exits with 1 if this behaviour changes. With the pass on, runs are repeated up to
# 100 times until one is wrong.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/env"
"$work/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0

cat > "$work/order.py" <<'PY'
import sys

import keras
import numpy as np
import tensorflow as tf

AT_LEAST, AT_MOST = 20, 100  # runs: more than AT_LEAST only while none of them was wrong
WITH_PASS = sys.argv[1] == "on"
tf.config.optimizer.set_experimental_options({"dependency_optimization": WITH_PASS})
SQUARE = tf.constant(np.random.default_rng(0).normal(size=(700, 700)).astype(np.float32))
ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def by_tensorflow():
    """Assigns 1 and adds 2; returns whether the sum is not 3."""
    variable = tf.Variable(0.0)

    @tf.function
    def assign_and_add(square, two):
        one = tf.math.sign(tf.reduce_sum(tf.abs(square @ square)))
        variable.assign(one)
        twice, added = tf.identity_n([variable * 2.0, tf.abs(two)])
        variable.assign_add(added)
        return twice * 3.0

    assign_and_add(SQUARE, tf.constant(2.0))
    return float(variable.numpy()) != 3.0


class Critic(keras.Model):
    """Updates twice, and limits the weights of the last layer each time."""

    def __init__(self):
        super().__init__()
        dense = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, use_bias=False)]
        self.net = keras.Sequential([keras.Input((4,)), *dense])
        self.built = True

    def train_step(self, x):
        weights = self.net.trainable_variables
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.net(x))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            limit = 0.1 * tf.math.sign(tf.reduce_sum(tf.abs(SQUARE @ (SQUARE + weights[-1][0]))))
            weights[-1].assign(tf.clip_by_value(weights[-1], -limit, limit))
        return {"loss": loss}


def weights_of(*, eager):
    """Returns the weights after 3 epochs of one step each."""
    keras.utils.set_random_seed(0)
    model = Critic()
    model.compile(keras.optimizers.SGD(0.5), jit_compile=False, run_eagerly=eager)
    model.fit(ROWS, batch_size=8, epochs=3, verbose=0, shuffle=False)
    return np.concatenate([each.ravel() for each in model.net.get_weights()])


def wrong(is_wrong):
    """Returns how many runs were wrong, and how many there were."""
    found = []
    while len(found) < AT_LEAST or (WITH_PASS and not any(found) and len(found) < AT_MOST):
        found.append(is_wrong())
    return sum(found), len(found)


wanted = weights_of(eager=True)
of_tensorflow = wrong(by_tensorflow)
of_keras = wrong(lambda: np.abs(weights_of(eager=False) - wanted).max() > 1e-3)
print("TensorFlow wrong in {} of {}, Keras wrong in {} of {}".format(*of_tensorflow, *of_keras))
sys.exit(0 if WITH_PASS == (of_tensorflow[0] > 0) == (of_keras[0] > 0) else 1)
PY

export CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3
for pass in on off; do
  "$work/env/bin/python" "$work/order.py" "$pass" 2> "$work/log" | sed "s/^/dependency_optimization $pass: /" \
    || { tail -5 "$work/log"; exit 1; }
done
