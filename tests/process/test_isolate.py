"""A function in a process of its own: what it returns, how it may fail, and that nothing stays."""

import inspect
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types

import pytest

import tfaccel
from tfaccel.process import child, isolate
from tfaccel.process.isolate import IsolatedError, run_isolated

LIMIT_S = 300  # what is waited for comes in a second; the machine may be slow


@pytest.fixture(autouse=True)
def _logs(monkeypatch, tmp_path):
    """Logs of children that fail stay; here, in the test's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # or what was settled before is used


def is_running(pid):
    """Whether a process runs: a zombie, which a container's init may leave, does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def passes_when_there(monkeypatch):
    """The time limit passes as soon as a file is there, however slow the child is until then."""

    def passes(path):
        def monotonic():
            return time.monotonic() + (LIMIT_S if path.exists() else 0)

        monkeypatch.setattr(
            child, "time", types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
        )

    return passes


def ends(pid):
    """Whether a process ends in time."""
    for _ in range(round(LIMIT_S / 0.05)):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def by_name(a, *, b):
    return {"sum": a + b, "pid": os.getpid(), "tensorflow": "tensorflow" in sys.modules}


def test_the_result_comes_from_another_process_without_tensorflow(tmp_path):
    result = tfaccel.run_isolated(by_name, 1, b=2)
    assert not list(tmp_path.iterdir())  # a log that nobody asked for, of a success, is removed
    assert result["sum"] == 3
    assert result["pid"] != os.getpid()
    assert not result["tensorflow"]  # `import tfaccel` is light: 0.2 s


def test_closures_and_lambdas_and_large_values_travel():
    scale = 3
    assert run_isolated(lambda each: scale * len(each), bytes(10**7)) == 3 * 10**7
    assert len(run_isolated(lambda: bytes(10**7))) == 10**7


def test_its_source_is_found_as_autograph_looks_for_it():
    def function():
        def step():
            return "the source of a step"

        return inspect.getsource(step)

    assert "the source of a step" in run_isolated(function)


def test_paths_environment_and_folder_are_the_callers(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONLY_HERE", "8")

    def function():
        import only_here

        path = pathlib.Path("artifact.txt")
        path.write_text("kept")
        return only_here.value, os.environ["ONLY_HERE"], path.absolute(), sys.stdin.read()

    assert run_isolated(function) == (7, "8", tmp_path / "artifact.txt", "")
    assert (tmp_path / "artifact.txt").read_text() == "kept"


# Of a script or a notebook, functions and classes are in `__main__`.
MAIN = """
import dataclasses, os, sys
import tfaccel

@dataclasses.dataclass
class Result:
    loss: float
    pid: int

def train(loss):
    print("in the child", flush=True)
    return Result(loss, os.getpid())

result = tfaccel.run_isolated(train, 0.5)
assert isinstance(result, Result) and result.pid != os.getpid()
sys.stdout.write(f"{result.loss}\\n")
"""


def run_main(program, tmp_path):
    (tmp_path / "main.py").write_text(program)
    # Its own folder is what Python puts in sys.path; tfaccel is where it is for us.
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(tfaccel.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, tmp_path / "main.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_notebooks_own_functions_and_classes_travel(tmp_path):
    process = run_main(MAIN, tmp_path)
    printed, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert printed == "in the child\n0.5\n"


def test_what_it_prints_is_shown_as_it_comes_and_kept(tmp_path, capsys, monkeypatch):
    log, seen = tmp_path / "child.log", []

    def function(log):
        print("first ü")
        print("second", file=sys.stderr)
        return pathlib.Path(log).exists()

    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (seen.append(text), write(text)))
    run_isolated(function, log, log=log)
    assert "first ü\n" in "".join(seen)
    assert capsys.readouterr().err == "second\n"
    assert sorted(log.read_text().splitlines()) == ["first ü", "second"]
    run_isolated(function, log, log=log)
    assert len(log.read_text().splitlines()) == 4  # an earlier one's is not lost


def test_it_is_shown_before_the_end(monkeypatch, tmp_path):
    seen = tmp_path / "seen"

    class Screen:
        def write(self, text):
            seen.touch()

        def flush(self):
            pass

    def function():
        print("begins")
        while not seen.exists():
            time.sleep(0.01)

    monkeypatch.setattr(sys, "stdout", Screen())
    run_isolated(function, timeout_s=LIMIT_S)


@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_stream_of_fewer_letters_or_none_is_no_failure(monkeypatch, tmp_path, stream):
    log = tmp_path / "child.log"
    monkeypatch.setattr(sys, "stdout", stream)
    assert run_isolated(lambda: print("loss ü 1"), log=log) is None
    assert log.read_text() == "loss ü 1\n"
    if stream:
        assert stream.buffer.getvalue() == b"loss ? 1\n"


def test_quietly_nothing_is_shown_and_a_users_mistake_is_one_here(capfd, tmp_path):
    def function(error):
        print("half of it")
        raise error

    with pytest.raises(tfaccel.UserError, match=r"^no such folder$"):
        isolate.run_quietly(function, tfaccel.UserError("no such folder"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(IsolatedError, match="raised ZeroDivisionError") as caught:
        isolate.run_quietly(function, ZeroDivisionError())
    assert caught.value.log.exists()
    assert capfd.readouterr() == ("", "")


def test_an_exception_is_named_with_its_log():
    def function():
        print("epoch 1 was fine")
        raise KeyError("no such layer")

    with pytest.raises(IsolatedError, match="raised KeyError: 'no such layer'") as caught:
        run_isolated(function)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.type_name == "KeyError"
    assert not caught.value.out_of_memory
    assert "test_isolate.py" in str(caught.value)  # the child's own traceback
    assert "epoch 1 was fine" in caught.value.log.read_text()


def test_out_of_memory_is_said():
    def function():
        raise RuntimeError("Critical error: Can't allocate 4096 bytes on device 0.")

    with pytest.raises(IsolatedError, match=r"\(out of memory\)") as caught:
        run_isolated(function)
    assert caught.value.out_of_memory


def test_out_of_memory_that_only_the_log_tells_is_said():
    def function():
        print(
            "dnn.cc:933] OOM when allocating tensor with shape[3382940] and type uint8", flush=True
        )
        raise RuntimeError(
            "cuDNN launch failure : input shape ([64,128,128,64])" + " in a row" * 999
        )

    with pytest.raises(IsolatedError, match=r"\(out of memory\)") as caught:
        run_isolated(function)
    assert caught.value.out_of_memory


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SIGKILL", r"was ended by SIGKILL \(perhaps the machine was out of memory\)"),
        ("SIGABRT", "was ended by SIGABRT"),
        ("SIGSEGV", "was ended by SIGSEGV"),
    ],
)
def test_a_death_is_named_and_the_parent_lives(name, expected):
    def function():
        print("step 17")
        os.kill(os.getpid(), getattr(signal, name))

    with pytest.raises(IsolatedError, match=expected) as caught:
        run_isolated(function)
    assert caught.value.type_name is None
    assert "step 17" in str(caught.value)


def test_an_exit_before_the_end_is_a_failure():
    with pytest.raises(IsolatedError, match="ended with exit code 3 before it returned"):
        run_isolated(lambda: sys.exit(3))
    with pytest.raises(IsolatedError, match="ended with exit code 0 before it returned"):
        run_isolated(lambda: os._exit(0))


def test_what_cannot_travel_is_said_in_a_sentence(tmp_path):
    lock = threading.Lock()
    with pytest.raises(tfaccel.UserError, match=r"cannot be sent to another process.*lock"):
        run_isolated(lambda: lock)
    assert not list(tmp_path.iterdir())
    with pytest.raises(IsolatedError, match=r"returned a lock that cannot be sent.*the path"):
        run_isolated(lambda: threading.Lock())
    with pytest.raises(tfaccel.UserError, match="function=3; expected a function"):
        run_isolated(3)
    with pytest.raises(tfaccel.UserError, match=r"timeout_s=0; expected a number above 0"):
        run_isolated(by_name, timeout_s=0)
    with pytest.raises(tfaccel.UserError, match="log /dev/null/x cannot be written"):
        run_isolated(by_name, log="/dev/null/x")


def stubborn(path):
    """Starts a process, ignores SIGTERM, writes both ids, and never ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    whole = pathlib.Path(f"{path}.part")
    whole.write_text(f"{os.getpid()} {child.pid}")
    whole.rename(path)
    time.sleep(1000)


def test_a_timeout_ends_the_whole_group(tmp_path, monkeypatch, passes_when_there):
    monkeypatch.setattr(isolate, "GRACE_S", 0.5)
    passes_when_there(tmp_path / "ids")
    with pytest.raises(IsolatedError, match="did not end within 300 s and was stopped"):
        run_isolated(stubborn, tmp_path / "ids", timeout_s=LIMIT_S)
    for pid in (tmp_path / "ids").read_text().split():
        assert ends(pid)


def test_a_timeout_holds_for_a_child_that_does_not_take_its_task(monkeypatch):
    monkeypatch.setattr(isolate, "CHILD", "import time; time.sleep(1000)")
    with pytest.raises(IsolatedError, match=r"did not end within 0\.5 s and was stopped"):
        run_isolated(len, bytes(10**6), timeout_s=0.5)


def test_a_training_may_save_at_the_end(tmp_path, passes_when_there):
    begun = tmp_path / "begun"

    def function():
        def save(*_):
            print("saved")
            sys.exit(143)

        signal.signal(signal.SIGTERM, save)
        begun.touch()
        time.sleep(1000)

    passes_when_there(begun)
    with pytest.raises(IsolatedError, match="did not end within 300 s") as caught:
        run_isolated(function, timeout_s=LIMIT_S)
    assert "saved" in caught.value.log.read_text()


def test_what_the_function_leaves_behind_is_ended():
    def function():
        return subprocess.Popen(["sleep", "1000"]).pid

    assert ends(run_isolated(function))


INTERRUPTED = """
import signal
import sys
import tfaccel
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below a shell's `&`
sys.path.insert(0, {tests!r})
from test_isolate import stubborn
from tfaccel.process import isolate
isolate.GRACE_S = 0.5
try:
    tfaccel.run_isolated(stubborn, {path!r})
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_no_orphan_is_left_when_the_parent_ends(how, tmp_path):
    path = tmp_path / "ids"
    tests = str(pathlib.Path(__file__).parent)
    parent = run_main(INTERRUPTED.format(tests=tests, path=str(path)), tmp_path)
    while not path.exists():
        assert parent.poll() is None
        time.sleep(0.02)
    its_child, grandchild = path.read_text().split()
    parent.send_signal(getattr(signal, how))
    assert ends(its_child)
    if how == "SIGINT":
        assert parent.communicate(timeout=LIMIT_S)[0] == "interrupted\n"
        assert ends(grandchild)
    else:
        parent.wait()
        os.kill(int(grandchild), signal.SIGKILL)  # on its own, as the docstring says


def test_several_threads_may_run_one_each():
    results = [None] * 3

    def call(index):
        results[index] = run_isolated(lambda: (index, os.getpid()))

    threads = [threading.Thread(target=call, args=(each,)) for each in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [index for index, _ in results] == [0, 1, 2]
    assert len({pid for _, pid in results}) == 3


def test_a_crash_after_the_result_is_a_warning(caplog):
    def function():
        import atexit

        atexit.register(os.abort)
        return "done"

    assert run_isolated(function) == "done"
    assert "the child returned its result, then it was ended by SIGABRT" in caplog.text


@pytest.mark.gpu
def test_gpu_memory_is_given_back():
    import pynvml
    from conftest import FIRST_GPU  # not above: the child would import it, and TensorFlow

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(FIRST_GPU)

    def used():
        return pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20

    def train():
        import pynvml
        import tensorflow as tf

        import tfaccel

        tfaccel.setup(gpu_ids=[0])
        kept = tf.zeros((4096, 2**20 // 4))  # 4096 MiB
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(FIRST_GPU)
        during = pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20
        return float(tf.reduce_sum(kept)), during

    before = used()
    total, during = run_isolated(train)
    assert total == 0
    assert during - before > 4096
    assert abs(used() - before) <= 8  # MiB


@pytest.mark.gpu
def test_out_of_memory_on_the_gpu_is_an_exception_and_gives_it_back():
    import pynvml
    from conftest import FIRST_GPU  # not above: the child would import it, and TensorFlow

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(FIRST_GPU)

    def train():
        import tensorflow as tf

        import tfaccel

        tfaccel.setup(gpu_ids=[0], memory=1024)
        return [float(tf.reduce_sum(tf.zeros((4096, 2**20 // 4))))]

    before = pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20
    with pytest.raises(IsolatedError, match="raised ResourceExhaustedError") as caught:
        run_isolated(train)
    assert caught.value.out_of_memory
    assert abs((pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20) - before) <= 8  # MiB
