# SPDX-License-Identifier: Apache-2.0
"""What an op costs and what its backward needs, by formula: floating-point operations, operands and results kept.

Pure. A product of an [m, k] and a [k, n] matrix is 2 m n k operations, forward, and as many for each gradient; other ops
count as none, as their time is that of their bytes. What MindSpore's kernels keep beside (workspace) nobody knows.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ...ops.rules.spec import Operand

Shape = tuple[int, ...]

_PAIRS = {  # op -> names of the two operands of its product
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "all_gather_matmul", "matmul_reduce_scatter"), ("input", "other")),
    "linear": ("input", "weight"), "addmm": ("mat1", "mat2"), "addbmm": ("batch1", "batch2"),
    "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec"),
}
_CONVOLUTIONS = frozenset(("conv", "convolution", "conv_transpose", "conv_classic", "conv_transpose_classic"))
_ATTENTION = frozenset(("flash_attention", "speed_attention", "context_attention"))

# What a backward needs of results and of operands, as MindSpore's recorded ops save it. An op that is in none of these
# keeps its operands; a product of a tensor and a number keeps nothing.
_ALL, _NONE, _PLACES = slice(None), slice(0), slice(1, None)  # of results
_KEEPS = {
    "div": ((1,), _ALL), "pow": ((0, 1), _ALL), "where": ((0,), _NONE), "gather": ((1,), _NONE),
    **dict.fromkeys(("max_pool", "avg_pool", "avg_pool_3d"), ((0,), _ALL)),
    **dict.fromkeys(("max_pool_ext", "max_pool_argmax", "adaptive_max_pool"), ((0,), _PLACES))}
_KEEPS_RESULT = frozenset(("exp", "softmax", "log_softmax", "sigmoid", "tanh", "sqrt", "rsqrt", "relu", "reciprocal"))
_KEEPS_NOTHING = frozenset((
    "add", "bias_add", "sub", "neg", "sum", "mean", "cumsum", "cast", "identity", "clone", "cat", "stack", "unstack",
    "reshape", "index_add", "transpose", "permute", "expand", "split", "chunk", "slice", "squeeze", "unsqueeze", "flatten",
    "getitem", "narrow", "view_as", "unbind", "stop_gradient", "select", "masked_fill", "tril", "triu", "pad", "roll",
    "repeat", "repeat_interleave", "tile"))


# Forms of ours that are several ops on a device, and one node on a host: tensors of the first operand's shape, of 16 bits in
# float32, that they keep in its place, and that a backward has beside these and its result. Cross entropy by classes: logits
# less the greatest, and their exponentials; the gradients of both.
_WITHIN = {"class_sums": (2, 2)}
_STAYS = {"softmax": 16}  # bytes an element that the backward's kernel keeps for a shape: two arrays of places, of int64
BY_NUMPY = frozenset(("class_sums", "row_max", "rms_norm"))  # on a host one node of the library's own, forward and backward
# Of MindSpore 2.10's CPU kernels, where results lie: what the forward takes while it runs, and what the backward does.
_AVERAGES = ("avg_pool_1d", "avg_pool_2d", "avg_pool_3d_ext")
_OF_HOSTS = {"silu": (1, 4), "softmax": (0, 2), "pow": (0, 2), "square": (0, 2), **dict.fromkeys(_AVERAGES, (2, 0))}
_BY_SHAPE = frozenset((*_AVERAGES, "adaptive_avg_pool"))  # there: the gradient asks nothing of the operand but its shape
MADE_OF_VIEWS = frozenset((*_AVERAGES, "repeat_interleave"))  # there: it reads one; its result and its gradient are some
_PASSES = {"add": (0, 1), "bias_add": (0,), "sub": (0,)}  # operands whose gradient is that of the result, the tensor itself


def flops(op: str, arguments: dict[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    """Operations of one rank's forward.

    Args:
        op: canonical name.
        arguments: by the names of the op's rule, with an `Operand` for each tensor.
        ins: local shapes of the operands, in order of appearance.
        outs: local shapes of the results.

    Example:
        >>> from ms_dtensor.debug.dryrun.formulas import flops
        >>> from ms_dtensor.ops.rules.spec import Operand
        >>> x, w = Operand(0, (4, 8), "float32"), Operand(1, (16, 8), "float32")
        >>> flops("linear", {"input": x, "weight": w}, [(4, 8), (16, 8)], [(4, 16)])
        1024
    """
    if op in _PAIRS:
        first = arguments.get(_PAIRS[op][0])
        if not isinstance(first, Operand):
            return 0
        shape = ins[first.index]
        attrs = arguments.get("attrs") or {}
        turned = arguments.get("transpose_a") or attrs.get("transpose_a")
        inner = shape[-2] if turned and len(shape) > 1 else shape[-1] if shape else 1
        return 2 * prod(outs[0]) * inner * (shape[0] if op == "addbmm" else 1)
    if op in _CONVOLUTIONS:
        weight = arguments.get("weight")
        return 2 * prod(outs[0]) * prod(ins[weight.index][1:]) if isinstance(weight, Operand) else 0
    if op in _ATTENTION:
        return _attention(arguments, ins)
    return 0


def backward_flops(op: str, forward: int, gradients: int) -> int:
    """Operations of the backward, of which so many operands get a gradient.

    A product has one product for each. Attention has 5 in the place of 2: the scores are computed again.
    """
    if op in _ATTENTION:
        return forward * 5 // 2
    return forward * min(gradients, 2)


def kept(op: str, wanted: Sequence[bool], on_host: bool) -> tuple[tuple[int, ...], slice]:
    """(which operands a backward needs, which results), if these operands get a gradient."""
    count = len(wanted)
    operands = range(count)
    if op in (_BY_SHAPE if on_host else _WITHIN) or op in _KEEPS_NOTHING:
        return (), _NONE
    if op in ("mul", "div") and count == 1 or not any(wanted):
        return (), _NONE
    if count == 2 and (op == "mul" or op in _PAIRS):  # the gradient of one is a product with the other
        return tuple(i for i in operands if wanted[1 - i]), _NONE
    if op == "div" and not wanted[1]:
        return (1,), _NONE
    if op in _KEEPS:
        some, results = _KEEPS[op]
        return tuple(i for i in some if i < count), results
    if op in _KEEPS_RESULT:
        return (), _ALL
    return tuple(operands), _ALL if op in _ATTENTION else _NONE


def within(op: str, on_host: bool) -> tuple[int, int, int]:
    """Tensors of the first operand's size that an op takes while it runs, keeps for its backward, and takes during that."""
    if on_host:
        there, back = _OF_HOSTS.get(op, (0, 0))
        return there, 0, back
    return 0, *_WITHIN.get(op, (0, 0))


def passes(op: str, operand: int) -> bool:
    """Whether the gradient of an operand, of the result's shape and dtype, is that of the result."""
    return operand in _PASSES.get(op, ())


def stays(op: str, elements: int) -> int:
    """Bytes that a host's kernel of an op's backward keeps, once it has run on an operand of so many elements."""
    return _STAYS.get(op, 0) * elements


def _attention(arguments: dict[str, Any], ins: Sequence[Shape]) -> int:
    """Two products of queries and keys; half of it where a query sees only the keys before it."""
    query, key = arguments["query"], arguments["key"]
    form = str(arguments.get("input_layout", arguments.get("layout", "BSH")))
    q, k = ins[query.index], ins[key.index]
    if "S" not in form:
        return 4 * prod(q) * k[0]
    seen = 4 * prod(q) * k[form.index("S")]
    return seen // 2 if arguments.get("sparse_mode") in (2, 3) else seen
