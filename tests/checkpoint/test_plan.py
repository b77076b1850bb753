# SPDX-License-Identifier: Apache-2.0
"""Pure: what ranks write covers each tensor once, evenly; and boxes lie where they should in what a rank holds."""
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_dtensor import DeviceMesh, FusedShard, Layout, Replicate, Shard
from ms_dtensor.checkpoint.plan import (
    SPLIT,
    Request,
    assign,
    common,
    held_boxes,
    laid_out,
    part_name,
    parts_of,
    volume,
    whole_on,
    within,
)
from ms_dtensor.checkpoint.spread import Mesh, Ranks, Spread


class Balanced(Shard):
    """A way to cut that only the program knows."""

    @staticmethod
    def bounds(size, parts):
        ends = [0] + [(i + 1) * (size // parts) + min(i + 1, size % parts) for i in range(parts)]
        return tuple(zip(ends, ends[1:]))


R, S = Replicate(), Shard
MESH = DeviceMesh("cpu", np.arange(6).reshape(2, 3)[::-1], mesh_dim_names=("dp", "tp"))  # ranks not in order
LAYOUTS = [((5, 4), [R, R]), ((5, 4), [S(0), R]), ((7, 4), [S(0), S(0)]), ((1, 4), [S(1), S(0)]), ((9,), [R, S(0)]),
           ((), [R, R]), ((8, 3), [Balanced(0), S(1)]), ((7,), [S(0), Balanced(0)]),
           ((7, 4), (("tp", "dp"), "None")), ((9, 2), [R, FusedShard(0, (4, 3, 2))]), ((0, 3), [S(0), R])]


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS)
def test_held_boxes_are_what_ranks_hold(shape, placements):
    layout = Layout(MESH, placements, shape)
    found = {rank: set() for rank in range(6)}
    for box, ranks in held_boxes(layout):
        for rank in ranks:
            found[rank].add(box)
    for rank in range(6):
        pieces = layout.pieces(MESH.coordinate_of(rank))
        assert found[rank] == {b for b in itertools.product(*pieces) if all(lo < hi for lo, hi in b)}


def planned(requests, ranks):
    """Each rank's parts."""
    plan = assign(requests, ranks)
    return {rank: parts_of(rank, plan, {r.key: r.shape for r in requests}) for rank in range(ranks)}, plan


def test_each_element_is_written_once_by_a_rank_that_holds_it():
    layouts = {f"t{i}": Layout(MESH, p, shape) for i, (shape, p) in enumerate(LAYOUTS)}
    requests = [Request(key, 4, layout.shape, laid_out(layout)) for key, layout in layouts.items()]
    requests.append(Request("plain", 8, (3, 2), whole_on(6, (3, 2))))
    requests.append(Request("large", 1, (1, 7, SPLIT), whole_on(6, (1, 7, SPLIT))))
    counts = {r.key: np.zeros(r.shape if r.key != "large" else (1, 7, 4), int) for r in requests}
    order = [r.key for r in requests]
    parts, plan = planned(requests, 6)
    for rank, mine in parts.items():
        assert [order.index(part.key) for part in mine] == sorted(order.index(part.key) for part in mine)
        for key, box in mine:
            if key in layouts:
                assert any(rank in ranks and common(box, whole) == box for whole, ranks in held_boxes(layouts[key]))
            if key == "large":
                assert box[2] == (0, SPLIT)
                box = (*box[:2], (0, 4))
            counts[key][tuple(slice(*extent) for extent in box)] += 1
    assert all((count == 1).all() for count in counts.values())
    assert {len(parts[rank]) > 0 for rank in parts} == {True} and plan["large"].parts == 6


@given(st.data())
def test_a_formula_tells_of_any_box_the_parts_that_touch_it(data):
    """What `boxes` tells of a box, `written_by` of ranks, and the layout of shards, is the same."""
    shape = data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
    choices = [R, *(kind(d) for d in range(len(shape)) for kind in (S, Balanced))]
    layout = Layout(MESH, [data.draw(st.sampled_from(choices)) for _ in range(2)], shape, order=data.draw(
        st.permutations(["dp", "tp"])))
    spread = laid_out(layout)
    spread = Spread(spread.mesh, spread.cuts, data.draw(st.integers(0, spread.copies - 1)), data.draw(
        st.integers(1, spread.copies)))
    every = list(spread.boxes(shape))
    assert spread.count(shape) == len(every) and sum(volume(box) for box, _ in every) == math.prod(shape)
    by_rank = [(box, rank) for rank in range(6) for box in spread.written_by(rank, shape)]
    assert sorted(by_rank) == sorted(every)
    for box, rank in every:
        assert any(rank in ranks and common(box, whole) == box for whole, ranks in held_boxes(layout))
    wanted = tuple(tuple(sorted(data.draw(st.integers(0, n)) for _ in "ab")) for n in shape)
    assert sorted(spread.boxes(shape, wanted)) == sorted(
        (box, rank) for box, rank in every if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, wanted)))


@given(st.lists(st.integers(0, 50), unique=True))
def test_runs_of_ranks(numbers):
    ranks = Ranks.of(numbers)
    assert list(ranks) == numbers == [ranks[i] for i in range(len(ranks))]
    assert [ranks.find(n) for n in range(52)] == [numbers.index(n) if n in numbers else None for n in range(52)]


@given(st.lists(st.tuples(st.integers(1, 1 << 24), st.booleans()), min_size=1, max_size=40))
def test_work_is_balanced_by_bytes(sizes):
    requests = [Request(str(i), 1, (n,), whole_on(4, (n,)) if free else Spread(
        Mesh((1,), Ranks.of([i % 4])), whole_on(1, (n,)).cuts)) for i, (n, free) in enumerate(sizes)]
    load = {rank: sum(volume(p.box) for p in parts) for rank, parts in planned(requests, 4)[0].items()}
    bound = [sum(n for i, (n, free) in enumerate(sizes) if not free and i % 4 == rank) for rank in range(4)]
    largest = max((min(n, SPLIT) for n, free in sizes if free), default=0)
    mean = sum(n for n, _ in sizes) / 4
    cut = sum(n / 4 for n, free in sizes if free and n >= SPLIT)  # of these each rank has as much
    assert max(load.values()) <= max(max(bound) + cut, mean + largest) + len(sizes)


def test_a_box_within_runs_of_rows():
    held = np.arange(9)  # rows 2..4, 10..12, 20..22 of a dim
    runs = [((2, 5), (10, 13), (20, 23))]
    assert held[within(((11, 13),), runs)].tolist() == [4, 5]
    assert held[within(((20, 21),), runs)].tolist() == [6]


def test_names_of_parts():
    assert part_name("w", (3, 4), ((0, 3), (0, 4))) == "w" == part_name("w", (), ())
    assert part_name("w", (3, 4), ((0, 3), (2, 4))) == "w[0:3,2:4]"


def test_a_plan_for_many_ranks_is_made_at_once():
    mesh = DeviceMesh("cpu", np.arange(1024).reshape(64, 16), mesh_dim_names=("fsdp", "tp"))
    layouts = [Layout(mesh, [S(0), S(1)], (4096, 4096)), Layout(mesh, [R, S(0)], (4096, 64)),
               Layout(mesh, [S(0), R], (4096,))]
    parts, _ = planned([Request(f"{i}", 2, layouts[i % 3].shape, laid_out(layouts[i % 3])) for i in range(60)], 1024)
    load = [sum(2 * volume(p.box) for p in mine) for mine in parts.values()]
    total = sum(2 * math.prod(layouts[i % 3].shape) for i in range(60))
    assert sum(load) == total and max(load) <= 1.1 * total / 1024
