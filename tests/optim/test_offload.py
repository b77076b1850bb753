# SPDX-License-Identifier: Apache-2.0
"""State of AdamW in the host's memory, over a double of MindSpore's streams: who touches what has waited for who did before.

The double knows order: each stream has a clock of what it has waited for, an event is a copy of that, and each piece of
memory knows who wrote and read it last. Copies beside computation are made when somebody waits for them, and what they will
write holds not-a-number until then.
"""
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from ms_dtensor.errors import ConfigError
from ms_dtensor.internals import target
from ms_dtensor.optim import AdamW, adamw, offload
from tests.optim.test_adamw import arrays, by_kernel

SHAPES = [(3, 4), (5,), (2, 0), (7, 2), (), (5,)]


class Event:
    def __init__(self, clock, work):
        self.clock, self.work = clock, work

    def done(self):
        for step in self.work:
            step()


class Device:
    """Streams, and who has touched which memory."""

    def __init__(self, without=""):
        self.without = without  # what is left out: a fault that is planted
        self.streams, self.now, self.memory, self.pinned, self.copies, self.host_waits = [], None, {}, [], 0, 0
        self.main = self.now = self.Stream(self, "main")

    class Stream:
        def __init__(self, device, name=None):
            self.device, self.role = device, name or ("leaving", "coming")[len(device.streams) % 2]
            self.name = f"{self.role} {len(device.streams)}"
            self.clock, self.queue = {self.name: 0}, []
            device.streams.append(self)

        def record_event(self):
            return Event(dict(self.clock), list(self.queue))

        def wait_event(self, event):
            if f"{self.role} waits" == self.device.without:
                return
            for name, at in event.clock.items():
                self.clock[name] = max(self.clock.get(name, 0), at)
            event.done()

        def wait_stream(self, other):
            if f"{self.role} waits for {other.role}" != self.device.without:
                self.wait_event(other.record_event())

        def synchronize(self):
            self.device.host_waits += 1
            self.record_event().done()
            self.device.main.wait_stream(self)

    def touches(self, x, writes):
        """By the stream that is now: after whoever did before, as far as they exclude each other."""
        stream, key = self.now, x.data_ptr()
        stream.clock[stream.name] += 1
        last_write, reads = self.memory.get(key, (None, []))
        for name, at in [last_write] * (last_write is not None) + (reads if writes else []):
            assert stream.clock.get(name, 0) >= at, f"{stream.name} does not wait for {name}"
        me = stream.name, stream.clock[stream.name]
        self.memory[key] = (me, []) if writes else (last_write, [*reads, me])

    def on_host(self, x):
        return any(x.data_ptr() == p.data_ptr() for p in self.pinned)


def installed(monkeypatch, device):
    copy, empty = Tensor.copy_, ms.mint.empty

    class Runtime:
        Event = Event

        @staticmethod
        def Stream():
            return Device.Stream(device)

        @staticmethod
        def current_stream():
            return device.now

        @staticmethod
        @contextmanager
        def StreamCtx(stream):
            before, device.now = device.now, stream
            yield
            device.now = before

    def copied(dst, src, non_blocking=False):
        if not non_blocking:
            return copy(dst, src)
        assert dst.dtype == src.dtype and dst.shape == src.shape and dst.is_contiguous() and src.is_contiguous()
        assert device.on_host(dst) != device.on_host(src), "else it is no copy beside computation"
        assert device.now is not device.main, "beside computation"
        device.touches(src, False)
        device.touches(dst, True)
        device.copies += 1
        if not device.on_host(dst):
            copy(dst, Tensor(np.full(dst.shape, np.nan, np.float32)))
        made = []

        def once():
            if not made:
                made.append(copy(dst, src))
        device.now.queue.append(once)
        return dst

    def made(*size, dtype=None, device_name=None, pin_memory=False, **how):
        device_name = how.pop("device", device_name)
        x = empty(*size, dtype=dtype)
        if pin_memory:
            assert device_name == "CPU"
            device.pinned.append(x)
        return x

    class Kernel:
        def __call__(self, var, m, v, max_v, grad, step, lr, b1, b2, decay, eps, amsgrad, maximize):
            for x in (m, v):
                device.touches(x, True)
            by_kernel(copy, var, m, v, grad, step, lr, b1, b2, decay, eps)
    monkeypatch.setattr(offload, "runtime", Runtime)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(offload.mint, "empty", made)
    monkeypatch.setattr(adamw, "ascend_kernels", lambda: True)
    monkeypatch.setattr(adamw.gen_ops_prim, "AdamW", Kernel)


WITHOUT = [(), (), (0,), (0, 1, 2, 3, 4)]  # parameters that have no gradient in a step; the last one has the last place


def trained(offload):
    """Parameters, the optimizer and its state after four steps."""
    params = [Parameter(Tensor(x), name=f"p{i}") for i, x in enumerate(arrays(0, SHAPES))]
    params[3] = Parameter(Tensor(params[3].asnumpy()).astype(ms.bfloat16), name="p3")
    with target.rehearsal("Ascend" if offload else "CPU"):
        optimizer = AdamW(params, 1e-2, (0.9, 0.95), 1e-8, 0.1, offload=offload)
        for step, left_out in enumerate(WITHOUT):
            optimizer([None if i in left_out else Tensor(g).astype(p.dtype) for i, (g, p) in
                       enumerate(zip(arrays(step + 1, SHAPES), params, strict=True))])
        state = {name: {kind: x if isinstance(x, int) else x.asnumpy().copy() for kind, x in kinds.items()}
                 for name, kinds in optimizer.state_dict().items()}
    return params, optimizer, state


def test_the_numbers_are_adamws_and_everybody_waits(monkeypatch):
    device = Device()
    installed(monkeypatch, device)
    params, optimizer, state = trained(True)
    want, _, want_state = trained(False)
    for p, w in zip(params, want, strict=True):
        np.testing.assert_allclose(p.astype(ms.float32).asnumpy(), w.astype(ms.float32).asnumpy(), rtol=2e-6, atol=2e-6)
    for name, kinds in want_state.items():
        for kind, x in kinds.items():
            np.testing.assert_allclose(state[name][kind], x, rtol=2e-6, atol=2e-6)
    of = [sum(2 + (i == 3) for i in range(6) if i not in (2, *left_out)) for left_out in WITHOUT]
    assert of == [11, 11, 9, 2] and device.copies == 2 * sum(of), "there and back: two moments of each, and a master"
    assert device.host_waits == len(SHAPES), "of state_dict alone: no step waits on the host"
    shapes = [shape for _, kind, shape in optimizer._swap._places if kind == "exp_avg"]
    assert sorted(shapes) == sorted([*set(SHAPES)] * 2), "two of each shape"
    with target.rehearsal("Ascend"):
        again = AdamW(params, 1e-2, (0.9, 0.95), 1e-8, 0.1, offload=True)
        again.load_state_dict(optimizer.state_dict())
        for name, kinds in again.state_dict().items():
            for kind in kinds.keys() - {"step"}:
                np.testing.assert_array_equal(kinds[kind].asnumpy(), state[name][kind])


@pytest.mark.parametrize("without", ["main waits", "coming waits", "leaving waits", "coming waits for leaving"])
def test_a_wait_that_is_left_out_is_seen(monkeypatch, without):
    installed(monkeypatch, Device(without))
    with pytest.raises(AssertionError, match="does not wait for"):
        trained(True)


def test_where_it_is_not_for():
    p = Parameter(Tensor(np.ones(3, np.float32)), name="p")
    assert AdamW([p], offload=True)._swap is None, "all memory of a CPU is the host's"
    with target.rehearsal("GPU"), pytest.raises(ConfigError, match="'offload' is for Ascend"):
        AdamW([p], offload=True)
    with pytest.raises(ConfigError, match="'offload' is no truth value"):
        AdamW([p], offload="no")
