"""Finds out from its first bytes whether a file is compressed or an archive, so cannot be mapped.

compression_of("train.tfrecord")    # "compressed with ZLIB", or None
"""

import os
import zlib

from tfaccel.common.regular_file import open_regular

NUM_BYTES = 512  # read from a file's beginning

_BEGINNINGS = {
    b"\x1f\x8b": "compressed with GZIP",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"]\0\0": "compressed with LZMA",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x04\x22\x4d\x18": "compressed with LZ4",
    b"\xff\x06\0\0sNaPpY": "compressed with Snappy",
    b"LZIP": "compressed with lzip",
    b"\x1f\x9d": "compressed with compress",
    b"PK\x03\x04": "a ZIP archive (as .zip, .npz and .xlsx are)",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"PAR1": "a Parquet file",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


def compression_of(file: str | os.PathLike) -> str | None:
    """Returns the format of a file that cannot be read directly, in words; None for other files."""
    try:
        with open_regular(file, buffering=0) as opened:
            start = opened.read(NUM_BYTES)
    except OSError:
        return None
    return compression_of_bytes(start)


def compression_of_bytes(start: bytes) -> str | None:
    """Returns the same for a file that begins with the given bytes."""
    found = (name for magic, name in _BEGINNINGS.items() if start.startswith(magic))
    return next(found, None) or ("compressed with ZLIB" if _is_zlib(start) else None)


def _is_zlib(start: bytes) -> bool:
    # Two bytes are not enough evidence: the bytes after them must unpack, too.
    if len(start) < 8 or start[0] & 0x0F != 8 or int.from_bytes(start[:2], "big") % 31:
        return False
    try:
        return bool(zlib.decompressobj().decompress(start, 1)) or len(start) < NUM_BYTES
    except zlib.error:
        return False
