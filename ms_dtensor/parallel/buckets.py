# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: a data-parallel parameter keeps its gradient partial, and many are reduced in one all-reduce.

A parameter marked here asks for its cotangent still summed over nothing on the data-parallel axes (`Parameter` attribute
`deferred_axes`, honoured by `dispatch.face`). Its hook copies that gradient into a flat buffer and hands back a view of
it; the buffer is all-reduced when its last gradient arrived, or when the backward ends. So the views hold the reduced
gradient by the time the caller sees them, and the number of collectives does not grow with the number of parameters.
"""
from __future__ import annotations

import math

import mindspore as ms
from mindspore._c_expression import NoFallbackGuard
from mindspore.common.api import _pynative_executor

from .. import comm
from ..dispatch import DEFERRED
from ..redistribute.cost import nbytes


class Bucket:
    """Gradients of one dtype that are reduced together over one group.

    Args:
        params: DTensor Parameters, in the order in which the backward is expected to reach them.
        group: the ranks to sum over.
    """

    def __init__(self, params, group):
        self.group = group
        self.offsets, total = {}, 0
        for p in params:
            self.offsets[id(p)] = total
            total += math.prod(p.local_shape)
        self.total = total
        self.flat = None
        self.arrived: set[int] = set()
        for p in params:
            p.register_hook(self._hook(p))

    def _hook(self, param):
        key, shape = id(param), param.local_shape

        def arrive(grad):
            with NoFallbackGuard():
                if not self.arrived:
                    self.flat = ms.ops.zeros((self.total,), grad.dtype)
                    _pynative_executor.queue_backward_final_callback(self.flush)
                self.arrived.add(key)
                lo = self.offsets[key]
                view = ms.mint.narrow(self.flat, 0, lo, math.prod(shape))
                view.copy_(ms.mint.reshape(grad, (-1,)))
                if len(self.arrived) == len(self.offsets):
                    self.flush()
                return ms.mint.reshape(view, shape)
        return arrive

    def flush(self) -> None:
        """Reduces what has arrived; a second call does nothing."""
        if not self.arrived:
            return
        self.arrived = set()
        with NoFallbackGuard(), comm.annotate(phase="backward", src="gradient bucket", dst="gradient bucket"):
            self.flat.copy_(self.group.all_reduce(self.flat, "sum"))
        self.flat = None


def make_buckets(params, mesh, bucket_mb: float) -> list[Bucket]:
    """Buckets of at most `bucket_mb` MiB over the ranks of `mesh`, filled in reverse order of `params`."""
    group = mesh.get_group()
    limit = bucket_mb * 2 ** 20
    open_: dict[str, list] = {}
    size: dict[str, int] = {}
    done = []
    for p in reversed(params):
        p.__dict__[DEFERRED] = tuple(p.device_mesh.axis_index(a) for a in mesh.mesh_dim_names)
        kind = p.layout.dtype
        need = nbytes(p.local_shape, kind)
        if open_.get(kind) and size[kind] + need > limit:
            done.append(open_.pop(kind))
        open_.setdefault(kind, []).append(p)
        size[kind] = need + (size[kind] if len(open_[kind]) > 1 else 0)
    return [Bucket(members, group) for members in (*done, *open_.values())]
