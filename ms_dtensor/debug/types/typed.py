# SPDX-License-Identifier: Apache-2.0
"""The tensor of a check: a local tensor with types, which asks the table what each op makes of them.

It computes what the plain tensor computes, with MindSpore's own functions. What MindSpore does without asking
`__fallback__` (indexing, item, bool, asnumpy, iteration ...) is overridden here, as in `tensor/dtensor.py`. Invariant:
nothing computed of typed tensors during a check is plain, or it was refused; after the check they act as plain ones.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops

from ...core.tree import leaves, map_leaves
from ...dispatch.op_call import OpCall, bind_arguments, op_name
from ...dispatch.operands import DIFFERENTIABLE, dtype_name, recording
from ...dispatch.planner import as_operands
from ...errors import OpRuleError
from ...internals.names import NoFallbackGuard
from ...ops.local import LOCAL_OPS, WRITES
from ...ops.rules import Call, Operand
from ...ops.rules.names import PRIMITIVES
from ...ops.rules.spmd import WORDS, Kind
from ...ops.rules.write import INPLACE
from ...tensor.indexing import get_item, set_item
from ..verify.capture import on_one_rank
from .account import Account, Types, account, site

MADE_IN = "_ms_dtensor_made_in_check"  # of a tensor made of the program's numbers and arrays: the mesh of the check
_MADE_INSIDE = ("on", "off", "seed", "offset")
_NO_GRADIENT = frozenset(("StopGradient", "Detach"))


class Typed(Tensor):
    """A local tensor with `Types`; for use inside one check."""

    _types: Types
    _stands_for: Tensor | None = None  # one that is written by index
    __array_ufunc__ = None

    def __new__(cls, tensor, types: Types):
        out = Tensor._make_subclass(cls, tensor)
        out._types = types
        if (now := account.get()) is not None:
            now.met.append(weakref.ref(out))
        return out

    def __init__(self, tensor, types):
        pass  # MindSpore's own would make another tensor

    def __fallback__(self, func, args=(), kwargs=None):
        primitive = None
        if len(args) == 3 and isinstance(args[1], str) and isinstance(args[0], ops.Primitive):
            primitive, _, args = args
        name, kwargs, now = op_name(func), kwargs or {}, account.get()
        compute = OpCall(func, primitive, args, kwargs, []).compute
        if now is None or name == "typeof":
            with NoFallbackGuard():
                return compute(*plain(tuple(args)), **plain(kwargs))
        entry = INPLACE.get(name) or PRIMITIVES.get(name)
        try:
            bound = None if entry is None else bind_arguments(name, entry[1], args, kwargs, primitive)
        except OpRuleError:
            bound = None
        tensors = leaves((args, kwargs), Tensor)
        op = name if entry is None else entry[0]
        numbers = _numbers(op, bound)
        types = [now.constant() if id(x) in numbers else types_of(x) for x in tensors]
        call = None if bound is None else as_call(op, bound, tensors)
        kinds = now.results(f"'{op}'", call, types)
        if name in INPLACE or "Inplace" in name:  # of one without a rule nobody knows what it writes: what varies
            became = written(now, op, tensors[0], [k[0] for k in kinds], types)
            with NoFallbackGuard():  # these objects: what an alias is given the tensor itself may not see
                result = compute(*args, **kwargs)
            return result if result is tensors[0] or not isinstance(result, Tensor) else Typed(result, became)
        with NoFallbackGuard():
            result = compute(*plain(tuple(args)), **plain(kwargs))
        return typed(now, op, result, kinds, types, graded=name not in _NO_GRADIENT)

    def _run_own_op(self, op, arguments):
        now, given = account.get(), plain(arguments)
        whole = on_one_rank(op, given, {**WRITES, **LOCAL_OPS})
        if now is None:
            with NoFallbackGuard():
                return whole(*given.values())
        tensors = leaves(arguments, Tensor)
        types = [types_of(x) for x in tensors]
        kinds = now.results(f"'{op}'", as_call(op, arguments, tensors), types)
        if self._stands_for is not None:
            return written(now, op, self._stands_for, [k[0] for k in kinds], types)
        with NoFallbackGuard():
            result = whole(*given.values())
        return typed(now, op, result, kinds, types)

    # -- what MindSpore does without asking -----------------------------------------------------------------------------
    def __getitem__(self, index):
        now = account.get()
        return plain(self)[plain(index)] if now is None else get_item(self, _index(now, index))

    def __setitem__(self, index, value):
        if (now := account.get()) is not None:
            written_by_index(now, self, index, value)
        token = account.set(None)
        try:
            with NoFallbackGuard():  # this object: MindSpore gives it another storage
                super().__setitem__(plain(index), plain(value))
        finally:
            account.reset(token)

    def assign_value(self, value):
        self._replaced("assign_value()")
        return super().assign_value(plain(value))

    def set_(self, *args, **kwargs):
        self._replaced("set_()")
        return super().set_(*plain(args), **plain(kwargs))

    @property
    def data(self):
        return self._as_it_is(plain(self).data)

    @data.setter
    def data(self, value):
        self._replaced("data = ...")
        plain(self).data = plain(value)

    def _replaced(self, who: str) -> None:
        if (now := account.get()) is not None:
            raise OpRuleError(f"For '{now.who}', {who} at {site()} puts another tensor in the place of one.",
                              f"{dtype_name(self.dtype)}{list(self._shape)}, {self._types.origins[0]}",
                              "Types do not follow what others that look at it have then.", ("x.copy_(value)", "x = value"))

    def __iter__(self):
        return (self[i] for i in range(self._shape[0]))

    def __hash__(self):
        return id(self)

    def _known(self, who: str, array: bool = False) -> Tensor:
        """The plain tensor, whose numbers Python may have: the same on all ranks, or an array whose reading is noted."""
        now = account.get()
        if now is not None:
            for axis, kind, origin in zip(now.names, self._types.kinds, self._types.origins):
                if array and kind.letter == "V":
                    now.read.add(axis)
                elif kind.letter not in "RI":
                    word = "a summand" if kind.letter == "P" else "each rank's own"
                    raise OpRuleError(
                        f"For '{now.who}', {who} at {site()} reads a value that is {word} over '{axis}'.",
                        f"{dtype_name(self.dtype)}{list(self._shape)}, {origin}",
                        "Types do not follow numbers of Python: what is made of them would pass for the same on all ranks.",
                        (f"all_reduce(x, '{axis}') first", "keep it a tensor: where(), masked_fill(), index",
                         "put this part into a DFunction that names its `types`"))
        return plain(self)

    def item(self):
        return self._known("item()").item()

    def _read(self, who: str):
        array = self._known(who, True).asnumpy()
        if account.get() is not None:
            array.flags.writeable = False  # it is the tensor's storage, and NumPy tells nobody what it writes
        return array

    def asnumpy(self):
        return self._read("asnumpy()")

    def numpy(self):
        return self._read("numpy()")

    def tolist(self):
        return self._known("tolist()").tolist()

    def get_bytes(self):
        return self._known("get_bytes()", True).get_bytes()

    def __array__(self, dtype=None, copy=None):
        array = self._read("numpy.asarray")
        return array if dtype is None else array.astype(dtype)

    def __bool__(self):
        return bool(self._known("bool()"))

    def __float__(self):
        return float(self._known("float()"))

    def __int__(self):
        return int(self._known("int()"))

    def __index__(self):
        return self._known("an index").__index__()

    def __repr__(self):
        kinds = "" if account.get() is None else ", ".join(k.letter for k in self._types.kinds)
        return f"Typed({dtype_name(self.dtype)}{list(self._shape)}, {kinds})"

    __str__ = __repr__

    def detach(self):
        """The same values without a gradient."""
        return ops.stop_gradient(self)

    def contiguous(self):
        return self._as_it_is(plain(self).contiguous())

    def _as_it_is(self, tensor):
        return tensor if account.get() is None else Typed(tensor, self._types)


def _index(now: Account, index):
    """An index whose lists, which are numbers of the program, have the type of such."""
    if isinstance(index, tuple):
        return tuple(_index(now, i) for i in index)
    return Typed(Tensor(index), now.constant()) if isinstance(index, list) and index and not leaves(index, Tensor) else index


def plain(tree) -> Any:
    """Nested arguments with typed tensors as plain ones, still connected."""
    return map_leaves(lambda x: Tensor._make_subclass(Tensor, x) if isinstance(x, Typed) else x, tree, Tensor)


def types_of(x: Tensor) -> Types:
    """Of a typed tensor its types; of a plain one those of an outsider.

    Raises:
        OpRuleError: it comes of recorded tensors, by a way that types do not follow.
    """
    now = account.get()
    assert now is not None
    if isinstance(x, Typed) and len(x._types.kinds) == len(now.axes):  # not one that another function has kept
        return x._types
    graded = bool(x._requires_grad) and _has_gradient(x)
    if graded and recording() and not x._is_leaf:
        raise OpRuleError(f"For '{now.who}', at {site()} a tensor without a type meets one with.",
                          f"{dtype_name(x.dtype)}{list(x._shape)}",
                          "It was computed of tensors with a gradient, and how is not known.",
                          ("pass it as an argument of the function, as a DTensor",
                           "give `types=` to the DFunction that makes it"))
    return now.constant() if getattr(x, MADE_IN, None) is now.mesh and not graded else now.outsider(graded)


def _has_gradient(x: Tensor) -> bool:
    return dtype_name(x.dtype).startswith(DIFFERENTIABLE)


def _numbers(op: str, bound: dict | None) -> set[int]:
    """Tensors among an op's arguments that MindSpore itself makes: a one-hot's values, a generator's state."""
    given = [(bound or {}).get(name) for name in _MADE_INSIDE]
    return {id(x) for x in given if isinstance(x, Tensor) and not isinstance(x, Typed) and math.prod(x._shape) == 1}


def as_call(op: str, arguments: dict, tensors: Sequence[Tensor]) -> Call:
    """A call as rules see it, its operands of local shapes."""
    operands = tuple(Operand(i, tuple(t._shape), dtype_name(t.dtype)) for i, t in enumerate(tensors))
    it = iter(operands)
    return Call(op, {k: as_operands(v, it) for k, v in arguments.items()}, operands)


def typed(now: Account, op: str, result, kinds, operands: Sequence[Types], graded: bool = True):
    """An op's results with their types."""
    found = leaves(result, Tensor) if not isinstance(result, Tensor) else [result]
    if not found:
        return result
    graded = graded and any(t.graded for t in operands)
    per_axis = [_for_all(of, len(found)) for of in kinds]
    number = iter(range(len(found)))

    def one(x):
        mine = tuple(of[i] for of in per_axis) if (i := next(number)) >= 0 else ()
        return Typed(x, Types(mine, graded and _has_gradient(x), now.made(op, mine, operands)))
    return map_leaves(one, result, Tensor)


def _for_all(kinds, count: int):
    """One type for each of so many results: a rule leaves out a buffer that nobody reads."""
    return kinds if len(kinds) == count else (*kinds, *(kinds[-1],) * count)[:count]


def written_by_index(now: Account, x: Tensor, index, value) -> None:
    """Asks whether `x[index] = value` leaves `x` what it is.

    Raises:
        OpRuleError: it does not.
    """
    target = Typed(x, types_of(x))
    target._stands_for = x
    set_item(target, _index(now, index), value)


def written(now: Account, op: str, target: Tensor, kinds: Sequence[Kind], operands: Sequence[Types]) -> Types:
    """The types of a tensor that an op has written into, which all that shares its storage has from here on.

    Letters stay. What varies stops being read as anything by a global op, unless what is written reads as it does; so views
    do, and what they are views of. A constant that is written with what has a gradient has one.

    Args:
        now: the check.
        op: how messages call it.
        target: what is written.
        kinds: what the op makes, on each axis.
        operands: the types of its operands, the target's first.

    Raises:
        OpRuleError: something would be of another type than it is.
    """
    graded, had = any(t.graded for t in operands), operands[0].kinds
    became = []
    for x in (target, *now.sharing(target)):
        old = operands[0] if x is target else types_of(x)
        mine = []
        for k, (axis, was, new) in enumerate(zip(now.names, old.kinds, kinds)):
            kept = _after_write(was, had[k], new, old.graded, graded)
            if kept is None:
                into = "" if x is target else "the storage of "
                raise OpRuleError(f"For '{now.who}', '{op}' at {site()} writes what is {WORDS[new.letter]} over '{axis}' "
                                  f"into {into}what is {WORDS[was.letter]}.", f"{old.origins[k]}",
                                  "A tensor keeps its type, as others may look at it.", "work out of place")
            mine.append(kept)
        made = now.made(op, mine, operands)
        origins = (was if a == b else new for a, b, was, new in zip(old.kinds, mine, old.origins, made))
        became.append((x, Types(tuple(mine), (old.graded or graded) and _has_gradient(x), tuple(origins))))
    for x, types in became:
        if isinstance(x, Typed):
            x._types = types
    return became[0][1]


def _after_write(was: Kind, had: Kind, new: Kind, was_graded: bool, graded: bool) -> Kind | None:
    """What is in the storage of a write of `new` into what `had` a type, and `was` of some itself; None: not any more."""
    if was.letter != new.letter:
        if {was.letter, new.letter} != {"R", "I"} or was_graded and graded:
            return None
        return was if was_graded else new
    if was.letter != "V":
        return was if was.reads == new.reads else None
    if new != had or new.reads is None or was.reads is None or new.reads.is_partial() != was.reads.is_partial():
        return Kind("V")
    return was
