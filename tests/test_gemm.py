# SPDX-License-Identifier: Apache-2.0
"""Products without an op around them: of oneDNN in a process of one thread, of NumPy in one of several."""
from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from ms_dtensor.internals import gemm

DRAW = np.random.default_rng(11)
WHOLE, TABLE = DRAW.standard_normal((37, 53)), DRAW.standard_normal((60, 61))
FORMS = {"in one piece": lambda x: x.copy(), "turned": lambda x: x.T.copy().T,
         "with gaps": lambda x: np.repeat(x, 2, 1)[:, ::2],
         "one wide": lambda x: x[:, :1].copy(), "empty": lambda x: x[:, :0]}
ROWS = {"one row": lambda x: x[:1], "no rows": lambda x: x[:0]}


@pytest.fixture(params=["1", "2"])
def threads(request, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", request.param)
    monkeypatch.setattr(gemm.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    gemm._sgemm.cache_clear()
    yield request.param
    gemm._sgemm.cache_clear()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("right", FORMS)
@pytest.mark.parametrize("left", [*FORMS, *ROWS])
def test_it_is_the_product(threads, left, right, dtype):
    a = {**FORMS, **ROWS}[left](WHOLE.astype(dtype))
    b = FORMS[right](TABLE[:a.shape[1]].astype(dtype))
    want = a.astype(np.float64) @ b.astype(np.float64)
    room = np.full((want.shape[0] + 3, want.shape[1]), np.nan, dtype)  # what lay there does not count, not even NaN
    near = {"rtol": 1e-5, "atol": 3e-5} if dtype == np.float32 else {"rtol": 1e-13, "atol": 1e-13}
    given = [gemm.matmul(a, b), gemm.matmul(a, b, out=room[2:-1])]
    base = TABLE[:want.shape[0], :want.shape[1]].astype(dtype)
    given.append(gemm.matmul(a, b, base.copy(), add=True) - base)
    for got in given:
        assert got.shape == want.shape and got.dtype == dtype
        np.testing.assert_allclose(got, want, **near)
    assert np.isnan(room[:2]).all() and np.isnan(room[-1]).all() and np.shares_memory(given[1], room) == bool(want.size)


def test_only_one_thread_has_onednns(threads):
    there = any((Path(ms.__file__).parent / "lib").glob("libdnnl.so.*"))
    assert (gemm._sgemm() is not None) == (threads == "1" and there)


def test_a_result_with_gaps_is_written_through(threads):
    a, b, room = WHOLE.astype(np.float32), TABLE[:53].astype(np.float32), np.zeros((37, 122), np.float32)
    gemm.matmul(a, b, out=room[:, ::2])
    np.testing.assert_allclose(room[:, ::2], WHOLE @ TABLE[:53], rtol=1e-5, atol=3e-5)
    assert not room[:, 1::2].any()
