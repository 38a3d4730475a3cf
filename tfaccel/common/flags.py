"""The flags of a command. Each flag has its name, default, help and check in one place.

A tuple of `Flag`s gives absl's flags, and the lines of `--help` about them.

    FLAGS = (Flag("top", 3, "number of classes for each file", at_least=1),)
    values = define(FLAGS)
    words = parsed("predict", values, ["--top=5", "cat.jpg"], fields=())    # ["cat.jpg"]
    described(FLAGS)        # "  --top=3  number of classes for each file\n"
"""

import dataclasses
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

from absl import flags

from tfaccel.common import meant
from tfaccel.common.errors import UserError

WIDTH = 80
WIDEST_HEAD = 25  # the help of a wider flag starts on the next line
# Python's messages about a wrong value, which absl repeats, and clearer ones.
EXPECTED = {
    r"invalid literal for int\(\).*": "expected a whole number",
    r"could not convert string to float.*": "expected a number",
    r"\('Non-boolean argument to boolean flag.*": "expected true or false",
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command."""

    name: str
    default: object
    """The value if the flag is not given. It sets the flag's type; a tuple means a list."""
    help: str
    """What the flag does."""
    more: str = ""
    """What `--help=all` adds to `help`."""
    shown: str = ""
    """A name for the value in the help, such as "DIR". If it is empty, the default is shown."""
    kind: type = str
    """The type of the value if the default is None."""
    choices: Sequence[str] = ()
    """All valid values, if they can be listed."""
    at_least: float | None = None
    at_most: float | None = None
    is_rare: bool = False
    """True if only `--help=all` shows the flag."""

    @property
    def head(self) -> str:
        """The flag as the help shows it: --name=VALUE."""
        if self.default is False:
            return f"--{self.name}"
        default = self.default
        default = ",".join(default) if isinstance(default, tuple) else default
        default = f"{default:g}" if isinstance(default, float) else default
        return f"--{self.name}={self.shown or default}"


def define(given: Iterable[Flag]) -> flags.FlagValues:
    """Returns absl's flags, without parsing anything."""
    values = flags.FlagValues()
    for each in given:
        kind = each.kind if each.default is None else type(each.default)
        default = list(each.default) if isinstance(each.default, tuple) else each.default
        own = {"name": each.name, "default": default, "help": each.help, "flag_values": values}
        bounds = {"lower_bound": each.at_least, "upper_bound": each.at_most}
        if each.choices:
            flags.DEFINE_enum(enum_values=list(each.choices), **own)
        elif kind is bool:
            flags.DEFINE_bool(**own)
        elif kind is tuple:
            flags.DEFINE_list(**own)
        elif kind is int:
            flags.DEFINE_integer(**own, **bounds)
        elif kind is float:
            flags.DEFINE_float(**own, **bounds)
        else:
            flags.DEFINE_string(**own)
    return values


def parsed(
    command: str,
    values: flags.FlagValues,
    arguments: Sequence[str],
    *,
    fields: Collection[str],
    known_only: bool = False,
) -> list[str]:
    """Sets the flags and returns the other arguments.

    Args:
      command: the name of the command, for messages.
      values: the flags.
      arguments: the command line after the name of the command.
      fields: the fields of a config, for the message about an unknown flag.
      known_only: whether to return unknown flags with the other arguments.

    Raises:
      UserError: a flag is unknown or its value is wrong.
    """
    try:
        return values([f"tfaccel {command}", *arguments], known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        raise meant.unknown_flag(command, error.flagname, values, fields) from error
    except flags.Error as error:
        sentence = str(error)
        for said, expected in EXPECTED.items():
            sentence = re.sub(said, expected, sentence)
        raise UserError(sentence) from error


def described(given: Iterable[Flag], *, whole: bool = True) -> str:
    """Returns the help of flags, 80 columns wide. Only if `whole`, it has the rare flags."""
    heads = {each: each.head for each in given if whole or not each.is_rare}
    column = max([len(head) for head in heads.values() if len(head) <= WIDEST_HEAD], default=0) + 4
    lines = []
    for flag, head in heads.items():
        text = f"{flag.help}. {flag.more}" if whole and flag.more else flag.help
        first, *others = textwrap.wrap(text, WIDTH - column)
        if len(head) > WIDEST_HEAD:
            lines += [f"  {head}", f"{'':{column}}{first}"]
        else:
            lines.append(f"  {head:<{column - 2}}{first}")
        lines += [f"{'':{column}}{each}" for each in others]
    return "\n".join(lines) + "\n"
