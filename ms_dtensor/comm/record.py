# SPDX-License-Identifier: Apache-2.0
"""The recorder: every communication can be listed, with the line of the user's code that caused it.

Not a profiler. `Group` reports each collective here; upper layers say with `annotate` why it happened (phase, implicit
or asked for, which layouts). The invariant: with no recorder active a collective pays one contextvar read, no more.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One communication as one rank saw it.

    Attributes:
        op: the collective ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter",
            "exchange", "barrier", "all_gather_object", "broadcast_object").
        axes: the mesh axes it ran over; empty when it was not over a mesh.
        group: the global ranks, in group order.
        shape: shape of the tensor this rank passed in.
        dtype: its dtype, as MindSpore prints it ("Float32").
        bytes: payload bytes this rank gives to *other* ranks under the usual ring algorithm.
        site: "file:line" of the user's code.
        phase: "forward" or "backward".
        implicit: the library decided it; the user did not ask.
        src: layout before, as text.
        dst: layout after, as text.
        seconds: host time of the call (for an async call: until it was handed over).
        start: when it began, on the monotonic clock that all processes of a host share.
        module: the cell it happened in, where a `CommDebugMode` names cells; of a backward, the cell of its forward.
    """

    op: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str
    phase: Phase = "forward"
    implicit: bool = False
    src: str = ""
    dst: str = ""
    seconds: float = 0.0
    start: float = 0.0
    module: str = ""


class Note(NamedTuple):
    """What upper layers know about the communication in progress."""

    phase: Phase = "forward"
    implicit: bool = False
    src: str = ""
    dst: str = ""
    axes: tuple[str, ...] | None = None
    site: str | None = None
    module: str = ""
    of: str = ""  # whose data: a part of the call that ranks compare


_recorders: ContextVar[tuple[list[CommEvent], ...]] = ContextVar("ms_dtensor_recorders", default=())
_note: ContextVar[Note] = ContextVar("ms_dtensor_comm_note", default=Note())  # noqa: B039  immutable


def active() -> tuple[list[CommEvent], ...]:
    """The lists that want events; empty (falsy) when nobody records."""
    return _recorders.get()


def note() -> Note:
    """The annotation in force."""
    return _note.get()


@contextmanager
def record() -> Iterator[list[CommEvent]]:
    """Collects the communication of a block.

    Example:
        >>> with record() as events:
        ...     pass
        >>> events
        []
    """
    events: list[CommEvent] = []
    with record_into(events):
        yield events


@contextmanager
def record_into(events: list[CommEvent]) -> Iterator[None]:
    """Appends the communication of a block to a list."""
    token = _recorders.set((*_recorders.get(), events))
    try:
        yield
    finally:
        _recorders.reset(token)


class annotate:  # noqa: N801  reads as a verb at the call; a class because a generator costs three times as much
    """States the reason of the communication inside a block; fields not named keep the outer annotation.

    Args:
        **fields: any of `Note`'s fields.
    """

    __slots__ = ("_fields", "_token")

    def __init__(self, **fields: Any):
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _note.set(_note.get()._replace(**self._fields))

    def __exit__(self, *exc: object) -> None:
        _note.reset(self._token)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_foreign: dict[str, bool] = {}  # file name -> is it neither ours nor MindSpore's


def _is_user_file(name: str) -> bool:
    path = os.path.abspath(name)
    known = _foreign[name] = not (path.startswith(_PACKAGE) or f"{os.sep}mindspore{os.sep}" in path
                                  or name.startswith("<frozen") or path.endswith(f"{os.sep}contextlib.py"))
    return known


def is_user_file(name: str) -> bool:
    """Whether code of this file is neither ours nor MindSpore's."""
    known = _foreign.get(name)
    return _is_user_file(name) if known is None else known


def user_frame() -> FrameType | None:
    """The innermost frame outside ms_dtensor and mindspore."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_site() -> str:
    """ "file:line" of the user's frame, or the site saved by `annotate`."""
    saved = _note.get().site
    if saved is not None:
        return saved
    frame = user_frame()
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
