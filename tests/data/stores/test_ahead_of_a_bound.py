"""How often files of a store are fetched if the cache has room for a part of them."""

import collections
import itertools
import pathlib
import random
import statistics
import time

import pytest

from tfaccel.data.file_names import FileNames
from tfaccel.data.stores import files as files_module
from tfaccel.data.stores.cache import BoundedCache
from tfaccel.data.stores.files import StoreFiles
from tfaccel.data.stores.store import Entry

SIZE = 100


class FakeStore:
    """Counts what is fetched."""

    def __init__(self):
        self.fetched = collections.Counter()

    def fetch(self, url, path):
        time.sleep(0.0005)
        self.fetched[url] += 1
        pathlib.Path(path).write_bytes(b"x" * SIZE)


def fetches_of(folder, *, num_files, room, window, num_epochs=6):
    """Returns how many files each epoch of random order fetches, read one after the other."""
    urls = [f"s3://b/{number}" for number in range(num_files)]
    store, cache = FakeStore(), BoundedCache(folder, room * SIZE, wait_s=5)
    files = StoreFiles(
        store, FileNames.of(urls), [Entry(each, SIZE, 1) for each in urls], cache=cache
    )
    order = [
        each
        for epoch in range(num_epochs)
        for each in random.Random(epoch).sample(range(num_files), num_files)
    ]
    sums = []
    for place, each in enumerate(order):
        if place % num_files == 0:
            sums.append(sum(store.fetched.values()))
        ahead = order[place : place + window] if place == 0 else order[place + window :][:1]
        files.ahead([(number, None, None) for number in ahead])
        assert files.read(each) == b"x" * SIZE
    sums.append(sum(store.fetched.values()))
    return [after - before for before, after in itertools.pairwise(sums)]


def test_what_is_fetched_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(files_module, "_fetched", [0, 0])
    with caplog.at_level("INFO"):
        fetches_of(tmp_path, num_files=3, room=4, window=3, num_epochs=2)
        files_module.say_what_was_fetched()
    assert caplog.text.count(f"are fetched into {tmp_path}, which takes at most 3.73e-07 GiB") == 1
    assert "data: 3 files fetched from the store, 0.0 MiB" in caplog.text


@pytest.mark.parametrize(("num_files", "room"), [(56, 28), (200, 100)])
def test_no_file_gives_way_before_it_is_read(tmp_path, num_files, room):
    found = fetches_of(tmp_path, num_files=num_files, room=room, window=512)
    assert found[0] <= 1.25 * num_files
    assert statistics.mean(found[1:]) <= num_files - room // 4


@pytest.mark.parametrize("room", [1, 5])
def test_a_bound_of_few_files_is_about_as_none(tmp_path, room):
    found = fetches_of(tmp_path, num_files=40, room=room, window=512, num_epochs=3)
    assert max(found) <= 80  # of 40; what two threads fetch at the same time depends on the load
