"""The folder of fetched files: its bound, its checks, and several processes."""

import fcntl
import multiprocessing
import os
import pathlib
import threading
import time

import pytest

from tfaccel.common.errors import RunError, UserError
from tfaccel.data.stores.cache import COUNT, BoundedCache, NoRoomError


def writer(size, *, log=None, name=""):
    def fetch(path):
        if log is not None:
            log.append(name)
        pathlib.Path(path).write_bytes(b"x" * size)

    return fetch


def put(cache, name, size, **settings):
    cache.opened(name, size, writer(size), what=name, **settings).close()


def bytes_in(folder):
    total = 0
    for each in folder.rglob("*"):
        try:
            total += each.stat().st_size if each.is_file() and each.name != COUNT else 0
        except FileNotFoundError:  # another process has just removed it
            continue
    return total


def names_in(folder):
    return {each.name for each in folder.rglob("*") if each.is_file() and each.name != COUNT}


def test_a_file_is_fetched_once(tmp_path):
    log = []
    for cache in (BoundedCache(tmp_path, 100), BoundedCache(tmp_path, 100)):
        for _ in range(2):
            with cache.opened("ab", 10, writer(10, log=log), what="u") as file:
                assert file.readall() == b"x" * 10
    assert len(log) == 1


def test_the_bound_is_never_exceeded(tmp_path):
    cache, most = BoundedCache(tmp_path, 100), 0
    for number in range(30):
        put(cache, f"{number:02d}", 7 + number % 5)
        most = max(most, bytes_in(tmp_path))
    assert 85 < most <= 100


def test_a_part_of_the_data_stays(tmp_path):
    cache = BoundedCache(tmp_path, 50)
    fetched = []
    for epoch in range(3):
        fetched.append(0)
        for number in range(100) if epoch % 2 == 0 else reversed(range(100)):
            if not cache.has(f"{number:02d}"):
                fetched[-1] += 1
            put(cache, f"{number:02d}", 1)
    assert fetched == [100, 50, 50]


def test_files_of_earlier_runs_give_way_first_the_longest_unused_before(tmp_path):
    before = BoundedCache(tmp_path, 30)
    for age, name in ((5, "aa"), (3, "bb"), (9, "cc")):
        put(before, name, 10)
        path = tmp_path / name / name
        os.utime(path, ns=(0, time.time_ns() - age * 10**9))
    time.sleep(0.01)
    cache = BoundedCache(tmp_path, 30)
    put(cache, "dd", 10)
    assert names_in(tmp_path) == {"aa", "bb", "dd"}
    put(cache, "aa", 10)  # is used again
    put(cache, "ee", 10)
    assert names_in(tmp_path) == {"aa", "dd", "ee"}


def test_an_open_file_stays(tmp_path):
    cache = BoundedCache(tmp_path, 20)
    with cache.opened("aa", 15, writer(15), what="a"):
        with pytest.raises(NoRoomError):
            put(cache, "bb", 15, ahead=True)
        cache.wait_s = 0.1
        with pytest.raises(RunError, match=r"finds no room in .* are in use; raise data.store_c"):
            put(cache, "bb", 15)
    put(cache, "bb", 15)
    assert names_in(tmp_path) == {"bb"}


@pytest.mark.parametrize("when", ["while it is opened", "while it is added"])
def test_a_file_that_is_removed_before_it_is_held_is_fetched_again(tmp_path, monkeypatch, when):
    cache, log = BoundedCache(tmp_path, 100), []
    if when == "while it is opened":
        put(cache, "ab", 10)
    lock, left = fcntl.flock, [1]

    def lock_late(file, operation):
        if operation & fcntl.LOCK_SH and left:
            left.pop()
            os.unlink(tmp_path / "ab" / "ab")  # another process was quicker
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", lock_late)
    with cache.opened("ab", 10, writer(10, log=log, name="ab"), what="u") as file:
        assert os.path.samestat(os.stat(file.name), os.fstat(file.fileno()))
    assert log == ["ab"] * (1 if when == "while it is opened" else 2)


def test_a_file_that_others_have_fetched_again_stays(tmp_path, monkeypatch):
    cache, lock, path, held = BoundedCache(tmp_path, 15), fcntl.flock, tmp_path / "aa" / "aa", []
    put(cache, "aa", 10)

    def lock_late(file, operation):
        is_removed = operation == fcntl.LOCK_EX | fcntl.LOCK_NB and file.name == str(path)
        if is_removed and not held:  # another process is quicker, and reads the new file
            (tmp_path / "new").write_bytes(b"y" * 10)
            os.replace(tmp_path / "new", path)
            held.append(path.open("rb"))
            lock(held[0], fcntl.LOCK_SH)
        lock(file, operation)

    monkeypatch.setattr("fcntl.flock", lock_late)
    with pytest.raises(NoRoomError):
        put(cache, "bb", 10, ahead=True)
    assert held.pop().read() == path.read_bytes() == b"y" * 10


def test_a_file_that_is_larger_than_the_bound(tmp_path):
    with pytest.raises(UserError, match=r"s3://b/x has .* more than the .* raise data.store_cache"):
        BoundedCache(tmp_path, 5).opened("aa", 6, writer(6), what="s3://b/x")
    with pytest.raises(UserError, match="s3://b/x has"):
        BoundedCache(tmp_path, 5).opened("aa", None, writer(6), what="s3://b/x")
    assert names_in(tmp_path) == set()


def test_unfinished_and_damaged_files_are_never_used(tmp_path):
    cache = BoundedCache(tmp_path, 100)
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "aa").write_bytes(b"xxx")  # cut short
    (tmp_path / "aa" / "aa.10.part").write_bytes(b"yyyyyyyyyyyyyyyyy")  # of a killed process
    with cache.opened("aa", 10, writer(10), what="a") as file:
        assert file.readall() == b"x" * 10
    assert names_in(tmp_path) == {"aa"}
    with pytest.raises(RunError, match="has 3 bytes and not 9 as the store said, so"):
        cache.opened("bb", 9, writer(3), what="b")
    assert names_in(tmp_path) == {"aa"}


def test_a_failed_fetch_leaves_nothing(tmp_path):
    cache = BoundedCache(tmp_path, 10)

    def broken(path):
        pathlib.Path(path).write_bytes(b"half")
        raise KeyError("gone")

    for _ in range(20):
        with pytest.raises(KeyError):
            cache.opened("aa", 9, broken, what="a")
    assert names_in(tmp_path) == set()
    put(cache, "bb", 10, ahead=True)


def test_two_threads_fetch_a_file_once(tmp_path):
    cache, log = BoundedCache(tmp_path, 100), []

    def slow(path):
        time.sleep(0.1)
        writer(10, log=log)(path)

    def get():
        cache.opened("aa", 10, slow, what="a").close()

    threads = [threading.Thread(target=get) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(log) == 1


def _use(folder, seed, results):
    cache = BoundedCache(pathlib.Path(folder), 200)
    wrong = 0
    for turn in range(150):
        number = (turn * seed) % 31
        with cache.opened(f"{number:02d}", 20, writer(20), what="u") as file:
            wrong += file.readall() != b"x" * 20
    results.put(wrong)


def test_several_processes_share_the_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_use, args=(tmp_path, n, results)) for n in (1, 3, 7)]
    for each in workers:
        each.start()
    most = 0
    while any(each.is_alive() for each in workers):
        most = max(most, bytes_in(tmp_path))
        time.sleep(0.002)
    assert [results.get(timeout=10) for _ in workers] == [0, 0, 0]
    assert most <= 200 + 3 * 20  # files may be listed before and after they are renamed
    assert bytes_in(tmp_path) <= 200


def test_a_full_disk_is_said(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match="cannot be written"):
        put(BoundedCache(tmp_path / "file", 10), "aa", 1)
