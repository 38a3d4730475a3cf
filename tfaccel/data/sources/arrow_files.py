"""Finds Arrow files, what their columns mean, and the place of each value in a file.

    tables = find_tables("cats/train")           # a dataset that Hugging Face's library saved
    tables.files, tables.features                # paths, {"label": {"_type": "ClassLabel", ...}}
    for batch, base in batches(tables.files[0]): # of pyarrow
        offsets, sizes = ranges(batch.column("image"), base, ...)

Arrow files have their values as they are in memory, so an encoded image is a range of bytes. This
is not so in Parquet files. They are unpacked once into Arrow files in the user's cache folder.
Needs pyarrow.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import uuid
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tfaccel.common.disk_errors import check_free, not_written
from tfaccel.common.errors import RunError, UserError
from tfaccel.common.extras import how_to_add, is_installed
from tfaccel.common.regular_file import read_regular
from tfaccel.common.run_log import summary
from tfaccel.common.tables import counted
from tfaccel.data.sources.index import Pattern, list_shards
from tfaccel.data.sources.paths import absolute
from tfaccel.process.cache_folder import cache_folder

STATE, SPLITS = "state.json", "dataset_dict.json"  # of `save_to_disk` of Hugging Face's datasets
FILES, KIND = "_data_files", "_type"  # keys in STATE, and in the note of a column
PARQUET = b"PAR1"  # the first bytes of a Parquet file
IPC_FILE = b"ARROW1"  # of an Arrow file with a footer; a stream of batches has none
STAMP = b"tfaccel"  # in the metadata of an unpacked file: the size and the time of its Parquet file
ROWS = 1024  # of a batch of an unpacked file


@dataclasses.dataclass(frozen=True)
class Tables:
    """The files of one table.

    Attributes:
      files: paths of Arrow files, in the order of the rows.
      names: the user's own paths of them, for messages: a Parquet file is unpacked elsewhere.
      features: what Hugging Face's library notes of each column, such as {"_type": "Image"}; empty
        if other programs wrote the files.
      types: the Arrow type of each column, by name.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    features: Mapping[str, dict]
    types: Mapping[str, object]


def check_pyarrow(what: object) -> None:
    """Raises UserError if pyarrow is not installed, which is needed to read `what`."""
    if not is_installed("pyarrow"):
        raise UserError(
            f"{what} needs pyarrow, which is not installed; add the extra ({how_to_add('parquet')})"
        )


def find_tables(pattern: Pattern) -> Tables:
    """Returns the files of a table.

    Args:
      pattern: a folder that `save_to_disk` wrote; or Arrow or Parquet files: a path, a pattern with
        * ? or [], or a sequence of these.

    Raises:
      UserError: pyarrow is missing; a file is missing or damaged, or is of another kind; or the
        files have different columns.
    """
    shards = find_arrow(pattern)
    check_pyarrow(shards[0])
    files = tuple(map(_as_arrow, shards))
    schemas = [_schema(each) for each in files]
    for shard, each in zip(shards, schemas, strict=True):
        if each.names != schemas[0].names:
            raise UserError(
                f"{shard} has the columns {', '.join(each.names)}, but {shards[0]} has "
                f"{', '.join(schemas[0].names)}; expected files of one table"
            )
    return Tables(
        files,
        tuple(shards),
        _features(schemas[0].metadata or {}),
        dict(zip(schemas[0].names, schemas[0].types, strict=True)),
    )


def find_arrow(pattern: Pattern) -> tuple[str, ...]:
    """Returns the paths of a table's files.

    Raises:
      UserError: as for `find_tables`, but for pyarrow and the files' contents.
    """
    folder = absolute(pattern) if isinstance(pattern, str | os.PathLike) else None
    if folder is None or not folder.is_dir():
        return list_shards(pattern)
    if (folder / SPLITS).is_file():
        splits = [str(each) for each in _json(folder / SPLITS).get("splits", ())] or ["train"]
        raise UserError(
            f"{folder} is a dataset of the splits {', '.join(splits)}; give the folder of one of "
            f"them, e.g. {folder / splits[0]}"
        )
    if not (folder / STATE).is_file():
        raise UserError(
            f"{folder} is a folder without {STATE}; expected a folder that save_to_disk of "
            f"Hugging Face's datasets wrote, or a pattern of Arrow or Parquet files: {folder}/*"
        )
    state = _json(folder / STATE)
    if not state.get(FILES):
        raise UserError(f"{folder / STATE} names no file; the dataset is empty: save it again")
    return tuple(str(folder / each["filename"]) for each in state[FILES])


def batches(file: str) -> Iterator[tuple]:
    """Yields each record batch of an Arrow file, and the address at which the file begins.

    The file is mapped, and the values of a batch lie in it.

    Raises:
      UserError: it is no Arrow file, or is damaged.
    """
    import pyarrow as pa

    try:
        whole = pa.memory_map(file).read_buffer()
        reader = _reader(whole)
        if isinstance(reader, pa.ipc.RecordBatchStreamReader):
            yield from ((batch, whole.address) for batch in reader)
        else:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index), whole.address
    except (pa.ArrowInvalid, OSError) as error:  # an OSError for a file that is cut short
        raise _damaged(file, error) from None


def ranges(column, base: int, file_size: int, *, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offset in the file and the size of each value, [rows] int64 each.

    Args:
      column: an Arrow array of binary values, or of Hugging Face's images: {bytes, path}.
      base: the address at which the file begins.
      file_size: in bytes.
      what: names the column in errors.

    Raises:
      UserError: a value is missing, or the values do not lie in the file as they are.
    """
    import pyarrow as pa

    if column.null_count:
        raise UserError(f"{what} has {counted(column.null_count, 'row')} without an image")
    if pa.types.is_struct(column.type):
        column = column.field("bytes")
    if column.null_count:
        raise UserError(
            f"{what} has {counted(column.null_count, 'row')} with the path of an image and not its "
            "bytes; save the dataset by dataset.save_to_disk(FOLDER) of Hugging Face's datasets, "
            "which embeds the files, as to_parquet() does not"
        )
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, width)[column.offset : column.offset + len(column) + 1]
    ends = ends.astype(np.int64)
    begin = (data.address if data else base) - base
    if begin < 0 or begin + int(ends[-1]) > file_size:
        raise UserError(
            f"{what} is compressed within the Arrow file, so its images are no ranges of bytes; "
            "write the file without compression, or as Parquet"
        )
    return begin + ends[:-1], np.diff(ends)


def holds_images(type_) -> bool:
    """Returns whether a column of this Arrow type may hold encoded images."""
    import pyarrow as pa

    if pa.types.is_struct(type_):
        index = type_.get_field_index("bytes")
        return index >= 0 and holds_images(type_.field(index).type)
    return pa.types.is_binary(type_) or pa.types.is_large_binary(type_)


def _reader(whole):
    import pyarrow as pa

    is_file = whole[: len(IPC_FILE)].to_pybytes() == IPC_FILE
    return pa.ipc.open_file(whole) if is_file else pa.ipc.open_stream(whole)


def _schema(file: str):
    import pyarrow as pa

    try:
        return _reader(pa.memory_map(file).read_buffer()).schema
    except (pa.ArrowInvalid, OSError) as error:  # an OSError for a file that is cut short
        raise _damaged(file, error) from None


def _damaged(file: str, error: Exception) -> UserError:
    return UserError(
        f"{file} is not a whole Arrow file ({str(error).splitlines()[0]}); expected a file of "
        "save_to_disk of Hugging Face's datasets, or Parquet: write it again"
    )


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, dict]:
    """Returns what Hugging Face's library notes in a file's schema; {} without its note."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: each for name, each in found.items() if isinstance(each, dict)}
    return {}


def _json(file: pathlib.Path) -> dict:
    try:
        found = json.loads(read_regular(file))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); save the dataset again") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged; save the dataset again")
    return found


def _as_arrow(shard: str) -> str:
    """Returns the shard, or the Arrow file into which a Parquet file is unpacked."""
    with open(shard, "rb") as file:
        if file.read(len(PARQUET)) != PARQUET:
            return shard
    status = os.stat(shard)
    stamp = f"{status.st_size} {status.st_mtime_ns}".encode()
    # The digest tells files of different folders with equal names apart. All files of a folder stay
    # in one folder, so that the names below it are the same on all hosts.
    parent, name = os.path.split(shard)
    folder = cache_folder("parquet") / hashlib.sha256(os.fsencode(parent)).hexdigest()[:16]
    unpacked = folder / f"{name}.arrow"
    if not (unpacked.exists() and (_schema(str(unpacked)).metadata or {}).get(STAMP) == stamp):
        _unpack(shard, unpacked, stamp)
    return str(unpacked)


def _unpack(shard: str, unpacked: pathlib.Path, stamp: bytes) -> None:
    """Writes the rows of a Parquet file as an Arrow file. A reader finds all of it, or none."""
    import pyarrow as pa
    from pyarrow import parquet

    unfinished = unpacked.with_name(f".{unpacked.name}.{uuid.uuid4().hex}")
    try:
        table = parquet.ParquetFile(shard)
        groups = (table.metadata.row_group(each) for each in range(table.num_row_groups))
        check_free(
            unpacked.parent,
            sum(each.total_byte_size for each in groups),
            what=f"{shard}, which is unpacked once, needs",
            fix="set XDG_CACHE_HOME to a folder of a larger disk",
        )
        summary("data: unpacking %s, once, into %s", shard, unpacked.parent)
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        schema = table.schema_arrow
        schema = schema.with_metadata({**(schema.metadata or {}), STAMP: stamp})
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in table.iter_batches(ROWS):
                stream.write_batch(batch.replace_schema_metadata(schema.metadata))
        os.replace(unfinished, unpacked)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{shard} is not a whole Parquet file ({str(error).splitlines()[0]}); write it again"
        ) from None
    except OSError as error:
        raise RunError(f"{unpacked} {not_written(error, unpacked.parent)}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def chosen(
    tables: Tables, asked: str | None, fits: Sequence[str], *, argument: str, kind: str
) -> str:
    """Returns the column that is asked for, or the only one that fits.

    Args:
      tables: the files.
      asked: the name of a column, or None.
      fits: the columns that fit.
      argument: the name of the argument, for errors.
      kind: what the column has, for errors: "encoded images".

    Raises:
      UserError: there is no such column, or none or several fit.
    """
    there = ", ".join(tables.types)
    if asked is not None:
        if asked not in tables.types:
            raise UserError(f"{argument}={asked!r}; {tables.names[0]} has the columns {there}")
        return asked
    if len(fits) != 1:
        found = f"several columns with {kind}: {', '.join(fits)}" if fits else f"no {kind}"
        raise UserError(
            f"{tables.names[0]} has {found}; give {argument}, one of its columns {there}"
        )
    return fits[0]
