"""Rules about layers, for any data. Each rule takes Facts and yields findings.

findings = [*linear_chains(facts), *saturating(facts), *narrow_outputs(facts), ...]
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted
from tfaccel.diagnostics.lint.facts import OUTSIDE, Facts, Layer, Model
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.products import share
from tfaccel.diagnostics.lint.words import layer_names, percent, shape_text

LINEAR = ("Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D")
LINEAR += tuple(f"{each}Transpose" for each in LINEAR if each.startswith("Conv"))
# Layers that keep a chain linear.
PASSES = ("Flatten", "Reshape", "Permute", "Identity", "Activation")
PASSES_BY_START = ("Dropout", "SpatialDropout", "ZeroPadding", "Cropping")
SATURATING = ("tanh", "sigmoid", "hard_sigmoid", "hard_tanh", "softsign")
# Activations that compute more than ReLU, by Keras's names. The last two make outputs positive.
MATH_HEAVY = ("gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "exponential")
FOR_OUTPUTS = ("softplus", "exponential", *SATURATING)
HAVE_ACTIVATION = (*LINEAR, "DepthwiseConv2D", "SeparableConv2D", "Activation")
# The largest slope; it is 1 for x / (1 + |x|) and for tanh.
LARGEST_SLOPE = {"sigmoid": "1/4", "hard_sigmoid": "1/6"}


def linear_chains(facts: Facts) -> Iterator[Finding]:
    """Yields layers with weights that follow each other without an activation between them."""
    for chain in _chains(facts.model):
        dense = all(each.kind == "Dense" for each in chain)
        low_rank = len(chain) == 2 and _is_bottleneck(*chain)
        severity = "note" if low_rank else "error" if dense or len(chain) > 2 else "warning"
        yield Finding(
            severity,
            layer_names(chain),
            f"{len(chain)} {'dense ' if dense else ''}layers with no activation between them",
            f"together they compute what one {'Dense' if dense else 'linear'} layer from "
            f"{shape_text(chain[0].inputs)} to {shape_text(chain[-1].outputs)} computes, so the "
            "depth adds nothing" + ("; a deliberate low-rank product is fine" if low_rank else ""),
            "accuracy, because the depth becomes useful" + _saved_by_one(facts.model, chain),
            f"set activation='relu' in {layer_names(chain[:-1], most=8)}",
        )


def _saved_by_one(model: Model, chain: list[Layer]) -> str:
    """Returns, in words, what one Dense layer in place of the chain would save; "" if nothing."""
    if any(each.kind != "Dense" for each in chain):
        return ""
    one = chain[-1].positions * (chain[0].features_in or 0) * (chain[-1].features_out or 0)
    several = sum(each.multiplies for each in chain)
    saved = share(model, chain) * (1 - one / several) if several else 0
    if saved <= 0:
        return ""
    return f"; one layer in their place would save {percent(saved)} of the multiplications"


def _chains(model: Model) -> list[list[Layer]]:
    """Returns the longest chains of linear layers; each has two layers or more."""
    follows = {
        index: next_
        for index, each in enumerate(model.layers)
        if each.kind in LINEAR
        and each.activation in (None, "linear")
        and (next_ := _next_linear(model, index)) is not None
    }
    starts = [each for each in follows if each not in follows.values()]
    chains = []
    for index in starts:
        chain = [index]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        chains.append([model.layers[each] for each in chain])
    return chains


def _next_linear(model: Model, index: int) -> int | None:
    """Returns the index of the next linear layer, if it alone takes this layer's output."""
    feeds = model.layers[index].feeds
    while len(feeds) == 1 and feeds[0] != OUTSIDE and not model.layers[index].is_output:
        index = feeds[0]
        layer = model.layers[index]
        if layer.kind in LINEAR:
            return index
        if not _passes(layer):
            return None
        feeds = layer.feeds
    return None


def _passes(layer: Layer) -> bool:
    passes = layer.kind in PASSES or layer.kind.startswith(PASSES_BY_START)
    return passes and layer.activation in (None, "linear")


def _is_bottleneck(first: Layer, second: Layer) -> bool:
    sides = (first.features_in, first.features_out, second.features_out)
    return None not in sides and sides[1] < min(sides[0], sides[2])


def saturating(facts: Facts) -> Iterator[Finding]:
    """Yields tanh and sigmoid between layers with weights, but not in gates and outputs."""
    found: dict[str, list[Layer]] = {}
    for index, layer in enumerate(facts.model.layers):
        if layer.activation in SATURATING and _has_place(facts.model, index):
            found.setdefault(layer.activation, []).append(layer)
    for name, layers in found.items():
        yield Finding(
            "note",
            layer_names(layers),
            f"{name} between layers with weights",
            f"its slope is at most {LARGEST_SLOPE.get(name, '1')}, and near 0 for large inputs, so "
            "gradients shrink in each of these layers",
            "a deep network trains in fewer steps, or at all; a step gets little faster, which "
            "--fix or .fix() measures",
            "use activation='relu', unless you want bounded values",
        )


def math_heavy(facts: Facts) -> Iterator[str]:
    """Yields a remark on activations that compute more than ReLU. They may well be worth it."""
    layers = [each for each in costly(facts.model) if each.activation in MATH_HEAVY]
    if layers:
        names = sorted({each.activation for each in layers})
        yield (
            f"{' and '.join(names)} in {layer_names(layers)}: more arithmetic than relu; --fix or "
            ".fix() measures the cost"
        )


def costly(model: Model) -> list[Layer]:
    """Returns the layers with activations that ReLU could replace, to measure their cost."""
    return [
        layer
        for index, layer in enumerate(model.layers)
        if layer.activation in (*MATH_HEAVY, *SATURATING) and _has_place(model, index)
    ]


def _has_place(model: Model, index: int) -> bool:
    """Returns whether the activation is between layers. Outputs and gates need their activation."""
    layer = model.layers[index]
    if layer.kind not in HAVE_ACTIVATION or layer.is_output:
        return False
    return layer.activation not in FOR_OUTPUTS or _leads_to_weights(model, index)


def _leads_to_weights(model: Model, index: int) -> bool:
    feeds = model.layers[index].feeds
    while len(feeds) == 1 and feeds[0] != OUTSIDE:
        layer = model.layers[feeds[0]]
        if layer.kind in LINEAR:
            return True
        on_the_way = ("Pooling", "Norm", "Concatenate")
        if not _passes(layer) and not any(each in layer.kind for each in on_the_way):
            return False
        feeds = layer.feeds
    return False


def narrow_outputs(facts: Facts) -> Iterator[Finding]:
    """Yields outputs in 16 bits, which make the loss inexact."""
    for output in facts.model.outputs:
        head = None if output.layer is None else facts.model.layers[output.layer]
        softmax = head is not None and head.activation == "softmax"
        # A cast to float32 after the softmax cannot restore the small probabilities.
        dtype = head.dtype if softmax and head.dtype == "float16" else output.dtype
        if dtype not in ("float16", "bfloat16"):
            continue
        limits = (
            "values above 65,504 become infinite, and 11 bits hold 3 digits"
            if dtype == "float16"
            else "8 bits hold 2 digits"
        )
        small = "; probabilities below 6e-8 become 0, and their logarithm is infinite"
        yield Finding(
            "error" if softmax and dtype == "float16" else "warning",
            head.name if head else "output",
            f"{'softmax' if softmax else 'outputs (perhaps logits)'} in {dtype}",
            limits + (small if softmax and dtype == "float16" else ""),
            "a correct loss; no time (the layer has "
            f"{percent(share(facts.model, [head] if head else []))} of the multiplications)",
            "use dtype='float32' in the last layer; after a ReversibleEmbedding, let "
            "Activation('linear', dtype='float32') follow, so that its product stays in 16 bits",
        )


def float32_heads(facts: Facts) -> Iterator[Finding]:
    """Yields heads that a ReversibleEmbedding computes in float32 under a mixed policy.

    In a model, an embedding's weights stay float32, and without a `reverse_dtype` nothing casts
    them. Outside a model Keras casts them, so a layer that is called by itself tells nothing.
    """
    for layer in facts.model.layers:
        if layer.unset_reverse_dtype != "float32" or layer.dtype not in ("float16", "bfloat16"):
            continue
        yield Finding(
            "warning",
            layer.name,
            f"a head (reverse=True) in float32, though its policy computes in {layer.dtype}",
            f"reverse_dtype is None, and then Keras multiplies {layer.dtype} by the float32 "
            f"weights, which gives float32; its documentation says {layer.dtype}",
            "the product and its two gradients run in 16 bits, and the logits and their gradient "
            "take half the bytes",
            f"pass reverse_dtype='{layer.dtype}' to the layer, or set this attribute of a model "
            "of KerasHub, such as backbone.token_embedding.reverse_dtype, before you compile; let "
            "Activation('linear', dtype='float32') follow, if the logits are an output",
        )


def channels_first(facts: Facts) -> Iterator[Finding]:
    """Yields a finding on layers that work on NCHW."""
    layers = [each for each in facts.model.layers if each.channels_first]
    if layers:
        yield Finding(
            "warning",
            layer_names(layers),
            f"{counted(len(layers), 'layer')} with data_format='channels_first' (NCHW)",
            "Tensor Cores take NHWC, so TensorFlow, cuDNN or XLA transposes before and after each "
            "of these layers; on the CPU, TensorFlow has no such convolutions",
            "no transposes, which read and write each of these activations once more",
            "use data_format='channels_last', and images [batch, height, width, channels]",
        )


def outside_scope(facts: Facts) -> Iterator[Finding]:
    """Yields a finding on a model that was created outside the strategy's scope."""
    outside = facts.model.outside_scope
    if outside:
        replicas = facts.step.num_replicas
        yield Finding(
            "error" if replicas > 1 else "warning",
            outside[0].rpartition("/")[0] or outside[0],
            f"{counted(len(outside), 'variable')} made outside the strategy's scope",
            "run.compile refuses a model that was built outside the scope",
            "training runs at all",
            "build every layer in `with run.scope():` (or strategy.scope())",
        )
