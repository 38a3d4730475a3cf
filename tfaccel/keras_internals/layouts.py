"""The order in which XLA for GPUs keeps a tensor's axes in memory."""

from collections.abc import Sequence

import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module

_NAMES = {tf.bfloat16: "bf16", tf.float16: "f16", tf.float32: "f32"}  # of StableHLO


def in_order(x: tf.Tensor, axes: Sequence[int] | None = None) -> tf.Tensor:
    """Returns a tensor whose axes XLA keeps in this order in memory, and so its gradient's.

    A tensor whose shape is not known when the function is traced is returned as it is, and so is
    one of another dtype than float32, float16 and bfloat16.

    Args:
      x: the tensor.
      axes: all axes, where values that are neighbours along the last one are neighbours in memory;
        None: as they are counted.
    """
    if x.dtype not in _NAMES or not x.shape.is_fully_defined() or x.shape.rank < 2:
        return x
    axes = range(x.shape.rank) if axes is None else axes

    @tf.custom_gradient
    def ordered(x):
        text = _module(x.shape.as_list(), x.dtype, axes)
        (kept,) = call_module(text, [x], [tf.TensorSpec.from_tensor(x)])
        return kept, ordered

    return ordered(x)


def _module(shape: list[int], dtype: tf.DType, axes: Sequence[int]) -> str:
    """Returns a StableHLO module that returns its argument with a constraint on its layout.

    JAX's `with_layout_constraint` makes the same call (JAX 0.9.0). No kernel is left of it.
    """
    tensor = f"tensor<{'x'.join(map(str, shape))}x{_NAMES[dtype]}>"
    order = ", ".join(str(axis) for axis in reversed(axes))
    layout = f"[dense<[{order}]> : tensor<{len(shape)}xindex>]"
    return f"""module @in_order {{
  func.func public @main(%x: {tensor}) -> {tensor} {{
    %0 = stablehlo.custom_call @LayoutConstraint(%x) {{
      api_version = 1 : i32, operand_layouts = {layout}, result_layouts = {layout}
    }} : ({tensor}) -> {tensor}
    return %0 : {tensor}
  }}
}}
"""
