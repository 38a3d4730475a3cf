"""The settings of NCCL: variables of the environment, and lines of its files.

settings = nccl_settings(os.environ)
settings["NCCL_SOCKET_IFNAME"].value, str(settings["NCCL_IB_HCA"])

NCCL reads the file that NCCL_CONF_FILE names, or else ~/.nccl.conf, and then /etc/nccl.conf. The
first value of a name counts, and the environment comes first.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tfaccel.diagnostics.doctor.facts.files import ROOT, text

# Programs like to set these two for PyTorch beside NCCL's own.
PREFIXES = ("NCCL_", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


class Setting(NamedTuple):
    """The value of a setting.

    Attributes:
      name: such as "NCCL_SOCKET_IFNAME".
      value: its text, as NCCL reads it.
      file: the file that sets it; "" if the environment does.
    """

    name: str
    value: str
    file: str = ""

    def __str__(self) -> str:
        """Returns the setting and where it is set."""
        return f"{self.name}={self.value}" + (f" (in {self.file})" if self.file else "")

    @property
    def removal(self) -> str:
        """How to remove the setting, in words."""
        return f"remove {self.name} from {self.file}" if self.file else f"unset {self.name}"


def nccl_settings(environment: Mapping[str, str], root: pathlib.Path = ROOT) -> dict[str, Setting]:
    """Returns the settings by name.

    Args:
      environment: the environment of this process.
      root: the folder of /etc.
    """
    own = environment.get("NCCL_CONF_FILE") or f"{environment.get('HOME', '')}/.nccl.conf"
    found = {name: Setting(name, value) for name, value in environment.items()}
    for file in (pathlib.Path(own), root / "etc/nccl.conf"):
        for name, value in _lines(file):
            found.setdefault(name, Setting(name, value, str(file)))
    return {name: each for name, each in found.items() if name.startswith(PREFIXES)}


def _lines(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    # A pipe would wait for its writer.
    for line in text(file).splitlines() if os.path.isfile(file) else ():
        name, is_set, value = line.partition("=")
        if is_set:  # a comment has another name
            yield name, value
