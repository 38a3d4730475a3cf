"""The StableHLO text of a call of a Triton kernel, which XLA compiles for the GPU.

XLA for NVIDIA GPUs compiles the text of a Triton kernel in a custom call `__gpu$xla.gpu.triton`.
The `backend_config` of the call has the fields of XLA's `TritonCall`
(xla/service/gpu/triton_call.h). The arguments of the kernel are the call's operands and after them
its results, all of them arrays. So a number, such as that of rows, becomes a constant of the text.
tools/kernel_texts.py writes the texts.
"""

import functools
import pathlib
import re
from collections.abc import Sequence

import tensorflow as tf

TYPES = {tf.float16: "f16", tf.bfloat16: "bf16"}
LARGEST = 2**31 - 1  # number that a kernel counts to
OF_TRITON = re.compile("triton", re.IGNORECASE)  # in XLA's errors


def tensor(shape: Sequence[int], dtype: tf.DType | str) -> str:
    """Returns MLIR's name of an array's type.

    Args:
      shape: its shape.
      dtype: a dtype of TYPES, or MLIR's name of another one.
    """
    return f"tensor<{'x'.join(map(str, (*shape, TYPES.get(dtype, dtype))))}>"


@functools.cache
def text_of(folder: pathlib.Path, name: str) -> str:
    """Returns a kernel's text with placeholders, which tools/kernel_texts.py wrote to a folder."""
    return (folder / f"{name}.ttir").read_text()


def filled(
    text: str, *, sizes: dict[str, int], constants: Sequence[int | float], dtype: tf.DType
) -> str:
    """Returns a kernel's text without placeholders, whose arguments are arrays alone.

    Args:
      text: the text with placeholders, for bfloat16, as `text_of` returns it.
      sizes: the sizes of blocks, powers of 2, by their names.
      constants: the values of the arguments that are numbers, in their order.
      dtype: float16 or bfloat16.
    """
    for name, size in sizes.items():
        text = text.replace(f"{{{name}}}", str(size))
    text = re.sub(r"\bbf16\b", TYPES[dtype], text.replace("xbf16", "x" + TYPES[dtype]))
    first, head, body = re.split(r"(?<=\n)(  tt\.func public .*\n)", text, maxsplit=1)
    given = re.findall(r"(%arg\d+): (i32|f32)(?=[,)])", head)
    head = re.sub(r", %arg\d+: (i32|f32)(?=[,)])", "", head)
    lines = [
        f"    {argument} = arith.constant {_literal(value)} : {kind}\n"
        for (argument, kind), value in zip(given, constants, strict=True)
    ]
    return "".join([first, head, *lines, body])


def module(
    text: str,
    given: Sequence[str],
    results: Sequence[str],
    *,
    programs: int,
    warps: int,
    stages: int,
) -> str:
    """Returns a StableHLO module whose `main` calls a kernel.

    Args:
      text: the kernel's, as `filled` returns it.
      given: the types of `main`'s arguments, as `tensor` returns them.
      results: those of its results.
      programs: how many programs (blocks of threads) of the GPU compute it.
      warps: the groups of 32 threads of a program.
      stages: how many blocks are loaded ahead of being used, plus one.
    """
    numbers = {
        "num_stages": stages,
        "num_warps": warps,
        "grid_x": programs,
        "grid_y": 1,
        "grid_z": 1,
    }
    config = [
        f'name = "{name_of(text)}"',
        f'ir = "{_escaped(text)}"',
        *(f"{each} = {value} : i32" for each, value in numbers.items()),
    ]
    settings = [
        "api_version = 4 : i32",
        f"backend_config = {{{', '.join(config)}}}",
        f"operand_layouts = [{', '.join(map(_layout, given))}]",
        f"result_layouts = [{', '.join(map(_layout, results))}]",
    ]
    names = ", ".join(f"%a{i}" for i in range(len(given)))
    arguments = ", ".join(f"%a{i}: {each}" for i, each in enumerate(given))
    kinds = ", ".join(results)
    parts = [f"%r#{i}" for i in range(len(results))] if len(results) > 1 else ["%r"]
    made, returned = (f"%r:{len(results)}", f"({kinds})") if len(results) > 1 else ("%r", kinds)
    return (
        f"module @kernel {{\n  func.func public @main({arguments}) -> ({kinds}) {{\n"
        f"    {made} = stablehlo.custom_call @__gpu$xla.gpu.triton({names}) "
        f"{{{', '.join(settings)}}} : ({', '.join(given)}) -> {returned}\n"
        f"    return {', '.join(parts)} : {kinds}\n  }}\n}}\n"
    )


def name_of(text: str) -> str:
    """Returns the name of a kernel's function, which a profile shows."""
    return re.search(r"tt\.func public @(\w+)", text)[1]


def _literal(value: float) -> str:
    """Returns a number as MLIR writes it, whose floating-point numbers all have a point."""
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _escaped(text: str) -> str:
    return text.replace("\\", r"\5C").replace('"', r"\22").replace("\n", r"\0A")


def _layout(kind: str) -> str:
    rank = len(re.findall(r"\d+x", kind))
    order = ", ".join(str(axis) for axis in reversed(range(rank)))
    return f"dense<{f'[{order}]' if rank > 1 else order}> : tensor<{rank}xindex>"
