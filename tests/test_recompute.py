# SPDX-License-Identifier: Apache-2.0
"""`checkpoint_wrapper` in one process: whose gradients a recomputed cell gives, with a mesh and without; and its copies."""
from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor.dispatch import patches

pytestmark = pytest.mark.usefixtures("cpu")
ROWS = np.random.default_rng(5).normal(size=(4, 6)).astype(np.float32)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(6, 5), nn.Dense(5, 3)
        for i, p in enumerate(self.get_parameters()):
            p.set_data(Tensor(np.random.default_rng(i).normal(size=p.shape).astype(np.float32)))

    def construct(self, x):
        return self.down(ops.tanh(self.up(x)))


def gradients(net, params=None):
    grads = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, params or list(net.get_parameters()))(Tensor(ROWS))[1]
    return [(g.full_tensor() if isinstance(g, md.DTensor) else g).asnumpy() for g in grads]


def check(net, plain):
    for g, w in zip(gradients(net), gradients(plain), strict=True):
        assert np.allclose(g, w, rtol=2e-5, atol=1e-6)
    assert all(w.any() for w in gradients(plain))


def one_rank():
    return md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


SPREAD = {
    "no mesh": lambda net: net, "replicate": lambda net: md.replicate(net, mesh=one_rank()),
    "fully_shard": lambda net: md.fully_shard(net, mesh=one_rank()),
    "of the cell": lambda net: (md.fully_shard(net.up, mesh=one_rank()), md.fully_shard(net, mesh=one_rank()))[1],
    "zero1": lambda net: md.replicate(net, mesh=one_rank(), zero1=True)}
AGAIN = {"wrapped": lambda net: md.checkpoint_wrapper(net.up), "all": md.checkpoint_wrapper,
         "selective": lambda net: md.checkpoint_wrapper(net.up, save=["matmul"]),
         "mindspore": lambda net: net.up.recompute()}


@pytest.mark.parametrize("first", ["wrapped first", "spread first"])
@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("again", AGAIN)
def test_a_parameter_unfrozen_later_gets_its_gradient(spread, again, first):
    if spread == "no mesh":
        if again == "selective":
            pytest.skip("it needs DTensors")
        patches.uninstall()  # as at the start of a process
    net, plain = Net(), Net()
    if again == "mindspore":
        md.zeros((1,), one_rank())  # the library's patches are in place
    net.up.weight.requires_grad = net.up.bias.requires_grad = False
    if first == "wrapped first":
        AGAIN[again](net)
        net = SPREAD[spread](net)
    else:
        net = SPREAD[spread](net)
        AGAIN[again](net)
    for frozen in (("up.weight", "up.bias"), ("up.bias",), ()):
        for n in (net, plain):
            for name, p in n.parameters_and_names():
                p.requires_grad = name not in frozen
        for g, w in zip(gradients(net), gradients(plain), strict=True):
            assert np.allclose(g, w, rtol=2e-5, atol=1e-6), frozen
    assert all(w.any() for w in gradients(plain))


def test_a_parameter_put_in_later_gets_its_gradient():
    net, plain = md.checkpoint_wrapper(Net()), Net()
    for n in (net, plain):
        n.up.weight = Parameter(Tensor(np.random.default_rng(9).normal(size=(5, 6)).astype(np.float32)), name="up.weight")
    check(net, plain)


def test_what_is_frozen_between_forward_and_backward_changes_nothing_of_the_rest():
    net, plain = md.checkpoint_wrapper(Net()), Net()
    for n in (net, plain):
        n.down.register_forward_hook(lambda cell, x, y, n=n: setattr(n.up.bias, "requires_grad", False))
    for g, w, p in zip(gradients(net), gradients(plain), plain.get_parameters(), strict=True):
        assert p is plain.up.bias or np.allclose(g, w, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("again", AGAIN)
def test_a_copy_recomputes_its_own_parameters(spread, again):
    if spread == "no mesh" and again == "selective":
        pytest.skip("it needs DTensors")
    net, plain = SPREAD[spread](Net()), Net()
    AGAIN[again](net)
    check(net, plain)
    twin = copy.deepcopy(net)
    for p, q in zip(twin.get_parameters(), plain.get_parameters(), strict=True):
        p.set_data(p * 2)
        q.set_data(q * 2)
    check(twin, plain)
    check(net, Net())
