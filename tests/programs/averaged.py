"""Programs that read or write variables behind the update: averaged copies, target networks."""

import keras
import tensorflow as tf
from programs.program import Program, network, normal


class MeanTeacher(keras.Model):
    """A student, and a teacher that is the student's average after each update."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network()
        self.teacher.set_weights(self.student.get_weights())
        self.teacher.trainable = False
        self.built = True

    def call(self, x):
        return self.student(x)

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            answers = self.student(x, training=True)
            loss = self.compute_loss(x, y, answers, weight)
            away = tf.reduce_mean(tf.square(answers - self.teacher(x)), axis=-1)
            loss += 0.1 * keras.ops.mean(away)
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for average, new in zip(self.teacher.weights, self.student.weights, strict=True):
            average.assign(0.9 * average + 0.1 * new)
        return self.compute_metrics(x, y, answers, weight)


PROGRAMS = [
    Program(
        "mean teacher",
        "Tarvainen and Valpola 2017, arXiv:1703.01780",
        MeanTeacher,
        lambda: (normal(0, 24, 4), normal(1, 24, 2)),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "mse",
            "metrics": ["mae"],
        },
    ),
]
