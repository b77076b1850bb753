# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: a data-parallel parameter keeps its gradient partial, and many are reduced in one all-reduce.

A parameter marked here asks for its cotangent still summed over nothing on the data-parallel axes (`Parameter` attribute
`deferred_axes`, honoured by `dispatch.face`). Its hook keeps that gradient; when the last one of a bucket has arrived,
or the backward ends, all are reduced together and written back in place. So the caller sees reduced gradients, and the
number of collectives does not grow with the number of parameters.
"""
from __future__ import annotations

import math

import mindspore as ms
from mindspore._c_expression import NoFallbackGuard
from mindspore.common.api import _pynative_executor

from .. import comm
from ..faces import DEFERRED
from ..redistribute.cost import nbytes


class Bucket:
    """Gradients of one dtype that are reduced together over one group.

    Args:
        params: DTensor Parameters, in the order in which the backward is expected to reach them.
        group: the ranks to sum over.
    """

    def __init__(self, params, group):
        self.group, self.size = group, len(params)
        self.arrived: list = []
        for p in params:
            p.register_hook(self._arrive)

    def _arrive(self, grad):
        with NoFallbackGuard():
            if not self.arrived:
                _pynative_executor.queue_backward_final_callback(self.flush)
            own = grad * 1  # storage of its own: the sum is written into it after the caller has been handed it
            self.arrived.append(own)
            if len(self.arrived) == self.size:
                self.flush()
            return own

    def flush(self) -> None:
        """Reduces what has arrived; a second call does nothing."""
        grads, self.arrived = self.arrived, []
        if not grads:
            return
        with NoFallbackGuard(), comm.annotate(phase="backward", src="gradient bucket", dst="gradient bucket"):
            flat = self.group.all_reduce(ms.mint.cat([ms.mint.reshape(g, (-1,)) for g in grads]), "sum")
            at = 0
            for g in grads:
                n = math.prod(g.shape)
                _overwrite(g, ms.mint.reshape(ms.mint.narrow(flat, 0, at, n), g.shape), self.group.backend.name)
                at += n


def _overwrite(target, source, backend: str) -> None:
    if backend in ("shm", "mccl", "fake"):  # MindSpore's copy_ from a view has no CPU kernel; its arrays are views
        target.asnumpy()[...] = source.asnumpy()
    else:
        target.copy_(source)


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
