# SPDX-License-Identifier: Apache-2.0
"""Ops that hand a parameter back (a cast to its own dtype, x[:]): its gradient survives.

MindSpore returns an alias of the leaf there, and a DTensor made of that alias would have no gradient, silently.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_dtensor import Replicate, distribute_tensor, init_device_mesh, value_and_grad

FORMS = {
    "astype": lambda p: p.astype(ms.float32), "to": lambda p: p.to(ms.float32), "float": lambda p: p.float(),
    "cast": lambda p: ops.cast(p, ms.float32), "type_as": lambda p: p.type_as(p), "x[:]": lambda p: p[:],
    "x[0:2]": lambda p: p[0:2], "x[...]": lambda p: p[...], "narrow": lambda p: mint.narrow(p, 0, 0, 2),
    "pad by 0": lambda p: mint.nn.functional.pad(p, (0, 0)), "reshape": lambda p: p.reshape(2, 3),
    "view": lambda p: p.view(2, 3), "permute": lambda p: p.permute(0, 1), "broadcast_to": lambda p: p.broadcast_to((2, 3)),
    "expand_as": lambda p: p.expand_as(p), "squeeze": lambda p: p.squeeze(), "tile": lambda p: ops.tile(p, (1, 1)),
    "split": lambda p: mint.split(p, 2, 0)[0], "chunk": lambda p: mint.chunk(p, 1, 0)[0], "cat": lambda p: mint.cat([p], 0),
    "stack": lambda p: ops.stack([p])[0], "mint.stack": lambda p: mint.stack([p])[0], "clone": lambda p: p.clone(),
    "contiguous": lambda p: p.contiguous(), "dropout 0": lambda p: ops.dropout(p, 0.0),
    "Identity": lambda p: nn.Identity()(p),
    "swapaxes": lambda p: p.swapaxes(0, 0), "clamp": lambda p: p.clamp(-99, 99), "sum over none": lambda p: p * 1 + 0,
}


@pytest.mark.parametrize("name", FORMS)
def test_gradient_survives(name, cpu):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    array = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    p = Parameter(distribute_tensor(Tensor(array), mesh, [Replicate()]), name="w")
    fn = FORMS[name]
    value, (grad,) = value_and_grad(lambda: (fn(p) * fn(p)).sum(), None, [p])()
    assert value.item() == (array ** 2).sum()
    assert np.allclose(grad.to_local().asnumpy(), 2 * array)


@pytest.mark.parametrize("stop", [ops.stop_gradient, lambda p: p.detach(), lambda p: ops.stop_gradient(p.float())])
def test_a_stopped_gradient_stays_stopped(stop, cpu):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    p = Parameter(distribute_tensor(Tensor(np.ones((2, 3), np.float32)), mesh, [Replicate()]), name="w")
    _, (grad,) = value_and_grad(lambda: (stop(p) * p).sum(), None, [p])()
    assert np.allclose(grad.to_local().asnumpy(), 1)
