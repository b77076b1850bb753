# SPDX-License-Identifier: Apache-2.0
"""Gradient buckets: a data-parallel parameter keeps its gradient partial, and many are reduced in one all-reduce.

A parameter marked here gets its gradient as Partial on the data-parallel axes: each rank's own summand, not yet reduced
(its memo's `partial_grad_axes`). Its hook puts that gradient into the bucket's memory, and hands out the place; when the
last one of a bucket has arrived, or the backward ends, all are reduced there together. On a device that is only begun: the
backward goes on, and its end waits for all buckets and gives the gradients to the hooks that users registered. So the
caller sees reduced gradients, and the number of collectives does not grow with the number of parameters. On host all
buckets are reduced at the end: nobody would reduce them meanwhile, and each meeting costs a wait for the slower rank.
"""
from __future__ import annotations

import math
import weakref
from typing import Any

import mindspore as ms
from mindspore import Tensor

from .. import comm
from ..comm.packing import copy, numpy_dtype, write
from ..dispatch.memo import memo_of
from ..dispatch.operands import recording
from ..dispatch.patches.hooks import run_hooks
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
        self.on_host = group.backend.on_host
        self.arrived: dict[int, Any] = {}  # gradients, each of its parameter's local shape, by number of the parameter
        # [elements], where the gradients lie one after another in order of arrival; new for every backward
        self.flat: Any = None
        self.places: list = []  # theirs in it
        self.used = 0  # elements of it
        self.work: comm.Work | None = None  # the reduction, once it has begun
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
                self._forget()
            executor.queue_backward_final_callback(self.flush)  # each time: the first may have been in that one
            own = self.arrived[number] = self._take(grad)
            if len(self.arrived) == self.size and not self.on_host:
                self._begin()
            return own

    def _take(self, grad):
        """The gradient as the caller gets it, storage of its own into which the sum is written later."""
        dtype = self.dtype or grad.dtype
        if self.flat is None:
            self.flat = self._memory(dtype)
        at, n, shape = self.used, math.prod(grad._shape), tuple(grad._shape)
        place = ms.mint.reshape(ms.mint.narrow(self.flat, 0, at, n), shape) if not self.on_host else \
            Tensor.from_numpy(self.flat.asnumpy()[at:at + n].reshape(shape))
        self.places.append(place)
        self.used += n
        write(place, grad)
        return place if dtype == grad.dtype else copy(grad)

    def _memory(self, dtype):
        if self.on_host:
            return Tensor.from_numpy(self.group.backend.buffer(self.elements, numpy_dtype(dtype)))
        return ms.mint.empty((self.elements,), dtype=dtype)

    def _forget(self) -> tuple[dict[int, Any], list]:
        """What has arrived, reduced; the bucket is empty again."""
        if self.work is not None:
            self.work.wait()
        held = self.arrived, self.places
        self.arrived, self.places, self.used, self.flat, self.work = {}, [], 0, None, None
        return held

    def _begin(self) -> None:
        """Reduces what has arrived, or begins to."""
        used = self.used
        with NoFallbackGuard(), comm.annotate(phase="backward", src="gradient bucket", dst="gradient bucket"):
            flat = self.flat
            if used < self.elements:
                flat = Tensor.from_numpy(flat.asnumpy()[:used]) if self.on_host else ms.mint.narrow(flat, 0, 0, used)
            self.work = self.group.all_reduce_(flat, "sum")

    def flush(self) -> None:
        """Ends the reduction of what has arrived; a second call does nothing."""
        if not self.arrived:
            return
        if self.work is None:
            self._begin()
        arrived, places = self._forget()
        with NoFallbackGuard():
            for own, place in zip(arrived.values(), places):
                if own is not place:
                    write(own, place)
        for number, grad in arrived.items():
            run_hooks(self.params[number](), grad)


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
