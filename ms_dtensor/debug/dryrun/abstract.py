# SPDX-License-Identifier: Apache-2.0
"""Tensors with a shape, a dtype and no data; and how many bytes the real ones would be, from birth to death.

All elements of such a tensor are one number: its strides are 0, so any shape costs a few bytes, and what asks a tensor for
its shape works. A storage has two numbers, and views of what was made on it are on the second: so who meets a tensor knows
whether it is one. It lives as long as its storage: that of a NumPy array, which notes its own end, so lifetimes are Python's
and autograd's own. Not here: which op makes what.
"""
from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint
from mindspore.ops.auto_generate import as_strided

from ...comm.packing import numpy_dtype
from ...dispatch.operands import DIFFERENTIABLE, dtype_name
from .pool import Pool

_MOST = 2**31 - 1
_NOTHING: dict[str, np.ndarray] = {}
KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers")


class Change(NamedTuple):
    """Of the memory: so many bytes more (or fewer) of a kind, once so many events had happened; and who has handed it out.

    On a host these are MindSpore's "pool" of results, the "heap" of NumPy and of what stays, and what ranks share:
    "windows", and blocks of each size for itself.
    """

    at: int
    kind: str
    bytes: int
    where: str = "pool"


class _Storage(np.ndarray):
    """The numbers behind a tensor without data; when nothing lies on it any more, the ledger is told."""

    ledger: Any = None
    address = 0
    place: int | None = None  # in the pool
    ending = staticmethod(sys.is_finalizing)  # of the interpreter: names of modules are gone then

    def __del__(self):
        if self.ledger is not None and not self.ending():
            self.ledger.ended(self.address, self.place)


class Ledger:
    """What is alive, by kind, and how it came to that.

    Attributes:
        events: grows as things happen; its length is the time.
    """

    def __init__(self, events: list):
        self.events = events
        self.alive: dict[tuple[str, str], int] = {}  # by kind and by who has handed it out
        self.changes: list[Change] = []
        self.held: dict[int, list] = {}  # address of what is alive -> [kind, bytes, the event that made it, where]
        self.pool = Pool()
        self.kernels: dict[tuple, int] = {}  # by op and shape, what MindSpore's kernel keeps from its first run on

    def new(self, shape, dtype, kind: str, made_by: int = -1, where: str = "") -> Tensor:
        """A tensor without data; `dtype` is MindSpore's, `where` as in `Change`, by default by the kind."""
        shape = tuple(shape)
        storage = nothing(dtype)
        size = math.prod(shape) * storage.itemsize
        where = where or ("heap" if kind in ("parameters", "optimizer") else "pool")
        return on_storage_of(Tensor.from_numpy(self.watched(storage, kind, size, made_by, where)), shape)

    def watched(self, array: np.ndarray, kind: str, size: int, made_by: int = -1, where: str = "heap") -> np.ndarray:
        """An array that counts as so many bytes until nothing lies on it any more."""
        out = array.view(_Storage)
        out.ledger, out.address = self, out.__array_interface__["data"][0]
        self.held[out.address] = [kind, size, made_by, where]
        if where == "pool":
            out.place = self.pool.take(size)
        self.change(kind, size, where)
        return out

    def place(self, shape, dtype) -> Tensor:
        """A tensor without data on memory whose bytes others count; it can be written more than once."""
        return on_storage_of(Tensor.from_numpy(self.watched(nothing(dtype), "gathered", 0)), shape)

    def written(self, x: Tensor, event: int) -> None:
        """An event makes anew what a tensor lies on."""
        self._of(x)[2] = event

    def ended(self, address: int, place: int | None) -> None:
        """Nothing lies on a storage any more."""
        kind, size, _, where = self.held.pop(address)
        if place is not None:
            self.pool.give(place)
        self.change(kind, -size, where)

    def is_now(self, x: Tensor, kind: str) -> Tensor:
        """What a tensor lies on is of another kind from here on."""
        held = self._of(x)
        if held is not None and held[0] != kind:
            self.change(held[0], -held[1], held[3])
            self.change(kind, held[1], held[3])
            held[0] = kind
        return x

    def kind_of(self, x: Tensor) -> str:
        """Of what a tensor lies on; what was made elsewhere is no part of the memory that is counted."""
        held = self._of(x)
        return "activations" if held is None else held[0]

    def change(self, kind: str, size: int, where: str) -> None:
        """So many bytes more, or fewer."""
        if size:
            self.alive[kind, where] = self.alive.get((kind, where), 0) + size
            self.changes.append(Change(len(self.events), kind, size, where))

    def forget(self) -> None:
        """What is alive was there from the beginning, and nobody made it."""
        self.changes[:] = [Change(0, kind, size, where) for (kind, where), size in self.alive.items() if size]
        for held in self.held.values():
            held[2] = -1

    def maker(self, x: Tensor) -> int:
        """The event that made what a tensor lies on; -1: none of this run."""
        held = self._of(x)
        return -1 if held is None else held[2]

    def has(self, x: Tensor) -> bool:
        """Whether it lies on what is counted here."""
        return self._of(x) is not None

    def is_view(self, x: Tensor) -> bool:
        """Whether it was made as a view."""
        address = Tensor.data_ptr(x)
        return address not in self.held and address - x.itemsize in self.held

    def _of(self, x: Tensor) -> Any:
        address = Tensor.data_ptr(x)
        return self.held.get(address) or self.held.get(address - x.itemsize)


def on_storage_of(x: Tensor, shape, view: bool = False) -> Tensor:
    """A tensor of any shape on the storage of one without data, as what was made there or as a view; not recorded."""
    shape = tuple(shape)
    if x.__class__ is not Tensor:
        x = Tensor._make_subclass(Tensor, x)
    if max(shape, default=0) > _MOST:  # which `as_strided` takes for a negative one
        return mint.broadcast_to(as_strided(x, (), (), int(view)), shape)
    return as_strided(x, shape, (0,) * len(shape), int(view))


def nameless(shape, dtype) -> Tensor:
    """A tensor without data that stands for no memory."""
    return on_storage_of(Tensor.from_numpy(nothing(dtype)), shape)


def nothing(dtype) -> np.ndarray:
    """[2]: what a value that nobody knows reads as: NaN, so that a loss that is printed is no number; 0 of integers."""
    name = dtype_name(dtype)
    if name not in _NOTHING:  # kept: of bfloat16 MindSpore takes 2 ms to make a number, and a dry run has thousands
        _NOTHING[name] = np.full(2, np.nan if name.startswith(DIFFERENTIABLE) else 0, numpy_dtype(dtype))
    return _NOTHING[name].copy()


def dtype_of(name: str) -> Any:
    """MindSpore's dtype of that name."""
    return getattr(ms, "bool_" if name == "bool" else name)


def nbytes(dtype) -> int:
    """Of one element of MindSpore's dtype."""
    return nbytes_of(dtype_name(dtype))


def nbytes_of(name: str) -> int:
    """Of one element of the dtype of this name."""
    name = name.lower()
    return 1 if name == "bool" else max(int("".join(c for c in name if c.isdigit()) or 32) // 8, 1)


def differentiable(x) -> bool:
    """Whether a tensor may have a gradient, by its dtype."""
    return dtype_name(x.dtype).startswith(DIFFERENTIABLE)
