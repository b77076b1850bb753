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
from ms_dtensor.checkpoint.plan import SPLIT, Request, assign, common, held_boxes, part_name, volume, whole_box, within

R, S = Replicate(), Shard
MESH = DeviceMesh("cpu", np.arange(6).reshape(2, 3)[::-1], mesh_dim_names=("dp", "tp"))  # ranks not in order
LAYOUTS = [((5, 4), [R, R]), ((5, 4), [S(0), R]), ((7, 4), [S(0), S(0)]), ((1, 4), [S(1), S(0)]), ((9,), [R, S(0)]),
           ((), [R, R]), ((7, 4), (("tp", "dp"), "None")), ((9, 2), [R, FusedShard(0, (4, 3, 2))]), ((0, 3), [S(0), R])]


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


def test_each_element_is_written_once_by_a_rank_that_holds_it():
    requests = [Request(f"t{i}", 4, held_boxes(Layout(MESH, p, shape))) for i, (shape, p) in enumerate(LAYOUTS)]
    requests.append(Request("plain", 8, whole_box((3, 2), range(6))))
    requests.append(Request("large", 1, whole_box((1, 7, SPLIT), range(6))))
    counts = {r.key: np.zeros(shape, int) for r, shape in zip(requests, [s for s, _ in LAYOUTS] + [(3, 2), (1, 7, 4)])}
    for rank, parts in assign(requests).items():
        assert parts == sorted(parts, key=lambda part: [r.key for r in requests].index(part.key))
        for key, box in parts:
            held = dict(next(r.held for r in requests if r.key == key))
            assert any(rank in ranks and common(box, whole) == box for whole, ranks in held.items())
            if key == "large":
                assert box[2] == (0, SPLIT)
                box = (*box[:2], (0, 4))
            counts[key][tuple(slice(*extent) for extent in box)] += 1
    assert all((count == 1).all() for count in counts.values())


@given(st.lists(st.tuples(st.integers(1, 1 << 24), st.booleans()), min_size=1, max_size=40))
def test_work_is_balanced_by_bytes(sizes):
    requests = [Request(str(i), 1, whole_box((n,), range(4)) if free else whole_box((n,), (i % 4,)))
                for i, (n, free) in enumerate(sizes)]
    load = {rank: sum(volume(p.box) for p in parts) for rank, parts in assign(requests).items()}
    bound = [sum(n for i, (n, free) in enumerate(sizes) if not free and i % 4 == rank) for rank in range(4)]
    largest = max((min(n, SPLIT) for n, free in sizes if free), default=0)
    mean = sum(n for n, _ in sizes) / 4
    assert max(load.values()) <= max(max(bound), mean + largest)


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
    plan = assign([Request(f"{i}", 2, held_boxes(layouts[i % 3])) for i in range(60)])
    load = [sum(2 * volume(p.box) for p in parts) for parts in plan.values()]
    total = sum(2 * math.prod(layouts[i % 3].shape) for i in range(60))
    assert sum(load) == total and max(load) <= 1.1 * total / 1024
