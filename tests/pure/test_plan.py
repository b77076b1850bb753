# SPDX-License-Identifier: Apache-2.0
"""Plans are executed on NumPy shards, move by move, and compared with cutting the full array; their costs, also a file's."""
import itertools
import json
import os

import numpy as np
import pytest

from ms_dtensor.core.layout import Layout
from ms_dtensor.core.mesh import DeviceMesh, coordinates
from ms_dtensor.core.placements import Partial, Replicate, Shard
from ms_dtensor.debug.verify.oracle import assemble, same, split
from ms_dtensor.errors import ConfigError, RedistributeError
from ms_dtensor.redistribute import cost as cost_module
from ms_dtensor.redistribute.boxes import relative, sizes_along, transfers
from ms_dtensor.redistribute.cost import CostModel, costs, load_costs, set_costs
from ms_dtensor.redistribute.plan import plan
from ms_dtensor.tools.calibrate import fit

R, S = Replicate(), Shard
RNG = np.random.default_rng(0)
NAMES = ("a", "b", "c", "d")


def mesh_of(shape):
    return DeviceMesh("cpu", np.arange(int(np.prod(shape))).reshape(shape), mesh_dim_names=NAMES[:len(shape)])


def lines(mesh, axes):
    """Groups of coordinates over `axes`, each in group order."""
    rest = [a for a in range(mesh.ndim) if a not in axes]
    for fixed in itertools.product(*(range(mesh.shape[a]) for a in rest)):
        group = []
        for sub in itertools.product(*(range(mesh.shape[a]) for a in axes)):
            at = [0] * mesh.ndim
            for a, i in zip((*rest, *axes), (*fixed, *sub)):
                at[a] = i
            group.append(tuple(at))
        yield group


def pieces(array, dim, sizes):
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


def execute(move, values):
    """One move on {coordinate: local array}, from the meaning of the collective alone."""
    mesh, out = move.src.mesh, {}
    if move.kind == "exchange":
        rank_at = {int(mesh.mesh[at]): at for at in coordinates(mesh)}
        for at in coordinates(move.dst.mesh):
            need = move.dst.local_box(at)
            out[at] = np.zeros([hi - lo for lo, hi in need], next(iter(values.values())).dtype)
            me = int(move.dst.mesh.mesh[at])
            _, receives, keeps = transfers(move.src, move.dst, me)
            for sender, box in [*receives, *([(me, keeps)] if keeps else [])]:
                frm = rank_at[sender]
                out[at][relative(box, need)] = values[frm][relative(box, move.src.local_box(frm))]
        return out
    if move.kind == "cut":
        return {at: v[relative(move.dst.local_box(at), move.src.local_box(at))] for at, v in values.items()}
    for group in lines(mesh, move.axes):
        local = [values[at] for at in group]
        if move.kind == "all_gather":
            result = [np.concatenate(local, axis=move.src_dim)] * len(group)
        elif move.kind == "all_to_all":
            cut = [pieces(x, move.dst_dim, sizes_along(move.dst, move.axes, move.dst_dim, group[0])) for x in local]
            result = [np.concatenate([c[i] for c in cut], axis=move.src_dim) for i in range(len(group))]
        else:
            total = {"sum": sum, "avg": lambda xs: sum(xs) / len(xs), "max": lambda xs: np.maximum.reduce(xs)}[
                move.reduce_op](local)
            result = [total] * len(group) if move.kind == "all_reduce" else pieces(
                total, move.dst_dim, sizes_along(move.dst, move.axes, move.dst_dim, group[0]))
        out.update(zip(group, result))
    return out


def arrives(src, dst, whole, moves=None) -> None:
    """What lies as the source says lies as the target says after the moves, by default those of the plan."""
    moves = plan(src, dst) if moves is None else moves
    values = split(whole, src, RNG)
    for move in moves:
        values = execute(move, values)
    for at, v in values.items():
        assert v.shape == dst.local_shape(at), (src, dst, moves)
    value, unequal = assemble(values, dst)
    assert same(whole, value) and not unequal, (src, dst, moves)


def layouts(mesh, shape, partial=()):
    options = [R, *(S(d) for d in range(len(shape))), *(Partial(p) for p in partial)]
    for placed in itertools.product(options, repeat=mesh.ndim):
        dims = [p.dim for p in placed if p.is_shard()]
        orders = [None] if len(set(dims)) == len(dims) else list(itertools.permutations(range(mesh.ndim)))
        yield from dict.fromkeys(Layout(mesh, placed, shape, "float64", o) for o in orders)


@pytest.mark.parametrize("mesh_shape, shape", [((2,), (5,)), ((4,), (3, 2)), ((2, 2), (4, 6)), ((2, 3), (5, 7)),
                                                ((2, 2), (1, 3)), ((2, 2), (0, 4))])
def test_every_pair_moves_right(mesh_shape, shape):
    mesh = mesh_of(mesh_shape)
    whole = RNG.normal(size=shape)
    for src, dst in itertools.product(layouts(mesh, shape, ("sum",)), layouts(mesh, shape)):
        arrives(src, dst, whole)


def test_three_axes_and_mixed_reductions():
    mesh, shape = mesh_of((2, 2, 2)), (5, 6)
    whole = RNG.normal(size=shape)
    sources = [x for i, x in enumerate(layouts(mesh, shape, ("sum", "max"))) if i % 7 == 0
               and len({x.placements[a] for a in x.partial_axes}) <= 1]
    targets = [x for i, x in enumerate(layouts(mesh, shape)) if i % 11 == 0]
    for src, dst in itertools.product(sources, targets):
        arrives(src, dst, whole)


def test_other_meshes_receive_exactly_their_boxes():
    shape = (7, 6)
    whole = RNG.normal(size=shape)
    a, b = mesh_of((2, 3)), DeviceMesh("cpu", [5, 1, 9], mesh_dim_names=("z",))
    for src, dst in itertools.product(layouts(a, shape, ("sum",)), layouts(b, shape)):
        arrives(src, dst, whole)


@pytest.mark.parametrize("other", [[[5, 1, 9]], [[0, 1], [2, 3], [4, 5]], [[5, 4, 3], [2, 1, 0]], [[6, 7], [8, 9]]], ids=str)
def test_senders_and_receivers_agree(other):
    """Meshes of the same ranks in another shape or order, with some ranks in common, and with none."""
    shape = (7, 6)
    a, b = mesh_of((2, 3)), DeviceMesh("cpu", other, mesh_dim_names=("y", "z"))
    everybody = sorted({*a.rank_list, *b.rank_list})
    whole = np.arange(42).reshape(shape)
    for src, dst in itertools.product(layouts(a, shape), layouts(b, shape)):
        tables = {r: transfers(src, dst, r) for r in everybody}
        sent = sorted((r, to, box) for r, t in tables.items() for to, box in t.sends)
        assert sent == sorted((frm, r, box) for r, t in tables.items() for frm, box in t.receives)
        for rank in b.rank_list:
            need = dst.local_box(b.coordinate_of(rank))
            got = np.full(shape, -1)
            for frm, box in [*tables[rank].receives, *([(rank, tables[rank].keeps)] if tables[rank].keeps else [])]:
                held = src.local_box(a.coordinate_of(frm))
                assert all(lo <= x and y <= hi for (x, y), (lo, hi) in zip(box, held))
                here = tuple(slice(lo, hi) for lo, hi in box)
                assert (got[here] == -1).all()  # each element comes once
                got[here] = whole[here]
            inside = tuple(slice(lo, hi) for lo, hi in need)
            assert (got[inside] == whole[inside]).all()


def test_single_moves_use_the_collective_made_for_them():
    mesh = mesh_of((4,))

    def kinds(src, dst, shape=(64, 64)):
        return [m.kind for m in plan(Layout(mesh, [src], shape), Layout(mesh, [dst], shape))]
    assert kinds(S(0), R) == ["all_gather"]
    assert kinds(Partial(), R) == ["all_reduce"]
    assert kinds(Partial(), S(1)) == ["reduce_scatter"]
    assert kinds(S(0), S(1)) == ["all_to_all"]
    assert kinds(R, S(1)) == ["cut"]
    assert kinds(S(1), S(1)) == []


def test_adjacent_axes_move_as_one():
    mesh = mesh_of((2, 2))
    both = plan(Layout(mesh, [Partial(), Partial()], (64, 64)), Layout(mesh, [R, R], (64, 64)))
    assert [(m.kind, m.axes) for m in both] == [("all_reduce", (0, 1))]
    gathered = plan(Layout(mesh, [S(0), S(0)], (64, 64)), Layout(mesh, [R, R], (64, 64)))
    assert [(m.kind, m.axes) for m in gathered] == [("all_gather", (0, 1))]


def test_partial_targets_are_refused():
    mesh = mesh_of((2,))
    with pytest.raises(RedistributeError, match="can be reduced, not un-reduced"):
        plan(Layout(mesh, [R], (4,)), Layout(mesh, [Partial()], (4,)))
    with pytest.raises(RedistributeError, match="different tensors"):
        plan(Layout(mesh, [R], (4,)), Layout(mesh, [R], (5,)))


# -- costs told by a file ----------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def restored():
    yield
    set_costs(None)


def test_plans_follow_the_costs_in_force(tmp_path):
    mesh, shape = mesh_of((4, 4)), (256, 64)
    ends = Layout(mesh, [Partial(), Replicate()], shape), Layout(mesh, [Replicate(), Replicate()], shape)
    dear, cheap = tmp_path / "dear.json", tmp_path / "cheap.json"
    dear.write_text(json.dumps({"cpu": {"alpha": 1}}))
    cheap.write_text(json.dumps({"cpu": {"alpha": 0}, "npu": {"alpha": 1e-5, "beta": 1e-11, "gamma": 1e-12}}))
    set_costs(dear)
    assert [m.kind for m in plan(*ends)] == ["all_reduce"]
    set_costs(str(cheap))
    assert [m.kind for m in plan(*ends)][-1] == "all_gather"
    assert costs("npu") == CostModel(1e-5, 1e-11, 1e-12) and costs("gpu") == CostModel()


def test_the_environment_is_asked_once(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text('{"gpu": {"beta": 1e-12}}')
    monkeypatch.setattr(cost_module, "_told", None)
    monkeypatch.setenv("MS_DTENSOR_COSTS", str(path))
    assert costs("gpu").beta == 1e-12
    path.unlink()
    assert costs("gpu").beta == 1e-12


@pytest.mark.parametrize("text", ["", "[]", '{"tpu": {}}', '{"cpu": 3}', '{"cpu": {"alpa": 1}}', '{"cpu": {"alpha": -1}}',
                                  '{"cpu": {"alpha": "1"}}', '{"cpu": {"alpha": %s}}' % ("9" * 400), '"%s"' % ("9" * 9999),
                                  '{"cpu": {"alpha": %s}}' % ("9" * 5000), '{"cpu": {"beta": Infinity}}', "[" * 100_000,
                                  '{"cpu": {"gamma": NaN}}', '{"cpu": %s}' % ("[" * 500 + "]" * 500), "\xe9"])
def test_a_wrong_file_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    for name, wrong in ((path, "MS_DTENSOR_COSTS"), *((name, "cannot be read")
                                                      for name in (tmp_path / "absent.json", "x" * 300, os.devnull))):
        with pytest.raises(ConfigError, match=wrong) as caught:
            load_costs(name)
        e = caught.value
        assert e.attempt and e.operands and e.rule and e.fix and len(str(e)) < 1500


def test_calibration_finds_the_figures_it_was_made_from():
    rng = np.random.default_rng(0)
    alpha, beta, gamma = 3e-4, 4e-10, 1e-10
    samples = [(alpha + beta * sent + gamma * after, sent, after)
               for sent, after in 2.0 ** rng.uniform(12, 24, (60, 2))]
    made = {"alpha": alpha, "beta": beta, "gamma": gamma}
    assert fit(samples, gamma) == pytest.approx(made, rel=1e-3)
    noisy = [(t * f, sent, after) for (t, sent, after), f in zip(samples, rng.uniform(0.8, 1.2, len(samples)))]
    assert fit(noisy, gamma) == pytest.approx(made, rel=0.25)
    assert min(fit([(1e-6, sent, after) for _, sent, after in samples], gamma).values()) >= 0


def test_ranks_that_copy_faster_together_than_one_alone_do_not_send_for_nothing():
    """Measured on shared memory: what the collectives copy takes less than a local copy of as many bytes."""
    samples = [(4e-5 + 4e-11 * sent + 4e-11 * after, sent, after)
               for sent in (2048., 2. ** 18, 2. ** 24) for after in (sent, 2 * sent)]
    found = CostModel(**fit(samples, 1e-10))
    assert found.beta > 0
    for seconds, sent, after in samples:
        assert found.alpha + found.beta * sent + found.gamma * after == pytest.approx(seconds, rel=0.2)
