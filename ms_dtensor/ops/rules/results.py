# SPDX-License-Identifier: Apache-2.0
"""dtypes of results, for those who must know them before a kernel has run: a dry run.

Most ops promote their operands (`spec.result_dtype`); here stand those that do not: comparisons, places of extremes and of
what is sorted, parts of complex numbers. Where kernels run they tell themselves. Held to MindSpore over the whole corpus of
forms (`tests/debug/test_dry_cells.py`).
"""
from __future__ import annotations

from .spec import TYPE_IDS, Call, kind, result_dtype

_BOOL = frozenset((
    "eq ne lt le gt ge isclose approximate_equal isfinite isinf isnan isneginf isposinf any all logical_and logical_or "
    "logical_xor logical_not").split())
_ONLY_PLACES = frozenset(("argsort", "count_nonzero", "multinomial"))
_PLACES = {  # op -> dtype of its result of places, the last of two
    **dict.fromkeys(("max_dim", "min_dim", "first_max", "first_min", "median_classic", "cum_extreme", "max_pool_argmax",
                     "adaptive_max_pool"), "int64"),
    **dict.fromkeys(("sort", "sort_classic", "topk", "topk_classic", "cummin"), "int32")}
_REAL = frozenset(("real", "real_view", "imag", "imag_view", "angle", "irfft"))  # of what is complex
_COMPLEX = frozenset(("complex", "polar", "rfft", "eig"))


def result_dtypes(call: Call, count: int) -> tuple[str, ...]:
    """Of `count` results.

    Example:
        >>> from ms_dtensor.ops.rules.results import result_dtypes
        >>> from ms_dtensor.ops.rules.spec import Call, Operand
        >>> x = Operand(0, (4, 3), "float32")
        >>> result_dtypes(Call("gt", {"input": x, "other": 0.5}, (x,)), 1)
        ('bool',)
        >>> result_dtypes(Call("topk", {"input": x}, (x,)), 2)
        ('float32', 'int32')
    """
    usual, op = result_dtype(call), call.op
    if op in _BOOL:
        return ("bool",) * count
    if op == "extreme_with_index":
        return ("int64", usual)[-count:]
    if op in ("argmax", "argmax_classic", "argmax_method"):
        wanted = call.args.get("output_type")
        return ("int64" if wanted is None else TYPE_IDS[wanted] if isinstance(wanted, int) else
                str(wanted).lower().rsplit(".", 1)[-1],)
    if op in _ONLY_PLACES:
        return ("int32",) * count
    if op in _PLACES and count > 1:
        return (*(usual,) * (count - 1), _PLACES[op])
    if op in _REAL:
        return ({"complex64": "float32", "complex128": "float64"}.get(usual, usual),) * count
    if op in _COMPLEX:
        return ("complex128" if usual in ("float64", "complex128") else "complex64",) * count
    if (op == "prod" and kind(usual) < 2 or op == "nansum" and usual == "bool") and call.args.get("dtype") is None:
        return ("int64",) * count
    return (usual,) * count
