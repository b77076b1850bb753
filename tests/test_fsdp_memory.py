# SPDX-License-Identifier: Apache-2.0
"""Memory that comes and goes under tensors: it is really given back, and comes again at the same address."""
from __future__ import annotations

import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import ms_dtensor as md

pytestmark = pytest.mark.usefixtures("cpu")


def test_pages_given_back_are_the_systems():
    """Of a shared mapping they would only leave the process's books: the system would keep them, values and all."""
    from ms_dtensor.comm.fake import FakeBackend
    from ms_dtensor.comm.packing import write
    from ms_dtensor.parallel.sharding.block import HostMemory

    memory = HostMemory([(300, 400), (5,)], ms.float32, FakeBackend(1))
    first, second = memory.tensor(0), memory.tensor(1)
    value = np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32)
    for _ in range(2):
        memory.claim()
        write(memory.tensor(0), ms.Tensor(value))
        write(memory.tensor(1), ms.Tensor(value[0, :5]))
        assert np.array_equal(first.asnumpy(), value) and np.array_equal(second.asnumpy(), value[0, :5])
        memory.release()
        assert not first.asnumpy().any() and not second.asnumpy().any(), "new pages are zeros"


@pytest.mark.parametrize("wrap", [md.replicate, md.fully_shard])
def test_a_model_that_nobody_has_goes(wrap):
    """Hooks on parameters, which MindSpore keeps where Python's collector does not look, held a replicated cell for good."""
    cell = wrap(nn.Dense(4, 2), mesh=md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)),
                mp_policy=md.MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True))
    weight, gone = cell.weight, [weakref.ref(cell), weakref.ref(cell.weight)]
    x = ms.Tensor(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    with md.recorded([weight]):
        loss = cell(x).sum()
        del cell  # the parameter is enough for its gradient
        md.backward(loss)
    assert np.allclose(weight.main_grad.to_local().asnumpy(), np.tile(x.asnumpy().sum(0), (2, 1)))
    del weight, loss
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
