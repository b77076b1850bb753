# SPDX-License-Identifier: Apache-2.0
"""Weights that are one in memory and several in files: q, k and v, and w1 and w3 (`train.qkv_concat`).

A layer then has one product where it had two or three, one gradient of their input where these were added up, and a
device's `swiglu` finds both of its halves beside each other. Initial numbers, checkpoints, the optimizer's state in them and
Hugging Face's files are those of the single weights, by their names, so a run goes on either way. Not here: how a mesh
cuts them. The one invariant: a part is on the storage of the whole, so what is read into it, the whole has.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from mindspore import Tensor, mint, nn

from ms_dtensor import Layout, Shard
from ms_dtensor.dispatch.memo import memo_of
from ms_dtensor.dispatch.operands import local_alias, wrap
from ms_dtensor.internals.names import NoFallbackGuard
from ms_dtensor.internals.target import on_cpu
from ms_dtensor.optim.arrays import layout_of, local_view

from .layers import Joined


def parts_of(*models: nn.Cell) -> dict[str, dict[str, int]]:
    """Of each joined parameter, by name, the rows of its parts by theirs."""
    found = {}
    for path, cell in ((path, cell) for model in models for path, cell in model.cells_and_names()):
        if isinstance(cell, Joined):
            above = path.rpartition(".")[0]
            found |= {f"{path}.{key}": {f"{above}.{name}.{key}": n for name, n in cell.parts.items()}
                      for key, param in cell._params.items() if param is not None}
    return found


def cut(x: Tensor, rows: list[int]) -> list[Tensor]:
    """The parts of a joined parameter, or of a state of one, on the same storage; `rows` are global."""
    layout, ranks = layout_of(x), 1
    if layout is not None:
        placed = [Shard(0) if p.parts else p for p in layout.placements]
        ranks = math.prod(n for n, p in zip(layout.mesh.shape, layout.placements) if p.parts)
    view = local_view(x) if on_cpu() else None  # there a slice of a tensor would be a copy
    out, at = [], 0
    for n in rows:
        mine = n // ranks
        with NoFallbackGuard():
            local = mint.narrow(local_alias(x), 0, at, mine) if view is None else \
                Tensor.from_numpy(view.reshape(x._shape)[at:at + mine])
        at += mine
        if layout is not None:
            local = wrap(local, Layout(layout.mesh, placed, (n, *layout.shape[1:]), layout.dtype, layout.order))
            local._memo = memo_of(x)  # what is derived from the whole goes with what is read into a part
        out.append(local)
    return out


class apart(ExitStack):  # noqa: N801  a context manager
    """Inside, models have the parts of joined weights in their places, as cells by their names; not to be run."""

    def __init__(self, *models: nn.Cell):
        super().__init__()
        self._models = models

    def __enter__(self):
        holders = [holder for model in self._models for _, holder in model.cells_and_names()]
        for holder in holders:
            for key, cell in [pair for pair in holder._cells.items() if isinstance(pair[1], Joined)]:
                self.enter_context(_replaced(holder, key, cell))
        return self


@contextmanager
def _replaced(holder: nn.Cell, key: str, cell: Joined):
    parts = {name: nn.Cell() for name in cell.parts}
    for which, param in cell._params.items():
        if param is not None:
            for part, x in zip(parts.values(), cut(param, list(cell.parts.values()))):
                part._params[which] = x
    before = dict(holder._cells)  # in the order in which their parameters are listed
    holder._cells.clear()
    for name, inside in before.items():
        holder._cells.update(parts if name == key else {name: inside})
    try:
        yield
    finally:
        holder._cells.clear()
        holder._cells.update(before)


class Apart:
    """What an object tells of its state by the names of parameters, by those of the parts, for a checkpoint.

    Args:
        told: a model or its stages' schedule: tensors by name; or an optimizer: of each name what it keeps.
        parts: of `parts_of`.
    """

    def __init__(self, told: Any, parts: Mapping[str, Mapping[str, int]]):
        self.told, self.parts = told, parts

    def state_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, state in self.told.state_dict().items():
            rows = self.parts.get(name)
            if rows is None:
                out[name] = state
            elif isinstance(state, Tensor):
                out |= dict(zip(rows, cut(state, list(rows.values()))))
            else:
                kinds = {kind: cut(x, list(rows.values())) if isinstance(x, Tensor) else [x] * len(rows)
                         for kind, x in state.items()}
                out |= {part: {kind: values[i] for kind, values in kinds.items()} for i, part in enumerate(rows)}
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Tensors have been read into their places; numbers are told to the object."""
        whole = self.told.state_dict()
        for name, kept in whole.items():
            first = state[next(iter(self.parts.get(name, {name: 0})))]
            if isinstance(kept, dict):
                kept.update((kind, x) for kind, x in first.items() if not isinstance(x, Tensor))
        if not isinstance(self.told, nn.Cell):
            self.told.load_state_dict(whole)
