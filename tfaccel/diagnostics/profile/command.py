"""What `tfaccel profile` prints and writes, of what it is asked for.

report(parse(get_config()), Options(config_file="configs/digits.py", search=True))
"""

import dataclasses
import json as json_lib
import pathlib
import sys

from tfaccel.common.errors import UserError
from tfaccel.common.local_path import local_path
from tfaccel.common.report import in_lines
from tfaccel.common.tables import show
from tfaccel.config import Config
from tfaccel.diagnostics.profile import config_file as config_file_lib
from tfaccel.diagnostics.profile.knobs import with_changes
from tfaccel.diagnostics.profile.options import Options
from tfaccel.diagnostics.profile.run import measure_experiment, search_experiment
from tfaccel.diagnostics.profile.search_table import SearchTable

MINUTES = 10.0  # of a search, by default


def report(config: Config, options: Options) -> int:
    """Measures, prints, searches and writes as the options say; returns the exit code.

    Raises:
      UserError: a mistake in the config or the flags.
      IsolatedError: the measurement failed.
    """
    trace = _folder(options.trace) if options.trace else None
    if sys.stderr.isatty():
        print("tfaccel: measuring run, step and loader, half a minute or more", file=sys.stderr)
    timed = measure_experiment(config, seconds=options.seconds, trace_to=trace)
    profile = timed.measured.profile
    setup = dataclasses.replace(profile.setup, searches=options.search)
    profile = dataclasses.replace(profile, setup=setup)
    if not options.json:
        show(profile)
    table = None
    if options.search:
        table = search_experiment(
            config,
            timed,
            seconds=options.seconds,
            minutes=MINUTES if options.minutes is None else options.minutes,
            memory_mib=None if options.memory_mib is None else int(options.memory_mib),
        )
        if isinstance(table, SearchTable) and table.found.changes and options.out:
            table = _written(config, table, options)
    if options.json:
        found = table.as_dict() if isinstance(table, SearchTable) else {"no_search": table}
        also = {"search": found} if options.search else {}
        show(json_lib.dumps(profile.as_dict() | also, indent=2))
    elif table is not None:
        show(f"\n{table if isinstance(table, SearchTable) else in_lines(table)}")
    return 0


def _folder(given: str) -> str:
    """Returns the absolute path of a folder that can be written to, made if it is not there."""
    folder = local_path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"trace {folder} cannot be made ({error.strerror}); give another folder"
        ) from error
    return str(folder)


def _written(config: Config, table: SearchTable, options: Options) -> SearchTable:
    """Writes the best as a config file; returns the table, which says so."""
    base, _, size = options.config_file.partition(":")
    config_file_lib.write(
        options.out,
        base=pathlib.Path(base),
        size=size,
        config=with_changes(config, table.found.changes),
        said=table.summary.removeprefix("best: "),
    )
    return dataclasses.replace(table, written=str(options.out))
