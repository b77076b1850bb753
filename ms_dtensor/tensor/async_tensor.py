# SPDX-License-Identifier: Apache-2.0
"""A DTensor whose data are under way: what `redistribute(async_op=True)` returns where the backend can do that.

Everything that reads a DTensor asks for its `_layout` first, which is the moment to wait. After that the object is an
ordinary DTensor, so those who never use `async_op` pay nothing. What is known without the data does not wait.
"""
from __future__ import annotations

from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..dispatch import classes


class AsyncData:
    """Mixed into DTensor: waits on first use, then is a DTensor."""

    __slots__ = ()

    @property
    def _layout(self) -> Layout:
        held = self.__dict__
        self.__class__ = classes.DTENSOR  # first: an error is raised once, here
        memo = held["_memo"]
        work, memo.work = memo.work, None
        work.wait()
        return held["_layout"]

    def __fallback__(self, func, args=(), kwargs=None):
        self._layout  # noqa: B018  also where dispatch is switched off
        return self.__fallback__(func, args, kwargs)  # the class's own by now

    @property
    def layout(self) -> Layout:
        return self.__dict__["_layout"]

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.layout.mesh

    @property
    def placements(self) -> tuple:
        return self.layout.placements

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape
