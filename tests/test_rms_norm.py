# SPDX-License-Identifier: Apache-2.0
"""RMS norm of more rows than go through a core's cache at a time, on a CPU, beside NumPy; a second derivative is refused."""
from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_dtensor.errors import OpRuleError
from ms_dtensor.ops.local.cpu_nn import rms_norm
from ms_dtensor.ops.local.rows_cpu import parts

pytestmark = pytest.mark.usefixtures("cpu")
RNG = np.random.default_rng(6)
EPS = 1e-3


def test_parts_are_all_rows_once_and_fit_together():
    x = np.empty((8, 40_000), np.float32)
    for count, ends in ((1, [3, 6, 8]), (2, [1, 2, 3, 4, 5, 6, 7, 8])):
        seen = [(a, b, [m.shape for m in memory]) for a, b, memory in parts(x, count)]
        assert [b for _, b, _ in seen] == ends and [a for a, _, _ in seen] == [0, *ends[:-1]]
        assert all(shapes == [(b - a, 40_000)] * count for a, b, shapes in seen)


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-12), ("float32", 1e-5)])
def test_values_and_gradients_of_several_parts(dtype, near):
    x, w, dy, ds = (RNG.normal(size=s) for s in ((2, 4, 200, 200), (200, 200), (2, 4, 200, 200), (2, 4, 1, 1)))
    scale = 1 / np.sqrt((x * x).mean((2, 3), keepdims=True) + EPS)
    back = (dy * w * x).mean((2, 3), keepdims=True) + ds / w.size
    want = [x * scale * w, scale, dy * w * scale - x * scale**3 * back, (dy * x * scale).sum((0, 1))]
    xs = [Tensor(v.astype(dtype)) for v in (x, w, dy, ds)]

    def loss(x, w):
        y, scale = rms_norm(x, w, EPS)
        return (y * xs[2]).sum() + (scale * xs[3]).sum()
    got = [*rms_norm(*xs[:2], EPS), *ms.grad(loss, (0, 1))(*xs[:2])]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.asnumpy(), b, rtol=0, atol=near * np.abs(b).max())


def test_a_second_derivative_is_refused():
    x, w = Tensor(RNG.normal(size=(3, 4))), Tensor(RNG.normal(size=4))
    slope = ms.grad(lambda x: rms_norm(x, w, EPS)[0].sum())
    with pytest.raises(OpRuleError, match="second derivative"):
        ms.grad(lambda x: slope(x).sum())(x)
