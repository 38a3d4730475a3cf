"""The StableHLO text of cuDNN's flash attention, forward and backward.

XLA for NVIDIA GPUs hands a custom call named `__cudnn$fmha...` to cuDNN, which computes

    output = softmax(scale * query x key + bias, masked) x value

without keeping the scores. The call's `backend_config` is a JSON text with the fields of XLA's
`CudnnfMHABackendConfig` (xla/service/gpu/backend_configs.proto). Each function below returns a
module whose `main` has the arguments and results that the function lists.

Shapes: query [B, T, N, H]; key and value [B, S, K, H], where N is a multiple of K; bias [B or 1,
N or 1, T, S]; statistics [B, N, T] float32, the logarithm of the sum of each softmax.
"""

import dataclasses
import json

import tensorflow as tf

_TYPES = {tf.float16: ("f16", "F16"), tf.bfloat16: ("bf16", "BF16")}
_BSNH, _BNSH, _STATISTICS = "[3, 2, 1, 0]", "[3, 1, 2, 0]", "[2, 1, 0]"


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention that cuDNN computes.

    Attributes:
      query: the shape [B, T, N, H].
      key: the shape [B, S, K, H] of key and value.
      dtype: tf.float16 or tf.bfloat16, of query, key, value, bias and output.
      scale: what the products of query and key are multiplied by.
      is_causal: whether row t of the query sees the rows 0 to t of the key only.
      bias: the shape [B or 1, N or 1, T, S] of what is added to the scores; None without a bias.
    """

    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: tf.DType
    scale: float
    is_causal: bool = False
    bias: tuple[int, int, int, int] | None = None

    @property
    def statistics(self) -> tuple[int, int, int]:
        """The shape [B, N, T] of the statistics."""
        batch, rows, heads, _ = self.query
        return batch, heads, rows

    @property
    def has_gradient_of_bias(self) -> bool:
        """Whether cuDNN computes the bias's gradient: it does for a bias [1, N, T, S]."""
        return self.bias is not None and self.bias[:2] == (1, self.query[2])


def forward(of: Attention) -> str:
    """Returns the module of (query, key, value[, bias]).

    It returns (output [B, T, N, H], statistics [B, N, T]).
    """
    arguments = [*_inputs(of), *_biases(of)]
    batch, rows, heads, size = of.query
    results = [
        (_tensor(of, (batch, heads, rows, size)), _BNSH),
        (_tensor(of, of.statistics, "f32"), _STATISTICS),
    ]
    lines = [
        _call("fwd", _target(of, ""), _config(of, _FORWARD), arguments, results),
        _back("out", "fwd", 0, of, of.query),
    ]
    returned = [("%out", _tensor(of, of.query)), ("%fwd#1", results[1][0])]
    return _module(arguments, lines, returned)


def backward(of: Attention) -> str:
    """Returns the module of (query, key, value, statistics, gradient, output, as in `forward`...).

    `gradient` is the output's, [B, T, N, H]. It returns the gradients of (query, key, value[,
    bias]), the bias's if `has_gradient_of_bias`.
    """
    own = [
        ("%statistics", _tensor(of, of.statistics, "f32"), _STATISTICS),
        ("%gradient", _tensor(of, of.query), _BSNH),
    ]
    output, biases = ("%output", _tensor(of, of.query), _BSNH), _biases(of)
    operands = [*_inputs(of), *own, *biases, output]  # in the call the output comes last
    shapes = [of.query, of.key, of.key]
    results = [(_tensor(of, (b, n, s, h)), _BNSH) for b, s, n, h in shapes]
    if of.has_gradient_of_bias:
        results.append((_tensor(of, of.bias), _BSNH))
    names = ["query_", "key_", "value_"]
    lines = [
        _call("bwd", _target(of, "Backward"), _config(of, _BACKWARD), operands, results),
        *(_back(name, "bwd", i, of, shapes[i]) for i, name in enumerate(names)),
    ]
    returned = [(f"%{name}", _tensor(of, shapes[i])) for i, name in enumerate(names)]
    if of.has_gradient_of_bias:
        returned.append(("%bwd#3", results[3][0]))
    return _module([*_inputs(of), *own, output, *biases], lines, returned)


def _inputs(of: Attention) -> list[tuple[str, str, str]]:
    """Returns (name, type, layout) of query, key and value."""
    shapes = {"%query": of.query, "%key": of.key, "%value": of.key}
    return [(name, _tensor(of, shape), _BSNH) for name, shape in shapes.items()]


def _biases(of: Attention) -> list[tuple[str, str, str]]:
    """Returns (name, type, layout) of the bias, or nothing."""
    return [("%bias", _tensor(of, of.bias), _BSNH)] if of.bias else []


def _target(of: Attention, direction: str) -> str:
    scaled = "ScaleBias" if of.bias else ""
    return f"__cudnn$fmha{scaled}Softmax{direction}"


def _tensor(of: Attention, shape: tuple[int, ...], dtype: str | None = None) -> str:
    return f"tensor<{'x'.join(map(str, shape))}x{dtype or _TYPES[of.dtype][0]}>"


def _call(name: str, target: str, config: str, operands: list, results: list) -> str:
    """Returns the custom call; its last result is the workspace, whose size XLA sets."""
    results = [*results, ("tensor<0xui8>", "[0]")]
    names = ", ".join(each for each, _, _ in operands)
    types = ", ".join(each for _, each, _ in operands)
    settings = [
        "api_version = 2 : i32",
        f'backend_config = "{config}"',
        f"operand_layouts = [{', '.join(_layout(each) for _, _, each in operands)}]",
        f"result_layouts = [{', '.join(_layout(each) for _, each in results)}]",
    ]
    returned = ", ".join(each for each, _ in results)
    return (
        f"%{name}:{len(results)} = stablehlo.custom_call @{target}({names}) "
        f"{{{', '.join(settings)}}} : ({types}) -> ({returned})"
    )


def _layout(order: str) -> str:
    rank = order.count(",") + 1
    return f"dense<{order if rank > 1 else order[1:-1]}> : tensor<{rank}xindex>"


def _back(name: str, call: str, index: int, of: Attention, shape: tuple[int, ...]) -> str:
    """Returns the line that gives a result [B, N, S, H] of the call as [B, S, N, H].

    The result's layout is that of [B, S, N, H] already, so nothing is moved.
    """
    batch, rows, heads, size = shape
    before = _tensor(of, (batch, heads, rows, size))
    return (
        f"%{name} = stablehlo.transpose %{call}#{index}, dims = [0, 2, 1, 3] : ({before}) -> "
        f"{_tensor(of, shape)}"
    )


def _module(arguments: list, lines: list[str], returned: list[tuple[str, str]]) -> str:
    given = ", ".join(f"{name}: {kind}" for name, kind, _ in arguments)
    names, kinds = (", ".join(each) for each in zip(*returned, strict=True))
    body = "\n    ".join([*lines, f"return {names} : {kinds}"])
    return (
        f"module @attention {{\n  func.func public @main({given}) -> ({kinds}) {{\n    {body}\n"
        "  }\n}\n"
    )


def _products(**numbers: tuple) -> dict:
    """Returns the dimensions of products by name: (contracting left, right, batch left, right)."""
    kinds = [
        f"{side}_{kind}_dimensions" for kind in ("contracting", "batch") for side in ("lhs", "rhs")
    ]
    return {
        f"{name}_dot_dimension_numbers": {
            kind: [str(each) for each in dims] for kind, dims in zip(kinds, given, strict=True)
        }
        for name, given in numbers.items()
    }


# The scores are [B, N, T, S], the other operands [B, T or S, heads, H].
_FORWARD = _products(
    bmm1=([3], [3], [0, 2], [0, 2]),
    bmm2=([3], [1], [0, 1], [0, 2]),
)
_BACKWARD = _products(
    bmm1_grad_gemm1=([2], [1], [0, 1], [0, 2]),
    bmm1_grad_gemm2=([3], [1], [0, 1], [0, 2]),
    bmm2_grad_gemm1=([2], [1], [0, 1], [0, 2]),
    bmm2_grad_gemm2=([3], [3], [0, 2], [0, 2]),
)


def _config(of: Attention, products: dict) -> str:
    """Returns the `backend_config`, escaped for the text of a module."""
    batch, rows, heads, _ = of.query
    config = {
        "operation_queue_id": "0",
        "wait_on_operation_queues": [],
        "cudnn_fmha_backend_config": {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": of.scale,
            "intermediate_tensor_shape": {
                "element_type": _TYPES[of.dtype][1],
                "dimensions": [str(each) for each in (batch, heads, rows, of.key[1])],
                "tuple_shapes": [],
                "layout": {
                    "dim_level_types": [],
                    "dim_unique": [],
                    "dim_ordered": [],
                    "minor_to_major": ["3", "2", "1", "0"],
                    "tiles": [],
                    "element_size_in_bits": "0",
                    "memory_space": "0",
                    "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "dynamic_shape_metadata_prefix_bytes": "0",
                },
                "is_dynamic_dimension": [False] * 4,
            },
            "is_flash_attention": True,
            "mask_type": "CAUSAL" if of.is_causal else "NO_MASK",
            **products,
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": 0,
            "max_seg_per_batch": 1,
            "is_paged_attention": False,
        },
    }
    return json.dumps(config).replace('"', r"\22")
