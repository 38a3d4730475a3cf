"""Lines that say nothing are left out as TensorFlow starts; all others pass."""

import re
import subprocess
import sys

import pytest

from tfaccel.process import start_noise

REMARK = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
INFORMATION = (
    "I0000 00:00:1795790560.387881    1280 port.cc:153] oneDNN custom operations are on. You may"
)
WARNING = "W0000 00:00:1795790560.387881    1280 gpu_device.cc:2430] Cannot dlopen some libraries"
ERROR = "E0000 00:00:1795790560.387881    1280 cuda_dnn.cc:9261] Unable to register a factory"
NO_DRIVER = (
    "E0000 00:00:1795790564.608345    1280 cuda_platform.cc:52] failed call to cuInit: INTERNAL: "
    "CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
)
EVERY = (REMARK, INFORMATION, WARNING, ERROR, NO_DRIVER)


@pytest.mark.parametrize(
    ("level", "has_gpus", "left_out"),
    [
        ("0", False, ()),
        ("", False, ()),
        ("1", True, (REMARK, INFORMATION)),
        ("2", True, (REMARK, INFORMATION, WARNING)),
        ("2", False, (REMARK, INFORMATION, WARNING, NO_DRIVER)),
        ("3", True, EVERY),
    ],
)
def test_what_is_left_out_is_what_the_level_says(level, has_gpus, left_out):
    pattern = start_noise.pattern(level, has_gpus=has_gpus)
    assert tuple(each for each in EVERY if pattern and re.match(pattern, each)) == left_out


PROGRAM = f"""
import os, sys
from tfaccel.process import start_noise
with start_noise.left_out(has_gpus=False):
    os.write(2, {(INFORMATION + chr(10)).encode()!r})
    print("a warning of Python's", file=sys.stderr)
    os.write(2, {(ERROR + chr(10) + NO_DRIVER + chr(10)).encode()!r})
    if sys.argv[1] == "dies":
        os.write(2, b"fatal\\n")
        os.abort()
print("after", file=sys.stderr)
print(os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""


@pytest.mark.parametrize(("how", "last"), [("lives", "after"), ("dies", "fatal")])
def test_every_other_line_passes_and_those_of_a_process_that_dies(how, last, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    command = [sys.executable, "-c", PROGRAM, how]
    # Its pipe ends when the process that sorts has ended, too.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == ["a warning of Python's", ERROR, last]
    assert done.stdout == ("2\n" if how == "lives" else "")


def test_without_a_standard_error_nothing_fails():
    program = "import os; os.close(2)\n" + PROGRAM.replace("file=sys.stderr", "")
    done = subprocess.run(
        [sys.executable, "-c", program.replace("os.write(2", "(lambda *_: 0)(2"), "lives"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0


GALLERY = """
import sys
from tfaccel.process import start_noise
start_noise.start_tensorflow()
assert not {*start_noise.OF_GALLERIES} & {*sys.modules}
import keras, numpy as np
keras.visualization.plot_image_gallery(np.zeros((1, 8, 8, 3)), path="gallery.png")
import matplotlib.pyplot
assert type(matplotlib.pyplot.figure) is type(start_noise.left_out)
"""


def test_galleries_of_images_are_drawn_although_matplotlib_loads_later(tmp_path):
    program = [sys.executable, "-c", GALLERY]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "gallery.png").stat().st_size > 0
