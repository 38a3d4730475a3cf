"""A model, its data and its step as plain values, which rules judge. Needs no TensorFlow.

Takes nothing; gives the dataclasses, and the arithmetic that several rules share.

    facts = Facts(model=Model(name="mine", layers=(...)), data=Data(inputs=((15,),)))
    share(facts.model, facts.model.layers[:1])      # 0.25 of the multiplications

Shapes are of one example, without the batch; None in them is a size that is not known.
"""

import dataclasses
from collections.abc import Iterable

Shape = tuple[int | None, ...]

# Of what is outside all layers, as a layer's neighbour: an operation in a model's own `call`.
OUTSIDE = -1


@dataclasses.dataclass(frozen=True)
class Layer:
    """One call of a layer that has no layers of its own.

    Attributes:
      name: of the layer.
      kind: its class.
      inputs: shape of its first input.
      outputs: shape of its first output.
      features_in: rows of its weight matrix, as a matrix product sees it; None for no product.
      features_out: columns, likewise: units, filters.
      multiplies: of matrix products, for one example; 0 where it has none or they are not known.
      positions: rows of the product for one example: pixels, or steps of a sequence.
      activation: by name; None for a layer that has none.
      dtype: that it computes in; "int8" where it is quantized.
      feeds: indices, among the model's layers, of those that take its output; OUTSIDE for others.
      is_input: whether it takes the model's input.
      is_output: whether its output is the model's.
      padding: "valid" or "same", of convolutions.
      window: (height, width) of a convolution's kernel, with its dilation.
      channels_first: whether it works on NCHW.
    """

    name: str
    kind: str = "Dense"
    inputs: Shape = ()
    outputs: Shape = ()
    features_in: int | None = None
    features_out: int | None = None
    multiplies: int = 0
    positions: int = 1
    activation: str | None = None
    dtype: str = "float32"
    feeds: tuple[int, ...] = ()
    is_input: bool = False
    is_output: bool = False
    padding: str | None = None
    window: tuple[int, ...] = ()
    channels_first: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """What is known of a model.

    Attributes:
      name: its own.
      layers: in the order of their calls.
      inputs: shapes that it is built for; empty where that is not known.
      outputs: shapes that it gives.
      output_dtypes: of each.
      outside_scope: paths of the variables that the strategy does not know.
      unknown: kinds of layers with weights whose work is not known.
      fault: why it could not be called, in words; None if it could.
    """

    name: str = "model"
    layers: tuple[Layer, ...] = ()
    inputs: tuple[Shape, ...] = ()
    outputs: tuple[Shape, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    outside_scope: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    fault: str | None = None


@dataclasses.dataclass(frozen=True)
class Data:
    """What is known of the training data.

    Attributes:
      inputs: shapes of an example's inputs; empty where that is not known.
      targets: likewise; empty where there are none.
      integer_targets: whether the first target is whole numbers: classes.
      num_classes: by class names, or by the labels that were looked at.
      num_labels: how many of them were looked at; None for all.
      num_examples: of an epoch; None where that is not known.
      global_batch_size: examples in a step over all replicas; None where that is not known.
      last_batch: what becomes of a batch that is not full: "smaller", "pad", "drop", "repeat".
      shuffles: whether epochs have an order of their own; None where that is not known.
      is_tfaccel: whether a tfaccel loader gives them.
    """

    inputs: tuple[Shape, ...] = ()
    targets: tuple[Shape, ...] = ()
    integer_targets: bool = False
    num_classes: int | None = None
    num_labels: int | None = None
    num_examples: int | None = None
    global_batch_size: int | None = None
    last_batch: str = "smaller"
    shuffles: bool | None = None
    is_tfaccel: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """What is known of how the step runs.

    Attributes:
      precision: the model's dtype policy.
      tf32: whether float32 products may use Tensor Cores.
      xla: whether training is compiled; None where that is not known.
      without_xla: why not, where something else than the user's own word keeps it off.
      run_eagerly: whether each operation waits for Python.
      steps_per_execution: of one launch; None where that is not known.
      accumulation_steps: parts of a batch that batch norm sees one at a time.
      num_replicas: over all workers.
      sync_batchnorm: whether batch norm sees all replicas' rows.
      gpu: compute capability of the first GPU; None where there is none.
      from_config: whether the fixes are flags of `tfaccel train`.
    """

    precision: str = "float32"
    tf32: bool = True
    xla: bool | None = None
    without_xla: str | None = None
    run_eagerly: bool = False
    steps_per_execution: int | None = None
    accumulation_steps: int = 1
    num_replicas: int = 1
    sync_batchnorm: bool = False
    gpu: tuple[int, int] | None = None
    from_config: bool = False

    @property
    def has_tensor_cores(self) -> bool:
        """Whether there is a GPU with Tensor Cores: Volta, 7.0, and later."""
        return self.gpu is not None and self.gpu >= (7, 0)


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that rules see."""

    model: Model = dataclasses.field(default_factory=Model)
    data: Data = dataclasses.field(default_factory=Data)
    step: Step = dataclasses.field(default_factory=Step)

    @property
    def rows(self) -> int | None:
        """Examples in a step on each replica."""
        batch = self.data.global_batch_size
        return None if batch is None else max(1, batch // self.step.num_replicas)


# Multiplications, and the tiles they are done in.


def padded(size: int, multiple: int) -> int:
    """Returns the next multiple: what whole tiles hold."""
    return -(-size // multiple) * multiple


def multiple_of(layer: Layer) -> int:
    """Returns the multiple that a layer's sizes should be.

    16 bytes: 8 in float16 and bfloat16, 16 in int8 (NVIDIA, "Matrix Multiplication Background
    User's Guide", Tensor Core requirements; on A100 and later 64 and 128 are best). float32 is
    judged as float16, which it should become; TF32 alone needs 4.
    """
    return 16 if layer.dtype == "int8" else 8


def tile_work(layer: Layer) -> float:
    """Returns a layer's multiplications as its tiles have them, padding included."""
    if not layer.multiplies:
        return 0.0
    multiple = multiple_of(layer)
    sizes = [each for each in (layer.features_in, layer.features_out) if each]
    work = float(layer.multiplies)
    for size in sizes:
        work *= padded(size, multiple) / size
    return work


def share(model: Model, layers: Iterable[Layer]) -> float:
    """Returns these layers' part of the model's multiplications, 0 to 1."""
    whole = sum(each.multiplies for each in model.layers)
    return sum(each.multiplies for each in layers) / whole if whole else 0.0


def heads(model: Model) -> tuple[Layer, ...]:
    """Returns the products after which there are no more: their sizes are the task's."""
    products = [index for index, each in enumerate(model.layers) if each.multiplies]
    return tuple(
        model.layers[index]
        for index in products
        if not _reached(model, index) & set(products)
        # What comes after an operation outside all layers is not known, but for the last one.
        and (index == products[-1] or OUTSIDE not in _reached(model, index))
    )


def firsts(model: Model) -> tuple[Layer, ...]:
    """Returns the products before which there are none: their inputs' sizes are the data's."""
    products = [index for index, each in enumerate(model.layers) if each.multiplies]
    after = {each for index in products for each in _reached(model, index)}
    known = (
        products
        if OUTSIDE not in after
        else [index for index in products if model.layers[index].is_input or index == products[0]]
    )
    return tuple(model.layers[index] for index in known if index not in after)


def _reached(model: Model, index: int) -> set[int]:
    """Returns the layers that come after one, and OUTSIDE for what is none."""
    found, left = set(), [index]
    while left:
        each = left.pop()
        if each != OUTSIDE:
            new = set(model.layers[each].feeds) - found
            found |= new
            left += new
    return found


def percent(part: float) -> str:
    """Returns a part of 1 in words that promise no more digits than it has."""
    if part >= 0.1:
        return f"{100 * part:.0f}%"
    return f"{100 * part:.1f}%" if part >= 0.001 else "under 0.1%"


def shown(shape: Shape) -> str:
    """Returns a shape as people write it: 26 x 26 x 3."""
    return " x ".join("?" if each is None else str(each) for each in shape) or "one number"


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun: 1 layer, 2 layers."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def of_which(whole: int, part: int, noun: str) -> str:
    """Returns how many of a tile's rows or columns are padding, in words."""
    return f"{part} of {counted(whole, noun)} {'is' if part == 1 else 'are'} padding"


def named(layers: Iterable[Layer], most: int = 3) -> str:
    """Returns names of layers, each once, the first few in full."""
    names = list(dict.fromkeys(each.name for each in layers))
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
