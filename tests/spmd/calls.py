# SPDX-License-Identifier: Apache-2.0
"""Calls in which every branch of the table is taken: the slice of the corpus that each push asks."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import mint, ops

from tests.spmd.proof import OneCall, Tally, calls_of


def array(*shape, seed=0):
    return np.random.default_rng(seed + len(shape)).uniform(0.5, 2.0, shape).astype(np.float32)


A, B, C, W, ROW = array(4, 6), array(4, 6, seed=9), array(4, 6, seed=5), array(6, 2), array(2)
IDS = np.array([3, 0, 2, 2], np.int32)
CALLS = (
    (mint.add, A, B), (mint.sub, A, B), (mint.mul, A, B), (mint.div, A, B), (lambda x: x + 1.5, A), (lambda x: x * 2.5, A),
    (mint.matmul, A, W), (lambda x, w, b: mint.nn.functional.linear(x, w, b), array(4, 6), array(2, 6), ROW),
    (mint.neg, A), (mint.exp, A), (mint.nn.functional.relu, A - 1), (mint.square, A),
    (lambda x: mint.nn.functional.softmax(x, -1), A),
    (lambda x: x.sum(0), A), (lambda x: x.mean(0), A), (lambda x: x.max(), A), (lambda x: x.reshape(3, 8), A),
    (lambda x: mint.permute(x, (1, 0)), A), (lambda x: x[1:3], A), (lambda x, y: mint.cat((x, y), 0), A, B),
    (lambda x, y: mint.where(x > y, x, y), A, B), (lambda x: mint.zeros_like(x), A), (lambda x: x.astype(ms.float64), A),
    (lambda x, i: ops.gather(x, i, 0), A, IDS),
    (lambda x, g, b: mint.nn.functional.layer_norm(x, (6,), g, b), A, array(6), array(6)),
    (lambda x, y, z: mint.addmm(x, y, z), array(4, 2), A, W), (mint.maximum, A, B),
)


def known_calls() -> list[OneCall]:
    """The calls behind these forms, each once."""
    tally = Tally()
    return [one for fn, *args in CALLS for one in calls_of(fn, tuple(args), tally)]
