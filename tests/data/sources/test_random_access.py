"""Objects with a length and items as sources: of one's own, and Grain's."""

import numpy as np
import pytest
from encoded_images import epochs_of, png

from tfaccel import UserError, sources
from tfaccel.data.scan.files import scan_files
from tfaccel.data.sources import pillow

NUM = 9


class Mine:
    """Items in some form."""

    def __init__(self, form, count=NUM):
        self.form, self.count, self.asked = form, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked += 1
        return self.form(index)


FORMS = {
    "mapping": lambda i: {"image": png(i), "label": i % 2, "id": i},
    "NumPy's types": lambda i: {"image": np.array(png(i), object), "label": np.int64(i % 2)},
    "tuple": lambda i: (png(i), i % 2),
    "names": lambda i: (bytearray(png(i)), ("cat", "dog")[i % 2]),
    "bytes": lambda i: (memoryview(png(i)), (b"cat", b"dog")[i % 2]),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_items(form):
    source = sources.random_access(Mine(FORMS[form]))
    assert source.labels.tolist() == [index % 2 for index in range(NUM)]
    assert source.class_names == (("cat", "dog") if form in ("names", "bytes") else ("0", "1"))
    assert [source.images.read(index) for index in range(NUM)] == list(map(png, range(NUM)))
    assert source.images.name(3) == "item 3 of Mine"
    assert source.taken(np.array([5])).images.read(0) == png(5)


def test_known_labels_are_not_looked_for():
    mine = Mine(FORMS["tuple"])
    source = sources.random_access(mine, labels=["b", "a"] * 4 + ["b"], class_names=("b", "a"))
    assert source.labels.tolist() == [0, 1] * 4 + [0]
    assert mine.asked == 1  # the first, whose form is checked


def test_epochs_are_those_of_files(setup, tmp_path):
    for index in range(NUM):
        (tmp_path / "01"[index % 2]).mkdir(exist_ok=True)
        (tmp_path / "01"[index % 2] / f"{index}.png").write_bytes(png(index))
    files = sources.class_folders(tmp_path)
    order = [int(name.rpartition("/")[2][:-4]) for name in files.images.files]
    source = sources.random_access(Mine(lambda i: (png(order[i]), order[i] % 2)))
    ours = epochs_of(setup(), source, loader="tf_data")
    theirs = epochs_of(setup(), files, loader="tf_data")
    resumed = epochs_of(setup(), source, first=1, loader="tf_data")
    for (x, y), (other, labels) in zip(ours + resumed, theirs + theirs[1:], strict=True):
        np.testing.assert_array_equal(x, other)
        np.testing.assert_array_equal(y, labels)


def test_an_audit_keeps_nothing_of_another_object(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for count, bad in ((NUM, [4]), (NUM, [])):
        mine = Mine(lambda i, bad=bad: (b"none" if i in bad else png(i), 0), count)
        report = scan_files(sources.random_access(mine), num_workers=1, progress=False)
        assert (report.bad_ids.tolist(), report.num_reused) == (bad, 0)


def test_wrong_objects():
    for items, said in (
        (iter([]), "has no length and items; expected an object with __len__ and __getitem__"),
        ([], "list has no items"),
        ([3], "item 0 of list is of type int; expected a mapping or a tuple"),
        ([{"x": 1}], "item 0 of list has no 'image', only x; give the keys"),
        ([(b"", 0), (b"", "a")], "some labels of list are numbers and others names"),
        ([(b"", 0.5)], "the label of item 0 of list is 0.5; expected a whole number or a name"),
    ):
        with pytest.raises(UserError, match=said):
            sources.random_access(items)
    with pytest.raises(UserError, match="2 labels for 1 items; give one for each"):
        sources.random_access([(b"", 0)], labels=[0, 1])
    with pytest.raises(UserError, match=r"of type ndarray; .*use run.examples; TFDS gives bytes"):
        sources.random_access([(np.zeros((3, 3, 3)), 0)])


@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_key_has_its_own_cure_alone(place):
    good = {"image": png(0), "label": 0}
    for wrong, words in (
        ({"img": b"x", "label": 1}, "has no 'image', only img, label; give the keys as image="),
        ({"image": np.zeros((2, 2)), "label": 1}, "use run.examples"),
    ):
        items = [good, good]
        items[place] = wrong
        with pytest.raises(UserError, match=words) as error:
            pillow.header(sources.random_access(items, labels=[0, 1]).images, place)
        assert "move it away" not in str(error.value)
        assert str(error.value).count(f"item {place} of list") == 1


def test_grain(tmp_path):
    grain = pytest.importorskip("grain", reason="Grain is not installed")
    library = pytest.importorskip("array_record.python.array_record_module")
    writer = library.ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1")
    for index in range(NUM):
        writer.write(bytes([index % 2]) + png(index))
    writer.close()
    records = grain.sources.ArrayRecordDataSource([str(tmp_path / "x.array_record")])
    data = grain.MapDataset.source(records).map(lambda each: {"label": each[0], "image": each[1:]})
    source = sources.random_access(data)
    assert source.labels.tolist() == [index % 2 for index in range(NUM)]
    assert [source.images.read(index) for index in range(NUM)] == list(map(png, range(NUM)))
