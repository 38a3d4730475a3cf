"""The versions of tfaccel and of Keras. A test compares them with those in pyproject.toml."""

__version__ = "0.1.0"
KERAS = "3.15"  # the only minor version with which the private names were tested
