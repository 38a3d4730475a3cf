"""The ways to save memory: what each would save by the plan, at which price, and in which order."""

import dataclasses

import pytest

from tfaccel.config import Config, StepConfig
from tfaccel.training import memory_ways
from tfaccel.training.memory_plan import FRAGMENTS, Plan
from tfaccel.training.memory_ways import WAYS, Situation, Way, in_words, proposals

GIB = 2**30


def situation(activations, *, gradients=0, batch=1024, **settings):
    """A step of so many GiB, of which 80 are there, and 10 are fixed."""
    plan = Plan(10 * GIB, 0, gradients, activations=int(activations * GIB), limit=80 * GIB)
    return Situation(plan, batch, **settings)


def fits(plan):
    return plan.activations <= plan.room * (1 - FRAGMENTS)


@pytest.mark.parametrize("activations", [70, 100, 110, 150, 1000])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_proposed_fits_by_the_plan(activations, parts):
    before = situation(activations, gradients=GIB, step=StepConfig(accumulation_steps=parts))
    found = proposals(before)
    assert found
    for each in found:
        after = before
        for way, value in each.settings:
            after = way.after(after, value)
        assert fits(after.plan), each.words
        assert after.plan.total < before.plan.total


@pytest.mark.parametrize(
    ("activations", "gradients", "names"),
    [
        # Parts cost only the sums of gradients, and a smaller batch changes what is trained.
        (100, 0.1, ["accumulation_steps", "remat", "global_batch_size"]),
        # With large gradients, a little to compute again is cheaper.
        (63, 8, ["remat", "accumulation_steps", "global_batch_size"]),
        (180, 1, ["accumulation_steps", "global_batch_size"]),  # remat saves at most three fifths
    ],
)
def test_the_cheapest_way_that_keeps_the_result_is_first(activations, gradients, names):
    found = proposals(situation(activations, gradients=int(gradients * GIB)))
    assert [[way.name for way, _ in each.settings] for each in found] == [[each] for each in names]
    kept = [each for each in found if each.keeps_result]
    assert [each.times for each in kept] == sorted(each.times for each in kept)
    assert found[: len(kept)] == kept


def with_states(activations, **settings):
    """A step of so many GiB on three replicas, whose optimizer has 12 of the 80 that are there."""
    plan = Plan(6 * GIB, 12 * GIB, 0, activations=int(activations * GIB), limit=80 * GIB)
    return Situation(plan, 1024, num_replicas=3, **settings)


@pytest.mark.parametrize(
    ("activations", "settings", "wanted"),
    [
        (60, {"saved_by_slices": 6 * GIB}, {"shard_states": True}),  # up to 0.95 * 68
        (66, {"saved_by_slices": 6 * GIB}, {}),
        (60, {"packs_states": True}, {"state_dtype": "bfloat16"}),
        (66, {"packs_states": True}, {"state_dtype": "8bit"}),  # up to 0.95 * 70.9
        (68, {"packs_states": True}, {}),
        (60, {"saved_by_slices": 6 * GIB, "packs_states": True, "trains": False}, {}),
        (60, {}, {}),
    ],
)
def test_states_of_the_optimizer_make_room(activations, settings, wanted):
    before, found = with_states(activations, **settings), {}
    for each in proposals(before):
        ((way, value),) = each.settings
        if way.name in ("shard_states", "state_dtype"):
            found[way.name] = value
            assert fits(way.after(before, value).plan)
            assert each.keeps_result == (way.name == "shard_states")
    assert found == wanted


def test_states_may_be_sharded_and_packed():
    # 12 GiB of states, and weights of 6 GiB, on three replicas.
    before = with_states(60, saved_by_slices=6 * GIB, packs_states=True)
    ways = {way.name: way for way in WAYS}
    sharded = ways["shard_states"].after(before, True)
    assert (sharded.plan.optimizer, sharded.saved_by_slices) == (6 * GIB, 0)
    assert sharded.packs_states
    both = ways["state_dtype"].after(sharded, "bfloat16")
    assert (both.plan.optimizer, both.packs_states) == (4 * GIB, False)  # 2 are of weights
    packed = ways["state_dtype"].after(before, "bfloat16")
    # Of 6 GiB two thirds could go, but the slices of weights take 2.
    assert (packed.plan.optimizer, packed.saved_by_slices) == (6 * GIB, 2 * GIB)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_stronger_values_come_to_an_end(way):
    before = with_states(100, saved_by_slices=6 * GIB, packs_states=True, half_precision=False)
    value, seen = way.stronger(before, None), []
    while value is not None and len(seen) < 20:
        seen.append(value)
        value = way.stronger(before, value)
    assert len(seen) < 20
    assert len(set(seen)) == len(seen)


def test_a_budget_computes_no_more_again_than_it_must():
    little, much = (
        next(each for each in proposals(situation(size)) if each.settings[0][0].name == "remat")
        for size in (70, 105)
    )
    assert little.settings[0][1] == much.settings[0][1] == int(66.5 * 1024)  # the room in MiB
    assert 1 < little.times < much.times <= 1.3


def test_two_ways_are_proposed_if_none_suffices():
    """Two rows: one at a time does not fit, unless activations are computed again, too."""
    (first, *_) = found = proposals(situation(180, batch=2))
    assert {way.name for way, _ in first.settings} == {"remat", "accumulation_steps"}
    assert {way.name: value for way, value in first.settings} == {
        "remat": "blocks",
        "accumulation_steps": 2,
    }
    assert (
        "remat='blocks' with accumulation_steps=2 or more (the same result, except" in first.words
    )
    assert not any(len(each.settings) == 1 and each.keeps_result for each in found)


def test_float32_may_become_mixed():
    assert "precision='mixed_float16'" in in_words(situation(100, half_precision=False))
    assert "precision" not in in_words(situation(100))


def test_every_field_is_one_of_the_config():
    for way in WAYS:
        room, _, name = way.field.partition(".")
        rooms = {each.name: each for each in dataclasses.fields(Config)}
        assert name in {each.name for each in dataclasses.fields(rooms[room].default_factory())}


def test_one_entry_adds_a_way(monkeypatch):
    """It is all that a way needs, to be proposed alone and with others."""
    sharded = Way(
        "step.shard_states",
        value=lambda each: True if each.num_replicas > 1 else None,
        stronger=lambda each, value: True if each.num_replicas > 1 and value is None else None,
        after=lambda each, value: each,
        times=lambda each, value: 1.001,
        changes="the same result",
        keeps_result=True,
    )
    monkeypatch.setattr(memory_ways, "WAYS", [*WAYS, sharded])
    said = in_words(situation(100, gradients=GIB, num_replicas=4))
    assert said.startswith("shard_states=True (the same result; the same time for each row), or ")
    assert "shard_states" not in in_words(situation(100))
