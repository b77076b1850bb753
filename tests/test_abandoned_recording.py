# SPDX-License-Identifier: Apache-2.0
"""A function that raised inside `ms.grad`, before the first DTensor was made, has left MindSpore recording."""
from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import distribute_tensor, init_device_mesh
from ms_dtensor.dispatch import patches
from ms_dtensor.dispatch.operands import recording

pytestmark = pytest.mark.usefixtures("cpu")
X = np.arange(6, dtype=np.float32).reshape(3, 2)


def _raise(t):
    raise ValueError("mine")


class _Raises(nn.Cell):
    def construct(self, t):
        return _raise(t * 2)


def _leave_recording(fn) -> None:
    """As a script does that meets DTensors later."""
    patches.uninstall()
    with pytest.raises(ValueError, match="mine"):
        ms.grad(fn)(Tensor(X))
    assert recording()


def _step():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    net = md.distribute_module(nn.Dense(2, 3), mesh)
    x = distribute_tensor(Tensor(X), mesh, None)
    ms.value_and_grad(lambda t: (net(t) ** 2).sum(), None, net.trainable_params())(x)


@pytest.mark.parametrize("fn", [_raise, _Raises()], ids=["function", "cell"])
def test_the_first_dtensor_ends_it(fn):
    _leave_recording(fn)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    distribute_tensor(Tensor(X), mesh, None)
    assert not recording()
    _step()


def test_the_first_dtensor_may_be_made_inside_a_gradient():
    _leave_recording(_raise)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def inside(t):
        return (md.DTensor.from_local(t, mesh, None).to_local() ** 2).sum()
    assert np.array_equal(ms.grad(inside)(Tensor(X)).asnumpy(), 2 * X)
    _step()


def test_a_gradient_around_the_first_dtensor_goes_on():
    patches.uninstall()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def outer(t):
        inner = ms.grad(lambda u: (md.DTensor.from_local(u, mesh, None) ** 3).sum())(t * 2)
        assert recording()
        return inner.to_local().sum() if isinstance(inner, md.DTensor) else inner.sum()
    assert np.allclose(ms.grad(outer)(Tensor(X)).asnumpy(), 24 * X)


def test_experts_of_one_device_are_differentiated_after_it():
    """They are differentiated once, and took the gradient after the one that raised for a second."""
    x, one = Tensor(X), Tensor(np.ones((3, 1), np.float32))
    w1, w3, w2 = (Tensor(np.random.default_rng(i).normal(size=s).astype(np.float32)) for i, s in enumerate(
        ((2, 4, 2), (2, 4, 2), (2, 2, 4))))
    step = md.grad(lambda t: (md.moe(t, one, Tensor([[0], [1], [0]], ms.int32), w1, w2, w3) ** 2).sum())
    wanted = step(x).asnumpy()
    for time in range(2):
        _leave_recording(_raise)
        assert np.array_equal(step(x).asnumpy(), wanted), time
