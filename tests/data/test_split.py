"""Sources that are divided into training and validation, or into folds."""

import numpy as np
import pytest

from tfaccel import UserError
from tfaccel.data.source import ArraySource, Blobs, ImageSource
from tfaccel.data.sources import fold, image_list, split


def files(counts, *, root="/data", groups=None):
    """Paths of classes with these numbers of images, in class order: /data/c0/g3_0001.jpg."""
    draw = np.random.default_rng(0)
    paths, labels = [], []
    for label, count in enumerate(counts):
        for index in range(count):
            group = f"g{draw.integers(groups)}_" if groups else ""
            paths.append(f"{root}/c{label}/{group}{index:04d}.jpg")
            labels.append(label)
    names = tuple(f"c{label}" for label in range(len(counts)))
    return ImageSource(Blobs(paths), np.array(labels, np.int32), names)


def names_of(source):
    return [source.images.name(index) for index in range(len(source))]


@pytest.mark.parametrize("counts", [(100, 100), (997, 90, 13), (7, 7, 7, 7, 7, 7, 7)])
@pytest.mark.parametrize("share", [0.2, 0.37, 0.9])
def test_each_class_has_its_share(counts, share):
    source = files(counts)
    train, validation = split(source, share)
    assert sorted(names_of(train) + names_of(validation)) == sorted(names_of(source))
    most = sum(min(share * each, each - 1) for each in counts)  # training sees each class
    assert len(validation) == pytest.approx(most, abs=2)
    held = np.bincount(validation.labels, minlength=len(counts))
    assert (np.abs(held - share * np.array(counts)) <= 1).all()
    assert train.class_names == validation.class_names == source.class_names
    for part in (train, validation):  # each image keeps its label
        assert [int(name.split("/")[2][1:]) for name in names_of(part)] == part.labels.tolist()


def test_a_class_of_one_image_is_trained_on():
    train, validation = split(files((40, 1, 1, 1, 1, 1)), 0.5)
    assert set(train.labels.tolist()) == set(range(6))
    assert set(validation.labels.tolist()) == {0}


def test_the_seed_alone_and_the_paths_decide():
    one, same, moved = (split(files((50, 30), root=root), 0.3)[1] for root in ("/a", "/a", "/b/c"))
    assert names_of(one) == names_of(same)
    assert [each.replace("/b/c/", "/a/") for each in names_of(moved)] == names_of(one)
    other = split(files((50, 30), root="/a"), 0.3, seed=1)[1]
    assert names_of(other) != names_of(one)
    # The order of the files does not matter.
    source = files((50, 30), root="/a")
    mixed = source.taken(np.random.default_rng(0).permutation(len(source)))
    assert set(names_of(split(mixed, 0.3)[1])) == set(names_of(one))
    # Most images stay in their part when some come in addition.
    more = split(files((55, 33), root="/a"), 0.3)[1]
    assert len(set(names_of(more)) & set(names_of(one))) > 0.8 * len(one)


@pytest.mark.parametrize("counts", [(50, 31, 7), (5, 5, 5)])
def test_each_image_is_in_one_fold(counts):
    source, seen = files(counts), []
    for index in range(5):
        train, validation = fold(source, index, num_folds=5)
        assert not set(names_of(train)) & set(names_of(validation))
        assert len(train) + len(validation) == len(source)
        held = np.bincount(validation.labels, minlength=len(counts))
        assert (np.abs(held - np.array(counts) / 5) < 1).all()
        assert len(validation) == pytest.approx(len(source) / 5, abs=1)
        seen += names_of(validation)
    assert sorted(seen) == sorted(names_of(source))


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_groups_stay_together_and_classes_are_balanced(share):
    source = files((300, 100, 50), groups=40)
    train, validation = split(source, share, group_pattern="^[^/]+/([^_]+)_")
    groups = [
        {name.split("/")[3].split("_")[0] for name in names_of(part)}
        for part in (train, validation)
    ]
    assert not groups[0] & groups[1]
    held = np.bincount(validation.labels, minlength=3) / (300, 100, 50)
    np.testing.assert_allclose(held, share, atol=0.06)
    assert len(validation) / 450 == pytest.approx(share, abs=0.03)
    again = split(files((300, 100, 50), groups=40), share, group_pattern="g[0-9]+")[1]
    assert names_of(again) == names_of(validation)  # without a parenthesis, all that matches


def test_folds_of_groups():
    source, seen = files((120, 60), groups=30), []
    for index in range(3):
        _, validation = fold(source, index, num_folds=3, group_pattern="g[0-9]+")
        assert len(validation) == pytest.approx(60, abs=8)
        seen.append({name.split("/")[3].split("_")[0] for name in names_of(validation)})
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_pairs_and_arrays_are_divided_too():
    paths = [f"/data/in/{index}.png" for index in range(10)]
    targets = [each.replace("in", "out") for each in paths]
    pairs = ImageSource(Blobs(paths), None, targets=Blobs(targets))
    train, validation = split(pairs, 0.3)
    assert (len(train), len(validation)) == (7, 3)
    for part in (train, validation):
        assert [part.targets.name(i) for i in range(len(part))] == [
            name.replace("in", "out") for name in names_of(part)
        ]
    pixels = np.arange(20, dtype=np.uint8).reshape(20, 1, 1, 1)
    labels = np.arange(20, dtype=np.int32) % 2
    train, validation = split(ArraySource(pixels, labels, ("a", "b")), 0.2)
    assert sorted([*train.images.ravel(), *validation.images.ravel()]) == list(range(20))
    assert np.bincount(validation.labels).tolist() == [2, 2]
    shards = Blobs(["/s/0.tar"], np.zeros(8, np.int32), np.arange(8) * 512, np.full(8, 9))
    train, validation = split(ImageSource(shards, np.zeros(8, np.int32), ("a",)), 0.25)
    assert (len(train), len(validation)) == (6, 2)


def test_a_column_of_a_list_has_the_groups(tmp_path):
    (tmp_path / "0.jpg").touch()
    lines = [f"{index}.jpg,{index % 2},p{index // 10}" for index in range(100)]
    file = tmp_path / "list.csv"
    file.write_text("\n".join(["path,label,Patient", *lines]))
    source = image_list(file, group_column="patient")
    assert source.groups.tolist() == [index // 10 for index in range(100)]
    train, validation = split(source, 0.3)
    numbers = {int(name.split("/")[-1][:-4]) // 10 for name in names_of(validation)}
    assert len(numbers) == 3
    assert len(validation) == 30
    assert not numbers & set((train.groups).tolist())
    assert image_list(file).groups is None
    with pytest.raises(UserError, match=r"'nurse', but .* the columns path, label, Patient;"):
        image_list(file, group_column="nurse")
    file.write_text("0.jpg 0\n")
    with pytest.raises(UserError, match=r"has no such column; it has 0.jpg 0: give"):
        image_list(file, group_column="patient")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: split(files((10,)), 0.0), "share=0.0; expected a number above 0"),
        (lambda: split(files((10,)), 1), "share=1; expected"),
        (lambda: split(files((10,)), 0.01), "10 images cannot be divided into training and"),
        (lambda: split(files((10,)), 0.5, seed=-1), "seed=-1"),
        (lambda: split(files((10,)), 0.5, group_pattern="("), "is no regular expression"),
        (lambda: split(files((9, 9)), 0.5, group_pattern="x"), "finds nothing in c0/0000.jpg"),
        (lambda: split(files((10,)), 0.5, group_pattern="^"), "1 group cannot be divided into tra"),
        (lambda: fold(files((10,)), 3, num_folds=3), "index=3"),
        (
            lambda: fold(files((2,)), 0, num_folds=3),
            "2 images cannot be divided into 3 folds; use nu",
        ),
        (
            lambda: fold(files((10, 10, 10)), 0, num_folds=12, group_pattern=r".\.jpg"),
            "10 groups cannot be divided into 12 folds; use num_folds of at most 10",
        ),
        (
            lambda: fold(files((10, 10, 10)), 0, num_folds=3, group_pattern="c."),
            "3 groups cannot be divided into 3 folds; give more groups of each class",
        ),
    ],
)
def test_mistakes_are_one_sentence(call, words):
    with pytest.raises(UserError) as error:
        call()
    assert words in str(error.value)


def test_what_is_held_out_is_said(caplog):
    caplog.set_level("INFO", "tfaccel")
    split(files((10,)), 0.2)
    assert "data: validation_split=0.2: 8 images train, 2 images test" in caplog.text
    fold(files((10, 10, 10)), 1, num_folds=5, group_pattern=r".\.jpg")
    assert (
        "data: fold 1 of 5 (the first is 0), by group_pattern: 24 images of 8 groups train, "
        "6 images of 2 groups test" in caplog.text
    )


def test_a_class_with_fewer_images_than_folds_is_told(caplog):
    fold(files((20, 3)), 0, num_folds=4)
    assert (
        "class c1 has 3 images, fewer than num_folds=4, so that at least 1 fold tests"
        in caplog.text
    )
    caplog.clear()
    fold(files((20, 4)), 0, num_folds=4)
    assert "fewer" not in caplog.text
