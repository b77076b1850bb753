# SPDX-License-Identifier: Apache-2.0
"""What gets a typed tensor without asking it: a group's collectives, MindSpore's `Function`s, compiled functions.

They are watched while a check runs and not otherwise, so nothing is paid when types are off. A collective moves types on the
axes that its ranks span and leaves the others; it has no gradient, so a tensor with one is refused: that it is missing would
be seen nowhere. A `Function` is an op without a rule, unless it names its `types`. Invariant: what leaves by one of
these doors has types, or was refused.
"""
from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mindspore
from mindspore import Tensor

from ...comm.group import Group
from ...core.tree import leaves, map_leaves
from ...errors import OpRuleError
from ...internals.names import Function, UsersFunction, jit_api, no_grad
from ...internals.undo import Patched
from ...ops.rules import spmd
from ...ops.rules.spmd import Refused
from .account import Account, Origin, Types, account, site
from .typed import MADE_IN, Typed, plain, typed, types_of, written, written_by_index

_open = Patched()
_depth = 0


@contextmanager
def watched(now: Account) -> Iterator[None]:
    """Inside, a check runs: typed tensors are followed through the doors."""
    global _depth
    token = account.set(now)
    try:
        if _depth == 0:
            _put()
        _depth += 1
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _open.take_back()
        account.reset(token)


def _node(original):
    @functools.wraps(original)
    def apply(cls, *args, **kwargs):
        run = functools.partial(original, cls)
        return as_op(cls, f"'{cls.__name__}'", run, args, kwargs) if _met(args, kwargs) else run(*args, **kwargs)
    return classmethod(apply)


def _put() -> None:
    for name in ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows", "broadcast",
                 "scatter", "exchange"):
        _open.put(Group, name, _collective(name, getattr(Group, name)))
    for nodes in (Function, UsersFunction):
        _open.put(nodes, "apply", _node(nodes.apply.__func__))
    compiled = jit_api._JitExecutor.__call__

    @functools.wraps(compiled)
    def call(self, *args, **kwargs):
        return self.fn(*args, **kwargs) if _met(args, kwargs) else compiled(self, *args, **kwargs)
    _open.put(jit_api._JitExecutor, "__call__", call)
    for module in (mindspore, mindspore.mint, mindspore.ops):
        for name in ("zeros", "ones", "full", "arange", "eye", "linspace"):
            if hasattr(module, name):
                _open.put(module, name, _made_of_numbers(getattr(module, name)))
    init = Tensor.__init__

    @functools.wraps(init)
    def made(self, input_data=None, *args, **kwargs):
        init(self, input_data, *args, **kwargs)
        now = account.get()
        if now is not None and self.__class__ is Tensor and not isinstance(input_data, Tensor):
            setattr(self, MADE_IN, now.mesh)
            now.met.append(weakref.ref(self))
    _open.put(Tensor, "__init__", made)
    put = Tensor.__setitem__

    @functools.wraps(put)
    def set_item(self, index, value):
        now = account.get()
        if now is not None and not isinstance(self, Typed) and _met(index, value):
            written_by_index(now, self, index, value)
            index, value = plain(index), plain(value)
        put(self, index, value)
    _open.put(Tensor, "__setitem__", set_item)


def _made_of_numbers(original):
    """A new tensor of numbers of the program, which are the same on all ranks as those beside operators are."""
    @functools.wraps(original)
    def make(*args, **kwargs):
        made, now = original(*args, **kwargs), account.get()
        if now is None or made.__class__ is not Tensor or leaves((args, kwargs), Tensor):
            return made
        return Typed(made, now.constant())
    return make


def _met(*trees) -> bool:
    return account.get() is not None and any(isinstance(x, Typed) for x in leaves(trees, Tensor))


# -- functions that types do not look into -------------------------------------------------------------------------------
def as_op(cls: Any, name: str, run, args, kwargs, call=None):
    """A function with its own gradient as one op: by the `types` that its class names, else by a rule, if it has one."""
    now = account.get()
    assert now is not None
    types = [types_of(x) for x in leaves((args, kwargs), Tensor)]
    told = getattr(cls, "types", None)
    kinds = now.results(name, call, types, None if told is None else signatures(told))
    return typed(now, name.strip("'"), unwatched(run, args, kwargs), kinds, types)


def unwatched(run, args, kwargs):
    """A call that types do not look into, on plain tensors."""
    token = account.set(None)
    try:
        return run(*plain(args), **plain(kwargs))
    finally:
        account.reset(token)


def as_written(name: str, run, args, kwargs, forward):
    """A function with a gradient of its own, whose results' types follow from its `forward`.

    What its collectives make is as invariant as its backward says; it is taken for that.
    """
    now = account.get()
    assert now is not None
    inside = replace(now, who=f"{name} in {now.who}", own_gradient=True)
    with no_grad(), watched(inside):
        made = leaves([forward(*args, **kwargs)], Tensor)
        types = [types_of(x) for x in made]
    result = unwatched(run, args, kwargs)
    graded = any(types_of(x).graded for x in leaves((args, kwargs), Tensor))
    told = iter([t._replace(graded=graded, kinds=tuple(spmd.I if k.letter == "R" and not t.graded else k for k in t.kinds))
                 for t in types])
    return map_leaves(lambda x: Typed(x, next(told)), result, Tensor)


def signatures(told) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """`types` of a class, one signature or several, as (operands, results).

    Raises:
        OpRuleError: it is not written so.

    Example:
        >>> from ms_dtensor.debug.types.doors import signatures
        >>> signatures(("V", "R", "->", "P"))
        ((('V', 'R'), ('P',)),)
    """
    out = []
    for one in (told,) if told and isinstance(told[0], str) else told:
        letters = list(one)
        if letters.count("->") != 1 or not set(letters) <= {*"RIVP", "*", "->"} or letters[-1] == "->":
            raise OpRuleError(f"For 'types', {one!r} is no signature.", "",
                              "It is the types of all tensors that go in, '->', and those of the results: R, I, V or P.",
                              "types = ('V', 'R', '->', 'P')")
        at = letters.index("->")
        out.append((tuple(letters[:at]), tuple(letters[at + 1:])))
    return tuple(out)


# -- collectives ---------------------------------------------------------------------------------------------------------
_MOVES = {"all_reduce_": "all_reduce", "all_to_all_rows": "all_to_all", "scatter": "broadcast"}


def _collective(name: str, original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        if not _met(args, kwargs):
            return original(self, *args, **kwargs)
        now = account.get()
        assert now is not None
        tensors = [x for x in leaves((args, kwargs), Tensor) if isinstance(x, Typed)]
        reduce = kwargs.get("op", args[1] if len(args) > 1 and isinstance(args[1], str) else "sum")
        types = _types_after(now, self, name, reduce, tensors)
        if name == "all_reduce_":
            x = tensors[0]
            x._types = types  # what else is in its storage has to be that already
            if now.sharing(x):
                written(now, name, x, types.kinds, [types])
        result = original(self, *plain(args), **plain(kwargs))
        return _with_types(result, types)
    return call


def _with_types(result, types: Types):
    if isinstance(result, Tensor):
        return Typed(result, types)
    return [Typed(x, types) for x in result] if isinstance(result, list) else _TypedWork(result, types)


class _TypedWork:
    """The handle of a collective under way, whose result has types."""

    def __init__(self, work, types: Types):
        self._work, self._types = work, types

    def wait(self):
        result = self._work.wait()
        return Typed(result, self._types) if isinstance(result, Tensor) else result


def _types_after(now: Account, group: Group, name: str, reduce: str, tensors) -> Types:
    over, types = spanned(now, group, name), tensors[0]._types
    op, kinds = f"'{name}'", []
    for t in (x._types for x in tensors):
        if t.graded and not now.own_gradient:
            raise OpRuleError(f"For '{now.who}', {op} at {site()} was given a tensor with a gradient.", str(t.origins[0]),
                              "A group's collectives have none: it would end there, and nobody would see that it is gone.",
                              (f"debug.{_MOVES.get(name, name)}(x, axis), which has one", "ops.stop_gradient(x) first"))
    for k, axis in enumerate(now.names):
        kind = types.kinds[k]
        try:
            kinds.append(_after(_MOVES.get(name, name), kind, reduce) if axis in over else _beside(kind, name, reduce))
        except Refused as refused:
            raise now.refusal(op, k, axis, refused, [x._types for x in tensors]) from None
    return Types(tuple(kinds), False, now.made(name, kinds, [types]))


def _after(move: str, kind: spmd.Kind, reduce: str) -> spmd.Kind:
    if move in ("broadcast", "exchange"):
        if kind.letter == "P":
            raise Refused(0, "It is a summand, and travels as it is.", "all_reduce({x}, '{axis}') first")
        return spmd.R if move == "broadcast" else spmd.V
    if kind.letter == "P" and kind.reads is not None and kind.reads.is_partial(reduce) and move == "all_reduce":
        return spmd.R
    if kind.letter == "P" and reduce != "sum":
        raise Refused(0, f"It is {kind.reads!r}, and '{move}' takes the {reduce} of the summands.", f"'{move}' by 'sum'")
    return spmd.after_move(move, spmd.R if kind.letter == "I" else kind, spmd.MOVES.get((move, kind.letter), ("R",))[0])


def _beside(kind: spmd.Kind, name: str, reduce: str) -> spmd.Kind:
    """On an axis over which it does not go it moves numbers about, or sums them up: as any linear op."""
    if kind.letter == "P" and "reduce" in name and reduce != "sum":
        raise Refused(0, f"It is a summand, and '{name}' takes the {reduce}.", "all_reduce({x}, '{axis}') first")
    return spmd.Kind("V") if kind.letter == "V" else kind


def spanned(now: Account, group: Group, who: str) -> tuple[str, ...]:
    """The axes over which a group's ranks differ.

    Raises:
        OpRuleError: it is no group of the mesh.
    """
    if group.size == 1:
        return ()
    for count in range(1, len(now.axes) + 1):
        for axes in itertools.combinations(now.names, count):
            if sorted(now.mesh.get_group(axes).ranks) == sorted(group.ranks):
                return axes
    raise OpRuleError(f"For '{now.who}', '{who}' at {site()} goes over a group that is none of the mesh's.",
                      f"ranks {list(group.ranks)}, mesh({now.mesh.describe()})",
                      "Types are kept for each axis of the inputs' mesh.", "mesh.get_group(axis) of that mesh")


def reinterpreted(x: Tensor, k: int, kind: spmd.Kind) -> Typed:
    """`x` with another type on axis number `k` of the account, on its author's word."""
    old = types_of(x)
    kinds, origins = list(old.kinds), list(old.origins)
    kinds[k], origins[k] = kind, Origin(f"what was said at {site()}")
    return Typed(x, Types(tuple(kinds), old.graded, tuple(origins)))


# -- the library's own local code ----------------------------------------------------------------------------------------
def declared(*types):
    """Decorates a local function whose numbers Python reads, or that sends by tables: to a check it is one op.

    Args:
        *types: its signatures on an axis, as those of a `DFunction`; "*" behind an operand's type: all others are like it.
    """
    def mark(fn):
        class Named:
            pass
        Named.types = types  # type: ignore[attr-defined]

        @functools.wraps(fn)
        def run(*args, **kwargs):
            if not _met(args, kwargs):
                return fn(*args, **kwargs)
            return as_op(Named, f"'{fn.__name__}'", fn, args, kwargs)
        return run
    return mark


def on_host(fn, *tensors: Tensor):
    """A tensor that NumPy makes of these tensors' numbers: the same on all ranks where they are, without a gradient.

    Args:
        fn: takes arrays, and gives one; it must not ask which rank this is.
        *tensors: local tensors.

    Raises:
        OpRuleError: in a check, one of them is a summand.
    """
    now = account.get()
    types = [types_of(x) for x in tensors] if now is not None else []
    made = Tensor(fn(*(Tensor._make_subclass(Tensor, x).asnumpy() for x in tensors)))
    if now is None or not any(isinstance(x, Typed) for x in tensors):
        return made
    kinds = now.results("what is computed on the host", None, [
        t._replace(kinds=tuple(spmd.V if k.letter in "RI" else k for k in t.kinds)) for t in types])
    kept = [tuple(spmd.R for _ in of) if all(t.kinds[k].letter in "RI" for t in types) else of for k, of in enumerate(kinds)]
    return typed(now, "host", made, kept, types, graded=False)
