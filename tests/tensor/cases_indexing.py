# SPDX-License-Identifier: Apache-2.0
"""Reading and writing by index, as NumPy does it on the global array: every index over every layout of two axes."""
import itertools

import numpy as np
from mindspore import Tensor

from ms_dtensor import DTensor, comm
from ms_dtensor.errors import MixedOperandError
from tests.operands import P, R, S, mesh_1d, placed
from tests.support import equal, refusal
from tests.tiers import sampled

A = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
B = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)


def layouts(ndim: int = 2):
    """Every pair of placements of a tensor on two axes."""
    return itertools.product([R, *(S(d) for d in range(ndim))], repeat=2)


INDICES = (0, -1, slice(1, 4), slice(None, None, -2), (slice(None), 2), (Ellipsis, slice(1, 3)), (2, 3), None,
           (slice(None), None, 1), [0, 2, -1], (slice(None), [1, -1]), ([0, 4, -2], [1, 1, 5]), ([[0], [3]], [1, 2]),
           (1, [0, 5]), ([1, 2], None, [3, 4]), np.ix_([0, 2, 4], [1, 5]), slice(3, 2), ())


def getitem_as_numpy(world, grid):
    for shift, placements in enumerate(layouts()):
        x = placed(A, grid, *placements)
        for index in sampled(INDICES, 4, shift):
            equal(x[index], A[index], f"{placements} {index}")
        ids = placed(np.array([3, 0, -1], np.int32), grid, S(0), R)
        equal(x[ids], A[[3, 0, -1]])
        equal(x[ids, ids], A[[3, 0, -1], [3, 0, -1]])
    partial = DTensor.from_local(Tensor(A), mesh_1d(), [P])
    equal(partial[1:3, [0, 2]], 4 * A[1:3][:, [0, 2]])


def getitem_refusals_are_the_same_everywhere(world):
    x = placed(A, mesh_1d(), S(0))
    text = refusal(lambda: x[x > 0])
    assert "mask" in text and "data" in text and "where(" in text
    assert len(set(comm.group(tuple(range(4))).all_gather_object(text))) == 1
    rows = np.array([True, False, True, True, False])  # of which every rank has all
    assert np.array_equal(x[rows].full_tensor().asnumpy(), A[rows])
    refusal(lambda: x[rows[1:]], IndexError)
    for index in (5, (0, 6), (0, 0, 0), [7], (slice(None), [0, -7])):
        refusal(lambda i=index: x[i], IndexError)
    out = placed(np.array([0, 9], np.int32), mesh_1d(), R)
    refusal(lambda: x[out], (IndexError, ValueError, RuntimeError))


def setitem_as_numpy(world, grid):
    for shift, placements in enumerate(layouts()):
        for index in sampled(INDICES, 7, shift):
            if index is None or isinstance(index, tuple) and any(i is None for i in index):
                continue
            want = A.copy()
            region = want[index]
            want[index] = 7.5
            x = placed(A, grid, *placements)
            x[index] = 7.5
            equal(x, want, f"{placements} {index} = scalar")
            for other in ([R, R], [S(0), R], [R, S(max(region.ndim - 1, 0))]):
                if region.ndim == 0 and other != [R, R]:
                    continue
                values = B.reshape(-1)[:region.size].reshape(region.shape)
                want[index] = values
                x = placed(A, grid, *placements)
                x[index] = placed(values, grid, *other)
                final = A.copy()
                final[index] = values
                equal(x, final, f"{placements} {index} = {other}")
        row = placed(B[0], grid, R, R)
        x, want = placed(A, grid, *placements), A.copy()
        x[1:4] = row  # broadcast
        x[:, None, 2] = B[:, :1]  # a literal, one dim more
        want[1:4] = B[0]
        want[:, None, 2] = B[:, :1]
        equal(x, want, "broadcast")
        x[x > 0] = -1.0
        want[want > 0] = -1.0
        equal(x, want, "mask")
        assert tuple(x.placements) == tuple(placements)


def setitem_refusals(world):
    x = placed(A, mesh_1d(), S(0))
    refusal(lambda: x.__setitem__(0, Tensor(B[0])), MixedOperandError)
    refusal(lambda: x.__setitem__(x > 0, placed(B, mesh_1d(), S(0))))
    refusal(lambda: x.__setitem__(0, B))
    refusal(lambda: x.__setitem__(9, 0.0), IndexError)
    refusal(lambda: DTensor.from_local(Tensor(A), mesh_1d(), [P]).__setitem__(0, 1.0))
    plain = Tensor(A)
    assert "x.new_zeros" in refusal(lambda: plain.__setitem__(0, x[0]), MixedOperandError)
    equal(plain, A)
    equal(x, A)
