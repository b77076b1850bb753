# SPDX-License-Identifier: Apache-2.0
"""The one hot path: op call -> cached plan -> local op -> DTensor.

A call's key is its op name, the interned layouts of its DTensors and its static arguments. The plan behind the key
(`planning.py` builds it, `planned.py` runs it) says which operands move where, which gradient face each shows
(`faces.py`), and how results are wrapped. Invariant: no op ever reaches local data without a rule having said so, and
nothing is communicated before every check has passed.
"""
from __future__ import annotations

from mindspore import Tensor, ops
from mindspore._c_expression import NoFallbackGuard

from . import comm, modes
from .faces import as_local
from .planning import attributes, bind_arguments, build_plan, plan_for, plan_own
from .rules.names import PRIMITIVES

_ATOMS = frozenset((int, float, bool, str, type(None), complex))
_cache: dict = {}
_CACHE_LIMIT = 16384


def dispatch(func, args, kwargs):
    """Entry from `DTensor.__fallback__`: MindSpore's op `func` called with at least one DTensor somewhere."""
    if func.name == "typeof":  # asked by Python code inside MindSpore; it computes nothing
        with NoFallbackGuard():
            return func(*args, **(kwargs or {}))
    mode = modes.mode.get()
    if len(args) == 3 and args[1].__class__ is str and isinstance(args[0], ops.Primitive):
        head, args = args[:2], args[2]
    else:
        head = None
    if mode is not modes.DEFAULT and mode.skip and not _kept(func.name, mode.no_skip):
        with NoFallbackGuard():  # the DTensors themselves: an alias of a Parameter would cut its gradient
            return func(*args, **(kwargs or {})) if head is None else func(*head, args)
    tensors: list = []
    key = (func.name, _walk(args, tensors), _walk(tuple(kwargs.items()), tensors) if kwargs else None,
           _walk(attributes(head[0]).values(), []) if head is not None else None, comm.fake_token(),
           mode.implicit_replication)
    plan = _cache.get(key)
    if plan is None:
        plan = _remember(key, build_plan(func.name, args, kwargs or {}, tensors, mode, head))
    return plan.run(func, head, args, kwargs, tensors, mode)


def call(op: str, **arguments):
    """Runs a canonical op of our own (a rule and an entry in `local_ops`) on DTensors."""
    tensors: list = []
    mode = modes.mode.get()
    key = ("@" + op, _walk(tuple(arguments.items()), tensors), None, comm.fake_token(), mode.implicit_replication)
    plan = _cache.get(key)
    if plan is None:
        plan = _remember(key, plan_own(op, arguments, tensors, mode))
    return plan.run(None, None, (), None, tensors, mode)


def call_by_rule(op: str, func, names: tuple[str, ...], args: tuple, kwargs: dict):
    """Runs a function of local tensors as the op of a registered rule.

    Args:
        op: canonical op; its rule is consulted.
        func: the function; its results are the local results.
        names: of its parameters, as the rule sees them.
        args: arguments, at least one DTensor somewhere.
        kwargs: keyword arguments.
    """
    mode = modes.mode.get()
    if mode.skip and not _kept(op, mode.no_skip):
        return func(*plain_tree(args), **plain_tree(kwargs))
    tensors: list = []
    key = ("@rule", op, _walk(args, tensors), _walk(tuple(kwargs.items()), tensors), comm.fake_token())
    plan = _cache.get(key)
    if plan is None:
        known = (*names, *(k for k in kwargs if k not in names))
        plan = _remember(key, plan_for(op, bind_arguments(op, known, args, kwargs), tensors, mode))
    return plan.run(func, None, args, kwargs, tensors, mode)


def _remember(key, plan):
    if len(_cache) >= _CACHE_LIMIT:
        _cache.clear()
    _cache[key] = plan
    return plan


def clear_cache() -> None:
    """Forgets all plans (they are rebuilt on demand)."""
    _cache.clear()


def _walk(values, tensors) -> tuple:
    """The hashable part of a call's arguments; tensors are appended to `tensors` in order of appearance."""
    parts: list = []
    for v in values:
        c = v.__class__
        if c in _ATOMS:
            parts.append((c, v))
        elif c is tuple or c is list:
            parts.append(_walk(v, tensors))
        elif isinstance(v, Tensor):
            tensors.append(v)
            layout = getattr(v, "_layout", None)
            parts.append(layout if layout is not None else (tuple(v._shape), str(v.dtype), c is Tensor))
        else:
            parts.append(str(v))
    return tuple(parts)


def plain_tree(value):
    """Nested arguments with every DTensor as its local tensor."""
    if isinstance(value, Tensor):
        return as_local(value) if getattr(value, "_layout", None) is not None else value
    if isinstance(value, tuple | list):
        return type(value)(plain_tree(v) for v in value)
    if isinstance(value, dict):
        return {k: plain_tree(v) for k, v in value.items()}
    return value


def _kept(name: str, no_skip) -> bool:
    return bool(no_skip) and (name in no_skip or PRIMITIVES.get(name, ("",))[0] in no_skip)
