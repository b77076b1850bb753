# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's own tests of its api, local_map and register_sharding check, on our ranks and in our words."""
import mindspore as ms
import numpy as np
from mindspore import mint

import ms_dtensor as md
from ms_dtensor import DeviceMesh, DTensor, distribute_tensor, init_device_mesh, local_map
from ms_dtensor.errors import ConfigError, DTensorError, LayoutError, MeshError, RedistributeError
from tests.dist.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.dist.support import counted, equal, refused_alike


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


def negative_dims_and_redistribution_to_oneself(world, line):
    x = distribute_tensor(data(1, 8, 4), line, [S(-1)])
    with counted({}):
        assert x.redistribute(placements=[S(1)]) is x and x.placements == (S(1),)
        assert x.redistribute(placements=[S(-1)]) is x
    refused(world, RedistributeError, "Partial", lambda: x.redistribute(placements=[P]))
    refused(world, LayoutError, "dims -2 to 1", lambda: x.redistribute(placements=[S(5)]))


def ranks_outside_the_mesh_hold_nothing_and_may_take_part(world):
    mesh = DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))
    x = data(1, 6, 2)
    dx = distribute_tensor(x, mesh, [S(0)])
    inside = world.rank in (0, 2)
    assert (mesh.get_coordinate() is not None) == inside
    assert tuple(dx.to_local().shape) == ((3, 2) if inside else (0, 0))
    assert dx.shape == (6, 2) and "tp" in repr(dx)


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
