"""`python -m tfaccel`: the `tfaccel` command for a package that is on the path, not installed."""

from tfaccel.cli.main import cli

cli()
