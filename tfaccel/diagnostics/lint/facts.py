"""A model, its data and its step as plain values for the rules. Needs no TensorFlow.

    facts = Facts(model=Model(name="mine", layers=(...)), data=Data(inputs=((15,),)))

A shape is the shape of one example, without the batch. A size that is not known is None.
"""

import dataclasses

Shape = tuple[int | None, ...]

# Stands for a neighbour outside all layers, such as an operation in a model's `call`.
OUTSIDE = -1


@dataclasses.dataclass(frozen=True)
class Layer:
    """One call of a leaf layer, which contains no other layers.

    Attributes:
      name: the layer's name.
      kind: the layer's class.
      inputs: the shape of the first input.
      outputs: the shape of the first output.
      features_in: the rows of the weight matrix in the matrix product; None if it has no product.
      features_out: the columns of the weight matrix: units or filters; None likewise.
      multiplies: the multiplications of its matrix products for one example; 0 if it has none or
        if they are not known.
      positions: the rows of the product for one example: pixels, or time steps of a sequence.
      activation: the name of the activation; None if there is none.
      dtype: the dtype that it computes in; "int8" if it is quantized.
      feeds: the indices of the layers that take its output; OUTSIDE for anything else.
      is_input: whether it takes the model's input.
      is_output: whether its output is an output of the model.
      padding: "valid" or "same", of a convolution.
      window: (height, width) of a convolution's kernel, including its dilation.
      channels_first: whether it works on NCHW.
      momentum: the momentum of a trainable batch norm layer; None for all other layers.
      unset_reverse_dtype: the dtype of the logits of a ReversibleEmbedding that is called in
        reverse without a `reverse_dtype`; None for all other calls.
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
    unset_reverse_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a model.

    Attributes:
      shape: the shape for one example.
      dtype: the dtype of the output.
      name: the key that Keras uses to find the target if the targets have names; None if it has no
        name.
      layer: the index of the layer that computes it, perhaps in another dtype; None if no layer
        does.
    """

    shape: Shape = ()
    dtype: str = "float32"
    name: str | None = None
    layer: int | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """The facts about a model.

    Attributes:
      name: the model's name.
      layers: the leaf layers in the order of their calls.
      inputs: the shapes that the model is built for; empty if they are not known.
      outputs: the model's outputs.
      outside_scope: the paths of the variables that were created outside the strategy's scope, if
        the model was, too.
      unknown: the kinds of layers with weights whose work is not known.
      own_scaling: the name of the layer that scales pixels of 0..255; None if there is none.
      raw: the name of a layer with weights that takes pixels of 0..255 unscaled; None if there is
        none.
      other_pixels: the name of a network of keras.applications with pretrained weights that were
        trained on other pixels than the data's; None if there is none.
      fault: why the model could not be called, in words; None if it could.
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
    """The facts about one target.

    Attributes:
      shape: the shape for one example.
      name: its name in the data; None if its position tells which output it belongs to.
      is_integer: whether it holds integers, which are classes.
      num_classes: the number of classes, from class names or labels; None if it is not known.
      num_labels: the number of labels that were read to find num_classes; None for all.
    """

    shape: Shape = ()
    name: str | None = None
    is_integer: bool = False
    num_classes: int | None = None
    num_labels: int | None = None

    @property
    def has_labels(self) -> bool:
        """Whether it holds one class for each example, or for each pixel."""
        return self.is_integer and (len(self.shape) != 1 or self.shape[0] in (1, None))


@dataclasses.dataclass(frozen=True)
class Data:
    """The facts about the training data.

    Attributes:
      inputs: the shapes of an example's inputs; empty if they are not known.
      targets: the targets; empty if there are none.
      num_examples: the examples of an epoch; None if it is not known.
      global_batch_size: the rows of a step on all replicas; None if it is not known.
      last_batch: what happens to a batch that is not full: "smaller", "pad", "drop" or "repeat".
      shuffles: whether each epoch has another order; None if it is not known.
      is_tfaccel: whether the data comes from a tfaccel loader.
      pixel_range: (smallest, largest) pixel value of a tfaccel loader of images; None otherwise.
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
    """The facts about how the step runs.

    Attributes:
      precision: the model's dtype policy.
      tf32: whether float32 products may use Tensor Cores.
      xla: whether XLA compiles training; None if it is not known.
      without_xla: why XLA does not compile training, if the user did not turn it off.
      not_for_xla: what XLA cannot compile, even if nobody asked for XLA; None if nothing is known.
      run_eagerly: whether each operation waits for Python.
      steps_per_execution: the steps of one execution; None if it is not known.
      accumulation_steps: the parts of a batch; batch norm computes its statistics over one part.
      num_replicas: the replicas of all workers.
      sync_batchnorm: whether batch norm computes its statistics over all replicas.
      gpu: the compute capability of the first GPU; None if there is no GPU.
      from_config: whether the fixes are flags of `tfaccel train`.
      epochs: the epochs of the run; None if it is not known.
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
        """Whether XLA compiles training. If `xla` is not known, it does on a GPU."""
        asked = bool(self.gpu) if self.xla is None else self.xla
        return asked and not self.without_xla and not self.not_for_xla

    @property
    def has_tensor_cores(self) -> bool:
        """Whether there is a GPU with Tensor Cores: compute capability 7.0 (Volta) or later."""
        return self.gpu is not None and self.gpu >= (7, 0)


@dataclasses.dataclass(frozen=True)
class Facts:
    """All facts that the rules use."""

    model: Model = dataclasses.field(default_factory=Model)
    data: Data = dataclasses.field(default_factory=Data)
    step: Step = dataclasses.field(default_factory=Step)

    @property
    def rows(self) -> int | None:
        """The rows of a step on each replica; None if they are not known."""
        batch = self.data.global_batch_size
        return None if batch is None else max(1, batch // self.step.num_replicas)
