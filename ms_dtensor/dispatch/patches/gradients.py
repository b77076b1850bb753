# SPDX-License-Identifier: Apache-2.0
"""The one door of MindSpore's gradients: what belongs to a DTensor comes back as a DTensor.

`ms.grad`, `ms.value_and_grad`, `ops.GradOperation`, `ms.vjp` and the training cells all call `_pynative_executor.grad`,
which gives local tensors in the layout that each producer expects; here they are said to be that. Also closed here: a
forward that raised leaves MindSpore 2.10 recording, and its next gradient would be one of a gradient.
"""
from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from mindspore import Parameter, Tensor, nn

from ...core.tree import leaves, map_leaves
from ...errors import LayoutError, MixedOperandError, OpRuleError
from ...internals.names import composite, executor, grad_func
from ...redistribute.execute import recorded_gradient
from .. import classes, modes
from ..cotangent import summed_gradient
from ..operands import SHARDED_BY, local_alias, recording, redistribute, retag
from ..replaced import current
from . import recomputed
from .recomputed import sought

_LIMIT = 256
_outputs: dict[int, list] = {}  # by id of a function: layouts of its outputs; every forward says them anew
# what takes part in the gradient that is under way, and is told by its method `abandon()` if that raises
in_this_gradient: weakref.WeakSet = weakref.WeakSet()
_apart: ContextVar[bool] = ContextVar("ms_dtensor_recorded_apart", default=False)  # inside a recording's own forward
_asked: list[set[int] | None] = []  # of each gradient under way: ids of what it is of; None: of all parameters it meets
REDUCED_BY = "_ms_dtensor_reduced_by"  # parameter attribute: who adds up its gradients (`sharding/reduce.py`)
# whose frames are there while MindSpore records, or runs what was recorded
_RECORDERS = {f.__code__ for f in (composite._pynative_func_grad_forward, composite._pynative_func_grad_backward,
                                   nn.Cell._complex_call)}


def layouts_of(tensors) -> list:
    """Of each its layout; None for plain ones."""
    return [getattr(x, "_layout", None) for x in tensors]


def _grad(original):
    def grad(fn, operation, weights, grad_position, has_aux, *args):
        if weights is not None:
            weights = _current(weights)
            _check_left_over(weights)
        inputs = args
        if operation.sens_param:
            inputs = args[:-1]
            args = *inputs, as_cotangents(_outputs.get(id(fn), ()), args[-1])
        outermost, of = not recording(), _differentiated(fn, operation, weights, grad_position, inputs)
        listed = operation.get_by_list and weights is None
        try:
            with _asking(None if listed else of):
                if listed:
                    _check_listed(fn)
                out = original(fn, operation, weights, grad_position, has_aux, *args)
                layouts = layouts_of(of)
                gradients = [out] if out.__class__ is Tensor else leaves(out, Tensor) if any(layouts) else []
                assert not any(layouts) or len(gradients) == len(layouts), f"{len(gradients)} gradients for {len(layouts)}"
                if outermost and any(layouts):
                    completed = deliver(of, gradients)
                    if completed is not gradients:
                        it, gradients = iter(completed), completed
                        out = map_leaves(lambda g: next(it), out, Tensor)
        except BaseException:
            _clean(outermost)
            raise
        if outermost:
            for taking_part in in_this_gradient:
                taking_part.end_gradient()
            in_this_gradient.clear()
        if not any(layouts):
            return out
        if not outermost:  # it may be differentiated again
            recorded = iter([g if layout is None else recorded_gradient(g, layout) for g, layout in zip(gradients, layouts)])
            out = map_leaves(lambda g: next(recorded), out, Tensor)
            gradients = leaves((out,), Tensor)
        for g, layout in zip(gradients, layouts):
            if layout is not None and g.__class__ is Tensor:  # it is new and nobody else has it, so its class is changed
                retag(g, summed_gradient(layout))
        return out
    return grad


def deliver(of: list, gradients: list) -> list:
    """Gradients as the backward of these has given them, completed by who adds them up; where nobody does, the list itself.
    """
    owners = {owner: None for x in of if (owner := x.__dict__.get(REDUCED_BY)) is not None}
    if not owners:
        return gradients
    given = {id(x): g for x, g in zip(of, gradients)}
    for owner in owners:
        owner.end(given)
    for owner in owners:
        owner.deliver(given)
    return [given[id(x)] for x in of]


def kept_apart(param) -> bool:
    """Whether whoever adds up this parameter's gradients keeps the sums (`main_grad`), and hands out zeros."""
    return getattr(param.__dict__.get(REDUCED_BY), "main", False)


@contextmanager
def _asking(of: list | None) -> Iterator[None]:
    """Inside runs the backward that is to give the gradients of these; None: of all parameters that it meets."""
    _asked.append(None if of is None else {id(x) for x in of})
    token = sought.set(None)  # hooks may begin forwards of their own
    try:
        yield
    finally:
        sought.reset(token)
        _asked.pop()


def asked_for(param) -> bool:
    """Whether the backward under way is to give this parameter's gradient: a node of many is run for any one of them."""
    return not _asked or _asked[-1] is None or id(param) in _asked[-1]


@contextmanager
def _taking_part(participants: Iterable = ()) -> Iterator[None]:
    """Inside only these take part: a gradient that a hook or an op of a backward takes, forward and backward, has an end
    that is not the end of the one under way, which still needs what takes part in that."""
    others = _exchanged(participants)
    try:
        with ExitStack() as stack:
            for taking_part in others:
                stack.enter_context(taking_part.reduction.apart())
            yield
    finally:
        _exchanged(others)


def _exchanged(participants: Iterable) -> list:
    """Only these take part from now on; gives those before. As a rule both are nobody, and a pipeline asks at each action:
    to walk through a WeakSet that is empty costs more than what is around it."""
    others = list(in_this_gradient) if in_this_gradient else []
    if others:
        in_this_gradient.clear()
    for taking_part in participants:
        in_this_gradient.add(taking_part)
    return others


@contextmanager
def _seeking(of: Iterable | None) -> Iterator[None]:
    """Inside runs a forward whose gradient will be of these; None: who asks for what is said later."""
    ids, around = None if of is None else frozenset(map(id, of)), sought.get() if recording() else frozenset()
    token = sought.set(None if ids is None or around is None else around | ids)
    try:
        yield
    finally:
        sought.reset(token)


def _differentiated(fn, operation, weights, grad_position, inputs) -> list:
    """The tensors to which the gradients belong, in order; MindSpore leaves out inputs that are no tensors."""
    if getattr(operation, "get_by_position", False):
        chosen = [inputs[i] for i in ((grad_position,) if grad_position.__class__ is int else grad_position)]
    else:
        chosen = inputs if operation.get_all else [] if operation.get_by_list else inputs[:1]
    out: list = []
    for x in chosen:
        if x.__class__ is classes.DTENSOR or isinstance(x, Tensor):  # the commonest, without a walk through a tree
            out.append(x)
        elif hasattr(x, "__ms_mutable__"):
            out += leaves(x, Tensor)
    if operation.get_by_list:
        given = fn.trainable_params() if weights is None and isinstance(fn, nn.Cell) else weights
        out += [given] if isinstance(given, Parameter) else list(given or ())
    return out


def _current(weights):
    """Weights that were listed before the model was distributed are the parameters that took their places."""
    if isinstance(weights, Tensor):
        return current(weights)
    now = [current(p) for p in weights]
    for p in now:
        if getattr(p, "_layout", None) is not None and not isinstance(p, Parameter):
            raise LayoutError("For a gradient, one of 'weights' is a DTensor, but no Parameter.", p._layout.describe(),
                              "MindSpore gives zeros for what is no parameter.",
                              ("Parameter(distribute_tensor(...))", "distribute_module(cell, device_mesh)",
                               "pass it as an input, and grad_position"))
    return weights if all(a is b for a, b in zip(now, weights)) else type(weights)(now)


def _check_listed(fn) -> None:
    """Without weights MindSpore gives the gradients of all parameters that a function met, and does not say which."""
    layout = next(filter(None, _outputs.get(id(fn), ())), None)
    if (layout is not None or len(in_this_gradient)) and not isinstance(fn, nn.Cell):
        raise LayoutError("For a gradient by list, a function on DTensors was given without weights.",
                          "its result is plain" if layout is None else layout.describe(),
                          "Whose gradient is whose is not known, so shards would pass for whole gradients.",
                          "GradOperation(get_by_list=True)(function, net.trainable_params())")


def _check_left_over(weights) -> None:
    """A plain parameter beside sharded ones: what flows into a sharded cell gives it the gradient of this rank's rows."""
    params = (weights,) if isinstance(weights, Tensor) else weights
    if not any(SHARDED_BY in p.__dict__ for p in params):
        return
    left = [p.name for p in params if getattr(p, "_layout", None) is None and SHARDED_BY not in p.__dict__]
    if left:
        raise LayoutError("For a gradient, parameters were left over by 'fully_shard'.", f"plain: {', '.join(left[:5])}",
                          "Their gradients would be of this rank's rows only.",
                          ("fully_shard(model, mesh=mesh) after its blocks", "pass them in ignored_params="))


# -- what an output is weighted with ----------------------------------------------------------------------------------


def _end_graph(original):
    def end_graph(fn, output, *args, **kwargs):
        if len(_outputs) >= _LIMIT:
            _outputs.clear()
        _outputs[id(fn)] = layouts_of((output,) if output.__class__ is classes.DTENSOR else leaves((output,), Tensor))
        return original(fn, output, *args, **kwargs)
    return end_graph


def as_cotangents(of, sens):
    """The given cotangents as local tensors, each laid out as that of its output, whose layouts are `of`."""
    layouts = iter(of)

    def local(s):
        want, have = next(layouts, None), getattr(s, "_layout", None)
        if want is None and have is None or have is None and not s._shape:
            return s
        if want is None or have is None and not modes.mode.get().implicit_replication or tuple(s.shape) != want.shape:
            raise MixedOperandError(
                "For a gradient, 'sens' does not fit the output.",
                f"output {'plain' if want is None else want.describe()}, sens "
                f"{'plain ' + str(list(s._shape)) if have is None else have.describe()}",
                "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
                ("distribute_tensor(sens, device_mesh, placements)", "a 0-d sens", "differentiate (output * sens).sum()"))
        target = want.gradient()
        if have is None:
            s = retag(local_alias(s), target.replicated())
        return local_alias(redistribute(s, target, implicit="sens"))
    return map_leaves(local, sens, Tensor)


# -- around them ------------------------------------------------------------------------------------------------------


def _clean(outermost: bool) -> None:
    """After an exception in the outermost gradient nothing is recorded any more."""
    if outermost:
        executor.clear_res()
        executor.set_grad_flag(False)
        for taking_part in list(in_this_gradient):
            taking_part.abandon()
        in_this_gradient.clear()


@contextmanager
def apart(participants: Iterable = (), of: list | None = None) -> Iterator[list]:
    """Around a forward or a backward that is a recording's own (`dispatch/recording.py`); gives who takes part in it.

    Args:
        participants: of a backward, those of its forward.
        of: what a backward is to give the gradients of.
    """
    inside, others, mine = _apart.set(True), _exchanged(participants), list[Any]()
    try:
        with nullcontext() if of is None else _asking(of):
            yield mine
        mine += in_this_gradient
    except BaseException:
        _clean(True)
        raise
    finally:
        _exchanged(others)
        _apart.reset(inside)


def recorded_apart() -> bool:
    """Whether a recording's own forward or backward is under way: MindSpore runs no `bprop` of an nn.Cell there."""
    return _apart.get()


def end_abandoned() -> None:
    """Ends a recording that nobody is in: a function that raised before these doors were installed has left it."""
    if not recording() or _apart.get():
        return
    for top in sys._current_frames().values():  # of all threads: some devices' backwards have one
        frame: Any = top
        while frame is not None:
            if frame.f_code in _RECORDERS:
                return
            frame = frame.f_back
    _clean(True)


def _wrapped(original):
    """MindSpore's decorator of the function of forward and backward that `GradOperation` and `_Grad` make.

    What they were told is in its closure. Their `__call__` stays as it is: the bytecode mode of `ms.jit` reads its code, and
    compiles nothing where it finds another's.
    """
    def wrap(run):
        told = dict(zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__ or ())))
        out = original(run)
        if "grad_" not in told:
            return out
        fn, operation, weights = told["fn"], told["self"], told["weights"]

        @functools.wraps(out)
        def gradient(*args, **kwargs):
            inputs = [*args, *(x for name, x in kwargs.items() if name != "sens")]
            unsaid = operation.get_by_list and weights is None and not isinstance(fn, nn.Cell)
            given = [weights] if isinstance(weights, Tensor) else weights
            now = None if given is None else [current(p) for p in given]
            of = None if unsaid else _differentiated(fn, operation, now, told.get("grad_position", 0), inputs)
            with _seeking(of), _taking_part() if _asked and not recording() else nullcontext():
                return out(*args, **kwargs)
        return gradient
    return wrap


def _forward(original, unsaid: bool = False):
    @functools.wraps(original)
    def forward(fn, *args, **kwargs):
        if _apart.get() and recording():
            raise OpRuleError("For a gradient, one was asked for inside of a 'Recording'.", str(fn),
                              "MindSpore would cut what it gives off from what is recorded around it.",
                              ("value_and_grad of the whole, in place of a recording or a pipeline",
                               "take it outside, and pass it in as an input"))
        end_abandoned()
        if recording():
            with modes.HigherOrderBlock(), _seeking(None) if unsaid else nullcontext():
                return original(fn, *args, **kwargs)
        try:
            return original(fn, *args, **kwargs)
        except BaseException:
            _clean(True)
            raise
    return forward


def _complex_call(original):
    @functools.wraps(original)
    def complex_call(self, *args, **kwargs):  # of a cell after `set_grad()`, as training cells call it, among others
        outermost = not recording()
        unsaid = self.requires_grad and not outermost and executor.high_order()  # a gradient of it is taken later
        try:
            with _seeking(None) if unsaid else nullcontext():
                return original(self, *args, **kwargs)
        except BaseException:
            _clean(outermost)
            raise
    return complex_call


DOORS = (
    (executor, "grad", _grad), (executor, "end_graph", _end_graph),
    (composite, "_wrap_func", _wrapped),
    (composite, "_pynative_func_grad_forward", _forward),
    (grad_func, "_pynative_func_grad_forward", functools.partial(_forward, unsaid=True)),  # of `vjp`
    (nn.Cell, "_complex_call", _complex_call),
    *recomputed.DOORS,
)
