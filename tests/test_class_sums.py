# SPDX-License-Identifier: Apache-2.0
"""Cross entropy by classes on a CPU: its numbers beside NumPy's, and that it makes nothing of the logits' size but one."""
from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor.debug import dry_run
from ms_dtensor.dispatch.class_loss import row_losses
from ms_dtensor.errors import OpRuleError

pytestmark = pytest.mark.usefixtures("cpu")
RNG = np.random.default_rng(5)
CLASSES = 40_000  # three rows at a time, so that a part is left over


def logits_and_labels(rows: int = 8):
    return RNG.normal(size=(rows, CLASSES)), RNG.integers(0, CLASSES, (rows, 1)).astype(np.int32)


def by_hand(x: np.ndarray, labels: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses of rows, and the gradient of their sum weighted by `share`."""
    total = np.exp(x - x.max(1, keepdims=True))
    grad = total / total.sum(1, keepdims=True)
    losses = -np.log(np.take_along_axis(grad, labels, 1))[:, 0]
    np.put_along_axis(grad, labels, np.take_along_axis(grad, labels, 1) - 1, 1)
    return losses, grad * share[:, None]


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-13), ("float32", 1e-6)])
@pytest.mark.parametrize("laid", [False, True])
def test_losses_and_gradients_are_those_of_numpy(dtype, near, laid):
    x, labels = logits_and_labels()
    share = RNG.normal(size=len(x))
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


@pytest.mark.parametrize("wrong", [CLASSES, -CLASSES - 1])
def test_a_label_that_is_no_class_is_refused(wrong):
    x, labels = logits_and_labels(2)
    labels[1] = wrong
    with pytest.raises(IndexError, match="out of range"):
        row_losses(Tensor(x), Tensor(labels))


def test_a_second_derivative_is_refused():
    x, labels = logits_and_labels(2)
    first = ms.grad(lambda x: row_losses(x, Tensor(labels)).sum())
    with pytest.raises(OpRuleError, match="second derivative"):
        ms.grad(lambda x: (first(x) ** 2).sum())(Tensor(x))


def test_only_the_gradient_is_as_large_as_the_logits():
    with dry_run(1, 0, "CPU") as run:
        mesh = md.init_device_mesh("cpu", (1,))
        x = md.zeros((512, CLASSES), device_mesh=mesh, placements=[md.Shard(0)])
        labels = md.zeros((512, 1), device_mesh=mesh, placements=[md.Shard(0)], dtype=ms.int32)
        loss, grad = md.value_and_grad(lambda x: mint.mean(row_losses(x * 2, labels)))(x)
        del loss, grad
    size = 512 * CLASSES * 4
    # x, its double, and the gradient of that; the gradient of x follows when the double is gone
    assert 3 * size <= run.memory().peak <= 3.05 * size, run.memory().peak / size
