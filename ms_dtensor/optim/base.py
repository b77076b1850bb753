# SPDX-License-Identifier: Apache-2.0
"""What our optimizers share: parameter groups, a schedule, masters of 16-bit parameters, checks and checkpoints.

An optimizer supplies `_step`. The one invariant: a gradient has its parameter's own layout, and all state of a
parameter has its layout too, so a step is the one-device step shard by shard.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar

import numpy as np
from mindspore import Parameter, Tensor

from ms_dtensor.errors import ConfigError, LayoutError

from ..dispatch.operands import dtype_name, wrap
from ..dispatch.replaced import current
from ..internals.names import NoFallbackGuard
from ._storage import layout_of
from .arrays import Array, new_master, to_array, write

Params = Iterable[Parameter] | Iterable[Mapping[str, Any]]
Schedule = Callable[[int], float]


class Optimizer:
    """Base of optimizers with parameter groups.

    Attributes:
        params: all parameters, in the order of the groups.
        groups: one dict per group: its "params" and the options it has for itself; others are the optimizer's own.
        schedule: factor of the learning rate by step, counted from 0, or None.
        step: steps done.
    """

    _BELOW: ClassVar[Mapping[str, float]] = {}  # options that are a number: at least 0, and less than this

    def __init__(self, params: Params, schedule: Schedule | None, **options: Any):
        self.__dict__.update(options)
        self.groups = self._grouped(params, options)
        pairs = [(p, group) for group in self.groups for p in group["params"]]
        self.params: tuple[Parameter, ...] = tuple(p for p, _ in pairs)
        self._group_of = [group for _, group in pairs]
        if len({id(p) for p in self.params}) < len(self.params):
            raise ValueError(f"For '{self._who}', a parameter is in 'params' twice.")
        self.schedule, self.step, self._factor = schedule, 0, 1.0
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
        self._factor = 1.0 if self.schedule is None else float(self.schedule(self.step))
        self.step += 1
        with NoFallbackGuard():
            self._step({i: grad for i, grad in enumerate(grads) if grad is not None})

    def state_dict(self) -> dict[str, Any]:
        """Steps done, and each kind of state by parameter name; local shards in the parameter's layout, not copies."""
        kinds = sorted({kind for state in self._state for kind in state})
        return {"step": self.step, **{kind: named(self._who, self.params, [state.get(kind) for state in self._state])
                                      for kind in kinds},
                "masters": named(self._who, self.params, self._masters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the values of a `state_dict` of the same parameters in the same layouts."""
        restore(self._who, self.state_dict(), state)
        self.step = int(state["step"])

    def checkpoint_state(self) -> dict[str, Any]:
        """What `state_dict` tells, as tensors in their global layouts on the same storage: what `checkpoint` saves."""
        return {kind: tensors_of(self.params, held, partial(self._state_dims, kind)) if isinstance(held, dict) else held
                for kind, held in self.state_dict().items()}

    def load_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """Takes over the numbers of a `checkpoint_state` whose tensors have been written."""
        self.step = int(state["step"])

    # -- for optimizers ------------------------------------------------------------------------------------------------
    def _state_dims(self, kind: str, ndim: int) -> Sequence[int]:
        """Which of a parameter's dims a kind of its state has."""
        return range(ndim)

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
                high = self._BELOW.get(key)
                if high is not None and not 0 <= value < high:
                    raise ValueError(f"For '{self._who}', '{key}' = {value} is out of range: at least 0"
                                     + ("." if high == math.inf else f" and below {high:g}."))
        for group in groups:
            if "params" not in group:
                raise ValueError(f"For '{self._who}', a group has no 'params'.")
            group["params"] = list(group["params"])
        if not any(group["params"] for group in groups):
            raise ValueError(f"For '{self._who}', 'params' is empty.")
        return groups


def named(who: str, params: Sequence[Parameter], items: Sequence) -> dict[str, Any]:
    """Items, one per parameter, by parameter name; those that are None are left out."""
    names = [p.name for p in params]
    if len(set(names)) < len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"For '{who}', state is kept by parameter name, but several parameters are called {twice}.")
    return {name: item for name, item in zip(names, items, strict=True) if item is not None}


def tensors_of(params: Sequence[Parameter], by_name: Mapping[str, Any], dims_of: Callable[[int], Sequence[int]] = range
               ) -> dict[str, Any]:
    """Local states by parameter name as DTensors (of plain parameters as tensors), on the states' own storage.

    Args:
        params: the parameters.
        by_name: states, or tuples of them.
        dims_of: which of the parameter's dims a state has, by their number.
    """
    named_params = {p.name: p for p in params}
    out: dict[str, Any] = {}
    with NoFallbackGuard():
        for name, state in by_name.items():
            made = tuple(_in_layout(x, named_params[name], dims_of) for x in _parts(state))
            out[name] = made if isinstance(state, tuple) else made[0]
    return out


def _in_layout(x: Array, param: Parameter, dims_of: Callable[[int], Sequence[int]]) -> Tensor:
    layout = layout_of(param)
    dims = dims_of(len(param.shape))
    shape = tuple(param._shape[d] for d in dims)
    local = Tensor.from_numpy(x.reshape(shape)) if isinstance(x, np.ndarray) else x
    return local if layout is None else wrap(local, layout.of_dims(dims, dtype_name(local.dtype)))


def restore(who: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Writes saved states into the live ones, after all of them were compared."""
    wrong = sorted(set(live) ^ set(saved))
    for kind in live.keys() & saved.keys() - {"step"}:
        wrong += sorted(f"{kind} of '{name}'" for name in set(live[kind]) ^ set(saved[kind]))
        wrong += sorted(f"{kind} of '{name}', local shape" for name in live[kind].keys() & saved[kind].keys()
                        if _shapes(live[kind][name]) != _shapes(saved[kind][name]))
    if wrong:
        raise LayoutError(f"For '{who}.load_state_dict', the state is of other parameters.", "; ".join(wrong[:5]),
                          "State is local shards by parameter name.", "load into the layouts in which it was saved")
    with NoFallbackGuard():
        for kind in live.keys() - {"step"}:
            for name, state in live[kind].items():
                for mine, its in zip(_parts(state), _parts(saved[kind][name]), strict=True):
                    write(mine, to_array(its))


def _parts(state) -> tuple:
    return state if isinstance(state, tuple) else (state,)


def _shapes(state) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in _parts(state)]


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
