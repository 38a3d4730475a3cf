"""tools/bench_memory.py: the largest batch by the line through two peaks."""

import argparse
import importlib
import math

import pytest
from loaded_tool import loaded


@pytest.fixture(scope="module")
def tool():
    with loaded("bench_memory") as module:
        yield module


def arm(tool, *, most, fixed_mib=500, row_mib=10):
    """Trains up to `most` rows of so many MiB on a GPU of 16,000 MiB; notes the batches."""
    batches = []

    def train(batch, *, repeats=1):
        batches.append(batch)
        if batch > most:
            raise tool.ArmError("arm ended; its last lines:\n  RESOURCE_EXHAUSTED: Out of memory")
        return {
            "batch": batch,
            "peak_memory_mib": fixed_mib + row_mib * batch,
            "rows_per_second": [100.0] * repeats,
            "environment": {"gpus": [{"memory_mib": 16_000}]},
        }

    return train, batches


def found(tool, train, *, guess=None, ends=math.inf):
    options = argparse.Namespace(start=16, repeats=3)
    return tool.largest(train, options, tool.TimeLimit(1000, ends=ends), guess=guess)


def test_the_line_gives_the_largest_batch(tool):
    train, batches = arm(tool, most=10_000)
    result = found(tool, train)
    assert batches == [16, 32, 1464]  # (0.95 * 16,000 - 500) / 10 rows, as a multiple of 8
    assert (result["batch"], result["refused"], len(result["rows_per_second"])) == (1464, [], 3)
    assert result["line"][0] == {"batch": 16, "peak_memory_mib": 660}


def test_a_batch_that_does_not_fit_gets_smaller(tool):
    train, batches = arm(tool, most=1400)
    result = found(tool, train)
    assert batches[2:] == [1464, 1400]
    assert (result["batch"], result["refused"]) == (1400, [1464])


def test_a_guess_takes_the_place_of_the_line(tool):
    train, batches = arm(tool, most=1400)
    assert found(tool, train, guess=1504)["refused"] == [1504, 1440]
    assert batches == [1504, 1440, 1376]


def test_other_errors_and_too_many_tries_are_errors(tool):
    with pytest.raises(tool.ArmError, match="RESOURCE_EXHAUSTED"):
        found(tool, arm(tool, most=1000)[0])

    def fails(batch, *, repeats=1):
        raise tool.ArmError("arm ended; its last lines:\n  TypeError")

    with pytest.raises(tool.ArmError, match="TypeError"):
        found(tool, fails)
    with pytest.raises(tool.ArmError, match="no more memory"):
        found(tool, arm(tool, most=1000, row_mib=0)[0])


def test_a_time_limit_is_said(tool):
    with pytest.raises(TimeoutError, match="1464 rows were not tried"):
        found(tool, arm(tool, most=10_000)[0], ends=0)


def test_the_table_compares_with_the_first_arm(tool):
    first = {"batch": 64, "peak_memory_mib": 10_000, "rows_per_second": [100.0, 90.0, 110.0]}
    second = {"batch": 160, "peak_memory_mib": 10_100, "rows_per_second": [80.0]}
    *_, plain, blocks = tool.table({"plain": first, "blocks": second})
    assert plain == "| plain | 64 | 1.00 | 10,000 | 100 | 1.00 |"
    assert blocks == "| blocks | 160 | 2.50 | 10,100 | 80 | 0.80 |"


def test_without_a_gpu_it_is_a_mistake_in_the_call(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool, "gpu_names", list)
    assert tool.main(["--network=vit_l16", "--arm=plain={}"]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('{"remat": "blocks"}', "blocks has the setting 'remat', which is none of ours"),
        ('{"guess": "many"}', "blocks has the guess 'many'; expected a number of rows"),
    ],
)
def test_wrong_settings_of_an_arm_are_a_mistake_in_the_call(tool, capsys, settings, said):
    assert tool.main(["--network=vit_l16", f"--arm=blocks={settings}"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_l16", "resnet152"])
def test_its_networks_have_the_sizes_of_their_papers(name):
    networks = importlib.import_module("bench_arms.networks")
    keras_networks = importlib.import_module("bench_arms.keras_networks")
    model = keras_networks.build(networks.find(name, tiny=False))
    millions = {"vit_l16": 304.3, "resnet152": 60.3}  # torchvision's vit_l_16, resnet152: 60.19
    assert model.count_params() / 1e6 == pytest.approx(millions[name], rel=3e-3)
