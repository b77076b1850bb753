# SPDX-License-Identifier: Apache-2.0
"""Shapes that depend on data, writes by index into the tensor itself, and places drawn by weights: through dispatch."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import Replicate, Shard
from ms_dtensor.comm import fake_world
from ms_dtensor.errors import OpRuleError
from tests.ops.test_random import whole

R, S = Replicate(), Shard
X = np.array([[1, -2, 0], [0, 0, 3], [-1, 5, 0], [2, 0, 0]], np.float32)


@pytest.fixture
def mesh(cpu):
    return md.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))


def placed(array, mesh, *placements):
    return md.distribute_tensor(Tensor(array), mesh, placements or [R])


def test_one_plan_serves_every_number_of_results(mesh):
    for x in (X, X * 0, np.abs(X) + 1, X):
        assert np.array_equal(ops.nonzero(placed(x, mesh)).asnumpy(), np.argwhere(x))
        picked = mint.masked_select(placed(x, mesh), placed(x, mesh) > 0)
        assert np.array_equal(picked.asnumpy(), x[x > 0]) and picked.shape == ((x > 0).sum(),)


def test_a_mask_that_every_rank_holds_picks_from_any_tensor(mesh):
    rows, mask = X[:, 0] > 0, X > 0
    for placement in (R, S(0), S(1)):
        x = placed(X, mesh, placement)
        for index in (rows, mask, (slice(None), np.array([True, False, True])), (rows, 1), np.zeros(4, bool)):
            assert np.array_equal(x[index].full_tensor().asnumpy(), X[index]), index
        assert np.array_equal(x[placed(mask, mesh)].full_tensor().asnumpy(), X[mask])
        x[mask] = np.arange(mask.sum(), dtype=np.float32)
        expected = X.copy()
        expected[mask] = np.arange(mask.sum())
        assert np.array_equal(x.full_tensor().asnumpy(), expected)
    grad = md.grad(lambda x: (x[mask] ** 2).sum())(placed(X, mesh))
    assert np.array_equal(grad.asnumpy(), np.where(mask, 2 * X, 0))
    with pytest.raises(IndexError, match="a mask of 3 elements does not fit dim 0 of size 4"):
        x[np.array([True, False, True])]


@pytest.mark.parametrize("fn", [ops.nonzero, mint.unique, lambda x: mint.masked_select(x, x > 0), lambda x: x[x > 0]])
def test_a_mask_of_shards_is_refused_with_what_to_do(fn):
    with fake_world(2, 0):
        x = placed(X, md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), S(0))
        with pytest.raises(OpRuleError, match="not whole on every rank") as caught:
            fn(x)
    assert "redistribute" in str(caught.value)


@pytest.mark.parametrize("fn", [ops.nonzero, lambda x: mint.masked_select(x, x > 0), lambda x: x[x > 0]])
def test_an_axis_of_one_rank_cuts_nothing(fn):
    with fake_world(2, 0):  # as where a program's dp is 1
        x = placed(X, md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), S(0), R)
        assert np.array_equal(fn(x).full_tensor().asnumpy(), fn(Tensor(X)).asnumpy())
        x = x * 1
        x[x > 0] = placed(np.arange(4, dtype=np.float32), x.device_mesh, S(0), R)
        assert np.array_equal(x.full_tensor().asnumpy()[X > 0], np.arange(4))


def test_rows_for_a_mask_of_shards_are_written_by_what_the_refusal_says(mesh):
    chosen, new = X[:, 0] > 0, np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = X.copy()
    expected[chosen] = new
    x, mask, value = placed(X, mesh, S(0)), placed(chosen, mesh, S(0)), placed(new, mesh, S(0))
    assert np.array_equal(x.masked_scatter(mask.unsqueeze(-1).broadcast_to(x.shape), value).asnumpy(), expected)
    with fake_world(2, 0):
        two = md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        x, mask, value = placed(X, two, S(0)), placed(chosen, two, S(0)), placed(new, two, S(0))
        with pytest.raises(OpRuleError, match=r"x.masked_scatter\(mask.unsqueeze\(-1\).broadcast_to\(x.shape\), value\)"):
            x[mask] = value


def test_writes_by_index_reach_the_tensor_itself(mesh):
    index, rows = np.array([2, 0]), np.arange(6, dtype=np.float32).reshape(2, 3)
    ids, values = placed(index, mesh), placed(rows, mesh)
    added, written = X.copy(), X.copy()
    added[index] += rows
    written[index] = rows
    for expected, write in (
            (written, lambda x: x.index_put_((ids,), values)),
            (added, lambda x: x.index_put_((ids,), values, accumulate=True)),
            (added, lambda x: x.index_add_(0, ids, values)), (written, lambda x: x.index_copy_(0, ids, values)),
            (np.where(np.isin(np.arange(4), index)[:, None], 7, X), lambda x: x.index_fill_(0, ids, 7)),
            (written, lambda x: ops.scatter_update(x, ids.astype(ms.int32), values)),
            (added, lambda x: ops.scatter_add(x, ids.astype(ms.int32), values))):
        for x in (placed(X, mesh, S(0)), Parameter(placed(X, mesh, S(1)), name="x")):
            write(x)
            assert np.array_equal(x.full_tensor().asnumpy(), expected)


def test_places_are_drawn_alike_on_every_mesh_and_by_their_weights(cpu):
    weights = np.random.default_rng(0).random((4, 6)).astype(np.float32)
    for draw in (lambda p: mint.multinomial(p, 5, True), lambda p: mint.multinomial(p, 5),
                 lambda p: ops.multinomial(p, 5, False)):
        def make(mesh, placements, draw=draw):
            return draw(md.DTensor.from_local(Tensor(weights), mesh, [R]).redistribute(placements=placements))
        assert np.array_equal(whole(make, (1,), [R]), whole(make, (2,), [S(0)]))
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    p = placed(np.array([0.0, 1.0, 3.0], np.float32), mesh)
    counts = np.bincount(mint.multinomial(p, 4000, True).asnumpy(), minlength=3) / 4000
    assert counts[0] == 0 and abs(counts[2] - 0.75) < 0.03
    first = np.array([mint.multinomial(p, 2).asnumpy() for _ in range(500)])
    assert set(map(tuple, first.tolist())) == {(1, 2), (2, 1)} and abs((first[:, 0] == 2).mean() - 0.75) < 0.08


def test_rows_added_in_place_land_on_the_ranks_that_hold_them():
    index, rows = np.array([3, 0, 2, 2]), X[::-1].copy()
    expected, found = X.copy(), []
    np.add.at(expected, index, rows)
    for rank in range(3):  # two rows each, and none for the last
        with fake_world(3, rank):
            mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("x",))
            x = md.DTensor.from_local(Tensor(X[2 * rank:2 * rank + 2].copy()), mesh, [S(0)], shape=X.shape)
            x.index_add_(0, *(md.DTensor.from_local(Tensor(a), mesh, [R]) for a in (index, rows)))
            found.append(x.to_local().asnumpy())
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)
