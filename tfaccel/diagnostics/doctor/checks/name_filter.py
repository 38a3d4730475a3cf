"""The lists of names that NCCL takes for interfaces and for cards.

NameFilter("^docker,lo").matches("eth0")            # True: neither prefix
NameFilter("=mlx5_0:1,mlx5_1").matches("mlx5_1", 2)     # True: all ports of mlx5_1

An entry is a prefix, or the exact name if the list begins with "=". "^" excludes the names. Both
signs count only at the start of the list: NCCL takes them for a part of the name elsewhere, and
spaces, too (matchIfList in src/misc/utils.cc of NCCL).
"""

import re

from tfaccel.diagnostics.doctor.facts.files import number


class NameFilter:
    """A list of names."""

    def __init__(self, listed: str):
        """Takes the text of the list."""
        signs, names = re.fullmatch(r"(\^?=?)(.*)", listed, re.DOTALL).groups()
        self._excludes, self._is_exact = "^" in signs, "=" in signs
        self._entries = [_entry(each) for each in names.split(",") if each.strip(":")]

    def matches(self, name: str, port: int | None = None) -> bool:
        """Returns whether NCCL would take this name, and this port of a card."""
        is_listed = not self._entries or any(
            (name == listed if self._is_exact else name.startswith(listed))
            and (port is None or wanted in (None, port))
            for listed, wanted in self._entries
        )
        return is_listed != self._excludes

    @property
    def misspelt(self) -> list[str]:
        """The entries that match nothing because of a sign or a space."""
        return [name for name, _ in self._entries if name[:1] in "^=" or re.search(r"\s", name)]


def _entry(text: str) -> tuple[str, int | None]:
    name, _, rest = text.partition(":")
    port = rest.partition(":")[0]
    return name, number(port) or None  # ports are counted from 1
