import os

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError
from tfaccel.data.sources import image_list
from tfaccel.data.sources.pillow import header, undecodable


@pytest.fixture
def listed(tmp_path):
    """Writes a list beside three images, and reads it."""
    for name in ("0.png", "1 b.png", "2.png"):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / name).touch()

    def read(text, **settings):
        (tmp_path / "list.txt").write_bytes(text.encode())
        return image_list(tmp_path / "list.txt", **settings)

    return read


@pytest.mark.parametrize(
    "text",
    [
        "path,label\nc/0.png,0\nc/1 b.png,2\nc/2.png,0\n",
        "\ufeffpath,label\r\nc/0.png,0\r\nc/1 b.png,2\r\nc/2.png,0",  # as Excel writes it
        "id;Class;Image\n7;0;c/0.png\n8;2;c/1 b.png\n9;0;c/2.png\n",
        'filename\tlabel\nc/0.png\t0\n"c/1 b.png"\t2\nc/2.png\t0\n\n',
        "c/0.png 0\nc/1 b.png 2\nc/2.png\t0\n",
    ],
)
def test_reads_paths_and_numbers(listed, tmp_path, text):
    source = listed(text)
    assert source.images.files == tuple(
        str(tmp_path / "c" / name) for name in ("0.png", "1 b.png", "2.png")
    )
    assert source.images.are_files
    assert source.labels.dtype == "int32"
    assert source.labels.tolist() == [0, 2, 0]
    assert source.class_names == ("0", "1", "2")


def test_names_are_sorted_as_text(listed):
    source = listed("path,class\nc/0.png,dog\nc/1 b.png,10\nc/2.png,9\n")
    assert source.class_names == ("10", "9", "dog")
    assert source.labels.tolist() == [2, 0, 1]


def test_paths_start_from_root_unless_they_are_absolute(listed, tmp_path):
    source = listed(f"0.png 0\n{tmp_path}/c/2.png 1\n", root=tmp_path / "c")
    assert source.images.files == (str(tmp_path / "c" / "0.png"), str(tmp_path / "c" / "2.png"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; expected a path and a label"),
        ("path,label\n", "has only a header"),
        ("path,labels\nc/0.png,0\n", "line 1 has the columns path, labels; expected one of label,"),
        ("c/0.png,0\n", "line 1 is 'c/0.png,0'; expected a path, blanks and a whole number"),
        ("c/0.png 0\nc/2.png\n", "line 2 is 'c/2.png'"),
        ("path,label\nc/0.png,0\nc/2.png\n", "line 3 is 'c/2.png'; expected a path in column 1"),
        ("path,label\nc/0.png,0\n\nc/2.png,1\n", "line 3 is ''"),
        ("path,label\nc/0.png,0\nc/2.png,\n", "line 3 is 'c/2.png,'"),
        ("path,label\nc/0.png,0\nc/2.png,1.0\n", "line 3: the label is '1.0'; expected a whole"),
        ("path,label\nc/0.png,0.0\n", "line 2: the label is '0.0'; expected a whole number or a"),
        ("c/0.png 0\nc/2.png -1\n", "line 2: the label is -1; expected the number of a class"),
        ("c/0.png 0\nc/2.png 99999999999999999999\n", "line 2 is 'c/2.png 99999999999999999999'"),
        (
            'path,label\nc/0.png,0\n"c/2.png,1\nc/0.png,1\n',
            "line 3 cannot be read as CSV (unexpect",
        ),
        (
            'path,label\nc/0.png,"0\n',
            "line 2 cannot be read as CSV (unexpected end of data); close",
        ),
        ('path,label\n"c/0.png,0\nc/2.png",1\n', "line 2 is '\"c/0.png,0'; expected a path in"),
        (
            'path,label\nc/0.png,0\n"c/2.png,1\n' + "c/0.png,1\n" * 20_000,
            "list.txt line 3 cannot be read as CSV (field larger than field limit",
        ),
        ("{" * 200_000, "line 1 is '{{{"),
        ("c/9.png 0\n", "c/9.png does not exist; relative paths start in"),
    ],
)
def test_names_the_line_at_fault(listed, text, words):
    with pytest.raises(UserError) as error:
        listed(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "settings"),
    [
        ("image_id,target,other", {}),
        ("ID;Category;other", {}),
        ("photo,species,label", {"path_column": "Photo", "label_column": "species"}),
        ("path,species,image", {"label_column": "species"}),
    ],
)
def test_columns_may_have_other_names(listed, header, settings):
    delimiter = ";" if ";" in header else ","
    rows = [delimiter.join(each) for each in (("c/0.png", "a", "x"), ("c/2.png", "b", "y"))]
    source = listed("\n".join([header, *rows]), **settings)
    assert source.class_names == ("a", "b")
    assert [name[-5:] for name in source.images.files] == ["0.png", "2.png"]


def test_a_missing_image_is_answered_with_its_line(tmp_path):
    for name in "ac":
        PIL.Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    (tmp_path / "bad.png").write_text("no image")
    (tmp_path / "list.csv").write_text("path,label\na.png,0\nc.png,1\nb.png,0\nbad.png,1\n")
    images = image_list(tmp_path / "list.csv").taken(np.array([0, 2, 3])).images
    header(images, 0)
    with pytest.raises(UserError) as missing:
        header(images, 1)
    assert str(missing.value) == (
        f"{tmp_path}/list.csv line 4: {tmp_path}/b.png does not exist; correct or remove the line, "
        "or train without such images by data.bad_files=skip"
    )
    with pytest.raises(
        UserError, match=r"list.csv line 5: .*bad.png cannot be read .*remove the l"
    ):
        header(images, 2)
    said = undecodable(images, 1)
    assert said.endswith(f"b.png (No such file or directory, named in {tmp_path}/list.csv line 4)")


def test_a_column_that_is_not_there_is_answered_with_those_that_are(listed):
    for name in ("path_column", "label_column"):
        words = rf"{name}='photo', but .* line 1 has the columns path, label; give one of them"
        with pytest.raises(UserError, match=words):
            listed("path,label\nc/0.png,0\n", **{name: "photo"})


@pytest.mark.parametrize(
    ("header", "settings", "words"),
    [
        ("photo,a,b", {"label_columns": ["a", "b"]}, "img, id: give path_column, or rename the c"),
        ("photo,a,b", {"path_column": "imageid"}, "has no such column; it has photo, a, b: give"),
        ("path;a;b", {}, "expected one of label, class, class_name, category, target: give lab"),
    ],
)
def test_only_the_column_that_is_not_there_is_asked_for(listed, header, settings, words):
    with pytest.raises(UserError) as error:
        listed(f"{header}\nc/0.png,0,1\n", **settings)
    assert words in str(error.value)
    assert "path_column and" not in str(error.value)


def test_paths_without_a_suffix_get_that_of_the_first_image(listed, tmp_path, caplog):
    caplog.set_level("INFO", "tfaccel")
    source = listed("image_id,label\nc/0,0\nc/1 b.png,1\nc/2,0\n")
    assert [os.path.basename(each) for each in source.images.files] == [
        "0.png",
        "1 b.png",
        "2.png",
    ]
    assert "without a suffix get .png" in caplog.text
    with pytest.raises(UserError, match=r"c/9 does not exist"):
        listed("image_id,label\nc/9,0\n")
    (tmp_path / "c" / "no suffix").touch()  # a file that is there stays as it is
    assert listed("image_id,label\nc/no suffix,0\n").images.files[0].endswith("no suffix")


def test_other_columns_may_have_several_lines(listed):
    text = 'text,path,label\n"one,\ntwo ""quoted""\n",c/0.png,1\nthree,c/2.png,0\n'
    assert listed(text).labels.tolist() == [1, 0]
    with pytest.raises(UserError, match=r"line 5 is 'four'"):
        listed(text.replace("three,c/2.png,0", "four"))


def test_a_missing_list_has_neighbours(tmp_path):
    (tmp_path / "train.csv").touch()
    with pytest.raises(UserError, match=r"does not exist; did you mean 'train.csv'"):
        image_list(tmp_path / "trian.csv")


def test_another_encoding_is_told_with_a_command(listed, tmp_path):
    listed("path,label\nc/0.png,a\n")  # makes the images
    file = tmp_path / "latin.csv"
    file.write_bytes("path,label\nc/0.png,é\n".encode("cp1252"))
    with pytest.raises(
        UserError, match=r"expected UTF-8; if it is Windows-1252: iconv -f WIN"
    ) as e:
        image_list(file)
    assert f"-t UTF-8 {file} > utf8.csv" in str(e.value)


@pytest.mark.parametrize(
    ("times", "words"), [(2, "1 line of {} repeats an image"), (3, "2 lines of {} repeat an image")]
)
def test_lines_that_repeat_an_image_are_counted(listed, tmp_path, caplog, times, words):
    source = listed("path,label\n" + "c/0.png,a\n" * times)
    assert len(source) == times
    assert words.split("{}")[0] in caplog.text
    assert words.split("{}")[1] in caplog.text
