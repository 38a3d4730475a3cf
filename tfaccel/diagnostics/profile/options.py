"""What `tfaccel profile` is asked for, checked before TensorFlow starts.

Options(config_file="configs/digits.py", search=True)
"""

import dataclasses
import pathlib

from tfaccel.common.checks import check_number
from tfaccel.common.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """The command's flags.

    Attributes:
      config_file: the experiment's file, with its argument after a colon.
      trace: a folder for TensorFlow's own profile; None for none.
      search: whether other settings are tried.
      json: whether one JSON object is printed, and no tables.
      seconds: that each rate is measured for.
      minutes: for the search; None for 10.
      memory_mib: above which a setting is none to use; None for no limit.
      out: a new config file for the best; None for none.
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
        of_search = {"minutes": self.minutes, "memory-mib": self.memory_mib, "out": self.out}
        for name, value in of_search.items():
            if value is not None and not self.search:
                raise UserError(f"--{name} without --search, which it is for; add --search")
            if value is not None and name != "out":
                check_number(name, value, above=0)
        file = self.config_file.partition(":")[0]
        if self.out is not None and not pathlib.Path(file).is_file():
            raise UserError(
                f"--out writes a config file that builds on --config, and {file} is a folder; give "
                "--config=FILE.py"
            )
