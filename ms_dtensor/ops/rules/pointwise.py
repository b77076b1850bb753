# SPDX-License-Identifier: Apache-2.0
"""The rule of element-by-element ops: broadcasting decides Shard cases, linearity Partial ones. A new one: `elementwise.py`.

An op sharded alike on all operands is sharded alike in the result; a dim of size 1 that broadcasts is not sharded.
Sums pass through what is linear: `linear` names the groups of operands that may be Partial together. A non-linear op
never sees a Partial.
"""
from __future__ import annotations

from dataclasses import replace
from math import isfinite

from ...core.placements import Partial
from ...errors import OpRuleError
from .spec import (
    SUMS,
    Call,
    Case,
    Local,
    LocalCall,
    OpSpec,
    R,
    S,
    Unfit,
    broadcast_shapes,
    mixed_sums,
    result_dtype,
    taken_once,
)

# op -> groups of argument names which, Partial together and all other operands replicated, give a Partial result
LINEAR = {
    "add": (("input", "other"),), "sub": (("input", "other"),), "neg": (("input",),), "identity": (("input",),),
    "mul": (("input",), ("other",)), "div": (("input",),), "clone": (("input",),),
    "lerp": (("input", "end"),), "where": (("input", "other"),),
    **dict.fromkeys(("real", "real_view", "imag", "imag_view", "conj"), (("input",),)), "complex": (("input", "other"),),
}

EXTREMES = {"maximum": Partial("max"), "minimum": Partial("min")}  # of two extremes over ranks, element by element


def shard_cases(shapes, out) -> list[Case]:
    """All operands (broadcast to `out`) and the result sharded on the same dim.

    Raises:
        Unfit: an operand does not broadcast to `out`.
    """
    cases = []
    for d, size in enumerate(out):
        ins = []
        for shape in shapes:
            k = d - len(out) + len(shape)
            if k >= 0 and shape[k] not in (1, size):
                raise Unfit
            ins.append(S(k) if k >= 0 and shape[k] == size else R)
        if any(p.is_shard() for p in ins):
            cases.append(Case(tuple(ins), (S(d),)))
    return cases


def partial_cases(call: Call, groups) -> list[Case]:
    """One case per linear group and reduction; every member must be a tensor, or the op would add a constant n times."""
    cases: list[Case] = []
    numbers = [v for v in call.args.values() if isinstance(v, int | float)]
    truth = call.op == "div" and getattr(call.args["other"], "dtype", "") == "bool"  # that is by 0 or 1
    if truth or any(isinstance(v, float) and not isfinite(v) or v == 0 and call.op == "div" for v in numbers):
        return cases  # of infinities of both signs there is no sum
    for names in groups:
        values = [call.get(n) for n in names]
        if not all(hasattr(v, "index") and hasattr(v, "shape") for v in values):
            continue
        if all("int" not in v.dtype or v.dtype == result_dtype(call) for v in values):  # what wraps adds up in its own dtype
            cases += [call.case({v.index: p for v in values}, p) for p in SUMS]
    return cases


def pointwise(call: Call) -> OpSpec:
    """The rule of every op that computes each result element from the operands' elements at the same place."""
    shapes = [o.shape for o in call.operands]
    out = broadcast_shapes(*shapes)
    cases, sums = shard_cases(shapes, out), partial_cases(call, LINEAR.get(call.op, ()))
    if call.op in EXTREMES and len(shapes) == 2:
        sums.append(Case((EXTREMES[call.op],) * 2, (EXTREMES[call.op],)))
    if sums and call.op in ("add", "sub"):
        return OpSpec((out,), (*cases, *sums, *mixed_sums(2)), lambda at: _added_once(call, at), any_rows=True)
    return OpSpec((out,), (*cases, *sums))


def _added_once(call: Call, at: Local) -> LocalCall | None:
    once = taken_once(at)
    args = call.args["input"], call.args["other"], call.op, call.get("alpha", 1), once
    return LocalCall("added_once", args) if once else None


_FLOATS = {"float16": 0, "bfloat16": 0, "float32": 1, "float64": 2}


def cast(call: Call) -> OpSpec:
    """A dtype change. A sum may be widened before it is finished, not narrowed: each summand would round."""
    spec = pointwise(call)
    x = call.operands[0]
    to = str(call.get("dtype", x.dtype)).lower()
    if to == x.dtype or x.dtype in _FLOATS and to in _FLOATS and _FLOATS[to] >= _FLOATS[x.dtype] and to != "bfloat16":
        spec = OpSpec(spec.shapes, (*spec.cases, *partial_cases(call, (("input",),))))
    return spec if call.get("device") is None else replace(spec, local=lambda at: _stay(call, at), any_rows=True)


def _stay(call: Call, at: Local) -> None:
    """Refuses `x.to(device)` for another kind of device than the mesh's: the layout would say what is not so."""
    mesh, wanted = at.ins[0].mesh, str(call.args["device"])
    if mesh.device_type != {"ascend": "npu"}.get(wanted.lower(), wanted.lower()):
        raise OpRuleError(f"For 'to', the shards of a DTensor would move to {wanted!r}.", at.ins[0].describe(),
                          f"A DTensor's shards are on the devices of its mesh, which is of kind {mesh.device_type!r}.",
                          ("leave out 'device'", "x.to_local() or x.full_tensor(), a plain tensor, and move that"))


def masked_fill(call: Call) -> OpSpec:
    """`input` where `mask` is false, else `value`; the result has `input`'s shape broadcast with the mask's."""
    spec = pointwise(call)
    value = call.args.get("value")
    if not isinstance(value, int | float):
        return spec
    linear = partial_cases(call, (("input",),)) if value == 0 else ()
    x, mask = call.args["input"], call.args["mask"]
    return replace(spec, cases=(*spec.cases, *linear), local=lambda at: LocalCall("masked_fill", (x, mask, value)),
                   any_rows=True)
