# SPDX-License-Identifier: Apache-2.0
"""Names for the cells that a block calls, so that communication can be told by cell.

While a block names cells, `nn.Cell.__call__` is one that annotates what is communicated inside the call (`comm.annotate`,
which a backward inherits from its forward); when the last block ends, MindSpore's own is back. A hook of each cell would
not do: the styles' hooks communicate too, and a call that raises runs no hook that closes it.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

from mindspore import Parameter, nn

from .. import comm
from ..comm.record import note
from ..dispatch.replaced import current
from ..internals.undo import Patched

_WRAPPED = "_backbone"  # the level that MindSpore's wrappers add; a plan does not spell it, so a name does not
_names: ContextVar[CellNames | None] = ContextVar("ms_dtensor_cell_names", default=None)
_installed, _users, _lock = Patched(), [0], Lock()


class CellNames:
    """Names of the cells called in a block.

    Below the model a cell goes by its path. The model itself, and a cell that is not part of it, goes by its class; a cell
    that another makes while it runs, or holds in a list of its own, by that one's name and its class.
    """

    def __init__(self, model: nn.Cell | None = None):
        self._known: dict[int, tuple[str, nn.Cell]] = {}  # holds the cells, too: it goes by identity
        self._called: dict[int, tuple[str, nn.Cell]] = {}
        self._path: dict[str, tuple[str, ...]] = {"": ()}
        self._kind: dict[str, str] = {"": ""}
        if model is not None:
            self._add(model, "")

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Names the cells called in a block."""
        with _lock:
            _users[0] += 1
            if _users[0] == 1:
                _installed.put(nn.Cell, "__call__", _named(nn.Cell.__call__))
        token = _names.set(self)
        try:
            yield
        finally:
            _names.reset(token)
            with _lock:
                _users[0] -= 1
                if not _users[0]:
                    _installed.take_back()

    def path(self, name: str) -> tuple[str, ...]:
        """The names of the cells above a cell, and its own; empty outside of all cells. Another block may have named it."""
        return self._path.get(name, (name,))

    def kind(self, name: str) -> str:
        """The class of a cell; empty where another block named it."""
        return self._kind.get(name, "")

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """The parameters that each of the cells called holds itself."""
        out: dict[str, dict[str, Parameter]] = {}
        for name, cell in self._called.values():
            out.setdefault(name, {}).update({key: current(p) for key, p in cell._params.items() if p is not None})
        return out

    def enter(self, cell: nn.Cell, outer: str) -> str:
        """The name of a cell that is called inside the one of name `outer`."""
        if id(cell) not in self._known:
            self._add(cell, outer)
        self._called.setdefault(id(cell), self._known[id(cell)])
        return self._known[id(cell)][0]

    def _add(self, top: nn.Cell, outer: str) -> None:
        """Names a cell and all below it."""
        is_model = not self._known
        first = f"{outer}.{type(top).__name__}" if outer else type(top).__name__
        alike = sum(name == first or name.startswith(f"{first} (") and "." not in name[len(first):] for name in self._path)
        first = f"{first} ({alike + 1})" if alike else first

        def name_of(levels: list[str]) -> str:
            return ".".join(levels if is_model and levels else [first, *levels])

        for path, cell in top.cells_and_names():
            levels = [level for level in path.split(".") if level and level != _WRAPPED]
            name = name_of(levels)
            self._known.setdefault(id(cell), (name, cell))
            self._kind.setdefault(name, type(cell).__name__)
            self._path.setdefault(name, (*self.path(outer), *(name_of(levels[:i]) for i in range(len(levels) + 1))))


def _named(call):
    def __call__(self, *args, **kwargs):  # noqa: N807
        names = _names.get()
        if names is None or getattr(type(self), "_ms_dtensor_unnamed", False):
            return call(self, *args, **kwargs)
        with comm.annotate(module=names.enter(self, note().module)):
            return call(self, *args, **kwargs)
    return __call__
