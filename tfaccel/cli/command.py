"""Defines a command: its flags, its help and what it does, all in one place.

The decorator makes a `Command` of a function. Call the command with its arguments to run it.

    @command(
        summary="draw loss, metrics and throughput of one or more runs",
        takes="WORKDIR... [flags]",
        about="Draws loss, metrics and images per second ...",
        flags=(Flag("output", "plot.png", "a new .png, or .html"),),
        examples=("tfaccel plot runs/a runs/b --output=curves.html",),
    )
    def plot(values, workdirs) -> int: ...

    plot(["runs/a", "--output=a.png"])     # exit code
    plot(["--help"])                       # prints the help and returns 0
"""

import dataclasses
import itertools
import os
import textwrap
from collections.abc import Callable, Mapping

from ml_collections import config_flags

from tfaccel.cli import fields
from tfaccel.cli.flags import CONFIG, VERBOSE, config_apart, parse_config_flags, spelled
from tfaccel.common.errors import UserError
from tfaccel.common.flags import WIDTH, Flag, define, described, parsed
from tfaccel.common.tables import show
from tfaccel.common.version import __version__
from tfaccel.config import all_fields, default_config

HELP_FLAGS = {"--help", "-h", "--helpfull", "--helpshort"}
NO_WORDS = "[flags]"
OF_CONFIG = "--config=FILE [flags] [--config.SECTION.FIELD=VALUE]"  # for commands with a config


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `tfaccel`. Call it with its arguments to run it."""

    run: Callable
    """The function that takes the flags and the other arguments, and returns the exit code."""
    summary: str
    """One or two lines for `tfaccel --help`."""
    about: str
    """What the command does, in paragraphs."""
    takes: str = NO_WORDS
    """The usage after the command's name: OF_CONFIG, or the command's own arguments."""
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()
    more: str = ""
    """Text that `--help=all` shows as it is, in place of `warning`."""
    warning: str = ""
    """Text that `--help` shows after the flags."""
    runs_command: bool = False
    """True if another command, with its own flags, follows the flags."""
    shows_fields: bool = False
    """True if `--help` shows the common fields of a config."""

    @property
    def name(self) -> str:
        """The word after `tfaccel`."""
        return self.run.__name__

    def __call__(self, arguments: list[str]) -> int:
        """Runs the command or prints its help, and returns the exit code."""
        own = self.before_command(arguments)[0] if self.runs_command else arguments
        if (topic := topic_of(own)) is not None:
            show(self.help([each for each in own if not is_help(each)], topic), end="")
            return 0
        return self.run(*self.parse(arguments))

    @property
    def reads_config(self) -> bool:
        """True if the command takes a config by --config."""
        return self.takes == OF_CONFIG

    def parse(self, arguments: list[str]) -> tuple:
        """Returns the flags and the other arguments: the config file, paths or a command.

        Raises:
          UserError: a flag is unknown or its value is wrong.
        """
        if self.reads_config:
            return parse_config_flags(self.name, arguments, self.flags)
        if self.runs_command:
            return self.before_command(arguments)
        values = define(self.flags)
        values.set_gnu_getopt(True)  # flags may follow the paths
        paths = parsed(self.name, values, spelled(arguments, values), fields=all_fields())
        if paths and self.takes == NO_WORDS:
            hint = f"see `tfaccel {self.name} --help`"
            if os.path.isdir(paths[0]) and "data" in values:
                hint = f"did you mean --data={paths[0]}?"
            raise UserError(f"{self.name} takes no argument '{paths[0]}'; {hint}")
        return values, paths

    def before_command(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """Returns the flags, spelled as defined, and the command that follows them, unchanged."""
        values = define(self.flags)
        values.set_gnu_getopt(False)  # flags after the command belong to it
        own = spelled(arguments, values)
        # absl returns unknown flags, such as --help, and everything from the first non-flag on.
        left = parsed(self.name, values, own, fields=all_fields(), known_only=True)
        num_own = len(arguments) - len([*itertools.dropwhile(lambda each: each[:1] == "-", left)])
        return own[:num_own], arguments[num_own:]

    def help(self, arguments: list[str], topic: str) -> str:
        """Returns the help.

        Args:
          arguments: the command line without the flags for help. The help shows field values from
            the config file and the flags in it.
          topic: "" for the common part, "all", or a section of the config.
        """
        fields.check_topic(topic, fields.TOPICS if self.reads_config else ("all",))
        config, source = default_config(), "with their defaults"
        if self.reads_config and config_apart(arguments)[0]:
            values, file = self.parse(arguments)
            config = values.config
            changed = config_flags.get_override_values(values["config"])
            source = f"with the values of {file}{' and the other flags' if changed else ''}"
        if topic not in ("", "all"):
            return fields.every(config, topic)
        text = self._text(whole=topic == "all")
        if topic and self.reads_config:
            text += f"\nEvery field of an experiment, {source}:\n{fields.every(config)}"
        elif self.shows_fields:
            text += "\n" + fields.common(config, source)
        return text

    def _text(self, *, whole: bool) -> str:
        """Returns usage, paragraphs, flags and examples. If `whole`, it has the rare flags, too."""
        given = (CONFIG, *self.flags, VERBOSE) if self.reads_config else self.flags
        parts = [self._usage(), *map(_filled, self.about.split("\n\n"))]
        if given:
            parts.append(described(given, whole=whole))
        if ending := self.more if whole else self.warning:
            parts.append(ending)
        parts.append("".join(f"  {line}\n" for each in self.examples for line in each.splitlines()))
        return "\n".join(parts)

    def _usage(self) -> str:
        first, *others = [f"tfaccel {self.name} {each}\n" for each in self.takes.splitlines()]
        return f"usage: {first}" + "".join(f"       {each}" for each in others)


def command(**stated) -> Callable[[Callable], Command]:
    """Makes a command of the function below it; see `Command` for the arguments."""
    return lambda run: Command(run, **stated)


def overview(commands: Mapping[str, Command]) -> str:
    """Returns the help of `tfaccel` itself: each command with its examples."""
    parts = [
        f"tfaccel {__version__}: train Keras models from images and keep GPUs busy.\n",
        "usage: tfaccel COMMAND [flags]\n",
    ]
    for name, each in commands.items():
        text = f"  {name}   {each.summary}"
        lines = textwrap.wrap(text, WIDTH, subsequent_indent=" " * (len(name) + 5))
        lines[0] = text[: len(lines[0])]
        lines += [f"{'':12}{line}" for example in each.examples for line in example.splitlines()]
        parts.append("\n".join(lines) + "\n")
    parts.append(
        "  tfaccel COMMAND --help       a command's flags; --help=all shows every field\n"
        "  tfaccel --version            the version\n"
    )
    return "\n".join(parts)


def is_help(argument: str) -> bool:
    """Returns whether an argument asks for help."""
    return argument in HELP_FLAGS or argument.startswith("--help=")


def topic_of(arguments: list[str]) -> str | None:
    """Returns the help topic: "" for the common part, None if no help is requested."""
    asked = [each for each in arguments if is_help(each)]
    return asked[-1].partition("=")[2] if asked else None


def _filled(paragraph: str) -> str:
    text = " ".join(paragraph.split())
    indent = {"initial_indent": "  ", "subsequent_indent": "  "}
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, **indent) + "\n"
