import contextlib
import resource
import signal

import pytest

from tfaccel.common.own_files import replace
from tfaccel.training.logs.appended import Appended


@contextlib.contextmanager
def room(size):
    """Within the context a file may have so many bytes: as a full disk, it takes a part alone.

    That is so for pytest's own output too, if it goes to a file: no test must end within.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_record_that_does_not_fit_leaves_none_of_itself(tmp_path):
    path = tmp_path / "folder" / "file"
    file = Appended(path)
    file.append(b"first\n")
    with room(10), pytest.raises(OSError, match="large"):
        file.append(b"second\n")
    assert path.read_bytes() == b"first\n"
    file.append(b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_begins_anew_or_goes_on(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before\n")
    Appended(path, keep=True).append(b"after\n")
    assert path.read_bytes() == b"before\nafter\n"
    Appended(path).append(b"anew\n")
    assert path.read_bytes() == b"anew\n"


def test_what_cannot_be_replaced_stays(tmp_path):
    path = tmp_path / "file"
    replace(path, b"before")
    with room(3), pytest.raises(OSError, match="large"):
        replace(path, b"after all")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"
