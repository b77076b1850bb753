# SPDX-License-Identifier: Apache-2.0
"""A program's state as a flat table: key -> tensor or plain value; and back into the program, in place.

Keys are names joined by dots, as `Cell.parameters_dict()` has them. Cells bring their parameters and persistent buffers,
MindSpore's optimizers what they keep beside the parameters that they step; whatever has `state_dict`
and `load_state_dict` brings that. Invariant: a tensor is written once, however many names it has, and a load writes
into the storage that is there.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.experimental.optim import Optimizer

from ..core.layout import Layout
from ..dispatch.memo import Memo
from ..dispatch.operands import dtype_name
from ..errors import CheckpointError
from ..internals.names import NoFallbackGuard
from ..internals.target import on_cpu
from ..optim.arrays import local_view
from .safetensors_file import CODES, DTYPES

Value = None | bool | int | float | str
MAX_NUMBER = 10 ** 1000  # what `load` reads
PARTIAL_FIX = "x.reduce_partial(), or x.redistribute(placements=[Shard(0), ...]), and save what it returns"


class Leaf:
    """A tensor of the state: a DTensor, a plain tensor or an array.

    Attributes:
        shape: the global shape.
        dtype: its name, as in a `Layout`.
        layout: of a DTensor, else None.
    """

    def __init__(self, key: str, tensor: Any):
        self.key, self.tensor = key, tensor
        self.layout: Layout | None = getattr(tensor, "_layout", None)
        if isinstance(tensor, Tensor):
            self.shape = tuple(tensor.shape)
            self.dtype = dtype_name(tensor.dtype) if self.layout is None else self.layout.dtype
        else:
            self.shape, self.dtype = tuple(tensor.shape), tensor.dtype.name

    def describe(self) -> str:
        """As messages print it."""
        return f"{self.dtype}{list(self.shape)}" if self.layout is None else self.layout.describe()

    @property
    def pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dim the runs of rows that are here."""
        return tuple(((0, n),) for n in self.shape) if self.layout is None else self.layout.pieces()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[CODES[self.dtype]].itemsize

    def here(self) -> bool:
        """Whether this rank has some of it."""
        return math.prod(self.shape) > 0 if self.layout is None else (
            self.layout.mesh.get_coordinate() is not None and math.prod(self.layout.local_shape()) > 0)

    def array(self) -> np.ndarray:
        """What is here of it, not to be written; a view where that can be."""
        if not isinstance(self.tensor, Tensor):
            plain = np.asarray(self.tensor)  # a matrix has two dims whatever one does
            return plain if plain.dtype.isnative else plain.astype(plain.dtype.newbyteorder("="))
        with NoFallbackGuard():
            return _known(Tensor.asnumpy(self.tensor)).reshape(tuple(self.tensor._shape))

    def target(self) -> tuple[np.ndarray, bool]:
        """An array to load into, and whether it is the storage itself; if not, `store` puts it there."""
        if not isinstance(self.tensor, Tensor):
            if self.tensor.flags.writeable:
                return np.asarray(self.tensor), True
            raise CheckpointError(f"For 'load', the array '{self.key}' cannot be written.", self.describe(),
                                  "A load writes into what is there.", "pass a copy of it")
        shape = tuple(self.tensor._shape)
        view = local_view(self.tensor) if on_cpu() else None
        if view is not None:
            return _known(view).reshape(shape), True
        return np.empty(shape, DTYPES[CODES[self.dtype]]), False

    def store(self, array: np.ndarray) -> None:
        """Puts values into the tensor's storage."""
        with NoFallbackGuard():
            value = Tensor(array.astype(np.float32)).astype(self.tensor.dtype) if self.dtype == "bfloat16" else \
                Tensor(np.ascontiguousarray(array))
            if on_cpu():
                Tensor.assign_value(self.tensor, value)
            else:
                Tensor.copy_(self.tensor, value)

    def loaded(self) -> None:
        """What was derived from the old values goes."""
        memo = getattr(self.tensor, "_memo", None)
        if isinstance(memo, Memo):
            memo.forget_values()


class State:
    """A program's state.

    Args:
        state: nested dicts, lists and tuples of tensors, arrays, numbers, texts, Cells, optimizers and other objects that
            tell their state.
        who: the function that was called, for messages.

    Attributes:
        tensors: by key, in an order that follows from the keys alone (a dict may be made from a set, whose order differs by
            process); a tensor with several names is under the first of them.
        values: plain values by key, likewise.
        whole: the keys of those that stand in a NumPy integer.
        tied: further names -> the first one.
        objects: what told its own state, by key.

    Raises:
        CheckpointError: something that has no place in a checkpoint.
    """

    def __init__(self, state: Any, who: str):
        self.who = who
        self.tensors: dict[str, Leaf] = {}
        self.values: dict[str, Value] = {}
        self.whole: set[str] = set()
        self.tied: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self._of: dict[int, str] = {}
        self._above: set[int] = set()  # what the node at hand is in
        self._told: dict[int, Any] = {}  # what objects told of themselves, by id of the object; kept until `restore`
        self._root = state
        if not isinstance(state, Mapping | list | tuple) and _told_by(state) is None:
            raise CheckpointError(f"For '{who}', 'state' is a {type(state).__name__}.", "",
                                  "A state has names.", f"{who}({{'name': value}}, path)")
        self._walk(state, "")
        self._sort()

    def restore(self, values: Mapping[str, Value]) -> None:
        """Puts plain values back by key, and tells objects what they told; tensors have been written already."""
        self._put(self._root, "", values)

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _walk(self, node: Any, key: str) -> None:
        if id(node) in self._above:
            raise CheckpointError(f"For '{self.who}', the state{_at(key)} is in itself.", "", "A checkpoint is a tree.",
                                  "leave one of the two out")
        told = _told_by(node)
        if told is not None:
            self._told[id(node)], self.objects[key] = told, node
        if told is not None or isinstance(node, Mapping | list | tuple):
            self._above.add(id(node))
            self._walk_into(node if told is None else told, key)
            self._above.discard(id(node))
        else:
            self._leaf(node, key)

    def _walk_into(self, node: Any, key: str) -> None:
        if isinstance(node, Mapping):
            for name, child in node.items():
                if not isinstance(name, str | int) or isinstance(name, bool):
                    raise CheckpointError(f"For '{self.who}', a dict{_at(key)} has the key {name!r}.", "",
                                          "Keys are texts or whole numbers.", "name it by a text")
                self._walk(child, _join(key, name))
        else:
            for i, child in enumerate(node):
                self._walk(child, _join(key, i))

    def _sort(self) -> None:
        names: dict[str, list[str]] = {key: [key] for key in self.tensors}
        for alias, first in self.tied.items():
            names[first].append(alias)
        self.tied = {}
        tensors = {}
        for old, keys in names.items():
            first, *others = sorted(keys, key=key_order)
            tensors[first] = self.tensors[old]
            tensors[first].key = first
            self.tied |= dict.fromkeys(others, first)
        self.tensors = {key: tensors[key] for key in sorted(tensors, key=key_order)}
        self.values = {key: self.values[key] for key in sorted(self.values, key=key_order)}
        self.tied = {key: self.tied[key] for key in sorted(self.tied, key=key_order)}

    def _leaf(self, node: Any, key: str) -> None:
        if isinstance(node, np.integer):
            self.whole.add(key)
        if isinstance(node, np.generic):
            node = node.item()
        if isinstance(node, Tensor | np.ndarray):
            self._add(key, node)
        elif node is None or isinstance(node, bool | int | float | str):
            self._once(key)
            if isinstance(node, int) and abs(node) >= MAX_NUMBER:
                raise CheckpointError(f"For '{self.who}', '{key}' is a number of {node.bit_length()} bits.", "",
                                      "A checkpoint has numbers of at most 1000 digits.", "save it as an array of bytes")
            self.values[key] = node
        else:
            raise CheckpointError(
                f"For '{self.who}', '{key}' is a {type(node).__module__}.{type(node).__qualname__}.", "",
                "A checkpoint has tensors, arrays, numbers, texts, booleans, None, dicts and lists of these, Cells, "
                "optimizers, and objects with state_dict() and load_state_dict(): nothing that could be code.",
                "give it state_dict() and load_state_dict(), or save what it is made of")

    def _add(self, key: str, tensor: Any) -> None:
        self._once(key)
        first = self._of.setdefault(id(tensor), key)
        if first != key:
            self.tied[key] = first
            return
        leaf = Leaf(key, tensor)
        if isinstance(tensor, np.ma.MaskedArray):
            raise CheckpointError(f"For '{self.who}', '{key}' is a masked array.", leaf.describe(), "Files have no masks.",
                                  "save x.filled(0) and np.ma.getmaskarray(x)")
        if leaf.dtype not in CODES:
            raise CheckpointError(f"For '{self.who}', the tensor '{key}' is {leaf.dtype}.", leaf.describe(),
                                  "Safetensors files have " + ", ".join(CODES) + ".",
                                  "save its real and imaginary part" if "complex" in leaf.dtype else "convert it")
        if leaf.layout is not None and leaf.layout.has_partial():
            raise CheckpointError(f"For '{self.who}', the tensor '{key}' is Partial.", leaf.describe(),
                                  "A checkpoint holds values, and each rank has a summand only.", PARTIAL_FIX)
        self.tensors[key] = leaf

    def _once(self, key: str) -> None:
        if key in ("", "__metadata__") or not key.isascii() and key != key.encode(errors="replace").decode():
            rule = "What is in a state has a name." if not key else "Safetensors files keep that name for themselves." if \
                key == "__metadata__" else "Names are texts that UTF-8 can hold."
            raise CheckpointError(f"For '{self.who}', something is called {ascii(key)}.", "", rule, "give it another name")
        if key in self.tensors or key in self.values or key in self.tied:
            raise CheckpointError(f"For '{self.who}', two things are called '{key}'.", "",
                                  "Names of nested dicts are joined by dots.", "rename one of them")

    def _put(self, node: Any, key: str, values: Mapping[str, Value]) -> Any:
        """The node with its values replaced; dicts, lists and objects in place."""
        told = self._told.get(id(node))
        if told is not None:
            new = self._put(told, key, values)
            if not isinstance(node, nn.Cell):
                node.load_state_dict(new)
            return node
        if isinstance(node, Mapping):
            for name, child in list(node.items()):
                new = self._put(child, _join(key, name), values)
                if new is not child:
                    node[name] = new  # type: ignore[index]
            return node
        if isinstance(node, list | tuple):
            items = [self._put(child, _join(key, i), values) for i, child in enumerate(node)]
            if isinstance(node, tuple):
                same = all(a is b for a, b in zip(items, node))
                return node if same else type(node)(*items) if hasattr(node, "_fields") else tuple(items)
            node[:] = items
            return node
        if key not in self.values or key not in values:
            return node
        return type(node)(values[key]) if isinstance(node, np.generic) else values[key]


def _told_by(node: Any) -> dict | None:
    """What an object tells of its state, by name; None of other things."""
    if isinstance(node, nn.Optimizer):
        stepped = {id(p) for p in node._parameters}
        return {p.name: p for p in node.get_parameters() if id(p) not in stepped}
    if isinstance(node, nn.Cell):
        told = dict(node.state_dict())
        if isinstance(node, Optimizer):  # NAdam and ASGD keep numbers in lists, which no Cell names; rates are options
            told |= {p.name: p for name, kept in vars(node).items() if isinstance(kept, list) and name != "lrs"
                     for p in kept if isinstance(p, Parameter)}
        return told
    if not isinstance(node, type | Mapping | Tensor) and hasattr(node, "state_dict") and hasattr(node, "load_state_dict"):
        return dict(node.state_dict())
    return None


def key_order(key: str) -> list[tuple[int, int, str]]:
    """By which keys are sorted: layer 2 comes before layer 10."""
    return [(0, int(part), part) if part.isdecimal() and len(part) < 20 else (1, 0, part) for part in key.split(".")]


def _join(key: str, name: str | int) -> str:
    return f"{key}.{name}" if key else str(name)


def _at(key: str) -> str:
    return f" at '{key}'" if key else ""


def _known(array: np.ndarray) -> np.ndarray:
    """The array with the dtype of `ml_dtypes` in place of MindSpore's own of that name."""
    wanted = getattr(ml_dtypes, array.dtype.name, None) if array.dtype.isbuiltin != 1 else None
    if wanted is None or not array.size:
        return array if wanted is None else np.empty(array.shape, wanted)
    return array.view(wanted) if array.flags.c_contiguous else np.ascontiguousarray(array).view(wanted)


