"""Steps with more than one pass, and gradients, rates or data that the step changes by hand.

Sharpness-aware minimization, MAML and FGSM differentiate twice in a step. Reinforcement learning
takes its targets from a second network.
"""

import functools

import keras
import tensorflow as tf
from programs.program import Program, gather, network, normal, numbers
from programs.self_supervised import image_encoder, of_mse, updated

from tfaccel import collectives


def mean_over_replicas():
    """Returns the function that averages tensors over replicas; call it like `gather`."""
    if tf.distribute.has_strategy():
        return functools.partial(collectives.all_reduce, op="mean")
    return list


class SAM(keras.Model):
    """Sharpness-aware: the gradient is that at the worst point near the weights."""

    def __init__(self, rho=0.2):
        super().__init__()
        self.network, self.rho, self.mean = network(), rho, list
        self.built = True

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            answers = self.network(x, training=True)
            loss = self.compute_loss(y=y, y_pred=answers)
        gradients = self.mean(tape.gradient(loss, weights))
        norm = tf.norm(tf.stack([tf.norm(each) for each in gradients]))
        away = [each * self.rho / (norm + 1e-12) for each in gradients]
        for weight, each in zip(weights, away, strict=True):
            weight.assign_add(each)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.network(x, training=True))
        gradients = tape.gradient(loss, weights)
        for weight, each in zip(weights, away, strict=True):
            weight.assign_sub(each)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return updated(self.metrics, loss, y, answers)


class SAMByHand(SAM):
    """The same, written for several replicas: the first gradient is the mean over replicas."""

    def __init__(self):
        super().__init__()
        self.mean = mean_over_replicas()


class MAML(keras.Model):
    """Each row is a task. Its loss is that behind one step of gradient descent on its support."""

    def __init__(self):
        super().__init__()
        self.network = network(2, 1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.loss_tracker]

    def task_loss(self, task):
        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.network(task["x"]) - task["y"]))
        gradients = tape.gradient(loss, weights)
        adapted = [each - 0.1 * slope for each, slope in zip(weights, gradients, strict=True)]
        answers, _ = self.network.stateless_call(adapted, [], task["query_x"])
        return tf.reduce_mean(tf.square(answers - task["query_y"]))

    def train_step(self, data):
        (tasks,) = data if isinstance(data, tuple) else (data,)
        with tf.GradientTape() as tape:
            losses = tf.map_fn(self.task_loss, tasks, fn_output_signature=tf.float32)
            loss = tf.reduce_mean(losses)
        weights = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def maml_data() -> dict:
    return {
        "x": normal(0, 24, 3, 2),
        "y": normal(1, 24, 3, 1),
        "query_x": normal(2, 24, 3, 2),
        "query_y": normal(3, 24, 3, 1),
    }


class DQN(keras.Model):
    """Q-learning. The target network is a copy of the online network, taken every 3 updates."""

    def __init__(self):
        super().__init__()
        self.online, self.target = network(), network()
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False
        self.updates = self.add_weight(shape=(), dtype="int32", trainable=False, name="updates")
        self.built = True

    def call(self, states):
        return self.online(states)

    def copy(self):
        for target, online in zip(self.target.weights, self.online.weights, strict=True):
            target.assign(online)

    def train_step(self, data):
        moves, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        future = tf.reduce_max(self.target(moves["next_state"]), axis=1)
        wanted = moves["reward"] + 0.9 * future * (1.0 - moves["done"])
        with tf.GradientTape() as tape:
            values = self.online(moves["state"], training=True)
            value = tf.reduce_sum(values * tf.one_hot(moves["action"], 2), axis=1)
            loss = keras.losses.Huber()(wanted, value)
        weights = self.online.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.updates.assign_add(1)
        tf.cond(tf.equal(self.updates % 3, 0), self.copy, lambda: None)
        return {"td_loss": loss}


def moves() -> dict:
    return {
        "state": normal(0, 24, 4),
        "action": numbers(1, 2, 24),
        "reward": normal(2, 24),
        "next_state": normal(3, 24, 4),
        "done": numbers(4, 2, 24).astype("float32"),
    }


class ActorCritic(keras.Model):
    """Deep deterministic policy gradient: the actor follows the critic that was just updated."""

    def __init__(self):
        super().__init__()
        self.actor, self.target_actor = network(4, 2), network(4, 2)
        self.critic, self.target_critic = network(6, 1), network(6, 1)
        self.target_actor.set_weights(self.actor.get_weights())
        self.target_critic.set_weights(self.critic.get_weights())
        self.built = True

    def compile(self, actor_optimizer, critic_optimizer):
        super().compile()
        self.actor_optimizer, self.critic_optimizer = actor_optimizer, critic_optimizer

    def follow(self, target, network, tau=0.2):
        for slow, fast in zip(target.weights, network.weights, strict=True):
            slow.assign(tau * fast + (1 - tau) * slow)

    def train_step(self, data):
        moves, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        state, later = moves["state"], moves["next_state"]
        with tf.GradientTape() as tape:
            future = self.target_critic(tf.concat([later, self.target_actor(later)], axis=1))
            wanted = moves["reward"] + 0.9 * future
            value = self.critic(tf.concat([state, moves["action"]], axis=1))
            critic_loss = tf.reduce_mean(tf.square(wanted - value))
        weights = self.critic.trainable_variables
        gradients = tape.gradient(critic_loss, weights)
        self.critic_optimizer.apply_gradients(zip(gradients, weights, strict=True))

        with tf.GradientTape() as tape:
            value = self.critic(tf.concat([state, self.actor(state)], axis=1))
            actor_loss = -tf.reduce_mean(value)
        weights = self.actor.trainable_variables
        gradients = tape.gradient(actor_loss, weights)
        self.actor_optimizer.apply_gradients(zip(gradients, weights, strict=True))

        self.follow(self.target_actor, self.actor)
        self.follow(self.target_critic, self.critic)
        return {"actor_loss": actor_loss, "critic_loss": critic_loss}


class FGSM(keras.Model):
    """Trains on images and on the same images, moved where the loss grows most."""

    def __init__(self):
        super().__init__()
        self.network = image_encoder(3)
        self.built = True

    def call(self, images):
        return self.network(images)

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = self.compute_loss(y=labels, y_pred=self(images, training=False))
        moved = images + 0.1 * tf.sign(tape.gradient(loss, images))
        with tf.GradientTape() as tape:
            answers = self(images, training=True)
            loss = 0.5 * self.compute_loss(y=labels, y_pred=answers)
            loss += 0.5 * self.compute_loss(y=labels, y_pred=self(moved, training=True))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return updated(self.metrics, loss, labels, answers)


class Mixup(keras.Model):
    """Each row is blended with another row of the batch, whose index is part of the data."""

    def __init__(self):
        super().__init__()
        self.gathered, self.network = gather(), image_encoder(3)
        self.built = True

    def call(self, x):
        return self.network(x["image"])

    def train_step(self, data):
        x, labels = data
        labels = tf.one_hot(labels, 3)
        share = x["share"]
        images = x["image"] * share[:, None, None, None]
        images += (
            tf.gather(self.gathered(x["image"]), x["partner"]) * (1 - share)[:, None, None, None]
        )
        labels = labels * share[:, None] + tf.gather(self.gathered(labels), x["partner"]) * (
            1 - share[:, None]
        )
        with tf.GradientTape() as tape:
            answers = self.network(images, training=True)
            loss = self.compute_loss(images, labels, answers)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return updated(self.metrics, loss, labels, answers)


def mixup_data() -> tuple:
    x = {
        "image": normal(0, 24, 4, 4, 1),
        "share": 1 / (1 + abs(normal(1, 24))),
        "partner": numbers(2, 6, 24),
    }
    return x, numbers(3, 3, 24)


class OneNetwork(keras.Model):
    """A model of one small network; each program below that needs no more has its own step."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.built = True

    def call(self, x):
        return self.network(x)


class ClippedByHand(OneNetwork):
    """Clips the gradients of the batch by their global norm before the optimizer gets them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            answers = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=answers)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return updated(self.metrics, loss, y, answers)


class RateByHand(OneNetwork):
    """Lowers the learning rate after every update."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            answers = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=answers)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.optimizer.learning_rate.assign(self.optimizer.learning_rate * 0.8)
        logs = updated(self.metrics, loss, y, answers)
        logs["lr"] = self.optimizer.learning_rate
        return logs


class AccumulatedByHand(keras.Model):
    """Adds up the gradients of three batches, then applies their sum."""

    def __init__(self, num_batches=3):
        super().__init__()
        self.network, self.num_batches = network(), num_batches
        self.count = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.sums = [
            tf.Variable(tf.zeros(each.shape), trainable=False) for each in self.network.weights
        ]
        self.built = True

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        self.count.assign_add(1)
        x, y = data
        with tf.GradientTape() as tape:
            answers = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=answers)
        gradients = tape.gradient(loss, self.trainable_variables)
        for each, gradient in zip(self.sums, gradients, strict=True):
            each.assign_add(gradient)
        tf.cond(tf.equal(self.count, self.num_batches), self.apply_sums, lambda: None)
        return updated(self.metrics, loss, y, answers)

    def apply_sums(self):
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
        self.count.assign(0)
        for each in self.sums:
            each.assign(tf.zeros_like(each))


class AccumulatedInKerasVariables(AccumulatedByHand):
    """The same, with weights of the model as accumulators."""

    def __init__(self, num_batches=3):
        super().__init__(num_batches)
        self.count = self.add_weight(shape=(), dtype="int32", trainable=False, name="count")
        self.sums = [
            self.add_weight(shape=each.shape, initializer="zeros", trainable=False)
            for each in self.network.weights
        ]


def supervised() -> tuple:
    return normal(0, 24, 4), normal(1, 24, 2)


def of_classes() -> dict:
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.5),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


PROGRAMS = [
    Program(
        "SAM",
        "keras.io vision/sharpness_aware_minimization; Foret et al. 2020, arXiv:2010.01412",
        SAM,
        supervised,
        of_mse,
    ),
    Program(
        "SAM with all_reduce",
        "the same, with the first gradient averaged over replicas by hand",
        SAMByHand,
        supervised,
        of_mse,
    ),
    Program(
        "MAML",
        "Finn et al. 2017, arXiv:1703.03400",
        MAML,
        maml_data,
        lambda: {"optimizer": keras.optimizers.SGD(0.1)},
    ),
    Program(
        "DQN",
        "keras.io rl/deep_q_network_breakout; Mnih et al. 2015",
        DQN,
        moves,
        lambda: {"optimizer": keras.optimizers.SGD(0.1)},
    ),
    Program(
        "actor-critic",
        "keras.io rl/ddpg_pendulum; Lillicrap et al. 2015, arXiv:1509.02971",
        ActorCritic,
        lambda: {
            "state": normal(0, 24, 4),
            "action": normal(1, 24, 2),
            "reward": normal(2, 24, 1),
            "next_state": normal(3, 24, 4),
        },
        lambda: {
            "actor_optimizer": keras.optimizers.SGD(0.1),
            "critic_optimizer": keras.optimizers.SGD(0.2),
        },
    ),
    Program(
        "FGSM training",
        "Goodfellow et al. 2014, arXiv:1412.6572",
        FGSM,
        lambda: (normal(0, 24, 4, 4, 1), numbers(1, 3, 24)),
        of_classes,
    ),
    Program(
        "mixup in the step",
        "keras.io vision/mixup; Zhang et al. 2017, arXiv:1710.09412",
        Mixup,
        mixup_data,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": keras.losses.CategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        },
    ),
    Program(
        "clipping by hand",
        "Pascanu et al. 2012, arXiv:1211.5063",
        ClippedByHand,
        supervised,
        of_mse,
    ),
    Program(
        "learning rate by hand",
        "keras.io guides/custom_train_step_in_tensorflow, with a learning rate that it assigns",
        RateByHand,
        supervised,
        of_mse,
    ),
    Program(
        "accumulation by hand",
        "gradient accumulation in train_step, as in answers to tensorflow issues",
        AccumulatedByHand,
        supervised,
        of_mse,
    ),
    Program(
        "accumulation in weights",
        "the same, with weights of the model as accumulators",
        AccumulatedInKerasVariables,
        supervised,
        of_mse,
    ),
]
