"""Losses of classes: of images and of each pixel, with ignored pixels and weights of classes.

    loss = Crossentropy(gamma=2.0, ignore_class=255, class_weights=(0.5, 2.0))
    loss = Sum([Crossentropy(ignore_class=255), Dice(ignore_class=255)])

Outputs are logits. Labels are whole numbers: [rows], or [rows, height, width, 1] for masks. The
means are over all rows, so replicas compute what one device computes.
"""

from collections.abc import Sequence

import keras
from keras import ops

SMOOTH = 1.0  # pixels; the default of Keras's Dice


@keras.saving.register_keras_serializable("tfaccel")
class Crossentropy(keras.losses.Loss):
    """The weighted mean of cross entropy or, with gamma, focal cross entropy.

    The weight of a row or pixel is that of its class, times the row's sample weight. Ignored
    pixels have the weight 0. The sum is divided by the sum of the weights, as in PyTorch. So an
    image's weight counts once for each of its pixels.

    The focal loss of a probability p of the right class is -(1 - p)**gamma log(p) (Lin et al.,
    Focal Loss for Dense Object Detection, 2017, arXiv:1708.02002, eq. 4, with alpha = 1).
    """

    def __init__(
        self,
        *,
        gamma: float = 0.0,
        ignore_class: int | None = None,
        class_weights: Sequence[float] | None = None,
        of_probabilities: bool = False,
        name="crossentropy",
        **others,
    ):
        """Takes what each row or pixel counts.

        Args:
          gamma: the focal exponent; 0 for cross entropy.
          ignore_class: the label of pixels that do not count; None counts all.
          class_weights: the weight of each class; None weighs all alike.
          of_probabilities: whether labels are probabilities, [rows, classes], as after mixup.
          name: the loss's name.
          **others: arguments of `keras.losses.Loss`.
        """
        others.setdefault("reduction", "mean_with_sample_weight")
        super().__init__(name=name, **others)
        self.gamma, self.ignore_class = gamma, ignore_class
        self.class_weights = None if class_weights is None else tuple(map(float, class_weights))
        self.of_probabilities = of_probabilities

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Returns the loss of logits, a scalar."""
        if self.of_probabilities:
            weight = self._weights_of_probabilities(y_true)
        else:
            y_true, valid = labels_of(y_true, y_pred, self.ignore_class)
            weight = self._weights_of(y_true, valid)
            if weight is None and sample_weight is not None:
                # Keras would divide the sum over pixels by the sum of the weights of images.
                weight = ops.ones_like(y_true, dtype="float32")
        return super().__call__(y_true, y_pred, weights_of(weight, sample_weight))

    def call(self, y_true, y_pred):
        """Returns the loss of each row or pixel, not weighted."""
        if not self.of_probabilities:
            values = ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
            return values * (1 - ops.exp(-values)) ** self.gamma if self.gamma else values
        log = ops.log_softmax(y_pred)
        focus = (1 - ops.exp(log)) ** self.gamma if self.gamma else 1
        return -ops.sum(ops.cast(y_true, log.dtype) * focus * log, axis=-1)

    def _weights_of(self, labels, valid):
        if self.class_weights is None:
            return None if valid is None else ops.cast(valid, "float32")
        weight = ops.take(ops.convert_to_tensor(self.class_weights, "float32"), labels)
        return weight if valid is None else weight * ops.cast(valid, "float32")

    def _weights_of_probabilities(self, y_true):
        if self.class_weights is None:
            return None
        weights = ops.convert_to_tensor(self.class_weights, "float32")
        return ops.sum(ops.cast(y_true, "float32") * weights, axis=-1)

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        names = ("gamma", "ignore_class", "class_weights", "of_probabilities")
        return super().get_config() | {name: getattr(self, name) for name in names}


@keras.saving.register_keras_serializable("tfaccel")
class BinaryCrossentropy(keras.losses.Loss):
    """The mean over rows and classes of the binary cross entropy of each class by itself.

    Several classes may be present in an image, such as after mixup (Wightman et al., ResNet strikes
    back, 2021, arXiv:2110.00476, section 3.1).
    """

    def __init__(
        self,
        *,
        target_threshold: float | None = None,
        of_probabilities: bool = False,
        name="binary_crossentropy",
        **others,
    ):
        """Takes what a label means.

        Args:
          target_threshold: a class is present, with target 1, if its probability in the label is
            above this number, and else absent. None takes the probability itself as the target.
          of_probabilities: whether labels are probabilities, [rows, classes], as after mixup.
          name: the loss's name.
          **others: arguments of `keras.losses.Loss`.
        """
        super().__init__(name=name, **others)
        self.target_threshold, self.of_probabilities = target_threshold, of_probabilities

    def call(self, y_true, y_pred):
        """Returns the loss of each row, [rows]."""
        logits = ops.cast(y_pred, "float32")
        targets = ops.cast(y_true, "float32")
        if not self.of_probabilities:
            labels, _ = labels_of(y_true, y_pred, None)
            targets = ops.one_hot(labels, y_pred.shape[-1], dtype="float32")
        if self.target_threshold is not None:
            targets = ops.cast(targets > self.target_threshold, "float32")
        return ops.mean(ops.binary_crossentropy(targets, logits, from_logits=True), axis=-1)

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        names = ("target_threshold", "of_probabilities")
        return super().get_config() | {name: getattr(self, name) for name in names}


@keras.saving.register_keras_serializable("tfaccel")
class Dice(keras.losses.Loss):
    """1 minus the mean over classes of the soft Dice coefficient of each image's mask.

    The coefficient of a class is (2 sum(p t) + 1) / (sum(p) + sum(t) + 1) over an image's pixels,
    where p is the class's probability, and t is 1 for pixels of the class and else 0 (Milletari et
    al., V-Net, 2016, arXiv:1606.04797, with Keras's smoothing). Ignored pixels are left out of
    every sum. So a class that an image lacks counts 1 if no pixel is taken for it.
    """

    def __init__(self, *, ignore_class: int | None = None, name="dice", **others):
        """Takes the label of pixels that do not count; None counts all."""
        others.setdefault("reduction", "mean_with_sample_weight")
        super().__init__(name=name, **others)
        self.ignore_class = ignore_class

    def call(self, y_true, y_pred):
        """Returns the loss of each image, [rows]."""
        labels, valid = labels_of(y_true, y_pred, self.ignore_class)
        found = ops.softmax(ops.cast(y_pred, "float32"))
        wanted = ops.one_hot(labels, y_pred.shape[-1], dtype="float32")
        if valid is not None:
            inside = ops.cast(valid, "float32")[..., None]
            found, wanted = found * inside, wanted * inside
        pixels = tuple(range(1, len(y_pred.shape) - 1))
        both = ops.sum(found * wanted, axis=pixels)
        either = ops.sum(found, axis=pixels) + ops.sum(wanted, axis=pixels)
        return 1 - ops.mean((2 * both + SMOOTH) / (either + SMOOTH), axis=-1)

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return super().get_config() | {"ignore_class": self.ignore_class}


@keras.saving.register_keras_serializable("tfaccel")
class Sum(keras.losses.Loss):
    """The sum of several losses of the same outputs."""

    def __init__(self, losses: Sequence[keras.losses.Loss], *, name="sum", **others):
        """Takes the losses, or their serialized forms."""
        super().__init__(name=name, **others)
        self.losses = [keras.losses.get(each) for each in losses]

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Returns the sum, a scalar."""
        return sum(each(y_true, y_pred, sample_weight) for each in self.losses)

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        losses = [keras.saving.serialize_keras_object(each) for each in self.losses]
        return super().get_config() | {"losses": losses}


OF_LOGITS = (Crossentropy, BinaryCrossentropy, Dice, Sum)  # their outputs are logits of classes


def labels_of(y_true, y_pred, ignore_class: int | None) -> tuple:
    """Returns int32 labels without an axis of size 1, 0 where ignored; and where they count."""
    labels = ops.cast(y_true, "int32")
    if len(labels.shape) == len(y_pred.shape):
        labels = ops.squeeze(labels, axis=-1)
    if ignore_class is None:
        return labels, None
    valid = labels != ignore_class
    return ops.where(valid, labels, 0), valid


def weights_of(weight, sample_weight):
    """Returns the product of weights of each row or pixel and of each row, if there are any."""
    if weight is None or sample_weight is None:
        return sample_weight if weight is None else weight
    sample_weight = ops.cast(sample_weight, weight.dtype)
    missing = len(weight.shape) - len(sample_weight.shape)
    return weight * ops.reshape(sample_weight, (*ops.shape(sample_weight), *[1] * missing))
