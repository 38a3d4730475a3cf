"""Runs tests with other versions of TensorFlow, Keras, DALI or Python, and says what broke.

    python tools/try_versions.py                      # all tests of the default suite
    python tools/try_versions.py tests/keras_internals tests/step --python=3.13
    python tools/try_versions.py --python=3.14 --use=keras-hub=

The tool copies the checkout to --folder, writes the other versions into the copy's pyproject.toml,
and lets uv make an environment there. So a next version that passes needs only new bounds in
pyproject.toml. A second run in the same folder uses the environment again.

The page has three tables: what the package registry has for each Python, the number of tests in
each room, and what broke. A private name of Keras or TensorFlow is blamed if a canary
(tests/keras_internals/test_canaries.py) or an import error names it.

The exit code is 1 if a test fails, and 2 if uv finds no such versions.
"""

import argparse
import collections
import datetime
import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from packaging.requirements import Requirement

from tfaccel.common.tables import cleaned

ROOT = pathlib.Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
USE = ("tensorflow=tensorflow==2.22.0rc0", "keras=keras-nightly>=3.16.0.dev0,<3.17")
BUILT = "nvidia-dali-tf-plugin-"  # is compiled for the installed TensorFlow, so it has no wheel
# Compares pyproject.toml with other files, and this tool changes pyproject.toml.
NOT_RUN = "tests/common/test_version.py"
SHOWN = ("tensorflow", "keras", "keras-nightly", "tf-nightly", "numpy")
MAX_TESTS = 3  # names of tests in a row
# Messages that name a private name, and how to write the name.
BLAMED = {
    r"tfaccel relies on this private name: (.+?)\. Keras \d": r"\1",
    r"cannot import name '(\w+)' from '((?:keras\.src|tensorflow\.\w+)[\w.]*)'": r"\2.\1",
    r"No module named '((?:keras\.src|tensorflow\.(?:python|core|compiler))[\w.]*)'": r"\1",
    r"module '((?:keras\.src|tensorflow\.python)[\w.]*)' has no attribute '(\w+)'": r"\1.\2",
}


class Broken(NamedTuple):
    """A test that failed, the private name that its message blames, and the message."""

    test: str
    blamed: str | None
    message: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the environment, runs the tests, writes the page and returns the exit code."""
    options = _parser().parse_args(arguments)
    use = dict(each.split("=", 1) for each in (*USE, *(options.use or ())))
    given = [*options.tests, f"--python={options.python}"]
    given += [f"--use={each}" for each in options.use or ()]
    told = shlex.join(["python", "tools/try_versions.py", *given])
    project = with_versions((ROOT / "pyproject.toml").read_text(), use, python=options.python)
    found = {each: registry(project, each) for each in PYTHONS}
    page = [head(told, use), *registry_table(found, today=datetime.date.today())]
    folder = pathlib.Path(options.folder).expanduser()
    refused = make_environment(folder, project, options.python)
    if refused:
        page += ["", f"uv makes no environment for Python {options.python}: {refused}"]
        _write(page, options.output)
        return 2
    report = folder / "report.xml"
    run_tests(folder, options.tests, report)
    counts, broken = results(ElementTree.parse(report).getroot())
    page += ["", environment(folder), "", *rooms_table(counts), "", *broken_table(broken)]
    _write(page, options.output)
    return int(bool(broken))


def with_versions(text: str, use: Mapping[str, str], *, python: str) -> str:
    """Returns the text of pyproject.toml with other requirements.

    Args:
      text: of the present pyproject.toml.
      use: a requirement in place of each package, e.g. {"keras": "keras-nightly>=3.16.0.dev0"};
        "" leaves the package out.
      python: the only minor version that the project then allows.
    """
    overrides = []
    for package, wanted in use.items():
        if not wanted:
            text = re.sub(rf'"{re.escape(package)}[ <>=~!][^"]*",', "", text)
            continue
        new = Requirement(wanted)
        text = re.sub(
            rf'"{re.escape(package)}(\[[\w-]+\])?(?:[ <>=~!][^"]*)?"',
            lambda each, new=new: f'"{new.name}{each[1] or ""}{new.specifier}"',
            text,
        )
        text = re.sub(rf"(?m)^{re.escape(package)} = \[", f"{new.name} = [", text)
        overrides.append(str(new) if new.name == package else f"{package} ; python_version < '0'")
    # In the build of a plugin, `match-runtime` takes the version that the environment has.
    text = re.sub(
        r'requirement = "([\w-]+)[^"]*", match-runtime',
        lambda each: f'requirement = "{each[1]}", match-runtime',
        text,
    )
    text = re.sub(r'(?m)^requires-python = ".*"', f'requires-python = "=={python}.*"', text)
    listed = ", ".join(f'"{each}"' for each in overrides)
    return f"{text}\n[tool.uv]\noverride-dependencies = [{listed}]\n"


def requirements(project: str) -> list[str]:
    """Returns what the default suite requires, with the extras of tfaccel that it names."""
    read = tomllib.loads(project)
    listed = [*read["project"]["dependencies"], *read["dependency-groups"]["dev"]]
    ours = [each for each in map(Requirement, listed) if each.name == "tfaccel"]
    extras = [extra for each in ours for extra in sorted(each.extras)]
    optional = read["project"]["optional-dependencies"]
    listed += [each for extra in extras for each in optional[extra]]
    return [each for each in listed if Requirement(each).name != "tfaccel"]


def registry(project: str, python: str) -> str:
    """Returns the versions that have a wheel for a Python on Linux, or uv's reason against it."""
    read = tomllib.loads(project)
    wheels = [each for each in requirements(project) if not each.startswith(BUILT)]
    with tempfile.TemporaryDirectory() as folder:
        overrides = pathlib.Path(folder, "overrides.txt")
        overrides.write_text("\n".join(read["tool"]["uv"]["override-dependencies"]))
        command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python-version", python, "--only-binary", ":all:"]
        command += ["--overrides", str(overrides)]
        done = subprocess.run(
            command, cwd=folder, input="\n".join(wheels), text=True, capture_output=True
        )
    if done.returncode:
        return f"nothing: {uv_reason(done.stderr)}"
    pins = [each.partition("==") for each in done.stdout.splitlines() if "==" in each]
    shown = [f"{name} {version}" for name, _, version in pins if _is_shown(name)]
    return ", ".join(shown)


def _is_shown(package: str) -> bool:
    return package in SHOWN or package.startswith("nvidia-dali-")


def uv_reason(text: str) -> str:
    """Returns uv's reason in one line."""
    lines = [re.sub(r"^\W+", "", each).strip() for each in text.splitlines()]
    lines = [re.sub(r"`?https?://\S+", "a download", each) for each in lines]
    kept = [each for each in lines if each and not each.startswith(("warning", "Using", "hint"))]
    reason = cleaned(" ".join(kept)).partition("Because ")[2] or cleaned(" ".join(kept))
    return reason.partition(" we can conclude")[0].rstrip(",")


def make_environment(folder: pathlib.Path, project: str, python: str) -> str | None:
    """Copies the checkout, and makes its environment. Returns why uv refuses, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, files)):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "pyproject.toml").write_text(project)
    (folder / "uv.lock").unlink(missing_ok=True)
    done = subprocess.run(
        ["uv", "sync", "--python", python], cwd=folder, text=True, capture_output=True
    )
    return uv_reason(done.stderr) if done.returncode else None


def run_tests(folder: pathlib.Path, tests: Sequence[str], report: pathlib.Path) -> None:
    """Runs tests in the copy. pytest's output is this program's."""
    report.unlink(missing_ok=True)
    command = [str(_python(folder)), "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}"]
    command += [f"--ignore={NOT_RUN}", *(tests or ["tests"])]
    path = os.pathsep.join([str(folder / ".venv/bin"), os.environ.get("PATH", "")])
    place = {"PYTHONPATH": str(folder), "VIRTUAL_ENV": str(folder / ".venv"), "PATH": path}
    subprocess.run(command, cwd=folder, env=os.environ | place)
    if not report.is_file():
        sys.exit("pytest wrote no report; its messages are above")


def _python(folder: pathlib.Path) -> pathlib.Path:
    return folder / ".venv/bin/python"


def results(report: ElementTree.Element) -> tuple[dict[str, collections.Counter], list[Broken]]:
    """Returns the number of tests of each room and result, and the tests that failed.

    Args:
      report: pytest's, in JUnit's format.
    """
    counts, broken = collections.defaultdict(collections.Counter), []
    for case in report.iter("testcase"):
        place = case.get("classname") or case.get("name", "")
        faults = [each for each in case if each.tag in ("failure", "error")]
        skipped = case.find("skipped") is not None
        kind = "failed" if faults else "skipped" if skipped else "passed"
        counts["/".join(place.split(".")[:2])][kind] += 1
        if faults:
            text = f"{faults[0].get('message', '')}\n{faults[0].text or ''}"
            name = f"{place.split('.')[-1]}::{case.get('name')}"
            broken.append(Broken(name, blamed(text), first_error(text)))
    return counts, broken


def blamed(text: str) -> str | None:
    """Returns the private name that a failed test's message gives, or None."""
    for pattern, name in BLAMED.items():
        if match := re.search(pattern, text, re.DOTALL):
            return " ".join(match.expand(name).split())
    return None


def first_error(text: str) -> str:
    """Returns the line of a failed test's report that says what is wrong."""
    lines = [each[1:].strip() for each in text.splitlines() if re.match(r"E\s", each)]
    line = next(filter(None, lines), None) or text.strip().partition("\n")[0]
    line = cleaned(line)
    return line if len(line) <= 200 else f"{line[:200]}..."


def head(command: str, use: Mapping[str, str]) -> str:
    """Returns the page's title and command."""
    tried = " and ".join(f"`{each}`" for each in use.values() if each)
    return f"# With {tried}\n\n`{command}` ({datetime.date.today()})\n"


def registry_table(found: Mapping[str, str], *, today: datetime.date) -> list[str]:
    """Returns the lines of the table of what the registry has for each Python."""
    title = f"What the package registry has wheels of, for Linux on x86, on {today}:"
    rows = [f"| {python} | {_cell(each)} |" for python, each in found.items()]
    return [title, "", "| Python | versions |", "|---|---|", *rows]


def environment(folder: pathlib.Path) -> str:
    """Returns the sentence on what was run."""
    site = next(folder.glob(".venv/lib/python*/site-packages"))
    versions = {
        each.name: each.version for each in importlib.metadata.distributions(path=[str(site)])
    }
    shown = [f"{name} {version}" for name, version in sorted(versions.items()) if _is_shown(name)]
    python = subprocess.run([_python(folder), "--version"], text=True, capture_output=True)
    return f"The tests ran on {python.stdout.strip()}, {', '.join(shown)}."


def rooms_table(counts: Mapping[str, collections.Counter]) -> list[str]:
    """Returns the lines of the table of the number of tests of each room."""
    lines = ["| tests | passed | failed | skipped |", "|---|---|---|---|"]
    kinds = ("passed", "failed", "skipped")
    for room, each in sorted(counts.items()):
        lines.append(f"| {room} | {' | '.join(str(each[kind]) for kind in kinds)} |")
    total = sum(counts.values(), collections.Counter())
    return [*lines, f"| all | {' | '.join(str(total[kind]) for kind in kinds)} |"]


def broken_table(broken: Sequence[Broken]) -> list[str]:
    """Returns the lines of the table of what broke: private names first, then other errors."""
    if not broken:
        return ["Nothing broke."]
    groups = collections.defaultdict(list)
    for each in broken:
        groups[each.blamed is None, each.blamed or each.message].append(each.test)
    lines = ["| private name | error | tests | such as |", "|---|---|---|---|"]
    for (is_other, cause), tests in sorted(groups.items(), key=lambda each: each[0]):
        name, error = ("none named", cause) if is_other else (cause, "")
        some = ", ".join(tests[:MAX_TESTS])
        lines.append(f"| {_cell(name)} | {_cell(error)} | {len(tests)} | {_cell(some)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _write(lines: Sequence[str], output: str | None) -> None:
    text = "\n".join(lines) + "\n"
    print(text)
    if output:
        pathlib.Path(output).write_text(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="tests of the suite; all by default")
    parser.add_argument("--python", default="3.13", choices=PYTHONS, help="%(default)s by default")
    parser.add_argument(
        "--use",
        action="append",
        metavar="PACKAGE=REQUIREMENT",
        help=f"what to install in place of a package; nothing leaves it out; by default "
        f"{' and '.join(USE)}",
    )
    parser.add_argument(
        "--folder",
        default="~/.cache/tfaccel/versions",
        help="where the copy and its environment lie, about 4 GB; %(default)s by default",
    )
    parser.add_argument("--output", help="a Markdown file for the page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
