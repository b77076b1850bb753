# SPDX-License-Identifier: Apache-2.0
"""New tensors made after another's pattern: the values of the operand do not matter, only its shape, layout and dtype.

So a Partial operand is not reduced first; the result is simply replicated there. `empty_like` gives zeros: what one
rank finds in its memory would make replicas differ.
"""
from __future__ import annotations

from .spec import PARTIALS, Call, Case, LocalCall, OpSpec, R, S

NAMES = """
empty_like:EmptyLike:input dtype device pin_memory
full_like:FullLike:input fill_value dtype
new_zeros:NewZeros:input size dtype
new_ones:NewOnes:input size dtype
new_empty:NewEmpty:input size dtype device
new_full:NewFull:input size fill_value dtype
"""

_VALUE = {"empty_like": 0, "new_zeros": 0, "new_ones": 1, "new_empty": 0}


def like_cases(call: Call) -> list[Case]:
    """Operand 0 sharded as the result, or Partial with a replicated result; further operands replicated."""
    return call.like_first(range(call.operands[0].ndim)) + [_whole(call, p) for p in PARTIALS]


def _whole(call: Call, p) -> Case:
    """Every rank makes the whole result, whatever it has of operand 0, and so has the fill value's whole cotangent."""
    return Case((p, *(R,) * (len(call.operands) - 1)), (R,), invariant=tuple(o.index for o in call.operands[1:]))


def like(call: Call) -> OpSpec:
    """`full_like`, `empty_like`: every shard is filled by itself."""
    x = call.operands[0]
    value = _VALUE.get(call.op, call.args.get("fill_value"))
    dtype = call.args.get("dtype")
    return OpSpec((x.shape,), tuple(like_cases(call)), lambda at: LocalCall("filled", (x, at.out_shape(), value, dtype)),
                  any_rows=True)


def new(call: Call) -> OpSpec:
    """`x.new_zeros(size)` ...: in the dtype of x; laid out like x if of its shape, else replicated."""
    x, size = call.operands[0], call.args["size"]
    shape = tuple(int(n) for n in (size if isinstance(size, tuple | list) else (size,)))
    if shape == x.shape:
        return like(call)
    value = _VALUE.get(call.op, call.args.get("fill_value"))
    cases = [_whole(call, p) for p in (*map(S, range(x.ndim)), *PARTIALS)]
    return OpSpec((shape,), tuple(cases), lambda at: LocalCall("filled", (x, shape, value, call.args.get("dtype"))))


RULES = {"empty_like": like, "full_like": like,
         **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), new)}
