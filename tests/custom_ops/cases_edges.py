# SPDX-License-Identifier: Apache-2.0
"""Own ops at their edges: nested arguments, results that are one tensor, gradients that are none, empty shards."""
import itertools

import mindspore as ms
import numpy as np
from mindspore import ops

from ms_dtensor import DFunction, DTensor, distribute_tensor, grad, local_map, register_rule
from ms_dtensor.errors import LayoutError, MixedOperandError
from tests.operands import P, R, S, data, mesh_1d
from tests.support import check_against_one_device, equal, refusal, refused_alike, same_on_all_ranks


class WeightedSum(DFunction):
    """sum(a) + 2 sum(b) of two tensors in any nest, both cut over all ranks."""

    in_placements = ([S(0)],)
    out_placements = [P]
    out_shapes = ((),)

    @staticmethod
    def forward(ctx, nest):
        a, b = nest.values() if isinstance(nest, dict) else nest
        assert not isinstance(a, DTensor) and not isinstance(b, DTensor)
        ctx.save_for_backward(a, b)
        return a.sum() + 2 * b.sum()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return ((grad * ops.ones_like(a), 2 * grad * ops.ones_like(b)),)


def tensors_in_lists_are_laid_out_moved_and_wrapped(world, line):
    x, y, w = data(1, 8, 3), data(2, 7, 2), data(3, 8, 3)
    plain = lambda nest: (lambda a, b: a.sum() + 2 * b.sum())(*nest)  # noqa: E731
    keys = lambda nest: plain(tuple(nest.values()))  # noqa: E731
    options = {"redistribute_inputs": True, "out_shapes": ((),)}
    for lx, ly in itertools.product((R, S(0), S(1)), (R, S(0))):
        for nest, fn in (
                (list, WeightedSum.apply), (lambda ab: dict(zip("ab", ab)), WeightedSum.apply),
                (tuple, local_map(plain, [P], ([S(0)],), **options)),
                (lambda ab: dict(zip("ab", ab)), local_map(keys, [P], (([S(0)], [S(0)]),), **options)),
                (list, local_map(plain, [P], (([S(0)], [S(0)]),), in_grad_placements=([S(0)],), **options))):
            check_against_one_device(
                lambda a, b, f=fn, n=nest: (f(n((a * a, b * b))) if isinstance(a, DTensor) else plain((a * a, b * b))) ** 2,
                [x, y], [[lx], [ly]], line, f"{nest} {lx} {ly}")
    da, dw = (distribute_tensor(t, line, [S(0)]) for t in (x, w))
    equal(local_map(lambda a, *, more: a + more["w"][0], [S(0)], ([S(0)],))(da, more={"w": [dw]}), x + w, "keywords")
    cut = local_map(lambda pair: ops.matmul(pair[0].swapaxes(0, 1), pair[1]), [S(0)], (([S(1)], [R]),),
                    redistribute_inputs=True, out_shapes=((3, 3),))
    equal(cut([da, dw]), x.asnumpy().T @ w.asnumpy(), "each by its own")


def nests_that_cannot_be_laid_out_are_refused_before_anything_moves(world, line):
    x = distribute_tensor(data(1, 8, 3), line, [S(1)])
    first = lambda nest: nest[0] * 1  # noqa: E731
    with register_rule("own_sum", "S(0), S(0) -> S(0)") as rule:
        own_sum = rule(lambda a, b: a["x"] + b)
        for kind, text, call in (
                (MixedOperandError, "argument 0[1] is a plain tensor", lambda: WeightedSum.apply([x, data(1, 2, 3)])),
                (LayoutError, "argument 0[1] does not lie", lambda: local_map(first, [S(0)], (([S(1)], [S(0)]),))([x, x])),
                (LayoutError, "1 entries for the 2 members of argument 0", lambda: local_map(
                    first, [S(0)], (([S(1)],),))([x, x])),
                (MixedOperandError, "in a dict", lambda: own_sum({"x": x}, x))):
            assert text in refused_alike(world, call, kind), text


class Twice(DFunction):
    """One tensor as two results, of an input or of something new."""

    in_placements = ([S(0)], None)
    out_placements = ([S(0)], [S(0)])

    @staticmethod
    def forward(ctx, x, new):
        ctx.save_for_backward(x)
        y = x * 1 if new else x
        return y, y

    @staticmethod
    def backward(ctx, a, b):
        x, = ctx.saved_tensors
        return 2 * a + 3 * b + 0 * x, None


class TwiceAgain(Twice):
    second_order = True


def one_tensor_as_two_results_has_two_gradients(world):
    x = data(1, 5, 3)
    dx = distribute_tensor(x, mesh_1d(), [S(0)])
    for cls, new in itertools.product((Twice, TwiceAgain), (False, True)):
        def f(t, cls=cls, new=new):
            a, b = cls.apply(t, new)
            return a.sum() + 5 * b.sum()
        equal(cls.apply(dx, new)[1], x)
        for take, t in ((ms.grad, x), (grad, dx)):
            equal(take(f)(t), np.full((5, 3), 17, np.float32), f"{cls.__name__} {new} {type(t).__name__}")
        if cls is TwiceAgain:
            v = x.asnumpy()
            for take, t in ((ms.grad, x), (grad, dx)):  # of a^3 + 5 b^2 by the rule 2 a' + 3 b'
                inner = take(lambda u, n=new: (lambda a, b: (a * a * a + b * b * 5).sum())(*TwiceAgain.apply(u, n)))
                equal(inner(t), 6 * v ** 2 + 30 * v, f"{new}: of powers")


class Product(DFunction):
    """a @ b with the columns of a cut, differentiated twice."""

    second_order = True
    in_placements = ([S(1)], [S(0)])
    out_placements = [P]

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g @ b.T, a.T @ g


def empty_shards_of_own_functions_make_the_nodes_of_the_others(world, line):
    a, b = data(1, 7, 5), data(2, 5, 3)  # 2, 2, 1 and 0 columns
    x, y = a.asnumpy(), b.asnumpy()
    da, db = distribute_tensor(a, line, [S(1)]), distribute_tensor(b, line, [S(0)])
    inner = grad(lambda u, v: (Product.apply(u, v) ** 2).sum(), (0, 1))
    equal(inner(da, db)[0], 2 * x @ y @ y.T, "first")
    got = grad(lambda u, v: (inner(u, v)[0] ** 2).sum(), (0, 1))(da, db)
    equal(got[0], 8 * x @ y @ y.T @ y @ y.T, "second")
    m = x.T @ x @ y @ y.T  # of |2 x y y'|^2 by y: 8 (x'x y y' y + y y' x'x y)
    equal(got[1], 8 * (m @ y + m.T @ y), "second, the other factor")
    mine = local_map(lambda u, v: u @ v if u.shape[1] else ops.zeros((7, 3)), [P], ([S(1)], [S(0)]))
    check_against_one_device(lambda u, v: ((mine(u, v) if isinstance(u, DTensor) else u @ v) ** 2).sum(),
                             [a, b], [[S(1)], [S(0)]], line, "a branch for nothing")
    out = local_map(lambda u, v: u @ v, [S(1)], ([R], [S(1)]), out_shapes=((7, 3),))  # 1, 1, 1 and 0 columns of 3
    check_against_one_device(lambda u, v: ((out(u, v) if isinstance(u, DTensor) else u @ v) ** 2).sum(),
                             [a, b], [[R], [S(1)]], line, "an empty result")


class Asks(DFunction):
    """Scales; its backward may be told to return what is no tensor."""

    in_placements, out_placements = ([S(0)], [S(0)], None), [S(0)]
    asked: list = []

    @staticmethod
    def forward(ctx, x, y, back):
        ctx.back = back
        Asks.asked.append(ctx.needs_input_grad)
        return x * 2 + y

    @staticmethod
    def backward(ctx, g):
        Asks.asked.append(ctx.needs_input_grad)
        return (g * 2 if ctx.back is None else ctx.back), g if ctx.needs_input_grad[1] else None


def a_backward_knows_whose_gradient_is_wanted_and_returns_tensors(world, line):
    for x, y in ([data(1, 5, 3), data(2, 5, 3)], [distribute_tensor(data(i, 5, 3), line, [S(0)]) for i in (1, 2)]):
        for back in (1.0, 3, np.ones((5, 3), np.float32)):
            told = same_on_all_ranks(world, refusal(lambda b=back: grad(lambda t: Asks.apply(t, y, b).sum())(x + y)))
            assert f"the gradient of argument 0 is a {type(back).__name__}" in told, told
        for call, slope, wanted in ((lambda t: Asks.apply(t, y, None), 2, (True, False, False)),  # noqa: B023
                                    (lambda t: Asks.apply(x, t, None), 1, (False, True, False)),  # noqa: B023
                                    (lambda t: Asks.apply(t, t, None), 3, (True, True, False))):
            Asks.asked.clear()
            equal(grad(lambda t, c=call: c(t).sum())(x + y), np.full((5, 3), slope, np.float32))
            assert Asks.asked == [wanted] * 2, (slope, Asks.asked)
        Asks.asked.clear()
        Asks.apply(x, y, None)
        assert Asks.asked == [(False,) * 3]
