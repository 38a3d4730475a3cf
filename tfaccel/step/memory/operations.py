"""How XLA treats TensorFlow's operations when it gives their results memory.

kind_of(op)     # Kind.FUSED
"""

import enum

import tensorflow as tf

from tfaccel.keras_internals.called_functions import called_by

# Their results are their first inputs, in the same memory.
VIEWS = {
    "EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "ReadVariableOp",
    "Reshape", "Snapshot", "Squeeze", "StopGradient", "Bitcast", "CheckNumerics",
    "TensorListPushBack", "TensorListSetItem",
}  # fmt: skip
RESHAPES = {"Bitcast", "ExpandDims", "Reshape", "Squeeze"}  # those of them with another shape
# Operations that XLA computes in the kernels that read their results.
ELEMENTWISE = {
    "Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Asin", "Asinh", "Atan", "Atan2", "Atanh",
    "BiasAdd", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "ClipByValue", "Cos",
    "Cosh", "Div", "DivNoNan", "Elu", "EluGrad", "Equal", "Erf", "Erfc", "Erfinv", "Exp", "Expm1",
    "Floor", "FloorDiv", "FloorMod", "Gelu", "Greater", "GreaterEqual", "InvGrad", "IsFinite",
    "IsInf", "IsNan", "LeakyRelu", "LeakyReluGrad", "LeftShift", "Less", "LessEqual", "Log",
    "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul",
    "MulNoNan", "Neg", "NextAfter", "NotEqual", "OnesLike", "Pow", "RealDiv", "Reciprocal",
    "ReciprocalGrad", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "RightShift", "Rint", "Round",
    "Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad",
    "Sign", "Sin", "Sinh", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt",
    "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tan", "Tanh", "TanhGrad", "Xdivy", "Xlogy",
    "ZerosLike",
}  # fmt: skip
# Those of them that XLA for the CPU computes once, and writes for several readers.
EXPENSIVE = {
    "Cos", "Erf", "Erfc", "Exp", "Expm1", "Log", "Log1p", "Pow", "Sigmoid", "Sin", "Softplus",
    "Tan", "Tanh",
}  # fmt: skip
JOINS = {"Concat", "ConcatV2", "Pack"}  # likewise
# The same, but an element of the result is at another place than what it is made of.
MOVING = {
    "BroadcastTo", "BroadcastArgs", "Concat", "ConcatV2", "Diag", "DiagPart", "Fill", "GatherV2",
    "MatrixBandPart", "MirrorPad", "OneHot", "Pack", "Pad", "PadV2", "Range", "ReverseV2", "Slice",
    "Split", "SplitV", "StridedSlice", "StridedSliceGrad", "Tile", "Transpose", "Unpack",
}  # fmt: skip
# Operations that read what the kernels before them compute, and write something of their own.
REDUCING = {
    "All", "Any", "ArgMax", "ArgMin", "BiasAddGrad", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum",
    "XlaReduce", "XlaVariadicReduceV2",
    "LogSoftmax", "Softmax", "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
}  # fmt: skip
# Convolutions for which XLA for the CPU copies the gradient in another order of its axes.
TURNING = {"Conv2DBackpropFilter", "Conv2DBackpropInput"}
BARRIER = "XlaOptimizationBarrier"
LOOPS = {"StatelessWhile", "While"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
LISTS = {"EmptyTensorList", "TensorListReserve"}  # of tensors; loops write to them
READS = {"Placeholder", "ReadVariableOp", "VarHandleOp"}  # have state, and change none
NOTHING = {"Const", "NoOp", "Placeholder", "Shape", "ShapeN", "Size", "Rank", "VarHandleOp"}


class Kind(enum.Enum):
    """What becomes of an operation."""

    NOTHING = "it needs no memory"
    VIEW = "its result is its input"
    FUSED = "the kernels that read its result compute it"
    REDUCING = "a kernel computes it, which also computes what it reads"
    ASSIGNS = "a kernel writes it to a variable"
    BARRIER = "its inputs are in memory, and are its results"
    OPAQUE = "a kernel reads its inputs from memory"


def kind_of(op: tf.Operation, *, xla: bool) -> Kind:
    """Returns what becomes of an operation.

    Args:
      op: of a traced function.
      xla: whether XLA compiles the function. Without it, each operation has a kernel of its own.
    """
    name = op.type
    if name in NOTHING:
        return Kind.NOTHING
    if name in VIEWS:
        return Kind.VIEW
    if name == BARRIER:
        return Kind.BARRIER
    if not xla:
        return Kind.OPAQUE
    if name in ELEMENTWISE or name in MOVING:
        return Kind.FUSED
    if name in REDUCING:
        return Kind.REDUCING
    if name.startswith("Assign") and op.inputs and op.inputs[0].dtype == tf.resource:
        return Kind.ASSIGNS
    if name in CALLS:
        return _of_call(op)
    return Kind.OPAQUE


def _of_call(op: tf.Operation) -> Kind:
    """Returns the kind of a call of a small function, such as a reduction with its own reducer."""
    kinds = {
        kind_of(each, xla=True) for graph in called_by(op) for each in graph.get_operations()
    } - {Kind.NOTHING, Kind.VIEW}
    if kinds and kinds <= {Kind.FUSED}:
        return Kind.FUSED
    if kinds and kinds <= {Kind.FUSED, Kind.REDUCING}:
        return Kind.REDUCING
    return Kind.OPAQUE
