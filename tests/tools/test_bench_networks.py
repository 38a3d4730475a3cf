"""The rows V and L of tools/bench.py, which train networks, and its time limit."""

import ast
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
import unittest.mock

import fake_arms
import keras
import numpy as np
import pytest
from fake_arms import LIMIT_S
from loaded_tool import TOOLS, loaded

TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def bench():
    with loaded("bench") as module:
        yield module


@pytest.fixture
def fake(tmp_path, bench):
    return fake_arms.starter(bench, tmp_path)


@pytest.fixture
def a_row(bench):
    return functools.partial(fake_arms.row, bench)


def of_network(rates, *, peak_mib, data_mib=0):
    """Returns the settings of a fake arm of a network's row."""
    figures = {"peak_memory_mib": peak_mib, "data_mib": data_mib, "step_ms": 2.5}
    more = figures | {"tokens_per_second": 8000.0}
    return {"values": rates, "measure": "rows_per_second", "more": more}


@pytest.fixture
def network_of(a_row):
    """Returns a network's row: ours has 900 MiB beside its batches, the rivals 1,000 and 600."""

    def make(peak_mib=1000, **fields):
        return a_row(
            {"a": of_network([2000.0, 1900.0, 2100.0], peak_mib=peak_mib, data_mib=100)},
            {
                "quick": of_network([1000.0] * 3, peak_mib=1050, data_mib=50),
                "small": of_network([950.0] * 3, peak_mib=600),
            },
            measure="rows_per_second",
            **fields,
        )

    return make


def test_memory_is_compared_with_the_least_of_the_rivals_and_without_batches(
    bench, fake, network_of
):
    from bench_arms.measure import result_of

    row = network_of(memory_goal=1.4)
    *_, found = bench.measure_row(row, fake, repeats=3, limit=bench.TimeLimit(LIMIT_S))
    assert found["memory ratio"] == 1.5
    assert (found["ratio"], found["is_met"]) == (2, False)  # for memory alone
    assert found["arms"]["a"]["spread"] == 0.1
    sides = found["arms"], found["rivals"]
    assert result_of(network_of(memory_goal=1.5), sides)["is_met"]
    sides[1]["quick"]["stretches"][0]["peak_memory_mib"] = None  # as on a CPU
    assert result_of(network_of(), sides)["memory ratio"] is None
    assert result_of(network_of(), sides)["is_met"]
    assert not result_of(row, sides)["is_met"]


def test_each_arm_of_a_network_has_a_line(bench, fake, network_of):
    row = network_of(memory_goal=2)
    row.rivals["dead"] = {"values": [], "dies": "at once"}
    *_, found = bench.measure_row(row, fake, repeats=3, limit=bench.TimeLimit(LIMIT_S))
    row.rivals["left out"] = {}
    assert bench.without_figures(row, found) == ["dead", "left out"]
    found["without"] = ["dead"]
    assert bench.summary_of(row, found, 3) == (
        "2; goal 1.5; memory 1.5, goal 2; without dead; after 3 of 3 turns"
    )
    ours, quick, _, dead = bench.arm_lines(found)
    assert ours == (
        "  ours a: 2,000 rows/s, 8,000 tokens/s, 2.50 ms a step, spread 10.0%; "
        "peak 1,000 MiB, 100 of them batches; first step after 7.0 s"
    )
    assert quick.startswith("  rival quick: 1,000 rows/s")
    assert dead == "  rival dead: arm 'dead' ended with exit code 1"


def test_a_time_limit_leaves_out_arms_and_then_turns(bench, fake, a_row, tmp_path, capsys):
    now = [0]

    def start(name, *arguments):
        now[0] += 1000  # it is set up
        process = fake(name, *arguments)
        stretch = process.stretch

        def timed(**limits):
            now[0] += 20
            return stretch(**limits)

        process.stretch = timed
        return process

    rivals = {name: {"values": [2.0] * 3} for name in ("b", "c", "d")}
    # The third arm begins with 1,080 s left, the fourth with 80: too few, as 100 are for stretches.
    limit = bench.TimeLimit(LIMIT_S, ends=3080, clock=lambda: now[0])
    (found,) = bench.measure_row(a_row(rivals=rivals), start, repeats=3, limit=limit)
    assert (found["repeats"], found["ratio"]) == (1, 1.5)
    assert (tmp_path / "turns").read_text().split() == ["a", "b", "c"]
    why = "arm 'd' was not started: the time limit is reached"
    assert found["rivals"]["d"]["failed"] == why
    said = capsys.readouterr().err
    assert f"bench: {why}" in said
    assert "ends after 1 of 3 turns: the time limit has no room for a further one of 60 s" in said


def test_a_row_is_not_begun_at_the_end_of_the_time_limit(bench, capsys, monkeypatch):
    monkeypatch.setattr(bench, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(bench, "measure_with", lambda *_: pytest.fail("it was begun"))
    assert bench.main(["--rows=S1", "--time-limit=1"]) == 0
    assert "S1 on 1xH200: not run: the time limit is reached" in capsys.readouterr().out


def network_rows(bench, **size):
    return [each for each in bench.make_rows(batch=8, **size) if each.name[0] in "VL"]


def test_no_name_of_a_row_begins_with_another(bench):
    names = {each.name for each in bench.make_rows(batch=8)}
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


@pytest.mark.parametrize("tiny", [False, True])
def test_each_network_has_a_row_whose_sides_have_the_same_work(bench, tiny):
    from bench_arms import networks
    from bench_arms.rows import OF_LAUNCHES

    rows = network_rows(bench, tiny=tiny)
    seen = []
    for row in rows:
        arms = [*row.ours.values(), *row.rivals.values()]
        work = {
            tuple(each[name] for name in ("network", "tiny", "batch", "size", "drop", "steps"))
            for each in arms
        }
        assert len(work) == 1
        seen.append(arms[0]["network"])
        graphs = {"reduce-overhead"} if seen[-1] in OF_LAUNCHES else set()
        modes = {"default", "max-autotune"} | graphs
        assert {each["mode"] for each in row.rivals.values()} == modes
        assert {*row.ours} == {"mixed_bfloat16", "mixed_float16"}
        assert ("gpu" in row.needs) is not tiny
        assert "torch" in row.needs
        ours = bench.with_work(row, bench.parse(["--batch=3"])).ours["mixed_float16"]
        assert ours["batch"] == networks.find(arms[0]["network"], tiny=tiny).batch
    large = {"resnet152", "vit_l16"}  # for the rows of memory
    assert sorted(seen) == sorted(networks.NETWORKS.keys() - large)
    assert set(OF_LAUNCHES) < set(seen)


def test_both_sides_have_each_network(bench):
    from bench_arms import keras_networks, networks

    def keys(name):
        """Returns the keys of a dict that the program of PyTorch, which is not here, makes."""
        body = ast.parse((TOOLS / "bench_arms" / "torch_models.py").read_text()).body
        (made,) = (
            each.value
            for each in body
            if isinstance(each, ast.Assign) and each.targets[0].id == name
        )
        return {each.value for each in made.keys}

    by_source = {"torchvision": keys("TORCHVISION"), "timm": keys("TIMM")}
    for network in networks.NETWORKS.values():
        assert network.model in {*keras_networks.APPLICATIONS, *keras_networks.OWN}
        assert network.model in by_source.get(network.source, keys("OWN"))


def test_networks_of_both_sides_need_no_package(bench):
    program = ast.parse((TOOLS / "bench_arms" / "networks.py").read_text())
    imports = [each for each in ast.walk(program) if isinstance(each, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(each) for each in imports] == ["import dataclasses"]


def test_rows_of_networks_need_gpus_or_their_tiny_size_and_packages(bench, monkeypatch):
    options = bench.parse(["--torch-python=/of/torch"])
    (bert,) = (each for each in network_rows(bench) if each.name == "L1")
    assert bench.lacking(bert, options, 0) == "needs 1 GPU, but only 0 can be used"
    (bert,) = (each for each in network_rows(bench, tiny=True) if each.name == "L1")
    assert bench.lacking(bert, options, 0).startswith("/of/torch has no torch and torchvision")
    monkeypatch.setattr(bench, "has_torch", lambda _: True)
    expected = "/of/torch has no transformers; install it, or use --torch-python"
    assert bench.lacking(bert, options, 0).startswith(expected)
    assert bench.has_packages(sys.executable, "numpy")
    assert not bench.has_packages(sys.executable, "numpy", "no_such_package")


def test_arms_of_networks_can_be_left_out_but_not_all_of_a_side(bench, capsys, monkeypatch):
    row = network_rows(bench)[0]
    left = bench.without(row, ["max-autotune", "mixed_float16"])
    assert ([*left.ours], [*left.rivals]) == (["mixed_bfloat16"], ["bfloat16"])
    (s3,) = (each for each in bench.make_rows(batch=8) if each.name == "S3")
    assert bench.without(s3, ["bfloat16"]) == s3
    monkeypatch.setattr(bench, "gpu_names", list)
    assert bench.main(["--rows=V7", "--leave-out=mixed"]) == 2
    said = capsys.readouterr().err
    assert "leaves out all of mixed_bfloat16, mixed_float16 in row V7; each side needs an" in said


def test_a_setting_that_a_row_has_not_is_a_mistake_in_the_call(bench):
    options = bench.parse(['--ours={"loader": "dali_cpu"}'])
    with pytest.raises(bench.UsageError, match="row V1 has no setting 'loader'; leave it out"):
        bench.with_work(network_rows(bench)[0], options)
    options = bench.parse(['--ours={"steps_per_execution": 5}'])
    ours = bench.with_work(network_rows(bench)[0], options).ours
    assert {each["steps_per_execution"] for each in ours.values()} == {5}


@pytest.mark.parametrize("kept", [False, True])
def test_each_arm_of_a_network_has_compile_caches(bench, network_of, monkeypatch, tmp_path, kept):
    """They are empty, or those of the same arm in an earlier call, and no other arm's."""
    folders, seen = [], []

    class Started(bench.ArmProcess):
        """An arm that is set up, and no process."""

        def __init__(self, name, command, settings, *, environment):
            (own,) = {environment[each] for each in bench.CACHES}
            seen.append(os.listdir(own))
            pathlib.Path(own, name).touch()
            folders.append(own)
            self._settings = settings

        def __exit__(self, *_):
            pass

        def tell_end(self):
            pass

        def ready(self, **_):
            return {"settings": self._settings, "environment": {}, "seconds_to_first_step": 1.0}

        def stretch(self, **_):
            figures = {"rows_per_second": self._settings["values"][0]}
            return figures | self._settings["more"]

    monkeypatch.setattr(bench, "ArmProcess", Started)
    monkeypatch.setattr(bench, "command_of", lambda *_, **__: [sys.executable])
    row = network_of()
    arms = [*row.ours.values(), *row.rivals.values()]
    for each in arms:
        each["program"] = "of/the/test.py"
    options = bench.parse(["--repeats=1", *([f"--caches={tmp_path / 'kept'}"] if kept else [])])
    for _ in range(2):
        list(bench.measure_with(row, options, 0))
    names = [[each] for each in (*row.ours, *row.rivals)]
    assert seen == [[]] * 3 + (names if kept else [[]] * 3)
    assert len({*folders}) == (3 if kept else 6)
    assert bench.facts_of(row, hardware="", caches=options.caches).get("caches") == (
        "kept for a later call" if kept else None
    )


def test_caches_that_cannot_be_kept_are_a_mistake_in_the_call(bench, tmp_path):
    (tmp_path / "file").touch()
    options = bench.parse([f"--caches={tmp_path / 'file'}"])
    with pytest.raises(bench.UsageError, match="name a folder that can be written"):
        bench.cache_of("V1, bfloat16", options, "")


def test_the_table_shows_memory_beside_its_goal(bench, tmp_path):
    facts = {"gpus": 1, "hardware": "1xH100", "date": "2026-11-28", "ratio": 1.2}
    for name, ratio in (("V7", 1.0004), ("V6", 1.21)):
        result = {**facts, "row": name, "memory ratio": ratio, "without": ["b"] * (name == "V6")}
        (tmp_path / f"speed-{name}-1xH100.json").write_text(json.dumps(result))
    lines = bench.speed_table(bench.make_rows(batch=256), tmp_path)
    assert "| 1.2; memory 1.0004 | 1.1 or more; memory 1 or less |" in lines
    assert "| 1.2; memory 1.21; without the rival b | 1.25 or more |" in lines


def test_a_decoder_sees_no_later_token_and_has_a_tied_head(bench):
    from bench_arms import keras_networks, networks

    network = networks.find("gpt2", tiny=True)
    model = keras_networks.build(network)
    shapes = [tuple(each.shape) for each in model.trainable_variables]
    assert shapes.count((network.vocabulary, network.width)) == 1
    assert (network.width, network.vocabulary) not in shapes
    ids = np.arange(2 * network.size).reshape(2, -1) % network.vocabulary
    later = ids.copy()
    later[:, 5:] = 0
    both = [np.array(model(each)) for each in (ids, later)]
    assert both[0].shape == (2, network.size, network.vocabulary)
    np.testing.assert_allclose(both[0][:, :5], both[1][:, :5], atol=1e-6)
    assert np.abs(both[0][:, 5:] - both[1][:, 5:]).max() > 1e-3


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_the_head_of_a_decoder_has_the_compute_dtype(bench, setup, precision):
    from bench_arms import keras_networks, networks

    setup(precision=precision)
    network = networks.find("gpt2", tiny=True)
    model = keras_networks.build(network)
    (tokens,) = (each for each in model.layers if hasattr(each, "reverse_dtype"))
    x = keras.Input((2, network.width))
    head = keras.Model(x, tokens(x, reverse=True))  # Keras casts the weights of a layer alone
    found = head(np.zeros((1, 2, network.width), "float32")).dtype
    assert found == keras.config.dtype_policy().compute_dtype
    assert model.output.dtype == "float32"


def test_attention_alone_is_the_mean_square_of_an_attention(bench):
    from bench_arms import keras_networks, networks

    model = keras_networks.build(networks.find("attention", tiny=True))
    query, key, value = (each.numpy().astype(float) for each in model.trainable_variables)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y = np.einsum("bhqk,bkhd->bqhd", weights, value)
    expected = (y**2).sum((2, 3)).mean()
    np.testing.assert_allclose(model(np.zeros((1, 1))), [[expected]], rtol=1e-5)


def test_an_arm_of_torch_times_its_stretches_alone(monkeypatch):
    """By a stand-in for torch, which the default suite does not need."""
    torch = unittest.mock.MagicMock()
    torch.cuda.is_available.return_value = False
    monkeypatch.setitem(sys.modules, "torch", torch)
    settings, done = {"drop": 3, "steps": 5, "started": time.time()}, []
    with loaded("bench_arms/torch_arm") as torch_arm:
        rates = lambda seconds: {"done": len(done), "rows_per_second": 10 / seconds}  # noqa: E731
        batches = [("x0", "y0"), ("x1", "y1")]
        step = lambda *batch: done.append(batch)  # noqa: E731
        arm = torch_arm.timed(settings, step, batches, rates=rates, parameters=7)
    assert done == [batches[0], *batches, batches[0]]  # the first step, and those to drop
    assert arm.ready["parameters"] == 7
    assert arm.ready["settings"] == settings
    assert 0 <= arm.ready["seconds_to_first_step"] < 60
    found = arm.stretch()
    assert (found["done"], found["timed_steps"]) == (4 + 3 + 5, 5)
    assert found["rows_per_second"] == 10 / found["seconds"]
    assert found["peak_memory_mib"] is None


# The arms themselves, of a tiny size.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["V4", "V6", "V7", "L1", "L3", "L4", "L5"])
def test_arms_of_networks_run(bench, name):
    """V1, V2, V3 and V5 differ from V4 by a name, and L2 from L1 by its size."""
    (row,) = (each for each in network_rows(bench, tiny=True) if each.name == name)
    first, second = row.ours.items()  # in place of the rivals, which need torch
    row = dataclasses.replace(row, ours=dict([first]), rivals=dict([second]))
    (found,) = bench.measure_with(row, bench.parse(["--repeats=1"]), 0)
    check_network(found)
    assert len(list(bench.arm_lines(found))) == 2


def check_network(found):
    arms = [*found["arms"].values(), *found["rivals"].values()]
    for arm in arms:
        (stretch,) = arm["stretches"]
        assert stretch["rows_per_second"] > 0
        assert stretch["timed_steps"] == 2
        expected = 2 * arm["settings"]["batch"] / stretch["seconds"]
        assert stretch["rows_per_second"] == pytest.approx(expected)
        assert arm["seconds_to_first_step"] > 0
    return [each["parameters"] for each in arms]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["L3", "L5"])
def test_arms_of_compiled_networks_run(bench, name):
    """Their networks are our own, so both sides have as many parameters."""
    if not bench.has_torch(TORCH_PYTHON):
        pytest.skip("torch and torchvision are not installed; set TORCH_PYTHON")
    (row,) = (each for each in network_rows(bench, tiny=True) if each.name == name)
    flags = ["--repeats=1", f"--torch-python={TORCH_PYTHON}"]
    row = bench.without(row, ["max-autotune", "mixed_float16", "cuDNN"])
    (found,) = bench.measure_with(row, bench.parse(flags), 0)
    assert len(set(check_network(found))) == 1
