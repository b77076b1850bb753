# SPDX-License-Identifier: Apache-2.0
"""Pieces of tensors: those side by side that are alike are one run, so that packing does not grow with the members."""
from __future__ import annotations

import math
import random

import pytest

from ms_dtensor.comm.parts import Parts


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
