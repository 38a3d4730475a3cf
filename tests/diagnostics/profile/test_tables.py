"""The tables: 80 columns, no colour, nothing of others that acts on a page, and JSON."""

import json

import pytest

from tfaccel.diagnostics.profile.rates import Rate
from tfaccel.diagnostics.profile.search import Knob, Sample, TrialError, search
from tfaccel.diagnostics.profile.search_table import SearchTable
from tfaccel.diagnostics.profile.table import Profile
from tfaccel.diagnostics.profile.verdict import Ceilings, Setup

pytestmark = pytest.mark.usefixtures("terminal")  # lines of 80 columns


def rate(median):
    return Rate(median, 0.98 * median, 1.02 * median, waited_s=0.002)


def profile(**changes):
    ceilings = Ceilings(step=rate(48_529.3), loader=rate(1_237_654), real=rate(47_000))
    setup = {"model": "a_model_of_a_name_that_goes_on", "loader": "dali_gpu", "threads": 16}
    setup |= {"global_batch_size": 2560, "replicas": 8, "on_gpu": True, "cores": 16} | changes
    return Profile(Setup(**setup), ceilings, memory_mib=140_000, trace="/tmp/a/trace")


def is_plain(text):
    assert max(map(len, text.splitlines())) <= 80, text
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert all(each == each.rstrip() for each in text.splitlines())
    return True


def test_a_profile_in_80_columns():
    text = str(profile())
    assert is_plain(text)
    assert "48,529" in text
    assert "verdict  the step limits the run: the run reaches 47,000 of the 48,529" in text
    assert "uv run --with xprof tensorboard --logdir /tmp/a/trace" in text
    assert "batches of 2,560 on 8 GPUs" in " ".join(text.split())
    assert repr(profile()) == text


def test_a_profile_as_json_and_as_html():
    table = profile(model="<script>alert(1)</script>")
    assert json.loads(json.dumps(table.as_dict()))["verdict"]["bound"] == "step"
    assert "<script>" not in table._repr_html_()
    assert "&lt;script&gt;" in table._repr_html_()
    assert table._repr_html_().count("<th ") == 4


START = {"data.loader": "tf_data", "dali.threads": 2, "dali.prefetch_batches": 2}
WHY = "loader='cache' keeps images of one size, but <b>they</b> have many; give stored_size"


def found():
    def measure(setting, left_s):
        if setting["data.loader"] == "cache":
            raise TrialError(WHY)
        return Sample(1000.0 * setting["dali.threads"], 1234)

    knobs = [Knob("data.loader", ("tf_data", "cache")), Knob("dali.threads", (1, 2, 4))]
    return search(START, knobs, measure, budget_s=1e6)


def test_a_search_in_80_columns():
    text = str(SearchTable(found(), remarks=("not tried: data.loader=memory " + "x " * 60,)))
    assert is_plain(text)
    assert "best: --config.dali.threads=4: 4,000 images/s, 2.00 times the 2,000 of the" in text
    assert "failed" in text
    assert "loader='cache' keeps images of one size" in text


def test_a_search_as_json_and_as_html():
    table = SearchTable(found(), written="tuned.py")
    values = json.loads(json.dumps(table.as_dict()))
    assert values["flags"] == ["--config.dali.threads=4"]
    assert [each["outcome"] for each in values["trials"]] == ["start", "failed", "kept"]
    assert "<b>" not in table._repr_html_()
    assert "written: tuned.py" in table._repr_html_()


def test_a_search_that_finds_nothing_says_so():
    alike = search(
        START, [Knob("dali.threads", (1, 2, 4))], lambda *_: Sample(1000.0), budget_s=1e6
    )
    table = SearchTable(alike)
    assert table.flags == []
    assert "the present setting, 1,000 images/s; no other is faster" in str(table)
