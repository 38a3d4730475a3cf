"""What a terminal and a file see while the program waits, and what is kept of a wait."""

import json
import os
import pathlib
import re
import subprocess
import sys

import conftest
import pytest

from tfaccel.process import waits

# All times are a tenth of the product's.
PROGRAM = """
import sys, time
from tfaccel.common import run_log
from tfaccel.process import waits

waits.SILENCE_S, waits.YOUNG_S, waits.LOOK_S, waits.WORTH_S = 0.4, 0.1, 0.05, 0.2
waits.LONGEST_S, waits.MINUTE_S = 0.8, 1.0
run_log.show(speaks={speaks})
run_log.summary("it begins")
{program}
run_log.summary("it ends")
"""


def on_terminal(program, tmp_path, *, speaks=True):
    """Returns what a terminal shows: (seconds since the text before, text)."""
    text = PROGRAM.format(program=program, speaks=speaks)
    return conftest.on_terminal(text, XDG_CACHE_HOME=str(tmp_path), COLUMNS="60")


def in_file(program, tmp_path, *, speaks=True):
    """Returns the lines of a file."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program=program, speaks=speaks)],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def kept(tmp_path):
    path = tmp_path / "tfaccel" / "waits" / waits.FILE
    return json.loads(path.read_bytes()) if path.exists() else {}


TWO = """
with waits.on("decoding"):
    time.sleep(1.2)
    waits.now("compiling")
    time.sleep(1.5)
"""


def test_a_terminal_has_one_line_that_changes(tmp_path):
    shown = on_terminal(TWO, tmp_path)
    first = next(index for index, (_, text) in enumerate(shown) if "it begins" in text)
    assert max(seconds for seconds, _ in shown[first + 1 :]) < 1.5  # the text changes each second
    text = "".join(text for _, text in shown)
    assert "\r\x1b[Ktfaccel: it ends\r\n" in text
    lines = [each.rpartition("\r\x1b[K")[2] for each in text.split("\r\n")]
    assert lines == ["tfaccel: it begins", "tfaccel: it ends", ""]
    assert re.findall(r"tfaccel: (\w+): \d", text)[:1] == ["decoding"]
    assert "tfaccel: compiling: 1 s" in text


def test_a_file_has_lines_at_growing_pauses(tmp_path):
    lines = in_file('with waits.on("compiling"): time.sleep(4)', tmp_path)
    assert lines[0] == "tfaccel: it begins"
    assert lines[-1] == "tfaccel: it ends"
    told = [each for each in lines if each.startswith("tfaccel: compiling: ")]
    assert len(told) + 2 == len(lines)
    assert 3 <= len(told) <= 5  # after 0.4, 1.2, 2.2 and 3.2 seconds, on a quiet machine


def test_the_time_of_the_last_such_wait_is_told(tmp_path):
    program = 'with waits.on("compiling", of=lambda: {0!r}): time.sleep(1.5)'
    first, again, other = (in_file(program.format(of), tmp_path) for of in ("a", "a", "b"))
    assert not any("last time" in each for each in first + other)
    assert any("(last time 2 s)" in each for each in again)
    assert kept(tmp_path).keys() == {"compiling | a", "compiling | b"}


@pytest.mark.parametrize("see", [on_terminal, in_file])
def test_a_worker_that_does_not_speak_tells_nothing(see, tmp_path):
    assert see('with waits.on("compiling"): time.sleep(1)', tmp_path, speaks=False) == []


@pytest.mark.parametrize("see", [on_terminal, in_file])
def test_nothing_is_told_of_short_waits(see, tmp_path):
    program = 'time.sleep(0.6)\nfor _ in range(9):\n    with waits.on("a step"): time.sleep(0.02)'
    assert "a step" not in str(see(program, tmp_path))
    assert kept(tmp_path) == {}


def test_a_usual_wait_is_named_but_not_kept(tmp_path):
    lines = in_file('with waits.on("a step", is_usual=True): time.sleep(0.8)', tmp_path)
    assert any(each.startswith("tfaccel: a step: ") for each in lines)
    assert kept(tmp_path) == {}


REACHED = """
with waits.on("decoding"):
    for index in range(15):
        waits.reached(f"{index} of 15")
        time.sleep(0.1)
waits.reached("nobody waits")
"""


def test_it_is_told_how_far_a_wait_is(tmp_path):
    told = [each for each in in_file(REACHED, tmp_path) if "decoding" in each]
    assert re.fullmatch(r"tfaccel: decoding: \d s, \d+ of 15", told[0])
    assert any("(last time" in each for each in in_file(REACHED, tmp_path))


def test_waits_that_begin_at_once_have_one_thread():
    program = """
import sys, threading
from tfaccel.process import waits
sys.setswitchinterval(1e-6)
for _ in range(200):
    waits._thread, gate = None, threading.Barrier(4)
    before = threading.active_count()
    def begin():
        gate.wait()
        waits._begin_thread()
    all_ = [threading.Thread(target=begin) for _ in range(4)]
    for each in all_: each.start()
    for each in all_: each.join()
    assert threading.active_count() == before + 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_fork_may_begin_a_wait_while_the_parent_began_its_first():
    program = """
import os
from tfaccel.process import waits
waits._beginning.acquire()
if (child := os.fork()) == 0:
    with waits.on("something"):
        os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_wait_that_fails_is_not_kept(tmp_path):
    program = (
        'try:\n    with waits.on("compiling"):\n        time.sleep(0.3)\n        raise KeyError\n'
        "except KeyError:\n    pass"
    )
    in_file(program, tmp_path)
    assert kept(tmp_path) == {}


def test_processes_that_end_at_once_do_not_spoil_the_file(tmp_path):
    program = "for n in range(30): waits._keep(f'{name} {n}', 1.0)"
    command = [sys.executable, "-c"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    running = [
        subprocess.Popen(
            [*command, PROGRAM.format(program=f"name = {name!r}\n{program}", speaks=True)],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for name in "ab"
    ]
    assert [each.wait() for each in running] == [0, 0]
    assert kept(tmp_path)  # whole, with the entries of the last writer at least
    assert os.listdir(tmp_path / "tfaccel" / "waits") == [waits.FILE]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"compiling": "x"}', b"\xff"])
def test_a_damaged_file_is_no_error(text, tmp_path):
    folder = pathlib.Path(tmp_path, "tfaccel", "waits")
    folder.mkdir(parents=True)
    (folder / waits.FILE).write_bytes(text)
    lines = in_file('with waits.on("compiling"): time.sleep(0.8)', tmp_path)
    assert lines[1].startswith("tfaccel: compiling: ")
    assert kept(tmp_path).keys() == {"compiling"}


def test_a_traced_function_tells_what_is_done_with_it(monkeypatch):
    seen = []
    monkeypatch.setattr(waits, "now", seen.append)
    for xla in (False, True):
        assert waits.traced(lambda x: (seen.append("it"), 2 * x)[1], "step", xla=xla)(3) == 6
    assert seen == [
        *("tracing the step", "it", "TensorFlow builds the step"),
        *("tracing the step", "it", "XLA compiles the step"),
    ]
