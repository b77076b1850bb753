# SPDX-License-Identifier: Apache-2.0
"""A plan at work: operands are moved and shown, the local op runs, results are wrapped.

A plan is what `dispatch/planner.py` decided for one key of a call; running it consults no rule.
"""
from __future__ import annotations

import warnings
from sys import getrefcount

from mindspore import Parameter, Tensor
from mindspore._c_expression import NoFallbackGuard, TensorOverloadCall

from ..comm.record import user_site
from ..comm.world import ops_block
from ..core.layout import Layout
from ..errors import ImplicitCommError, OpRuleError
from ..ops.local import ask, run_local, widening
from ..ops.rules.spec import Operand
from ..redistribute.plan import plan as plan_moves
from . import classes, inplace
from .operands import (
    PARTIAL_GRAD_AXES,
    VIEWED,
    as_local,
    as_replicated,
    dtype_name,
    face,
    make,
    recording,
    redistribute_operand,
    reduce_nonlinear,
    retag,
    wrap,
)


def _references(held) -> int:
    return getrefcount(held)


def _count_references() -> tuple[int, int]:
    held = object()
    return getrefcount(held), _references(held)


_ALONE, _ALONE_BELOW = _count_references()  # of what one variable knows: counted there, and in a function it is passed to
_warned: set[tuple[str, str]] = set()  # call sites that have been warned about


class OpPlan:
    """What to do for one key.

    A plan that moves no operand becomes `short` once its results' layouts are known: operands as plain aliases, the op,
    its result as a DTensor. Neither a guard nor an autograd node of ours is needed then, because an alias shares the
    autograd identity of anything but a Parameter. Making an alias waits for the operand's data, so where ops are issued
    asynchronously the operands themselves go in, under a guard, unless Python code would ask them for their shape.
    Everything else, and the first run, goes through `_in_full`.
    """

    __slots__ = ("op", "steps", "invoke", "empty", "outs", "implicit", "substitute", "widened", "view", "target", "native",
                 "uses", "short", "faced", "places", "filled", "shares", "direct", "aliased", "question", "answer", "winners",
                 "promised", "stands_in")

    def __init__(self, op, steps, invoke, empty, outs):
        self.op, self.steps, self.invoke, self.empty, self.outs = op, steps, invoke, empty, outs
        self.substitute, self.widened = None, None
        self.view, self.target = "", None  # what a view is here (`view_kind`); layout of the operand that is written
        self.native = True  # False: MindSpore may run Python that asks its operands for their shape
        self.implicit = any(target is not None for _, target, _ in steps)
        self.uses = 0
        self.short = None  # the first result's layout, once `run` may take the short way
        self.aliased = True  # a short run takes plain aliases of the operands
        # while recording: an operand shows its varying face, or a result is partial in a way that no gradient fits
        self.faced = any(cotangent is not None for *_, cotangent in steps)
        self.shares = self.direct = False  # of a view: it shares storage; MindSpore's own op made it
        self.question = self.answer = None  # what is asked before the first run, and what MindSpore said (`ops/local/run.py`)
        self.promised = ()  # dtypes of the results as far as the rule knows them, for calls that a kernel does not make
        self.stands_in = False  # this rank's shards are empty, others' are not
        self.winners = None  # of an extreme of shards, `(x, result) ->` who attains it (`ops/local/extremes.py`)
        self.places, self.filled = None, None  # where the call takes which operand: ((place, operand), ...); the rest of it

    def run(self, func, head, args, kwargs, tensors, mode):
        """The results of one call, as DTensors."""
        self.uses += 1
        layout = self.short
        if layout is None or (self.faced and recording()):
            return self._in_full(func, head, args, kwargs, tensors, mode)
        invoke = self.invoke
        aliased = self.aliased or not self._is_native(func)
        xs = list(args) if invoke is None else self.filled.copy()
        for place, i in self.places:
            x = tensors[i]
            if x.__class__ is not classes.DTENSOR and recording():
                return self._in_full(func, head, args, kwargs, tensors, mode)
            xs[place] = make(Tensor, x) if aliased else x
        fn, named = self.substitute or func, kwargs
        if invoke is not None:
            fn, _, named = invoke
        elif head is not None and fn is func:
            xs = *head, tuple(xs)
        if aliased:
            result = fn(*xs, **named) if named else fn(*xs)
        else:
            with NoFallbackGuard():
                result = fn(*xs, **named) if named else fn(*xs)
        if result.__class__ is Tensor and getrefcount(result) == _ALONE:
            result.__class__ = classes.DTENSOR  # `retag`, without the call
            result._layout = layout
            out = result
        else:
            out = self.wrap(result, False)
        if self.view:
            first = tensors[0]
            if recording():
                self._link(first, out, func, head, args, kwargs, True)
            else:
                inplace.link(first, out, self.shares, self.direct)
        return out

    def _in_full(self, func, head, args, kwargs, tensors, mode):
        grad = recording()
        first = tensors[0]
        if self.question is not None and self.answer is None:
            self._ask(func, head, args, kwargs)
        if self.target is not None:
            inplace.check_writable(first, self.op, grad)
            if grad:
                tensors[0] = inplace.fresh(first)
        if self.implicit:
            check_policy(self, tensors, mode)
        parameter = False
        for i, (promoted, target, cotangent) in enumerate(self.steps):
            x = tensors[i]
            if promoted is not None:
                x = as_replicated(x, promoted, grad)
            if target is not None:
                x = redistribute_operand(x, target, grad)
            if grad:
                if cotangent is not None:
                    if x._requires_grad:  # a constant has no cotangent to be laid out
                        x = face(x, cotangent)
                elif x.__class__ is not classes.DTENSOR and PARTIAL_GRAD_AXES in getattr(x, "__dict__", ()):
                    x = face(x, x._layout.gradient())
                parameter = parameter or (x.__class__ is not classes.DTENSOR and _is_parameter(x))
            tensors[i] = x
        with NoFallbackGuard():
            result = self.local(func, head, args, kwargs, tensors)
            if (parameter or (grad and self.answer is not None)) and (result.__class__ is not Tensor or result._is_leaf):
                result = _of_its_own(result)
            winners = self.winners(tensors[0], result) if grad and self.winners is not None else None
        out = self.wrap(result, grad, winners)
        if self.view:
            self.shares = self.view == "view" and self.steps[0][1] is None
            self.direct = self.invoke is None and self.substitute is None
            recorded = grad and (tensors[0] is first or PARTIAL_GRAD_AXES in first.__dict__)
            self._link(first, out, func, head, args, kwargs, recorded)
        elif self.target is not None:
            inplace.store(first, out, grad)
            return first
        if self.places is None:
            self._learn(args, kwargs, tensors)
        return out

    def _ask(self, func, head, args, kwargs) -> None:
        """Every rank learns what the call gives, or refuses, before anything is communicated."""
        self.answer = ask(self.question, lambda xs: self._original(func, head, args, kwargs, xs))

    def local(self, func, head, args, kwargs, tensors):
        """The local call on local operands (plain, or DTensors under the guard)."""
        if self.invoke is not None or self.empty is not None:
            return run_local(lambda xs: self._original(func, head, args, kwargs, xs), self.invoke, self.empty, tensors,
                             self.question if self.stands_in else None, self.answer)
        return self._original(func, head, args, kwargs, tensors)

    def _is_native(self, func) -> bool:
        """Whether MindSpore runs no Python that asks its operands for their shape."""
        return self.native or func.__class__ is not TensorOverloadCall

    def _original(self, func, head, args, kwargs, tensors):
        native = self._is_native(func)
        if self.substitute is not None:  # Python code, which asks its operands for their shape
            func, head, native = self.substitute, None, False
        if self.widened is not None:
            func, head = widening(func, head, *self.widened), None
        if not self.places or not native:
            return original_call(func, head, args, kwargs, tensors, native)
        xs = list(args)
        for place, i in self.places:
            xs[place] = tensors[i]
        if head is not None:
            return func(*head, tuple(xs))
        return func(*xs, **kwargs) if kwargs else func(*xs)

    def _learn(self, args, kwargs, tensors) -> None:
        """After a first run: where operands stand in the call, and whether later runs may be short."""
        # where a shard is empty, what is handed back as it came must become a node on all ranks
        self.faced = self.faced or self.answer is not None or any(o.has_nonlinear_partial for o in self.outs)
        call = args if self.invoke is None else self.invoke[1]
        wanted = Tensor if self.invoke is None else Operand
        found = [(k, v) for k, v in enumerate(call) if isinstance(v, wanted)]
        nested = any(v.__class__ in (tuple, list) and _holds(v, wanted) for v in (*call, *(kwargs or {}).values()))
        self.places = () if nested or (self.invoke is None and len(found) != len(tensors)) else tuple(
            (k, v.index if v.__class__ is Operand else i) for i, (k, v) in enumerate(found))
        if self.places and self.empty is None and self.widened is None and not any(
                promoted is not None or target is not None for promoted, target, _ in self.steps):
            self.filled = None if self.invoke is None else list(self.invoke[1])
            self.short = self.outs[0]
            self.aliased = ops_block() or not getattr(self.substitute, "takes_dtensors", self.substitute is None)

    def _link(self, first, out, func, head, args, kwargs, recorded) -> None:
        if recorded and out.__class__ is classes.DTENSOR and (not first._is_leaf or PARTIAL_GRAD_AXES in first.__dict__):
            out.__dict__[VIEWED] = first, self, (func, head, args, kwargs)
        inplace.link(first, out, self.shares, self.direct)

    def wrap(self, result, grad, winners=None):
        """The results as DTensors: the objects themselves where only the caller's variable knows them."""
        outs = self.outs
        if isinstance(result, Tensor):
            out = outs[0]
            if out.__class__ is not Layout:
                out = self._bind_result_layout(0, result)
            x = _wrap_or_retag(getrefcount(result), result, out)
            if winners is not None:
                x.__dict__["_winners"] = winners
            return reduce_nonlinear(x, grad)
        if isinstance(result, tuple | list):
            if len(result) != len(outs):
                raise OpRuleError(f"For '{self.op}', the rule promises {len(outs)} results, MindSpore gave {len(result)}.",
                                  "", "A rule must name every result.", "report this op")
            done = []
            for i in range(len(outs)):  # `zip` would hold another reference
                r = result[i]
                out = outs[i] if outs[i].__class__ is Layout else self._bind_result_layout(i, r)
                done.append(reduce_nonlinear(_wrap_or_retag(getrefcount(r), r, out), grad))
            return type(result)(done)
        raise OpRuleError(f"For '{self.op}', MindSpore returned {type(result).__name__}, not a tensor.")

    def _bind_result_layout(self, i, result) -> Layout:
        """The first result of a plan tells the dtype; its shape must be what the rule promised."""
        mesh, (placements, order, shape), layout = self.outs[i]
        if shape is None:  # such a rule splits evenly, so every rank's shard is like this one
            draft = Layout(mesh, placements, tuple(result._shape), dtype_name(result.dtype), order)
            placements, shape = draft.placements, [n * draft.divisor(d) for d, n in enumerate(draft.shape)]
        dtype = dtype_name(result.dtype)
        if self.answer is not None and dtype != self.answer.dtypes[i]:
            raise OpRuleError(f"For '{self.op}', the local result is {dtype}, but {self.answer.dtypes[i]} on other ranks.",
                              "", "A result has one dtype on all ranks.", "report this call: it is a bug")
        if layout is None or layout.dtype != dtype:
            layout = Layout(mesh, placements, shape, dtype, order)
        if layout.mesh.get_coordinate() is not None and layout.local_shape() != tuple(result._shape):
            raise OpRuleError(f"For '{self.op}', the local result has shape {tuple(result._shape)}, but the rule says "
                              f"{layout.local_shape()} of {layout}.", "", "Rule and op disagree; nothing was returned.",
                              "report this call: it is a bug in the rule")
        self.outs[i] = layout
        return layout


def _wrap_or_retag(references: int, local, layout: Layout):
    """A local result as a DTensor; itself, where nobody else can hold it, as a wrapper waits for the data."""
    return retag(local, layout) if references == _ALONE_BELOW and local.__class__ is Tensor else wrap(local, layout)


def _of_its_own(result):
    """An operand that was handed back (a cast to its own dtype, x[:]) as a node: an alias of a leaf has no gradient."""
    if isinstance(result, Tensor):
        return result.view(result._shape)
    if not isinstance(result, tuple | list):
        return result
    return type(result)(r.view(r._shape) if r._is_leaf else r for r in result)


def _holds(values, cls) -> bool:
    return any(isinstance(v, cls) or (v.__class__ in (tuple, list) and _holds(v, cls)) for v in values)


def _is_parameter(x) -> bool:
    return x.__class__ is not Tensor and isinstance(x, Parameter) and x.requires_grad


def original_call(func, head, args, kwargs, tensors, native=True):
    """MindSpore's own call, with its tensors replaced in order of appearance."""
    it = iter(tensors if native else [as_local(x) if hasattr(x, "_layout") else x for x in tensors])
    args = refill(args, it)
    if head is not None:
        return func(*head, args)
    return func(*args, **refill(kwargs, it)) if kwargs else func(*args)


def refill(values, tensors):
    if values.__class__ is dict:
        return {k: refill((v,), tensors)[0] for k, v in values.items()}
    out = [next(tensors) if isinstance(v, Tensor) else
           refill(v, tensors) if v.__class__ in (list, tuple) else v for v in values]
    return out if values.__class__ is list else tuple(out)


def check_policy(plan: OpPlan, tensors, mode):
    """Raises or warns, as the redistribution policy says, if the plan moves an operand by itself."""
    if mode.no_gather:
        _check_no_gather(plan, tensors)
    if mode.policy == "auto":
        return
    for x, (_, target, _) in zip(tensors, plan.steps):
        if target is None or getattr(x, "_layout", None) is None:
            continue
        moves = plan_moves(x._layout, target)
        if all(m.kind == "cut" for m in moves):
            continue
        error = ImplicitCommError(
            f"For '{plan.op}', an operand has to be moved first: {', '.join(m.kind for m in moves)}.",
            f"{x._layout.describe()} -> {target}", "The redistribution policy is 'explicit'.",
            f"insert .redistribute(placements={list(target.placements)})")
        if mode.policy == "explicit":
            raise error
        site = user_site()
        if (site, plan.op) not in _warned:
            _warned.add((site, plan.op))
            warnings.warn(f"{site}: " + str(error).replace("is 'explicit'", "is 'warn'"), stacklevel=5)


def _check_no_gather(plan: OpPlan, tensors):
    """Inside `loss_parallel()`: refuses to make whole a sharded dim of logits, which is any but the first of a float."""
    for x, (_, target, _) in zip(tensors, plan.steps):
        layout = getattr(x, "_layout", None)
        if target is None or layout is None or "float" not in layout.dtype:
            continue
        if any(n > 1 and set(have) - set(want) for n, have, want in
               zip(layout.shape[1:], layout.dim_axes[1:], target.dim_axes[1:])):
            raise ImplicitCommError(
                f"For '{plan.op}', an operand would be gathered inside loss_parallel().", f"{layout.describe()} -> {target}",
                "Inside that block logits stay sharded.",
                ("use a cross entropy, and lay the labels out like the logits' rows",
                 f".redistribute(placements={list(target.placements)}), if the whole is meant"))
