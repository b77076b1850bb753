# SPDX-License-Identifier: Apache-2.0
"""`with recorded(params): ... backward(loss)`: gradients taken in the middle of a program, kept in `.grad`, as in PyTorch.

`ms.value_and_grad` wants the forward as one function. Here the forward is whatever runs inside a block, and there may be
several backwards. MindSpore 2.10 has the engine below (`run_backward`) and no name for it. What is recorded, and whose
gradients are wanted, is one state with a beginning and an end, the block: a flag that stays on would record optimizers,
metrics and evaluation as well, and what a backward does not reach could not be told from what nobody asked for.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from mindspore import Parameter, Tensor, nn

from ..errors import MixedOperandError, OpRuleError
from ..internals.names import NoFallbackGuard, enabled, executor, run_backward
from ..internals.probes import check_recordings
from ..ops.local.dtypes import full
from . import patches
from .operands import local_alias, recording, retag
from .patches.gradients import apart, as_cotangents, end_abandoned, in_this_gradient, kept_apart, layouts_of
from .planner import describe_operands
from .reached import reached
from .recording import handed_out
from .replaced import current


class _Block(NamedTuple):
    """A block, and whose gradients are wanted: of these, or of all leaves that a loss is computed from."""

    of: list | None


_block: ContextVar[_Block | None] = ContextVar("ms_dtensor_recorded", default=None)
_RUN = "_ms_dtensor_backward_has_run"  # attribute of a loss whose graph is gone
_HOW = "with md.recorded(net): loss = ...; md.backward(loss)"


@contextmanager
def recorded(of: nn.Cell | Iterable[Tensor] | None = None) -> Iterator[None]:
    """Records what runs inside, for `backward`. What no backward has used when the block ends is dropped.

    The forward and its backwards go inside; optimizers, metrics and evaluation outside, or under `no_grad`. After an
    exception nothing is recorded any more. `value_and_grad` and pipelines are refused inside.

    Args:
        of: whose gradients `backward` gives unless it is told: a cell for its trainable parameters, or parameters, or
            tensors after `requires_grad_()`. None: of all parameters that a loss is computed from, which each backward
            looks for; what it does not find keeps the `.grad` it has.

    Raises:
        OpRuleError: inside a gradient, a recording or another such block, or under `no_grad`.
        ConfigError: this MindSpore has no such engine.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> p = ms.Parameter(md.distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh, [md.Shard(0)]), name="p")
        >>> with md.recorded([p]):
        ...     for _ in range(2):
        ...         md.backward((p * p).sum())
        >>> p.grad, p.grad.sum().item()
        (DTensor(f32[1@tp, 2], mesh=(tp=1), rank 0 holds [1, 2]), 12.0)
    """
    check_recordings()
    patches.install()  # not first by a DTensor that is made inside: it ends what is recorded by nobody it knows
    end_abandoned()
    if recording() or not enabled():
        raise OpRuleError("For 'recorded', nothing can be recorded here.", "",
                          "A block records by itself: not within a gradient, a recording or another block, and not under "
                          "no_grad.", "begin it outside of value_and_grad, Recording.of, recorded and no_grad")
    wanted = None if of is None else _leaves("recorded", of.trainable_params() if isinstance(of, nn.Cell) else of)
    with apart():
        token = _block.set(_Block(wanted))
        executor.set_grad_flag(True)
        try:
            yield
        finally:
            executor.set_grad_flag(False)
            _block.reset(token)


@contextmanager
def not_recorded() -> Iterator[None]:
    """Inside of a block nothing is recorded: what is written there is written as outside of it."""
    was = recording()
    executor.set_grad_flag(False)
    try:
        yield
    finally:
        executor.set_grad_flag(was)


def backward(loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False,
             inputs: Sequence[Tensor] | None = None) -> None:
    """Adds the gradients of `loss` to `.grad` of parameters, inside of `recorded`; as PyTorch's `Tensor.backward`.

    The gradients are those of `ms.value_and_grad`, bit for bit: of a DTensor a DTensor in its gradient layout, with the
    same communication and the same hooks; zeros where none arrives (in PyTorch `.grad` stays None there). `.grad` is
    added to until it is set to None, in the dtype of the first.

    Args:
        loss: what is differentiated.
        gradient: its cotangent, of its shape; of a DTensor a DTensor in any layout. None: 1, for a loss of one element.
        retain_graph: the forward may have another backward.
        inputs: whose gradients are wanted, in place of those that `recorded` was given.

    Raises:
        OpRuleError: outside of `recorded`, a loss that nothing recorded leads to, its second backward without
            `retain_graph=True` at the first, several elements without `gradient`, a `gradient` that is
            no tensor, inputs that are no leaves, or `retain_graph` where `fully_shard` or `replicate` would reduce one
            gradient twice.
        MixedOperandError: a plain `gradient` for a DTensor.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> p = ms.Parameter(ms.Tensor([1.0, 2.0]), name="p")
        >>> with md.recorded([p]):
        ...     y = p * p
        ...     md.backward(y.sum(), retain_graph=True)
        ...     md.backward(y, gradient=ms.Tensor(0.5))
        >>> p.grad.asnumpy().tolist()
        [3.0, 6.0]
    """
    block = _block.get()
    if block is None or not recording():
        raise _refused(loss, "Only what runs inside of 'recorded' has a backward, and it goes when the block ends.", _HOW)
    if not isinstance(loss, Tensor) or not loss._requires_grad or not loss.is_floating_point():
        raise _refused(loss, "No parameter or input of those whose gradients are recorded leads to it.",
                       ("compute it inside of recorded(...)", "x.requires_grad_() for an input"))
    if loss.__dict__.get(_RUN):
        raise _refused(loss, "What was recorded of it went with its first backward.",
                       ("md.backward(loss, retain_graph=True) at the first", "compute it again"))
    if gradient is not None and not isinstance(gradient, Tensor):
        raise _refused(loss, f"'gradient' is a tensor, but got {gradient!r}.",
                       ("md.backward(loss, gradient=Tensor(0.5))", "md.backward(loss * 0.5)"))
    if gradient is None and loss.size != 1:
        raise _refused(loss, "A backward begins at one number, or at a gradient for each element.",
                       ("md.backward(loss.sum())", "md.backward(loss, gradient=...)"))
    if retain_graph and len(in_this_gradient):
        raise _refused(loss, "Cells under 'fully_shard' or 'replicate' let go of what they gathered, and reduce a gradient "
                       "once for each forward.", "compute the loss again for its second backward")
    wanted = block.of if inputs is None else _leaves("backward", [inputs] if isinstance(inputs, Tensor) else inputs)
    executor.set_grad_flag(False)
    try:
        wanted = reached(loss) if wanted is None else wanted
        if not wanted:
            raise _refused(loss, "No parameter leads to it.", ("md.recorded([x]), or inputs=[x], for other leaves",
                                                               "compute it inside of recorded(...)"))
        add_gradients(wanted, _gradients(loss, _start(loss, gradient), retain_graph, wanted))
        loss.__dict__[_RUN] = not retain_graph
    finally:
        executor.set_grad_flag(True)


def add_gradients(of: list, grads: list) -> None:
    """Adds to each `.grad`, in the dtype of its first; not where sums are kept in `main_grad`."""
    for p, g in zip(of, grads, strict=True):
        if kept_apart(p):
            continue
        have = getattr(p, "grad", None)
        p.grad = g if have is None else have + g.astype(have.dtype)


def _kept(self):
    """The gradient that backwards add to; None before the first, and to begin anew."""
    return self.__dict__.get("grad")


def _keep(self, value) -> None:
    fits = value is None or isinstance(value, Tensor) and tuple(value.shape) == tuple(self.shape) and (
        value.is_floating_point() or value.is_complex()) and hasattr(value, "_layout") == hasattr(self, "_layout")
    if not fits:
        raise MixedOperandError("For '.grad', this is no gradient of the tensor.", describe_operands([self]) + "\n" + (
            describe_operands([value]) if isinstance(value, Tensor) else repr(value)),
                                "A DTensor's gradient is a DTensor, a plain tensor's plain; of floats, in its shape.",
                                ("x.grad = None, to begin anew", "distribute_tensor(g, x.device_mesh, x.placements)"))
    self.__dict__["grad"] = value


def _drop(self) -> None:
    self.__dict__.pop("grad", None)


kept = property(_kept, _keep, _drop)  # of DTensors; of all tensors under `compat.backward`


def _start(loss, gradient) -> Tensor:
    """The cotangent of `loss` as a local tensor."""
    layouts, shape = layouts_of([loss]), local_alias(loss)._shape
    if gradient is None:
        gradient = full(shape, 1, loss.dtype)
        gradient = gradient if layouts[0] is None else retag(gradient, layouts[0].gradient())
    elif gradient._shape and tuple(gradient.shape) != tuple(loss.shape):
        raise _refused(loss, f"'gradient' has the shape of the loss, or is one number, but its shape is {gradient.shape}.",
                       "md.backward(loss, gradient=...) of the loss's shape")
    elif gradient.is_complex() and not loss.is_complex():
        raise _refused(loss, f"Its gradient is real, but 'gradient' is of {gradient.dtype}.", "gradient.real()")
    elif not gradient._shape:
        gradient = full(shape, gradient, loss.dtype).contiguous()
        gradient = gradient if layouts[0] is None else retag(gradient, layouts[0].gradient())
    return as_cotangents(layouts, gradient if gradient.dtype == loss.dtype else gradient.astype(loss.dtype))


def _gradients(loss, start, keep: bool, wanted: list) -> list:
    try:
        with apart(list(in_this_gradient), wanted):
            found = run_backward((loss,), (start,), keep, False, tuple(wanted), True, accumulate_grad=False)
            with NoFallbackGuard():
                return handed_out(wanted, list(found))
    except RuntimeError as e:
        if "graph twice" not in str(e):
            raise
        raise _refused(loss, "A part of what leads to it went with another loss's backward.",
                       ("md.backward(other_loss, retain_graph=True)", "md.backward(loss + other_loss)")) from e


def _leaves(who: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each once: what is named twice would be added twice."""
    found: dict[int, Tensor] = {}
    for p in tensors:
        p = current(p) if isinstance(p, Tensor) else p
        if not isinstance(p, Tensor) or not p._requires_grad or not (isinstance(p, Parameter) or p._is_leaf):
            raise OpRuleError(f"For '{who}', one of those whose gradients are wanted has none.",
                              describe_operands([p]) if isinstance(p, Tensor) else str(type(p)),
                              "Gradients are kept of parameters with requires_grad, and of tensors after requires_grad_().",
                              ("pass net.trainable_params()", "x.requires_grad_() before the block"))
        found[id(p)] = p
    return list(found.values())


def _refused(loss, rule: str, how) -> OpRuleError:
    return OpRuleError("For 'backward', there is no gradient to be had.",
                       describe_operands([loss]) if isinstance(loss, Tensor) else str(type(loss)), rule, how)
