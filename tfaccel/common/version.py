"""The version of tfaccel, and of Keras: pyproject.toml has both, and a test compares them."""

__version__ = "0.1.0"
KERAS = "3.15"  # the one minor version that the private names were tried with
