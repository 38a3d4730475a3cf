"""The versions of tfaccel and of Keras. A test compares them with those in pyproject.toml."""

__version__ = "0.1.0"
# The minor versions with which the private names were tested: tools/results/versions-*.md.
KERAS = ("3.15", "3.16")
