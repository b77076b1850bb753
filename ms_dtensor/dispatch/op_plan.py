# SPDX-License-Identifier: Apache-2.0
"""A plan and its parts: what becomes of each operand, what a rank runs, how results become DTensors, what is linked.

A plan is what `dispatch/planner.py` decided for one key of a call; running it consults no rule, and it never changes.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from sys import getrefcount
from typing import Any, NamedTuple

from mindspore import Parameter, Tensor
from mindspore.ops import stop_gradient

from ..comm.pretended import executing
from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..errors import OpRuleError
from ..internals.names import NoFallbackGuard, TensorOverloadCall, enabled
from ..ops import rng
from ..ops.local import HandedOn, run_local
from ..ops.local.basic import clone
from ..ops.rules.spec import EmptyShard
from . import classes, inplace, modes, policy
from .constants import copied, keeps
from .cotangent import grad_layout, partial_grad_axes, with_cotangent
from .held import PRODUCTS, holding, known_matrices
from .memo import memo_of
from .op_call import OpCall, refill
from .operands import (
    as_local,
    as_replicated,
    dtype_name,
    recording,
    redistribute_operand,
    reduce_nonlinear,
    retag,
    wrap,
)
from .replicas import compare_constant
from .views import is_view, link


class Step(NamedTuple):
    """What is done with one operand before the local call; None: nothing."""

    promoted: Layout | None  # what a plain tensor counts as
    target: Layout | None  # where it is moved
    cotangent: Layout | None  # in which its cotangent will arrive: it is varying on some axes


class Abstract(NamedTuple):
    """What is known of a rank's part of a call before it has run."""

    op: str
    arguments: dict  # by the names of the op's rule; an `Operand` (of global shape) for each tensor
    shapes: tuple[tuple[int, ...], ...] | None  # of the local results; None: only the data, or the function, tell
    dtypes: tuple[str, ...] = ()  # of the results
    view: bool = False  # the result lies in the first operand's memory


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What one rank runs: a form of ours, or else a substitute of MindSpore's function, or else that function itself."""

    form: tuple[Callable, tuple, dict] | None = None  # function, arguments with an `Operand` for each tensor, keywords
    substitute: Callable | None = None  # of the call's own arguments: Python code, which asks operands for their shape
    empty: EmptyShard | None = None  # stand-ins for operands and results, if this rank's shards hold nothing
    beside_empty: bool = False  # other ranks run it on stand-ins, which are nodes: so are this rank's operands
    in_float32: Callable[[Callable], Callable] | None = None  # wraps a function that has no kernel for bfloat16
    native: bool = True  # False: as a method, the op may run MindSpore's Python, which asks operands for their shape
    # Boolean operands of arithmetic: MindSpore 2.10 cannot add up two cotangents of one. What becomes an integer: its
    # cotangents would be rounded to integers, each use's by itself, and handed on.
    constants: tuple[int, ...] = ()
    again: Callable | None = None  # runs it such that it can be differentiated again, see `ops/local/orders.py`
    places: tuple[tuple[int, int], ...] = ()  # (place among the arguments, operand); none where some operand is nested
    abstract: Abstract | None = None  # in a dry run: what its executor is told instead

    def run(self, call: OpCall, tensors):
        """The local results, from local operands (plain, or DTensors under the guard)."""
        if self.abstract is not None:
            return executing().local(self, call, tensors)
        again = None
        if recording():
            again = self.again
            if self.constants:
                tensors = [stop_gradient(x) if i in self.constants else x for i, x in enumerate(tensors)]
            if self.beside_empty:
                tensors = [HandedOn.apply(x) if x._requires_grad else x for x in tensors]
        if self.form is not None or self.empty is not None or again is not None:
            return run_local(lambda xs: self._original(call, xs), self.form, self.empty, tensors, again)
        return self._original(call, tensors)

    def _original(self, call: OpCall, tensors):
        func = self.substitute or (call.func if call.primitive is None else call.compute)
        if self.in_float32 is not None:
            func = self.in_float32(func)
        if self.substitute is not None or not self.is_native(call.func):
            # They come as their steps left them, so a bucketed parameter's cotangent stays a summand.
            tensors = [as_local(x, grad_layout(x)) if hasattr(x, "_layout") else x for x in tensors]
        args, kwargs = list(call.args), call.kwargs
        if self.places:
            for place, i in self.places:
                args[place] = tensors[i]
        else:
            it = iter(tensors)
            args, kwargs = refill(args, it), refill(kwargs or {}, it)
        return func(*args, **kwargs) if kwargs else func(*args)

    def alone(self, call: OpCall) -> bool:
        """Whether what is run is MindSpore's function and nothing else."""
        return call.primitive is None and not self.constants and not self.beside_empty and all([x is None for x in (
            self.abstract, self.form, self.empty, self.substitute, self.in_float32, self.again)])

    def is_native(self, func) -> bool:
        """Whether MindSpore runs no Python that asks its operands for their shape."""
        return self.native or func.__class__ is not TensorOverloadCall


class Results:
    """How local results become DTensors; the first ones tell their dtypes, and with them the layouts are known."""

    __slots__ = ("by_data", "drafts", "layouts", "mesh", "op")

    def __init__(self, op: str, mesh: DeviceMesh, drafts, by_data: bool = False):
        self.op, self.mesh, self.by_data = op, mesh, by_data  # `by_data`: of another shape each time
        self.drafts = drafts  # of each result ((placements, order, global shape or None), a layout that may be it or None)
        self.layouts: list[Layout | None] = [None] * len(drafts)

    def wrap(self, result, grad: bool, winners=None):
        """The results as DTensors: the objects themselves where only the caller's variable knows them."""
        layouts = self.layouts
        if isinstance(result, Tensor):
            return reduce_nonlinear(_wrap_or_retag(getrefcount(result), result, layouts[0] or self._bind(0, result)), grad,
                                    self.op, winners)
        if isinstance(result, tuple | list):
            if len(result) != len(layouts):
                raise OpRuleError(f"For '{self.op}', the rule promises {len(layouts)} results, MindSpore gave "
                                  f"{len(result)}.", "", "A rule must name every result.", "report this op")
            done = []
            for i in range(len(layouts)):  # `zip` would hold another reference
                r = result[i]
                out = _wrap_or_retag(getrefcount(r), r, layouts[i] or self._bind(i, r), _HELD_IN_LIST)
                done.append(reduce_nonlinear(out, grad, self.op))
            return type(result)(done)
        raise OpRuleError(f"For '{self.op}', MindSpore returned {type(result).__name__}, not a tensor.")

    def _bind(self, i: int, result) -> Layout:
        """The first result of a plan tells the dtype; its shape must be what the rule promised."""
        (placements, order, shape), layout = self.drafts[i]
        if shape is None:  # such a rule splits evenly, so every rank's shard is like this one
            draft = Layout(self.mesh, placements, tuple(result._shape), dtype_name(result.dtype), order)
            placements, shape = draft.placements, [n * draft.divisor(d) for d, n in enumerate(draft.shape)]
        dtype = dtype_name(result.dtype)
        if layout is None or layout.dtype != dtype:
            layout = Layout(self.mesh, placements, shape, dtype, order)
        if layout.mesh.get_coordinate() is not None and layout.local_shape() != tuple(result._shape):
            raise OpRuleError(f"For '{self.op}', the local result has shape {tuple(result._shape)}, but the rule says "
                              f"{layout.local_shape()} of {layout}.", "", "Rule and op disagree; nothing was returned.",
                              "report this call: it is a bug in the rule")
        if not self.by_data:
            self.layouts[i] = layout
        return layout


@dataclass(frozen=True, slots=True)
class OpPlan:
    """What to do for one key."""

    op: str
    steps: tuple[Step, ...]
    local: LocalRun
    results: Results
    view: tuple[bool, bool, str] | None = None  # a view on one device, what `views.link` is told of it
    writes: bool = False  # the result is put into the first operand, which stays where it is
    uneven: bool = False  # some rank's shard of an operand is empty: there, what is handed back as it came is a node
    draws: bool = False  # from the random stream, which all ranks of the mesh must have
    winners: Callable | None = None  # of an extreme of shards, `(x, result) ->` who attains it (`ops/local/extremes.py`)
    reduced: tuple[int, ...] = field(init=False)  # axes on which a result is reduced at once, while recording
    moves: bool = field(init=False)  # some operand is moved
    short: bool = field(init=False)  # nothing stands between the operands and one local call, see `cached.py`

    def __post_init__(self):
        local, moves = self.local, any(step.target is not None for step in self.steps)
        plain = any(step.promoted is not None for step in self.steps)
        object.__setattr__(self, "moves", moves)
        object.__setattr__(self, "reduced", tuple(sorted({
            a for (placements, *_), _ in self.results.drafts for a, p in enumerate(placements)
            if p.is_partial() and not p.is_partial("sum")})))
        object.__setattr__(self, "short", bool(local.places) and (self.view is None or self.op != "cast") and not (
            moves or plain or self.writes or self.draws or self.results.by_data or local.again or local.constants
            or local.abstract is not None or local.empty is not None or local.in_float32 is not None))

    def run(self, call: OpCall):
        """The results of one call, as DTensors."""
        grad = recording()
        tensors = call.tensors
        first: Any = tensors[0]
        versioned = False
        if self.writes:
            grad = grad and enabled()  # under `no_grad` a leaf is written as outside of a recording
            versioned = call.func is not None and call.func.name != "Assign"
            inplace.check_writable(first, self.op, grad, versioned)
            if grad:
                tensors = [inplace.fresh(first), *tensors[1:]]
        if self.draws:
            rng.agree(self.results.mesh)
        mode = modes.mode.get()
        if mode is not modes.DEFAULT and (self.moves or self.reduced):
            policy.check_op(self.op, tensors, [step.target for step in self.steps], self.reduced if grad else (), mode)
        operands, parameter, lent = [], False, None
        for x, (promoted, target, cotangent) in zip(tensors, self.steps):
            memo, own = getattr(x, "_memo", None), grad and x.__class__ is classes.GATED and keeps(self.op, x, tensors)
            if memo is not None:
                if x.__class__ is classes.UNSHARDED and target is None:
                    own = grad and keeps(self.op, x, tensors)
                    lent = lent if own else memo.lent
                elif grad and memo.reads is not None:
                    memo.reads[0].append(memo.reads[1])
            if promoted is not None:
                if mode.constants and mode.check_rules:
                    compare_constant(self.op, x, promoted)
                x = as_replicated(x, promoted, grad)
            if target is not None:
                x = redistribute_operand(x, target, grad, self.op)
            if grad:
                if cotangent is not None:
                    if x._requires_grad:  # a constant has no cotangent to be laid out
                        x = with_cotangent(x, cotangent)
                elif x.__class__ is not classes.DTENSOR and partial_grad_axes(x):
                    x = with_cotangent(x, x._layout.gradient())
                parameter = parameter or (x.__class__ is not classes.DTENSOR and _is_parameter(x))
            operands.append(copied(x) if own else x)
        # a cast to its own dtype: one device hands a tensor back, but copies a view
        cloned = self.view is not None and self.op == "cast" and is_view(first)
        with NoFallbackGuard():
            store = holding.get() if grad else None
            if store is not None and self.op in PRODUCTS:
                known = known_matrices(call.func, call.args, call.kwargs) if self.local.alone(call) else None
                result = store.product(lambda *xs: self.local.run(call, list(xs)), operands, tensors, known)
            else:
                result = self.local.run(call, operands)
            if cloned and self.local.abstract is None:  # a dry run's is one already
                result = clone(result)
            if (parameter or (grad and self.uneven)) and (
                    result.__class__ is not Tensor or (result._is_leaf and result._requires_grad)):
                result = _as_nodes(result)
            elif (grad and not first._requires_grad and first.__class__ is classes.PARAMETER and isinstance(result, Tensor)
                    and (self.view is not None or self.op == "cast") and result.is_contiguous()):
                result = result.view(result._shape)  # MindSpore would keep what was handed back: see `frozen_alias`
            winners = self.winners(operands[0], result) if grad and self.winners is not None else None
        out = self.results.wrap(result, grad, winners)
        if self.writes:
            inplace.store(first, out, grad, versioned)
            return first
        if self.view is not None and not cloned:
            link(first, out, self.view)
        if grad and (self.view is not None or self.op == "cast") and out.__class__ is classes.DTENSOR:
            if (operands[0] is first and not first._is_leaf) or partial_grad_axes(first):
                memo_of(out).view_of = first, self, (call.func, call.primitive, call.args, call.kwargs, tensors)
        if lent is not None and grad:
            read_of_lent(lent, out, self.view is not None and not cloned)
        if store is not None:
            store.computed(tensors, out)
        return out


def read_of_lent(lent, out, view: bool) -> None:
    """What was computed of a tensor whose memory goes: its backward asks for that memory again; a view lies in it, too."""
    call, param = lent
    call.read.append(param.name)
    for x in out if out.__class__ in (tuple, list) else (out,):
        if view and x.__class__ is classes.DTENSOR:
            memo_of(x).lent = lent
            x.__class__ = classes.UNSHARDED
        elif x._requires_grad and not x._is_leaf:
            Tensor.register_hook(x, partial(call.enter, param, memo_of(param).versioned))


def _references(held) -> int:
    return getrefcount(held)


def _count_references() -> tuple[int, int, int]:
    held = object()
    elements = [object()]
    element = elements[0]
    return getrefcount(held), _references(held), getrefcount(element)


# What `getrefcount` says of an object that a single variable holds: asked beside that variable, in a function that the
# object was passed to, and of a list's element that was also put into a variable. Python 3.10 counts the second higher.
HELD_ONCE, _HELD_BY_CALLER, _HELD_IN_LIST = _count_references()


def _wrap_or_retag(references: int, local, layout: Layout, alone: int = _HELD_BY_CALLER):
    """A local result as a DTensor; itself, where nobody else can hold it, as a wrapper waits for the data."""
    return retag(local, layout) if references == alone and local.__class__ is Tensor else wrap(local, layout)


def _as_nodes(result):
    """An operand that was handed back (a cast to its own dtype, x[:]) as a node: an alias of a leaf has no gradient.

    A view costs nothing, but MindSpore loses what is behind one when its gradient is differentiated again.
    """
    node = Tensor.copy if modes.mode.get().higher_order else lambda r: r.view(r._shape)
    if isinstance(result, Tensor):
        return node(result)
    if not isinstance(result, tuple | list):
        return result
    return type(result)(node(r) if r._is_leaf and r._requires_grad else r for r in result)


def _is_parameter(x) -> bool:
    return x.__class__ is not Tensor and isinstance(x, Parameter) and x.requires_grad
