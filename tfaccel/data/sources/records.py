"""Finds the records of a TFRecord shard, and keeps an index like DALI's `tfrecord2idx`.

with open("train-00000-of-01024", "rb", buffering=0) as file:
    records = index(file, keeper)          # [num_records, 2] int64: offset and length
    start, end = payload(*records[7])      # the bytes that were given to the writer
"""

import os
import pathlib
import struct
from typing import BinaryIO

import numpy as np

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular
from tfaccel.data.sources.compression import NUM_BYTES, compression_of_bytes
from tfaccel.data.sources.index import Keeper

# A record: uint64 length, uint32 CRC of the length, the data, uint32 CRC of the data.
HEADER, FOOTER = struct.Struct("<QI"), 4

PIECE = 4096  # bytes that are read at once; the images in between are skipped


def index(file: BinaryIO, keeper: Keeper) -> np.ndarray:
    """Returns [num_records, 2] int64: offset and length of each record, with header and footer.

    The records are read from the shard's index, which has a line "offset length" for each. Without
    an index the shard is scanned, and the index is kept.

    Raises:
      UserError: the shard is compressed, cut short, damaged, or not a TFRecord file.
    """
    records = keeper.read(file.name, ".idx", lambda place: _read_index(place, file))
    if records is None:
        records = _scan(file.name, Pieces(file), _size(file))
        lines = (f"{offset} {length}\n" for offset, length in records.tolist())
        keeper.write(file.name, ".idx", "".join(lines).encode())
    return records


def payload(offset: int, length: int) -> tuple[int, int]:
    """Returns the range (start, end) of a record's data."""
    return offset + HEADER.size, offset + length - FOOTER


class Pieces:
    """A file's bytes, read in pieces: `data(start, end)`."""

    def __init__(self, file: BinaryIO):
        """Takes an open file; the file's position does not matter."""
        self._descriptor = file.fileno()
        self._piece, self._start = b"", 0

    def __call__(self, start: int, end: int) -> bytes:
        """Returns a range of bytes, or fewer at the file's end."""
        if not self._start <= start <= end <= self._start + len(self._piece):
            size = max(PIECE, end - start)
            self._piece, self._start = os.pread(self._descriptor, size, start), start
        return self._piece[start - self._start : end - self._start]


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read_index(place: pathlib.Path, file: BinaryIO) -> np.ndarray | None:
    """Returns [num_records, 2] int64, offset and length, or None if the index does not fit."""
    try:
        numbers = np.array(read_regular(place).decode().split(), dtype=np.int64)
    except (OSError, ValueError, OverflowError, MemoryError):
        return None
    if len(numbers) == 0 or len(numbers) % 2:
        return None
    records = numbers.reshape(-1, 2)
    if records.min() < 0 or records.max() > _size(file):
        return None
    ends = records.sum(axis=1)
    follow = np.array_equal(records[:, 0], np.append(0, ends[:-1]))
    hold_data = records[:, 1].min() >= HEADER.size + FOOTER
    fit = follow and hold_data and ends[-1] == _size(file)
    return records if fit and _have_headers(file, records) else None


def _have_headers(file: BinaryIO, records: np.ndarray) -> bool:
    """Returns whether each record's header has the length that is in the index.

    An index with the same records in another order would also fill the shard.
    """
    lengths = records[:, 1] - HEADER.size - FOOTER
    headers = (os.pread(file.fileno(), 8, offset) for offset in records[:, 0].tolist())
    return b"".join(headers) == lengths.astype("<i8").tobytes()


def _scan(shard: str, data: Pieces, shard_size: int) -> np.ndarray:
    """Returns [num_records, 2] int64, offset and length, from a scan of the shard."""
    records, offset = [], 0
    while offset < shard_size:
        header = data(offset, offset + HEADER.size)
        length, crc = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        end = offset + HEADER.size + length + FOOTER
        whole = len(header) == HEADER.size
        if whole and crc != _masked_crc32c(header[:8]):
            what = "is not a TFRecord file" if offset == 0 else f"is damaged at byte {offset}"
            packed = compression_of_bytes(data(0, NUM_BYTES)) if offset == 0 else None
            if packed:
                raise UserError(
                    f"shard {shard} is {packed}, so records cannot be read one by one; write it "
                    "again uncompressed, because compression hardly shrinks encoded images"
                )
            raise UserError(f"shard {shard} {what}; expected records from tf.io.TFRecordWriter")
        if not whole or end > shard_size:
            raise UserError(
                f"shard {shard} is cut short: it ends at byte {shard_size} in record "
                f"{len(records)}; copy or write it again"
            )
        records.append((offset, end - offset))
        offset = end
    return np.array(records, np.int64)


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def _masked_crc32c(data: bytes) -> int:
    """Returns the checksum of TFRecords, with TensorFlow's mask."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
