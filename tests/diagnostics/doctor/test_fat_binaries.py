"""The GPUs that a library has code for, read from the file."""

import pathlib
import struct

import tensorflow as tf

from tfaccel.diagnostics.doctor.facts.fat_binaries import capabilities

WHEEL = pathlib.Path(tf.__file__).parent


def fat_binary(*entries):
    """A fat binary of (kind, compute capability): 1 is PTX, and 2 is a compiled kernel."""
    parts = b"".join(
        struct.pack("<HHIQ", kind, 257, 64, 16).ljust(28, b"\0")
        + struct.pack("<I", capability).ljust(64 - 28, b"\0")
        + bytes(16)
        for kind, capability in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(parts)) + parts


def elf(section, content):
    """An ELF file of 64 bits that has one section, and one of the sections' names."""
    names = b"\0" + section + b"\0.names\0"
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(content) + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    table = [(1, 64, len(content)), (len(section) + 2, 64 + len(content), len(names))]
    headers = [struct.pack("<IIQQQQ", at, 1, 0, 0, where, size) for at, where, size in table]
    return bytes(header) + content + names + b"".join(each.ljust(64, b"\0") for each in headers)


def test_each_gpu_of_each_fat_binary_is_read(tmp_path):
    file = tmp_path / "lib.so"
    content = fat_binary((2, 80), (2, 120), (1, 120)) + bytes(8) + fat_binary((2, 90), (64, 70))
    file.write_bytes(elf(b".nv_fatbin", content))
    assert capabilities(file) == ("compute_120", "sm_120", "sm_80", "sm_90")


def test_a_file_without_cuda_code_has_none(tmp_path):
    file = tmp_path / "lib.so"
    file.write_bytes(elf(b".text", fat_binary((2, 80))))
    assert capabilities(file) == ()
    file.write_text("no ELF file")
    assert capabilities(file) == ()


def test_the_library_of_this_tensorflow_has_what_it_was_built_for():
    (library,) = WHEEL.glob("libtensorflow_cc.so*")
    told = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", ["sm_80", "compute_90"])
    assert {*capabilities(library)} >= {*told}
