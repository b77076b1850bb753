# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: a data-parallel parameter keeps its gradient partial, and many are reduced in one all-reduce.

A parameter marked here gets its gradient as Partial on the data-parallel axes: each rank's own summand, not yet reduced
(its memo's `partial_grad_axes`). Its hook keeps that gradient; when the last one of a bucket has arrived, or the backward
ends, all are reduced together, given to the hooks that users registered, and written back in place. So the caller sees
reduced gradients, and the number of collectives does not grow with the number of parameters. On host all buckets wait for
the end: nobody would reduce them meanwhile, and each meeting costs a wait for the slower rank.
"""
from __future__ import annotations

import math
import weakref
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .. import comm
from ..dispatch.memo import memo_of
from ..dispatch.operands import recording
from ..dispatch.patches.hooks import given_hooks, replaced_by
from ..errors import OpRuleError
from ..internals.names import NoFallbackGuard, executor
from ..redistribute.cost import nbytes


class Bucket:
    """Gradients of one dtype that are reduced together over one group.

    Args:
        params: DTensor Parameters, in the order in which the backward is expected to reach them.
        group: the ranks to sum over.
        dtype: in which to add up; None: that of the gradients.
    """

    def __init__(self, params, group, dtype=None):
        self.group, self.size, self.dtype = group, len(params), dtype
        self.elements = sum(math.prod(p.local_shape) for p in params)
        self.on_host = group.backend.on_host and dtype is None
        self.arrived: dict[int, Any] = {}  # gradients, each of its parameter's local shape, by number of the parameter
        # on host: [elements], where the gradients lie one after another in order of arrival; new for every backward
        self.flat: np.ndarray | None = None
        self.params = [weakref.ref(p) for p in params]
        for number, p in enumerate(params):
            Tensor.register_hook(p, lambda grad, number=number: self._arrive(number, grad))

    def _arrive(self, number: int, grad):
        if recording():
            raise OpRuleError("For 'replicate', a derivative of a parameter's gradient was asked for.",
                              f"a bucket of {self.size} parameters", "A bucket reduces gradients outside autograd.",
                              ("distribute_module(cell, device_mesh) instead of replicate()",
                               "take the inner gradient with respect to the inputs"))
        with NoFallbackGuard():
            if number in self.arrived:  # left behind by a backward that raised
                self.arrived, self.flat = {}, None
            executor.queue_backward_final_callback(self.flush)  # each time: the first may have been in that one
            # storage of its own: the sum is written into it after the caller has been handed it
            own = self._in_flat(grad.asnumpy()) if self.on_host else grad * 1
            self.arrived[number] = own
            if len(self.arrived) == self.size and not self.on_host:
                self.flush()
            return own

    def _in_flat(self, grad: np.ndarray):
        if self.flat is None:
            self.flat = self.group.backend.buffer(self.elements, grad.dtype)
        at = sum(g.size for g in self.arrived.values())
        place = self.flat[at:at + grad.size].reshape(grad.shape)
        np.copyto(place, grad)
        return ms.Tensor.from_numpy(place)

    def flush(self) -> None:
        """Reduces what has arrived; a second call does nothing."""
        (arrived, self.arrived), (flat, self.flat) = (self.arrived, {}), (self.flat, None)
        if arrived:
            self._reduce(list(arrived.values()), flat)
            self._run_hooks(arrived)

    def _reduce(self, grads: list, flat) -> None:
        with NoFallbackGuard(), comm.annotate(phase="backward", src="gradient bucket", dst="gradient bucket"):
            if flat is not None:
                self.group.all_reduce_(ms.Tensor.from_numpy(flat[:sum(g.size for g in grads)]), "sum")
                return
            flat, at = ms.mint.cat([ms.mint.reshape(g, (-1,)) for g in grads]), 0
            total = self.group.all_reduce(flat if self.dtype is None else flat.astype(self.dtype), "sum").astype(flat.dtype)
            for g in grads:
                g.copy_(ms.mint.reshape(ms.mint.narrow(total, 0, at, g.size), g.shape))
                at += g.size

    def _run_hooks(self, arrived: dict[int, Any]) -> None:
        """The users' hooks, on what is reduced now; what they return is written back, too."""
        for number, grad in arrived.items():
            param = self.params[number]()
            hooks = [] if param is None else given_hooks(param)
            if param is None or not hooks:
                continue
            with NoFallbackGuard():
                changed = grad * 1  # a hook may keep it
            for hook in hooks:
                changed = replaced_by(hook, changed, param.layout.gradient())
            with NoFallbackGuard():
                if self.on_host:
                    np.copyto(grad.asnumpy(), changed.asnumpy())
                else:
                    grad.copy_(changed)


def make_buckets(params, mesh, bucket_mb: float, dtype=None) -> list[Bucket]:
    """Buckets of at most `bucket_mb` MiB over the ranks of `mesh`, filled in reverse order of `params`."""
    group = mesh.get_group()
    limit = bucket_mb * 2 ** 20
    open_: dict[str, list] = {}
    size: dict[str, int] = {}
    done = []
    for p in reversed(params):
        memo_of(p).partial_grad_axes = tuple(p.device_mesh.axis_index(a) for a in mesh.mesh_dim_names)
        kind = p.layout.dtype
        need = nbytes(p.local_shape, kind)
        if open_.get(kind) and size[kind] + need > limit:
            done.append(open_.pop(kind))
        open_.setdefault(kind, []).append(p)
        size[kind] = need + (size[kind] if len(open_[kind]) > 1 else 0)
    return [Bucket(members, group, None if dtype in (None, members[0].dtype) else dtype)
            for members in (*done, *open_.values())]
