# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of its api, DTensor, initialisers and utils check, in our words; indexed in docs/parity_behaviours.md."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DTensor, distribute_tensor
from ms_dtensor.errors import MixedOperandError
from ms_dtensor.tensor import init as md_init
from tests.dist.operands import Built, P, R, S, data, mesh_1d, mesh_2d, placed
from tests.dist.support import array, counted, equal, refusal, refused_alike


# -- api: distribute_tensor ----------------------------------------------------------------------------------------------
def distribute_is_one_collective_and_shapes_are_global(world, line):
    with counted() as count:
        x = distribute_tensor(data(1, 12, 3), line, [S(0)])
    assert sum(count.values()) == 1 and x.size() == (12, 3) and tuple(x.to_local().shape) == (3, 3)


def another_rank_may_be_the_truth(world):
    for placements in ([S(0)], [S(1)], [R]):
        equal(distribute_tensor(data(world.rank, 12, 12), mesh_1d(), placements, src_data_rank=1), data(1, 12, 12))


# -- api: distribute_module ----------------------------------------------------------------------------------------------
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


# -- dtensor: to_local, full_tensor --------------------------------------------------------------------------------------
def to_local_shares_storage(world):
    x = DTensor.from_local(data(world.rank, 3, 3), mesh_1d(), [S(0)])
    assert x.to_local().data_ptr() == x.data_ptr() and type(x.to_local()) is Tensor


def full_tensor_takes_the_cotangents_layout(world):
    x = distribute_tensor(ops.ones((8, 3)), mesh_1d(), [S(0)])
    for hint, scale in (([P], 4), (None, 1)):
        equal(md.value_and_grad(lambda t, h=hint: t.full_tensor(grad_placements=h).sum(), 0)(x)[1],
              np.full((8, 3), scale, np.float32))


def a_new_tensor_like_another_has_its_own_gradient(world):
    x = distribute_tensor(data(1, 8, 8), mesh_1d(), [S(0)])
    new = md.empty_like(x)
    g = md.value_and_grad(lambda t: t.sum(), 0)(new)[1]
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
    cube = md.init_device_mesh("cpu", (2, 2, 1))
    assert DTensor.from_local(data(1, 3, 3, 3), cube, [S(0), S(1), S(2)]).shape == (6, 6, 3)
    assert DTensor.from_local(data(1, 3, 3, 3), cube, [S(0), S(0), S(2)]).shape == (12, 3, 3)


def _some():
    return md.DeviceMesh("cpu", [0, 2], mesh_dim_names=("some",))


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
    value, grad = md.value_and_grad(f, 0)(data(world.rank, 3, 3))
    equal(value, data(0, 3, 3).sum() * 6.0)
    equal(grad, np.full((3, 3), 6, np.float32))


# -- init ----------------------------------------------------------------------------------------------------------------
def constant_initialisers_write_the_shard(world):
    x = md_init.constant_(DTensor.from_local(data(1, 8, 4), mesh_1d(), [S(0)]), 2.4)
    equal(x, np.full((32, 4), 2.4, np.float32))


def zeros_on_some_of_the_ranks(world):
    for ranks, sizes in (([0, 3], {0: (16, 3), 3: (16, 3)}), ([0, 1, 3], {0: (11, 3), 1: (11, 3), 3: (10, 3)})):
        x = md.zeros((32, 3), device_mesh=md.DeviceMesh("cpu", ranks), placements=[S(0)])
        assert x.shape == (32, 3) and x.local_shape == sizes.get(world.rank, (0, 0))
    grid = md.DeviceMesh("cpu", [[0], [3]])
    assert md.zeros((32, 3), device_mesh=grid, placements=[S(0), S(1)]).local_shape == (
        (16, 3) if world.rank in (0, 3) else (0, 0))


# -- utils ---------------------------------------------------------------------------------------------------------------


REDUCED = {"sum": lambda x: x.sum(0), "avg": lambda x: x.mean(0), "max": lambda x: x.max(0), "min": lambda x: x.min(0),
           "prod": lambda x: x.prod(0)}


def what_is_copied_into_a_partial_keeps_its_reduction(world, line):
    for op, reduced in REDUCED.items():
        for shape in ((3, 5), (5,), (3, 1), ()):
            mine = [data(10 + r, *shape).asnumpy() for r in range(4)]
            x = DTensor.from_local(data(world.rank, 3, 5), line, [md.Partial(op)])
            with counted({}):
                out = x.copy_(DTensor.from_local(Tensor(mine[world.rank]), line, [md.Partial(op)]))
            assert out is x and x.placements == (md.Partial(op),), (op, shape)
            equal(x, np.broadcast_to(reduced(np.stack(mine)), (3, 5)), f"{op} {shape}")
    x = DTensor.from_local(data(1, 3, 5), line, [P])
    for other in (md.Partial("max"), R):
        assert "change its placement" in refusal(lambda other=other: x.copy_(DTensor.from_local(data(2, 3, 5), line, [other])))


def seeds_of_mindspore_seed_dtensors(world, line):

    def drawn():
        return array(md.rand((8, 3), device_mesh=line, placements=[S(0)]))
    ms.set_seed(3)
    first, second = drawn(), drawn()
    ms.set_seed(3)
    assert np.array_equal(first, drawn()) and np.array_equal(second, drawn()) and not np.array_equal(first, second)
    ms.set_seed(4)
    assert not np.array_equal(first, drawn())


class Scaled(nn.Dense):
    """A linear map whose result a buffer scales; the buffer is of the input's size, or one number."""

    def __init__(self, ins, outs, by):
        super().__init__(ins, outs)
        self.register_buffer("by", by)
        self.weight.set_data(data(ins, outs, ins))
        self.bias.set_data(data(outs, outs))

    def construct(self, x):
        return super().construct(x * self.by)


def styles_replicate_the_buffers_of_their_cells(world, grid):
    def net_of_two():
        norm = nn.LayerNorm((8,))
        norm.register_buffer("unused", data(6, 3))
        return Built(lambda c, x: c.down(mint.tanh(c.up(c.norm(x)))), norm=norm, up=Scaled(8, 12, data(1, 8)),
                     down=Scaled(12, 8, data(2)))
    x = data(5, 4, 8)
    plain = net_of_two()
    plan = {"norm": md.SequenceParallel(sequence_dim=0), "up": md.ColwiseParallel(use_local_output=False),
            "down": md.RowwiseParallel(use_local_output=False)}
    net = net_of_two()
    net.up._buffers["by"] = data(1 + world.rank, 8)  # coordinate 0's are everybody's
    net = md.parallelize_module(net, grid["tp"], plan)
    for buffer in (net.norm.unused, net.up.by, net.down.by):
        assert isinstance(buffer, DTensor) and buffer.placements == (R,) and not isinstance(buffer, Parameter)
    if world.rank < 2:
        equal(net.up.by, data(1, 8))
    alone = md.parallelize_module(net_of_two(), grid["tp"], plan)
    want = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
    for model in (alone, md.distribute_module(md.parallelize_module(net_of_two(), grid["tp"], plan), grid["tp"])):
        got = md.value_and_grad(lambda t, m=model: (m(t) ** 2).mean(), None, model.trainable_params())(
            placed(x, grid["tp"], R))
        equal(got, want)
