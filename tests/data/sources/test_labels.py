import numpy as np
import pytest

from tfaccel import UserError, sources
from tfaccel.data.sources.labels import from_text, named, numbered


def read(labels, **settings):
    return from_text(labels, name_of=lambda index: f"line {index}", **settings)


@pytest.mark.parametrize(
    "labels",
    [
        ["golden retriever", "german shepherd", "golden retriever"],
        ["tench, Tinca tinca", "goldfish, Carassius auratus"],
        ["class 1", "class 2", "class 3"],
        ["and/or", "AC/DC"],
        ["1a", "2b"],
        ["v1.0", "v1.5"],
        ["cat", "0.5"],
        ["nan", "Inf orchid"],
    ],
)
def test_names_of_classes_are_taken_for_names(labels):
    assert set(read(labels)[1]) == set(labels)


@pytest.mark.parametrize(
    "labels",
    [
        ["0.5", "1.25"],
        [".5", "1"],
        ["1", ".5"],
        ["1e-3", "2e-3"],
        ["1.5e+00", "-2.5e+00"],
        ["0,5", "1,5"],
        ["3.0", "4.0"],
        ["1", "nan"],
        ["inf", "1.0"],
    ],
)
def test_numbers_with_a_fraction_are_no_classes(labels):
    with pytest.raises(UserError, match=r"^line \d: the label is .* for a regression") as error:
        read(labels)
    assert "give run.examples your own (image, target)" in str(error.value)


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        (["a|b", "c"], "a|b"),
        (["a b", "a", "b"], "a b"),
        (["a;b", "a", "b"], "a;b"),
        (["a,b", "a", "b"], "a,b"),
        (["0 1", "1"], "0 1"),
        (["0|1", "1|0"], "0|1"),
        (["[0, 1]", "[1, 0]"], "[0, 1]"),
        (["['a', 'b']", "['a']"], "['a', 'b']"),
        # As the labels of a forest's pictures: few words make up many labels.
        (["clear", "clear primary", "clear water", "clear primary water"], "clear primary"),
    ],
)
def test_several_classes_in_one_label_are_named(labels, wrong):
    with pytest.raises(UserError) as error:
        read(labels)
    assert f"line {labels.index(wrong)}: the label is '{wrong}', which looks" in str(error.value)
    if "|" in wrong and not wrong[0].isdigit():
        assert read(labels, class_names=sorted(labels))[1] == tuple(sorted(labels))


def test_class_names_number_the_classes(caplog):
    assert read(["b", "c"], class_names=["a", "b", "c"])[0].tolist() == [1, 2]
    assert read(["1", "2"], class_names=["0", "1", "2"])[0].tolist() == [1, 2]
    assert read(["10", "9"], class_names=["10", "9", "x"])[0].tolist() == [0, 1]
    assert not caplog.text
    assert read(["1", "0"], class_names=["cat", "dog"])[0].tolist() == [1, 0]
    assert "numbers, so they are used as indices into class_names: 0 is cat" in caplog.text
    with pytest.raises(UserError, match=r"line 1: the label is 'd', which is not among the 3 cla"):
        read(["a", "d"], class_names=["a", "b", "c"])
    with pytest.raises(UserError, match=r"line 0: the label is 3; .* below 3, the number of cl"):
        read(["3"], class_names=["a", "b", "c"])


def test_identifiers_are_no_classes():
    for labels in (["12345678901234567890", "1"], ["12345678901234567890"]):
        with pytest.raises(UserError, match="the label is 12345678901234567890"):
            named(labels, name_of=str)


@pytest.fixture
def places(tmp_path):
    """The same four images in every source that has class names, by how to read it."""
    import io
    import tarfile

    import PIL.Image
    import tensorflow as tf

    (tmp_path / "npy").mkdir()
    for name in ("b", "c"):
        (tmp_path / "folders" / name).mkdir(parents=True)
        (tmp_path / "npy" / name).mkdir()
        PIL.Image.new("L", (4, 4)).save(tmp_path / "folders" / name / "0.png")
        np.save(tmp_path / "npy" / name / "0.npy", np.zeros((4, 4), np.uint8))
    (tmp_path / "list.csv").write_text("path,label\nfolders/b/0.png,b\nfolders/c/0.png,c\n")
    image = (tmp_path / "folders" / "b" / "0.png").read_bytes()
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        for name in (b"b", b"c"):
            kinds = {"image/encoded": image, "image/class/label": name}
            features = {
                key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[each]))
                for key, each in kinds.items()
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number in (1, 2):
            for extension, data in (("png", image), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    pixels, labels = np.zeros((2, 4, 4), np.uint8), np.array([1, 2])
    return [
        lambda **names: sources.class_folders(tmp_path / "folders", **names),
        lambda **names: sources.npy_folders(tmp_path / "npy", **names),
        lambda **names: sources.image_list(tmp_path / "list.csv", **names),
        lambda **names: sources.tfrecord(tmp_path / "x.tfrecord", **names),
        lambda **names: sources.webdataset(tmp_path / "x.tar", **names),
        lambda **names: sources.arrays(pixels, labels, **names),
    ]


def test_every_source_numbers_classes_by_class_names(places):
    for open_it in places:
        found = open_it(class_names=("a", "b", "c", "d"))
        assert found.class_names == ("a", "b", "c", "d")
        assert found.labels.tolist() == [1, 2]
        with pytest.raises(UserError, match="class_names"):
            open_it(class_names=("a", "b"))


def test_numbered_gives_a_name_for_each_number():
    labels, names = numbered(np.array([0, 2]), name_of=str)
    assert (labels.tolist(), names) == ([0, 2], ("0", "1", "2"))
