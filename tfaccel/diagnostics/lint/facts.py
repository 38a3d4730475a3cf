"""A model, its data and its step as plain values, which rules judge. Needs no TensorFlow.

    facts = Facts(model=Model(name="mine", layers=(...)), data=Data(inputs=((15,),)))

Shapes are of one example, without the batch; None in them is a size that is not known.
"""

import dataclasses

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
      momentum: of the moving averages of batch norm that is trained; else None.
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
    momentum: float | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a model.

    Attributes:
      shape: of an example's.
      dtype: that it comes in.
      name: by which Keras finds its target, where the data name targets; None for none.
      layer: whose output it is, in another dtype perhaps, among the model's layers; None for none.
    """

    shape: Shape = ()
    dtype: str = "float32"
    name: str | None = None
    layer: int | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """What is known of a model.

    Attributes:
      name: its own.
      layers: in the order of their calls.
      inputs: shapes that it is built for; empty where that is not known.
      outputs: that it gives.
      outside_scope: paths of the variables that the strategy does not know.
      unknown: kinds of layers with weights whose work is not known.
      own_scaling: name of the layer that scales pixels of 0..255; None where there is none.
      raw: name of the layer with weights that takes 0..255 as they come; None for none.
      other_pixels: name of a network of keras.applications with trained weights whose pixels are
        not those of the data; None for none.
      fault: why it could not be called, in words; None if it could.
    """

    name: str = "model"
    layers: tuple[Layer, ...] = ()
    inputs: tuple[Shape, ...] = ()
    outputs: tuple[Output, ...] = ()
    outside_scope: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    own_scaling: str | None = None
    raw: str | None = None
    other_pixels: str | None = None
    fault: str | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """What is known of one target.

    Attributes:
      shape: of an example's.
      name: that the data give it; None where its place says which output it is of.
      is_integer: whether it is whole numbers: classes.
      num_classes: by class names, or by the labels that were looked at; None if not known.
      num_labels: how many of them were looked at; None for all.
    """

    shape: Shape = ()
    name: str | None = None
    is_integer: bool = False
    num_classes: int | None = None
    num_labels: int | None = None

    @property
    def has_labels(self) -> bool:
        """Whether it is one whole number for an example, or for a pixel."""
        return self.is_integer and (len(self.shape) != 1 or self.shape[0] in (1, None))


@dataclasses.dataclass(frozen=True)
class Data:
    """What is known of the training data.

    Attributes:
      inputs: shapes of an example's inputs; empty where that is not known.
      targets: empty where there are none.
      num_examples: of an epoch; None where that is not known.
      global_batch_size: examples in a step over all replicas; None where that is not known.
      last_batch: what becomes of a batch that is not full: "smaller", "pad", "drop", "repeat".
      shuffles: whether epochs have an order of their own; None where that is not known.
      is_tfaccel: whether a tfaccel loader gives them.
      pixel_range: (least, largest) value of a pixel, of a tfaccel loader of images; else None.
    """

    inputs: tuple[Shape, ...] = ()
    targets: tuple[Target, ...] = ()
    num_examples: int | None = None
    global_batch_size: int | None = None
    last_batch: str = "smaller"
    shuffles: bool | None = None
    is_tfaccel: bool = False
    pixel_range: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """What is known of how the step runs.

    Attributes:
      precision: the model's dtype policy.
      tf32: whether float32 products may use Tensor Cores.
      xla: whether training is compiled; None where that is not known.
      without_xla: why not, where something else than the user's own word keeps it off.
      not_for_xla: what XLA cannot compile, also where nobody asked for it; None for nothing known.
      run_eagerly: whether each operation waits for Python.
      steps_per_execution: between two looks of the host; None where that is not known.
      accumulation_steps: parts of a batch that batch norm sees one at a time.
      num_replicas: over all workers.
      sync_batchnorm: whether batch norm sees all replicas' rows.
      gpu: compute capability of the first GPU; None where there is none.
      from_config: whether the fixes are flags of `tfaccel train`.
      epochs: of the run; None where that is not known.
    """

    precision: str = "float32"
    tf32: bool = True
    xla: bool | None = None
    without_xla: str | None = None
    not_for_xla: str | None = None
    run_eagerly: bool = False
    steps_per_execution: int | None = None
    accumulation_steps: int = 1
    num_replicas: int = 1
    sync_batchnorm: bool = False
    gpu: tuple[int, int] | None = None
    from_config: bool = False
    epochs: int | None = None

    @property
    def compiles(self) -> bool:
        """Whether XLA compiles training, or would: where nothing else is known, on a GPU."""
        asked = bool(self.gpu) if self.xla is None else self.xla
        return asked and not self.without_xla and not self.not_for_xla

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
