# SPDX-License-Identifier: Apache-2.0
"""Real ranks: `redistribute(async_op=True)` returns while data are under way, and every use waits for them."""
from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import numpy as np

from ms_dtensor import DTensor, SkipDTensorDispatch, comm, value_and_grad
from ms_dtensor.tensor.dtensor import AsyncDTensor
from tests.dist.operands import P, R, S, data, placed
from tests.dist.support import equal
from tests.msrun import REPORTS


def pending(x, placements):
    return x.redistribute(placements=placements, async_op=True)


def values_gradients_and_counts_are_those_of_the_plain_call(world, grid):
    x, weight = data(1, 5, 6), data(2, 5, 6)
    options = [R, S(0), S(1)]
    for src, dst in itertools.product(itertools.product(options, repeat=2), repeat=2):
        dx = placed(x, grid, *src)
        dw = placed(weight, grid, *dst)
        with comm.record() as plain:
            dx.redistribute(placements=dst)
        with comm.record() as later:
            moved = pending(dx, dst)
        assert [(e.op, e.bytes) for e in plain] == [(e.op, e.bytes) for e in later]
        equal(moved, x, f"{src}->{dst}")
        _, grad = value_and_grad(lambda t, dst=dst, dw=dw: (pending(t, dst) * dw).sum(), 0)(dx)
        equal(grad, weight, f"{src}->{dst} gradient")


def the_call_returns_before_the_others_have_come(world, line):
    x = DTensor.from_local(data(3 + world.rank, 300, 200), line, [P])
    wanted = sum(data(3 + r, 300, 200).asnumpy().astype(np.float64) for r in range(4))
    uses = {"to_local": lambda t: t.to_local().asnumpy(), "asnumpy": lambda t: t.asnumpy(), "op": lambda t: (t + 0).asnumpy(),
            "other operand": lambda t: (0 + t).asnumpy(), "index": lambda t: t[0:300].asnumpy(),
            "full": lambda t: t.full_tensor().asnumpy(), "copy": lambda t: t.clone().asnumpy(),
            "redistribute": lambda t: t.redistribute(placements=[S(1)]).full_tensor().asnumpy()}
    for what, use in uses.items():
        returned = Path(os.environ[REPORTS], f"returned from {what}")  # a byte of each rank; no messages, which calls block
        while world.rank == 0 and not (returned.exists() and returned.stat().st_size == 3):
            time.sleep(0.01)
        y = pending(x, [R])
        if world.rank:
            with open(returned, "ab") as file:
                file.write(b".")
        assert type(y) is AsyncDTensor and y.shape == (300, 200) and y.placements == (R,) and y.device_mesh is line
        assert type(y) is AsyncDTensor, "what is known without the data does not wait"
        np.testing.assert_allclose(use(y), wanted, rtol=1e-4, atol=1e-4, err_msg=what)
        assert type(y) is DTensor, what


def calls_keep_their_order(world, line):
    xs = [DTensor.from_local(data(9 + world.rank + k, 64, 4 << k), line, [P]) for k in range(6)]
    ys = [pending(x, [S(k % 2)]) for k, x in enumerate(xs)]
    now = xs[0].redistribute(placements=[R])
    for k in reversed(range(6)):
        equal(ys[k], sum(data(9 + r + k, 64, 4 << k).asnumpy() for r in range(4)), str(k))
    equal(now, sum(data(9 + r, 64, 4).asnumpy() for r in range(4)))
    z = pending(xs[0], [R])
    with SkipDTensorDispatch():
        local = (z * 1).asnumpy()
    equal(local, now)


def moves_without_communication_are_done_at_once(world, line):
    whole = placed(data(5, 8, 8), line, R)
    assert type(pending(whole, [S(0)])) is DTensor
    assert pending(whole, [R]) is whole
