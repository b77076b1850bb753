# SPDX-License-Identifier: Apache-2.0
"""Whole sizes that do not fit, and shards that would: refused as on one device, not computed with half of an operand.

And a mesh shape that cannot be, before a process group starts.
"""
import itertools

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import Layout, Replicate, Shard, comm, init_device_mesh
from ms_dtensor.compat import hyper_parallel
from ms_dtensor.errors import MeshError, OpRuleError

PLACED = (Replicate(), Shard(0), Shard(1))
CALLS = {  # one operand is twice as large as fits: a shard of it on two ranks does
    "matmul": (mint.matmul, (4, 8), (4, 3)), "matmul, rows": (mint.matmul, (3, 4), (8, 3)), "bmm": (
        mint.bmm, (2, 4, 8), (2, 4, 3)), "MatMul": (lambda a, b: ops.MatMul()(a, b), (4, 8), (4, 3)),
    "batches": (mint.matmul, (4, 2, 3), (2, 3, 5)), "dense": (ops.dense, (4, 8), (3, 4)),
    "einsum": (lambda a, b: mint.einsum("ij,jk->ik", a, b), (4, 8), (4, 3)),
    "addmm": (lambda a, b: mint.addmm(a, b, b), (8, 4), (4, 4)),
    "add": (lambda a, b: a + b, (4, 8), (4, 4)), "mul, rows": (lambda a, b: a * b, (8, 4), (4, 4)),
    "where": (lambda a, b: mint.where(a > 0, a, b), (8, 4), (4, 4)), "maximum": (mint.maximum, (8, 4), (8, 2)),
    "mse_loss": (mint.nn.functional.mse_loss, (8, 4), (4, 4)), "bce": (ops.binary_cross_entropy, (8, 4), (4, 4)),
    "copy_": (lambda a, b: a.copy_(b), (8, 4), (4, 4)), "add_": (lambda a, b: a.add_(b), (8, 4), (4, 4)),
    "summed over one": (mint.matmul, (4, 1), (2, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_only_shards_would_fit_is_refused(name):
    call, *shapes = CALLS[name]
    with pytest.raises((ValueError, RuntimeError)):
        call(*(Tensor(np.ones(shape, np.float32)) for shape in shapes))
    with comm.fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for placed in itertools.product(PLACED, PLACED):
            operands = [md.DTensor.from_local(ops.ones(Layout(mesh, [p], shape).local_shape((0,))), mesh, [p], shape=shape)
                        for p, shape in zip(placed, shapes, strict=True)]
            with pytest.raises(OpRuleError, match="sizes do not fit") as caught:
                call(*operands)
            assert operands[0].layout.describe() in str(caught.value)


def test_a_whole_input_of_a_style_that_takes_shards_is_refused():
    from mindspore import nn

    with comm.fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for sizes in ((4, 3), (5, 3)):
            cell = md.parallelize_module(nn.Dense(*sizes), mesh, md.RowwiseParallel())
            with pytest.raises(OpRuleError, match="sizes do not fit") as caught:
                cell(ops.ones((2, sizes[0])))
            assert "input_layouts=Replicate(), if every rank passes the whole" in str(caught.value)


def test_a_mask_that_a_replicated_cell_takes_as_rows_is_refused_with_what_it_needs():
    from mindspore import nn

    class Masked(nn.Cell):
        def construct(self, x, mask):
            return (mint.matmul(x, x.swapaxes(1, 2)) + mask).sum()

    with comm.fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net, x, mask = md.replicate(Masked(), mesh=mesh), ops.ones((2, 3, 4)), ops.ones((3, 3))
        with pytest.raises(OpRuleError, match=r"distribute_tensor\(x, mesh\), of a mask"):
            net(x, mask)
        assert net(x, md.distribute_tensor(mask, mesh)).layout.describe() == "f32[]{sum: dp} on mesh(dp=2)"


@pytest.fixture
def not_started():
    comm.shutdown()
    yield
    assert comm.current_world() is None


@pytest.mark.parametrize("shape", [(0,), (-1,), (), (2, 0), (-2, -2), (2.0,), ("2",), (True,), 4, "4", None, {2: 2}])
@pytest.mark.parametrize("make", [init_device_mesh, hyper_parallel.init_device_mesh])
def test_no_mesh_has_that_shape(not_started, make, shape):
    with pytest.raises(MeshError, match="'mesh_shape' must be") as e:
        make("cpu", shape)
    assert repr(shape) in e.value.attempt and e.value.rule and e.value.fix


def test_names_are_counted_first(not_started):
    with pytest.raises(MeshError, match="'mesh_dim_names' must be 2 different names"):
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp",))
