"""Reads a command line: its flags, its config file, and the files and folders to write."""

import dataclasses
import difflib
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Iterable

import ml_collections
from absl import flags
from ml_collections import config_flags

from tfaccel.common import meant, run_log
from tfaccel.common.errors import UserError, did_you_mean
from tfaccel.common.flags import Flag, define, parsed
from tfaccel.common.local_path import local_path
from tfaccel.common.regular_file import NOT_REGULAR, is_special
from tfaccel.config import all_fields, check_is_config, default_config
from tfaccel.config.file_errors import in_file
from tfaccel.training.workdir import read_config, workdir_of

CONFIG = Flag(
    "config",
    None,
    "an experiment: a Python file with get_config(), as in configs/. FILE:smoke runs its smallest "
    "size. A run's workdir is valid too and stands for the config of that run",
    shown="FILE",
)
VERBOSE = Flag(
    "verbose",
    False,
    "show every automatic choice and its reason, as TFACCEL_VERBOSE=1 does. log.txt in a run's "
    "workdir always has them",
)


def new_file(name: str, given: str | None, *, expected: str = "a new file") -> pathlib.Path | None:
    """Returns the absolute path of a new file that can be written; None if none is given.

    Raises:
      UserError: the file exists, or its folder does not exist or cannot be written to.
    """
    path = local_path(given).absolute() if given else None
    if path and path.exists():
        raise UserError(f"{name} {path} exists; give {expected}")
    if path:
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UserError(
                f"{name} {path} cannot be written ({error.strerror}); give another folder"
            ) from error
    return path


def one_workdir(command: str, values: flags.FlagValues, given: list[str]) -> pathlib.Path:
    """Returns the workdir that --workdir or the only argument of a command names.

    Raises:
      UserError: there is none, or more than one.
    """
    if given and (values.workdir or len(given) > 1):
        raise UserError(
            f"{command} takes one workdir, but the command line has '{given[-1]}' too; see "
            f"`tfaccel {command} --help`"
        )
    path = values.workdir or next(iter(given), None)
    if not path:
        raise UserError(f"no workdir; give a run's, e.g. `tfaccel {command} --workdir=runs/a`")
    return workdir_of(path)


def folder_to_be(name: str, given: str) -> pathlib.Path:
    """Returns the path of a folder that exists or can be made.

    Raises:
      UserError: the path or a folder above it is a file, or cannot be written to.
    """
    path = local_path(given)
    there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is a file"
        raise UserError(f"{name} {path} cannot be written, because {there} {why}; give a folder")
    return path


def whole(number: float) -> float:
    """Returns the number as an int if it is whole."""
    return int(number) if number.is_integer() else number


def parse_config_flags(
    command: str, arguments: list[str], own: Iterable[Flag] = ()
) -> tuple[flags.FlagValues, str]:
    """Returns the flags, including `config` with its overrides, and the file that --config names.

    `own` are the command's own flags.
    """
    values = define((*own, VERBOSE))
    given, others = config_apart(arguments)
    file = _one_file(command, given, others)
    _check_overrides(others)
    # The file is loaded here, so that its errors are not taken for errors of the flags.
    _define_config(file, load(file), values, others)
    unparsed = parsed(command, values, spelled(others, values), fields=all_fields())
    if unparsed:
        raise UserError(f"'{unparsed[0]}' is not a flag; expected --config.SECTION.FIELD=VALUE")
    if values.verbose:
        os.environ[run_log.VARIABLE] = "1"  # child processes inherit it
    return values, file


def _define_config(
    file: str, config: ml_collections.ConfigDict, values: flags.FlagValues, arguments: list[str]
) -> None:
    """Defines flags for the fields of the config that the command line changes."""
    argv = ["tfaccel", *arguments]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"config file {file} lacks a field that the command line changes ({error}); start the "
            "file from tfaccel.config.default_config()"
        ) from error
    except flags.Error as error:
        raise UserError(str(error)) from error


def spelled(arguments: list[str], values: flags.FlagValues) -> list[str]:
    """Returns the arguments with flag names as defined: "-" and "_" in a name are the same."""
    known = {name.replace("-", "_"): name for name in values}

    def spelled(argument):
        match = re.fullmatch(r"(--?)([^=.]+)(=.*)?", argument, flags=re.DOTALL)
        name = match and known.get(match[2].replace("-", "_"))
        return f"{match[1]}{name}{match[3] or ''}" if name else argument

    return [spelled(each) for each in arguments]


def config_apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the values of all --config flags, and the other arguments."""
    given, others, words = [], [], iter(arguments)
    for word in words:
        if re.fullmatch(r"--?config(=.*)?", word, flags=re.DOTALL):
            given.append(word.partition("=")[2] if "=" in word else next(words, ""))
        else:
            others.append(word)
    return given, others


def _one_file(command: str, given: list[str], others: list[str]) -> str:
    """Returns the one value of --config: a file, perhaps with an argument after a colon."""
    if not any(given):
        _check_spelling(others)
        files = [each for each in others if ".py" in each and not each.startswith("-")]
        meant = next(iter(files), "configs/digits.py")
        raise UserError(f"no config; add one, e.g. `tfaccel {command} --config={meant}`")
    if len(given) > 1:
        raise UserError(f"--config names {' and '.join(given)}; expected one config file")
    local_path(given[0])  # or a UserError
    file = pathlib.Path(given[0].partition(":")[0])
    if not file.is_file() and not (file / "config.json").is_file():
        folder = file if file.is_dir() else file.parent
        there = [str(each) for each in folder.glob("*.py")]
        wrong = "is a folder" if file.is_dir() else "does not exist"
        wrong = f"is {NOT_REGULAR}" if is_special(file) else wrong
        hint = did_you_mean(str(file), there) or "; give a Python file, or the workdir of a run"
        raise UserError(f"config file {file} {wrong}{hint}")
    return given[0]


def _check_spelling(arguments: list[str]) -> None:
    """Raises UserError if an argument is a misspelled --config."""
    for each in arguments:
        name = each.partition("=")[0]
        near = difflib.get_close_matches(name.strip("-"), ["config"], cutoff=0.8)
        if name.startswith("-") and (near or name.strip("-") in ("cfg", "c", "conf", "yaml")):
            raise UserError(f"there is no flag {name}; did you mean --config?")


def load(given: str) -> ml_collections.ConfigDict:
    """Returns the config of --config=FILE, or of --config=FILE:SIZE.

    A Python file's get_config() is called with the size, if there is one. For a run's workdir or
    its config.json, the config of that run is returned.

    Raises:
      UserError: the file fails, or has no get_config().
    """
    file, colon, size = given.partition(":")
    if os.path.isdir(file) or os.path.basename(file) == "config.json":
        if colon:
            raise UserError(f"config {file} is a run's and takes no ':{size}'; remove ':{size}'")
        return _as_trained(workdir_of(file))
    try:
        get_config = getattr(_imported(file), "get_config", None)
        if get_config is None:
            raise UserError("there is no get_config(); add one that changes default_config()")
        config = get_config(*([size] if colon else []))
        check_is_config(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (Exception, SystemExit) as error:  # any error in the user's file
        hint = "" if file.endswith(".py") else "; expected a Python file that has get_config()"
        raise UserError(f"{in_file(error, file)}{hint}") from error
    return config


def _as_trained(workdir: pathlib.Path) -> ml_collections.ConfigDict:
    """Returns the config of a run. Flags can change its fields, as those of a config file."""
    config = default_config()
    with config.ignore_type():
        for section, fields in dataclasses.asdict(read_config(workdir)).items():
            config[section].update(fields)
    return config


def _imported(file: str) -> types.ModuleType:
    """Returns the file as a module, whatever the suffix of its name."""
    loader = importlib.machinery.SourceFileLoader("config_file", file)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses in the file look it up there
    loader.exec_module(module)
    return module


def _check_overrides(arguments: list[str]) -> None:
    """Raises UserError if a --config.SECTION.FIELD does not exist."""
    names = all_fields()
    for argument in arguments:
        override = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        name = override[1] if override else None
        if name and name not in names:
            raise UserError(f"config has no field '{name}'{meant.field(name, names)}")
