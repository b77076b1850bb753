# SPDX-License-Identifier: Apache-2.0
"""Backward hooks see DTensors: what reaches a hook is a global gradient, reduced, and what it returns is used.

MindSpore hands a hook the local tensor that arrives at the hooked node. For a DTensor that is a shard of the gradient in
the layout which the tensor's producer expects, so it is said to be that. A tensor that was redistributed may answer for
its varying form past its own node (`dispatch/operands.py`); one with a hook may not. A parameter whose gradient a bucket
reduces later has its hooks run by the bucket. `Cell.register_backward_hook` works by a node around inputs and outputs; a
backward that wants no gradient of the inputs does not come to the first of them, so then hooks run when it ends.
"""
from __future__ import annotations

import functools
import gc
import weakref
from contextvars import ContextVar
from typing import Any

from mindspore import Tensor, nn

from ...core.layout import Layout, in_dtype
from ...core.tree import leaves
from ...errors import LayoutError, OpRuleError
from ...internals.names import (
    CellBackwardHook,
    Function,
    HookBackward,
    InsertGradientOf,
    NoFallbackGuard,
    TensorHookHandle,
    executor,
)
from ..cotangent import summed_gradient
from ..held import hooked
from ..operands import as_local, local_alias, redistribute, wrap

_GIVEN = "given"  # attribute of a registered function: the user's hook
_calls: ContextVar[tuple] = ContextVar("ms_dtensor_hooked_calls", default=())  # of cells with backward hooks, open now


# -- of tensors and parameters ------------------------------------------------------------------------------------------


def register_hook(self, hook):
    """Registers a hook on the gradient; as MindSpore's, with a DTensor.

    Args:
        hook: `hook(grad) -> gradient or None`; `grad` is the global gradient as a DTensor, in the layout of this tensor
            (Replicate where this is Partial). What it returns, a DTensor in any layout or a plain 0-d tensor, takes its
            place.

    Returns:
        A handle; `handle.remove()` takes the hook back.

    Raises:
        OpRuleError: uses of this tensor before now would bypass the hook.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> def doubled(x):
        ...     y = x * x
        ...     y.register_hook(lambda grad: 2 * grad)
        ...     return y.sum()
        >>> md.grad(doubled)(md.ones(2, device_mesh=mesh)).tolist()
        [4.0, 4.0]
    """
    hooked(self)
    memo = self._memo
    if memo is not None and not self._is_leaf:
        if memo.with_cotangent and (memo.source is not None or memo.view_of is not None):
            raise OpRuleError("For 'register_hook', the tensor has been used already.", self._layout.describe(),
                              "Its gradient from those uses is reduced on another way, past the hook.",
                              "register the hook before the tensor's first use")
        memo.source = memo.view_of = None
    layout, ref = summed_gradient(self._layout), weakref.ref(self)

    def on_local(grad):
        x, hook = ref(), getattr(on_local, _GIVEN)
        if hook is None:
            return grad
        memo = None if x is None else x._memo
        if memo is None or memo.late_gradient is None:
            return _local(hook(wrap(grad, layout)), grad, layout)
        memo.late_gradient.add(id(x))  # whoever completes it runs the hooks
        return grad
    setattr(on_local, _GIVEN, hook)
    handle = Tensor.register_hook(self, on_local)
    handle.__class__, handle.on_local = _Handle, on_local
    return handle


class _Handle(TensorHookHandle):
    """A handle whose hook is gone when it is removed, also after one has raised: MindSpore finds none by its number then."""

    on_local: Any

    def remove(self) -> None:
        setattr(self.on_local, _GIVEN, None)
        super().remove()


def given_hooks(param) -> list:
    """The hooks that users registered on a parameter."""
    hooks = param.hooks()
    return [h for h in (getattr(h, _GIVEN, None) for h in hooks) if h is not None] if hasattr(param, "_layout") else hooks


def run_hooks(param, grad: Tensor) -> Tensor:
    """A gradient that is reduced now, as the users' hooks on it change it."""
    for hook in given_hooks(param):
        grad = _local(hook(wrap(grad, param.layout.gradient())), grad, param.layout.gradient())
    return grad


class _MovedHandle(TensorHookHandle):
    """A handle whose hook was registered anew, on what took the parameter's place: it is removed there, too."""

    moved: TensorHookHandle

    def remove(self) -> None:
        super().remove()
        self.moved.remove()


def move_hooks(old, new) -> None:
    """Registers the hooks of a parameter on the one that takes its place; handles that users hold remove them there.

    MindSpore keeps no list of handles: they are found by what refers to the parameter weakly, and which hook each stands
    for by removing that and registering it again.
    """
    hooks = [getattr(h, _GIVEN, None) if hasattr(old, "_layout") else h for h in old.hooks()]
    if not hooks:
        return
    frozen = not new.requires_grad
    if frozen:  # MindSpore registers none on what never was trained, and keeps those of what is frozen later
        new.requires_grad = True
    moved = [None if hook is None else new.register_hook(hook) for hook in hooks]
    if frozen:
        new.requires_grad = False
    found = gc.get_referrers(*weakref.getweakrefs(old))
    found += gc.get_referrers(*(x for x in found if isinstance(x, dict) and "tensor_weakref" in x))
    for handle in sorted((x for x in found if isinstance(x, TensorHookHandle)), key=lambda x: x.id):
        before = old.hooks()
        TensorHookHandle.remove(handle)
        after = old.hooks()
        if len(after) == len(before):
            continue  # it had been removed
        at = next(i for i, hook in enumerate(before) if i == len(after) or after[i] is not hook)
        handle.id = Tensor.register_hook(old, before[at]).id
        moved.append(moved.pop(at))
        if moved[-1] is not None:
            handle.__class__, handle.moved = _MovedHandle, moved[-1]


def _local(result, grad, layout: Layout):
    """What a hook returned as a local gradient; None leaves the gradient as it is."""
    if result is None:
        return grad
    have = getattr(result, "_layout", None)
    if have is None and isinstance(result, Tensor) and not result._shape:
        with NoFallbackGuard():
            return grad * 0 + result.astype(grad.dtype)
    if have is None or have.shape != layout.shape:
        raise LayoutError("For a backward hook, what it returned is not the gradient.",
                          f"{layout.describe()}, returned {have.describe() if have else type(result).__name__}",
                          "It takes the place of the gradient, which is a DTensor.",
                          ("return a DTensor of the gradient's shape", "DTensor.from_local(t, mesh, placements)"))
    return local_alias(redistribute(result, in_dtype(layout, have.dtype), implicit="a backward hook"))


# -- of cells -------------------------------------------------------------------------------------------------------------


class _Call:
    """One call of a cell with a backward hook: layouts of the inputs, and the outputs' gradients of a backward."""

    def __init__(self, cell):
        self.cell = cell
        self.inputs: list | None = None  # layouts, None for a plain tensor
        self.grad_output: tuple | None = None  # from when the outputs' node has run until hooks have

    def left(self, grads):
        """The backward has come to the outputs; whether it comes to the inputs is known when it ends."""
        self.grad_output = grads
        executor.queue_backward_final_callback(self.end)
        return grads

    def run(self, grads):
        """Hooks are given the inputs' gradients, of which a backward that wants none of them has none."""
        told, self.grad_output = self.grad_output, None
        return _run_hooks(self.cell._backward_hook, self.cell, grads, told)

    def end(self) -> None:
        """As in MindSpore, hooks are called all the same; what they return is nobody's gradient."""
        if self.grad_output is not None:
            self.run((None,) * len(self.inputs or ()))


class _Hooked(Function):
    """Identity; its backward gives the gradients to `receive`, as DTensors where the values were."""

    @staticmethod
    def forward(ctx, receive, layouts, *tensors):
        ctx.told = receive, layouts
        return tuple(t.view(t._shape) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        receive, layouts = ctx.told
        shown = tuple(g if layout is None else wrap(g, layout.gradient()) for g, layout in zip(grads, layouts))
        changed = receive(shown)
        if len(changed) != len(grads):
            raise TypeError(f"The backward hook returned {len(changed)} gradients for {len(grads)}.")
        return None, None, *(c if layout is None else _local(c, g, layout.gradient())
                             for c, g, layout in zip(changed, grads, layouts))


def _apply(values, receive):
    """The values behind a node that gives their gradients to `receive`; and the layouts of the tensors among them."""
    several = isinstance(values, tuple)
    items = list(values) if several else [values]
    at = [i for i, v in enumerate(items) if isinstance(v, Tensor)]
    layouts = [getattr(items[i], "_layout", None) for i in at]
    local = [items[i] if layout is None else as_local(items[i]) for i, layout in zip(at, layouts)]
    with NoFallbackGuard():
        done = _Hooked.apply(receive, layouts, *local)
    for i, layout, x in zip(at, layouts, done if isinstance(done, tuple) else (done,)):
        items[i] = x if layout is None else wrap(x, layout)
    return (tuple(items) if several else items[0]), layouts


def _run_hooks(hooks, cell, grads, *more):
    for hook in list(hooks.values()):
        out = hook(cell, grads, *more)
        if out is not None:
            grads = out if isinstance(out, tuple) else (out,)
    return grads


def _cell_hook(original):
    @functools.wraps(original)
    def call(self, args):
        has = any(getattr(v, "_layout", None) is not None for v in (args if isinstance(args, tuple) else (args,)))
        cell, hooks = self.cell, self.hook_dict()
        if cell._cell_backward_pre_hook is self:
            return _apply(args, lambda grads: _run_hooks(hooks, cell, grads))[0] if has else original(self, args)
        at: Any = next((c for c in reversed(_calls.get()) if c.cell is cell), None)
        if at is None or (at.inputs is None and not has):
            return original(self, args)
        if at.inputs is None:
            out, at.inputs = _apply(args, at.run)
            return out
        return _apply(args, at.left)[0]
    return call


def _run_construct(original):
    @functools.wraps(original)
    def run(self, *args, **kwargs):
        if not self._lazy_backward_hook:
            return original(self, *args, **kwargs)
        token = _calls.set((*_calls.get(), _Call(self)))
        try:
            return original(self, *args, **kwargs)
        finally:
            _calls.reset(token)
    return run


# -- of primitives ----------------------------------------------------------------------------------------------------------


def _keep_hook(original):
    @functools.wraps(original)
    def init(self, hook_fn, *args, **kwargs):
        original(self, hook_fn, *args, **kwargs)
        self.__dict__[_GIVEN] = hook_fn
    return init


def _hook_primitive(original):
    @functools.wraps(original)
    def call(self, *args):
        layouts = [x._layout for x in args if getattr(x, "_layout", None) is not None]
        if not layouts:
            out = original(self, *args)
            for x in leaves(out, Tensor):
                hooked(x)
            return out
        hook, one = self.__dict__.get(_GIVEN), isinstance(self, InsertGradientOf)
        if hook is None and not one:
            raise OpRuleError("For 'HookBackward', it was made before the first DTensor.", layouts[0].describe(),
                              "MindSpore does not tell its function.",
                              ("make it after the mesh's first tensor", "x.register_hook(function)"))

        def receive(grads):
            out = self.f(*grads) if one else hook(grads)
            return grads if out is None else out if isinstance(out, tuple) else (out,)
        return _apply(args if len(args) > 1 else args[0], receive)[0]
    return call


DOORS = ((CellBackwardHook, "__call__", _cell_hook), (nn.Cell, "_run_construct", _run_construct),
         (HookBackward, "__init__", _keep_hook), (HookBackward, "__call__", _hook_primitive),
         (InsertGradientOf, "__call__", _hook_primitive))
