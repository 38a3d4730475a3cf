import errno
import os

import pytest

from tfaccel.common.own_files import open_own, replace
from tfaccel.data.scan.report import write_list
from tfaccel.launch.output import Output
from tfaccel.training.logs.appended import Appended
from tfaccel.training.workdir import held, write_json


@pytest.fixture
def victim(tmp_path):
    """A file of somebody else's, to which links may lead."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder that others may write to."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("flags", [os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
def test_no_link_is_opened(folder, victim, link, flags):
    link(victim, folder / "file")
    with pytest.raises(OSError, match=r"symbolic links|second name") as raised:
        open_own(folder / "file", flags)
    assert raised.value.errno == errno.ELOOP
    assert victim.read_text() == "precious"


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "file")
    with pytest.raises(OSError, match="No such device"):  # nobody reads it
        open_own(folder / "file", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="not a regular file"):
        open_own(folder / "file", os.O_RDWR | os.O_CREAT)


def test_a_plain_file_is_opened_and_emptied_where_that_is_asked_for(folder):
    for flags, left in ((os.O_APPEND, b"ab"), (os.O_TRUNC, b"b")):
        (folder / "file").write_bytes(b"a")
        number = open_own(folder / "file", os.O_WRONLY | os.O_CREAT | flags)
        os.write(number, b"b")
        os.close(number)
        assert (folder / "file").read_bytes() == left


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_replaced_and_its_target_stays(folder, victim, link):
    link(victim, folder / "config.json")
    write_json(folder / "config.json", {})
    assert victim.read_text() == "precious"
    assert (folder / "config.json").read_text() == "{}\n"
    assert [each.name for each in folder.iterdir()] == ["config.json"]


def test_the_lock_of_a_workdir_follows_no_link(folder, victim):
    os.symlink(victim, folder / "run.lock")
    with pytest.raises(ValueError, match=r"cannot be written .*remove the link"), held(folder):
        pass
    assert victim.read_text() == "precious"


def test_what_a_killed_process_was_about_to_replace_goes_with_the_next_run(folder, victim):
    (folder / ".config.json.123").write_text("{")
    (folder / ".metrics.csv.123.0a1b2c3d").write_text("x")
    (folder / ".mine").write_text("x")
    os.symlink(victim, folder / ".result.json.7")
    with held(folder):
        pass
    assert sorted(each.name for each in folder.iterdir()) == [".mine", "run.lock"]
    assert victim.read_text() == "precious"


def test_logs_lists_and_ranks_files_follow_no_link(folder, victim):
    for name in ("metrics.jsonl", "list.txt", "rank-0.log"):
        os.symlink(victim, folder / name)
    for keep in (True, False):
        with pytest.raises(OSError, match="symbolic links"):
            Appended(folder / "metrics.jsonl", keep=keep)
    write_list(folder / "list.txt", [])
    output = Output.__new__(Output)
    output._path, output._has_complained = folder / "rank-0.log", False
    assert output._opened() is None
    assert victim.read_text() == "precious"


def test_what_holds_secrets_may_be_the_users_alone(folder):
    replace(folder / "job.sh", b"x", mode=0o600)
    assert (folder / "job.sh").stat().st_mode & 0o777 == 0o600
