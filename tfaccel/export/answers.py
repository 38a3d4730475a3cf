"""What an exported model answers: a name for each thing, from what the model gives.

Takes the model and what it was evaluated on; gives a function of the model's outputs, which goes
into the SavedModel.

    answers = answers_of(model, loader.data)
    answers(model(inputs))         # {"logits": ..., "probabilities": ...}
"""

import dataclasses

import keras
import tensorflow as tf

from tfaccel import seam
from tfaccel.data.images import ImageData
from tfaccel.errors import UserError

KINDS = ("logits", "probabilities", "image")


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model's one output is, and what is answered from it.

    Attributes:
      kind: "logits" or "probabilities" of classes (of masks, for each pixel), or "image", whose
        pixels are normalised as the inputs are.
      mean: of pixels in 0..1, for an image.
      std: likewise.
      class_names: of the classes, in order, one for each; empty where they have no names.
    """

    kind: str
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
        if not self.class_names:
            return answers
        best = tf.argmax(answers["probabilities"], axis=-1)
        return answers | {"class_name": tf.gather(tf.constant(self.class_names), best)}

    def _probabilities(self, outputs):
        if outputs.shape[-1] > 1:
            return tf.nn.softmax(outputs) if self.kind == "logits" else outputs
        # One output, of two classes: how likely the second is.
        second = tf.sigmoid(outputs) if self.kind == "logits" else outputs
        return tf.concat([1 - second, second], axis=-1)


def answers_of(model: keras.Model, data: ImageData) -> Answers:
    """Returns what the model answers, by the loss that it was compiled with.

    Args:
      model: of one output, compiled.
      data: what it is evaluated on.

    Raises:
      UserError: it has several outputs, or was compiled with no loss.
    """
    if len(model.outputs) != 1:
        raise UserError(
            f"model {model.name} has {len(model.outputs)} outputs; an export that takes image "
            "files knows one: leave out loader=, for the model's own inputs and outputs"
        )
    images = data.images
    if data.source.targets is not None and images.targets != "mask":
        return Answers("image", images.mean, images.std)
    losses = seam.losses_of(model)
    if not losses:
        raise UserError(
            f"model {model.name} was compiled with no loss, which would tell whether it gives "
            "logits or probabilities; compile it by run.compile(model, ..., loss=...)"
        )
    is_logits = getattr(keras.losses.get(losses[0]), "from_logits", False)
    names = _completed(data.class_names, max(2, model.output_shape[-1]))
    return Answers("logits" if is_logits else "probabilities", class_names=names)


def _completed(class_names: tuple[str, ...], num: int) -> tuple[str, ...]:
    """Returns names for as many classes as a model gives, which may be more than its data have."""
    if not class_names:
        return ()
    prefix = "" if all(each.isdigit() for each in class_names) else "class "
    return (*class_names, *(f"{prefix}{index}" for index in range(len(class_names), num)))
