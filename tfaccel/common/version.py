"""The version of tfaccel."""

__version__ = "0.1.0"
