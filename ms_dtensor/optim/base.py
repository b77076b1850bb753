# SPDX-License-Identifier: Apache-2.0
"""What our optimizers share: parameter groups, a schedule, masters of 16-bit parameters, checks and checkpoints.

An optimizer supplies `_step`. The one invariant: a gradient has its parameter's own layout, and all state of a
parameter has its layout too, so a step is the one-device step shard by shard.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from mindspore import Parameter, Tensor

from ms_dtensor.errors import ConfigError, LayoutError

from ..comm.pretended import executing
from ..core.layout import Layout
from ..dispatch.operands import dtype_name, local_alias, wrap
from ..dispatch.recorded import not_recorded
from ..dispatch.replaced import current
from ..internals.names import NoFallbackGuard
from .arrays import Array, layout_of, new_master, precision, values, write

Params = Iterable[Parameter] | Iterable[Mapping[str, Any]]
Schedule = Callable[[int], float]


class Steps(int):
    """How many steps an optimizer has done; called, as PyTorch's `optimizer.step()`, it does one by `.grad`."""

    of: Optimizer

    def __call__(self) -> None:
        """One step with the gradients that `md.backward` keeps, not recorded; a parameter without one is left alone.

        They are `main_grad` of parameters whose sums are kept there, else `.grad`.

        Raises:
            ConfigError: no parameter has a gradient.
        """
        grads = [_kept(p) for p in self.of.params]
        if not any(g is not None for g in grads):
            raise ConfigError(f"For '{type(self.of).__name__}.step', no parameter has a gradient.",
                              ", ".join(p.name for p in self.of.params[:5]), "A step by `.grad` comes after a backward.",
                              ("md.backward(loss) inside of md.recorded(net)", "optimizer(gradients)"))
        with not_recorded():
            self.of(grads)


class Optimizer:
    """Base of optimizers with parameter groups.

    Attributes:
        params: all parameters, in the order of the groups.
        groups: one dict per group: its "params" and the options it has for itself; others are the optimizer's own.
        schedule: factor of the learning rate by step, counted from 0, or None.
        step: steps done; and `step()` does one by `.grad`, see `Steps`.
    """

    _BELOW: ClassVar[Mapping[str, float]] = {}  # options that are numbers: at least 0, and less than this
    _ALONE: ClassVar[bool] = True  # a step communicates nothing
    _LACKS: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # dims of the parameter, from its last, that a kind of state lacks

    def __init__(self, params: Params, schedule: Schedule | None, **options: Any):
        self.__dict__.update(options)
        self.groups = self._grouped(params, options)
        pairs = [(p, group) for group in self.groups for p in group["params"]]
        self.params: tuple[Parameter, ...] = tuple(p for p, _ in pairs)
        self._group_of = [group for _, group in pairs]
        check_params(self._who, self.params)
        self.schedule, self._steps, self._factor = schedule, 0, 1.0
        for p in self.params:
            layout = layout_of(p)
            if layout is not None and layout.has_partial():
                raise LayoutError(f"For '{self._who}', the parameter '{p.name}' is Partial.", layout.describe(),
                                  "Steps of summands are no step of the sum.", "redistribute it to Replicate or Shard")
        with NoFallbackGuard():
            self._masters = [new_master(p) if self._moves(i) else None for i, p in enumerate(self.params)]
            self._state: list[dict[str, Array]] = [self._new_state(i) if self._moves(i) else {}
                                                   for i in range(len(self.params))]

    @property
    def _who(self) -> str:
        return type(self).__name__

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """One step with `grads` in the order of `params`; a None leaves its parameter alone.

        A gradient is the local tensor in its parameter's layout (as `mindspore.value_and_grad` returns it) or a
        DTensor of that layout.
        """
        if len(grads) != len(self.params):
            raise ValueError(f"For '{self._who}', there are {len(self.params)} parameters but {len(grads)} gradients.")
        check_current(self._who, self.params)
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                check_gradient(self._who, param, grad)
        self._factor = 1.0 if self.schedule is None else float(self.schedule(self._steps))
        self._steps += 1
        dry = executing()
        if dry is not None:
            dry.stepped(self, [i for i, grad in enumerate(grads) if grad is not None], grads)
            return
        with NoFallbackGuard():
            self._step({i: grad for i, grad in enumerate(grads) if grad is not None})

    def _makes(self, i: int, grad: Tensor) -> int:
        """How many tensors of a parameter's size its step makes and drops, for dry runs."""
        return 0

    def state_dict(self) -> dict[str, dict[str, Tensor | int]]:
        """Of each parameter by name: "step", the steps done, and each kind of its state, not copies.

        States of a DTensor are DTensors with its placements, less the dims that a state lacks; of a plain one plain tensors.
        To keep them past the next step take `x.copy()`: `copy.deepcopy` of a MindSpore tensor shares its storage.
        """
        check_names(self._who, self.params)
        return {p.name: {"step": self._steps, **self._tensors(i)} for i, p in enumerate(self.params) if self._moves(i)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over the values of a `state_dict` of the same parameters in the same layouts."""
        self._steps = restore(self._who, self.state_dict(), state)

    @property
    def step(self) -> Steps:
        """Steps done; called, it does one by `.grad`."""
        steps = Steps(self._steps)
        steps.of = self
        return steps

    @step.setter
    def step(self, done: int) -> None:
        self._steps = int(done)

    def zero_grad(self) -> None:
        """Lets go of the parameters' `.grad` and `main_grad`."""
        for p in self.params:
            for kept in ("grad", "main_grad"):
                if getattr(p, kept, None) is not None:
                    setattr(p, kept, None)

    # -- for optimizers ------------------------------------------------------------------------------------------------
    def _step(self, grads: dict[int, Tensor]) -> None:
        """Steps the parameters of these indices."""
        raise NotImplementedError

    def _new_state(self, i: int) -> dict[str, Array]:
        """What is kept of parameter `i` from step to step, by kind."""
        raise NotImplementedError

    def _moves(self, i: int) -> bool:
        """Whether a parameter is stepped here, not by an inner optimizer."""
        return True

    def _allowed(self, group: Mapping[str, Any], options: Mapping[str, Any]) -> set[str]:
        """What a group may hold beside "params"."""
        return set(options)

    def _option(self, i: int, name: str) -> Any:
        """An option of parameter `i`."""
        return self._group_of[i].get(name, getattr(self, name))

    def _lr(self, i: int) -> float:
        return self._option(i, "lr") * self._factor

    def _tensors(self, i: int) -> dict[str, Tensor]:
        """The state of parameter `i`, its master too, as tensors on the same storage."""
        state = {kind: (array, self._LACKS.get(kind, ())) for kind, array in self._state[i].items()}
        if self._masters[i] is not None:
            state["master"] = self._masters[i], ()
        layout = layout_of(self.params[i])
        return {kind: state_tensor(array, layout, dims) for kind, (array, dims) in state.items()}

    # -- checks --------------------------------------------------------------------------------------------------------
    def _grouped(self, params: Params, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        entries = list(params)
        groups: list[dict[str, Any]] = [dict(e) for e in entries if isinstance(e, Mapping)]
        if groups and len(groups) < len(entries):
            raise ValueError(f"For '{self._who}', 'params' mixes parameters and groups.")
        groups = groups or [{"params": entries}]
        for group in (dict(options, params=()), *groups):
            for key, value in group.items():
                allowed = self._allowed(group, options)
                if key not in allowed and key != "params":
                    near = get_close_matches(key, allowed, 1)
                    raise ValueError(f"For '{self._who}', a group has the option '{key}'; there are {sorted(allowed)}."
                                     + (f" Is '{near[0]}' meant?" if near else ""))
                several = isinstance(value, list | tuple)
                for k, number in enumerate(value if several else (value,)):
                    high = self._BELOW.get(key)
                    name = f"{key}[{k}]" if several else key
                    if high is not None and not isinstance(number, Real):
                        raise ValueError(f"For '{self._who}', '{name}' = {number!r} is no number.")
                    if high is not None and not 0 <= number < high:
                        raise ValueError(f"For '{self._who}', '{name}' = {number} is out of range: at least 0"
                                         + ("." if high == math.inf else f" and below {high:g}."))
        for group in groups:
            if "params" not in group:
                raise ValueError(f"For '{self._who}', a group has no 'params'.")
            group["params"] = list(group["params"])
        if not any(group["params"] for group in groups):
            raise ValueError(f"For '{self._who}', 'params' is empty.")
        return groups


def _kept(param: Parameter) -> Tensor | None:
    main = getattr(param, "main_grad", None)
    return getattr(param, "grad", None) if main is None else main


def check_params(who: str, params: Sequence[Parameter]) -> None:
    """What is stepped or averaged: parameters, each once, of real numbers."""
    for p in params:
        if not isinstance(p, Parameter):
            raise ConfigError(f"For '{who}', 'params' holds a {type(p).__name__}, not a Parameter.", repr(p)[:80],
                              "What is stepped has a name, and a gradient.", "net.trainable_params()")
        if not p.is_floating_point():
            raise ConfigError(f"For '{who}', the parameter '{p.name}' is not of real numbers.", f"{p.dtype}{list(p.shape)}",
                              "A step would be rounded to integers, or lose the imaginary part.",
                              ("leave it out: [p for p in net.trainable_params() if p.is_floating_point()]",
                               "two parameters, of the real and the imaginary part, for a complex one"))
    if len({id(p) for p in params}) < len(params):
        raise ValueError(f"For '{who}', a parameter is in 'params' twice.")


def check_names(who: str, params: Sequence[Parameter]) -> None:
    """State by parameter name needs one name each."""
    names = [p.name for p in params]
    if len(set(names)) < len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"For '{who}', state is kept by parameter name, but several parameters are called {twice}.")


def state_tensor(array: Array, layout: Layout | None, lacks: Sequence[int] = ()) -> Tensor:
    """A state as a tensor on the same storage: a DTensor if its parameter has a layout, less the dims that it lacks."""
    tensor = Tensor.from_numpy(array) if isinstance(array, np.ndarray) else local_alias(array)
    if layout is None:
        return tensor
    dims = [d for d in range(len(layout.shape)) if d - len(layout.shape) not in lacks]
    return wrap(tensor, layout.of_dims(dims, dtype_name(tensor.dtype)))


def restore(who: str, live: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Mapping[str, Any]]) -> int:
    """Writes saved states into the live ones, after all of them were compared; the steps done."""
    wrong = sorted(set(live) ^ set(saved))
    for name in live.keys() & saved.keys():
        mine, its = live[name], saved[name]
        wrong += sorted(f"{kind} of '{name}'" for kind in set(mine) ^ set(its))
        wrong += sorted(f"{kind} of '{name}': {_described(its[kind])} for {_described(mine[kind])}"
                        for kind in mine.keys() & its.keys() - {"step"} if not _fits(mine[kind], its[kind]))
    steps = {int(state["step"]) for state in saved.values() if "step" in state}
    if wrong or len(steps) > 1:
        raise LayoutError(f"For '{who}.load_state_dict', the state is of other parameters, layouts or steps.",
                          "; ".join(wrong[:5]) or f"steps {sorted(steps)}",
                          "State is taken over as it is, shard by shard, by parameter name.",
                          "redistribute the state's DTensors to the placements that state_dict() shows")
    with NoFallbackGuard():
        for name, state in live.items():
            for kind in state.keys() - {"step"}:
                write(state[kind], values(saved[name][kind], precision(state[kind])))
    return steps.pop() if steps else 0


def _fits(mine: Tensor, its: Any) -> bool:
    a, b = layout_of(mine), layout_of(its)
    if a is None or b is None:
        return a is b and isinstance(its, Tensor) and tuple(mine.shape) == tuple(its.shape)
    return _alike(a, b)


def _described(x: Any) -> str:
    layout = layout_of(x)
    return str(list(x.shape) if isinstance(x, Tensor) else x) if layout is None else layout.describe()


def check_current(who: str, params: Sequence[Parameter]) -> None:
    """The parameters are those of the model, not what stood in their places before it was distributed."""
    for param in params:
        new = current(param)
        if new is not param:
            raise ConfigError(f"For '{who}', a DTensor took the place of the parameter '{param.name}'.",
                              f"it is now {layout_of(new) or tuple(new.shape)}", "State is made like the parameters given.",
                              f"make the {who} after the model was distributed")


def check_gradient(who: str, param, grad) -> None:
    """A gradient belongs to its parameter: same layout, same number of local elements."""
    mine, its = layout_of(param), layout_of(grad)
    if its is not None and mine is not its and not (its.is_replicated() if mine is None else _alike(mine, its)):
        raise LayoutError(f"For '{who}', the gradient of '{param.name}' is laid out differently from the parameter.",
                          f"parameter {mine or tuple(param.shape)}, gradient {its}", "A step is local: shard by shard.",
                          "grad.redistribute(placements=param.placements)")
    with NoFallbackGuard():
        want, got = Tensor.numel(param), Tensor.numel(grad)
    if want != got:
        raise LayoutError(f"For '{who}', the gradient of '{param.name}' has {got} local elements, the parameter has {want}.",
                          f"parameter {mine or tuple(param.shape)}", "A gradient has its parameter's own layout.")


def _alike(mine, its) -> bool:
    return mine.mesh == its.mesh and mine.shape == its.shape and mine.dim_axes == its.dim_axes and \
        mine.placements == its.placements
