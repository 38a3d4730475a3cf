"""The flags of `tfaccel profile`, checked before TensorFlow starts.

Options(config_file="configs/digits.py", search=True)
"""

import dataclasses
import pathlib

from tfaccel.common.checks import check_number
from tfaccel.common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of the command.

    Attributes:
      config_file: the experiment's config file, which may have an argument after a colon.
      trace: a folder for TensorFlow's own profile; None to write no profile.
      search: True to search for faster settings.
      json: True to print one JSON object instead of tables.
      seconds: how long each rate is measured.
      minutes: the time limit of the search; None for 10.
      memory_mib: the memory that a setting may take, in MiB; None for no limit.
      out: a new config file for the best setting; None to write no file.
    """

    config_file: str
    trace: str | None = None
    search: bool = False
    json: bool = False
    seconds: float = 5.0
    minutes: float | None = None
    memory_mib: float | None = None
    out: pathlib.Path | None = None

    def __post_init__(self):
        """Checks every flag."""
        check_number("seconds", self.seconds, above=0)
        search_flags = {"minutes": self.minutes, "memory-mib": self.memory_mib, "out": self.out}
        for name, value in search_flags.items():
            if value is not None and not self.search:
                raise UserError(f"--{name} is only for --search; add --search or remove --{name}")
            if value is not None and name != "out":
                check_number(name, value, above=0)
        file = self.config_file.partition(":")[0]
        if self.out is not None and not pathlib.Path(file).is_file():
            raise UserError(
                f"--out writes a config file that builds on --config, but {file} is a folder; use "
                "--config=FILE.py"
            )
