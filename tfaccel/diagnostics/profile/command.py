"""`tfaccel profile`: measures, searches if requested, prints and writes the result.

report(parse(get_config()), Options(config_file="configs/digits.py", search=True))
"""

import dataclasses
import json
import pathlib
import sys

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.report import in_lines
from tfaccel.common.tables import show
from tfaccel.config import Config
from tfaccel.diagnostics.profile import config_file
from tfaccel.diagnostics.profile.knobs import with_changes
from tfaccel.diagnostics.profile.options import Options
from tfaccel.diagnostics.profile.run import measure_experiment, search_experiment
from tfaccel.diagnostics.profile.search_table import SearchTable

MINUTES = 10.0  # the default time limit of a search


def report(config: Config, options: Options) -> int:
    """Measures, searches, prints and writes as the options say; returns the exit code.

    Raises:
      UserError: the config or a flag has a mistake.
      IsolatedError: the measurement failed.
    """
    trace = _folder(options.trace) if options.trace else None
    if sys.stderr.isatty():
        print(
            "tfaccel: measuring run, step and loader; this takes half a minute or more",
            file=sys.stderr,
        )
    measured = measure_experiment(config, seconds=options.seconds, trace_to=trace)
    setup = dataclasses.replace(measured.profile.setup, searches=options.search)
    profile = dataclasses.replace(measured.profile, setup=setup)
    if not options.json:
        show(profile)
    table = None
    if options.search:
        table = search_experiment(
            config,
            measured,
            seconds=options.seconds,
            minutes=MINUTES if options.minutes is None else options.minutes,
            memory_mib=None if options.memory_mib is None else int(options.memory_mib),
        )
        if isinstance(table, SearchTable) and table.found.changes and options.out:
            table = _written(config, table, options)
    if options.json:
        found = table.as_dict() if isinstance(table, SearchTable) else {"no_search": table}
        also = {"search": found} if options.search else {}
        show(json.dumps(profile.as_dict() | also, indent=2))
    elif table is not None:
        show(f"\n{table if isinstance(table, SearchTable) else in_lines(table)}")
    return 0


def _folder(given: str) -> str:
    """Creates a folder if it does not exist, and returns its absolute path."""
    folder = local_path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trace {folder} cannot be created ({error.strerror}); give another folder"
        ) from error
    return str(folder)


def _written(config: Config, table: SearchTable, options: Options) -> SearchTable:
    """Writes the best setting as a config file; returns the table with the name of the file."""
    base, _, size = options.config_file.partition(":")
    config_file.write(
        options.out,
        base=pathlib.Path(base),
        size=size,
        config=with_changes(config, table.found.changes),
        said=table.summary.removeprefix("best: "),
    )
    return dataclasses.replace(table, written=str(options.out))
