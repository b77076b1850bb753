# SPDX-License-Identifier: Apache-2.0
"""Derivatives of derivatives: the gradient's own moves are differentiable, to any order, also where shards are empty."""
import itertools

import mindspore as ms
import numpy as np
from mindspore import mint, ops

from ms_dtensor import DTensor, Partial, comm, distribute_tensor, grad
from tests.operands import R, S, data, mesh_1d, mesh_2d
from tests.support import array, counted, equal
from tests.tiers import sampled

POSITIONS = (0, 1)


def second(take, f):
    """The gradient of the sum of squares of f's gradients, for all positions; `take` is a grad function."""
    inner = take(f, POSITIONS)
    return take(lambda *xs: sum((g * g).sum() for g in inner(*xs)), POSITIONS)


def third(take, f):
    """One order more, for the first position."""
    inner = second(take, f)
    return take(lambda *xs: (inner(*xs)[0] ** 2).sum(), 0)


def laid_out(x, *placements):
    return x.redistribute(placements=placements) if isinstance(x, DTensor) else x


FUNCTIONS = {
    "a cube of a product": lambda a, b: (mint.matmul(a, b) ** 3).sum(),
    "a cube by hand": lambda a, b: (lambda y: (y * y * y).sum())(mint.matmul(a, b)),
    "a mean over what may be cut": lambda a, b: ((mint.matmul(a, b) - mint.matmul(a, b).mean(0)) ** 3).mean(),
    "rows scaled by their sums": lambda a, b: ((mint.transpose(a, 0, 1).sum(0, keepdim=True) * mint.reshape(b, (-1, 1))) ** 3
                                               ).sum() + mint.softmax(a, 1)[:, 0].exp().sum(),
    "moved by hand": lambda a, b: (mint.matmul(laid_out(a, S(0)) * laid_out(a, R), laid_out(b, S(1))) ** 3).sum(),
}

LAYERS = {  # as `nn.Dense` and `mint.nn.Linear` compute; both arguments give weights and biases
    "a dense layer": lambda a, b: (ops.bias_add(mint.matmul(a, b), a[0, :3]) ** 3).sum(),
    "a linear layer": lambda a, b: (mint.nn.functional.linear(a, mint.transpose(b, 0, 1), b[0] * a[1, :3]) ** 3).sum(),
}


def wide(seed, *shape):
    """Float64, so that finite differences tell."""
    return ms.Tensor(np.random.default_rng(seed).normal(size=shape))


def _is_the_slope(told, functional, tensors, at, what):
    """A derivative by the tensor `at` against the difference of what was differentiated, along one direction.

    Plain MindSpore's second derivatives are no reference: with views in a backward they are 0 or a fraction.
    """
    along = np.random.default_rng(9).normal(size=tensors[at].shape)
    ends = []
    for sign in (1, -1):
        moved = list(tensors)
        moved[at] = ms.Tensor(array(tensors[at]) + sign * 1e-6 * along)
        ends.append(functional(*moved))
    measured, slope = (ends[0] - ends[1]) / 2e-6, float((array(told) * along).sum())
    assert abs(measured) > 1e-3, f"{what}: nothing to compare"
    assert abs(slope - measured) <= 1e-5 * max(1.0, abs(measured)), f"{what}: {slope}, measured {measured}"


def _everywhere(mesh, f, what, a, b, rtol=1e-6):  # a mean's factor is a float32
    def laid(tensors, *placements):
        return [distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in zip(tensors, placements)]
    whole = [R] * mesh.ndim
    first = ms.grad(f, POSITIONS)
    wanted = (*second(grad, f)(*laid((a, b), whole, whole)), third(grad, f)(*laid((a, b), whole, whole)))
    for at in POSITIONS:
        _is_the_slope(wanted[at], lambda *xs: sum(float((array(g) ** 2).sum()) for g in first(*xs)), (a, b), at, what)
    _is_the_slope(wanted[2], lambda *xs: float((array(second(grad, f)(*laid(xs, whole, whole))[0]) ** 2).sum()), (a, b), 0,
                  what)
    options = [(p,) if mesh.ndim == 1 else (p, q) for p, q in itertools.product((R, S(0), S(1)), repeat=2)]
    options = list(dict.fromkeys(options if mesh.ndim > 1 else [(p,) for p in (R, S(0), S(1))]))
    pairs = itertools.product(range(len(options)), repeat=2)
    pairs = [(i, j) for i, j in pairs if mesh.ndim == 1 or (i + 2 * j) % 4 == 0]  # a quarter of the 81 on two axes
    for i, j in sampled(pairs, 9):
        x, y = laid((a, b), options[i], options[j])
        label = f"{what}, {options[i]} and {options[j]}"
        equal((*second(grad, f)(x, y), third(grad, f)(x, y)), wanted, f"{label}: derivative", rtol=rtol)


def second_and_third_derivatives_are_one_devices_on_any_layout(world):
    for what, f in sampled(FUNCTIONS.items(), 4):
        _everywhere(mesh_1d(), f, what, wide(1, 4, 8), wide(2, 8, 3))  # the last rank's share of 3 columns is empty


def they_are_of_layers_with_a_bias(world):
    for what, f in sampled(LAYERS.items(), 2):
        _everywhere(mesh_1d(), f, what, wide(1, 4, 8), wide(2, 8, 3))


def they_are_on_two_axes(world):
    for what in ("a cube of a product", "a mean over what may be cut", "rows scaled by their sums"):
        _everywhere(mesh_2d(), FUNCTIONS[what], what, wide(3, 3, 6), wide(4, 6, 5))


def they_are_where_the_input_is_a_sum_or_an_average(world, line):
    whole = sum(array(data(10 + r, 4, 6)) for r in range(world.size))
    b = distribute_tensor(data(6, 4, 6), line, [R], src_data_rank=None)
    factor = array(data(6, 4, 6)).sum()
    for op, parts in (("sum", 1), ("avg", world.size)):
        x = DTensor.from_local(data(10 + world.rank, 4, 6), line, [Partial(op)])
        got = grad(lambda t: (grad(lambda u: (u ** 3).sum() * b.sum(), 0)(t) ** 2).sum(), 0)(x)
        value = whole / parts  # the inner gradient is 3 value^2 factor for each summand, and an average divides once more
        equal(got, 2 * (3 * value ** 2 * factor / parts) * 6 * value * factor / parts / parts, op, 2e-4)


def a_second_derivative_moves_what_it_must_and_says_so(world, line):
    a, b = (distribute_tensor(t, line, p, src_data_rank=None) for t, p in ((data(1, 4, 8), [S(1)]), (data(2, 8, 4), [R])))
    with counted() as count:
        second(grad, FUNCTIONS["a cube of a product"])(a, b)
    assert set(op for op, _ in count) <= {"reduce_scatter", "all_gather", "all_reduce"}, count
    assert sum(count.values()) <= 8 and any(phase == "backward" for _, phase in count), count


def an_empty_shard_makes_the_nodes_of_the_others(world, line):
    """The last two ranks of four hold nothing of two rows; all ranks must meet in every derivative."""
    f = lambda t, u: (mint.matmul(t, u).exp() * t.sin() + (t * u[:1]) ** 3 + u.mean() * t).sum()  # noqa: E731
    xs = wide(7, 2, 3), wide(8, 3, 3)
    whole, cut = ([distribute_tensor(t, line, p, src_data_rank=None) for t, p in zip(xs, placed)]
                  for placed in (([R], [R]), ([S(0)], [R])))
    wanted, got = second(grad, f)(*whole), second(grad, f)(*cut)
    first = ms.grad(f, POSITIONS)
    for k in POSITIONS:
        _is_the_slope(wanted[k], lambda *ts: sum(float((array(g) ** 2).sum()) for g in first(*ts)), xs, k, f"input {k}")
        equal(got[k], wanted[k], f"derivative {k}", 1e-6)
    comm.group(tuple(range(world.size))).barrier()


def what_is_handed_back_keeps_its_history(world):
    """A cast to its own dtype is its operand; where some rank's shard is empty it becomes a node, on all ranks."""
    x = wide(9, 3, 3)
    whole, dtype = array(x), x.dtype
    dx = distribute_tensor(x, mesh_1d(), [S(0)], src_data_rank=None)
    inner = ms.grad(lambda t: mint.sin((t.astype(dtype) + t).redistribute(placements=[R])).sum())
    got = ms.grad(lambda t: (inner(t) ** 2).sum())(dx)
    equal(got, -16 * np.cos(2 * whole) * np.sin(2 * whole), "second derivative of sin(x + x)", 1e-6)


def they_are_of_convolutions_on_any_layout(world, line):
    """As of all on one rank, which `tests/ops/test_higher_order.py` compares with products."""
    mesh, x, w = line, data(1, 2, 4, 7, 7), data(2, 4, 4, 3, 3)  # 7 rows of 3 at a stride of 2
    for op, more in ((ops.Conv2D(4, 3, pad_mode="pad", pad=1, stride=2), ()),
                     (ops.Conv2DTranspose(4, 3, pad_mode="pad", pad=1, stride=2), ((2, 4, 13, 13),))):
        f = lambda a, b, op=op, more=more: (mint.tanh(op(a, b, *more)) ** 2).sum()  # noqa: E731
        whole = [distribute_tensor(t, mesh, [R], src_data_rank=None) for t in (x, w)]
        wanted = second(grad, f)(*whole)
        for p, q in [(S(0), R), (S(1), R), (S(1), S(1)), (R, S(0)), (S(2), R), (S(0), S(0)), (S(3), S(2))]:
            cut = [distribute_tensor(t, mesh, [r], src_data_rank=None) for t, r in zip((x, w), (p, q))]
            equal(second(grad, f)(*cut), wanted, f"{op.name}, {p} and {q}", rtol=1e-4)
