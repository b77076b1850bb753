# SPDX-License-Identifier: Apache-2.0
"""The one table from the names MindSpore 2.10 dispatches by to our canonical ops and argument names.

`__fallback__` receives C++ primitive names (`AddExt`, `Muls`, `SumExt`); they differ by version and by call form, and
nothing else in the library knows them. A parameter written `*name` takes all remaining positional arguments. Where a
call form names an argument differently, `ALIASES` maps it. A test fails when a MindSpore release renames one.
"""
from __future__ import annotations

# Tensor methods and operators that are C++ from end to end. Others may run MindSpore's own Python, which asks its operands
# for their shape, so they are given plain local tensors.
NATIVE = frozenset("""
Abs AddExt AddScalar BroadcastTo Cos Div Divs Equal Exp ExpandDims FloorDiv Log MatMulExt Maximum Minimum Mm Mul Muls Neg
Pow PowTensorScalar Reciprocal Reshape Round Rsqrt Sigmoid Sin Sqrt Square SubExt SubScalar SumExt MeanExt Tanh ToDtype
Transpose TransposeExtView Softmax
""".split())

# On CPU the `dim=` form of these methods runs the Python of the `axis=` form, with its dtypes; functions do not.
METHODS = {"ArgMaxExt": "DeprecatedArgmax", "ArgMinExt": "DeprecatedArgmin", "ArgSort": "DeprecatedArgsort",
           "CountNonZero": "DeprecatedCountNonzero", "CumsumExt": "DeprecatedCumsum", "SortExt": "DeprecatedSort",
           "Std": "DeprecatedStd", "TopkExt": "DeprecatedTopk"}

ALIASES = {"axis": "dim", "keepdims": "keepdim", "keep_dims": "keepdim", "self": "input", "x": "input",
           "split_size": "sizes", "split_size_or_sections": "sizes", "indices": "index", "input_indices": "index",
           "dims": "repeats", "reps": "repeats",
           "ddof": "correction", "mat2": "other", "vec": "other", "vec2": "other", "tensor2": "other",
           **dict.fromkeys(("exponent", "divisor", "y", "x2"), "other"), "source": "src", "value": "src",
           "min": "low", "max": "high"}

_UNARY = """
abs:Abs neg:Neg exp:Exp expm1:Expm1 log:Log log1p:Log1p log2:Log2 log10:Log10 sqrt:Sqrt rsqrt:Rsqrt square:Square
reciprocal:Reciprocal sin:Sin cos:Cos tan:Tan sinh:Sinh cosh:Cosh tanh:Tanh asin:Asin,AsinExt acos:Acos,AcosExt
atan:Atan,AtanExt asinh:Asinh,AsinhExt acosh:Acosh,AcoshExt atanh:Atanh erf:Erf erfc:Erfc erfinv:Erfinv sign:Sign
floor:Floor ceil:Ceil trunc:Trunc rint:Rint sigmoid:Sigmoid relu:ReLU relu6:ReLU6 silu:SiLU mish:Mish,MishExt
hardsigmoid:HSigmoid hardswish:HSwish selu:SeLU,SeLUExt softsign:Softsign gelu_tanh:GeLU
fast_gelu:FastGeLU isfinite:IsFinite isinf:IsInf isnan:IsNan logical_not:LogicalNot bitwise_not:BitwiseNot
identity:Identity,StopGradient,Contiguous clone:Clone,TensorMove sinc:Sinc exp2:Exp2
"""

_BINARY = """
add:Add,AddScalar sub:Sub,SubScalar,DeprecatedSub mul:Mul,Muls div:Div,Divs,RealDiv floor_divide:FloorDiv,FloorDivScalar
remainder:RemainderTensorTensor,RemainderTensorScalar,RemainderScalarTensor,Mod,FloorMod,DeprecatedRemainder
fmod:FmodTensor,FmodScalar
pow:Pow,PowTensorScalar,PowScalarTensor maximum:Maximum minimum:Minimum atan2:Atan2,Atan2Ext xlogy:Xlogy
eq:Equal,EqualScalar ne:NotEqual,NeScalar lt:Less,LessScalar le:LessEqual,LessEqualScalar gt:Greater,GreaterScalar
ge:GreaterEqual,GreaterEqualScalar
logical_and:LogicalAnd,DeprecatedLogicalAnd logical_or:LogicalOr,DeprecatedLogicalOr logical_xor:LogicalXor
bitwise_and:BitwiseAndTensor,BitwiseAndScalar,BitwiseAnd
bitwise_or:BitwiseOrTensor,BitwiseOrScalar,BitwiseOr bitwise_xor:BitwiseXorTensor,BitwiseXorScalar,BitwiseXor
"""

_OTHER = """
add:AddExt:input other alpha
sub:SubExt:input other alpha
cast:Cast,ToDtype:input dtype non_blocking copy
cast:ToDevice:input device dtype non_blocking copy
where:Select:condition input other
where:SelectMethod:input condition other
masked_fill:MaskedFill,MaskedFillScalar:input mask value
clamp:ClampScalar,ClampTensor:input min max
lerp:Lerp,LerpScalar:input end weight
leaky_relu:LeakyReLU,LeakyReLUExt:input slope
elu:Elu,EluExt:input alpha
gelu:GeluExt:input approximate
matmul:MatMulExt,BatchMatMulExt,Mm,Mv,Dot,DeprecatedMatmul:input other
matmul:MatMul,BatchMatMul:input other transpose_a transpose_b
outer:Outer:input other
linear:Dense:input weight bias
bias_add:BiasAdd:input bias format
sum:SumExt:input dim keepdim dtype
sum:ReduceSum:input dim keepdim skip_mode
sum:DeprecatedSum:input dim dtype keepdim initial
mean:MeanExt:input dim keepdim dtype
mean:ReduceMean,DeprecatedMean:input dim keepdim
max:Max:input
min:Min:input
max:ReduceMax:input dim keepdim
min:ReduceMin:input dim keepdim
prod:ProdExt:input dim keepdim dtype
prod:ReduceProd:input dim keepdim
all:ReduceAll,All,DeprecatedReduceAll:input dim keepdim
any:ReduceAny,Any,DeprecatedReduceAny:input dim keepdim
softmax:Softmax:input dim
log_softmax:LogSoftmax:input dim
log_softmax:LogSoftmaxExt:input dim dtype
reshape:Reshape:input *shape
view_as:ViewAs:input other
flatten:FlattenExt:input start_dim end_dim
flatten_primitive:Flatten:input
permute:Transpose,TransposeView,DeprecatedTranspose:input *dims
swap:TransposeExtView:input dim0 dim1
matrix_transpose:TExt:input
unsqueeze:ExpandDims,ExpandDimsView,DeprecatedUnsqueeze:input dim
squeeze:Squeeze:input dim
expand:BroadcastTo,BroadcastToView:input *shape
tile:Tile,Repeat,DeprecatedTile:input *repeats
split:SplitTensor,SplitTensorView,SplitWithSize,SplitWithSizeView,DeprecatedSplit:input sizes dim
chunk:Chunk,ChunkView,DeprecatedChunk:input chunks dim
split_equal:Split:input dim chunks
unbind:UnstackExtView:input dim
cat:Concat:tensors dim
stack:StackExt:tensors dim
strided_slice:StridedSlice:input begin end strides begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask
narrow:Narrow,NarrowView,DeprecatedNarrow:input dim start length
select:SelectExtView:input dim index
gather:Gather:input index dim batch_dims
take_along:GatherD:input dim index
embedding:Embedding:index input padding_idx max_norm norm_type scale_grad_by_freq
tril:Tril,TrilExt:input diagonal
triu:Triu:input diagonal
"""


def parse(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Lines `op:Primitive,Primitive:param param *rest` as primitive -> (op, params)."""
    table = {}
    for line in text.strip().splitlines():
        op, names, params = line.split(":")
        for name in filter(None, names.split(",")):
            table[name] = (op, tuple(params.split()))
    return table


PRIMITIVES = parse("\n".join((*(f"{e}:input" for e in _UNARY.split()), *(f"{e}:input other" for e in _BINARY.split()),
                              _OTHER.strip())))
POINTWISE = tuple(dict.fromkeys(e.split(":")[0] for e in (_UNARY + _BINARY).split()))
