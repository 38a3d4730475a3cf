"""What tools/bench.py compares: the rows of the table, each with its goal and its arms.

Takes the batch of one GPU; gives the rows. Settings of an arm are those that its program lists;
`gpus` and `processes` (by `tfaccel launch`) are the driver's.

    {row.name for row in make_rows(batch=256)}

Of several arms on one side the best counts: a rival has every setting that its users would try.
"""

import dataclasses

Arms = dict[str, dict]

RATE, MEMORY, START = "images_per_second", "peak_memory_mib", "seconds_to_first_step"
TARGET = "seconds_to_target"  # by tools/bench_cifar.py
# How a rival of MNIST keeps its images, in words: as keras_mnist.py calls it.
IN_MEMORY = {
    "": "cached",
    "decoded once, gathered whole: ": "gathered",
    "fit(x, y) of arrays: ": "arrays",
}
# As README says it, for data that no DALI makes. It replaces what XLA_FLAGS had.
SUMS_IN_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+COLLECTIVES"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Two sides and the ratio of their best.

    Attributes:
      name: of the row; E2 has one for each number of GPUs.
      compared: what with what, in words.
      goal: of the ratio: at least, of rates; at most, of memory and of seconds.
      ours: the arms above the line, by name: settings. `--ours` is merged into these, and
        what of it is for `tfaccel.setup` also into rivals that are tfaccel.
      rivals: those below it. Empty for START: the first arm's start with an empty compile cache.
      gpus: that it needs; rows for one GPU can be tried on the CPU, too.
      measure: RATE, MEMORY, START or TARGET.
      needs: what else it needs: "jpegs", "mnist" or "torch", of the driver's flags; or "gpu", where
        a CPU will not do.
      step_goal: of p99 / p50 of step time, at most; None where it is not asked for.
    """

    name: str
    compared: str
    goal: float
    ours: Arms
    rivals: Arms = dataclasses.field(default_factory=dict)
    gpus: int = 1
    measure: str = RATE
    needs: tuple[str, ...] = ()
    step_goal: float | None = None

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.measure == RATE


def make_rows(*, batch: int) -> tuple[Row, ...]:
    """Returns all rows.

    Args:
      batch: images of a step on each GPU; MNIST's is ten times as large.
    """
    # Of which the first has taken all memory; one by one, as C1's, which is the same program.
    few_steps = {"epoch_steps": 5, "drop": 5, "steps": 5, "steps_per_execution": 1}
    return (
        Row(
            "S1",
            "ResNet-50 step, mixed_float16 / Keras fit, TF32, no XLA; data on the device",
            9,
            {"mixed_float16": ours()},
            {"float32": keras(precision="float32", jit_compile=False, data="device")},
        ),
        Row(
            "S2",
            "the same step / Keras fit, mixed_float16, jit_compile=True; each with its own data",
            1.25,
            {"mixed_float16": ours()},
            keras_arms_fed_by_tf_data(),
        ),
        Row(
            "S3",
            "the same step / torchvision, channels_last, torch.compile; data on the device",
            1.1,
            {
                "mixed_float16": ours(),
                "mixed_bfloat16": ours(precision="mixed_bfloat16"),
            },
            {
                "bfloat16": torch(dtype="bfloat16", mode="default"),
                "bfloat16, max-autotune": torch(dtype="bfloat16", mode="max-autotune"),
                "float16, scaled": torch(dtype="float16", mode="default"),
            },
            needs=("torch",),
        ),
        Row(
            "S4",
            "step without XLA / Keras fit, mixed_float16, no XLA; data on the device",
            2.5,
            {"mixed_float16": ours(xla=False)},
            {"mixed_float16": keras(jit_compile=False, data="device")},
        ),
        jpeg_row("E1", gpus=1, goal=0.97),
        jpeg_row("E2", gpus=2, goal=0.93, step_goal=1.3),
        jpeg_row("E2", gpus=4, goal=0.93, step_goal=1.3),
        scaling_row("D1", gpus=2, goal=1.94),
        scaling_row("D2", gpus=4, goal=3.85),
        Row(
            "C1",
            "seconds from the process's start to its first step's end: warm compile cache / cold",
            0.15,
            {"mixed_float16": ours(steps_per_execution=1, epoch_steps=5)},
            measure=START,
            needs=("gpu",),
        ),
        Row(
            "M1",
            "peak GPU memory, mixed_float16 and XLA / Keras float32, no XLA; 5 batches on the GPU",
            0.4,
            {"mixed_float16": ours(**few_steps)},
            {"float32": keras(precision="float32", jit_compile=False, data="device", **few_steps)},
            measure=MEMORY,
            needs=("gpu",),
        ),
        mnist_row("T1a", "tf.data from PNG files", {"": "files"}, goal=10, batch=10 * batch),
        mnist_row("T1b", "tf.data with cache()", IN_MEMORY, goal=3, batch=10 * batch),
        Row(
            "T2",
            "seconds of CIFAR-10 training to 94% / cifar10-airbench's method in PyTorch",
            1.5,
            {},
            measure=TARGET,
        ),
    )


def ours(**settings) -> dict:
    """Returns an arm of tfaccel's, by default as good as it gets with data on the device."""
    return {
        "program": "ours.py",
        "precision": "mixed_float16",
        "xla": True,
        "data": "random",
        "loader": "memory",
        "steps_per_execution": "epoch",
    } | settings


def ours_from_jpegs(**settings) -> dict:
    """Returns an arm of tfaccel's that decodes and augments, with `tfaccel train`'s default."""
    own = {"data": "jpegs", "loader": "dali_gpu", "augment": "imagenet", "steps_per_execution": 10}
    return ours(**own | settings)


def keras(**settings) -> dict:
    """Returns an arm of Keras's own."""
    own = {"program": "keras_resnet.py", "precision": "mixed_float16", "steps_per_execution": 1}
    return own | settings


def torch(**settings) -> dict:
    """Returns an arm of PyTorch's."""
    return {"program": "torch_resnet.py"} | settings


def keras_arms_fed_by_tf_data() -> Arms:
    """Returns Keras with XLA, fed in each way that its users feed it.

    But not normalised by tf.data, as float32: the best of that was 14% slower (LOG.md).
    """
    each = {"jit_compile": True}
    return {
        "uint8": keras(data="host", **each),
        "uint8, an epoch in one execution": keras(data="host", steps_per_execution="epoch", **each),
        "uint8, prefetch_to_device": keras(data="host to device", **each),
    }


def jpeg_row(name: str, *, gpus: int, goal: float, step_goal: float | None = None) -> Row:
    """Returns a row of JPEG files against data on the device."""
    several = gpus > 1
    if several:
        mine = {"one process": ours_from_jpegs(gpus=gpus)}
        rival = {"one process": ours(gpus=gpus)}
    else:
        mine = {
            "ten steps in an execution": ours_from_jpegs(),
            "an epoch in one execution": ours_from_jpegs(steps_per_execution="epoch"),
        }
        rival = {"one GPU": ours()}
    if step_goal is not None:
        each = {"steps_per_execution": 1, "step_times": True}
        mine["one process, a step in each execution"] = ours_from_jpegs(gpus=gpus, **each)
    return Row(
        name,
        f"images/s from JPEG files / from data on the device, {gpus} GPU{'s' if several else ''}",
        goal,
        mine,
        rival,
        gpus=gpus,
        needs=("jpegs",),
        step_goal=step_goal,
    )


def scaling_row(name: str, *, gpus: int, goal: float) -> Row:
    """Returns a row of several GPUs against the best step on one."""
    return Row(
        name,
        f"{gpus} GPUs / the best step on one GPU; data on the devices",
        goal,
        {
            "one process": ours(gpus=gpus),
            "one process, its sums in CUDA graphs": ours(gpus=gpus, environment=SUMS_IN_GRAPHS),
        },
        {"one GPU": ours()},  # mixed_bfloat16 is slower: see S3's file
        gpus=gpus,
    )


def mnist_row(name: str, against: str, kept: dict[str, str], *, goal: float, batch: int) -> Row:
    """Returns a row of MNIST from PNG files; without rotation on either side.

    Args:
      name: of the row.
      against: the rival, in words.
      kept: how it keeps the images, in each way that its users would, by words for it.
      goal: of the ratio.
      batch: images of a step.
    """
    work = {"model": "mnist_cnn", "image_size": 28, "batch": batch}
    rival = {
        "program": "keras_mnist.py",
        "precision": "mixed_float16",
        "jit_compile": True,
        **work,
    }
    executions = {"one step in one execution": 1, "an epoch in one execution": "epoch"}
    return Row(
        name,
        f"MNIST epoch from PNG files, after the first / {against}",
        goal,
        {"mixed_float16": ours(data="mnist", loader="auto", **work)},
        {
            f"{words}{steps}": rival | {"data": data, "steps_per_execution": number}
            for words, data in kept.items()
            for steps, number in executions.items()
        },
        needs=("mnist",),
    )
