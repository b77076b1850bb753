# SPDX-License-Identifier: Apache-2.0
"""The table of `docs/mindspore_surface.md`: rows are programs of a MindSpore user, columns are kinds of parallelism.

A row is a function that trains, saves or asks something and returns what it saw. It runs on plain MindSpore (`Plain`) and
then in each column; every tensor it returns must have the one-device values, dtype and shape, on every rank, or the
column must refuse with one of our errors, the same on every rank, and the row must say why.
"""
from __future__ import annotations

import importlib
import os
import pkgutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, Replicate, RowwiseParallel, SequenceParallel, Shard
from ms_dtensor.errors import DTensorError
from tests.msrun import REPORTS

SHAPES = {"replicate": {"dp": 4}, "tp": {"tp": 4}, "dp x tp, sp": {"dp": 2, "tp": 2}, "fsdp": {"dp": 4},
          "fsdp x tp, sp": {"dp": 2, "tp": 2}, "one rank": {"dp": 1, "tp": 1}}
COLUMNS = {4: ("replicate", "tp", "dp x tp, sp", "fsdp", "fsdp x tp, sp"), 1: ("one rank",)}  # by world size
RTOL = 2e-5  # float32: sums in another order, over 5 steps


@dataclass(frozen=True)
class Row:
    """One program; `refused` gives the reason by column ("*": every column) where a refusal is right."""

    group: str
    name: str
    fn: Callable
    refused: dict[str, str] = field(default_factory=dict)
    rtol: float = RTOL

    def reason(self, column: str) -> str | None:
        return self.refused.get(column, self.refused.get("*"))


ROWS: list[Row] = []


def row(group: str, name: str, *, refused: str | dict[str, str] | None = None, rtol: float = RTOL) -> Callable:
    """Adds a program to the table, see `asked`; a looser `rtol` needs a comment that says why."""
    if isinstance(refused, str):
        refused = {"*": refused}

    def add(fn: Callable) -> Callable:
        ROWS.append(Row(group, name, fn, refused or {}, rtol))
        return fn
    return add


def rows(group: str, programs: dict[str, Callable], **options) -> None:
    """Adds programs by name."""
    for name, fn in programs.items():
        row(group, name, **options)(fn)


def asked(fn: Callable, setup: Plain):
    """What a program returns; it is given what its parameters ask for: `s`, or `net` and `x`, `y` of the setup."""
    names = [name for name, parameter in signature(fn).parameters.items() if parameter.default is parameter.empty]
    made = {"s": setup, "net": setup.net() if "net" in names else None}
    if "x" in names:
        made["x"], made["y"] = setup.batch()
    return fn(*(made[name] for name in names))


def all_rows() -> list[Row]:
    """Every row of the modules `rows_*`, in their order."""
    package = importlib.import_module("tests.surface")
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("rows_"):
            importlib.import_module(f"tests.surface.{info.name}")
    return ROWS


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Net(nn.Cell):
    """The model of most rows: a residual feed-forward block and a head, 7 -> 5, on [batch, sequence, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = nn.LayerNorm((7,)), nn.Dense(7, 12), nn.Dense(12, 7), nn.Dense(7, 5)

    def construct(self, x):
        x = x + self.down(ms.ops.tanh(self.up(self.norm(x))))
        return self.head(x)


def seeded(cell: nn.Cell, seed: int = 0) -> nn.Cell:
    """Asymmetric random values for every parameter."""
    for i, (_, p) in enumerate(cell.parameters_and_names()):
        if p.dtype.is_floating_point:
            p.set_data(Tensor(random(1000 * seed + i, *p.shape) * 0.4, p.dtype))
    return cell


class Plain:
    """One device: everything as MindSpore has it."""

    column, mesh, dp = "one device", None, None

    def net(self, cell: nn.Cell | None = None, plan: dict | None = None) -> nn.Cell:
        """The cell (default: `Net`, with values of its own) laid out as the column says.

        Args:
            plan: styles on the axis "tp" by pattern, for a cell that is not `Net`; without one its parameters are
                replicated there.
        """
        return cell if cell is not None else seeded(Net())

    def data(self, array: np.ndarray, dtype=None):
        """A batch: dim 0 is cut over "dp" where there is one."""
        return Tensor(array, dtype)

    def sequence(self, array: np.ndarray, dtype=None):
        """A batch of sequences: as `data`, and dim 1 is cut over "tp" under sequence parallelism."""
        return Tensor(array, dtype)

    def whole(self, array: np.ndarray, dtype=None):
        """The same on every rank."""
        return Tensor(array, dtype)

    def batch(self):
        """Inputs [8, 4, 7] and targets [8, 4, 5] for `Net`."""
        return self.sequence(random(1, 8, 4, 7)), self.sequence(random(2, 8, 4, 5))

    def mine(self, array: np.ndarray) -> np.ndarray:
        """This rank's rows of a batch, as a dataset sharded over "dp" gives them."""
        return array


class Laid(Plain):
    """A mesh of the column's kind."""

    def __init__(self, column: str) -> None:
        self.column = column
        shape = SHAPES[column]
        self.mesh = md.init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        self.dp = self.mesh["dp"] if "dp" in shape else None
        self.tp = self.mesh["tp"] if "tp" in shape else None
        self.sequence_parallel = self.tp is not None and self.dp is not None

    def net(self, cell=None, plan=None):
        if cell is None:
            cell, plan = seeded(Net()), self.plan()
        if self.tp is not None:
            md.parallelize_module(cell, self.tp, plan or {})
            md.distribute_module(cell, self.tp)  # what the plan does not name: replicated
        if self.dp is None:
            return cell
        if not self.column.startswith("fsdp"):
            return md.replicate(cell, mesh=self.dp)
        for inner in (cell.up, cell.down) if isinstance(cell, Net) else ():
            md.fully_shard(inner, mesh=self.dp)
        return md.fully_shard(cell, mesh=self.dp)

    def plan(self) -> dict:
        """The plan of `Net`."""
        if self.tp is None:
            return {}
        if not self.sequence_parallel:
            return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
        return {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}

    def _lay(self, array, dtype, **placements):
        names = {a: p for a, p in placements.items() if a in self.mesh.mesh_dim_names}
        return md.distribute_tensor(Tensor(array, dtype), self.mesh, names, src_data_rank=None)

    def data(self, array, dtype=None):
        return self._lay(array, dtype, dp=Shard(0))

    def sequence(self, array, dtype=None):
        return self._lay(array, dtype, dp=Shard(0), tp=Shard(1) if self.sequence_parallel else Replicate())

    def whole(self, array, dtype=None):
        return self._lay(array, dtype)

    def mine(self, array):
        if self.dp is None:
            return array
        return np.array_split(array, self.dp.size())[self.dp.get_local_rank()]


# -- one cell -------------------------------------------------------------------------------------------------------------
def differs(got, want, rtol: float, where: str = "result") -> str | None:
    """The first difference between two results, trees of tensors, arrays, numbers and texts; None if they are equal."""
    if isinstance(want, dict):
        if not isinstance(got, dict) or list(got) != list(want):
            return f"{where}: {got if not isinstance(got, dict) else list(got)} for {list(want)}"
        return next(filter(None, (differs(got[k], want[k], rtol, f"{where}[{k!r}]") for k in want)), None)
    if isinstance(want, tuple | list):
        if not isinstance(got, tuple | list) or len(got) != len(want):
            return f"{where}: {type(got).__name__} for {len(want)} results"
        return next(filter(None, (differs(g, w, rtol, f"{where}[{i}]") for i, (g, w) in enumerate(zip(got, want)))), None)
    if not isinstance(want, Tensor | np.ndarray | float | int | np.generic) or isinstance(want, bool):
        return None if got == want else f"{where}: {got!r} for {want!r}"
    if isinstance(want, Tensor) and not isinstance(got, Tensor):
        return f"{where}: {type(got).__name__} for a Tensor"
    if isinstance(want, Tensor) and (got.dtype != want.dtype or tuple(got.shape) != tuple(want.shape)):
        return f"{where}: {got.dtype}{tuple(got.shape)} for {want.dtype}{tuple(want.shape)}"
    a, b = _array(got), _array(want)
    if a.shape != b.shape:
        return f"{where}: shape {a.shape} for {b.shape}"
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return f"{where}: not finite in other places"
    a, b = np.where(np.isfinite(a), a, 0), np.where(np.isfinite(b), b, 0)
    off = float(np.abs(a - b).max(initial=0)) / max(float(np.abs(b).max(initial=0)), 1e-6)
    return f"{where}: off by {off:.1e} of the largest element" if off > rtol else None


def _array(x) -> np.ndarray:
    if isinstance(x, DTensor):
        x = x.full_tensor()
    if isinstance(x, Tensor):
        x = (x.float() if x.dtype == ms.bfloat16 else x).asnumpy()
    return np.asarray(x).astype(np.float64)


def shared_path(s, name: str) -> str:
    """A file that all ranks of a mesh see; on one device each rank has its own."""
    where = "one-device-" + os.environ.get("RANK_ID", "0") if s.mesh is None else s.column.replace(" ", "-")
    folder = Path(os.environ.get(REPORTS, tempfile.gettempdir())) / "surface" / where
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / name)


def values(net: nn.Cell) -> dict:
    """Every parameter by name as it is now, for a row to return."""
    return {name: Tensor(p.asnumpy()) if not isinstance(p, DTensor) else DTensor.clone(p)
            for name, p in net.parameters_and_names()}


def run(one: Row, setup: Plain, want) -> dict:
    """One cell: {"state": "equal" | "refused" | "wrong" | "raw", "text": ...}."""
    try:
        got = asked(one.fn, setup)
        difference = differs(got, want, one.rtol)
        return {"state": "wrong" if difference else "equal", "text": difference or ""}
    except DTensorError as e:
        return {"state": "refused", "text": f"{type(e).__name__}: {e}"}
    except Exception:  # whatever else a cell raises is what the table is there to show
        return {"state": "raw", "text": traceback.format_exc(limit=-4)}


def reference(one: Row):
    """What one device answers."""
    return asked(one.fn, Plain())
