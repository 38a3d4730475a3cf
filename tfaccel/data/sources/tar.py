"""Finds the samples of a tar shard, and keeps an index like DALI's `wds2idx`.

with open("x.tar", "rb", buffering=0) as file:
    samples = index(file, keeper)    # [[("jpg", 512, 11020, "a/0.jpg"), ("cls", ...)], ...]
"""

import os
import pathlib
import re
import tarfile
from typing import BinaryIO

from tfaccel.common.errors import UserError
from tfaccel.common.regular_file import read_regular
from tfaccel.data.sources.compression import NUM_BYTES, compression_of_bytes
from tfaccel.data.sources.index import Keeper

INDEX_VERSION = "v1.2"
BLOCK = tarfile.BLOCKSIZE

# The files of a sample: (extension, offset, size, name) of each.
Sample = list[tuple[str, int, int, str]]


def index(file: BinaryIO, keeper: Keeper) -> list[Sample]:
    """Returns the samples. A sample is adjacent files with the same name up to the first dot.

    The samples are read from the shard's index. Its first line is "v1.2 <samples>". Each sample has
    a line with "extension offset size name" for each file. Without an index the shard is scanned,
    and the index is kept.

    Raises:
      UserError: the shard is compressed, cut short or damaged, is not a tar file, has links, or has
        no samples.
    """
    descriptor = file.fileno()
    samples = keeper.read(file.name, ".idx", lambda place: _read_index(place, descriptor))
    if samples is None:
        samples = _scan(file.name, descriptor)
        keeper.write(file.name, ".idx", _dump_index(samples))
    return samples


def _scan(shard: str, descriptor: int) -> list[Sample]:
    """Returns the samples from a scan of the shard."""
    samples, last, length = [], None, os.fstat(descriptor).st_size
    try:
        # A copy of the descriptor, because a shard of a store has no path. The others use `pread`.
        with open(os.dup(descriptor), "rb") as file, tarfile.open(shard, "r:", fileobj=file) as tar:
            for member in tar:
                if member.offset_data + member.size > length:
                    raise tarfile.ReadError(f"'{member.name}' ends beyond the shard's end")
                stem, extension = _split(member.name)
                if extension and (member.islnk() or member.issym()):
                    raise UserError(
                        f"shard {shard}: '{member.name}' is a link to '{member.linkname}' and has "
                        "no bytes; pack it with tar --dereference --hard-dereference"
                    )
                if not member.isreg() or not extension:
                    continue
                if stem != last:
                    samples.append([])
                samples[-1].append((extension, member.offset_data, member.size, member.name))
                last = stem
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, MemoryError, EOFError) as error:
        packed = compression_of_bytes(os.pread(descriptor, NUM_BYTES, 0))
        if packed:
            raise UserError(
                f"shard {shard} is {packed}, so images cannot be read one by one; unpack it to a "
                "plain tar file, because compression hardly shrinks encoded images"
            ) from None
        raise UserError(
            f"shard {shard} is not a tar file, or is cut short ({error}); copy or write it again"
        ) from None
    if not _closes(descriptor, end):
        raise UserError(
            f"shard {shard} is cut short or damaged at byte {end}: expected the block of zeros "
            "that ends a tar file; copy or write it again"
        )
    if not samples:
        raise UserError(f"shard {shard} has no files with an extension; expected samples")
    return samples


def _split(name: str) -> tuple[str, str]:
    """Returns a file's path up to the first dot of its name, and the rest; "" for a hidden file."""
    dot = name.find(".", name.rfind("/") + 1)
    hidden = dot == name.rfind("/") + 1
    return (name, "") if dot < 0 or hidden else (name[:dot], name[dot + 1 :])


def _closes(descriptor: int, position: int) -> bool:
    return os.pread(descriptor, BLOCK, position) == bytes(BLOCK)


def _dump_index(samples: list[Sample]) -> bytes:
    # A blank would end the name when the index is read. The name is used only in messages.
    lines = [
        " ".join(re.sub(r"\s", "_", str(each)) for file in sample for each in file)
        for sample in samples
    ]
    return "\n".join([f"{INDEX_VERSION} {len(samples)}", *lines, ""]).encode(
        errors="surrogateescape"
    )


def _read_index(place: pathlib.Path, descriptor: int) -> list[Sample] | None:
    """Returns an index's samples, or None if a file or the end of the shard is somewhere else.

    A stale index would give wrong bytes, and so does a new index of `wds2idx` (DALI 2.4) if names
    have more than 100 characters.
    """
    try:
        text = read_regular(place).decode(errors="surrogateescape")
        first, *lines = text.splitlines()
        if first.split() != [INDEX_VERSION, str(len(lines))] or not lines:
            return None
        samples = [_parse(line.split()) for line in lines]
    except (OSError, ValueError, MemoryError):
        return None
    files = [file for sample in samples for file in sample]
    length = os.fstat(descriptor).st_size
    if not all(0 <= size <= length - offset and offset >= 0 for _, offset, size, _ in files):
        return None
    if not all(_is_file(descriptor, offset, size) for _, offset, size, _ in files):
        return None
    _, offset, size, _ = files[-1]
    end = offset + -(-size // BLOCK) * BLOCK
    if not _closes(descriptor, end):
        return None
    named = [[file for file in sample if _split(file[3])[1]] for sample in samples]
    return [sample for sample in named if sample]


def _parse(fields: list[str]) -> Sample:
    if not fields or len(fields) % 4:
        raise ValueError("a file has four fields")
    quads = zip(*(fields[start::4] for start in range(4)), strict=True)
    return [(extension, int(offset), int(size), name) for extension, offset, size, name in quads]


def _is_file(descriptor: int, offset: int, size: int) -> bool:
    """Returns whether a file of that size starts there, after a block with its header."""
    header = os.pread(descriptor, BLOCK, offset - BLOCK) if offset >= BLOCK else b""
    try:
        return header[156:157] in (b"0", b"\0") and tarfile.nti(header[124:136]) == size
    except tarfile.HeaderError:
        return False
