# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of its api, DTensor, local_map, register_sharding, initialisers and utils check, in our words; indexed
in docs/parity_behaviours.md.
"""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DeviceMesh, DTensor, distribute_tensor, init_device_mesh, local_map
from ms_dtensor.errors import ConfigError, DTensorError, LayoutError, MeshError, MixedOperandError, RedistributeError
from ms_dtensor.tensor import init as md_init
from tests.operands import Built, P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import array, counted, equal, refusal, refused_alike


# -- api: distribute_tensor ----------------------------------------------------------------------------------------------
def distribute_is_one_collective_and_shapes_are_global(world, line):
    with counted() as count:
        x = distribute_tensor(data(1, 12, 3), line, [S(0)])
    assert sum(count.values()) == 1 and x.size() == (12, 3) and tuple(x.to_local().shape) == (3, 3)


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


def refused(world, kind, text: str, call) -> None:
    """The same message everywhere, and nothing communicated before it."""
    message = refused_alike(world, call, kind)
    assert text in message, message


# -- distribute_tensor, from_local ---------------------------------------------------------------------------------------
def distribute_tensor_cuts_every_layout_of_every_shape(world, grid):
    for shape in ((4, 8), (5, 3), (1, 2), (0, 4)):
        x = data(1, *shape)
        for placements in ((R, R), (S(0), R), (R, S(1)), (S(0), S(1)), (S(0), S(0)), (S(-1), S(-2))):
            for src in (0, None):
                dx = distribute_tensor(x, grid, placements, src_data_rank=src)
                box = tuple(slice(a, b) for a, b in dx.layout.local_box())
                np.testing.assert_array_equal(dx.to_local().asnumpy(), x.asnumpy()[box])
                assert dx.shape == shape and all(p.dim >= 0 for p in dx.placements if p.is_shard())
                dx.copy_(dx * 0)
                equal(x, data(1, *shape), "the source")


def negative_dims_and_redistribution_to_oneself(world, line):
    x = distribute_tensor(data(1, 8, 4), line, [S(-1)])
    with counted({}):
        assert x.redistribute(placements=[S(1)]) is x and x.placements == (S(1),)
        assert x.redistribute(placements=[S(-1)]) is x
    refused(world, RedistributeError, "Partial", lambda: x.redistribute(placements=[P]))
    refused(world, LayoutError, "dims -2 to 1", lambda: x.redistribute(placements=[S(5)]))


def ranks_outside_the_mesh_hold_nothing_and_may_take_part(world):
    inside = world.rank in (0, 2)
    assert (_some().get_coordinate() is not None) == inside
    rows = {rank: np.random.default_rng(rank).normal(size=(3, 2)).astype(np.float32) for rank in (world.rank, 0, 2)}
    told = DTensor.from_local(Tensor(rows[world.rank]), _some(), [S(0)])
    whole = told.redistribute(placements=[R])
    for x, count in ((distribute_tensor(data(1, 6, 2), _some(), [S(0)]), 3), (told, 3), (whole, 6),
                     (whole.redistribute(placements=[S(0)]), 3)):
        assert x.shape == (6, 2) and "some" in repr(x)
        assert tuple(x.to_local().shape) == ((count, 2) if inside else (0, 0))
    assert whole.to_local().asnumpy().tolist() == (np.concatenate((rows[0], rows[2])).tolist() if inside else [])
    assert (told + 2).to_local().asnumpy().tolist() == ((rows[world.rank] + 2).tolist() if inside else [])


# -- factories -------------------------------------------------------------------------------------------------------------
def ranges_identities_and_tensors_like_others(world):
    """Every factory that computes its values, even, uneven and empty, against NumPy; nothing is communicated."""
    for mesh, placements in ((mesh_1d(), [S(0)]), (mesh_2d(), (S(0), S(0))), (mesh_2d(), (R, S(0))), (mesh_1d(), [R])):
        at = {"device_mesh": mesh, "placements": placements}
        md.rand(4, **at)  # at a mesh's first random numbers ranks compare their seeds
        with counted({}):
            made = [(md.arange(10, **at), np.arange(10)), (md.arange(1, 8, 3, **at), np.arange(1, 8, 3)),
                    (md.arange(5, 0, -2, **at), np.arange(5, 0, -2)), (md.arange(0, **at), np.arange(0)),
                    (md.arange(0.5, 3, 0.25, dtype=ms.float16, **at), np.arange(0.5, 3, 0.25, dtype=np.float16)),
                    (md.linspace(-1, 2, 7, **at), np.linspace(-1, 2, 7, dtype=np.float32)),
                    (md.linspace(3, 3, 1, **at), np.array([3], np.float32))]
            made += [(md.eye(n, m, **at), np.eye(n, m, dtype=np.float32)) for n, m in ((4, None), (5, 3), (3, 5), (1, 1))]
            for shape in ((8, 4), (5, 3), (1, 2), (0, 3)):
                x = placed(data(1, *shape), mesh, *placements)
                made += [(md.ones(shape, **at), np.ones(shape)), (md.zeros(shape, **at), np.zeros(shape)),
                         (md.full(shape, 7.0, **at), np.full(shape, 7.0)), (md.full_like(x, 2.5), np.full(shape, 2.5)),
                         (md.zeros_like(x), np.zeros(shape)), (md.ones_like(x, dtype=ms.int32), np.ones(shape, np.int32))]
                for like in (md.empty_like(x), md.rand_like(x), md.randn_like(x), md.zeros_like(x)):
                    assert like.layout is x.layout
                other = md.ones_like(x, device_mesh=mesh_1d(), placements=[R])
                assert other.placements == (R,) and other.shape == shape
        for out, wanted in made:
            assert out.shape == wanted.shape and out.local_shape == out.layout.local_shape(), (out, wanted.shape)
            np.testing.assert_allclose(out.full_tensor().asnumpy(), wanted, rtol=1e-6)
    part = DTensor.from_local(data(1, 4, 4), mesh_1d(), [P])
    assert md.zeros_like(part).placements == (R,)  # new values are no summands
    for make in (md.rand, md.randn):  # bit for bit the same in every dtype, uneven too
        for dtype in (ms.float16, ms.float32, ms.float64):
            values = []
            for mesh, placements in ((mesh_1d(), [S(0)]), (mesh_2d(), (S(1), S(0))), (mesh_1d(), [R])):
                md.manual_seed(9)
                values.append(make(7, 5, dtype=dtype, device_mesh=mesh, placements=placements).full_tensor().asnumpy())
            assert all(np.array_equal(values[0], v) for v in values) and values[0].dtype == str(dtype).lower()


# -- local_map, register_sharding ----------------------------------------------------------------------------------
def local_map_results_on_another_mesh_or_plain(world, line):
    other = mesh_1d(4, "other")
    x = distribute_tensor(data(1, 8, 4), line, [S(0)])
    out = local_map(lambda a: a * 2, [S(0)], ([S(0)],), device_mesh=other)(x)
    assert out.device_mesh == other
    equal(out, data(1, 8, 4) * 2)
    result = local_map(lambda a, n: (a * n, n, a.sum()), ([S(0)], None, [P]), ([S(0)], None))(x, 3)
    assert result[1] == 3 and result[2].placements == (P,)
    equal(result[2], data(1, 8, 4).sum())
    assert not isinstance(local_map(lambda a: a.sum(), None)(x), DTensor)
    assert local_map(lambda a: a + 1, [S(0)])(1) == 2


def a_registered_rule_is_used_and_taken_back(world, line):
    x = data(1, 8, 6)
    dx = distribute_tensor(x, line, [S(0)])
    assert mint.add(dx, dx).placements == (S(0),)
    with md.register_rule("AddExt", "P, P -> P", override=True, params="input other alpha"):
        out = mint.add(dx, dx)
        assert out.placements == (R,)
        equal(out, x + x)
    assert mint.add(dx, dx).placements == (S(0),)


def meshes_of_the_wrong_size_are_explained(world):
    refused(world, MeshError, "needs 3 ranks, the world has 4", lambda: init_device_mesh("cpu", (3,)))
    refused(world, MeshError, "must be npu, gpu or cpu", lambda: init_device_mesh("tpu", (4,)))
    refused(world, MeshError, "each rank once", lambda: DeviceMesh("cpu", [0, 0]))
    refused(world, MeshError, "has ranks [7], but the world has 4", lambda: DeviceMesh("cpu", [0, 7]))
    refused(world, MeshError, "'mesh_dim_names' must be", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a",)))
    x, y = (distribute_tensor(data(3, 4, 2), DeviceMesh("cpu", order), [S(0)]) for order in ([0, 1, 2, 3], [0, 1, 3, 2]))
    for call in (lambda: x + y, lambda: local_map(lambda a, b: a, [S(0)])(x, y)):
        for text in ("different meshes", "ranks [0, 1, 2, 3]", "ranks [0, 1, 3, 2]"):
            refused(world, DTensorError, text, call)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))  # two disjoint meshes in a world of four
    assert mesh.rank_list == ((0, 1) if world.rank < 2 else (2, 3))
    equal(distribute_tensor(data(3, 4, 2), mesh, [S(0)]).sum(), data(3, 4, 2).asnumpy().sum())


def mindspores_own_communication_stays_out(world):
    """Under any name a script has for it, and what was started goes on."""
    import mindspore.communication as outer
    from mindspore.communication.management import init, release
    for call in (outer.init, outer.release, init, release):
        text = refused_alike(world, call, ConfigError)
        assert text.startswith("For 'mindspore.communication.") and text.count("\n") >= 4, text
    assert ms.ops.ones((2, 3)).sum() == 6
