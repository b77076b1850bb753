# SPDX-License-Identifier: Apache-2.0
"""Pieces of tensors: those side by side that are alike are one run, so that packing does not grow with the members."""
import itertools
import math
import random

import pytest

from ms_dtensor.comm.parts import Parts, in_chains


def chunks(n: int, members: int) -> list[int]:
    each = -(-n // members)
    return [max(min(each, n - r * each), 0) for r in range(members)]


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_members_pieces_however_they_are_cut(seed):
    draw = random.Random(seed)
    members = draw.choice([1, 2, 5, 64])
    shapes = [tuple(draw.randint(0, 9) for _ in range(draw.randint(1, 3))) for _ in range(4)]
    dims = [draw.randrange(len(shape)) for shape in shapes]
    sizes = []
    for shape, dim in zip(shapes, dims):
        cuts = sorted(draw.randint(0, shape[dim]) for _ in range(members - 1))
        uneven = [b - a for a, b in zip([0, *cuts], [*cuts, shape[dim]])]
        sizes.append(draw.choice([uneven, chunks(shape[dim], members)]))
    parts = Parts(shapes, dims, sizes)
    for i, (shape, dim, each) in enumerate(zip(shapes, dims, sizes)):
        first, stop = sorted((draw.randint(0, members), draw.randint(0, members)))
        found = {}
        for member, count, at, size in parts.runs(i, first, stop):
            for k in range(count):
                found[member + k] = (*(slice(None),) * dim, slice(at + k * size, at + (k + 1) * size))
        assert found == {m: parts.index(i, m) for m in range(first, stop) if parts.count(i, m)}
        assert parts.widths[i] == max(parts.count(i, m) for m in range(members))
        if each == chunks(shape[dim], members):
            assert len(parts.runs(i, 0, members)) <= 2
        assert sum(parts.count(i, m) for m in range(members)) == math.prod(shape)


def runs(order, kinds) -> int:
    """How many runs of equal kinds there are."""
    return len(list(itertools.groupby(kind for i in order for kind in kinds[i])))


@pytest.mark.parametrize("seed", range(20))
def test_things_of_equal_kinds_are_neighbours_where_that_can_be(seed):
    """No order has fewer runs, of things of which at most two are of several kinds, as in a block of a transformer."""
    draw = random.Random(seed)
    mixed = [[(draw.randint(1, 3), 1) for _ in range(3)] for _ in range(draw.randint(0, 2))]
    kinds = [*mixed, *([(draw.randint(1, 3), 1)] * draw.randint(1, 2) for _ in range(4))]
    draw.shuffle(kinds)
    order = in_chains(kinds)
    assert sorted(order) == list(range(len(kinds)))
    assert runs(order, kinds) == min(runs(other, kinds) for other in itertools.permutations(order)), (kinds, order)


def test_a_blocks_nine_weights_lie_in_four_runs_though_some_are_one_parameter():
    a, b, c, d = ((n, 1) for n in (256, 128, 512, 1))
    kinds = [[d], [a, b, b], [a], [d], [c, c], [c]]  # norm, q and k and v, wo, norm, w1 and w3, w2
    order = in_chains(kinds)
    assert [list(alike) for _, alike in itertools.groupby(kind for i in order for kind in kinds[i])] == [
        [c] * 3, [a] * 2, [b] * 2, [d] * 2]
    parts = Parts([(8, 2), (8, 2), (8, 3), (6, 4)], [0, 0, 0, 1], [[2] * 4, [2] * 4, [2] * 4, [1] * 4])
    assert parts.alike() == [[0, 1], [2], [3]]  # as wide, but of six stretches
