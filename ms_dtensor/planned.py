# SPDX-License-Identifier: Apache-2.0
"""A plan at work: operands are moved and shown, the local op runs, results are wrapped.

A plan is what `planning.py` decided for one key of a call; running it consults no rule.
"""
from __future__ import annotations

import warnings

from mindspore import Parameter, Tensor
from mindspore._c_expression import NoFallbackGuard, TensorOverloadCall

from . import inplace
from .comm.record import user_site
from .errors import ImplicitCommError, OpRuleError
from .faces import DEFERRED, VIEWED, as_local, as_replicated, dtype_name, face, finish, moved_implicitly, recording, wrap
from .layout import Layout
from .local_ops import run_local, widening
from .redistribute.plan import plan as plan_moves

_warned: set[tuple[str, str]] = set()  # call sites that have been warned about


class Plan:
    """What to do for one key."""

    __slots__ = ("op", "steps", "invoke", "empty", "outs", "implicit", "substitute", "widened",
                 "view", "target", "native")

    def __init__(self, op, steps, invoke, empty, outs):
        self.op, self.steps, self.invoke, self.empty, self.outs = op, steps, invoke, empty, outs
        self.substitute, self.widened = None, None
        self.view, self.target = "", None  # what a view is here (`view_kind`); layout of the operand that is written
        self.native = True  # False: MindSpore may run Python that asks its operands for their shape
        self.implicit = any(target is not None for _, target, _ in steps)

    def run(self, func, head, args, kwargs, tensors, mode):
        grad = recording()
        first = tensors[0]
        if self.target is not None:
            inplace.check_writable(first, self.op, grad)
            if grad:
                tensors[0] = inplace.fresh(first)
        if self.implicit:
            check_policy(self, tensors, mode)
        if self.substitute is not None:
            func, head = self.substitute, None
        if self.widened is not None:
            func, head = widening(func, head, *self.widened), None
        native = self.native or func.__class__ is not TensorOverloadCall
        changed = False
        for i, (promoted, target, cotangent) in enumerate(self.steps):
            x = tensors[i]
            if promoted is not None:
                x = as_replicated(x, promoted, grad)
            if target is not None:
                x = moved_implicitly(x, target, grad)
            if grad:
                if cotangent is not None:
                    x = face(x, cotangent)
                elif DEFERRED in getattr(x, "__dict__", ()):
                    x = face(x, x._layout.gradient())
            if x is not tensors[i]:
                tensors[i] = x
                changed = True
        def again(xs):
            return run_local(lambda ys: original_call(func, head, args, kwargs, ys, native),
                             self.invoke, self.empty, xs)
        with NoFallbackGuard():
            if self.invoke is not None or self.empty is not None:
                result = again(tensors)
            elif changed or not native:
                result = original_call(func, head, args, kwargs, tensors, native)
            elif head is not None:
                result = func(*head, args)
            elif kwargs:
                result = func(*args, **kwargs)
            else:
                result = func(*args)
            if grad and (result.__class__ is not Tensor or result._is_leaf) and any(map(_is_parameter, tensors)):
                result = _of_its_own(result)
        out = self.wrap(result, grad)
        if self.view:
            if grad and isinstance(out, Tensor) and not first._is_leaf and tensors[0] is first:
                out.__dict__[VIEWED] = first, again
            inplace.link(first, out, self.view == "view" and self.steps[0][1] is None,
                         self.invoke is None and self.substitute is None)
        elif self.target is not None:
            inplace.store(first, out, grad)
            return first
        return out

    def wrap(self, result, grad):
        outs = self.outs
        if isinstance(result, Tensor):
            out = outs[0]
            if out.__class__ is not Layout:
                out = self._settle(0, result)
            return finish(wrap(result, out), grad)
        if isinstance(result, tuple | list):
            if len(result) != len(outs):
                raise OpRuleError(f"For '{self.op}', the rule promises {len(outs)} results, MindSpore gave {len(result)}.",
                                  "", "A rule must name every result.", "report this op")
            return type(result)(
                finish(wrap(r, o if o.__class__ is Layout else self._settle(i, r)), grad)
                for i, (r, o) in enumerate(zip(result, outs)))
        raise OpRuleError(f"For '{self.op}', MindSpore returned {type(result).__name__}, not a tensor.")

    def _settle(self, i, result) -> Layout:
        """The first result of a plan tells the dtype; its shape must be what the rule promised."""
        mesh, (placements, order, shape) = self.outs[i]
        if shape is None:  # such a rule splits evenly, so every rank's shard is like this one
            draft = Layout(mesh, placements, tuple(result._shape), dtype_name(result.dtype), order)
            placements, shape = draft.placements, [n * draft.divisor(d) for d, n in enumerate(draft.shape)]
        layout = Layout(mesh, placements, shape, dtype_name(result.dtype), order)
        if layout.mesh.get_coordinate() is not None and layout.local_shape() != tuple(result._shape):
            raise OpRuleError(f"For '{self.op}', the local result has shape {tuple(result._shape)}, but the rule says "
                              f"{layout.local_shape()} of {layout}.", "", "Rule and op disagree; nothing was returned.",
                              "report this call: it is a bug in the rule")
        self.outs[i] = layout
        return layout


def _of_its_own(result):
    """An operand that was handed back (a cast to its own dtype, x[:]) as a node: an alias of a leaf has no gradient."""
    if isinstance(result, Tensor):
        return result.view(result._shape)
    if not isinstance(result, tuple | list):
        return result
    return type(result)(r.view(r._shape) if r._is_leaf else r for r in result)


def _is_parameter(x) -> bool:
    return isinstance(x, Parameter) and x.requires_grad


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


def check_policy(plan: Plan, tensors, mode):
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


def _check_no_gather(plan: Plan, tensors):
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
