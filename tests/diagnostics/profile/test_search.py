"""The search on planted measures: gains are found, noise is not, and its budgets hold."""

import itertools

import numpy as np
import pytest

from tfaccel.diagnostics.profile.search import Knob, Sample, TrialError, search

THREADS = Knob("dali.threads", (1, 2, 4, 8))
QUEUE = Knob("dali.prefetch_batches", (1, 2, 3, 5), loaders=frozenset(["dali_cpu", "dali_gpu"]))
LOADER = Knob("data.loader", ("dali_gpu", "dali_cpu", "tf_data"))
START = {"data.loader": "dali_cpu", "dali.threads": 2, "dali.prefetch_batches": 2}


class Machine:
    """Measures by a function of the setting; each run takes 10 s of its own clock."""

    def __init__(self, rate_of, *, noise=0.0, memory_of=lambda setting: None, seed=0):
        self.rate_of, self.memory_of = rate_of, memory_of
        self.now, self.runs, self.noise = 0.0, [], noise
        self.rng = np.random.default_rng(seed)

    def __call__(self, setting, timeout_s):
        assert timeout_s > 0
        self.now += 10
        self.runs.append(dict(setting))
        rate = self.rate_of(setting)
        rate *= 1 + self.noise * self.rng.standard_normal()
        return Sample(rate, self.memory_of(setting))

    def search(self, *knobs, budget_s=1e6, **limits):
        return search(START, knobs, self, budget_s=budget_s, clock=lambda: self.now, **limits)


def outcomes(found):
    return [(each.changed, each.setting.get(each.changed), each.outcome) for each in found.trials]


def test_it_climbs_to_the_best_and_rejects_the_slow():
    machine = Machine(lambda s: {1: 500, 2: 1000, 4: 1800, 8: 1700}[s["dali.threads"]])
    found = machine.search(THREADS)
    assert outcomes(found) == [
        (None, None, "start"),
        ("dali.threads", 4, "kept"),
        ("dali.threads", 8, "slower"),
    ]
    assert found.changes == {"dali.threads": 4}
    assert found.of(found.best).rate == 1800


def test_a_slow_option_is_rejected_after_one_run():
    machine = Machine(lambda s: 100 if s["data.loader"] == "tf_data" else 1000)
    found = machine.search(LOADER)
    assert found.best == START
    assert [each["data.loader"] for each in machine.runs].count("tf_data") == 1
    assert {"slower"} == {each.outcome for each in found.trials[1:]}


def test_several_knobs_together_and_those_of_other_loaders_left_alone():
    def rate_of(setting):
        rate = {"dali_gpu": 3000, "dali_cpu": 1000, "tf_data": 4000}[setting["data.loader"]]
        return rate * setting["dali.threads"] ** 0.5

    found = Machine(rate_of).search(LOADER, THREADS, QUEUE)
    assert found.changes == {"data.loader": "tf_data", "dali.threads": 8}
    assert "dali.prefetch_batches" not in {each.changed for each in found.trials}


def test_noise_is_not_taken_for_a_gain():
    kept = 0
    for seed in range(100):
        found = Machine(lambda s: 1000, noise=0.05, seed=seed).search(THREADS, QUEUE)
        kept += found.best != START
    assert kept <= 3


def test_a_gain_beyond_the_noise_is_found():
    slow = {"dali.threads": 2}
    found = [
        Machine(
            lambda s: 1000 if slow.items() <= s.items() else 1300, noise=0.05, seed=seed
        ).search(THREADS)
        for seed in range(20)
    ]
    assert sum(bool(each.changes) for each in found) >= 18


def test_a_machine_that_becomes_quicker_is_no_gain():
    clock = itertools.count(1000, 30)  # every run is faster than the one before
    found = Machine(lambda s: next(clock)).search(THREADS)
    assert found.best == START


def test_a_setting_that_fails_is_a_row_with_its_sentence():
    def rate_of(setting):
        if setting["data.loader"] == "dali_gpu":
            raise TrialError("loader='dali_gpu' on the CPU")
        return 1000

    found = Machine(rate_of).search(LOADER)
    assert outcomes(found)[1:] == [
        ("data.loader", "dali_gpu", "failed"),
        ("data.loader", "tf_data", "slower"),
    ]
    failed = found.trials[1]
    assert (failed.rate, failed.why) == (None, "loader='dali_gpu' on the CPU")


def test_a_start_that_fails_is_an_error():
    def fails(setting):
        raise TrialError("no data")

    with pytest.raises(TrialError, match="no data"):
        Machine(fails).search(THREADS)


def test_the_memory_budget_rejects_what_is_fast_but_large():
    machine = Machine(
        lambda s: 1000 * s["dali.prefetch_batches"],
        memory_of=lambda s: 1000 * s["dali.prefetch_batches"],
    )
    found = machine.search(QUEUE, memory_mib=3500)
    assert found.changes == {"dali.prefetch_batches": 3}
    assert found.trials[-1].outcome == "memory"
    assert "takes 5,000 MiB, but --memory-mib allows 3,500" in found.trials[-1].why


def test_a_start_above_the_memory_budget_is_left_for_what_fits():
    machine = Machine(
        lambda s: 1000 * s["dali.prefetch_batches"],
        memory_of=lambda s: 1000 * s["dali.prefetch_batches"],
    )
    found = machine.search(QUEUE, memory_mib=1500)
    assert found.changes == {"dali.prefetch_batches": 1}
    nothing_fits = machine.search(QUEUE, memory_mib=10)
    assert nothing_fits.best == START
    assert "no setting that was tried stays below --memory-mib" in nothing_fits.remarks[0]


def test_the_time_budget_ends_it_and_a_gain_that_is_not_confirmed_is_not_kept():
    machine = Machine(lambda s: 1000 + 100 * s["dali.threads"])
    found = machine.search(THREADS, budget_s=40)  # the start twice, and the first trial
    assert machine.now <= 40
    assert found.best == START
    assert found.trials[-1].outcome == "time"
    assert found.remarks[0] == (
        "the time was over before every setting was tried; a run takes 10 s, so use --minutes=1 "
        "for one run of each setting, or more because faster settings need several runs"
    )
    enough = Machine(lambda s: 1000 + 100 * s["dali.threads"]).search(THREADS, budget_s=75)
    assert enough.changes == {"dali.threads": 4}


def test_a_budget_of_one_run_still_gives_the_start():
    found = Machine(lambda setting: 100).search(THREADS, budget_s=15)
    assert outcomes(found) == [(None, None, "start")]
    assert found.best == START
    assert "the time was over" in found.remarks[0]


def test_a_best_that_was_not_measured_beside_the_start_in_the_end_is_said():
    machine = Machine(lambda setting: 100 * setting["dali.threads"] ** 2)
    found = machine.search(Knob("dali.threads", (2, 4)), budget_s=35)
    assert found.changes == {"dali.threads": 4}
    assert "there was no time to compare the best with the start at the end" in found.remarks


def test_where_the_best_fails_it_is_not_its_challenger_that_did():
    class Fails(Machine):
        def __call__(self, setting, timeout_s):
            if setting == START and self.runs.count(START) == 2:
                raise TrialError("the start fails now")
            return super().__call__(setting, timeout_s)

    machine = Fails(lambda setting: 100 + 10 * setting["dali.threads"])
    found = machine.search(Knob("dali.threads", (2, 4)))
    assert outcomes(found) == [(None, None, "start"), ("dali.threads", 4, "noise")]
    assert "the best so far then failed: the start fails now" in found.trials[1].why


def test_a_gain_by_a_factor_needs_no_repeats():
    machine = Machine(lambda s: 30_000 if s["data.loader"] == "tf_data" else 1000)
    found = machine.search(LOADER, budget_s=45)
    assert found.changes == {"data.loader": "tf_data"}
    assert [each["data.loader"] for each in machine.runs] == ["dali_cpu"] * 2 + [
        "dali_gpu",
        "tf_data",
    ]


def test_each_trial_is_told_as_it_is_decided():
    told = []
    Machine(lambda s: 1000 * s["dali.threads"]).search(THREADS, tell=told.append)
    assert [each.outcome for each in told] == ["start", "kept", "kept"]
