"""Chosen classes in a chosen order, compared with a slow choice of single images."""

import logging

import numpy as np
import PIL.Image
import pytest

from tfaccel import UserError, sources
from tfaccel.config import DataConfig
from tfaccel.config.class_list import class_list
from tfaccel.data.source import ArraySource
from tfaccel.data.sources import select_classes
from tfaccel.experiment.open_data import open_source, open_sources

COUNTS = {"ant": 3, "bee": 2, "cat": 4, "dog": 2}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Class folders for training; the test folders lack the dog."""
    root = tmp_path_factory.mktemp("zoo")
    for split in ("training", "testing"):
        for name, count in COUNTS.items():
            for index in range(count if (split, name) != ("testing", "dog") else 0):
                file = root / split / name / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                PIL.Image.new("L", (4, 4)).save(file)
    return root


def named(source):
    """The file and the name of the class of each image."""
    names = [source.class_names[each] for each in source.labels]
    return list(zip([source.images.name(each) for each in range(len(source))], names, strict=True))


@pytest.mark.parametrize(
    "chosen", [("dog", "ant"), ("bee", "cat", "dog"), ("dog", "cat", "bee", "ant"), tuple(COUNTS)]
)
def test_the_images_of_the_classes_keep_their_order_and_names(zoo, chosen):
    whole = sources.class_folders(zoo / "training")
    found = select_classes(whole, chosen)
    assert found.class_names == chosen
    assert named(found) == [each for each in named(whole) if each[1] in chosen]
    assert found.labels.dtype == whole.labels.dtype == np.int32
    # Another order is other data, which a checkpoint refuses.
    facts = [select_classes(whole, each).facts() for each in (chosen, chosen[::-1])]
    assert facts[0] != facts[1]


def test_what_is_left_out_is_said(zoo, caplog):
    with caplog.at_level(logging.INFO, "tfaccel"):
        select_classes(sources.class_folders(zoo / "training"), ["dog", "ant"])
    assert (
        "data: 2 of 4 classes: dog, ant; 6 of 11 images left out, which have other classes"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (("dgo", "cat"), "classes has 'dgo', which is not a class of these images; did you mean "),
        (("zzz", "cat"), "which is not a class of these images; expected some of: ant, bee, cat,"),
    ],
)
def test_unknown_names_are_refused(zoo, chosen, words):
    with pytest.raises(UserError, match=words):
        select_classes(sources.class_folders(zoo / "training"), chosen)
    with pytest.raises(UserError, match=words):
        open_sources(DataConfig(root=str(zoo), classes=chosen))


def test_a_number_without_images_is_refused_in_training():
    source = ArraySource(np.zeros((4, 2, 2, 1), np.uint8), np.array([0, 0, 2, 3]), tuple("0123"))
    with pytest.raises(UserError, match="the class '1' of classes has no images; add some"):
        select_classes(source, ["3", "1"])
    assert select_classes(source, ["3", "1"], may_lack=True).labels.tolist() == [0]
    with pytest.raises(UserError, match="the class '1' of classes has no images"):
        select_classes(source, ["1"], may_lack=True)


@pytest.mark.parametrize("kind", ["pairs", "several"])
def test_images_without_one_class_each_are_refused(kind):
    images = np.zeros((4, 2, 2, 1), np.uint8)
    labels = np.zeros((4, 2), np.float32) if kind == "several" else None
    source = ArraySource(images, labels, ("a", "b"), images if kind == "pairs" else None)
    with pytest.raises(UserError, match="the choice of classes needs images with one class each"):
        select_classes(source, ["a", "b"])


def test_a_reordered_array_is_not_copied():
    images = np.arange(8, dtype=np.uint8).reshape(4, 2, 1, 1)
    source = ArraySource(images, np.array([0, 1, 1, 0], np.int32), ("a", "b"))
    found = select_classes(source, ["b", "a"])
    assert found.images is images
    assert found.labels.tolist() == [1, 0, 0, 1]


def test_a_config_chooses_for_training_and_test(zoo, caplog):
    caplog.set_level(logging.INFO, "tfaccel")
    data = DataConfig(root=str(zoo), classes="dog, cat")
    train, test = open_sources(data)
    assert train.class_names == test.class_names == ("dog", "cat")
    assert np.bincount(train.labels).tolist() == [2, 4]
    assert np.bincount(test.labels).tolist() == [0, 4]
    assert "data: training: 2 of 4 classes: dog, cat; 5 of 11 images left out" in caplog.text
    assert "data: test: 2 of 3 classes: dog, cat; 5 of 9 images left out" in caplog.text
    assert "there are no test images of these classes: dog" in caplog.text
    data = DataConfig(root=str(zoo), train="training", classes=["cat", "ant"], validation_split=0.4)
    train, test = open_sources(data)
    assert np.bincount(train.labels).tolist() == [2, 2]
    assert np.bincount(test.labels).tolist() == [2, 1]
    assert named(open_source(data, "test")) == named(test)


def test_lists_and_embedded_digits(zoo, tmp_path):
    files = [f"{zoo}/training/{name}/0.png,{name}" for name in COUNTS]
    numbers = [f"{zoo}/training/{name}/0.png,{place}" for place, name in enumerate(COUNTS)]
    for name, lines in (("names.csv", files), ("numbers.csv", numbers)):
        (tmp_path / name).write_text("\n".join(["path,label", *lines]))
    settings = {"root": str(tmp_path), "source": "csv"}
    found = open_source(DataConfig(**settings, train="names.csv", classes="dog,bee"), "train")
    assert named(found) == [(files[1].split(",")[0], "bee"), (files[3].split(",")[0], "dog")]
    found = open_source(DataConfig(**settings, train="numbers.csv", classes=(3, 1)), "train")
    assert found.class_names == ("3", "1")
    assert found.labels.tolist() == [1, 0]
    digits = open_source(DataConfig(classes="7,1"), "train")
    assert digits.class_names == ("7", "1")
    assert {each.split("/")[-2] for each in digits.images.files} == {"7", "1"}


def test_a_file_has_one_name_on_each_line(tmp_path):
    file = tmp_path / "pets.txt"
    file.write_text("\ufeffdog\n\n  cat, tabby \r\n7\n", encoding="utf-8")
    assert class_list(str(file)) == ("dog", "cat, tabby", "7")
    # The config of a run has the names themselves, so that it does not need the file again.
    assert DataConfig(classes=str(file)).classes == ("dog", "cat, tabby", "7")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("dog", r"classes='dog' has fewer than two classes; expected names such as dog,cat"),
        ((), r"classes=\(\) has fewer than two classes"),
        ("dog,,cat", "name 2 is ''"),
        (("dog", None), "name 2 is None"),
        (("dog", True), "name 2 is True"),
        ("dog,cat,dog", "has 'dog' twice; give each class once"),
        ("no_such.txt", r"classes='no_such.txt' cannot be read \(No such file"),
        (7, "classes=7 has fewer than two classes"),
        (0.5, "classes=0.5; expected names"),
    ],
)
def test_other_lists_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        DataConfig(classes=given)


@pytest.mark.parametrize("settings", [{"classes": "a,b"}, {"sampling": "balanced"}])
@pytest.mark.parametrize(
    ("kind", "have"),
    [
        ({"source": "pairs", "train_targets": "x", "test_targets": "y"}, "target images"),
        ({"source": "csv", "task": "multilabel"}, "several classes each"),
        ({"source": "csv", "task": "regression"}, "numbers for labels"),
    ],
)
def test_other_tasks_have_no_classes_to_choose_or_sample(settings, kind, have):
    with pytest.raises(UserError, match=f"needs images with one class each, but .* have {have}"):
        DataConfig(**kind, **settings)
