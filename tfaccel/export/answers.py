"""The answers of an exported model, by name, computed from the model's outputs.

`answers_of` chooses them from the model's loss and the data it was evaluated on. The result is a
function that becomes part of the SavedModel.

    answers = answers_of(model, loader.data, losses=losses_of(model))
    answers(model(inputs))         # {"logits": ..., "probabilities": ...}
"""

import dataclasses
import os
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfaccel.common.errors import UserError
from tfaccel.data.images import ImageData
from tfaccel.export.card import completed
from tfaccel.training.losses import OF_LOGITS

THRESHOLD = 0.5  # the least probability of a class that an image has, of several


@dataclasses.dataclass(frozen=True)
class Answers:
    """The kind of a model's only output, and how to compute the answers from it.

    Attributes:
      kind: "logits" or "probabilities" of classes (for a mask: of each pixel); "numbers"; or
        "image", with pixels normalized as the inputs are.
      exclusive: whether exactly one class is right; if not, each has its own probability.
      mean: for an image, the mean of pixels in 0..1.
      std: for an image, their standard deviation.
      scale: for an image, what 1 stands for: see `ImageConfig.pixel_scale`.
      class_names: the name of each class, in order; empty if the classes have no names.
      several: whether an image has any number of classes. A single output is then one class.
      target_names: for numbers, the name of each; for masks, those of their values, if known.
    """

    kind: str
    exclusive: bool = True
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: float = 255.0
    class_names: tuple[str, ...] = ()
    several: bool = False
    target_names: tuple[str, ...] = ()

    @property
    def task(self) -> str | None:
        """What is answered of an image: see `data.source.TASKS`; None for an image or a mask."""
        if self.kind == "numbers":
            return "regression"
        if self.kind == "image":
            return None
        return "multilabel" if self.several else "classes"

    def __call__(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the answers by name, float32.

        They are "probabilities", [rows, ..., classes], and "logits" if the model gives them; or
        "numbers", [rows, numbers]; or "image", [rows, height, width, channels], in 0 to
        255, or as the pixels of the inputs are stored.
        """
        outputs = tf.cast(outputs, tf.float32)
        if self.kind == "image":
            image = outputs * self.std + self.mean
            if self.scale == 1:  # floats, which may have any value
                return {"image": image}
            return {"image": self.scale * tf.clip_by_value(image, 0.0, 1.0)}
        if self.kind == "numbers":
            return {"numbers": outputs}
        logits = {"logits": outputs} if self.kind == "logits" else {}
        return logits | {"probabilities": self._probabilities(outputs)}

    def named(self, answers: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the answers and, if classes have names, the likeliest one's: [rows] string.

        If an image has any number of classes, it returns instead which of them are at least as
        likely as THRESHOLD, "is_present": [rows, classes] bool.
        """
        if self.several:
            return answers | {"is_present": answers["probabilities"] >= THRESHOLD}
        if self.kind == "numbers":
            return answers
        if not self.class_names or answers["probabilities"].shape.rank != 2:
            return answers
        # A folder's name may be invalid UTF-8.
        names = tf.constant([os.fsencode(each) for each in self.class_names])
        return answers | {"class_name": tf.gather(names, tf.argmax(answers["probabilities"], -1))}

    def _probabilities(self, outputs):
        alone = outputs.shape[-1] == 1 and not self.several
        activation = tf.nn.softmax if self.exclusive and not alone else tf.sigmoid
        chances = activation(outputs) if self.kind == "logits" else outputs
        if not alone:
            return chances
        return tf.concat([1 - chances, chances], axis=-1)  # the output is the second class's


def answers_of(model: keras.Model, data: ImageData, *, losses: Sequence) -> Answers:
    """Returns the model's answers according to the losses that it was compiled with.

    Raises:
      UserError: the model has several outputs; or its loss is missing or is not a cross-entropy of
        Keras, so that the meaning of its outputs is unknown.
    """
    if len(model.outputs) != 1:
        raise UserError(
            f"model {model.name} has {len(model.outputs)} outputs, but an export that takes image "
            "files supports one; remove loader= to export the model's own inputs and outputs"
        )
    images = data.images
    if data.source.targets is not None and images.targets != "mask":
        return Answers("image", mean=images.mean, std=images.std, scale=images.pixel_scale)
    if data.source.task == "regression":
        return Answers("numbers", target_names=data.source.target_names)
    loss = keras.losses.get(losses[0]) if losses else None
    name = getattr(loss, "__name__", type(loss).__name__)
    is_keras = getattr(loss, "__module__", "").startswith("keras.")
    is_ours = isinstance(loss, OF_LOGITS)
    if not (is_ours or (is_keras and "crossentropy" in name.lower())):
        what = f"the loss {name}" if is_keras else "a loss of your own" if losses else "no loss"
        raise UserError(
            f"model {model.name} was compiled with {what}, but the export needs a cross-entropy of "
            "keras.losses to know whether the outputs are logits or probabilities of classes; "
            "compile it with run.compile(model, ..., loss=...), or remove loader="
        )
    exclusive = "binary" not in name.lower()
    several = data.source.task == "multilabel" and not exclusive
    num_classes = max(1 if several else 2, model.output_shape[-1])
    return Answers(
        "logits" if is_ours or _takes_logits(loss) else "probabilities",
        exclusive=exclusive,
        several=several,
        class_names=completed(data.class_names, num_classes) if data.class_names else (),
        target_names=completed(names, num_classes) if (names := data.source.target_names) else (),
    )


def _takes_logits(loss) -> bool:
    """Returns whether a cross-entropy of keras.losses was made with from_logits=True."""
    if isinstance(loss, keras.losses.Loss):  # SparseCategoricalCrossentropy of 3.16 lacks the name
        return bool(loss.get_config().get("from_logits", False))
    return False
