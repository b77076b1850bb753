# SPDX-License-Identifier: Apache-2.0
"""Placements, meshes and layouts: values, arithmetic, and refusals that teach."""
import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_dtensor.core.layout import Layout
from ms_dtensor.core.mesh import DeviceMesh, common_root, coordinates
from ms_dtensor.core.placements import Partial, Replicate, Shard, chunk_bounds
from ms_dtensor.errors import LayoutError, MeshError

R, P, S = Replicate(), Partial(), Shard
MESH = DeviceMesh("cpu", np.arange(6).reshape(2, 3), mesh_dim_names=("dp", "tp"))


def test_equal_layouts_are_one_object_and_survive_pickle_and_copy():
    a = Layout(MESH, [S(0), P], (5, 4), "float32")
    assert a is Layout(MESH, {"dp": S(-2), "tp": P}, [5, 4], "float32")
    assert pickle.loads(pickle.dumps(a)) is a and copy.deepcopy(a) is a and copy.copy(a) is a
    with pytest.raises(AttributeError):
        a.shape = (1, 2)


def test_alias_axis_keyed_and_placement_forms_agree():
    assert Layout(MESH, ("dp", "tp"), (4, 6)) is Layout(MESH, [S(0), S(1)], (4, 6))
    assert Layout(MESH, (("dp", "tp"), "None"), (12, 6)) is Layout(MESH, [S(0), S(0)], (12, 6))
    turned = Layout(MESH, (("tp", "dp"), "None"), (12, 6))
    assert turned is Layout(MESH, [S(0), S(0)], (12, 6), order=("tp", "dp"))
    assert turned is not Layout(MESH, [S(0), S(0)], (12, 6)) and repr(turned) == "f32[12@tp@dp, 6]"


def test_printing_names_axes():
    assert repr(Layout(MESH, [P, S(1)], (8, 6), "bfloat16")) == "bf16[8, 6@tp]{sum: dp}"
    assert Layout(MESH, None, (), "int64").describe() == "i64[] on mesh(dp=2, tp=3)"


@pytest.mark.parametrize("size, parts", [(0, 3), (1, 4), (5, 4), (7, 3), (12, 4), (3, 8)])
def test_chunks_are_torch_chunks(size, parts):
    bounds = chunk_bounds(size, parts)
    step = -(-size // parts)
    assert [hi - lo for lo, hi in bounds] == [max(0, min(step, size - i * step)) for i in range(parts)]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.data())
def test_shards_tile_the_tensor_exactly(shape, draw):
    options = [R, *(S(d) for d in range(len(shape)))]
    placed = [draw.draw(st.sampled_from(options)) for _ in range(2)]
    order = draw.draw(st.permutations([0, 1]))
    layout = Layout(MESH, placed, shape, order=order)
    count = np.zeros(shape, int)
    for at in coordinates(MESH):
        if all(at[a] == 0 for a, p in enumerate(placed) if p.is_replicate()):
            box = tuple(slice(lo, hi) for lo, hi in layout.local_box(at))
            count[box] += 1
            assert count[box].shape == layout.local_shape(at)
            assert layout.local_offset(at) == tuple(lo for lo, _ in layout.local_box(at))
    assert (count == 1).all()


def test_cotangents_follow_the_table():
    assert Layout(MESH, [S(0), P], (4, 6)).gradient() is Layout(MESH, [S(0), R], (4, 6))
    whole = Layout(MESH, [R, R], (4, 6))
    assert whole.gradient() is whole


@pytest.mark.parametrize("placements, said", [
    ([S(0)], "There is one placement per mesh axis, so 2 here."),
    ([S(0), S(2)], "A tensor of 2 dims has dims -2 to 1."),
    ([S(0), "tp2"], "must be Shard, Replicate or Partial"),
    (("dp", "None", "None"), "The alias form has one entry per tensor dim, so 2 here."),
    (("dp", "dp"), "An axis shards at most one dim."),
    (("dp", "tq"), "did you mean 'tp'?"),
    ({"pp": S(0)}, "there is no axis 'pp'"),
])
def test_bad_placements_are_explained(placements, said):
    with pytest.raises((LayoutError, MeshError)) as e:
        Layout(MESH, placements, (4, 6))
    assert said in str(e.value) and "mesh(dp=2, tp=3)" in str(e.value)


def test_unknown_reductions_and_dims_are_refused():
    with pytest.raises(LayoutError, match="sum, avg, max, min, prod"):
        Partial("mean")
    with pytest.raises(LayoutError, match="must be an int"):
        Shard("tp")


def test_meshes_are_values():
    same = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    assert same == MESH and hash(same) == hash(MESH) and MESH["tp"] == same["tp"] and MESH["dp", "tp"] is MESH
    other_order = DeviceMesh("cpu", [[0, 2, 1], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    assert other_order != MESH
    assert MESH["tp"].rank_list == (0, 1, 2) and MESH["dp"].rank_list == (0, 3)
    assert MESH.ranks_along((1, 0), (0, 0)) == (0, 3, 1, 4, 2, 5)
    assert pickle.loads(pickle.dumps(MESH)) == MESH


def test_flattened_axes_go_by_name():
    cube = DeviceMesh("cpu", np.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert cube["dp", "cp"].flatten("dp_cp").rank_list == (0, 2, 4, 6)
    assert cube["dp_cp"].size() == 4
    assert cube["dp", "cp"].flatten("dp_cp") == cube["dp_cp"], "again"
    for axes, name in ((("dp", "cp"), "tp"), (("tp",), "dp_cp"), (("cp", "dp"), "dp_cp"), (("dp", "cp"), 3)):
        with pytest.raises(MeshError, match="already an axis"):
            cube[axes].flatten(name)
    assert cube["dp_cp"].size() == 4
    by_name, by_dim = Layout(cube, {"dp_cp": Shard(0)}, (8, 4)), Layout(cube, ("dp_cp", "None"), (8, 4))
    assert by_name is by_dim and by_name.dim_axes == ((0, 1), ())
    cube["tp", "dp"].flatten("turned")
    assert Layout(cube, {"turned": Shard(0), "cp": Partial()}, (8, 4)) is \
        Layout(cube, [Shard(0), Partial(), Shard(0)], (8, 4), order=("tp", "dp"))
    with pytest.raises(LayoutError, match="named twice"):
        Layout(cube, {"dp_cp": Shard(0), "cp": Shard(1)}, (8, 4))


def test_one_axis_may_be_split_in_several_ways():
    line = DeviceMesh("cpu", np.random.default_rng(0).permutation(24), mesh_dim_names=("world",))
    made = line.unflatten("world", (2, 3, 4), ("pp", "dp", "tp"))
    assert made == DeviceMesh("cpu", line.mesh.reshape(2, 3, 4), mesh_dim_names=("pp", "dp", "tp"))
    assert line._unflatten(0, (2, 3, 4), ("pp", "dp", "tp"), backend_override={0: "fake"}) == made
    assert made["dp", "tp"]._flatten("rest") == made["rest"]
    assert made.unflatten("tp", (2, 2), ("a", "b")).describe() == "pp=2, dp=3, a=2, b=2"
    assert made["dp", "tp"].unflatten(1, (2, 2), ("a", "b")) == made.unflatten("tp", (2, 2), ("a", "b"))["dp", "a", "b"]
    for call, said in ((lambda: line.unflatten(0, (5, 5), ("a", "b")), "product is 24"),
                       (lambda: line.unflatten(0, (24 / 2, 2), ("a", "b")), r"tuple of integers, but got \(12.0, 2\)"),
                       (lambda: line.unflatten(0, ("12", 2), ("a", "b")), "tuple of integers"),
                       (lambda: line.unflatten(0, 24, ("a",)), "tuple of integers, but got 24"),
                       (lambda: line.unflatten(0, (24,), ()), "one name for each size"),
                       (lambda: line.unflatten(0, (-2, -12), ("a", "b")), "product is 24"),
                       (lambda: made.unflatten("tp", (2, 2), ("dp", "b")), "different names"),
                       (lambda: made["rest"].unflatten(0, (3, 4), ("a", "b")), "other axes behind it"),
                       (lambda: line._unflatten(0, (24,), ("a",), {"a": "gloo"}), "one backend")):
        with pytest.raises(MeshError, match=said):
            call()


def test_axes_of_siblings_meet_in_the_coarsest_grid_that_has_both():
    """Against the ranks themselves: on the common grid each axis runs over the ranks that it ran over before."""
    line = DeviceMesh("cpu", np.random.default_rng(1).permutation(16), mesh_dim_names=("world",))
    ways = [w for w in itertools.product((1, 2, 4, 8, 16), repeat=3) if np.prod(w) == 16]
    met = missed = 0
    for one, other in itertools.product(ways, repeat=2):
        a, b = line.unflatten(0, one, ("a0", "a1", "a2")), line.unflatten(0, other, ("b0", "b1", "b2"))
        for x, y in itertools.product(a.mesh_dim_names, b.mesh_dim_names):
            (many, far), (few, near) = a[x].strides()[x], b[y].strides()[y]
            found = common_root(a[x], b[y])
            apart = 1 in (many, few) or far * many <= near or near * few <= far
            assert (found is not None) == apart, (one, x, other, y)
            met, missed = met + apart, missed + (not apart)
            for mesh, name in ((a, x), (b, y)) if found is not None else ():
                for rank in range(16):
                    assert found.ranks_along([found.axis_index(name)], found.coordinate_of(rank)) == \
                        mesh.ranks_along([mesh.axis_index(name)], mesh.coordinate_of(rank))
    assert met > 500 and missed > 500
    dp = line.unflatten(0, (4, 4), ("dp", "tp"))["dp"]
    assert common_root(dp, line.unflatten(0, (8, 2), ("dp", "ep"))["dp"]) is None, "one name, two axes"
    assert common_root(dp, DeviceMesh("cpu", range(16), mesh_dim_names=("x",))) is None, "ranks in another order"


@pytest.mark.parametrize("make, said", [
    (lambda: DeviceMesh("tpu", [0]), "must be npu, gpu or cpu"),
    (lambda: DeviceMesh("cpu", [0, 0]), "each rank once"),
    (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")), "must be 1 different names"),
    (lambda: MESH.axis_index(5), "axis 5 is out of range"),
    (lambda: MESH.get_local_rank(), "'axis' must be given"),
])
def test_bad_meshes_are_explained(make, said):
    with pytest.raises(MeshError, match=said):
        make()


def test_big_meshes_cost_nothing():
    mesh = DeviceMesh("cpu", np.arange(65536).reshape(16, 16, 16, 16), mesh_dim_names=("pp", "dp", "cp", "tp"))
    layout = Layout(mesh, {"dp": S(0), "tp": S(1)}, (1000, 1000))
    assert layout.local_shape((0, 15, 0, 15)) == (55, 55) and layout.local_shape(mesh.coordinate_of(65535)) == (55, 55)
