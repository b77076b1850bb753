# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of its api, DTensor, initialisers and utils check, in our words; indexed in docs/parity_behaviours.md."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DeviceMesh, DTensor, Layout, distribute_module, distribute_tensor, init_device_mesh, value_and_grad
from ms_dtensor.errors import MixedOperandError
from ms_dtensor.tensor import init as md_init
from tests.dist.operands import Built, P, R, S, data, mesh_1d, mesh_2d, placed
from tests.dist.support import counted, equal, refusal, refused_alike


def stack(n):
    """Ten square layers."""
    return Built(lambda c, x: c.seq(x), seq=nn.SequentialCell([nn.Dense(n, n) for _ in range(10)]))


def _cut_linears(names=None):
    def partition(name, cell, mesh):
        if isinstance(cell, nn.Dense) and (names is None or name in names):
            for key, p in cell._params.items():
                cell._params[key] = Parameter(distribute_tensor(p, mesh, [S(0)]), name=p.name, requires_grad=p.requires_grad)
    return partition


def chunks(a: np.ndarray, n: int, dim: int) -> list[np.ndarray]:
    """ceil(len / n) rows each until none are left: what every shard should be."""
    step = -(-a.shape[dim] // n)
    return [np.take(a, range(min(i * step, a.shape[dim]), min((i + 1) * step, a.shape[dim])), dim) for i in range(n)]


# -- api: distribute_tensor ----------------------------------------------------------------------------------------------
def distribute_is_one_collective_and_shapes_are_global(world, line):
    with counted() as count:
        x = distribute_tensor(data(1, 12, 3), line, [S(0)])
    assert sum(count.values()) == 1 and x.size() == (12, 3) and tuple(x.to_local().shape) == (3, 3)


def distributing_keeps_requires_grad_and_makes_a_leaf(world):
    for wanted in (True, False):
        net = nn.Dense(4, 8)
        net.weight.requires_grad = wanted
        w = distribute_module(net, mesh_1d()).weight
        assert w.requires_grad is wanted and w._is_leaf


def another_rank_may_be_the_truth(world):
    for placements in ([S(0)], [S(1)], [R]):
        equal(distribute_tensor(data(world.rank, 12, 12), mesh_1d(), placements, src_data_rank=1), data(1, 12, 12))


# -- api: distribute_module ----------------------------------------------------------------------------------------------
def what_a_partition_function_leaves_is_replicated(world):
    for partition, cut in ((_cut_linears(), "seq."), (_cut_linears(("seq.0", "seq.8")), ("seq.0.", "seq.8.")), (None, "none")):
        for p in distribute_module(stack(8), mesh_1d(), partition).get_parameters():
            assert isinstance(p, DTensor) and p.placements == ((S(0),) if p.name.startswith(cut) else (R,)), (cut, p)


def input_and_output_functions_convert(world):
    net = distribute_module(nn.Dense(20, 20), mesh_1d(), None,
                            lambda cell, inputs, mesh: DTensor.from_local(inputs[0], mesh, [S(0)]),
                            lambda cell, outputs, mesh: outputs.to_local())
    out = net(data(world.rank, 5, 20))
    assert type(out) is Tensor and out.shape == (5, 20)


def gradients_of_replicated_parameters_are_replicated_dtensors(world):
    net = distribute_module(stack(4), mesh_1d(), None, lambda cell, inputs, mesh: DTensor.from_local(inputs[0], mesh, [R]))
    _, grads = value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(data(1, 4, 4))
    assert all(isinstance(g, DTensor) and g.placements == (R,) for g in grads)


def casting_changes_local_and_global_dtype(world):
    for x in (DTensor.from_local(data(1, 10), mesh_1d(), [R]), distribute_tensor(data(1, 10), mesh_1d(), [S(0)])):
        y = x.to(ms.bfloat16)
        assert y.dtype == ms.bfloat16 and y.to_local().dtype == ms.bfloat16 and y.layout.dtype == "bfloat16"


# -- dtensor: construction -------------------------------------------------------------------------------------------------
def from_local_tells_shape_stride_device_and_placements(world):
    given, t = [S(0)], data(1, 3, 3)
    x = DTensor.from_local(t, mesh_1d(), given)
    given[0] = R  # copied, not kept
    assert x.placements == (S(0),) and x.shape == DTensor(t, mesh_1d(), [S(0)]).size() == (12, 3)
    assert x.stride() == (3, 1) and x.device_mesh.device_type == "cpu"
    for p in (R, P):
        assert DTensor.from_local(t, mesh_1d(), [p]).shape == (3, 3)
    last, whole = (make(data(1, 3, 12), mesh_1d(), [S(-1)]) for make in (DTensor.from_local, distribute_tensor))
    assert last.placements == whole.placements == (S(1),) and last.stride() == (48, 1)
    other = DTensor.from_local(data(2, 3, 3), mesh_1d(), [S(0)])
    assert hash(x.layout) == hash(other.layout) and x.layout == other.layout != DTensor.from_local(t, mesh_1d(), [R]).layout


def gradients_flow_through_from_local_and_to_local_to_plain_tensors(world):
    def f(t):
        x = DTensor.from_local(t * 3 + 8, mesh_1d(), [S(0)])
        assert isinstance(x, DTensor) and not x._is_leaf
        return ((x * 3).to_local() + data(2, 3, 3)).sum()
    equal(ms.grad(f)(data(world.rank, 3, 3)), np.full((3, 3), 9, np.float32))


def from_local_of_uneven_shards_takes_shape_and_stride(world):
    x = data(1, 5, 2)
    mine = Tensor(np.ascontiguousarray(chunks(x.asnumpy(), 4, 0)[world.rank]))
    dx = DTensor.from_local(mine, mesh_1d(), [S(0)], shape=(5, 2), stride=(2, 1))
    assert dx.size() == (5, 2) and dx.stride() == (2, 1)
    equal(dx, x)


# -- dtensor: to_local, full_tensor --------------------------------------------------------------------------------------
def gradients_flow_through_to_local(world):
    x = DTensor.from_local(data(world.rank, 3, 3), mesh_1d(), [S(0)])
    g = value_and_grad(lambda t: ((t * 3).to_local() + data(5, 3, 3)).sum(), 0)(x)[1]
    assert g.placements == (S(0),)
    equal(g.to_local(), np.full((3, 3), 3, np.float32))


def to_local_shares_storage(world):
    x = DTensor.from_local(data(world.rank, 3, 3), mesh_1d(), [S(0)])
    assert x.to_local().data_ptr() == x.data_ptr() and type(x.to_local()) is Tensor


def a_partial_cotangent_of_a_gathered_value_is_reduce_scattered(world):
    x = distribute_tensor(ops.ones((8, 3)), mesh_1d(), [S(0)])
    with counted({("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}):
        g = value_and_grad(lambda t: t.redistribute(placements=[R]).to_local(grad_placements=[P]).sum(), 0)(x)[1]
    equal(g, np.full((8, 3), 4, np.float32))


def full_tensor_takes_the_cotangents_layout(world):
    x = distribute_tensor(ops.ones((8, 3)), mesh_1d(), [S(0)])
    for hint, scale in (([P], 4), (None, 1)):
        equal(value_and_grad(lambda t, h=hint: t.full_tensor(grad_placements=h).sum(), 0)(x)[1],
              np.full((8, 3), scale, np.float32))


def a_new_tensor_like_another_has_its_own_gradient(world):
    x = distribute_tensor(data(1, 8, 8), mesh_1d(), [S(0)])
    new = md.empty_like(x)
    g = value_and_grad(lambda t: t.sum(), 0)(new)[1]
    assert new.shape == x.shape and isinstance(g, DTensor) and g.placements == x.placements


# -- dtensor: a value --------------------------------------------------------------------------------------------------------
def cutting_does_not_change_the_source(world):
    whole = Tensor(np.arange(16, dtype=np.float32).reshape(4, 4))
    for dim in (0, 1):
        part = placed(whole, mesh_1d(), S(dim))
        np.testing.assert_array_equal(part.to_local().asnumpy(), np.take(whole.asnumpy(), [world.rank], dim))
        part.copy_(part * 0)
    np.testing.assert_array_equal(whole.asnumpy(), np.arange(16).reshape(4, 4))


# -- dtensor: meshes -----------------------------------------------------------------------------------------------------
def default_meshes_nest(world):
    x = data(1, 12, 3)
    with mesh_1d():
        assert DTensor.from_local(data(1, 3, 3), placements=[S(0)]).redistribute(placements=[R]).shape == (12, 3)
        assert distribute_tensor(x, placements=[S(0)]).local_shape == (3, 3)
        with mesh_2d():
            assert distribute_tensor(x, placements=[S(0), R]).local_shape == (6, 3)
        assert distribute_tensor(x, placements=[S(0)]).local_shape == (3, 3)


def shapes_on_meshes_of_two_and_three_axes(world):
    assert DTensor.from_local(data(1, 3, 3), mesh_2d(), [S(0), S(1)]).shape == (6, 6)
    assert DTensor.from_local(data(1, 3, 3), mesh_2d(), [S(0), S(0)]).shape == (12, 3)
    cube = init_device_mesh("cpu", (2, 2, 1))
    assert DTensor.from_local(data(1, 3, 3, 3), cube, [S(0), S(1), S(2)]).shape == (6, 6, 3)
    assert DTensor.from_local(data(1, 3, 3, 3), cube, [S(0), S(0), S(2)]).shape == (12, 3, 3)


def _some():
    return DeviceMesh("cpu", [0, 2], mesh_dim_names=("some",))


def from_local_outside_the_mesh_holds_nothing(world):
    x = DTensor.from_local(ops.ones((3, 4)), _some(), [S(0)])
    assert x.shape == (6, 4)
    for y, value in ((x, 1), (x + 2, 3)):
        assert y.to_local().asnumpy().tolist() == (np.full((3, 4), value).tolist() if world.rank in (0, 2) else [])


def truth_values_scalars_and_lists_outside_the_mesh(world):
    inside = world.rank in (0, 2)
    a, b = (DTensor.from_local(ops.ones((4, 3)), _some(), [S(0)]) for _ in range(2))
    if inside:
        assert mint.equal(a, b) is True
    else:  # PyTorch makes a value up; here a rank that cannot know says so
        assert "not part of the mesh" in refusal(lambda: mint.equal(a, b))
    total = a.sum()
    assert total.shape == () and (not inside or float(total.to_local().asnumpy()) == 12.0)
    parts = mint.split(DTensor.from_local(ops.ones((3, 4)), _some(), [S(0)]), [2, 2], 1)
    assert [tuple(p.to_local().shape) for p in parts] == [(3, 2) if inside else (0, 0)] * 2


def redistribution_on_a_part_of_the_ranks(world):
    whole = DTensor.from_local(ops.ones((4, 3)), _some(), [S(0)]).redistribute(placements=[R])
    assert tuple(whole.to_local().shape) == ((8, 3) if world.rank in (0, 2) else (0, 0))
    again = whole.redistribute(placements=[S(0)])
    assert tuple(again.to_local().shape) == ((4, 3) if world.rank in (0, 2) else (0, 0))


def a_plain_left_operand_under_implicit_replication(world):
    x = DTensor.from_local(ops.ones((4, 3)), mesh_1d(), [S(0)])
    with md.implicit_replication():
        out = ops.ones((3,)) + x
    assert out.placements == (S(0),) and out.shape == (16, 3)
    equal(out.to_local(), np.full((4, 3), 2, np.float32))


def scalar_tensors_mix_in_by_themselves(world):
    x = DTensor.from_local(ops.ones((4, 3)), mesh_1d(), [S(0)])
    equal((Tensor(np.float32(1)) + x).to_local(), np.full((4, 3), 2, np.float32))
    # PyTorch takes a one-element vector too, with a warning; here it is refused, on all ranks alike
    refused_alike(world, lambda: Tensor(np.ones(1, np.float32)) + x, MixedOperandError)


def run_check_keeps_gradients_and_takes_replicas_from_coordinate_0(world):
    def f(t):
        return (DTensor.from_local(t * 2, mesh_1d(), [R], run_check=True) * 3.0).sum()
    value, grad = value_and_grad(f, 0)(data(world.rank, 3, 3))
    equal(value, data(0, 3, 3).sum() * 6.0)
    equal(grad, np.full((3, 3), 6, np.float32))


# -- init ----------------------------------------------------------------------------------------------------------------
def constant_initialisers_write_the_shard(world):
    x = md_init.constant_(DTensor.from_local(data(1, 8, 4), mesh_1d(), [S(0)]), 2.4)
    equal(x, np.full((32, 4), 2.4, np.float32))


def factories_even_uneven_and_scalar(world):
    makers = ((md.ones, 1), (md.zeros, 0), (lambda shape, **how: md.full(shape, 123.4, **how), 123.4), (md.empty, None))
    for (make, value), shape, p in itertools.product(makers, ((4, 8, 12), (5, 10, 15), ()), (S(0), S(1), S(2), R)):
        if shape or p == R:
            x = make(shape, device_mesh=mesh_1d(), placements=[p])
            assert x.shape == shape and x.local_shape == Layout(mesh_1d(), [p], shape).local_shape()
            if value is not None:
                np.testing.assert_array_equal(x.to_local().asnumpy(), np.full(x.local_shape, value, np.float32))


def zeros_on_some_of_the_ranks(world):
    for ranks, sizes in (([0, 3], {0: (16, 3), 3: (16, 3)}), ([0, 1, 3], {0: (11, 3), 1: (11, 3), 3: (10, 3)})):
        x = md.zeros((32, 3), device_mesh=DeviceMesh("cpu", ranks), placements=[S(0)])
        assert x.shape == (32, 3) and x.local_shape == sizes.get(world.rank, (0, 0))
    grid = DeviceMesh("cpu", [[0], [3]])
    assert md.zeros((32, 3), device_mesh=grid, placements=[S(0), S(1)]).local_shape == (
        (16, 3) if world.rank in (0, 3) else (0, 0))


# -- utils ---------------------------------------------------------------------------------------------------------------
def two_axes_may_cut_one_dim_in_either_order(world):
    dp, tp = mesh_2d().get_coordinate()
    for shape, sizes in (((8, 2), [2, 2, 2, 2]), ((15, 5), [4, 4, 4, 3])):
        layout = Layout(mesh_2d(), [S(0), S(0)], shape, order=("tp", "dp"))  # FSDP over what TP has cut
        index = tp * 2 + dp
        assert layout.local_shape()[0] == sizes[index] and layout.local_offset()[0] == 4 * index * (shape[0] > 8) + \
            2 * index * (shape[0] == 8)
        x = data(1, *shape)
        mine = Tensor(np.ascontiguousarray(x.asnumpy()[layout.local_offset()[0]:][:sizes[index]]))
        equal(DTensor.from_local(mine, mesh_2d(), [S(0), S(0)], shape=shape).local_shape[0] * 0, 0)


def replicated_sharded_and_cut_over_three_axes(world):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "shards", "tp"))
    layout = Layout(mesh, [R, S(0), S(0)], (8, 2), order=("tp", "shards"))
    _, shard, tp = mesh.get_coordinate()
    assert layout.local_shape() == (2, 2) and layout.local_offset() == ((tp * 2 + shard) * 2, 0)
