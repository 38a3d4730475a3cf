"""Parquet files are those that pyarrow's users expect, and what they cannot have is refused."""

import importlib.util
import os
import pathlib

import pytest

from tfaccel.common.errors import UserError
from tfaccel.experiment import row_files
from tfaccel.experiment.row_files import Column, Csv, form_of

COLUMNS = [Column("image", str), Column("chance", float), Column("error", str)]


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra `parquet`")


def parts_of(form, folder, sizes):
    """Files of so many rows each; every fifth row has an error in place of a number."""
    parts, rows = [], []
    for size in sizes:
        some = range(len(rows), len(rows) + size)
        new = [
            (f"{i}é.png", 1 / (i + 1) if i % 5 else None, None if i % 5 else "bad") for i in some
        ]
        parts.append(folder / f"{len(parts)}{form.ending}")
        parts[-1].write_bytes(form.encoded(COLUMNS, new))
        rows += new
    return parts, rows


def test_texts_are_strings_and_numbers_float32_with_null_for_no_value(parquet, tmp_path):
    form = form_of(tmp_path / "a.PARQUET")
    parts, rows = parts_of(form, tmp_path, [7, 7, 3])
    with open(tmp_path / "a.parquet", "wb") as file:
        form.join(COLUMNS, parts, file)
    table = parquet.read_table(tmp_path / "a.parquet")
    assert [str(each) for each in table.schema.types] == ["string", "float", "string"]
    assert table["image"].to_pylist() == [each[0] for each in rows]
    assert table["error"].to_pylist() == [each[2] for each in rows]
    found = table["chance"].to_pylist()
    assert [each is None for each in found] == [each[1] is None for each in rows]
    wanted = [each[1] for each in rows if each[1] is not None]
    assert [each for each in found if each is not None] == pytest.approx(wanted, rel=1e-7)
    assert [form.num_filled(COLUMNS, 2, each) for each in parts] == [2, 1, 1]


def test_a_row_group_has_whole_parts_and_a_bounded_number_of_values(parquet, tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "VALUES_PER_GROUP", 3 * 10)
    form = form_of(tmp_path / "a.parquet")
    parts, rows = parts_of(form, tmp_path, [4, 4, 4, 4, 4, 4, 2])
    with open(tmp_path / "a.parquet", "wb") as file:
        form.join(COLUMNS, parts, file)
    written = parquet.ParquetFile(tmp_path / "a.parquet").metadata
    groups = [written.row_group(each).num_rows for each in range(written.num_row_groups)]
    assert groups == [12, 12, 2]
    assert parquet.read_table(tmp_path / "a.parquet")["image"].to_pylist() == [r[0] for r in rows]


def test_names_that_are_not_utf8_are_refused_before_the_work_and_in_errors_escaped(
    parquet, tmp_path
):
    form, bad = form_of(tmp_path / "a.parquet"), os.fsdecode(b"caf\xe9.png")
    form.check(COLUMNS, ["café.png"])
    for columns, texts in ((COLUMNS, ["a", bad]), ([*COLUMNS, Column(bad, float)], ["a"])):
        with pytest.raises(UserError, match=r"caf\\xe9\.png is not valid UTF-8.*ends in \.csv"):
            form.check(columns, texts)
    Csv().check(COLUMNS, [bad])
    path = tmp_path / "part.parquet"
    path.write_bytes(form.encoded(COLUMNS, [("a", None, f"cannot open {bad}")]))
    assert parquet.read_table(path)["error"].to_pylist() == [r"cannot open caf\udce9.png"]


def test_a_file_without_rows_has_the_columns(parquet, tmp_path):
    with open(tmp_path / "a.parquet", "wb") as file:
        form_of(tmp_path / "a.parquet").join(COLUMNS, [], file)
    assert parquet.read_table(tmp_path / "a.parquet").column_names == ["image", "chance", "error"]


def test_without_pyarrow_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs pyarrow.*--extra parquet.*'tfaccel\[parquet\]'"):
        form_of(pathlib.Path("answers.parquet"))
    assert isinstance(form_of(pathlib.Path("answers.CSV")), Csv)


@pytest.mark.parametrize(("name", "said"), [("a.txt", r"ends in \.txt"), ("a", "ends in nothing")])
def test_other_endings_are_refused(name, said):
    with pytest.raises(UserError, match=rf"{said}; give a file that ends in \.csv or \.parquet"):
        form_of(pathlib.Path(name))
