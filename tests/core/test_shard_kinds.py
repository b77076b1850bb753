# SPDX-License-Identifier: Apache-2.0
"""A made-up way of cutting a dim: layouts, plans and every existing rule take it, and none knows of it."""
import itertools
from dataclasses import replace

import numpy as np
import pytest
from mindspore import mint, ops
from mindspore.mint.nn import functional as F

from ms_dtensor import DeviceMesh, FusedShard, Layout, Partial, Replicate, Shard
from ms_dtensor.core.placements import chunk_bounds
from ms_dtensor.debug.verify import check_rule
from ms_dtensor.errors import LayoutError
from ms_dtensor.ops.rules import RULES, Call, Operand
from ms_dtensor.ops.rules.select import choose
from ms_dtensor.redistribute.plan import plan, relabels

R, P, S = Replicate(), Partial(), Shard


class Backwards(Shard):
    """The first rank holds the last chunk, so the longest shards come last."""

    @staticmethod
    def bounds(size, parts):
        return chunk_bounds(size, parts)[::-1]


B = Backwards
MESH = DeviceMesh("cpu", np.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))


def chosen(op, *operands, names=("input", "other"), **static):
    layouts = tuple(Layout(MESH, p, shape) for shape, p in operands)
    tensors = tuple(Operand(i, x.shape, x.dtype) for i, x in enumerate(layouts))
    call = Call(op, {**dict(zip(names, tensors)), **static}, tensors)
    choice = choose(call, RULES[op](call), layouts)
    return [t.placements for t in choice.targets], [out.placements for out in choice.outs]


def test_it_is_another_layout():
    x = Layout(MESH, [R, B(-2)], (5, 4))
    assert x.placements == (R, B(0)) and repr(B(0)) == "Backwards(0)" and B(0) != S(0)
    assert x is Layout(MESH, {"tp": B(0)}, (5, 4)) and x is not Layout(MESH, {"tp": S(0)}, (5, 4))
    assert [x.local_box((0, t))[0] for t in (0, 1)] == [(3, 5), (0, 3)]
    assert x.gradient((0,)) is Layout(MESH, [P, B(0)], (5, 4))


@pytest.mark.parametrize("op, operands, static, targets, outs", [
    ("add", [((5, 4), [B(0), S(1)]), ((5, 4), [B(0), S(1)])], {}, [(B(0), S(1))] * 2, (B(0), S(1))),
    ("add", [((5, 4), [B(0), R]), ((4,), [R, R])], {}, [(B(0), R), (R, R)], (B(0), R)),
    ("add", [((5, 4), [R, B(1)]), ((5, 4), [R, S(1)])], {}, [(R, S(1))] * 2, (R, S(1))),  # two ways: the plain one
    ("matmul", [((5, 6), [B(0), R]), ((6, 3), [R, B(1)])], {}, [(B(0), R), (R, B(1))], (B(0), B(1))),
    ("matmul", [((5, 6), [R, B(1)]), ((6, 3), [R, B(0)])], {}, [(R, B(1)), (R, B(0))], (R, P)),
    ("sum", [((5, 6), [B(0), B(1)])], {"dim": 0}, [(B(0), B(1))], (P, B(0))),
    ("swap", [((5, 6), [B(0), B(1)])], {"dim0": 0, "dim1": 1}, [(B(0), B(1))], (B(1), B(0))),
    ("softmax", [((50, 60), [R, B(0)])], {"dim": 0}, [(R, S(1))], (R, S(1))),  # it has to move: the plain one
])
def test_rules_keep_the_operands_way(op, operands, static, targets, outs):
    assert chosen(op, *operands, **static) == (targets, [outs])


def test_no_collective_is_planned_over_it():
    x = Layout(MESH, [P, B(0)], (5, 4))
    assert [m.kind for m in plan(x, Layout(MESH, [R, B(0)], (5, 4)))] == ["all_reduce"]
    assert [m.kind for m in plan(x, Layout(MESH, [R, R], (5, 4)))] == ["all_reduce", "exchange"]
    assert [m.kind for m in plan(x, Layout(MESH, [P, S(0)], (5, 4)))] == ["exchange"]
    assert not relabels(Layout(MESH, [R, S(0)], (5, 4)), Layout(MESH, [R, B(0)], (5, 4)))


FS = FusedShard(0, (4, 2, 2))


@pytest.mark.parametrize("op, operands, static, targets, outs", [
    ("add", [((8, 4), [R, FS]), ((8, 4), [R, FS])], {}, [(R, FS)] * 2, (R, FS)),
    ("matmul", [((5, 8), [S(0), FS.with_dim(1)]), ((8, 3), [R, FS])], {}, [(S(0), FS.with_dim(1)), (R, FS)], (S(0), P)),
    ("sum", [((8, 6), [S(1), FS])], {"dim": 1}, [(S(1), FS)], (P, FS)),
    ("swap", [((8, 6), [R, FS])], {"dim0": 0, "dim1": 1}, [(R, FS)], (R, FS.with_dim(1))),
    ("reshape", [((6, 8), [R, FS.with_dim(1)])], {"shape": (2, 3, 8)}, [(R, FS.with_dim(1))], (R, FS.with_dim(2))),
    ("squeeze", [((1, 8), [R, FS.with_dim(1)])], {"dim": 0}, [(R, FS.with_dim(1))], (R, FS)),
])
def test_rules_that_work_row_by_row_keep_a_fused_shard(op, operands, static, targets, outs):
    assert chosen(op, *operands, **static) == (targets, [outs])


THIRDS = FusedShard(0, (8, 8, 8))


@pytest.mark.parametrize("op, extent, placed, static, target, out", [
    ("reshape", 24, (R, THIRDS), {"shape": (3, 4, 2, 5)}, (R, THIRDS), (R, S(1))),
    ("reshape", 24, (THIRDS, R), {"shape": (3, 8, 5)}, (THIRDS, R), (S(1), R)),
    ("reshape", 24, (R, THIRDS), {"shape": (3, 1, 8, 5)}, (R, THIRDS), (R, S(2))),
    ("reshape", 24, (S(0), R), {"shape": (4, 6, 5)}, (S(0), R), (S(0), R)),  # a plain cut goes its own way
    ("split", 24, (R, THIRDS), {"sizes": 8}, (R, THIRDS), (R, S(0))),
    ("chunk", 24, (R, THIRDS), {"chunks": 3}, (R, THIRDS), (R, S(0))),
    ("split", 8, (R, FS), {"sizes": (4, 2, 2)}, (R, FS), (R, S(0))),
])
def test_parts_of_a_fused_shard_come_apart_where_they_lie(op, extent, placed, static, target, out):
    targets, outs = chosen(op, ((extent, 5), placed), **static)
    assert targets == [target] and set(outs) == {out}


@pytest.mark.parametrize("op, extent, placed, static", [
    ("reshape", 24, (R, THIRDS), {"shape": (2, 12, 5)}),
    ("reshape", 18, (R, FusedShard(0, (6, 6, 6))), {"shape": (3, 3, 2, 5)}),
    ("reshape", 24, (R, S(0)), {"shape": (3, 8, 5)}), ("split", 24, (S(0), R), {"sizes": 8}),
    ("split", 24, (R, THIRDS), {"sizes": (16, 8)}), ("split", 9, (R, FusedShard(0, (3, 3, 3))), {"sizes": 3}),
])
def test_other_cuts_of_it_move(op, extent, placed, static):
    targets, _ = chosen(op, ((extent, 5), placed), **static)
    assert all(p.parts == () for p in targets[0])


@pytest.mark.parametrize("op, operands, static", [
    ("add", [((8, 4), [FS, R]), ((8, 4), [R, S(0)])], {}),  # no second axis joins
    ("add", [((8, 4), [S(0), R]), ((8, 4), [R, FS])], {}),
    ("tril", [((8, 8), [R, FS])], {"diagonal": 0}), ("cumsum", [((8, 4), [R, FS])], {"dim": 0}),
    ("add", [((8, 4), [R, FS]), ((8, 4), [R, FusedShard(0, (2, 6))])], {}),
])
def test_no_layout_is_planned_that_a_fused_shard_cannot_have(op, operands, static):
    for placements in (*chosen(op, *operands, **static)[0], *chosen(op, *operands, **static)[1]):
        assert sum(p.is_shard(0) for p in placements) < 2 or FusedShard not in map(type, placements)
        Layout(MESH, placements, (8, 8 if op == "tril" else 4))


def test_a_fused_shard_is_gathered_and_put_in_order():
    x = Layout(MESH, [P, FS], (8, 4))
    for dst, kinds in (([R, FS], ["all_reduce"]), ([P, R], ["all_gather", "reorder"]),
                       ([P, S(0)], ["all_gather", "reorder", "cut"])):
        assert [m.kind for m in plan(x, Layout(MESH, dst, (8, 4)))] == kinds
    assert [m.kind for m in plan(Layout(MESH, [R, R], (8, 4)), Layout(MESH, [R, FS], (8, 4)))] == ["reorder", "cut"]
    assert not relabels(Layout(MESH, [R, S(0)], (8, 4)), Layout(MESH, [R, FS], (8, 4)))
    assert [Layout(MESH, [R, FS], (8, 4)).pieces((0, t))[0] for t in (0, 1)] == [
        ((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))]
    assert repr(FS) == "FusedShard(0, (4, 2, 2))" and FS.with_dim(1) != FS != S(0) and FS == FusedShard(0, [4, 2, 2])


EIGHTS = FusedShard(0, (8, 4, 4))


@pytest.mark.parametrize("order, divided", [((0, 1), 2), ((1, 0), 3)])
def test_two_axes_cut_each_part_of_a_dim(order, divided):
    """The outermost first: a rank has a chunk of its chunk of each part."""
    mesh = DeviceMesh("cpu", np.arange(6).reshape(2, 3), mesh_dim_names=("dp", "tp"))
    x = Layout(mesh, [FusedShard(0, (12, 6, 6))] * 2, (24, 5), order=order)
    for at in itertools.product(range(2), range(3)):
        want = []
        for start, n in ((0, 12), (12, 6), (18, 6)):
            chunks = np.array_split(np.arange(start, start + n), divided)[at[order[0]]]
            want.append(np.array_split(chunks, 6 // divided)[at[order[1]]])
        assert [np.arange(*run).tolist() for run in x.pieces(at)[0]] == [rows.tolist() for rows in want], at
        assert x.local_shape(at) == (4, 5)
        assert x.assemble(lambda box: np.arange(*box[0]), at).tolist() == np.concatenate(want).tolist()
    boxes = [x.local_box(at)[0] for at in itertools.product(range(2), range(3))]
    assert sorted(boxes) == [(i, i + 4) for i in range(0, 24, 4)]


def test_what_two_axes_cut_by_parts_is_gathered_by_both_and_ops_keep_it():
    x = Layout(MESH, [EIGHTS, EIGHTS], (16, 4))
    whole = plan(x, Layout(MESH, [R, R], (16, 4)))
    assert [(m.kind, m.axes) for m in whole] == [("all_gather", (0, 1)), ("reorder", (0, 1))]
    assert [m.kind for m in plan(x, Layout(MESH, [R, EIGHTS], (16, 4)))] == ["all_gather", "reorder", "reorder", "cut"]
    other = Layout(MESH, [EIGHTS, EIGHTS], (16, 4), order=(1, 0))
    assert [m.kind for m in plan(x, other)] == ["all_gather", "reorder", "reorder", "cut"]
    assert repr(other) == "f32[8+4+4@tp@dp, 4]"
    assert chosen("add", ((16, 4), [EIGHTS] * 2), ((16, 4), [EIGHTS] * 2)) == ([(EIGHTS, EIGHTS)] * 2, [(EIGHTS, EIGHTS)])
    for parts, placed in ((12, [FusedShard(0, (6, 6))] * 2), (16, [EIGHTS, S(0)]), (16, [EIGHTS, FusedShard(0, (8, 8))])):
        with pytest.raises(LayoutError, match="FusedShard"):
            Layout(MESH, placed, (parts, 4))


@pytest.mark.parametrize("make", [lambda: FusedShard(0, ()), lambda: FusedShard(0, (3, -1)),
                                  lambda: Layout(MESH, [R, FS], (7, 4)), lambda: Layout(MESH, [S(0), FS], (8, 4)),
                                  lambda: Layout(MESH, [R, FS], (8, 4)).local_offset((0, 0))])
def test_what_a_fused_shard_cannot_be(make):
    with pytest.raises(LayoutError):
        make()


_A, _B, _C, _D, _E = (np.random.default_rng(i).normal(size=s).astype(np.float32)
                      for i, s in enumerate([(5, 7), (7, 3), (5, 7), (5, 4), (4, 4)]))


@pytest.mark.parametrize("fn, args", [(mint.add, (_A, _C)), (mint.matmul, (_A, _B)), (mint.sum, (_A, 0)),
                                      (mint.mean, (_A, 1)), (mint.transpose, (_A, 0, 1)), (mint.tril, (_A, 1)),
                                      (mint.softmax, (_A, 0)), (F.linear, (_D, _E, _E[0])),  # one rank of three is empty
                                      (mint.reshape, (_A[:4], (2, 14))), (mint.max, (_A,)),
                                      (ops.gather, (_A, np.array([4, 0, 2]), 0))])
def test_existing_rules_are_right_on_such_shards_with_gradients(fn, args, monkeypatch):
    plain = dict(RULES)

    def cut(rule):
        def backwards(call):
            spec = rule(call)
            return replace(spec, cases=tuple(case.cut_like(B(0)) for case in spec.cases))
        return backwards
    for op, rule in plain.items():
        monkeypatch.setitem(RULES, op, cut(rule))
    report = check_rule(fn, *args)
    assert report and report.compared > 6, report.wrong
