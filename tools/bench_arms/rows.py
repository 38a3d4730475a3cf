"""The rows that tools/bench.py compares, each with its goal and its arms.

This module takes the batch of one GPU, and gives the rows. The program of an arm lists the settings
of the arm. The settings `gpus` and `processes` (for `tfaccel launch`) are for the driver. The rows
V, L and Z train the networks of networks.py, each with its own batch.

    {row.name for row in make_rows(batch=256)}

If a side has several arms, the best one counts. So a rival has every setting that its users would
try.
"""

import dataclasses

from bench_arms import networks

Arms = dict[str, dict]

RATE, MEMORY, START = "images_per_second", "peak_memory_mib", "seconds_to_first_step"
ROWS_RATE = "rows_per_second"  # of a network of networks.py: a row of its batch is an image or text
MARK, TINY_MARK = 10, 2  # steps between the times that a start notes
TARGET = "seconds_to_target"  # tools/bench_cifar.py measures this
# How a rival of MNIST keeps its images: from words for the name of the arm to values of "data" in
# keras_mnist.py.
IN_MEMORY = {
    "": "cached",
    "decoded once, gathered whole: ": "gathered",
    "fit(x, y) of arrays: ": "arrays",
}
# Networks of many short kernels. In PyTorch's default mode their speed is that of the host, so they
# have an arm with CUDA graphs, which max-autotune uses too, but without its timing.
OF_LAUNCHES = ("densenet121", "efficientnetv2b0", "mobilenetv3_large", "lstm")
# Steps of an execution for texts, which come from tf.data. The device waits for the first batches
# of an epoch: with all 400 of row L5 in one execution it waited for 6% of the time.
TEXTS_AT_ONCE = 50
# README recommends this flag for data that DALI does not make. It replaces the value of XLA_FLAGS.
SUMS_IN_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+COLLECTIVES"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Two sides, and the goal for the ratio of their best arms.

    Attributes:
      name: the name of the row; there is a row E2 for each number of GPUs.
      compared: the two sides in words.
      goal: the goal for ours / rival: a minimum for rates, a maximum for memory and seconds.
      ours: the settings of tfaccel's arms, by name. `--ours` changes them. Settings of
        `tfaccel.setup` in `--ours` also change rivals that are tfaccel.
      rivals: the settings of the rival's arms, by name.
      gpus: the number of GPUs that the row needs. Rows for one GPU can also run on the CPU.
      measure: RATE, ROWS_RATE, MEMORY, START or TARGET.
      needs: other needs: "jpegs" or "mnist", which are flags of the driver; "torch", "timm" or
        "transformers", which the interpreter of --torch-python must have; or "gpu" if the row
        cannot run on a CPU.
      step_goal: the largest ratio of the 99th percentile to the median of step times; None if they
        are not measured.
      memory_goal: the largest ratio of the peak memory of training, without the batches on the
        device, to the least of any rival; None if there is no such goal. A row of ROWS_RATE has the
        ratio in any case.
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
    memory_goal: float | None = None

    @property
    def is_rate(self) -> bool:
        """True if a higher value is better."""
        return self.measure in (RATE, ROWS_RATE)


def make_rows(*, batch: int, tiny: bool = False) -> tuple[Row, ...]:
    """Returns all rows.

    Args:
      batch: images of a step on each GPU; the batch of MNIST is ten times as large. The rows C, V,
        L and Z have their own.
      tiny: whether the rows C, V, L and Z have tiny networks, and can run on a CPU.
    """
    # The first step has already taken all memory, so few steps are enough.
    few_steps = {"epoch_steps": 5, "drop": 5, "steps": 5, "steps_per_execution": 1}
    vit, large = (
        next(iter(network_row("V7", each, goal=1, tiny=tiny).ours.values()))
        for each in ("vit_b16", "vit_l16")
    )
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
        processes_row("P1", "ResNet-50", ours(), gpus=2, processes=2),
        processes_row("P1", "ResNet-50", ours(), gpus=4, processes=4),
        processes_row("P2", "ResNet-50", ours(), gpus=4, processes=2),
        processes_row("P3", "from JPEG files", ours_from_jpegs(), gpus=2, processes=2),
        processes_row("P4", "ViT-B/16", vit, gpus=2, processes=2, measure=ROWS_RATE),
        processes_row("P4", "ViT-B/16", vit, gpus=4, processes=4, measure=ROWS_RATE),
        sharded_row("Z1", "ViT-L/16", large, gpus=2),
        sharded_row("Z1", "ViT-L/16", large, gpus=4),
        start_row("C1", "resnet50", goal=0.7, tiny=tiny),
        start_row("C2", "densenet121", goal=1, tiny=tiny),
        start_row("C3", "efficientnetv2b0", goal=1, tiny=tiny),
        start_row("C4", "vit_b16", goal=1, tiny=tiny),
        start_row("C5", "mobilenetv3_large", goal=1, tiny=tiny, steps=200),
        start_row("C6", "convnext_tiny", goal=1, tiny=tiny, steps=200),
        start_row("C7", "unet", goal=1, tiny=tiny, steps=200),
        start_row("C8", "bert", goal=1, tiny=tiny, steps=200),
        start_row("C9", "lstm", goal=1, tiny=tiny, steps=200),
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
        network_row("V1", "resnet50", goal=1.1, tiny=tiny),
        network_row("V2", "efficientnetv2b0", goal=2.27, tiny=tiny),
        network_row("V3", "densenet121", goal=2.27, tiny=tiny),
        network_row("V4", "mobilenetv3_large", goal=1.8, tiny=tiny),
        network_row("V5", "convnext_tiny", goal=1.25, tiny=tiny),
        network_row("V6", "unet", goal=1.25, tiny=tiny),
        network_row("V7", "vit_b16", goal=1.1, tiny=tiny, memory_goal=1),
        network_row("L1", "bert", goal=1.05, tiny=tiny),
        network_row("L2", "bert_512", goal=1.05, tiny=tiny),
        network_row("L3", "gpt2", goal=1, tiny=tiny),
        network_row("L4", "lstm", goal=1, tiny=tiny),
        network_row("L5", "attention", goal=1, tiny=tiny, memory_goal=1),
    )


def network_row(
    name: str, network: str, *, goal: float, tiny: bool, memory_goal: float | None = None
) -> Row:
    """Returns a row that compares a network with the same one in compiled PyTorch.

    Args:
      name: the name of the row.
      network: a key of networks.NETWORKS.
      goal: the goal for the ratio of speeds.
      tiny: whether the network is tiny.
      memory_goal: the goal for the ratio of memory.
    """
    facts = networks.find(network, tiny=tiny)
    work = {
        **work_of(network, facts, tiny=tiny),
        "drop": networks.TINY_STEPS if tiny else networks.DROP,
        "steps": facts.steps,
    }
    of_ours = {
        "program": "ours_networks.py",
        "xla": None,
        "setup": {"begin_without_xla": False},
        "epoch_steps": facts.epoch_steps,
        "steps_per_execution": (
            min(TEXTS_AT_ONCE, facts.epoch_steps) if facts.is_of_tokens else "epoch"
        ),
        **work,
    }
    rival = {"program": "torch_networks.py", "dtype": "bfloat16", "attention": "chosen", **work}
    rivals = {
        "bfloat16": rival | {"mode": "default"},
        "bfloat16, max-autotune": rival | {"mode": "max-autotune"},
    }
    if network in OF_LAUNCHES:
        rivals["bfloat16, reduce-overhead"] = rival | {"mode": "reduce-overhead"}
    if network == "lstm":  # tfaccel's best arm is in float16
        rivals["float16, scaled"] = rival | {"mode": "default", "dtype": "float16"}
    if network == "attention":
        rivals["bfloat16, cuDNN's attention"] = rival | {"mode": "default", "attention": "cudnn"}
    unit = "tokens" if facts.is_of_tokens else "pixels"
    owner = facts.source + ("'" if facts.source.endswith("s") else "'s")
    return Row(
        name,
        f"{facts.words}, {facts.batch} x {facts.size:,} {unit} / "
        f"{'the same' if facts.source == 'own' else owner} by torch.compile",
        goal,
        {each: of_ours | {"precision": each} for each in ("mixed_bfloat16", "mixed_float16")},
        rivals,
        measure=ROWS_RATE,
        needs=needs_of(facts, tiny=tiny),
        memory_goal=memory_goal,
    )


def start_row(name: str, network: str, *, goal: float, tiny: bool, steps: int = 1000) -> Row:
    """Returns a row of the seconds to a network's first step, with empty compile caches.

    Networks of images are also compared with Keras alone.

    Args:
      name: the name of the row.
      network: a key of networks.NETWORKS.
      goal: the goal for the ratio of seconds.
      tiny: whether the network is tiny.
      steps: the steps that are timed.
    """
    facts = networks.find(network, tiny=tiny)
    work = {
        **work_of(network, facts, tiny=tiny),
        "first_steps": 4 * TINY_MARK if tiny else steps,
        "steps_of_mark": TINY_MARK if tiny else MARK,
    }
    of_keras = {"precision": "mixed_bfloat16", "epoch_steps": facts.epoch_steps, **work}
    of_ours = {"xla": None, "steps_per_execution": work["steps_of_mark"], **of_keras}
    rivals = {
        "torch.compile": {
            "program": "torch_networks.py",
            "dtype": "bfloat16",
            "attention": "chosen",
            "mode": "default",
            **work,
        }
    }
    if not facts.is_of_tokens:
        rivals["Keras, jit_compile=True"] = {"program": "keras_fit_networks.py", **of_keras}
    return Row(
        name,
        f"{facts.words}, seconds to the first step, nothing compiled before / torch.compile",
        goal,
        {"mixed_bfloat16": {"program": "ours_networks.py", **of_ours}},
        rivals,
        measure=START,
        needs=needs_of(facts, tiny=tiny),
    )


def work_of(network: str, facts: networks.Network, *, tiny: bool) -> dict:
    """Returns the settings that all arms of a network have."""
    return {"network": network, "tiny": tiny, "batch": facts.batch, "size": facts.size}


def needs_of(facts: networks.Network, *, tiny: bool) -> tuple[str, ...]:
    """Returns what the rows of a network need: only tiny ones can run on a CPU."""
    packages = {"own": (), "torchvision": ()}.get(facts.source, (facts.source,))
    return ("torch", *packages) if tiny else ("torch", *packages, "gpu")


def ours(**settings) -> dict:
    """Returns a tfaccel arm; by default with its fastest settings, and data on the device."""
    return {
        "program": "ours.py",
        "precision": "mixed_float16",
        "xla": True,
        "data": "random",
        "loader": "memory",
        "steps_per_execution": "epoch",
        "setup": {"begin_without_xla": False},  # stretches are of XLA's step
    } | settings


def ours_from_jpegs(**settings) -> dict:
    """Returns a tfaccel arm that decodes and augments, with the defaults of `tfaccel train`."""
    own = {"data": "jpegs", "loader": "dali_gpu", "augment": "imagenet", "steps_per_execution": 10}
    return ours(**own | settings)


def keras(**settings) -> dict:
    """Returns an arm with Keras alone."""
    own = {"program": "keras_resnet.py", "precision": "mixed_float16", "steps_per_execution": 1}
    return own | settings


def torch(**settings) -> dict:
    """Returns a PyTorch arm."""
    return {"program": "torch_resnet.py"} | settings


def keras_arms_fed_by_tf_data() -> Arms:
    """Returns arms with Keras and XLA, for each way in which its users feed data.

    One way is left out: batches that tf.data normalises to float32. Its best arm was 14% slower
    (LOG.md).
    """
    each = {"jit_compile": True}
    return {
        "uint8": keras(data="host", **each),
        "uint8, an epoch in one execution": keras(data="host", steps_per_execution="epoch", **each),
        "uint8, prefetch_to_device": keras(data="host to device", **each),
    }


def jpeg_row(name: str, *, gpus: int, goal: float, step_goal: float | None = None) -> Row:
    """Returns a row that compares JPEG files with data on the device."""
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
    """Returns a row that compares several GPUs with the best step on one GPU."""
    return Row(
        name,
        f"{gpus} GPUs / the best step on one GPU; data on the devices",
        goal,
        {
            "one process": ours(gpus=gpus),
            "one process, its sums in CUDA graphs": ours(gpus=gpus, environment=SUMS_IN_GRAPHS),
        },
        {"one GPU": ours()},  # mixed_bfloat16 is slower: see the result files of S3
        gpus=gpus,
    )


def processes_row(
    name: str, what: str, arm: dict, *, gpus: int, processes: int, measure: str = RATE
) -> Row:
    """Returns a row that compares several processes with one process for all GPUs.

    Args:
      name: the name of the row.
      what: what is trained, in words.
      arm: the tfaccel arm in one process.
      gpus: the number of GPUs.
      processes: the number of processes, each of which has as many GPUs.
      measure: what is compared.
    """
    each = "a process for each" if processes == gpus else f"{processes} processes"
    return Row(
        name,
        f"{what}, {gpus} GPUs, {each} / one process",
        0.97,
        {f"{processes} processes": arm | {"gpus": gpus, "processes": processes}},
        {"one process": arm | {"gpus": gpus}},
        measure=measure,
        needs=("jpegs",) if arm.get("data") == "jpegs" else (),
        gpus=gpus,
    )


def sharded_row(name: str, what: str, arm: dict, *, gpus: int) -> Row:
    """Returns a row that compares optimizer states in parts on each GPU with whole ones.

    Args:
      name: the name of the row.
      what: what is trained, in words.
      arm: the tfaccel arm with whole states.
      gpus: the number of GPUs.
    """
    return Row(
        name,
        f"{what}, {gpus} GPUs, optimizer states in parts / whole on each",
        0.97,
        {"shard_states": arm | {"gpus": gpus, "step": {"shard_states": True}}},
        {"whole states": arm | {"gpus": gpus}},
        measure=ROWS_RATE,
        gpus=gpus,
        memory_goal=1,
    )


def mnist_row(name: str, against: str, kept: dict[str, str], *, goal: float, batch: int) -> Row:
    """Returns a row for MNIST from PNG files, without rotation on either side.

    Args:
      name: the name of the row.
      against: the rival in words.
      kept: the ways in which the rival keeps its images: from words to a value of "data".
      goal: the goal for the ratio.
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
