"""Rules: what the layers do, whatever the data. Each takes Facts and gives findings.

findings = [*linear_chains(facts), *saturating(facts), *narrow_outputs(facts), ...]
"""

from collections.abc import Iterator

from tfaccel.common.tables import counted
from tfaccel.diagnostics.lint.facts import OUTSIDE, Facts, Layer, Model
from tfaccel.diagnostics.lint.findings import Finding
from tfaccel.diagnostics.lint.products import share
from tfaccel.diagnostics.lint.words import named, percent, shown

LINEAR = ("Dense", "EinsumDense", "Conv1D", "Conv2D", "Conv3D")
LINEAR += tuple(f"{each}Transpose" for each in LINEAR if each.startswith("Conv"))
# What only hands values on, as far as being linear goes.
PASSES = ("Flatten", "Reshape", "Permute", "Identity", "Activation")
PASSES_BY_START = ("Dropout", "SpatialDropout", "ZeroPadding", "Cropping")
SATURATING = ("tanh", "sigmoid", "hard_sigmoid", "hard_tanh", "softsign")
# Of more arithmetic than a comparison; by Keras's own names. The last two make outputs positive.
MATH_HEAVY = ("gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "exponential")
FOR_OUTPUTS = ("softplus", "exponential", *SATURATING)
HAVE_ONE = (*LINEAR, "DepthwiseConv2D", "SeparableConv2D", "Activation")
# Slope at most: of x / (1 + |x|) and tanh 1, of the logistic function 1/4, of its broken line 1/6.
LARGEST_SLOPE = {"sigmoid": "1/4", "hard_sigmoid": "1/6"}


def linear_chains(facts: Facts) -> Iterator[Finding]:
    """Yields layers with weights that follow each other without an activation between them."""
    for chain in _chains(facts.model):
        dense = all(each.kind == "Dense" for each in chain)
        low_rank = len(chain) == 2 and _is_bottleneck(*chain)
        severity = "note" if low_rank else "error" if dense or len(chain) > 2 else "warning"
        yield Finding(
            severity,
            named(chain),
            f"{len(chain)} {'dense ' if dense else ''}layers with no activation between them",
            f"together they are one {'Dense' if dense else 'linear'} layer from "
            f"{shown(chain[0].inputs)} to {shown(chain[-1].outputs)}: depth adds nothing that can "
            f"be learned{'; as a deliberate low-rank product it is in order' if low_rank else ''}",
            "accuracy: the layers learn what they are there for" + _as_one(facts.model, chain),
            f"activation='relu' in {named(chain[:-1], most=8)}",
        )


def _as_one(model: Model, chain: list[Layer]) -> str:
    """Returns what the one layer that they are would save, where it is one product."""
    if any(each.kind != "Dense" for each in chain):
        return ""
    one = chain[-1].positions * (chain[0].features_in or 0) * (chain[-1].features_out or 0)
    several = sum(each.multiplies for each in chain)
    saved = share(model, chain) * (1 - one / several) if several else 0
    if saved <= 0:
        return ""
    return f". (As the one layer that they are, {percent(saved)} of the multiplications go)"


def _chains(model: Model) -> list[list[Layer]]:
    """Returns the longest ones, each of two layers or more."""
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
    """Returns the one layer that takes this one's output as it is, if it is linear too."""
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
    """Yields tanh and sigmoid where a layer with weights follows: gates and outputs are none."""
    found: dict[str, list[Layer]] = {}
    for index, layer in enumerate(facts.model.layers):
        if layer.activation in SATURATING and _has_place(facts.model, index):
            found.setdefault(layer.activation, []).append(layer)
    for name, layers in found.items():
        yield Finding(
            "note",
            named(layers),
            f"{name} between layers with weights",
            f"its slope is at most {LARGEST_SLOPE.get(name, '1')} and near 0 away from 0, so that "
            "gradients shrink in each",
            "a deep network trains in fewer steps, or at all; in time little, which --fix, or "
            ".fix(), measures",
            "activation='relu', unless bounded values are what you want",
        )


def math_heavy(facts: Facts) -> Iterator[str]:
    """Yields a remark on activations that compute more than ReLU: they may well be worth it."""
    layers = [each for each in costly(facts.model) if each.activation in MATH_HEAVY]
    if layers:
        names = sorted({each.activation for each in layers})
        yield (
            f"{' and '.join(names)} in {named(layers)}: more arithmetic than relu; --fix, or "
            ".fix(), measures what it costs"
        )


def costly(model: Model) -> list[Layer]:
    """Returns the layers whose activation relu could stand for, to see what it costs."""
    return [
        layer
        for index, layer in enumerate(model.layers)
        if layer.activation in (*MATH_HEAVY, *SATURATING) and _has_place(model, index)
    ]


def _has_place(model: Model, index: int) -> bool:
    """Whether an activation is between layers, not an output's or a gate's, which need it."""
    layer = model.layers[index]
    if layer.kind not in HAVE_ONE or layer.is_output:
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
    """Yields outputs in 16 bits, which the loss is then taken of."""
    for output in facts.model.outputs:
        head = None if output.layer is None else facts.model.layers[output.layer]
        softmax = head is not None and head.activation == "softmax"
        # What is cast to float32 after a softmax has lost its small probabilities before.
        dtype = head.dtype if softmax and head.dtype == "float16" else output.dtype
        if dtype not in ("float16", "bfloat16"):
            continue
        limits = (
            "what is above 65,504 is infinite, and 11 bits keep 3 digits"
            if dtype == "float16"
            else "8 bits keep 2 digits"
        )
        small = "; of probabilities, what is below 6e-8 is 0, and its logarithm infinite"
        yield Finding(
            "error" if softmax and dtype == "float16" else "warning",
            head.name if head else "output",
            f"{'softmax' if softmax else 'outputs, logits perhaps,'} in {dtype}",
            limits + (small if softmax and dtype == "float16" else ""),
            f"none in time: {percent(share(facts.model, [head] if head else []))} of the "
            "multiplications; a loss that is right",
            "dtype='float32' for the last layer",
        )


def channels_first(facts: Facts) -> Iterator[Finding]:
    """Yields layers on NCHW."""
    layers = [each for each in facts.model.layers if each.channels_first]
    if layers:
        yield Finding(
            "warning",
            named(layers),
            f"{counted(len(layers), 'layer')} with data_format='channels_first' (NCHW)",
            "Tensor Cores take NHWC: each of these is transposed before it and after it, by "
            "TensorFlow, cuDNN or XLA; on the CPU TensorFlow has no such convolutions",
            "the transposes, which read and write each of these activations once more",
            "data_format='channels_last', and images [batch, height, width, channels]",
        )


def outside_scope(facts: Facts) -> Iterator[Finding]:
    """Yields variables that the strategy does not know."""
    outside = facts.model.outside_scope
    if outside:
        replicas = facts.step.num_replicas
        yield Finding(
            "error" if replicas > 1 else "warning",
            outside[0].rpartition("/")[0] or outside[0],
            f"{counted(len(outside), 'variable')} made outside the strategy's scope",
            "they have no copy on each replica" if replicas > 1 else "run.compile refuses them",
            "none: it does not train",
            "build every layer in `with run.scope():` (or strategy.scope())",
        )
