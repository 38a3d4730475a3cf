"""Scans of planted files: the exact list, what is kept between scans, and what is left out."""

import logging
import os
import pathlib
import subprocess
import sys
import tarfile

import numpy as np
import PIL.Image
import planted
import pytest
from conftest import on_terminal

from tfaccel.common.errors import UserError
from tfaccel.data.scan import files
from tfaccel.data.scan.examine import KINDS
from tfaccel.data.scan.manifest import Manifest
from tfaccel.data.source import Blobs, ImageSource

ONE_OF_EACH = {planted.kind_of(name): name for name in reversed(planted.FAULTY)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tfaccel" / "audit"


def source_of(paths, targets=None):
    paths = tuple(map(str, paths))
    targets = targets and Blobs(tuple(map(str, targets)))
    labels = None if targets else np.arange(len(paths), dtype=np.int32) % 3
    return ImageSource(Blobs(paths), labels, ("a", "b", "c"), targets)


def written(folder, contents):
    """Files of these names and bytes; None for a link that leads nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        if data is None:
            (folder / name).symlink_to(folder / "nothing")
        else:
            (folder / name).write_bytes(data)
    return sorted(folder / name for name in contents)


def scan(source, **settings):
    return files.scan_files(source, num_workers=2, progress=False, **settings)


def plant(folder, num_images):
    """Images of which 1% have each kind of fault; returns the paths and what is to be found."""
    good = list(planted.GOOD.items())
    contents, expected = {}, []
    for index in range(num_images):
        name, data = good[index % len(good)]
        contents[f"{index:04d}.{name.split('.')[-1]}"] = data
    for place, kind in enumerate(sorted(set(KINDS) - planted.NOT_OF_BYTES)):
        for number in range(num_images // 100):
            name = ONE_OF_EACH[kind]
            path = f"{place * 37 + number * 5:04d}-{name}"
            contents[path] = planted.FAULTY[name]
            expected.append((KINDS[kind], kind, str(folder / path)))
    for number in range(num_images // 100):
        contents[f"0500-{number}.jpg"] = None
        expected.append(("bad", "missing", str(folder / f"0500-{number}.jpg")))
    return written(folder, contents), sorted(expected)


def test_the_list_of_a_thousand_images_is_exact(tmp_path):
    paths, expected = plant(tmp_path / "images", 1000)
    report = scan(source_of(paths))
    assert [(each.severity, each.kind, each.name) for each in report.faults] == expected
    assert all(str(paths[each.id]) == each.name for each in report.faults)
    bad = sorted(paths.index(pathlib.Path(name)) for how, _, name in expected if how == "bad")
    np.testing.assert_array_equal(report.bad_ids, bad)
    left = files.usable(source_of(paths), report)
    assert len(left) == len(paths) - len(bad)
    assert scan(left).bad_ids.size == 0


def test_a_pair_of_two_sizes_and_an_image_less_than_its_crop(tmp_path, monkeypatch):
    def png(height, width):
        return planted.encoded(PIL.Image.new("RGB", (width, height)), "PNG")

    sizes = {"a": (9, 8), "b": (9, 8), "c": (7, 8), "d": (9, 8), "e": (6, 7)}
    inputs = written(tmp_path / "in", {f"{name}.png": png(*size) for name, size in sizes.items()})
    (tmp_path / "in/d.png").write_bytes(b"")  # its size is not asked for
    targets = written(tmp_path / "out", {f"{name}.png": png(9, 8) for name in sizes})
    source = source_of(inputs, targets)
    report = scan(source, smallest=(7, 8))
    assert [(each.kind, each.cause, each.id) for each in report.faults] == [
        ("empty", "no bytes", 3),
        ("small", "6 x 7 pixels, but 7 x 8 pixels are cut out", 4),
        ("two_sizes", "7 x 8 pixels (height x width), but its target has 9 x 8 pixels", 2),
        ("two_sizes", "6 x 7 pixels (height x width), but its target has 9 x 8 pixels", 4),
    ]
    assert files.usable(source, report).images.files == tuple(map(str, inputs[:2]))
    assert {each.kind for each in scan(source_of(inputs), smallest=(7, 8)).faults} == {
        "empty",
        "small",
    }
    assert {each.kind for each in scan(source_of(inputs)).faults} == {"empty"}
    # Sizes are kept: nothing is read again.
    monkeypatch.setattr(Blobs, "read", lambda blobs, index: pytest.fail("read again"))
    again = scan(source, smallest=(7, 8))
    assert (again.faults, again.num_reused) == (report.faults, 10)


def test_the_written_list(tmp_path):
    contents = {"b\tb.jpg": b"", "a.gif": planted.GIF, "c.jpg": planted.PNG, "d.jpg": planted.JPEG}
    folder = tmp_path / "images"
    report = scan(source_of(written(folder, contents)))
    report.write(tmp_path / "list.txt")
    expected = (
        f"bad\tempty\t{folder}/b\\tb.jpg\tno bytes\n"
        f"bad\tunsupported\t{folder}/a.gif\tGIF, which not every loader decodes\n"
        f"note\twrong_extension\t{folder}/c.jpg\tPNG content\n"
    )
    assert (tmp_path / "list.txt").read_text() == expected
    assert report.list_path.read_text() == expected
    assert report.summary("train") == (
        "train: 4 examples; bad: 1 empty, 1 unsupported; notes: 1 wrong_extension; listed in "
        f"{report.list_path}"
    )


# What is kept between scans.


def looked_at(monkeypatch):
    """The images that are decoded from now on, by their bytes."""
    seen = []
    examine = files.examine
    monkeypatch.setattr(
        files, "examine", lambda data, **names: seen.append(data) or examine(data, **names)
    )
    return seen


def test_a_second_scan_looks_at_changed_files_alone(tmp_path, monkeypatch):
    contents = {"a.jpg": planted.JPEG, "b.jpg": b"", "c.png": planted.PNG, "d.jpg": planted.PNG}
    paths = written(tmp_path / "images", contents)
    first = scan(source_of(paths))
    seen = looked_at(monkeypatch)
    again = scan(source_of(paths))
    assert (first.num_reused, again.num_reused, seen) == (0, 4, [])
    assert again.faults == first.faults

    paths[2].write_bytes(b"hello")  # other bytes
    (tmp_path / "new").write_bytes(planted.WEBP[:-100] + bytes(100))
    stat = os.stat(paths[0])
    (tmp_path / "new").rename(paths[0])  # another file, with the time of the first
    os.utime(paths[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    paths += written(tmp_path / "images", {"e.jpg": planted.JPEG})  # one more
    report = scan(source_of(paths))
    assert len(seen) == 3
    assert report.num_reused == 2
    assert {each.kind for each in report.faults} >= {"not_an_image", "empty", "wrong_extension"}


def test_part_of_a_folder_is_known_too(tmp_path, monkeypatch):
    contents = {f"{index}.jpg": planted.JPEG for index in range(5)}
    paths = written(tmp_path / "images", contents)
    scan(source_of(paths))
    seen = looked_at(monkeypatch)
    assert scan(source_of(paths[1:3])).num_reused == 2
    assert scan(source_of(paths)).num_reused == 5
    assert seen == []


@pytest.mark.parametrize("damage", [b"", b"nonsense", "cut", "flipped"])
def test_a_damaged_manifest_is_named_and_ignored(damage, tmp_path, cache, caplog):
    paths = written(tmp_path / "images", {"a.jpg": planted.JPEG, "b.jpg": b""})
    first = scan(source_of(paths))
    (manifest,) = cache.glob("*.npz")
    whole = manifest.read_bytes()
    if damage == "cut":
        damage = whole[: len(whole) // 2]
    elif damage == "flipped":
        damage = bytearray(whole)
        damage[whole.index(b"NUMPY") + 130] ^= 1  # in the first array's numbers
    manifest.write_bytes(damage)
    again = scan(source_of(paths))
    assert f"{manifest} is damaged" in caplog.text
    assert (again.num_reused, again.faults) == (0, first.faults)
    assert scan(source_of(paths)).num_reused == 2


def test_two_processes_write_at_once(tmp_path, cache):
    paths = written(tmp_path / "images", {f"{i}.jpg": planted.JPEG for i in range(4)})
    blobs = source_of(paths).images
    cache.mkdir(parents=True)
    one, other = Manifest(cache, blobs), Manifest(cache, blobs)
    one.add(one.key(0), [("cmyk", "x")], (5, 6))
    other.add(other.key(1), [], (2**31 - 1, 2**31 - 1))
    one.save()
    other.save()
    assert Manifest(cache, blobs).found(one.key(1)) == ([], (2**31 - 1, 2**31 - 1))
    assert [each.suffix for each in cache.iterdir()] == [".npz"]  # nothing unfinished is left


def test_what_was_done_is_kept_when_a_scan_is_interrupted(tmp_path, monkeypatch):
    contents = {f"{i:03d}.jpg": planted.JPEG if i < 100 else b"the rest" for i in range(200)}
    paths = written(tmp_path / "images", contents)
    monkeypatch.setattr(files, "CHUNK", 10)

    def interrupted(data, **names):
        if data == b"the rest":
            raise KeyboardInterrupt
        return [], (1, 1)

    with monkeypatch.context() as patch:
        patch.setattr(files, "examine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scan(source_of(paths))
    assert scan(source_of(paths)).num_reused == 100


@pytest.mark.parametrize("letter", ["x", "\u00e9"])
def test_a_folder_may_have_a_long_name(tmp_path, letter):
    name = letter * (245 // len(letter.encode()))
    paths = written(tmp_path / name, {"0.png": planted.PNG, "1.png": planted.PNG})
    assert scan(source_of(paths)).list_path.name.startswith(name[:30])


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    paths = written(tmp_path / "images", {"a.jpg": planted.JPEG})
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\); set XDG_CACHE"):
        scan(source_of(paths))


# Files that are there and cannot be read.


def test_files_without_permission_are_unreadable():
    """As another user, since for root there is no such file."""
    program = """
import os, pathlib, tempfile
from tfaccel.data.scan.files import scan_files
from tfaccel.data.source import Blobs, ImageSource
import PIL.Image
def scan():
    found = scan_files(source, num_workers=1, progress=False).faults
    return [(each.id, each.kind, each.cause) for each in found]
folder = pathlib.Path(tempfile.mkdtemp())
os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
paths = [folder / name for name in ("a.png", "b.png", "closed/c.png")]
paths[2].parent.mkdir()
for path in paths:
    PIL.Image.new("L", (8, 8)).save(path)
source = ImageSource(Blobs(tuple(map(str, paths))), None)
if os.getuid() == 0:
    scan(), scan()  # Python imports some modules late, which another user may not read
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    os.setuid(65534)
print(scan())
paths[1].chmod(0)
paths[2].parent.chmod(0)
print(scan())
paths[1].chmod(0o600)
paths[2].parent.chmod(0o700)
print(scan())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    closed = [(each, "unreadable", "Permission denied") for each in (1, 2)]
    assert done.stdout.splitlines() == ["[]", str(closed), "[]"]


def test_an_input_output_error_is_not_kept(tmp_path, monkeypatch):
    paths = written(tmp_path / "images", {"a.jpg": planted.JPEG, "b.jpg": planted.JPEG})
    read = Blobs.read

    def failing(self, index):
        if index == 1:
            raise OSError(5, "Input/output error")
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "read", failing)
        (fault,) = scan(source_of(paths)).faults
    assert (fault.id, fault.kind, fault.cause) == (1, "unreadable", "Input/output error")
    report = scan(source_of(paths))
    assert (report.faults, report.num_reused) == ((), 1)


def test_missing_files_and_broken_links(tmp_path):
    paths = written(tmp_path / "images", {"a.jpg": planted.JPEG, "b.jpg": None})
    paths += [tmp_path / "images" / "c.jpg", paths[0] / "d.jpg"]
    causes = {each.id: (each.kind, each.cause) for each in scan(source_of(paths)).faults}
    gone = ("missing", "no such file")
    assert causes == {1: ("missing", "a broken link"), 2: gone, 3: gone}


# Pairs and shards.


def test_a_pair_is_bad_where_either_is(tmp_path):
    inputs = {"a.jpg": planted.JPEG, "b.jpg": b"", "c.jpg": planted.JPEG, "d.jpg": planted.JPEG}
    targets = {"a.jpg": planted.JPEG, "b.jpg": planted.JPEG, "c.jpg": b"", "d.jpg": planted.PNG}
    source = source_of(written(tmp_path / "in", inputs), written(tmp_path / "out", targets))
    report = scan(source)
    assert report.bad_ids.tolist() == [1, 2]
    assert {each.name for each in report.faults if each.id == 2} == {
        str(tmp_path / "out" / "c.jpg")
    }
    left = files.usable(source, report)
    assert [os.path.basename(each) for each in left.targets.files] == ["a.jpg", "d.jpg"]
    assert scan(source).num_reused == 8


def test_ranges_of_bytes_in_shards(tmp_path, monkeypatch):
    contents = [planted.JPEG, b"hello", planted.TIFF, b"", planted.PNG[:-20], planted.JPEG]
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for index, data in enumerate(contents):
            file = tmp_path / f"{index}.jpg"
            file.write_bytes(data)
            tar.add(file, file.name)
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    gone = tmp_path / "gone.tar"
    blobs = Blobs(
        (str(path), str(gone)),
        file_of=np.array([0] * 7 + [1], np.int32),
        offsets=np.array([each.offset_data for each in members] + [path.stat().st_size - 5, 0]),
        sizes=np.array([each.size for each in members] + [100, 10]),
    )
    source = ImageSource(blobs, np.zeros(8, np.int32), ("a",))
    report = scan(source)
    found = {each.id: each.kind for each in report.faults}
    assert found == {
        1: "not_an_image",
        3: "empty",
        4: "truncated",
        6: "truncated",
        7: "missing",
    }
    assert report.faults[-1].name.startswith(f"{path}[bytes ")
    assert len(files.usable(source, report)) == 3
    seen = looked_at(monkeypatch)
    assert scan(source).faults == report.faults
    assert seen == []


# What is said.


def test_usable_says_what_is_left_out(tmp_path, caplog):
    contents = {"a.jpg": planted.JPEG, "b.jpg": b"", "c.jpg": b"", "d.jpg": b"hello"}
    source = source_of(written(tmp_path / "images", contents))
    report = scan(source)
    left = files.usable(source, report)
    assert (len(left), left.labels.tolist(), left.class_names) == (1, [0], ("a", "b", "c"))
    assert (
        "data: 3 of 4 examples are skipped (2 empty, 1 not_an_image); they are listed in "
        f"{report.list_path}" in caplog.text
    )


def test_notes_are_left_in(tmp_path, caplog):
    source = source_of(written(tmp_path / "images", {"a.jpg": planted.PNG}))
    assert files.usable(source, scan(source)) is source
    assert "left out" not in caplog.text


def test_nothing_left_to_train_on(tmp_path):
    source = source_of(written(tmp_path / "images", {"a.jpg": b"", "b.jpg": b""}))
    report = scan(source)
    with pytest.raises(UserError) as error:
        files.usable(source, report)
    assert str(error.value) == (
        f"none of the 2 examples can be used, e.g. {tmp_path}/images/a.jpg (empty: no bytes); see "
        f"{report.list_path}"
    )


def test_progress_is_logged_where_there_is_no_terminal(tmp_path, caplog, capfd):
    source = source_of(written(tmp_path / "images", {"a.jpg": planted.JPEG}))
    with caplog.at_level(logging.INFO, "tfaccel"):
        files.scan_files(source, num_workers=1, progress=True)
        files.scan_files(source, num_workers=1, progress=False)
    assert sum("checking 1 images" in each.message for each in caplog.records) == 1
    assert sum("bad: none; notes: none" in each.message for each in caplog.records) == 2
    assert capfd.readouterr().err == ""


def test_a_bar_is_drawn_on_a_terminal(tmp_path):
    """In a process whose standard error is one."""
    written(tmp_path / "images", {"a.jpg": planted.JPEG})
    program = (
        "from tfaccel.data.scan.files import scan_files\n"
        "from tfaccel.data.source import Blobs, ImageSource\n"
        f"source = ImageSource(Blobs(({str(tmp_path / 'images' / 'a.jpg')!r},)), None)\n"
        "scan_files(source, num_workers=1, progress=True)\n"
    )
    shown = "".join(text for _, text in on_terminal(program, TERM="xterm", COLUMNS="100"))
    assert "checking images" in shown
    assert "Error" not in shown


def test_a_manifest_that_is_hostile_is_passed_over(tmp_path, monkeypatch, caplog):
    from tfaccel.data.scan import manifest

    blobs = Blobs((str(tmp_path / "a.png"),))
    place = tmp_path / f"{manifest.label(blobs.folder)}.npz"
    for faults in (b"[" * 200_000, b"7", b"[[1]]"):
        np.savez(
            place, known=np.zeros(1, np.uint64), sizes=np.zeros(1, np.int64),
            faults=np.frombuffer(faults, np.uint8),
        )  # fmt: skip
        caplog.clear()
        manifest.Manifest(tmp_path, blobs)
        assert "is damaged (" in caplog.text
