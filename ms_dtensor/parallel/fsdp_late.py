# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients that are under way while the backward goes on: on devices, where they hide behind computation.

Autograd is handed zeros. What arrives at a parameter is kept, and when the backward ends the sums are added into it, which
the caller has by then; then the hooks that users registered run, as for buckets (`buckets.py`).
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from mindspore import Tensor

from ..comm.packing import copy
from ..dispatch.memo import memo_of
from ..dispatch.patches.hooks import run_hooks
from ..dispatch.patches.recomputed import recomputing
from ..internals.names import NoFallbackGuard, executor


class LateGradients:
    """Of the parameters of one unit.

    Args:
        params: cut DTensor Parameters.
    """

    def __init__(self, params: Iterable):
        self._due: list[Callable[[], dict[int, Tensor]]] = []
        self._arrived: dict[int, Tensor] = {}  # by id of the parameter
        self._params = {id(p): weakref.ref(p) for p in params}
        for key, param in self._params.items():
            memo_of(param()).late_gradient = True
            Tensor.register_hook(param(), lambda grad, key=key: self._arrive(key, grad))

    def add(self, sums: Callable[[], dict[int, Tensor]]) -> None:
        """`sums` waits for what is under way, and gives it by id of the parameter."""
        self._due.append(sums)
        executor.queue_backward_final_callback(self.finish)

    def _arrive(self, key: int, grad):
        with NoFallbackGuard():
            executor.queue_backward_final_callback(self.finish)
            own = self._arrived[key] = copy(grad)  # storage of its own, which is written when the caller has it
            return own

    def finish(self) -> None:
        """The sums are in the gradients; a second call does nothing."""
        if recomputing.get():  # a cell that runs again has a backward of its own inside this one, whose end is not the end
            return
        (due, self._due), (arrived, self._arrived) = (self._due, []), (self._arrived, {})
        with NoFallbackGuard():
            for sums in due:
                for key, shard in sums().items():
                    if key in arrived:  # else nobody asked for it
                        arrived[key].add_(shard)
        for key, grad in arrived.items():
            run_hooks(self._params[key](), grad)
