"""The verdict of planted rates: which ceiling bounds, by how much, and what is lost in neither."""

import dataclasses

import pytest

from tfaccel.diagnostics.profile.rates import Rate
from tfaccel.diagnostics.profile.verdict import Ceilings, Setup, judge

GPU = Setup("resnet50", "dali_gpu", 256, on_gpu=True, precision="mixed_float16")
CPU = Setup("mnist_cnn", "tf_data", 64, threads=1, cores=2)


def rate(median, waited_s=0.0):
    return Rate(median, 0.98 * median, 1.02 * median, waited_s=waited_s)


@pytest.mark.parametrize(
    ("step", "loader", "real", "setup", "bound", "says"),
    [
        (
            3900,
            1240,
            1230,
            GPU,
            "loader",
            "the loader limits the run: the loader alone reaches 1,240 images/s",
        ),
        (3900, 1240, 1230, CPU, "loader", "and the run 1,230"),
        (3900, 98300, 3800, GPU, "step", "3,800 of the 3,900 images/s (97%)"),
        (3900, 98300, 3800, CPU, "step", "25 times as many"),
        (4000, 4200, 3800, GPU, "both", "equally fast (4,000 and 4,200 images/s)"),
        # Both in time, but never at once.
        (1000, 1050, 512, CPU, "both", "share the cores, and in turn would reach 512"),
        (1000, 3000, 750, CPU, "step", "25% of the lower rate is lost"),
        (4000, 9000, 3000, GPU, "step", "share the GPU"),
        # Alone slower than in the run: that rate cannot be what bounds it.
        (1763, 1132, 1719, GPU, "step", "alone reaches 1,132, but it kept up with the step"),
        (1763, 900, 1132, GPU, "loader", "alone reaches 900 images/s"),
        (1763, 1500, 1600, GPU, "both", "equally fast (1,763 and 1,500 images/s)"),
        (1000, 1199, 1200, GPU, "step", "1.2 times as many"),
        # Slower than one after the other.
        (10000, 100000, 4000, GPU, "host", "the other 35.8 ms are lost in callbacks"),
    ],
)
def test_what_bounds(step, loader, real, setup, bound, says):
    found = judge(Ceilings(rate(step), rate(loader), rate(real, waited_s=0.01)), setup)
    assert found.bound == bound
    assert says in found.sentence
    assert found.advice


def test_waiting_is_told_in_milliseconds_of_a_step():
    found = judge(Ceilings(rate(3900), rate(1240), rate(1240, waited_s=0.140)), GPU)
    assert "takes 206 ms, of which it waits 140 ms for its batch" in found.sentence


def test_a_run_faster_than_its_ceilings_by_noise_loses_nothing():
    found = judge(Ceilings(rate(1000), rate(5000), rate(1010)), CPU)
    assert (found.bound, found.lost) == ("step", 0)
    assert "lost" not in found.sentence


def test_advice_fits_the_loader_and_the_device():
    bound = Ceilings(rate(4000), rate(1000), rate(990))
    of_cpu = " ".join(judge(bound, CPU).advice)
    assert "--config.dali.threads=2: the loader uses 1 of 2 cores" in of_cpu
    assert "dali_gpu" not in of_cpu
    of_gpu = " ".join(judge(bound, dataclasses.replace(CPU, on_gpu=True)).advice)
    assert "--config.data.loader=dali_gpu" in of_gpu
    step = Ceilings(rate(1000), rate(9000), rate(990))
    float32 = dataclasses.replace(GPU, precision="float32", xla=False)
    assert judge(step, float32).advice[:2] == (
        "--config.runtime.xla=True",
        "--config.runtime.precision=mixed_float16",
    )


def test_xla_is_not_advised_for_what_it_cannot_compile():
    ceilings = Ceilings(rate(1000), rate(9000), rate(990))
    reason = "the layer lstm (LSTM) is not for XLA (supports_jit=False)"
    for settings, advised in (
        ({"not_for_xla": reason}, f"leave XLA off: {reason}"),
        ({}, "--config.runtime.xla=True"),
    ):
        setup = dataclasses.replace(GPU, xla=False, **settings)
        assert judge(ceilings, setup).advice[0] == advised


# A step, a loader and a run that each bound bounds.
BOUNDS = {
    "loader": Ceilings(rate(4000), rate(1000), rate(990)),
    "step": Ceilings(rate(1000), rate(9000), rate(700)),
    "host": Ceilings(rate(10000), rate(90000), rate(3000)),
}


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_script_is_advised_in_its_own_words(bound, on_gpu):
    setup = Setup("x", "dali_cpu", 64, on_gpu=on_gpu, xla=not on_gpu, from_config=False)
    found = judge(BOUNDS[bound], setup)
    assert found.bound == bound
    assert found.advice
    assert "--" not in " ".join(found.advice)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (
            {},
            "--config.train.steps_per_execution=10: the host now waits after every step",
        ),
        (
            {"epoch_steps": 4},
            "--config.train.steps_per_execution=4: the host now waits after every step",
        ),
        (
            {"epoch_steps": 100, "steps_per_execution": 8, "from_config": False},
            "run.compile(..., steps_per_execution=16): the host now waits after every 8 steps",
        ),
        ({"epoch_steps": 4, "steps_per_execution": 4, "from_config": False}, "use a larger batch"),
    ],
)
def test_the_host_is_to_look_once_in_an_epoch_at_least(changes, first):
    found = judge(BOUNDS["host"], dataclasses.replace(GPU, **changes))
    assert found.advice[0] == first
