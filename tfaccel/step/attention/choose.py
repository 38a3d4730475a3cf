"""Decides which kernels compute an attention of a traced step, and says why where none do."""

import logging
import numbers
import re
from collections.abc import Callable

import keras
import tensorflow as tf

from tfaccel.common.run_log import summary
from tfaccel.keras_internals.attention import Dropout, NoDropout, has_gradient
from tfaccel.step import triton_calls
from tfaccel.step.attention import dropout, flash
from tfaccel.step.attention.key_bias import without_bias
from tfaccel.step.capability import capability_for_kernels

log = logging.getLogger("tfaccel")

# The largest head of cuDNN 9 on Hopper GPUs, and on older ones, on which it was not tried here.
LARGEST_HEAD, LARGEST_HEAD_BEFORE_HOPPER = 256, 128
MULTIPLE_OF_HEAD = 8
OF_CUDNN = re.compile(r"cuda_dnn\.cc|fmha|cudnn", re.IGNORECASE)  # in XLA's errors


class Attentions:
    """Computes the attentions of a model's steps: by kernels where they can, else as Keras does.

    cuDNN's kernels compute those without dropout, and tfaccel's own those with dropout.

    Attributes:
      dropout: what the layer that asks for an attention drops out of its scores; or None.
    """

    def __init__(self, *, largest_head: int = LARGEST_HEAD):
        """Takes the largest size of a head that cuDNN takes on these GPUs."""
        self._largest_head, self._said = largest_head, set()
        self._is_used, self._off = False, None  # why it was turned off
        self._drops, self._drops_off = False, None  # the same of attentions with dropout
        self.dropout: Dropout | None = None

    def turned_off_by(self, error: str) -> bool:
        """Returns whether an error is of an attention's kernel, whose kind is then not used again.

        XLA asks cuDNN and compiles tfaccel's kernels before any of a step runs.
        """
        if self._drops and self._drops_off is None and triton_calls.OF_TRITON.search(error):
            self._drops_off = f"XLA refused a kernel: {error.strip().splitlines()[0]}"
            self._say_dropout(self._drops_off)
            return True
        if not self._is_used or self._off is not None or not OF_CUDNN.search(error):
            return False
        self._off = f"cuDNN refused one: {error.strip().splitlines()[0]}"
        self._say(self._off)
        return True

    def __call__(
        self,
        direct: Callable,
        query,
        key,
        value,
        bias=None,
        mask=None,
        scale=None,
        is_causal=False,
        flash_attention=None,
        attn_logits_soft_cap=None,
    ) -> tf.Tensor:
        """Returns the attention of `keras.ops.dot_product_attention`, whose arguments these are.

        Args:
          direct: Keras's own function.
        """
        query, key, value = map(tf.convert_to_tensor, (query, key, value))
        bias, mask = (None if each is None else tf.convert_to_tensor(each) for each in (bias, mask))
        settings = {"bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal}
        if flash_attention is False or (
            flash_attention is None and keras.config.is_flash_attention_enabled() is False
        ):
            if self.dropout is not None:
                raise NoDropout
            return direct(query, key, value, **settings)
        if self.dropout is not None:
            return self._with_dropout(
                self.dropout, query, key, value, **settings, soft_cap=attn_logits_soft_cap
            )
        reason = self._why_not(query, key, value, **settings, soft_cap=attn_logits_soft_cap)
        if reason is not None:
            self._say(reason)
            return direct(query, key, value, **settings, attn_logits_soft_cap=attn_logits_soft_cap)
        self._is_used = True
        self._say_once(log.info, "step: cuDNN's flash kernels compute its attentions")
        return flash.flash_attention(
            query,
            without_bias(key),
            value,
            plain=direct,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            is_causal=is_causal,
            mask=None if mask is None else tf.cast(mask, tf.bool),
            bias=None if bias is None else tf.cast(bias, query.dtype),
        )

    def without_scores(self) -> None:
        """Says once why a layer that returns its scores has no flash attention."""
        self._say("its layer returns the scores, which a flash kernel never has")

    def _with_dropout(self, drop: Dropout, query, key, value, *, soft_cap, **settings) -> tf.Tensor:
        """Returns the attention with dropout; raises `NoDropout` where the kernels refuse it."""
        mask = settings["mask"]
        reason = self._drops_off or self._why_no_kernel(query, key, value, **settings)
        if reason is None and (soft_cap or settings["bias"] is not None):
            reason = "it has a bias or a soft cap"
        mask = None if mask is None else tf.cast(mask, tf.bool)
        reason = reason or dropout.why_not(query, key, mask)
        if reason is not None:
            self._say_dropout(reason)
            raise NoDropout
        self._drops = drop.is_taken = True
        self._say_once(
            log.info, "step: tfaccel's flash kernels compute its attentions with dropout"
        )
        scale = settings["scale"]
        return dropout.dropout_attention(
            query,
            without_bias(key),
            value,
            rate=drop.rate,
            seed=drop.draw(),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            is_causal=settings["is_causal"],
            mask=mask,
        )

    def _say_dropout(self, reason: str) -> None:
        text = (
            f"step: an attention with dropout is computed without flash kernels, because {reason}"
        )
        self._say_once(summary, text)

    def _say(self, reason: str) -> None:
        text = f"step: an attention is computed without cuDNN's flash kernels, because {reason}"
        self._say_once(summary, text)

    def _say_once(self, say: Callable, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say("%s", text)

    def _why_not(self, query, key, value, *, bias, mask, scale, is_causal, soft_cap) -> str | None:
        """Returns why cuDNN does not compute this attention; None if it does."""
        reason = self._off or self._why_no_kernel(
            query, key, value, bias=bias, mask=mask, scale=scale, is_causal=is_causal
        )
        if reason is not None:
            return reason
        heads, size = query.shape[2:]
        if size > self._largest_head or size % MULTIPLE_OF_HEAD:
            return (
                f"its heads have {size} values, which is no multiple of {MULTIPLE_OF_HEAD} up to "
                f"{self._largest_head}"
            )
        if bias is not None and has_gradient(bias):
            # That of the bias and the mask together, which cuDNN gets.
            shape = (
                bias.shape if mask is None else tf.broadcast_static_shape(bias.shape, mask.shape)
            )
            if tuple(shape[:2]) != (1, heads):
                return (
                    f"its bias and mask have the shape {tuple(shape)}, and cuDNN gives the "
                    f"gradient of a bias (1, {heads}, rows, rows of the key) only"
                )
        return "it has a soft cap" if soft_cap else None

    def _why_no_kernel(self, query, key, value, *, bias, mask, scale, is_causal) -> str | None:
        """Returns why neither cuDNN nor tfaccel's kernels compute this attention."""
        dtypes = {each.dtype for each in (query, key, value)}
        if len(dtypes) > 1 or query.dtype not in flash.OUT_OF_MASK:
            names = ", ".join(sorted(each.name for each in dtypes))
            return f"its dtype is {names}, not float16 or bfloat16"
        shapes = [each.shape for each in (query, key, value)]
        if any(each.rank != 4 for each in shapes):
            return f"its query, key and value have the shapes {shapes}, not four axes"
        if not all(each.is_fully_defined() for each in shapes):
            return "its shape is not known when the step is traced"
        for name, each in (("mask", mask), ("bias", bias)):
            if each is not None and not each.shape.is_fully_defined():
                return f"the shape of its {name} is not known when the step is traced"
            if each is not None and each.shape.rank != 4:
                return f"its {name} has the shape {tuple(each.shape)}, not four axes"
        if scale is not None and not isinstance(scale, numbers.Real):
            return "its scale is a tensor"
        heads, size = query.shape[2:]
        if value.shape[-1] != size:
            return f"its heads of {size} and of {value.shape[-1]} values differ"
        if heads % key.shape[2]:
            return f"its {heads} heads do not share {key.shape[2]} of the key evenly"
        if key.shape[1] == 1:
            return "its key has one row, of which the scores have no gradient"
        return None


def attentions_on(devices: list[str], *, wanted: bool) -> Attentions | None:
    """Returns what computes the attentions of a model's steps; None if Keras does.

    Args:
      devices: TensorFlow's names of the replicas' devices in this process.
      wanted: whether flash attention is wanted.
    """
    if not wanted:
        return None
    capability = capability_for_kernels(devices)
    if capability is None:
        return None
    is_hopper = capability >= (9, 0)
    return Attentions(largest_head=LARGEST_HEAD if is_hopper else LARGEST_HEAD_BEFORE_HOPPER)
