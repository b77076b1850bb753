# SPDX-License-Identifier: Apache-2.0
"""A host tensor's memory as NumPy's, kept while it is used; and memory that comes and goes under tensors."""
import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.internals.host import host_array

TABLE = np.random.default_rng(3).integers(-99, 99, (6, 8))

MADE = {
    "rows of another": lambda x: x[2:5], "columns of another": lambda x: x[:, 3:5], "turned": lambda x: x.T,
    "every second": lambda x: x[::2], "sum": lambda x: x + x, "number": lambda x: x.sum(), "nothing": lambda x: x[:0],
    "one row": lambda x: x[1:2, 2:7], "parameter": lambda x: Parameter(x.copy(), name="p"),
    "from NumPy": lambda x: Tensor.from_numpy(TABLE[1:4].astype(np.float64))} | {
    str(to): lambda x, to=to: x.astype(to) for to in (ms.float16, ms.bfloat16, ms.int32, ms.int64, ms.int8, ms.bool_)}


@pytest.mark.parametrize("name", MADE)
def test_it_is_what_asnumpy_gives(name):
    x = MADE[name](Tensor(TABLE.astype(np.float32)))
    want, got = x.float().asnumpy() if x.dtype == ms.bfloat16 else x.asnumpy(), host_array(x)
    assert got.shape == want.shape and np.array_equal(got.astype(want.dtype), want)
    assert x.dtype == ms.bfloat16 or got.dtype == want.dtype


def test_it_is_the_memory_itself():
    x = mint.add(Tensor(TABLE.astype(np.float32)), 1)
    host_array(x)[2, 3] = 7
    assert x[2, 3] == 7
    host_array(x[::2, 1:].T, gaps=True)[4, 2] = 9  # its element is x[2 * 2, 1 + 4]
    assert x[4, 5] == 9


def test_it_outlives_the_tensor():
    array = host_array(mint.add(Tensor(np.full((300, 300), 2.5, np.float32)), 1))
    gc.collect()
    others = [mint.add(Tensor(np.full((300, 300), 9.0, np.float32)), i) for i in range(20)]
    assert (array == 3.5).all() and len(others) == 20


def test_of_a_dtensor_it_is_the_shard():
    mesh = md.init_device_mesh("cpu", (1,))
    x = md.distribute_tensor(Tensor(TABLE.astype(np.float32)), mesh, [md.Shard(0)])
    assert type(host_array(x)) is np.ndarray and np.array_equal(host_array(x), TABLE)


# -- memory that comes and goes under tensors --------------------------------------------------------------------------
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
