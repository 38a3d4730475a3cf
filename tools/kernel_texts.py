"""Writes a Triton kernel as text, which tfaccel fills in and XLA compiles for the GPU.

A text has placeholders for the sizes of the blocks. Other numbers, such as the number of rows, are
arguments of the kernel in the text. XLA passes arrays only, so `tfaccel/step/triton_calls.py` turns
these arguments into constants when a step is traced. It fills in the sizes, too.

The programs tools/*_kernels.py import this module. It needs Triton 3.5.1 and no GPU.
"""

import re

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend


def text_of(kernel, types: dict[str, str], values: dict[str, int]) -> str:
    """Returns a kernel's text in Triton's dialect of MLIR.

    Args:
      kernel: the function.
      types: Triton's types of its arguments. An argument that is not among them is an i32.
      values: those of the arguments that are `tl.constexpr`.
    """
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({})
    names = kernel.arg_names
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in names}
    # XLA aligns its arrays to 16 bytes. XLA of TensorFlow 2.21 ends the process if no argument has
    # an attribute.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ASTSource(kernel, signature, values, attributes).make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    return backend.make_ttir(module, {}, options, 90).str_nodebug()


def template_of(
    kernel, types: dict[str, str], sizes: dict[str, int], chosen: dict[str, bool] | None = None
) -> str:
    """Returns a kernel's text with a placeholder for the size of each block.

    Args:
      kernel: the function.
      types: as in `text_of`.
      sizes: the sizes of its blocks. They appear in no other role in the text, so that each can be
        found again.
      chosen: the values of its other `tl.constexpr`.
    """
    text = text_of(kernel, types, sizes | (chosen or {}))
    for name, size in sizes.items():
        text = text.replace(f"%c{size}_i32", f"%{name}")
        text = re.sub(rf"(?<![0-9.x%]){size}(?![0-9.])|(?<=x){size}(?=x)", f"{{{name}}}", text)
    return text
