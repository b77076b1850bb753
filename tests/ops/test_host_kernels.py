# SPDX-License-Identifier: Apache-2.0
"""What a CPU computes by functions of ours beside NumPy's: products, cross entropy by classes, RMS norm of many rows.

Products are of oneDNN in a process of one thread, of NumPy in one of several. Cross entropy makes nothing of the logits'
size but one; rows are more than go through a core's cache at a time.
"""
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor.debug import dry_run
from ms_dtensor.dispatch.class_loss import row_losses
from ms_dtensor.errors import OpRuleError
from ms_dtensor.internals import gemm
from ms_dtensor.ops.local.cpu_nn import rms_norm
from ms_dtensor.ops.local.rows_cpu import parts

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
def test_a_product_is_numpys(threads, left, right, dtype):
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


# -- cross entropy by classes ------------------------------------------------------------------------------------------
LOGITS = np.random.default_rng(5)
MANY = 40_000  # three rows at a time, so that a part is left over


def logits_and_labels(rows: int = 8):
    return LOGITS.normal(size=(rows, MANY)), LOGITS.integers(0, MANY, (rows, 1)).astype(np.int32)


def by_hand(x: np.ndarray, labels: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses of rows, and the gradient of their sum weighted by `share`."""
    total = np.exp(x - x.max(1, keepdims=True))
    grad = total / total.sum(1, keepdims=True)
    losses = -np.log(np.take_along_axis(grad, labels, 1))[:, 0]
    np.put_along_axis(grad, labels, np.take_along_axis(grad, labels, 1) - 1, 1)
    return losses, grad * share[:, None]


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-13), ("float32", 1e-6)])
@pytest.mark.parametrize("laid", [False, True])
def test_losses_and_gradients_are_numpys(dtype, near, laid):
    x, labels = logits_and_labels()
    share = LOGITS.normal(size=len(x))
    losses, grad = by_hand(x, labels, share)
    tensors = [Tensor(x.astype(dtype)), Tensor(labels), Tensor(share.astype(dtype))]
    take = ms.value_and_grad
    if laid:
        mesh = md.init_device_mesh("cpu", (1,))
        tensors, take = [md.distribute_tensor(t, mesh, [md.Shard(0)]) for t in tensors], md.value_and_grad
    got = row_losses(*tensors[:2])
    np.testing.assert_allclose((got.to_local() if laid else got).asnumpy(), losses, rtol=near)
    _, got = take(lambda x, t, s: (row_losses(x, t) * s).sum())(*tensors)
    np.testing.assert_allclose((got.to_local() if laid else got).asnumpy(), grad, rtol=0, atol=near)


def test_what_is_no_number_stays_none_and_a_class_that_cannot_be_costs_nothing():
    x, labels = logits_and_labels(4)
    labels[:] = [[0], [1], [2], [3]]
    x[0, 5], x[1, 5], x[2, 5] = np.nan, np.inf, -np.inf
    with np.errstate(all="raise"):
        losses, grad = ms.value_and_grad(lambda x: row_losses(x, Tensor(labels)).sum())(Tensor(x))
    assert np.isnan(losses.asnumpy())
    grad = grad.asnumpy()
    assert np.isnan(grad[:2, 6]).all() and np.isfinite(grad[2:]).all() and grad[2, 5] == 0 < grad[2, 6]


@pytest.mark.parametrize("wrong", [MANY, -MANY - 1])
def test_a_label_that_is_no_class_is_refused(wrong):
    x, labels = logits_and_labels(2)
    labels[1] = wrong
    with pytest.raises(IndexError, match="out of range"):
        row_losses(Tensor(x), Tensor(labels))


def test_a_second_derivative_of_losses_is_refused():
    x, labels = logits_and_labels(2)
    first = ms.grad(lambda x: row_losses(x, Tensor(labels)).sum())
    with pytest.raises(OpRuleError, match="second derivative"):
        ms.grad(lambda x: (first(x) ** 2).sum())(Tensor(x))


def test_only_the_gradient_is_as_large_as_the_logits():
    with dry_run(1, 0, "CPU") as run:
        mesh = md.init_device_mesh("cpu", (1,))
        x = md.zeros((512, MANY), device_mesh=mesh, placements=[md.Shard(0)])
        labels = md.zeros((512, 1), device_mesh=mesh, placements=[md.Shard(0)], dtype=ms.int32)
        loss, grad = md.value_and_grad(lambda x: mint.mean(row_losses(x * 2, labels)))(x)
        del loss, grad
    size = 512 * MANY * 4
    # x, its double, and the gradient of that; the gradient of x follows when the double is gone
    assert 3 * size <= run.memory().peak <= 3.05 * size, run.memory().peak / size


# -- RMS norm ----------------------------------------------------------------------------------------------------------
ROW_NUMBERS = np.random.default_rng(6)
EPS = 1e-3


def test_parts_are_all_rows_once_and_fit_together():
    x = np.empty((8, 40_000), np.float32)
    for count, ends in ((1, [3, 6, 8]), (2, [1, 2, 3, 4, 5, 6, 7, 8])):
        seen = [(a, b, [m.shape for m in memory]) for a, b, memory in parts(x, count)]
        assert [b for _, b, _ in seen] == ends and [a for a, _, _ in seen] == [0, *ends[:-1]]
        assert all(shapes == [(b - a, 40_000)] * count for a, b, shapes in seen)


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-12), ("float32", 1e-5)])
def test_norms_and_gradients_of_several_parts_are_numpys(dtype, near):
    x, w, dy, ds = (ROW_NUMBERS.normal(size=s) for s in ((2, 4, 200, 200), (200, 200), (2, 4, 200, 200), (2, 4, 1, 1)))
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


def test_a_second_derivative_of_a_norm_is_refused():
    x, w = Tensor(ROW_NUMBERS.normal(size=(3, 4))), Tensor(ROW_NUMBERS.normal(size=4))
    slope = ms.grad(lambda x: rms_norm(x, w, EPS)[0].sum())
    with pytest.raises(OpRuleError, match="second derivative"):
        ms.grad(lambda x: slope(x).sum())(x)
