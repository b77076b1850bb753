# SPDX-License-Identifier: Apache-2.0
"""Pure: what ranks write covers each tensor once, evenly, where it lies; pieces and their hashes; indexes."""
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_dtensor import DeviceMesh, FusedShard, Layout, Replicate, Shard
from ms_dtensor.checkpoint import plan as planning
from ms_dtensor.checkpoint.index import Index, TensorInfo, dump, sealed
from ms_dtensor.checkpoint.parsing import parse
from ms_dtensor.checkpoint.pieces import PIECE, ROW, SMALL, piece_hash, piece_size, pieces
from ms_dtensor.checkpoint.plan import SPLIT, common, held_boxes
from ms_dtensor.checkpoint.spread import Cut, Mesh, Ranks, Spread
from ms_dtensor.errors import CheckpointError


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
    plan = planning.assign(requests, ranks)
    return {rank: planning.parts_of(rank, plan, {r.key: r.shape for r in requests}) for rank in range(ranks)}, plan


def test_each_element_is_written_once_by_a_rank_that_holds_it():
    layouts = {f"t{i}": Layout(MESH, p, shape) for i, (shape, p) in enumerate(LAYOUTS)}
    requests = [planning.Request(key, 4, layout.shape, planning.laid_out(layout)) for key, layout in layouts.items()]
    requests.append(planning.Request("plain", 8, (3, 2), planning.whole_on(6, (3, 2))))
    requests.append(planning.Request("large", 1, (1, 7, SPLIT), planning.whole_on(6, (1, 7, SPLIT))))
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
    spread = planning.laid_out(layout)
    spread = Spread(spread.mesh, spread.cuts, data.draw(st.integers(0, spread.copies - 1)), data.draw(
        st.integers(1, spread.copies)))
    every = list(spread.boxes(shape))
    assert spread.count(shape) == len(every) and sum(planning.volume(box) for box, _ in every) == math.prod(shape)
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
    requests = [planning.Request(str(i), 1, (n,), planning.whole_on(4, (n,)) if free else Spread(
        Mesh((1,), Ranks.of([i % 4])), planning.whole_on(1, (n,)).cuts)) for i, (n, free) in enumerate(sizes)]
    load = {rank: sum(planning.volume(p.box) for p in parts) for rank, parts in planned(requests, 4)[0].items()}
    bound = [sum(n for i, (n, free) in enumerate(sizes) if not free and i % 4 == rank) for rank in range(4)]
    largest = max((min(n, SPLIT) for n, free in sizes if free), default=0)
    mean = sum(n for n, _ in sizes) / 4
    cut = sum(n / 4 for n, free in sizes if free and n >= SPLIT)  # of these each rank has as much
    assert max(load.values()) <= max(max(bound) + cut, mean + largest) + len(sizes)


def test_a_box_within_runs_of_rows():
    held = np.arange(9)  # rows 2..4, 10..12, 20..22 of a dim
    runs = [((2, 5), (10, 13), (20, 23))]
    assert held[planning.within(((11, 13),), runs)].tolist() == [4, 5]
    assert held[planning.within(((20, 21),), runs)].tolist() == [6]


def test_names_of_parts():
    assert planning.part_name("w", (3, 4), ((0, 3), (0, 4))) == "w" == planning.part_name("w", (), ())
    assert planning.part_name("w", (3, 4), ((0, 3), (2, 4))) == "w[0:3,2:4]"


def test_a_plan_for_many_ranks_is_made_at_once():
    mesh = DeviceMesh("cpu", np.arange(1024).reshape(64, 16), mesh_dim_names=("fsdp", "tp"))
    layouts = [Layout(mesh, [S(0), S(1)], (4096, 4096)), Layout(mesh, [R, S(0)], (4096, 64)),
               Layout(mesh, [S(0), R], (4096,))]
    parts, _ = planned([planning.Request(f"{i}", 2, layouts[i % 3].shape, planning.laid_out(layouts[i % 3]))
                        for i in range(60)], 1024)
    load = [sum(2 * planning.volume(p.box) for p in mine) for mine in parts.values()]
    total = sum(2 * math.prod(layouts[i % 3].shape) for i in range(60))
    assert sum(load) == total and max(load) <= 1.1 * total / 1024


# -- pieces are an array's bytes in order, and no small change leaves a hash as it was ---------------------------------
BIG = np.random.default_rng(0).normal(size=(5, 300, 1000)).astype(np.float32)
FORMS = {"whole": BIG, "rows": BIG[1:4], "columns": BIG[:, :, 3:900], "turned": BIG.transpose(2, 1, 0), "back": BIG[::-1],
         "strided": BIG[:, ::3], "none": BIG[:0], "one": BIG[0, 0, 0], "flat": BIG.reshape(-1)[1:],
         "bytes": BIG.view(np.uint8)}


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_the_bytes_in_order(form):
    noted: list[bytes] = []
    array = FORMS[form]
    got = [bytes(piece) for piece in pieces(array, lambda piece: noted.append(bytes(piece)))]
    size = piece_size(array.shape, array.itemsize)
    assert got == noted and b"".join(got) == array.tobytes()
    assert size <= PIECE and all(len(piece) == size for piece in got[:-1])
    assert array.ndim < 2 or size % (array.nbytes // max(len(array), 1) or 1) == 0 or array[:1].nbytes > PIECE


@settings(max_examples=300)
@given(st.integers(1, 5 * SMALL), st.integers(0, 2 ** 32), st.lists(st.tuples(st.integers(0), st.integers(0, 63)),
                                                                   min_size=1, max_size=3))
def test_a_change_of_up_to_three_words_is_seen(length, seed, flips):
    data = bytearray(np.random.default_rng(seed).bytes(length))
    before = piece_hash(memoryview(data))
    for word, bit in flips:
        at = word % -(-length // 8) * 8 + bit // 8
        if at < length:
            data[at] ^= 1 << bit % 8
    changed = any(sum((w % -(-length // 8), b) == (word % -(-length // 8), bit) for w, b in flips) % 2 and
                  word % -(-length // 8) * 8 + bit // 8 < length for word, bit in flips)
    assert (piece_hash(memoryview(data)) != before) == changed


@given(st.integers(0, 2 ** 32), st.sampled_from([1, 4, 8, 64, 512, ROW, 8 * ROW]))
def test_blocks_that_change_places_or_are_zeroed_are_seen(seed, size):
    rng = np.random.default_rng(seed)
    data = bytearray(rng.bytes(1 << 17))
    before = piece_hash(memoryview(data))
    a, b = rng.choice((1 << 17) // size, 2, replace=False) * size
    first, second = bytes(data[a:a + size]), bytes(data[b:b + size])
    if first != second:
        data[a:a + size], data[b:b + size] = second, first
        assert piece_hash(memoryview(data)) != before
        data[a:a + size], data[b:b + size] = first, second
    if any(first):
        data[a:a + size] = bytes(size)
        assert piece_hash(memoryview(data)) != before


def test_pairs_of_the_highest_bits_and_lengths_are_seen():
    data = np.zeros(1 << 16, np.uint64)
    before = piece_hash(memoryview(data.view(np.uint8)))
    for a, b in ((0, 1), (0, 512), (7, 7 + 512), (7, 1000), (1, 2)):
        data[[a, b]] ^= np.uint64(1 << 63)
        assert piece_hash(memoryview(data.view(np.uint8))) != before
        data[[a, b]] ^= np.uint64(1 << 63)
    lengths = (SMALL - 1, SMALL, SMALL + 1, SMALL + ROW, SMALL + ROW + 1)
    assert len({piece_hash(memoryview(bytes(n))) for n in lengths}) == len(lengths)


# -- an index comes back as it was; whatever else is in the file is refused by name ------------------------------------
ID = "0123456789abcdef" * 2
NAMED_RANKS = Mesh((2, 2), Ranks.of([3, 1, 0, 2]))
TOLD = Cut((0,), (((0, 1), (4, 6)), ((1, 4),)))
INDEX = Index(ID, 7, "0.1.0", 4, Ranks.of([0, 1, 2, 3]), {
    "w": TensorInfo("w", "float32", (6, 3), Spread(NAMED_RANKS, (TOLD, Cut()), 1, 2), 4),
    "s": TensorInfo("s", "float32", (), Spread(NAMED_RANKS, (), 3), 4),
    "both": TensorInfo("both", "int8", (5, 9), Spread(NAMED_RANKS, (Cut(), Cut((1, 0)))), 4),
    "none": TensorInfo("none", "bfloat16", (0, 3), Spread(NAMED_RANKS, (Cut((1,)), Cut())), 4)},
    {"a": 1, "b": None, "c": 0.1, "d": "ü", "e": True, "f": math.inf, "g": 10 ** 300}, {"v": "w"}, 12345)


def test_an_index_comes_back():
    assert parse(dump(INDEX), "x") == INDEX
    again = parse(dump(replace(INDEX, step=None, values={"n": math.nan})), "x")
    assert again.step is None and math.isnan(again.values["n"])
    assert json.loads(dump(INDEX))["index"]["tensors"]["w"] == {
        "dtype": "F32", "shape": [6, 3], "mesh": 0, "cuts": [0, 1], "copy": [1, 2]}


def _changed(change):
    body = json.loads(dump(INDEX))["index"]
    change(body)
    return sealed(json.dumps(body).encode())


def _set(*path):
    *path, last, value = path

    def change(body):
        for name in path:
            body = body[name]
        if value is ...:
            del body[last]
        else:
            body[last] = value
    return change


W, RUNS = ("tensors", "w"), ("cuts", 0, "runs")
WRONG = {
    "its format is": _set("format", "pt"), "format version 3": _set("version", 3), "its id is": _set("id", "../" + ID),
    "its step is": _set("step", -1), "does not have just format": _set("more", 1), "its 'library'": _set("library", None),
    "its time is": _set("saved", 1.5), "it is of 0 ranks": _set("ranks", 0),
    "it is of 1048577 ranks": _set("ranks", 2 ** 20 + 1),
    r"its files are the ranks \[0, 5, 1\], of 4": _set("files", [[0, 5, 1]]), "its files name a rank twice": _set(
        "files", [[0, 4, 1], [2, 1, 1]]), "its files are 5, no list": _set("files", 5),
    "its files are the ranks .*, of 4": _set("files", [[0, 2 ** 61, 1]]),
    "the ranks \\[0, 2, 0\\]": _set("meshes", 0, "ranks", [[0, 2, 0]]),
    "a mesh of 4 ranks has the shape": _set("meshes", 0, "shape", [2, 3]),
    "a mesh does not have just": _set("meshes", 0, {}),
    "its meshes are": _set("meshes", None), "a cut does not have just axes": _set("cuts", 0, {"axes": [], "x": 1}),
    "the axes of a cut are": _set("cuts", 0, "axes", [0, 0]), "a run of a cut is": _set(*RUNS, [[[0, 0]], [[0, 6]]]),
    "the runs of 'w' do not cover it once": _set(*RUNS, [[[0, 1]], [[2, 6]]]),
    "runs of 'w' do not cover it": _set(*RUNS, [[[0, 6]], [[2, 3]]]), "the runs of 'w' do": _set(*RUNS, [[[0, 6]]]),
    "the runs of a rank are": _set(*RUNS, [5]), "of 'w' do not cover it once": _set(*W, "shape", [7, 3]),
    "the dtype of 'w'": _set(*W, "dtype", "F99"), "the shape of 'w'": _set(*W, "shape", [2, -3]),
    "the mesh of 'w' is 1 of 1": _set(*W, "mesh", 1), "the cuts of 'w' are": _set(*W, "cuts", [0]),
    "the cuts of 'w' are \\[0, 9\\]": _set(*W, "cuts", [0, 9]), "the axes that cut 'w' are": _set(*W, "cuts", [0, 0]),
    "the axes that cut 'w' are .*, of a mesh of 2": _set("cuts", 1, "axes", [2]),
    "the copy of 'w' is": _set(*W, "copy", [2, 1]), "the copy of 'w' is \\[0, 3\\] of 2": _set(*W, "copy", [0, 3]),
    "tensor 'w' does not have just": _set(*W, "mesh", ...), "its 'values' is no map": _set("values", []),
    "is tied to": _set("tied", "v", "x"), "is two things": _set("values", "w", 1), "the value of": _set("values", "a", [1]),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_index_is_refused_by_name(text):
    with pytest.raises(CheckpointError, match=text):
        parse(_changed(WRONG[text]), "x")


def test_bytes_that_are_no_index_are_refused():
    good = dump(INDEX)
    nested = sealed(b"[" * 100_000 + b"]" * 100_000)
    twice = sealed(b'{"a": 1, "a": 2}')
    long = sealed(b'{"a": ' + b"9" * 5000 + b"}")
    for data in (b"", good[:-1], good[1:], good + b" ", good.replace(b'"w"', b'"x"', 1), nested, twice, long,
                 sealed(b"\xff"), sealed(b"{"), sealed(b'{"a": NaN}'), sealed(b"[]")):
        with pytest.raises(CheckpointError, match="no sound index"):
            parse(data, "x")
