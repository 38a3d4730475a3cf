"""XLA's own reduce-scatter and all-gather over the replicas, as operations of a traced function.

TensorFlow 2.21 has no kernel for XLA of CollectiveReduceScatterV2 and CollectiveGatherV2. So each
is a module of StableHLO. XLA takes the number of replicas from a CollectiveReduceV2, so the
function needs one of these, too. Then XLA makes one `reduce-scatter` or `all-gather` of each.

    own = reduce_scatter(matrix, channel=1)                 # [values] from [replicas, values]
    slices = all_gather(own, num_replicas=2, channel=2)     # [replicas, values] from [values]
"""

import tensorflow as tf

from tfaccel.keras_internals.call_module import call_module

_ELEMENTS = {
    tf.float32: "f32",
    tf.float64: "f64",
    tf.float16: "f16",
    tf.bfloat16: "bf16",
}


def reduce_scatter(matrix: tf.Tensor, *, channel: int, platform: str = "CUDA") -> tf.Tensor:
    """Returns this replica's row of the sum of all replicas' matrices, [values].

    Args:
      matrix: [replicas, values], floating.
      channel: a number above 0 that no other collective of the function has.
      platform: that XLA compiles for, as StableHLO names it.
    """
    num_replicas, size = matrix.shape
    element = _ELEMENTS[matrix.dtype]
    given, row, own = (
        f"tensor<{shape}x{element}>" for shape in (f"{num_replicas}x{size}", f"1x{size}", size)
    )
    text = f"""
module {{
  func.func public @main(%x: {given}) -> {own} {{
    %row = "stablehlo.reduce_scatter"(%x) ({{
      ^bb0(%a: tensor<{element}>, %b: tensor<{element}>):
        %sum = stablehlo.add %a, %b : tensor<{element}>
        stablehlo.return %sum : tensor<{element}>
    }}) {{scatter_dimension = 0 : i64, {_group(num_replicas, channel)}}} : ({given}) -> {row}
    %own = stablehlo.reshape %row : ({row}) -> {own}
    return %own : {own}
  }}
}}
"""
    (own,) = call_module(text, [matrix], [tf.TensorSpec([size], matrix.dtype)], platform=platform)
    return own


def all_gather(
    own: tf.Tensor, *, num_replicas: int, channel: int, platform: str = "CUDA"
) -> tf.Tensor:
    """Returns the vectors of all replicas, [replicas, values]; the arguments are as above."""
    (size,) = own.shape
    element = _ELEMENTS[own.dtype]
    given, row, found = (
        f"tensor<{shape}x{element}>" for shape in (size, f"1x{size}", f"{num_replicas}x{size}")
    )
    text = f"""
module {{
  func.func public @main(%x: {given}) -> {found} {{
    %row = stablehlo.reshape %x : ({given}) -> {row}
    %all = "stablehlo.all_gather"(%row) {{
      all_gather_dim = 0 : i64, {_group(num_replicas, channel)}
    }} : ({row}) -> {found}
    return %all : {found}
  }}
}}
"""
    spec = tf.TensorSpec([num_replicas, size], own.dtype)
    (found,) = call_module(text, [own], [spec], platform=platform)
    return found


def _group(num_replicas: int, channel: int) -> str:
    """Returns the attributes that say who takes part: all replicas, in their order."""
    members = ", ".join(map(str, range(num_replicas)))
    return (
        f"replica_groups = dense<[[{members}]]> : tensor<1x{num_replicas}xi64>, "
        f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 1>"
    )
