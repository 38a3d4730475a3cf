"""What an exported model answers: a name for each thing, from what the model gives.

Takes the model and what it was evaluated on; gives a function of the model's outputs, which goes
into the SavedModel.

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


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model's one output is, and what is answered from it.

    Attributes:
      kind: "logits" or "probabilities" of classes (of masks, for each pixel), or "image", whose
        pixels are normalised as the inputs are.
      exclusive: whether one class alone is right, or each is likely by itself.
      mean: of pixels in 0..1, for an image.
      std: likewise.
      class_names: of the classes, in order, one for each; empty where they have no names.
    """

    kind: str
    exclusive: bool = True
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()

    def __call__(self, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the answers by name, float32.

        "logits", of a model that gives them, and "probabilities", [rows, ..., classes]; or "image",
        [rows, height, width, channels], in 0 to 255.
        """
        outputs = tf.cast(outputs, tf.float32)
        if self.kind == "image":
            return {"image": 255 * tf.clip_by_value(outputs * self.std + self.mean, 0.0, 1.0)}
        logits = {"logits": outputs} if self.kind == "logits" else {}
        return logits | {"probabilities": self._probabilities(outputs)}

    def named(self, answers: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns the answers and, where classes have names, the likeliest one's: [rows] string."""
        if not self.class_names or answers["probabilities"].shape.rank != 2:
            return answers
        # A folder's name may be no UTF-8.
        names = tf.constant([os.fsencode(each) for each in self.class_names])
        return answers | {"class_name": tf.gather(names, tf.argmax(answers["probabilities"], -1))}

    def _probabilities(self, outputs):
        alone = outputs.shape[-1] == 1
        activation = tf.nn.softmax if self.exclusive and not alone else tf.sigmoid
        chances = activation(outputs) if self.kind == "logits" else outputs
        if not alone:
            return chances
        return tf.concat([1 - chances, chances], axis=-1)  # how likely the second of two is


def answers_of(model: keras.Model, data: ImageData, *, losses: Sequence) -> Answers:
    """Returns what the model answers, by the loss that it was compiled with.

    Args:
      model: of one output.
      data: what it is evaluated on.
      losses: that it was compiled with.

    Raises:
      UserError: it has several outputs, or was compiled with no loss, or one that is no
        cross-entropy of Keras's: of another, what it is given may be anything.
    """
    if len(model.outputs) != 1:
        raise UserError(
            f"model {model.name} has {len(model.outputs)} outputs; an export that takes image "
            "files knows one: leave out loader=, for the model's own inputs and outputs"
        )
    images = data.images
    if data.source.targets is not None and images.targets != "mask":
        return Answers("image", mean=images.mean, std=images.std)
    loss = keras.losses.get(losses[0]) if losses else None
    name = getattr(loss, "__name__", type(loss).__name__)
    is_keras = getattr(loss, "__module__", "").startswith("keras.")
    if not is_keras or "crossentropy" not in name.lower():
        what = f"the loss {name}" if is_keras else "a loss of your own" if losses else "no loss"
        raise UserError(
            f"model {model.name} was compiled with {what}; a cross-entropy of keras.losses would "
            "tell whether it gives logits or probabilities of classes: compile it by "
            "run.compile(model, ..., loss=...), or leave out loader="
        )
    num_classes = max(2, model.output_shape[-1])
    return Answers(
        "logits" if getattr(loss, "from_logits", False) else "probabilities",
        exclusive="binary" not in name.lower(),
        class_names=completed(data.class_names, num_classes) if data.class_names else (),
    )
