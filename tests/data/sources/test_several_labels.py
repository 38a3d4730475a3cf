"""Lists with several classes an image, or with numbers: what they say, and what is refused."""

import json

import numpy as np
import pytest

from tfaccel import UserError
from tfaccel.data.sources import image_list, split

PATHS = ("0.png", "1.png", "2.png")


@pytest.fixture
def listed(tmp_path):
    """Writes a list of three images, with a header and the text of each line, and reads it."""
    for name in PATHS:
        (tmp_path / name).touch()

    def read(header, *values, **settings):
        lines = [f"{path},{each}" for path, each in zip(PATHS, values, strict=True)]
        (tmp_path / "list.csv").write_text("\n".join([f"path,{header}", *lines]))
        return image_list(tmp_path / "list.csv", **settings)

    return read


@pytest.fixture
def plain(tmp_path):
    """Writes the lines after a blank of each image's path, and reads the list."""
    for name in PATHS:
        (tmp_path / name).touch()

    def read(*values, **settings):
        lines = [f"{path} {each}" for path, each in zip(PATHS, values, strict=True)]
        (tmp_path / "list.txt").write_text("\n".join(lines))
        return image_list(tmp_path / "list.txt", **settings)

    return read


def check(source, task, labels, names):
    assert source.task == task
    assert (source.class_names or source.target_names) == names
    assert bool(source.class_names) == (task != "regression")
    assert source.labels.dtype == ("int32" if task == "classes" else "float32")
    np.testing.assert_array_equal(source.labels, np.array(labels, source.labels.dtype))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (["a", "b", "c"], "list.csv has no column c; the classes of the training are a, b, c: add"),
        (["a"], "list.csv has a column b too, which is no class of the training; the classes of"),
        (["b", "a"], "list.csv has the columns of its labels in another order, a, b; the classes"),
    ],
)
def test_a_test_list_with_other_columns_is_named(listed, classes, words):
    with pytest.raises(UserError) as error:
        listed("a,b", "1,0", "0,1", "1,1", label_columns=["*"], class_names=classes)
    assert words in str(error.value)


def test_a_stray_value_among_flags_is_told(tmp_path, caplog):
    (tmp_path / "1.png").touch()

    def read(*, third="2", task="auto"):
        values = ["1,0", "0,1", f"0,{third}", *["1,1"] * 17]
        lines = [f"{index + 1}.png,{each}" for index, each in enumerate(values)]
        (tmp_path / "list.csv").write_text("\n".join(["path,a,b", *lines]))
        caplog.clear()
        return image_list(tmp_path / "list.csv", label_columns=["a", "b"], task=task).task

    assert read() == "regression"
    assert (
        "1 of 40 values is neither 0 nor 1 (first "
        f"{tmp_path}/list.csv line 4: the column b is '2'), so all are taken as numbers"
    ) in caplog.text
    assert "set data.task=multilabel, which refuses" in caplog.text
    assert read(task="regression") == "regression"
    assert "neither" not in caplog.text
    with pytest.raises(UserError, match="line 4: the column b is '2'; expected 0 or 1"):
        read(task="multilabel", third="2")
    with pytest.raises(UserError, match="line 4: the column b is empty; expected 0 or 1, as in"):
        read(third="")
    assert read(third="1") == "multilabel"
    assert "neither" not in caplog.text


def test_columns_of_flags_are_several_classes(listed, caplog):
    caplog.set_level("INFO", "tfaccel")
    wanted = [[1, 0], [0, 0], [1, 1]]
    for values in (("1,0", "0,0", "1,1"), ("1.0,0", "False,0", "True,1")):
        check(listed("a,b", *values, label_columns=["A", "b"]), "multilabel", wanted, ("a", "b"))
    assert "task=multilabel, because 2 columns a, b have only 0 and 1; 2 possible" in caplog.text
    assert "1 of 3 images without any" in caplog.text
    assert "exactly one" not in caplog.text
    listed("a,b", "1,0", "0,1", "0,1", label_columns="*")
    assert "each image has exactly one class, so consider task='classes'" in caplog.text


def test_one_hot_columns_are_one_class_where_it_is_asked_for(listed):
    values, settings = ("1,0", "0,1", "0,1"), {"label_columns": ["*"], "task": "classes"}
    check(listed("a,b", *values, **settings), "classes", [0, 1, 1], ("a", "b"))
    with pytest.raises(UserError, match=r"line 3: 2 of the 2 columns a, b are 1; expected exactly"):
        listed("a,b", "1,0", "1,1", "0,1", **settings)


def test_a_star_is_all_columns_but_those_of_the_path_and_the_group(listed):
    settings = {"label_columns": ["*"], "group_column": "who"}
    source = listed("a,who,b", "1,x,0", "0,y,0", "1,x,1", **settings)
    check(source, "multilabel", [[1, 0], [0, 0], [1, 1]], ("a", "b"))
    assert source.groups.tolist() == [0, 1, 0]
    source = listed("is_a,is_b,c", "1,0,9", "0,0,9", "1,1,9", label_columns=["is_*"])
    assert source.class_names == ("is_a", "is_b")
    source = listed("a_is,b_is", "1,0", "0,0", "1,1", label_columns=["*_is"])  # matches the line
    assert source.class_names == ("a_is", "b_is")


def test_a_minus_leaves_columns_out(listed):
    values = ("1,x,0,9", "0,y,0,9", "1,x,1,9")
    for patterns in ("*,-word,-is_x", "*,-Word*,-*_x", "-word,*,-word,-is_x"):
        source = listed("a,word,b,is_x", *values, label_columns=patterns.split(","))
        check(source, "multilabel", [[1, 0], [0, 0], [1, 1]], ("a", "b"))
    source = listed("a,-a", "1,0", "0,0", "1,1", label_columns=["a", "-a"])  # a name like that
    check(source, "multilabel", [[1, 0], [0, 0], [1, 1]], ("a", "-a"))
    with pytest.raises(UserError, match=r"no column '-c' for a label; it has path, a, b"):
        listed("a,b", "1,0", "0,0", "1,1", label_columns=["*", "-c"])
    with pytest.raises(UserError, match=r"the column word is 'x'; .*use label_columns=\*,-word$"):
        listed("a,word", "1,x", "0,y", "1,x", label_columns=["*"])


@pytest.mark.parametrize(
    "field", ["['a'", "['a', 1.5]", "[['a']]", "[" * 9000, "[f('a')]", "[b'a']"]
)
def test_what_only_begins_like_a_list_is_refused(listed, field):
    with pytest.raises(UserError, match=r"expected a list of names, such as"):
        listed("label", f'"{field}"', "['a']", "['a']", label_separator="json")


@pytest.mark.parametrize(
    ("fields", "separator", "said"),
    [
        (("cat|dog", "", "cat"), "|", "because the names of an image are separated by '|'; 2 po"),
        (("cat;dog", "dog", "cat"), ";", "separated by ';'"),
        (("cat dog", "dog", "cat"), " ", "separated by blanks"),
        (('"[""cat"", ""dog""]"', "[]", '"[""cat""]"'), "json", "the labels are lists of names"),
        (("\"['cat', 'dog']\"", "[]", "['cat']"), "json", "the labels are lists of names"),
    ],
)
def test_names_in_one_field_are_several_classes(listed, caplog, fields, separator, said):
    caplog.set_level("INFO", "tfaccel")
    wanted = [[1, 1], [0, int(fields[1] == "dog")], [1, 0]]
    check(listed("label", *fields), "multilabel", wanted, ("cat", "dog"))
    for settings in ({"task": "multilabel"}, {"label_separator": separator}):
        check(listed("label", *fields, **settings), "multilabel", wanted, ("cat", "dog"))
    assert said in caplog.text


def test_numbers_may_be_the_names_of_several_classes_if_asked_for(listed, plain):
    wanted = [[1, 1], [0, 1], [1, 0]]
    settings = {"task": "multilabel"}
    check(listed("label", "3;7", "7", "3", **settings), "multilabel", wanted, ("3", "7"))
    check(plain("3,7", "7", "3", **settings), "multilabel", wanted, ("3", "7"))


def test_the_classes_of_a_test_list_are_those_of_training(listed):
    settings = {"task": "multilabel", "class_names": ("bird", "cat", "dog")}
    source = listed("label", "cat", "", "dog|cat", **settings)
    check(source, "multilabel", [[0, 1, 0], [0, 0, 0], [0, 1, 1]], ("bird", "cat", "dog"))
    with pytest.raises(UserError, match=r"line 4: the label is 'cow', which is not among the 3"):
        listed("label", "cat", "", "cat|cow", label_separator="|", class_names=["a", "cat", "b"])
    source = listed("label", "cat", "AC/DC", "cat/AC/DC", task="classes")
    assert source.class_names == ("AC/DC", "cat", "cat/AC/DC")


def test_labels_with_a_fraction_are_numbers(listed, plain, caplog):
    caplog.set_level("INFO", "tfaccel")
    values = ("0.5", "-1e-1", "2")
    check(listed("target", *values), "regression", [[0.5], [-0.1], [2]], ("target",))
    check(plain(*values), "regression", [[0.5], [-0.1], [2]], ("label",))
    words = "because the labels are numbers, some with a fraction; target -0.1 to 2, standard devi"
    assert words in caplog.text
    source = listed("age", "3", "4", "5", label_column="age", task="regression")
    check(source, "regression", [[3], [4], [5]], ("age",))


def test_several_columns_of_numbers(listed, plain):
    wanted, values = [[0.5, 1], [0, 2], [3, 0]], ("0.5,1", "0,2", "3,0")
    source = listed("x,y", *values, label_columns=["x", "y"])
    check(source, "regression", wanted, ("x", "y"))
    check(listed("x,y", *values, label_columns="yx"), "regression", np.fliplr(wanted), ("y", "x"))
    check(plain(*(each.replace(",", " ") for each in values)), "regression", wanted, ("0", "1"))
    check(plain("1 0", "0 0", "1 1"), "multilabel", [[1, 0], [0, 0], [1, 1]], ("0", "1"))


def test_lines_of_json(tmp_path, listed):
    def read(*rows, **settings):
        named = zip(PATHS, rows, strict=True)
        lines = [json.dumps({"path": path, **row}) for path, row in named]
        (tmp_path / "list.jsonl").write_text("\n".join(lines))
        return image_list(tmp_path / "list.jsonl", **settings)

    source = read({"label": ["a", "b"]}, {"label": []}, {"label": ["a"]})
    check(source, "multilabel", [[1, 1], [0, 0], [1, 0]], ("a", "b"))
    source = read({"label": "b"}, {"label": "a"}, {"label": "b"})
    check(source, "classes", [1, 0, 1], ("a", "b"))
    settings = {"label_columns": ["x", "y"]}
    source = read({"x": 1.5, "y": 2}, {"x": -1, "y": 0}, {"y": 1e-3, "x": 0}, **settings)
    check(source, "regression", [[1.5, 2], [-1, 0], [0, 1e-3]], ("x", "y"))
    source = read({"x": True, "y": 1}, {"x": False, "y": 1}, {"x": 0, "y": 0}, **settings)
    check(source, "multilabel", [[1, 1], [0, 1], [0, 0]], ("x", "y"))
    for row, words in (
        ({"x": None, "y": 1}, r"line 3: the column x is empty; expected 0 or 1|a finite number"),
        ({"y": 1}, "line 3: the column x is empty"),
        ({"x": float("nan"), "y": 1}, "line 3: the column x is 'NaN'; expected a finite number"),
    ):
        with pytest.raises(UserError, match=words):
            read({"x": 1, "y": 1}, {"x": 1, "y": 0}, row, **settings)
    with pytest.raises(UserError, match=r"label_columns=x,z, but .* has no column 'z' for a label"):
        read(*[{"x": 1, "y": 1}] * 3, label_columns=["x", "z"])
    (tmp_path / "list.jsonl").write_text('{"path": "0.png", "label": 1}\n["1.png", 2]')
    with pytest.raises(UserError, match=r"line 2 is '\[.*; expected an object of JSON on each"):
        image_list(tmp_path / "list.jsonl")


@pytest.mark.parametrize(
    ("values", "settings", "words"),
    [
        (("1,0", "", "1,1"), {}, "line 3 is '1.png,'; expected a path in column 1 and labels in 2"),
        (("1,0", "0,", "1,1"), {}, "line 3: the column b is empty; expected 0 or 1, as in the"),
        (("1,0", "0,", "1,1"), {"task": "regression"}, "b is empty; expected a finite number"),
        (("7,0", "0,", "1,1"), {}, "line 3: the column b is empty; expected a finite number"),
        (("1,0", "0,x", "1,1"), {}, "line 3: the column b is 'x'; expected a finite number"),
        (("1,0", "0,nan", "1,1"), {}, "line 3: the column b is 'nan'; expected a finite number"),
        (("1,0", "0,1e99", "1,1"), {}, "line 3: the column b is '1e99'; expected a finite number"),
        (("1,0", "0,2", "1,1"), {"task": "multilabel"}, "b is '2'; expected 0 or 1: mend the line"),
        (("1,0", "0,1", "1,1"), {"label_columns": ["c"]}, "has no column 'c' for a label; it has"),
        (("1,0", "0,1", "1,1"), {"class_names": ["b", "a"]}, "give label_columns in the order of"),
        (("1,0", "0,1", "1,1"), {"label_separator": ";"}, "is for names in one column: remove it"),
        (("1,0", "0,1", "1,1"), {"label_column": "a"}, "label_column and label_columns are both"),
        (("1,0", "0,1", "1,1"), {"task": "both"}, "task='both'; expected one of: auto, classes"),
    ],
)
def test_the_line_and_column_at_fault_are_named(listed, values, settings, words):
    with pytest.raises(UserError) as error:
        listed("a,b", *values, **{"label_columns": ["a", "b"]} | settings)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "settings", "words"),
    [
        (("0.5", "", "1"), {}, "line 3: the column label is empty; expected a finite number"),
        (("0.5", "nan", "1"), {}, "line 3: the column label is 'nan'; expected a finite number"),
        (("a", "", "b"), {}, "line 3 is '1.png,'; expected a path in column 1 and a label in col"),
        (
            ("1.0", "2.0", "3.0"),
            {},
            "for a regression, with numbers as targets, in a list use task",
        ),
        (("0.5", "1", "1"), {"task": "classes"}, "the label is '0.5'; expected a whole number or"),
        (("a|b", "a", "b"), {"task": "classes"}, "in a list use task='multilabel'"),
        (("0 1", "1", "0"), {}, "in a list use task='multilabel' (--config.data.task=multilabel)"),
        (
            ("[a", "[]", "[]"),
            {"label_separator": "json"},
            "line 2: the label is '[a'; expected a li",
        ),
        (("", "", ""), {"task": "multilabel"}, "no image has a class"),
        (
            ("a", "b", "c"),
            {"task": "regression"},
            "line 2: the column label is 'a'; expected a fin",
        ),
    ],
)
def test_a_field_at_fault_is_named(listed, values, settings, words):
    with pytest.raises(UserError) as error:
        listed("label", *values, **settings)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_split_has_the_same_share_of_the_rarest_classes(tmp_path):
    random = np.random.default_rng(0)
    flags = (random.random((400, 3)) < (0.5, 0.3, 0.1)).astype(int)
    lines = [f"{index}.png," + ",".join(map(str, each)) for index, each in enumerate(flags)]
    (tmp_path / "0.png").touch()
    (tmp_path / "list.csv").write_text("\n".join(["path,a,b,c", *lines]))
    source = image_list(tmp_path / "list.csv", label_columns=["*"])
    train, test = split(source, 0.25)
    assert len(test) == 100
    assert train.class_names == test.class_names == ("a", "b", "c")
    shares = test.labels.sum(axis=0) / flags.sum(axis=0)
    assert shares[2] == pytest.approx(0.25, abs=0.02)  # the rarest, which is dealt first
    np.testing.assert_allclose(shares, 0.25, atol=0.06)
    numbers = image_list(tmp_path / "list.csv", label_columns=["*"], task="regression")
    train, test = split(numbers, 0.25)
    assert (len(train), len(test), test.target_names) == (300, 100, ("a", "b", "c"))


def test_other_labels_are_other_facts(listed):
    one = listed("x,y", "0.5,1", "0,2", "3,0", label_columns=["x", "y"])
    other = listed("x,y", "0.5,1", "0,2", "3,0.25", label_columns=["x", "y"])
    assert one.facts() != other.facts()
    assert one.facts() == listed("x,y", "0.5,1", "0,2", "3,0", label_columns="xy").facts()
    assert "with the numbers x, y" in repr(one)


def read_lines(tmp_path, *lines, header="path,label", **settings):
    for name in PATHS:
        (tmp_path / name).touch()
    (tmp_path / "list.csv").write_text("\n".join([header, *lines]))
    return image_list(tmp_path / "list.csv", **{"task": "multilabel"} | settings)


@pytest.mark.parametrize(
    ("lines", "settings", "labels", "names"),
    [
        (
            ["0,red cell", "1,", "0,b", "2,b", "0,b"],
            {},
            [[1, 1], [0, 0], [1, 0]],
            ("b", "red cell"),
        ),
        (["0,a|b", "1,a", "./0,c", "2,b"], {}, [[1, 1, 1], [1, 0, 0], [0, 1, 0]], ("a", "b", "c")),
        (
            ["0,a+b", "1,a", "0,c"],
            {"label_separator": "+"},
            [[1, 1, 1], [1, 0, 0]],
            ("a", "b", "c"),
        ),
        (['0,"[""a"", ""b""]"', "0,[]", "1,[]"], {}, [[1, 1], [0, 0]], ("a", "b")),
        (["0,7", "0,12", "1,7"], {}, [[1, 1], [0, 1]], ("12", "7")),
        (["0,a", "0,b"], {"class_names": ("b", "x", "a")}, [[1, 0, 1]], ("b", "x", "a")),
    ],
)
def test_several_lines_of_an_image_are_its_classes(
    tmp_path, caplog, lines, settings, labels, names
):
    caplog.set_level("INFO", "tfaccel")
    lines = [each.replace(",", ".png,", 1) for each in lines]
    source = read_lines(tmp_path, *lines, **settings)
    check(source, "multilabel", labels, names)
    assert [each[-5:] for each in source.images.files] == list(PATHS[: len(labels)])
    assert f"{len(lines)} lines of {tmp_path / 'list.csv'} for {len(labels)} image" in caplog.text
    assert "because of task='multilabel'; " in caplog.text


def test_lines_of_an_image_keep_its_group_and_its_line_in_errors(tmp_path):
    lines, header = ("0.png,a,x", "1.png,a,y", "0.png,b,x", "2.png,c,y"), "path,label,who"
    source = read_lines(tmp_path, *lines, header=header, group_column="who")
    assert source.groups.tolist() == [0, 1, 1]
    with pytest.raises(UserError, match=r"list.csv line 5: the label is 'c', which is not among"):
        read_lines(tmp_path, *lines, header=header, class_names=["a", "b"])
    with pytest.raises(UserError, match=r"lines 2 and 4 give .* or use task='multilabel'"):
        read_lines(tmp_path, *lines, header=header, task="auto")


def test_lines_that_only_repeat_an_image_still_count_more_than_once(tmp_path, caplog):
    source = read_lines(tmp_path, "0.png,a|b", "1.png,a", "0.png,a|b")
    check(source, "multilabel", [[1, 1], [1, 0], [1, 1]], ("a", "b"))
    assert "such images count more than once" in caplog.text
