"""A command: its flags, its help and what it does, stated in one place.

Takes a function and what is to be said of it; gives the command, which is called with arguments.

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
OF_CONFIG = "--config=FILE [flags] [--config.SECTION.FIELD=VALUE]"  # of commands that read a config


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `tfaccel`. Call it with its arguments to run it."""

    run: Callable
    """Takes the flags and what else the command line names; returns the exit code."""
    summary: str
    """A line or two for `tfaccel --help`."""
    about: str
    """What the command does, in paragraphs."""
    takes: str = NO_WORDS
    """The usage behind the command's name: OF_CONFIG, or what stands there beside flags."""
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()
    more: str = ""
    """What `--help=all` says in place of `warning`, as it is written."""
    warning: str = ""
    """What `--help` says behind the flags."""
    runs_command: bool = False
    """Whether another command follows the flags, and keeps its own."""
    shows_fields: bool = False
    """Whether `--help` shows the common fields of a config."""

    @property
    def name(self) -> str:
        """The word after `tfaccel`."""
        return self.run.__name__

    def __call__(self, arguments: list[str]) -> int:
        """Runs the command, or prints its help; returns the exit code."""
        own = self.before_command(arguments)[0] if self.runs_command else arguments
        if (topic := topic_of(own)) is not None:
            show(self.help([each for each in own if not is_help(each)], topic), end="")
            return 0
        return self.run(*self.parse(arguments))

    @property
    def reads_config(self) -> bool:
        """Whether --config names an experiment."""
        return self.takes == OF_CONFIG

    def parse(self, arguments: list[str]) -> tuple:
        """Returns the flags, and what else is named: the config file, paths or a command.

        Raises:
          UserError: a flag is unknown, or its value is wrong.
        """
        if self.reads_config:
            return parse_config_flags(self.name, arguments, self.flags)
        if self.runs_command:
            return self.before_command(arguments)
        values = define(self.flags)
        values.set_gnu_getopt(True)  # flags may follow the paths
        paths = parsed(self.name, values, spelled(arguments, values), fields=all_fields())
        if paths and self.takes == NO_WORDS:
            cure = f"see `tfaccel {self.name} --help`"
            if os.path.isdir(paths[0]) and "data" in values:
                cure = f"did you mean --data={paths[0]}?"
            raise UserError(f"'{paths[0]}' is no flag of {self.name}; {cure}")
        return values, paths

    def before_command(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """Returns the flags, spelled as they are defined, and the command as it was given."""
        values = define(self.flags)
        values.set_gnu_getopt(False)  # what follows the command is the command's
        own = spelled(arguments, values)
        # Of these absl leaves unknown flags, as --help, and all from the first word that is none.
        left = parsed(self.name, values, own, fields=all_fields(), known_only=True)
        num_own = len(arguments) - len([*itertools.dropwhile(lambda each: each[:1] == "-", left)])
        return own[:num_own], arguments[num_own:]

    def help(self, arguments: list[str], topic: str) -> str:
        """Returns the help.

        Args:
          arguments: the command line without the flags for help. The values of the config file and
            of the flags in it are shown.
          topic: "" for the common part, "all", or a section of the config.
        """
        fields.check_topic(topic, fields.TOPICS if self.reads_config else ("all",))
        config, source = default_config(), "they are by default"
        if self.reads_config and config_apart(arguments)[0]:
            values, file = self.parse(arguments)
            config = values.config
            changed = config_flags.get_override_values(values["config"])
            source = f"{file} and the other flags say" if changed else f"{file} says"
        if topic not in ("", "all"):
            return fields.every(config, topic)
        text = self._text(whole=topic == "all")
        if topic and self.reads_config:
            text += f"\nEvery field of an experiment, as {source}:\n{fields.every(config)}"
        elif self.shows_fields:
            text += "\n" + fields.common(config, source)
        return text

    def _text(self, *, whole: bool) -> str:
        """Returns usage, paragraphs, flags and examples; all flags if it is `whole`."""
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
    """Makes a command of the function below, whose name it has; see `Command` for what to state."""
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
        "  tfaccel COMMAND --help       a command's flags; --help=all for every field\n"
        "  tfaccel --version            the version\n"
    )
    return "\n".join(parts)


def is_help(argument: str) -> bool:
    """Returns whether an argument asks for help."""
    return argument in HELP_FLAGS or argument.startswith("--help=")


def topic_of(arguments: list[str]) -> str | None:
    """Returns what help is asked for: "" for the common part; None where none is."""
    asked = [each for each in arguments if is_help(each)]
    return asked[-1].partition("=")[2] if asked else None


def _filled(paragraph: str) -> str:
    text = " ".join(paragraph.split())
    indent = {"initial_indent": "  ", "subsequent_indent": "  "}
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, **indent) + "\n"
