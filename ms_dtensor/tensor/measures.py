# SPDX-License-Identifier: Apache-2.0
"""How large a DTensor is and how it lies in memory: answers for the global tensor, the same on all ranks."""
from __future__ import annotations

import math
from typing import Any

from ..core.layout import layout_strides
from ..dispatch import views


class _Size(int):
    """MindSpore's `size` is a number, PyTorch's a method; this is both."""

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]


class Measures:
    """A part of the class DTensor."""

    __slots__ = ()
    shape: Any
    itemsize: Any

    @property
    def size(self) -> _Size:
        """`x.size(dim)` as in PyTorch, the global shape or one extent; as a number, MindSpore's element count."""
        out = _Size(math.prod(self.shape))
        out.shape = self.shape
        return out

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self.shape)

    nelement = numel

    def stride(self, dim: int | None = None):
        """Strides, in elements, of the global tensor; MindSpore's `strides` are the same in bytes. A view is refused."""
        views.refuse_view(self, "stride", "x.clone().stride(), of a contiguous copy", "x.view(shape), legal for any shape")
        out = layout_strides(self.shape)
        return out if dim is None else out[dim]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides, in bytes, of the global tensor."""
        return tuple(s * self.itemsize for s in self.stride())

    def is_contiguous(self) -> bool:
        """Whether the global tensor is; a view is refused, as `stride`."""
        views.refuse_view(self, "is_contiguous", "x.contiguous(), which copies only where it has to", "x.view(shape)")
        return True

    def storage_offset(self) -> int:
        """That of the global tensor; a view is refused, as `stride`."""
        views.refuse_view(self, "storage_offset", "x.clone(), which starts a storage of its own")
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.itemsize
