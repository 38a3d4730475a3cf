import pytest
from loaded_tool import loaded


@pytest.fixture(scope="module")
def bench():
    with loaded("bench_growth") as module:
        yield module


def test_the_exponent_is_the_power_of_the_size(bench):
    sizes = (10, 100, 1000)
    assert bench.exponent([0.01, 0.1, 1.0], sizes) == "1.00"
    assert bench.exponent([0.01, 0.1, 10.0], sizes) == "2.00"
    assert bench.exponent([0.1, 0.01, 10.0], sizes) == ""  # too short to say
    assert bench.exponent([0.1, 1.0, None], sizes) == ""


def test_the_table_has_a_line_for_each_stage(bench):
    found = {"list": {10: {"list": 0.1, "mib": 3}, 100: {"list": 1.0, "mib": 30}}}
    lines = bench.table(found, (10, 100)).splitlines()
    assert lines[2] == "| list | list | 0.1 s | 1 s | 1.00 |"
    assert lines[3] == "| list | memory | 3 MiB | 30 MiB |  |"
    failed = bench.table({"list": {10: None}}, (10,))
    assert "| list | failed | failed |  |" in failed


def test_trees_are_of_links_and_have_all_images(bench, tmp_path):
    bench.make_data(tmp_path, 200, ["classes", "csv", "pairs"])
    files = list((tmp_path / "tree").glob("*/*.png"))
    assert len(files) == 200
    assert len({each.stat().st_ino for each in files}) <= bench.NUM_ORIGINALS
    assert len(list((tmp_path / "classes").iterdir())) == 20
    assert len((tmp_path / "list.csv").read_text().splitlines()) == 201
    found = bench._stages("csv", tmp_path, None, __import__("tfaccel").sources)
    assert found["list"] >= 0
