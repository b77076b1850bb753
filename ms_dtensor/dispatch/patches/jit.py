# SPDX-License-Identifier: Apache-2.0
"""The doors of `ms.jit`: a compiled graph does not dispatch, so a DTensor that enters one, or is captured, is refused.

Arguments are searched before anything is compiled. What a function captures (a global tensor, a cell's parameters) is
known only while it is compiled: the compiler asks every tensor that it meets for `__parameter__`, which is noted, and
what was compiled with a DTensor is forgotten again. Two kinds of MindSpore's own compiled code are right on DTensors: loss
scaling, which then runs uncompiled, and optimizers that work element by element, on the shards of parameter and gradient.
Others' optimizers run uncompiled, too: what their updates depend on is not known, and dispatch is right for any.
"""
from __future__ import annotations

import functools
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ... import comm
from ...comm.pretended import executing
from ...comm.record import user_site
from ...core.tree import leaves, map_leaves
from ...errors import DTensorError, OpRuleError
from ...internals.names import jit_api, jit_trace, pijit_context
from ...internals.probes import PYNATIVE, in_graph_mode
from ...internals.undo import Patched
from .. import classes, modes, policy
from ..memo import stepped
from ..operands import local_alias, redistribute

# MindSpore's optimizers whose update of one element depends on that element alone
_ELEMENTWISE = frozenset((
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamOffload", "AdamW", "AdamWeightDecay", "AdaMax", "Adamax", "FTRL", "LazyAdam",
    "Momentum", "NAdam", "ProximalAdagrad", "RAdam", "RMSProp", "RMSprop", "Rprop", "SGD"))
_met: list[Tensor] | None = None  # DTensors that the compilation under way has met; None: there is none
_refused: dict[int, tuple] = {}  # by id: (a function in bytecode mode that captures a DTensor, the error)
_asking = Patched()


_RULE = "A compiled graph does not dispatch: it would compute on this rank's shard."


def _asked(x):
    if _met is not None:
        _met.append(x)
    if isinstance(x, Parameter):
        return True
    raise AttributeError("__parameter__")


_PARAMETER = property(_asked)  # `__parameter__` of DTensors while something is compiled: the compiler asks every tensor


def forget_compiled() -> None:
    """A cell's parameter was replaced: what was compiled with the old one is compiled anew."""
    jit_api.ms_compile_cache.clear()


def _refusal(x, what: str) -> OpRuleError:
    name = f"parameter '{x.name}', " if isinstance(x, Parameter) else ""
    if in_graph_mode():
        return OpRuleError(f"For 'GRAPH_MODE', {what} is {name}a DTensor.", x._layout.describe(), _RULE, PYNATIVE)
    return OpRuleError(f"For 'ms.jit', {what} is {name}a DTensor.", x._layout.describe(),
                       _RULE,
                       ("call it on local tensors inside local_map", "run this part without ms.jit"))


def _dtensors(*trees) -> list:
    return [x for x in leaves(trees, Tensor) if getattr(x, "_layout", None) is not None]


def _refuse(what: str, *trees) -> None:
    found = _dtensors(*trees)
    if found:
        raise _refusal(found[0], what)


class _Watch:
    """Refuses what is compiled inside it, if the compiler met a DTensor."""

    def __enter__(self):
        global _met
        self.outer, _met = _met, []
        if self.outer is None:
            for kind in classes.DTENSOR, classes.PARAMETER:
                _asking.put(kind, "__parameter__", _PARAMETER)

    def __exit__(self, kind, error, trace):
        global _met
        found, _met = _met, self.outer
        if _met is None:
            _asking.take_back()
        if found:
            raise _refusal(found[0], "what the function captures") from None
        if isinstance(error, Exception) and not isinstance(error, DTensorError) and in_graph_mode():
            first = str(error).split("\n")[0].rstrip(".")
            raise OpRuleError(f"For 'GRAPH_MODE', a function was not compiled: {first}.", "a program with DTensors",
                              "Hooks and parameters of distributed cells cannot be compiled.", PYNATIVE) from error


# -- the doors ------------------------------------------------------------------------------------------------------


def _call(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        given = (args if self.obj is None else args[1:], kwargs)
        if isinstance(self.obj, nn.Cell) and _is_elementwise(self.obj):
            if _dtensors(*given, list(self.obj.parameters)):
                args = self.obj, *_shards(self.obj, args[1:])
                with _StandIns(self.obj, args[1:]):
                    return original(self, *args, **map_leaves(_shard, kwargs, Tensor))
        elif (dry := executing()) is not None and dry.is_alone(*given):
            return self.fn(*args, **kwargs)  # of a local function: uncompiled, its ops are seen
        elif self.fn.__module__ == "mindspore.amp" and _dtensors(*given):
            return _all_finite(*args) if self.fn.__name__ == "_all_finite" else self.fn(*args, **kwargs)
        elif _is_others(self.obj) and _dtensors(*given, list(self.obj.parameters)):
            return self.fn(*args, **kwargs)
        elif isinstance(self.obj, nn.Optimizer) and _dtensors(*given):
            raise OpRuleError(f"For '{type(self.obj).__name__}', a gradient is a DTensor.",
                              _dtensors(*given)[0]._layout.describe(),
                              "Its update of an element depends on others, and each rank would take its own shard's.",
                              (f"ms_dtensor.optim.{'Adafactor' if isinstance(self.obj, nn.AdaFactor) else 'AdamW'}",
                               "an optimizer that works element by element, as nn.Adam does"))
        else:
            _refuse("an argument", *given)
        return original(self, *args, **kwargs)
    return call


def _compile(original):
    @functools.wraps(original)
    def compile_(self, *args, **kwargs):
        if isinstance(self.obj, nn.Cell) and _is_elementwise(self.obj):
            return original(self, *args, **kwargs)
        phase = None
        try:
            with _Watch():
                phase = original(self, *args, **kwargs)
        except OpRuleError:
            jit_api.ms_compile_cache.discard(phase)
            raise
        return phase
    return compile_


def _compile_cell(original):
    @functools.wraps(original)
    def compile_(self, obj, *args, **kwargs):
        _refuse("an argument", args, kwargs)
        if isinstance(obj, nn.Cell) and in_graph_mode():
            _refuse("what the cell holds", list(obj.get_parameters()))
        with _Watch():
            return original(self, obj, *args, **kwargs)
    return compile_


def _trace_begin(original):
    @functools.wraps(original)
    def begin(fn_name, *args, **kwargs):
        _refuse("an argument", args)
        return original(fn_name, *args, **kwargs)
    return begin


def _trace_end(original):
    @functools.wraps(original)
    def end(*outputs, **kwargs):
        found = _dtensors(outputs)
        try:
            return original(*map_leaves(_shard, outputs, Tensor), **kwargs)
        finally:
            if found:
                jit_trace._trace_compile_cache.clear()
                raise _refusal(found[0], "a result")
    return end


def _before_bytecode(original):
    @functools.wraps(original)
    def before(args, kwargs):
        _refuse("an argument", args, kwargs)
        return original(args, kwargs)
    return before


def _enter_bytecode(original):
    @functools.wraps(original)
    def enter(self):
        if id(self) in _refused:  # it has been compiled, and would not be again
            raise _refused[id(self)][1]
        self.__dict__.setdefault("_watches", []).append(_Watch())
        self._watches[-1].__enter__()
        return original(self)
    return enter


def _exit_bytecode(original):
    @functools.wraps(original)
    def leave(self, *error):
        out = original(self, *error)
        try:
            self._watches.pop().__exit__(*error)
        except OpRuleError as refusal:
            _refused[id(self)] = self, refusal
            raise
        return out
    return leave


# -- MindSpore's own that are right ------------------------------------------------------------------------------------


def _is_elementwise(owner) -> bool:
    return type(owner).__name__ in _ELEMENTWISE and type(owner).__module__.startswith("mindspore.")


def _is_others(owner) -> bool:
    return isinstance(owner, nn.Optimizer) and not type(owner).__module__.startswith(("mindspore.", "ms_dtensor."))


def _shards(optimizer, args):
    """The arguments of an optimizer with the gradients as shards that lie as their parameters do."""
    params = list(optimizer.parameters)
    flags = getattr(optimizer, "grad_centralization_flags", None) or (getattr(optimizer, "grad_centralization", False),)
    if any(flags):
        raise OpRuleError(f"For '{type(optimizer).__name__}', a parameter is a DTensor, and gradients are centralized.",
                          _dtensors(params, args)[0]._layout.describe(),
                          "Each rank would subtract the mean of its own shard.", "leave 'grad_centralization' out")

    def aligned(value):
        if value.__class__ not in (tuple, list) or len(value) != len(params):
            return value
        return type(value)(_aligned(optimizer, p, g) if isinstance(g, Tensor) else g for p, g in zip(params, value))
    return map_leaves(_shard, tuple(map(aligned, args)), Tensor)


def _aligned(optimizer, param, grad):
    own, layout = getattr(param, "_layout", None), getattr(grad, "_layout", None)
    if isinstance(grad, Parameter) or layout is None and (own is None or tuple(grad._shape) == own.local_shape()):
        return grad
    if own is None or layout is None or layout.shape != own.shape or layout.mesh != own.mesh:
        what = "plain" if own is None else own.describe()
        raise OpRuleError(f"For '{type(optimizer).__name__}', parameter '{param.name}' and its gradient do not fit.",
                          f"{what}, gradient {list(grad._shape) if layout is None else layout.describe()}",
                          "An update works on shards that lie alike.",
                          ("make the optimizer after the model was distributed", "lay the gradient out like the parameter"))
    target = own.gradient()
    return redistribute(grad, layout.with_placements(target.placements, target.order), implicit=type(optimizer).__name__)


def _shard(x):
    if isinstance(x, Parameter):
        return x
    local = local_alias(x) if getattr(x, "_layout", None) is not None else x
    return _stand_in(local) if 0 in local._shape else local


def _stand_in(x):
    """One element in the place of none: some of MindSpore's kernels fail where there is nothing to do."""
    return Tensor(np.zeros([n or 1 for n in x._shape]), x.dtype)


class _StandIns:
    """Inside, parameters (also as gradients) and states that are empty on this rank have an element each, of no meaning."""

    def __init__(self, optimizer, args):
        held = {id(p): p for p in (*optimizer.get_parameters(), *optimizer.parameters, *leaves(args, Parameter))}
        self.empty = [(p, local_alias(p)) for p in _dtensors(list(held.values())) if 0 in p._shape]

    def __enter__(self):
        for p, local in self.empty:
            Tensor.assign_value(p, _stand_in(local))

    def __exit__(self, *error):
        for p, local in self.empty:
            Tensor.assign_value(p, local)


def _eager_optimizer(original):
    @functools.wraps(original)
    def construct(self, gradients):
        if not _dtensors(gradients, list(self.parameters)):
            return original(self, gradients)
        (gradients,) = _shards(self, (gradients,))
        with modes.SkipDTensorDispatch(), _StandIns(self, gradients):
            return original(self, gradients)
    return construct


def _call_optimizer(original):
    """Tensors that an optimizer of others' holds or makes (betas of shape [1]) are alike on all ranks; gradients are not."""
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        if executing() is not None and not _is_others(self) and _dtensors(list(self.parameters)):
            raise OpRuleError(f"For 'dry_run', a step of MindSpore's {type(self).__name__} is not known.", user_site(),
                              "Its kernels write into a shard's memory, and a dry run has none.",
                              "ms_dtensor.optim.AdamW or SGD in its place")
        ours = len(_dtensors(list(self.parameters))) if _is_others(self) else 0
        with modes.Constants() if ours and len(_dtensors(args)) >= ours else nullcontext():
            out = original(self, *args, **kwargs)
        for p in _dtensors(list(self.parameters)):
            stepped(p)
        return out
    return call


def _all_finite(inputs, *_):
    """Whether all elements of all tensors are finite: the same answer on all ranks, by one all-reduce for each mesh."""
    wrong: dict = {}
    for x in leaves(inputs, Tensor):
        layout = getattr(x, "_layout", None)
        local = local_alias(x)
        if local.numel():
            mesh = None if layout is None else layout.mesh
            wrong[mesh] = wrong.get(mesh, 0) + int(not ms.ops.isfinite(local).all())
        elif layout is not None:
            wrong.setdefault(layout.mesh, 0)
    total = wrong.pop(None, 0)
    if any(mesh.size() > 1 for mesh in wrong):
        policy.check("all_finite", "the answers of all ranks have to be put together",
                     "\n".join(x._layout.describe() for x in _dtensors(inputs)),
                     ('with redistribution_policy("auto"): around this call',))
    for mesh, count in wrong.items():
        if mesh.get_coordinate() is not None:
            with comm.annotate(implicit=True, src="all_finite", dst="all_finite"):
                total += int(mesh.get_group().all_reduce(Tensor([float(count)], ms.float32), "sum").asnumpy()[0])
    return Tensor(total == 0)


DOORS = (
    (jit_api._JitExecutor, "__call__", _call), (jit_api._JitExecutor, "compile", _compile),
    (jit_api._CellGraphExecutor, "compile", _compile_cell), (jit_trace, "_jit_trace_begin", _trace_begin),
    (jit_trace, "_jit_trace_end", _trace_end), (pijit_context, "PreJit", _before_bytecode),
    (pijit_context.PIJitCaptureContext, "__enter__", _enter_bytecode),
    (pijit_context.PIJitCaptureContext, "__exit__", _exit_bytecode), (nn.Adadelta, "construct", _eager_optimizer),
    (nn.Optimizer, "__call__", _call_optimizer),
)
