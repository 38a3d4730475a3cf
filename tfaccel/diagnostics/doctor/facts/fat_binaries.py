"""Reads from a library for which GPUs it has CUDA code, without loading the library.

capabilities(pathlib.Path("libtensorflow_cc.so.2"))    # ("compute_90", "sm_60", "sm_70", ...)

The section .nv_fatbin of an ELF file is a row of fat binaries. Each has a header of 16 bytes (the
magic number, a version, the header's size, the size of what follows; fatbinary.h of the CUDA
toolkit) and an entry for each GPU: kind, sizes, and the GPU's compute capability at byte 28.
"""

import mmap
import pathlib
import struct
from collections.abc import Iterator

MAGIC = 0xBA55ED50
KINDS = {1: "compute", 2: "sm"}  # PTX, and a compiled kernel


def capabilities(library: pathlib.Path) -> tuple[str, ...]:
    """Returns names such as "sm_80" and "compute_90"; none if the file has no CUDA code."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return tuple(sorted(set(_names(data))))
        except struct.error:  # no ELF file, or another layout of the section
            return ()


def _names(data: mmap.mmap) -> Iterator[str]:
    for start, end in _sections(data, b".nv_fatbin"):
        while (start := data.find(MAGIC.to_bytes(4, "little"), start, end)) >= 0:
            _, _, header, size = struct.unpack_from("<IHHQ", data, start)
            entry, start = start + header, start + header + size
            while entry < min(start, end):
                kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
                (capability,) = struct.unpack_from("<I", data, entry + 28)
                if kind in KINDS:
                    yield f"{KINDS[kind]}_{capability}"
                entry += header + size or end


def _sections(data: mmap.mmap, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Yields the first and last byte of each section of a name, in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, number, of_names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(number)]
    names = headers[of_names][4]
    for name, _, _, _, offset, length in headers:
        if data[names + name : data.find(b"\0", names + name)] == wanted:
            yield offset, offset + length
