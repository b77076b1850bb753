# SPDX-License-Identifier: Apache-2.0
"""Class labels out of range, refused by all ranks alike, also where only some hold the row; see `parallel/loss.py`."""
from __future__ import annotations

import mindspore as ms
import numpy as np

from ..internals.target import on_cpu
from ..ops.local.lookup import host_values
from .operands import dtype_name


def looked_up(labels):
    """Labels of any integer dtype in one that lookups take: they know int32 and int64 alone."""
    dtype = dtype_name(labels.dtype)
    if dtype in ("int32", "int64") or not dtype.lstrip("u").startswith("int"):
        return labels
    return labels.astype(ms.int64 if dtype in ("uint32", "uint64") else ms.int32)


def check_labels(who: str, labels, classes: int, ignore_index: int, least: int = 0) -> None:
    """On CPU, where values are at hand, raises if a label that counts is not in [least, classes).

    Ranks that hold different labels tell each other, by one all-reduce of two numbers.

    Raises:
        IndexError: the same on every rank; it names the greatest such label.
    """
    layout = labels._layout
    mesh = layout.mesh
    if not on_cpu() or mesh.get_coordinate() is None or layout.has_partial():
        return
    values = host_values(labels)
    wrong = values[((values < least) | (values >= classes)) & (values != ignore_index)]
    told = np.array([wrong.size > 0, max(wrong, default=np.iinfo(np.int64).min)], np.int64)
    axes = tuple(a for a in range(mesh.ndim) if layout.placements[a].is_shard() and mesh.shape[a] > 1)
    if axes:
        told = mesh.get_group(axes).all_reduce(ms.Tensor(told), "max").asnumpy()
    if told[0]:
        raise IndexError(f"For '{who}', label {told[1]} is out of range [{least}, {classes}) of the classes, and it is not "
                         f"'ignore_index', {ignore_index}.")
