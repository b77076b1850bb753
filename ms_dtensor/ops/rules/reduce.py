# SPDX-License-Identifier: Apache-2.0
"""Reductions: a kept dim stays sharded, a reduced one leaves a Partial of the matching kind.

A mean over a sharded dim is a local sum divided by the *global* count, hence Partial(sum) and right for uneven
shards; a mean of means would not be. A mean of integers is an integer, rounded once, so its dims are whole. Reductions
without a matching Partial (argmax, var, ...) shard kept dims only.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ...core.placements import Partial
from .spec import SUMS, Call, Case, Local, LocalCall, OpSpec, S, Winners, dims_of, kind, result_dtype

PARTIAL_OF = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "first_max": "max", "first_min": "min",
              "prod": "prod", "all": "min", "any": "max", "count_nonzero": "sum", "nansum": "sum"}


def kept_dims(ndim: int, dims: tuple[int, ...], keepdim: bool) -> dict[int, int]:
    """Input dim -> result dim, for the dims that are not reduced."""
    if keepdim:
        return {d: d for d in range(ndim) if d not in dims}
    return {d: i for i, d in enumerate(d for d in range(ndim) if d not in dims)}


def reduced_shape(shape, dims, keepdim) -> tuple[int, ...]:
    """Shape after reducing `dims`."""
    return tuple(1 if d in dims else n for d, n in enumerate(shape) if keepdim or d not in dims)


def reduction(call: Call) -> OpSpec:
    """One result: `op` over `dim` (default all), with `keepdim`."""
    x = call.args["input"]
    dims, keepdim = dims_of(call.args.get("dim"), x.ndim), bool(call.get("keepdim", False))
    kept = kept_dims(x.ndim, dims, keepdim)
    cases = [Case((S(d),), (S(kept[d]),)) for d in kept]
    partial, dtype = PARTIAL_OF.get(call.op), result_dtype(call)
    if call.op == "sum" and (dtype == "bool" or "skip_mode" in call.args and x.dtype == "bool"):
        partial = "max"  # a sum of truth values is whether any is true; the classic ReduceSum's of booleans is one, too
    if call.op == "mean" and kind(dtype) < 2:
        partial = None
    if partial:
        cases += [Case((S(d),), (Partial(partial),)) for d in dims if x.ndim]
    if partial == "sum" and call.op in ("sum", "mean") and ("int" not in x.dtype or dtype == x.dtype):
        cases += call.like_first((), SUMS)
    extreme = partial in ("max", "min") and call.op not in ("all", "any", "sum")
    if extreme and partial:
        cases.append(Case((Partial(partial),), (Partial(partial),)))
    shape = reduced_shape(x.shape, dims, keepdim)

    def local(at: Local) -> LocalCall | None:
        if not any(x.ndim and at.ins[0].dim_axes[d] for d in dims):
            return None
        return LocalCall("mean_of_shard", (x, dims, keepdim, prod(x.shape[d] for d in dims), call.args.get("dtype")))
    first = call.op.startswith("first") and isinstance(call.get("dim"), int)
    return OpSpec((shape,), tuple(cases), local if call.op == "mean" else None,
                  winners=Winners(dims, keepdim, first) if extreme else None)


def along_dim(call: Call) -> OpSpec:
    """Same-shape result computed along `dim` (softmax, cumsum, flip ...): every other dim may be sharded."""
    x = call.args["input"]
    dims = dims_of(call.args.get("dim", -1), x.ndim)
    return OpSpec((x.shape,), tuple(call.like_first(d for d in range(x.ndim) if d not in dims)))


def softmax(call: Call) -> OpSpec:
    """Of a dim of one element without MindSpore's kernel: in 2.10 on CPU a gradient of that, if it is the process's first
    along this dim, spoils those of all later calls."""
    x, spec = call.args["input"], along_dim(call)
    if any(x.shape[d] != 1 for d in dims_of(call.args.get("dim", -1), x.ndim)):
        return spec
    return replace(spec, local=lambda at: LocalCall("softmax_of_one", (x,)))
