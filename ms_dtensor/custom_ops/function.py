# SPDX-License-Identifier: Apache-2.0
"""DFunction: an op of one's own with a gradient of one's own, written for local tensors, usable on DTensors.

It wraps MindSpore's mechanism for that, the `bprop` of an `nn.Cell`: one shared cell, which receives the call as a
non-tensor argument. That mechanism is first order (what a `bprop` saved is a constant to a second derivative), so a
second derivative is refused in the backward; a class with `second_order = True`, and any in a stage of a pipeline, runs
on MindSpore's `Function` instead. How operands must lie is said by a rule or by placements; their gradients' layouts
follow from that.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ..comm.pretended import executing
from ..core.tree import argument_names, first_dtensor, leaves, map_leaves
from ..debug.types.account import account
from ..debug.types.doors import as_op, as_written
from ..debug.types.typed import Typed, as_call
from ..dispatch import modes
from ..dispatch.dispatcher import call_by_rule
from ..dispatch.op_call import bind_arguments
from ..dispatch.operands import frozen_alias, local_alias, recording
from ..dispatch.patches.gradients import recorded_apart
from ..errors import OpRuleError
from ..internals.names import Function, NoFallbackGuard
from ..ops.rules import RULES
from . import checks
from .local_map import Mapping
from .register import registered

BY_LAYOUT: dict[str | None, Any] = {}  # ops that tell whole layouts instead of cases (compat/hyper_parallel.py)


class Context:
    """What a forward leaves for its backward: `save_for_backward` for tensors, attributes for anything else."""

    def __init__(self, arguments: Sequence = ()):
        self.saved_tensors: tuple = ()
        self._arguments, self._recorded = arguments, recording()

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Whether a gradient may be wanted, for each argument of forward (positional, then keyword)."""
        return tuple(self._recorded and any(t._requires_grad for t in leaves((a,), Tensor)) for a in self._arguments)

    def save_for_backward(self, *tensors) -> None:
        """Keeps tensors for the backward, where they are `saved_tensors`. None is kept as None."""
        self.saved_tensors = tensors


class DFunction:
    """Subclass it with static `forward(ctx, *args, **kwargs)` and `backward(ctx, *grads)`, both on local tensors.

    On plain tensors `apply` is an ordinary custom op. DTensors need to know how the op may be split: either `_op_name`
    names a rule (`register_rule`), which chooses a case per axis, or `in_placements` and `out_placements` say so
    directly, as for `local_map`; inputs that lie otherwise are moved. `out_shapes` as there.

    `backward` returns one gradient per argument of `forward`, in the order of the call (positional, then keyword;
    gradients of trailing non-tensor arguments may be left out), or one alone; None stands for no gradient. For a list of
    tensors it returns a tuple of as many.

    Set `second_order = True` for a function that is differentiated twice: what `backward` does must then be made of
    differentiable ops, and only inputs and results of `forward` may be saved.

    `types` says of a forward that communicates, or does what no rule knows, what it makes of local tensors when types are
    checked (`local_map(check=True)`): `("V", "R", "->", "P")`, or several such signatures, for any one axis. Without it the
    types follow from the ops of `forward`. The backward is taken on its author's word; `checks(gradients=True)` tries it.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> class Cube(md.DFunction):
        ...     in_placements = ([md.Shard(0)],)
        ...     out_placements = [md.Shard(0)]
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         x, = ctx.saved_tensors
        ...         return 3 * x * x * grad
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> x = md.distribute_tensor(ms.Tensor([1.0, 2.0]), mesh, [md.Shard(0)])
        >>> md.grad(lambda t: Cube.apply(t).sum())(x).to_local()
        Tensor(shape=[2], dtype=Float32, value= [ 3.00000000e+00,  1.20000000e+01])
    """

    _op_name: str | None = None
    in_placements = None
    out_placements = None
    in_grad_placements = None
    out_shapes = None
    second_order = False
    types = None

    @staticmethod
    def forward(ctx, *args, **kwargs):
        """The op on local tensors; returns a tensor or a tuple of tensors."""
        raise NotImplementedError("a DFunction defines forward(ctx, *args, **kwargs)")

    @staticmethod
    def backward(ctx, *grads):
        """Gradients of forward's arguments from those of its results."""
        raise NotImplementedError("a DFunction defines backward(ctx, *grads)")

    @classmethod
    def apply(cls, *args, **kwargs):
        """Runs the op; differentiable.

        Raises:
            ValueError: a DTensor came, and neither a registered `_op_name` nor placements say how the op may be split.
        """
        mode = modes.mode.get()
        if mode.check_gradients:
            checks.gradients_once(cls, args, kwargs)
        if first_dtensor(args, kwargs) is None:
            return _apply_local(cls, *args, **kwargs)
        local = functools.partial(_apply_local, cls)
        if cls._op_name is not None and cls._op_name in RULES:
            if mode.check_rules:
                checks.rule_once(registered(cls._op_name), cls, args, kwargs)
            return call_by_rule(cls._op_name, local, argument_names(cls.forward, 1), args, kwargs)
        if cls._op_name in BY_LAYOUT:
            return BY_LAYOUT[cls._op_name].run(f"{cls.__name__}.apply", local, args, kwargs)
        if cls.out_placements is None:
            if (dry := executing()) is not None and dry.is_alone(args, kwargs):
                return dry.unseen(cls.__name__, local, args, kwargs)
            missing = f"_op_name = {cls._op_name!r} has no registered rule" if cls._op_name else "it has no '_op_name'"
            raise OpRuleErrorForValue(
                f"For '{cls.__name__}.apply', DTensors came, but {missing} and no 'in_placements' and 'out_placements'.",
                ", ".join(t._layout.describe() for t in leaves((args, kwargs), Tensor)
                          if getattr(t, "_layout", None) is not None),
                "Local code says nothing about how the global op may be split.",
                (f"register_rule({cls._op_name or cls.__name__!r}, cases)", "set in_placements and out_placements",
                 "pass x.to_local(), and wrap the results with DTensor.from_local"))
        mapping = Mapping(f"{cls.__name__}.apply", cls.out_placements, cls.in_placements, cls.in_grad_placements, None,
                          True, _plain_attribute(cls, "out_shapes"), additive=True,
                          checked=_checked(cls) if mode.check_types else None)
        return mapping.run(local, args, kwargs)

    @classmethod
    def check_gradients(cls, *args, eps: float = 1e-2, tolerance: float = 2e-2, seed: int = 0, **kwargs) -> None:
        """Compares `backward` with finite differences of `forward`, on plain tensors; for tests and debugging.

        Args:
            *args: sample arguments; floating-point tensors are varied, in random directions.
            eps: step.
            tolerance: largest accepted error, relative to the larger of the slope and 1.
            seed: of directions and cotangents.

        Raises:
            OpRuleError: they differ; the message names the argument and both slopes.
        """
        check_gradients(cls, args, kwargs, eps, tolerance, seed)


class OpRuleErrorForValue(OpRuleError, ValueError):
    """A refusal that is a ValueError too, as PyTorch's users expect."""


def _plain_attribute(cls, name):
    value = cls.__dict__.get(name, getattr(cls, name))
    return value.__func__ if isinstance(value, staticmethod) else value


@functools.cache
def _checked(cls) -> set:
    """The layouts for which a class's types were checked."""
    return set()


def _apply_typed(cls, args, kwargs):
    """During a check of types: by those that the class names, by its rule, or by what its forward does."""
    run, name = functools.partial(_apply_local, cls), f"'{cls.__name__}'"
    if cls.types is not None:
        return as_op(cls, name, run, args, kwargs)
    if cls._op_name in RULES:
        bound = bind_arguments(cls._op_name, argument_names(cls.forward, 1), args, kwargs)
        call = as_call(cls._op_name, bound, leaves((args, kwargs), Tensor))
        return as_op(cls, name, run, args, kwargs, call)
    return as_written(name, run, args, kwargs, functools.partial(cls.forward, Context((*args, *kwargs.values()))))


def _apply_local(cls, *args, **kwargs):
    """One rank's part, or the whole on one device."""
    if account.get() is not None and any(isinstance(x, Typed) for x in leaves((args, kwargs), Tensor)):
        return _apply_typed(cls, args, kwargs)
    tensors = leaves(args, Tensor)
    if kwargs:
        tensors += leaves(kwargs, Tensor)
    invocation = _Invocation(cls, args, kwargs, len(tensors))
    with NoFallbackGuard():
        if not recording():
            return invocation.forward(tensors)
        if cls.second_order or recorded_apart():  # a recording takes no cell's bprop, and nothing differentiates it again
            return _Second.apply(invocation, *tensors)
        return _node()(invocation, *tensors)


class _Invocation:
    """One call: its arguments with tensors taken out, and its context."""

    __slots__ = ("cls", "args", "kwargs", "count", "ctx", "inputs", "outputs")
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def __init__(self, cls, args, kwargs, count):
        self.cls, self.args, self.kwargs, self.count = cls, args, kwargs, count
        self.ctx, self.inputs, self.outputs = Context((*args, *kwargs.values())), (), ()

    def forward(self, tensors):
        # aliases: a DTensor would show its global shape, a Parameter its name
        plain = [_alias(t) for t in tensors]
        it = iter(plain)
        args = [next(it) if isinstance(a, Tensor) else _refill(a, it) for a in self.args]
        kwargs = {k: _refill(v, it) for k, v in self.kwargs.items()} if self.kwargs else {}
        result = self.cls.forward(self.ctx, *args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        for i, r in enumerate(results):
            if not isinstance(r, Tensor):
                raise OpRuleError(f"For '{self.cls.__name__}.forward', result {i} is a {type(r).__name__}.", "",
                                  "A DFunction returns a tensor or a tuple of tensors.", "keep it on ctx")
        met = {id(x) for x in plain}
        apart = []
        for r in results:  # what comes back a second time, or as it came, is another node: each has its own cotangent
            apart.append(ms.ops.stop_gradient(r) if id(r) in met else r)
            met.add(id(r))
        self.inputs, self.outputs = plain, (*apart,)
        return self.outputs if isinstance(result, tuple) else apart[0]

    def backward(self, grads):
        """Gradient of each tensor, None where there is none."""
        out = self.cls.backward(self.ctx, *grads)
        out = list(out) if isinstance(out, tuple | list) else [out]
        arguments = [*self.args, *self.kwargs.values()]
        short = len(out) < len(arguments) and not leaves(arguments[len(out):], Tensor)
        extra = len(out) > len(arguments) and all(g is None for g in out[len(arguments):])
        if len(out) != len(arguments) and not short and not extra:
            raise OpRuleError(f"For '{self.cls.__name__}.backward', {len(out)} gradients came for {len(arguments)} "
                              "arguments.", "",
                              "There is one gradient per argument, positional ones first.", "return None for the others")
        flat: list = []
        for i, a in enumerate(arguments):
            self._collect(i, a, out[i] if i < len(out) else None, flat)
        return flat

    def _collect(self, i, argument, grad, flat) -> None:
        if isinstance(argument, Tensor):
            if grad is not None and not isinstance(grad, Tensor):
                raise OpRuleError(f"For '{self.cls.__name__}.backward', the gradient of argument {i} is a "
                                  f"{type(grad).__name__}.", "", "It is a tensor of the argument's shape, or None.",
                                  "return ops.full_like(x, value)")
            if grad is not None and tuple(grad.shape) != tuple(self.inputs[len(flat)].shape):
                raise OpRuleError(f"For '{self.cls.__name__}.backward', the gradient of argument {i} has shape "
                                  f"{list(grad.shape)}.", "", f"The argument has {list(self.inputs[len(flat)].shape)} here.",
                                  "reduce it over broadcast dims")
            flat.append(grad)
        elif isinstance(argument, tuple | list | dict):
            members = grad if grad is not None else (None,) * len(argument)
            if isinstance(argument, dict):
                members = [members.get(k) for k in argument] if isinstance(members, dict) else members
                argument = tuple(argument.values())
            if not isinstance(members, tuple | list) or len(members) != len(argument):
                raise OpRuleError(f"For '{self.cls.__name__}.backward', argument {i} is a sequence of {len(argument)}.", "",
                                  "Its gradient is a tuple of as many, or None.", "return a tuple")
            for a, g in zip(argument, members):
                self._collect(i, a, g, flat)


class _Bprop(nn.Cell):
    """The one cell whose `bprop` carries all first-order DFunctions."""

    _ms_dtensor_unnamed = True  # nobody knows it: communication inside is its caller's (`debug/cell_names.py`)
    _ms_dtensor_bprop_of_local = True  # placements of its tensors are its caller's (`dispatch/patches/bprops.py`)

    def construct(self, invocation, *tensors):
        return invocation.forward(tensors)

    def bprop(self, invocation, *rest):
        dout = rest[-1]
        if recording() and not checks.running:
            name = invocation.cls.__name__
            raise OpRuleError(f"For '{name}', a derivative of its gradient was asked for.", "",
                              "A DFunction is an nn.Cell bprop, which MindSpore differentiates once: saved tensors are "
                              "constants to a second derivative, and it would be wrong.",
                              (f"set {name}.second_order = True, if its backward is made of differentiable ops",
                               "take the inner gradient outside the outer function"))
        grads = dout if isinstance(dout, tuple | list) else (dout,)
        out = invocation.backward(grads)
        return (None, *(_zeros(x) if g is None else g for x, g in zip(invocation.inputs, out)))


@functools.cache
def _node() -> _Bprop:
    return _Bprop()


class _Second(Function):
    """The same on MindSpore's `Function`, which may be differentiated again."""

    @staticmethod
    def forward(fctx, invocation, *tensors):
        result = invocation.forward(tensors)
        known = {id(x): t for x, t in zip(invocation.inputs, tensors)}
        known.update((id(r), r) for r in invocation.outputs)
        saved = invocation.ctx.saved_tensors
        fctx.places = [i for i, t in enumerate(saved) if isinstance(t, Tensor)]
        fctx.foreign = [i for i in fctx.places if id(saved[i]) not in known]
        fctx.save_for_backward(*(known.get(id(saved[i]), saved[i]) for i in fctx.places))
        fctx.invocation = invocation
        return result

    @staticmethod
    def backward(fctx, *grads):
        invocation = fctx.invocation
        if fctx.foreign and recording():
            raise OpRuleError(f"For '{invocation.cls.__name__}', saved tensor {fctx.foreign[0]} is no input or result.", "",
                              "To a second derivative an intermediate value is a constant.",
                              "save the inputs, and compute it again in backward")
        saved = list(invocation.ctx.saved_tensors)
        for i, t in zip(fctx.places, fctx.saved_tensors):
            saved[i] = t if t.__class__ is Tensor else _alias(t)
        invocation.ctx.saved_tensors = tuple(saved)
        with NoFallbackGuard():
            return (None, *invocation.backward(grads))


def _alias(x):
    """A plain tensor on the same storage: a gradient inside of a backward takes none of a parameter for a constant."""
    return local_alias(x) if x.param_info is None else frozen_alias(x)


def _zeros(x):
    return ms.ops.zeros(tuple(x.shape), x.dtype)


def _refill(value, tensors):
    return map_leaves(lambda _: next(tensors), value, Tensor)


def check_gradients(cls, args, kwargs, eps, tolerance, seed) -> None:
    """See `DFunction.check_gradients`."""
    rng = np.random.default_rng(seed)
    tensors = [Tensor(t.asnumpy()) for t in leaves((args, kwargs), Tensor)]
    wrt = [i for i, t in enumerate(tensors) if t.asnumpy().dtype.kind == "f"]

    def results(xs):
        it = iter(xs)
        out = cls.apply(*(_refill(a, it) for a in args), **{k: _refill(v, it) for k, v in kwargs.items()})
        return out if isinstance(out, tuple) else (out,)

    weights = [rng.normal(size=r.shape).astype(r.asnumpy().dtype) if r.asnumpy().dtype.kind == "f" else None
               for r in results(tensors)]

    def weighted(*active):
        xs = list(tensors)
        for i, x in zip(wrt, active):
            xs[i] = x
        return sum((r * Tensor(w)).sum() for r, w in zip(results(xs), weights) if w is not None)

    if not wrt:
        return
    grads = ms.grad(weighted, tuple(range(len(wrt))))(*(tensors[i] for i in wrt))
    grads = grads if isinstance(grads, tuple) else (grads,)  # MindSpore unpacks a tuple of one
    for k, i in enumerate(wrt):
        x, g = tensors[i].asnumpy(), grads[k].asnumpy()
        for _ in range(4):
            direction = rng.normal(size=x.shape)
            direction = (direction / max(np.linalg.norm(direction), 1e-12)).astype(x.dtype)
            sides = []
            for sign in (1, -1):
                xs = list(tensors)
                xs[i] = Tensor((x + sign * eps * direction).astype(x.dtype))
                sides.append(sum(float((r.asnumpy().astype(np.float64) * w).sum())
                                 for r, w in zip(results(xs), weights) if w is not None))
            measured, told = (sides[0] - sides[1]) / (2 * eps), float((g.astype(np.float64) * direction).sum())
            if not abs(measured - told) <= tolerance * max(abs(measured), 1.0):
                raise OpRuleError(f"For '{cls.__name__}.backward', the gradient of tensor {i} is wrong.",
                                  f"{x.dtype}{list(x.shape)}",
                                  f"Along a random direction the slope is {measured:.5g}, backward says {told:.5g}.",
                                  "correct backward")
