# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state in the host's memory: each parameter's comes to the device for its own step, and goes back.

Two places on the device for each shape take turns: while one parameter is stepped, the next one's state comes on a stream
of its own, and the last one's leaves on another; the host waits for none of it. The invariant: whoever reads or writes a
place, or the host's copy, has waited (on the device) for who did so before on another stream. Written against MindSpore's
documented `runtime.Stream`, `Event` and `Tensor.copy_(src, non_blocking)` with pinned memory; not run on hardware. On a CPU,
where all memory is the host's, nothing of it is used.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mindspore import Tensor, mint, ops, runtime

State = dict[str, Tensor]


def on_host(shape: Sequence[int], dtype) -> Tensor:
    """Zeros in memory that the device can reach by itself."""
    host = mint.empty(tuple(shape), dtype=dtype, device="CPU", pin_memory=True)
    if math.prod(shape):
        host.copy_(ops.zeros(tuple(shape), dtype))
    return host


class Swap:
    """Brings states to the device and back, one parameter after another.

    Args:
        states: of each parameter by kind, in the host's memory.
    """

    def __init__(self, states: Sequence[State]):
        self._states = states
        self._coming, self._leaving = runtime.Stream(), runtime.Stream()
        # whole tensors, as MindSpore's copies look at the storage, which is larger than a view of it
        self._places = {(turn, kind, tuple(host.shape)): mint.empty(tuple(host.shape), dtype=host.dtype)
                        for turn in range(2) for state in states for kind, host in state.items()}
        self._came: list[runtime.Event | None] = [None, None]
        self._left: list[runtime.Event | None] = [None, None]

    def through(self, order: Sequence[int]) -> Iterator[tuple[int, State]]:
        """Each of these parameters with its state on the device, to be written until the next one is asked for."""
        working = runtime.current_stream()
        self._coming.wait_stream(self._leaving)  # what the last step sent to the host
        self._bring(order, 0)
        for k, i in enumerate(order):
            self._bring(order, k + 1)
            working.wait_event(self._came[k % 2])
            yield i, self._here(i, k)
            stepped = working.record_event()
            with runtime.StreamCtx(self._leaving):
                self._leaving.wait_event(stepped)
                for kind, place in self._here(i, k).items():
                    self._states[i][kind].copy_(place, non_blocking=True)
                self._left[k % 2] = self._leaving.record_event()

    def synchronize(self) -> None:
        """The host waits until its memory has what the last step made: before states are read or written there."""
        self._leaving.synchronize()

    def _bring(self, order: Sequence[int], k: int) -> None:
        if k == len(order):
            return
        with runtime.StreamCtx(self._coming):
            if self._left[k % 2] is not None:
                self._coming.wait_event(self._left[k % 2])
            for kind, place in self._here(order[k], k).items():
                place.copy_(self._states[order[k]][kind], non_blocking=True)
            self._came[k % 2] = self._coming.record_event()

    def _here(self, i: int, k: int) -> State:
        """The places of the k-th of an order."""
        return {kind: self._places[k % 2, kind, tuple(host.shape)] for kind, host in self._states[i].items()}
