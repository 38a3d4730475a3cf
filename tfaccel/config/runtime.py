"""The settings of a process: GPUs, precision, memory, XLA and the seed."""

import dataclasses
from collections.abc import Sequence

from tfaccel.common.checks import check_flag, check_int, is_int
from tfaccel.common.errors import UserError
from tfaccel.config.documented import documented

# Apex's well-known levels, as Keras dtype policies. Apex distinguishes O1 (patch each op) and O2
# (half model, float32 batch norm and master weights). Keras has one policy for both: variables are
# float32, and each layer computes in float16.
OPT_LEVELS = {"O0": "float32", "O1": "mixed_float16", "O2": "mixed_float16", "O3": "float16"}
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16", "float16")


@documented
@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """How the process uses the machine."""

    gpu_ids: Sequence[int] | None = None
    """GPUs, e.g. 0,1; empty for the CPU. The numbers count the GPUs in CUDA_VISIBLE_DEVICES, and
    each GPU has one replica. None, the default, uses all GPUs, or the CPU if there is none."""
    precision: str = "float32"
    """Number format, e.g. mixed_float16. A Keras dtype policy ("float32", "mixed_float16",
    "mixed_bfloat16", "float16") or an Apex level ("O0" to "O3")."""
    memory: str | int = "growth"
    """GPU memory: "growth" allocates it as needed; a number is a limit per GPU in MiB."""
    tf32: bool = True
    """Let float32 matrix products and convolutions use TensorFloat-32 (10 bits of mantissa) on GPUs
    that support it."""
    xla: bool | None = None
    """Compile steps with XLA. This includes training, test and predict steps. None, the default,
    means True with GPUs and False on the CPU, where XLA makes most steps slower."""
    flash_attention: bool = True
    """Compute attentions with cuDNN's flash kernels. They need XLA, and float16 or bfloat16."""
    begin_without_xla: bool = False
    """Begin training without XLA while XLA compiles the step for the first time, on one replica.
    The step changes over between two executions. The first step comes sooner, and full speed comes
    later, because XLA times kernels beside the training. Until then the GPU holds the memory of
    both steps. Dropout draws other numbers at first."""
    compile_cache: bool = True
    """Keep what XLA compiles for a GPU, and which kernels it chose by timing, for later processes.
    The files are in tfaccel/xla (at most 4 GiB) and tfaccel/autotuning (some hundred KiB) of the
    cache folder (XDG_CACHE_HOME, or ~/.cache). The package already has the choices of some
    networks for the H200."""
    seed: int = 0
    """Seed of all random numbers. Weights, dropout, data order and augmentation all depend on
    it."""
    deterministic: bool = False
    """Make runs repeatable, bit for bit. This uses TensorFlow's deterministic kernels, which may be
    slower."""
    peer_timeout_s: int = 60
    """Seconds after which a silent worker stops the others with an error that names it. A worker is
    silent if it is dead, frozen or cut off from the network; a busy worker is not silent."""
    allow_public_network: bool = False
    """Allow workers to have public addresses. TensorFlow's ports have no password, and whoever
    reaches one can run code there, so set this only if a firewall closes the ports."""

    def __post_init__(self):
        """Checks every field and stores it in its one normal form."""
        object.__setattr__(self, "gpu_ids", _gpu_ids(self.gpu_ids))
        object.__setattr__(self, "precision", _precision(self.precision))
        object.__setattr__(self, "memory", _memory(self.memory))
        check_flag("tf32", self.tf32)
        object.__setattr__(self, "xla", _xla(self.xla))
        check_flag("flash_attention", self.flash_attention)
        check_flag("begin_without_xla", self.begin_without_xla)
        check_flag("compile_cache", self.compile_cache)
        check_int("seed", self.seed, at_least=0, at_most=2**32 - 1)  # what NumPy takes
        check_flag("deterministic", self.deterministic)
        check_int("peer_timeout_s", self.peer_timeout_s, at_least=1)
        check_flag("allow_public_network", self.allow_public_network)


def _gpu_ids(value) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = (value,) if isinstance(value, int) else value
    if isinstance(ids, str):
        # From the command line: --config.runtime.gpu_ids=0,1
        ids = [int(each) if each.strip().isdigit() else each for each in ids.split(",") if each]
    if not isinstance(ids, Sequence) or not all(is_int(each, at_least=0) for each in ids):
        raise UserError(f"gpu_ids={value!r}; expected GPU indices, e.g. 0,1; empty for the CPU")
    if len(set(ids)) != len(ids):
        raise UserError(f"gpu_ids={value!r} names a GPU twice; name each once")
    # TensorFlow numbers the GPUs that it may use in this order, whatever order they are given in.
    return tuple(sorted(ids))


def _xla(value) -> bool | None:
    if value is None:
        return None
    known = {"true": True, "1": True, "false": False, "0": False}  # text of the command line, too
    if str(value).lower() not in known:
        raise UserError(
            f"xla={value!r}; expected True or False, or None for on with GPUs and off on the CPU"
        )
    return known[str(value).lower()]


def _precision(value) -> str:
    policy = OPT_LEVELS.get(str(value).upper(), value)
    if policy not in PRECISIONS:
        # No nearest name here: "fp16" is near float16, but means mixed_float16.
        raise UserError(
            f"precision={value!r}; expected one of {', '.join((*PRECISIONS, *OPT_LEVELS))}"
        )
    return policy


def _memory(value) -> str | int:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if value != "growth" and not is_int(value, at_least=1):
        raise UserError(f"memory={value!r}; expected 'growth' or a limit per GPU in MiB, e.g. 8192")
    return value
