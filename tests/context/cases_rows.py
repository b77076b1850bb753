# SPDX-License-Identifier: Apache-2.0
"""Rows by a table on real ranks: values and gradients of a matrix that says the same, and ranks that get or give nothing."""
import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_dtensor import comm
from ms_dtensor.custom_ops.rows import ReturnRows, Rows, SendRows, connected
from ms_dtensor.errors import CollectiveMismatch
from tests.cases import case
from tests.support import counted

SHAPE = (3, 2)


def table(give, counts, me):
    """`Rows` of a rank, of `give[i][j]`: which of its rows member i gives to member j."""
    n = len(give)
    return Rows(counts[me], np.concatenate([np.asarray(give[me][j], int) for j in range(n)]),
                [len(give[me][j]) for j in range(n)], [len(give[i][me]) for i in range(n)])


def drawn(n, seed, counts):
    """A random table: rows may go to several members, and some to none."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, counts[i], rng.integers(0, 5)).tolist() if counts[i] else [] for _ in range(n)]
            for i in range(n)]


def tables(n):
    some = [4, 1, 6, 3][:n]
    random = drawn(n, 1, some)
    no_gift = [[[] if i == 0 else random[i][j] for j in range(n)] for i in range(n)]
    no_receipt = [[[] if j == n - 1 else random[i][j] for j in range(n)] for i in range(n)]
    neither = [[[] if n - 1 in (i, j) else random[i][j] for j in range(n)] for i in range(n)]
    only_self = [[[0] if i == j else [] for j in range(n)] for i in range(n)]
    empty = [0, *some[1:]]
    return {"random": (random, some), "one gives nothing": (no_gift, some), "one gets nothing": (no_receipt, some),
            "one does neither": (neither, some), "each its own": (only_self, some),
            "one has nothing": (drawn(n, 2, empty), empty), "nobody anything": ([[[]] * n] * n, some)}


def matrix(give, counts):
    """The table as the linear map it is, of all ranks' rows one behind another."""
    n, first = len(give), np.cumsum([0, *counts])
    order = [first[i] + r for j in range(n) for i in range(n) for r in give[i][j]]
    m = np.zeros((len(order), first[-1]))
    m[np.arange(len(order)), order] = 1
    return m


def mine(x, sizes, me):
    return x[sum(sizes[:me]):sum(sizes[:me + 1])]


@case(world_size=(2, 4))
def rows_are_a_matrix_and_their_gradients_its_transpose(world):
    n, me = world.size, world.rank
    group = comm.group(tuple(range(n)))
    rng = np.random.default_rng(3)
    for name, (give, counts) in tables(n).items():
        m, t = matrix(give, counts), table(give, counts, me)
        got = [sum(len(give[i][j]) for i in range(n)) for j in range(n)]
        x, dy = rng.normal(size=(sum(counts), *SHAPE)), rng.normal(size=(sum(got), *SHAPE))
        for op, a, b, sizes, there, by in ((SendRows, x, dy, counts, got, m), (ReturnRows, dy, x, got, counts, m.T)):
            local, cot = Tensor(mine(a, sizes, me)), Tensor(mine(b, there, me))

            def loss(v, op=op, cot=cot, t=t):
                y, = op.apply(t, group, v)
                total = (y * cot).sum() if y.shape[0] else connected(ms.ops.zeros((), ms.float64), y)
                return total, y
            with counted() as count:
                (_, y), grad = ms.value_and_grad(loss, 0, has_aux=True)(local)
            np.testing.assert_allclose(y.asnumpy(), mine(np.einsum("ij,jab->iab", by, a), there, me), rtol=1e-14)
            np.testing.assert_allclose(grad.asnumpy(), mine(np.einsum("ij,iab->jab", by, b), sizes, me), rtol=1e-12,
                                       atol=1e-14, err_msg=f"{name} {op.__name__}")
            assert count == {("all_to_all", "forward"): 1, ("all_to_all", "backward"): 1}, (name, count)


@case(world_size=4)
def a_rank_that_uses_nothing_of_what_came_stays_in_the_backward(world):
    """Rank 3 gets nothing, and rank 1 gets rows that it does not look at: with `connected` nobody waits for them."""
    n, me = world.size, world.rank
    group = comm.group(tuple(range(n)))
    give = [[[0, 1] if j < 3 else [] for j in range(n)] for _ in range(n)]
    t = table(give, [2] * n, me)
    x = Tensor(np.random.default_rng(me).normal(size=(2, 3)))

    def loss(v):
        far, = SendRows.apply(t, group, v * 2)
        return (v * 3).sum() + far.sum() if me not in (1, 3) else connected((v * 3).sum(), far)
    for _ in range(2):
        grad = ms.grad(loss)(x)
        np.testing.assert_array_equal(grad.asnumpy(), np.full((2, 3), 3.0 + 2 * 2))  # ranks 0 and 2 looked at each row
    assert group.all_gather_object(me) == list(range(n))  # in step


def tensors_of_one_node_travel_together(world):
    """Floats of two dtypes and integers: each as it would alone; one result is not used on one rank."""
    me = world.rank
    group = comm.group((0, 1))
    give, counts = [[[0], [2, 1]], [[1, 1], []]], [3, 2]
    t = table(give, counts, me)
    rng = np.random.default_rng(5)
    x, w, ids = rng.normal(size=(5, 2)), rng.normal(size=(5, 4)).astype(np.float32), np.arange(5, dtype=np.int32)
    m = matrix(give, counts)
    local = [Tensor(mine(a, counts, me)) for a in (x, w, ids)]

    def loss(x, w):
        y, z, i = SendRows.apply(t, group, x, w, local[2])
        return ((y * y).sum() + (z.sum().astype(ms.float64) if me == 0 else 0)), i
    with counted() as count:
        (_, ids_here), grads = ms.value_and_grad(loss, (0, 1), has_aux=True)(*local[:2])
    got = [sum(len(give[i][j]) for i in range(2)) for j in range(2)]
    np.testing.assert_array_equal(ids_here.asnumpy(), mine(m @ ids, got, me))
    used = np.concatenate([np.ones(got[0]), np.zeros(got[1])])
    np.testing.assert_allclose(grads[0].asnumpy(), mine(m.T @ (2 * m @ x), counts, me), rtol=1e-12)
    np.testing.assert_allclose(grads[1].asnumpy(), mine(np.repeat(m.T @ used, 4).reshape(5, 4), counts, me), rtol=1e-6)
    assert count == {("all_to_all", "forward"): 3, ("all_to_all", "backward"): 2}, count


def the_second_derivative_is_the_map_again(world):
    me = world.rank
    group = comm.group((0, 1))
    give, counts = [[[0], [2, 1]], [[1, 1], [0]]], [3, 2]
    t, m = table(give, counts, me), matrix(give, counts)
    x = np.random.default_rng(6).normal(size=(5, 2))

    def cubes(v):
        return (SendRows.apply(t, group, v)[0] ** 3).sum()
    second = ms.grad(lambda v: (ms.grad(cubes)(v) ** 2).sum())(Tensor(mine(x, counts, me)))
    # of sum of squares of M^T 3 (M x)^2
    want = m.T @ (6 * (m @ x) * (m @ (2 * m.T @ (3 * (m @ x) ** 2))))
    np.testing.assert_allclose(second.asnumpy(), mine(want, counts, me), rtol=1e-12)


def half_precision_is_added_up_in_float32_and_rounded_once(world):
    me = world.rank
    group = comm.group((0, 1))
    t = table([[[0] * 8, [0] * 8], [[0], []]], [1, 1], me)
    for dtype in (ms.float16, ms.bfloat16):
        y = Tensor(np.full((sum(t.recv), 1), 1 + 2.0**-7, np.float32)).astype(dtype)
        home = ReturnRows.apply(t, group, y)[0].astype(ms.float32).asnumpy()
        assert home.item() == (16 * (1 + 2.0**-7) if me == 0 else 1 + 2.0**-7), home


def tables_that_do_not_fit_are_refused_by_all_and_ranks_go_on(world):
    me = world.rank
    group = comm.group((0, 1))
    x = Tensor(np.ones((2, 1)))
    texts = []
    for _ in range(2):
        try:
            group.all_to_all_rows(x, [1, 1], [1, 1] if me == 0 else [2, 1])
        except CollectiveMismatch as error:
            texts.append(str(error))
        assert group.all_to_all_rows(x, [1, 1], [1, 1]).shape == (2, 1)
    assert len(texts) == 2 and "rank 0 gives rank 1 1 rows, which expects 2" in texts[0], texts
    assert len(set(group.all_gather_object(texts[0]))) == 1
