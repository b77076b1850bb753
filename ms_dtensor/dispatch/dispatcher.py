# SPDX-License-Identifier: Apache-2.0
"""The one hot path: op call -> cached plan -> local op -> DTensor.

A call's key is its op name, the interned layouts of its DTensors and its static arguments. The plan behind the key
(`planner.py` builds it; `cached.py` runs it, in full by `op_plan.py`) says which operands move where, in which layout
each expects its cotangent, and how results are wrapped. Invariant: no op ever reaches local data without a rule having
said so, and nothing is communicated before every check has passed.
"""
from __future__ import annotations

import logging
from functools import partial
from operator import is_
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from ..comm import world_key
from ..comm.pretended import pretended
from ..core.tree import first_dtensor, map_leaves
from ..errors import MixedOperandError
from ..internals.names import NoFallbackGuard
from . import modes
from .cached import CachedCall
from .classes import ATOM, KINDS, LIST, OURS
from .op_call import OpCall, attributes, op_name
from .operands import as_local, differentiated, is_number
from .planner import build_plan, plan_by_rule, plan_own, plan_write

_log = logging.getLogger("ms_dtensor")
_LIMIT = 16384
_INEXACT = frozenset((float, complex))
_cache: dict = {}
_primitives: dict = {}  # id -> (primitive, what its attributes were, their part of a key)
_made = 0  # plans
_forgotten = 0  # how often plans ran that are no longer in the cache
_mode, _DEFAULT, _pretended = modes.mode.get, modes.DEFAULT, pretended.get
_primitive_class = ops.Primitive


def dispatch(self, func, args=(), kwargs=None):
    """`DTensor.__fallback__`: MindSpore's op `func` called with at least one DTensor somewhere."""
    primitive = None
    if len(args) == 3 and args[1].__class__ is str and isinstance(args[0], _primitive_class):
        primitive, _, args = args
    tensors: list = []
    key: Any = [func.name, func.__class__]  # a method may be another op than the function of its name
    mode = _mode()
    if mode is not _DEFAULT:
        if mode.watch is not None and (kept := mode.watch(key[0], args)) is not None:
            given = args if primitive is None else (primitive, primitive.name, args)
            return kept(partial(dispatch, self, func, given, kwargs))
        if mode.skip and not modes.named(key[0], mode.no_skip):
            for a in args:
                getattr(a, "_layout", None)  # waits, if its data are under way
            with NoFallbackGuard():  # the DTensors themselves: an alias of a Parameter would cut its gradient
                return OpCall(func, primitive, args, kwargs, tensors).compute(*args, **(kwargs or {}))
        key.append(_mode_key(mode, args))
    for a in args:  # the commonest arguments without a call: this loop is most of what dispatch costs
        kind = KINDS.get(a.__class__)
        if kind is OURS:
            tensors.append(a)
            key.append(a._layout)
        elif kind is ATOM:
            key.append(a.__class__)
            key.append(a if a or a.__class__ not in _INEXACT else repr(a))  # 0.0 and -0.0 are equal, but different calls
        else:
            _part(a, key, tensors)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            _part(a, key, tensors)
    if primitive is not None:
        key.append(_attribute_key(primitive))
    if _pretended() is not None:
        key.append(world_key())
    key = tuple(key)
    plan = _cache.get(key)
    if plan is None:
        if func.name == "typeof":  # asked by Python code inside MindSpore; it computes nothing
            with NoFallbackGuard():
                return OpCall(func, primitive, args, kwargs, tensors).compute(*args, **(kwargs or {}))
        plan = _remember(key, build_plan(op_name(func), OpCall(func, primitive, args, kwargs, tensors), mode))
    return plan.run(func, primitive, args, kwargs, tensors)


def call(op: str, **arguments):
    """Runs a canonical op of our own (a rule and an entry in `LOCAL_OPS`) on DTensors."""
    return _call(plan_own, op, arguments)


def write(op: str, **arguments):
    """Runs a canonical op (a rule and an entry in `WRITES`) and puts the result into its first argument."""
    return _call(plan_write, op, arguments)


def _call(build, op: str, arguments: dict):
    tensors: list = []
    mode = _mode()
    key: Any = [build, op, world_key(), mode.implicit_replication, mode.constants, mode.higher_order, mode.no_gather]
    for name, a in arguments.items():
        key.append(name)
        _part(a, key, tensors)
    key = tuple(key)
    plan = _cache.get(key)
    if plan is None:
        plan = _remember(key, build(op, arguments, tensors, mode))
    return plan.run(None, None, (), None, tensors)


def call_by_rule(op: str, func, names: tuple[str, ...], args: tuple, kwargs: dict):
    """Runs a function of local tensors as the op of a registered rule.

    Args:
        op: canonical op; its rule is consulted.
        func: the function; its results are the local results.
        names: of its parameters, as the rule sees them.
        args: arguments, at least one DTensor somewhere.
        kwargs: keyword arguments.
    """
    tensors: list = []
    key: Any = [plan_by_rule, op]
    mode = _mode()
    if mode is not _DEFAULT:
        if mode.watch is not None and (kept := mode.watch(op, args)) is not None:
            return kept(partial(call_by_rule, op, func, names, args, kwargs))
        if mode.skip and not modes.named(op, mode.no_skip):
            return func(*plain_tree(args), **plain_tree(kwargs))
        key.append(_mode_key(mode, args))
    for a in args:  # as in `dispatch`
        kind = KINDS.get(a.__class__)
        if kind is OURS:
            tensors.append(a)
            key.append(a._layout)
        elif kind is ATOM:
            key.append(a.__class__)
            key.append(a if a or a.__class__ not in _INEXACT else repr(a))  # 0.0 and -0.0 are equal, but different calls
        else:
            _part(a, key, tensors)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            _part(a, key, tensors)
    if _pretended() is not None:
        key.append(world_key())
    key = tuple(key)
    plan = _cache.get(key)
    if plan is None:
        known = (*names, *(k for k in kwargs if k not in names))
        plan = _remember(key, plan_by_rule(op, known, OpCall(func, None, args, kwargs, tensors), mode))
    return plan.run(func, None, args, kwargs, tensors)


def _remember(key, plan) -> CachedCall:
    global _made
    _made += 1
    if len(_cache) >= _LIMIT:
        clear_cache()
    _cache[key] = cached = CachedCall(plan)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("cache miss %d: made a plan for %s", _made, key)
    return cached


def clear_cache() -> None:
    """Forgets all plans (they are rebuilt on demand)."""
    global _forgotten
    _forgotten += sum(plan.uses for plan in _cache.values())
    _cache.clear()
    _primitives.clear()


def cache_info() -> dict[str, int]:
    """See `ms_dtensor.debug.cache_info`."""
    uses = _forgotten + sum(plan.uses for plan in _cache.values())
    return {"hits": max(uses - _made, 0), "misses": _made, "size": len(_cache), "limit": _LIMIT}


def _mode_key(mode, args) -> tuple:
    """What a mode changes in a plan; a derivative of a gradient also asks which operands have one."""
    differentiated = tuple(getattr(a, "_requires_grad", None) for a in args) if mode.higher_order else None
    return mode.implicit_replication, mode.constants, mode.no_gather, differentiated


def _part(a, key, tensors) -> None:
    """Appends the hashable part of an argument to a key; tensors go to `tensors` in order of appearance."""
    kind = KINDS.get(a.__class__)
    if kind is ATOM:
        key.append(a.__class__)  # 1, 1.0 and True are equal, and mean different calls
        key.append(a if a or a.__class__ not in _INEXACT else repr(a))
    elif kind is LIST:
        classes = tuple(map(type, a))
        key.append(classes)
        if _ATOM_LISTS.get(classes) or _exact_only(classes):
            key.append(tuple(a))
        else:
            for v in a:
                _part(v, key, tensors)
    elif isinstance(a, Tensor):
        tensors.append(a)
        layout = getattr(a, "_layout", None)
        key.append(layout if layout is not None else (
            tuple(a._shape), str(a.dtype), a.__class__ is Tensor or is_number(a), differentiated(a)))
    elif isinstance(a, np.ndarray):  # whose text leaves out what is in the middle
        key.append((a.shape, a.dtype.str, a.tobytes()))
    elif a.__class__ is dict and first_dtensor((a,)) is not None:
        raise MixedOperandError("For a call by rule, DTensors came in a dict.", "keys " + ", ".join(map(repr, a)),
                                "A rule lays out arguments that are tensors, or lists of them.", "pass them one by one")
    else:
        key.append(a.__class__)  # np.float16(0.1) and np.float32(0.1) read alike
        key.append(str(a))


_ATOM_LISTS: dict[tuple, bool] = {}


def _exact_only(classes) -> bool:
    """Whether a list of these classes is hashable as it is, and equal ones are alike; remembered."""
    if all(KINDS.get(c) is ATOM and c not in _INEXACT for c in classes):
        if len(_ATOM_LISTS) < 1024:
            _ATOM_LISTS[classes] = True
        return True
    return False


def _attribute_key(primitive):
    """What a classic primitive was made with, as part of a key; read again only when the object has changed."""
    now = primitive.__dict__
    known = _primitives.get(id(primitive))
    if known is not None and known[0] is primitive and len(known[1]) == len(now) and all(map(is_, now.values(), known[1])):
        return known[2]
    key: list = []
    _part(tuple(attributes(primitive).values()), key, [])
    if len(_primitives) >= _LIMIT:
        _primitives.clear()
    _primitives[id(primitive)] = primitive, tuple(now.values()), tuple(key)
    return _primitives[id(primitive)][2]


def plain_tree(value):
    """Nested arguments with every DTensor as its local tensor."""
    return map_leaves(lambda x: as_local(x) if getattr(x, "_layout", None) is not None else x, value, Tensor)
