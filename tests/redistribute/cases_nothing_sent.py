# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what needs no communication causes none, forward or backward, and equals one device."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ms_dtensor import DTensor, Partial, distribute_tensor, grad, value_and_grad
from tests.operands import P, R, S, data, mesh_2d
from tests.support import array, counted, equal


def placed(mesh, value, placements):
    """`value`, distributed; on Partial axes the ranks hold unlike summands of it, or the largest has it."""
    kinds = [p if p.is_partial() else R for p in placements]
    at = mesh.get_coordinate()
    part = value.asnumpy().copy()
    for axis, p in enumerate(kinds):
        n, i = mesh.shape[axis], at[axis]
        if p.is_partial("sum"):
            noise = [data(100 * axis + k, *value.shape).asnumpy() for k in range(n - 1)]
            part = noise[i] if i < n - 1 else part - sum(noise)
        elif p.is_partial():
            part = part - (1 + i) * (np.arange(part.size).reshape(part.shape) % n != i) * (1 if p.reduce_op == "max" else -1)
    cut = distribute_tensor(Tensor(part), mesh, [R if p.is_partial() else p for p in placements], src_data_rank=None)
    return DTensor.from_local(cut.to_local(), mesh, placements, shape=value.shape)


def silent(fn, mesh, *operands):
    """The result of `fn` on (value, placements) operands: as on one device, gradients too, and nothing is sent.

    The cotangents come laid out as the result lies, so that none is moved before it reaches `fn`.
    """
    values, wrt = [v for v, _ in operands], tuple(range(len(operands)))
    inputs = [placed(mesh, v, p) for v, p in operands]
    wanted = fn(*values)
    weight = data(7, *wanted.shape)
    _, grads = ms.value_and_grad(lambda *xs: (fn(*xs) * weight).sum(), wrt)(*values)
    with counted({}):
        got = fn(*inputs)
    equal(got, wanted)
    dweight = distribute_tensor(weight, mesh, [R if p.is_partial() else p for p in got.placements], src_data_rank=None)
    with counted() as count:
        _, got_grads = value_and_grad(lambda *xs: (fn(*xs) * dweight).sum(), wrt)(*inputs)
    assert not [event for event in count if event[1] == "backward"], count
    equal(got_grads, grads, "gradient")
    return got


def a_view_keeps_a_dim_of_one_element_sharded(world, line):
    x = data(1, 1, 2, 2, 2)
    for shape, dim in (((1, 2, 4), 0), ((1, 8), 0), ((8, 1), 1), ((2, 1, 4), 1), ((1, 2, 2, 2), 0), ((4, 1, 2, 1), 1)):
        for fn in (lambda t, s=shape: t.view(s), lambda t, s=shape: mint.reshape(t, s)):
            assert silent(fn, line, (x, [S(0)])).placements == (S(dim),), shape
    assert silent(lambda t: t.reshape((2, 3, 1)), mesh_2d(), (data(2, 6, 1), [S(0), S(1)])).placements == (S(0), S(2))
    with counted() as count:
        equal(placed(line, x, [S(0)]).view(8), x.view(8))
    assert sum(count.values()) == 1, "no dim of one element is left"


def a_whole_value_joins_a_sum_on_one_rank(world, line, grid):
    x, y = data(1, 3, 5), data(2, 3, 5)
    for fn in (lambda a, b: a + b, lambda a, b: b - a, mint.sub, lambda a, b: mint.add(a, b, alpha=3),
               lambda a, b: mint.sub(a, b, alpha=-2), lambda a, b: ops.stack([b, a], 1), lambda a, b: mint.cat((a, b)),
               lambda a, b: mint.cat((a, b, a * 2), 1)):
        assert silent(fn, line, (x, [P]), (y, [R])).placements == (P,)
        assert silent(fn, line, (x, [R]), (y, [P])).placements == (P,)
    assert silent(lambda a, b: a + b, line, (x, [P]), (data(3, 5), [R])).placements == (P,)
    assert silent(lambda a, b: a + b, line, (data(3, 5), [P]), (y, [R])).placements == (P,)
    assert silent(lambda a, b: ops.stack([a, b]), grid, (x, [P, R]), (y, [P, P])).placements == (P, P)
    assert silent(lambda a, b: a - b, grid, (x, [P, R]), (y, [R, P])).placements == (P, P)
    assert silent(lambda a, b: a + b, grid, (data(4, 1, 5), [S(0), R]), (data(5, 1, 5), [S(0), P])).placements == (S(0), P)


def a_whole_value_is_written_into_a_sum(world, line):
    x, y = data(1, 3, 5), data(2, 3, 5)
    total, term = placed(line, x, [P]), distribute_tensor(y, line, [R], src_data_rank=None)
    with counted({}):
        total.add_(term)
        total.sub_(term, alpha=3)
        total += term
    assert total.placements == (P,)
    equal(total, x - y)


def what_joins_a_sum_may_be_infinite_or_a_negative_zero(world, line):
    odd = Tensor(np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, 2.5], np.float32))
    zero = DTensor.from_local(Tensor(np.full(6, -0.0, np.float32)), line, [P])
    for fn, want in ((lambda a, b: a + b, odd), (lambda a, b: a - b, -odd), (lambda a, b: b + a, odd),
                     (lambda a, b: mint.add(a, b, alpha=-2), odd * -2)):
        local = fn(zero, distribute_tensor(odd, line, [R], src_data_rank=None)).to_local().asnumpy()
        assert np.array_equal(local, want.asnumpy() if world.rank == 0 else zero.to_local().asnumpy(), equal_nan=True)
        there = local[local == 0]
        assert np.array_equal(np.signbit(there), np.signbit(want.asnumpy()[3:5] if world.rank == 0 else -np.ones(6))), local
    count = DTensor.from_local(Tensor([1, 2], ms.int32), line, [P]) + distribute_tensor(Tensor([5, 6], ms.int32), line, [R])
    assert count.placements == (P,) and array(count).tolist() == [9, 14]
    half = data(1, 3).astype(ms.bfloat16)
    equal((DTensor.from_local(half, line, [P]) + distribute_tensor(half, line, [R])).full_tensor().astype(ms.float32),
          half.astype(ms.float32) * 5, rtol=2e-2)


def losses_of_micro_steps_add_up_without_communication(world, line):
    x, w = data(1, 8, 4), data(2, 4)

    def of_shards(weight):
        total = (weight * 0).sum()
        for i in range(3):
            total += (dx * weight).sum() * (i + 1.0)
        return total
    dx, dw = distribute_tensor(x, line, [S(0)], src_data_rank=None), distribute_tensor(w, line, [R], src_data_rank=None)
    with counted() as count:
        got = value_and_grad(of_shards, 0)(dw)
    equal(got[0], (x * w).sum() * 6)
    equal(got[1], x.sum(0) * 6)
    assert count == {("all_reduce", "backward"): 3}, "the weight's gradient, per use"


def the_larger_of_two_maxima_is_a_maximum(world, line):
    x, y = data(1, 3, 5), data(2, 3, 5)
    for fn, op in ((mint.maximum, "max"), (ops.minimum, "min")):
        a, b = placed(line, x, [Partial(op)]), placed(line, y, [Partial(op)])
        with counted({}):
            got = fn(a, b)
        assert got.placements == (Partial(op),)
        equal(got, fn(x, y))
        weight = data(3, 3, 5)
        dweight = distribute_tensor(weight, line, [R], src_data_rank=None)
        with counted() as count:
            _, grads = value_and_grad(lambda s, t, fn=fn, w=dweight: (fn(s, t) * w).sum(), (0, 1))(a, b)
        assert sum(count.values()) <= 2, count
        _, wanted = ms.value_and_grad(lambda s, t, fn=fn, w=weight: (fn(s, t) * w).sum(), (0, 1))(x, y)
        equal(grads, wanted, "gradient")


def of_the_other_operand_only_the_shape_is_read(world, line, grid):
    x = data(1, 4, 6)
    like = data(2, 2, 12)
    for other in (R, S(0), S(1), P):  # a dim of 2 leaves ranks without elements
        for here in (R, P):
            got = silent(lambda a, b: a.view_as(b), line, (x, [here]), (like, [other]))
            assert got.placements == (here,)
    for placements, other in (([R], [S(1)]), ([S(0)], [S(1)]), ([P], [S(2)]), ([R], [P])):
        silent(lambda a, b: a.expand_as(b), line, (data(3, 5, 1), placements), (data(4, 2, 5, 3), other))
    got = placed(grid, data(3, 5, 1), [S(0), R]).expand_as(placed(grid, data(4, 2, 5, 3), [P, S(2)]))
    assert got.placements == (S(1), S(2)), "what grows is cut as the other is"


def a_new_tensor_of_the_same_shape_keeps_the_shards(world, grid):
    for placements in ([S(0), S(1)], [S(1), R], [S(0), S(0)], [P, S(1)]):
        x = placed(grid, data(1, 3, 5), placements)
        with counted({}):
            made = [(x.new_full((3, 5), 2.5), 2.5), (x.new_zeros((3, 5)), 0), (x.new_ones((3, 5)), 1),
                    (x.new_empty((3, 5)), 0), (mint.full_like(x, 4), 4), (ops.ones_like(x), 1)]
        for y, value in made:
            assert y.placements == tuple(R if p.is_partial() else p for p in placements), (placements, y)
            equal(y, np.full((3, 5), value, np.float32))
    assert placed(grid, data(1, 3, 5), [S(0), S(1)]).new_full((5, 3), 1).placements == (R, R)


def a_whole_value_in_a_sum_is_differentiated_twice(world, line):
    x, y = data(1, 3, 5), data(2, 5)
    inputs = placed(line, x, [P]), distribute_tensor(y, line, [R], src_data_rank=None)

    def inner(a, b):
        return ((a + b) ** 3).sum()

    def outer(a, b):
        return sum((g * g).sum() for g in grad(inner, (0, 1))(a, b))
    cubes = 36 * (x + y) ** 3
    rows = 3 * ((x + y) ** 2).sum(0)  # the inner gradient of b
    equal(grad(outer, (0, 1))(*inputs), (cubes + 12 * rows * (x + y), (cubes + 12 * rows * (x + y)).sum(0)))
