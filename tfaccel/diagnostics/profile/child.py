"""The measurements of `tfaccel profile`; each runs in a child, which frees all memory at its end.

measured = run_quietly(measure_all, config, seconds=5.0, trace_to=None)
sample = run_quietly(measure_once, config, seconds=5.0)
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import keras

from tfaccel.config import Config
from tfaccel.data.distribute import Loader
from tfaccel.diagnostics.profile.api import setup_of
from tfaccel.diagnostics.profile.ceilings import beside, real_rate
from tfaccel.diagnostics.profile.knobs import placements_of
from tfaccel.diagnostics.profile.search import Sample
from tfaccel.diagnostics.profile.table import Profile
from tfaccel.diagnostics.profile.trace import trace
from tfaccel.experiment.open_data import open_source
from tfaccel.experiment.train import prepare
from tfaccel.run import Run
from tfaccel.runtime.gpu_usage import GpuUsage
from tfaccel.training.callbacks.logs import Logs
from tfaccel.training.callbacks.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of an unchanged experiment.

    Attributes:
      profile: the three rates.
      placements: the loaders that can read the data.
      num_examples: the number of training examples.
      run_s: seconds for one run, including the start of its process; `measure_experiment` sets it.
    """

    profile: Profile
    placements: tuple[str, ...]
    num_examples: int
    run_s: float = 0.0


def measure_all(config: Config, *, seconds: float, trace_to: str | None) -> Measured:
    """Measures the three rates of an experiment, and finds the loaders that a search may try.

    This starts the devices, so it runs in a child. The arguments are those of `measure_experiment`.
    """
    run = Run(config.runtime)
    train, _, model = prepare(run, config)
    device = run.runtime.devices[0]
    cores = run.runtime.loader_threads
    threads = config.dali.threads or cores
    with _callbacks(run, train) as callbacks:
        real = real_rate(model, train, seconds=seconds, callbacks=callbacks)
    memory_mib = _memory_mib(run)  # before the other measurements, which take more memory
    ceilings = beside(real, model, train, seconds=seconds)
    if trace_to:
        trace(model, train, pathlib.Path(trace_to))
    setup = setup_of(model, train, threads=threads, cores=cores, from_config=True)
    return Measured(
        Profile(setup, ceilings, memory_mib=memory_mib, trace=trace_to),
        placements_of(
            config, open_source(config.data, "train"), device=device, num_threads=threads
        ),
        train.num_examples,
    )


def measure_once(config: Config, *, seconds: float) -> Sample:
    """Measures only the real rate of an experiment, and its memory. It runs in a child."""
    run = Run(config.runtime)
    train, _, model = prepare(run, config)
    with _callbacks(run, train) as callbacks:
        rate = real_rate(model, train, seconds=seconds, callbacks=callbacks)
    return Sample(rate.median, _memory_mib(run))


@contextlib.contextmanager
def _callbacks(run: Run, train: Loader) -> Iterator[list[keras.callbacks.Callback]]:
    """Gives the callbacks that a run calls in every step, except for checkpoints."""
    throughput = Throughput(train)
    logs = Logs([], loader=train, throughput=throughput, gpus=GpuUsage(run.runtime.devices))
    with contextlib.closing(logs):
        yield [throughput, logs]


def _memory_mib(run: Run) -> int | None:
    """Returns the memory in use on the fullest GPU; on the CPU, this process's peak memory."""
    if run.runtime.devices[0].cuda_ordinal is not None:
        usages = GpuUsage(run.runtime.devices).read()
        return max((each.memory_mib for each in usages), default=None)
    # getrusage is not used, because its peak includes that of the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    peaks = [line.split()[1] for line in status if line.startswith("VmHWM:")]
    return int(peaks[0]) >> 10 if peaks else None
