"""Lets another function compute the attentions of Keras's and KerasHub's layers."""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator

import keras
from tensorflow.python.eager import record

from tfaccel.keras_internals.moved import nn
from tfaccel.keras_internals.patching import patched

LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# KerasHub's layers ask this function of its, which most of them import by name, whether to call
# keras.ops.dot_product_attention.
ASKED = "fused_attention_op_available"


@contextlib.contextmanager
def attention_by(compute: Callable) -> Iterator[None]:
    """Within the context, a function computes what `keras.ops.dot_product_attention` is asked for.

    Layers with dropout ask for it, too. While they train, the function's attribute `dropout` is
    what to drop out, a `Dropout`; else it is None. The function raises `NoDropout` where it cannot
    drop scores out. Then the layer computes its attention itself.

    Args:
      compute: a function of (direct, *args, **kwargs), where `direct(*args, **kwargs)` is Keras's
        own function. Its method `without_scores` is called where a layer computes its attention
        itself, because it returns its scores.
    """
    with contextlib.ExitStack() as patches:
        own = functools.partial(compute, nn.dot_product_attention)
        patches.enter_context(patched(nn, "dot_product_attention", own))
        for layer in LAYERS:
            replacement = _asking(layer._compute_attention, compute)
            patches.enter_context(patched(layer, "_compute_attention", replacement))
        for module in list(sys.modules.values()):
            is_hubs = getattr(module, "__name__", "").startswith("keras_hub.")
            if is_hubs and ASKED in vars(module):
                patches.enter_context(patched(module, ASKED, lambda: True))
        yield


@dataclasses.dataclass
class Dropout:
    """What a layer that trains drops out of the scores of its attention.

    Attributes:
      rate: the share of the scores that is dropped, between 0 and 1.
      draw: returns a seed, [2] integers, and moves on the layer's state, as Keras's dropout does.
      is_taken: whether the function that computes the attention has dropped scores out.
    """

    rate: float
    draw: Callable
    is_taken: bool = False


class NoDropout(Exception):  # noqa: N818
    """The function that computes the attention cannot drop scores out of this one."""


def _asking(compute_attention: Callable, compute: Callable) -> Callable:
    """Returns a layer's method, for which the layer asks for an attention without dropout.

    While the layer trains, `compute.dropout` is its dropout, which `compute` applies.
    """

    signature = inspect.signature(compute_attention)

    @functools.wraps(compute_attention)
    def method(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        name = "_dropout" if hasattr(self, "_dropout") else "dropout"
        rate, training = getattr(self, name), given.get("training")
        has_scores = given.get("return_attention_scores") or getattr(
            self, "_return_attention_scores", False
        )
        if has_scores:
            compute.without_scores()
        dropout = None
        if rate and training:
            if has_scores or rate >= 1:
                return compute_attention(self, *args, **kwargs)
            dropout = Dropout(rate, self._dropout_layer.seed_generator.next)
        elif not rate:
            return compute_attention(self, *args, **kwargs)
        with (
            patched(self, name, 0.0),
            patched(compute, "dropout", dropout),
            contextlib.suppress(NoDropout),
        ):
            found = compute_attention(self, *args, **kwargs)
            if dropout is None or dropout.is_taken:
                return found
        return compute_attention(self, *args, **kwargs)

    return method


def has_gradient(tensor) -> bool:
    """Returns whether a gradient tape wants the gradient of a tensor that is computed now."""
    return record.should_record_backprop([tensor])


def obey_flash_attention() -> None:
    """Makes Keras's argument `flash_attention` mean on TensorFlow what it means elsewhere.

    From then on True raises no error outside of steps that XLA compiles: the attention is computed
    as without it, which has the same result. A layer keeps False, of which Keras makes None.
    """
    if not hasattr(nn.dot_product_attention, "obeys"):
        nn.dot_product_attention = _obeying(nn.dot_product_attention)
        for layer in LAYERS:
            layer.__init__ = _keeping_false(layer.__init__)


def _obeying(dot_product_attention: Callable) -> Callable:
    @functools.wraps(dot_product_attention)
    def obeying(*args, flash_attention=None, **kwargs):
        return dot_product_attention(*args, **kwargs)

    obeying.obeys = True
    return obeying


def _keeping_false(init: Callable) -> Callable:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def keeping(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if signature.bind(self, *args, **kwargs).arguments.get("flash_attention") is False:
            self._flash_attention = False

    keeping.__signature__ = signature  # which Keras asks, and not `__wrapped__`
    return keeping
