# SPDX-License-Identifier: Apache-2.0
"""Own ops on real ranks: DFunction, registered rules and local_map give one device's values and gradients."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

import ms_dtensor as md
from ms_dtensor import DFunction, DTensor, distribute_tensor, local_map, register_rule, value_and_grad
from ms_dtensor.errors import ImplicitCommError, LayoutError, MixedOperandError
from tests.operands import P, R, S, data, mesh_1d, mesh_2d
from tests.support import check_against_one_device, counted, equal, refusal, refused_alike, same_on_all_ranks
from tests.tiers import sampled


class MyAdd(DFunction):
    """The worked example our user brought: a sum with a registered rule."""

    _op_name = "MyAdd"

    @staticmethod
    def forward(ctx, x, y, alpha=1.0):
        ctx.alpha = alpha
        return x + y * alpha

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * ctx.alpha, None


MY_ADD = """
    S(0), S(0) -> S(0)
    S(1), S(1) -> S(1)
    P,    P    -> P
"""


class Scores(DFunction):
    """exp(x @ w): its backward needs what it saved; rows of x and columns of w may be split."""

    _op_name = "Scores"

    @staticmethod
    def forward(ctx, x, w):
        out = ops.exp(ops.matmul(x, w))
        ctx.save_for_backward(x, w, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, w, out = ctx.saved_tensors
        grad = grad * out
        return ops.matmul(grad, w.swapaxes(0, 1)), ops.matmul(x.swapaxes(0, 1), grad)


class Rows(DFunction):
    """The same without a rule: rows of x over all ranks."""

    in_placements = ([S(0)], [R])
    out_placements = [S(0)]
    forward, backward = staticmethod(Scores.forward), staticmethod(Scores.backward)


class Both(DFunction):
    """Two results, one argument without a gradient, an integer tensor and keywords."""

    in_placements = ([S(0)], [S(0)], None)
    out_placements = ([S(0)], [S(0)])

    @staticmethod
    def forward(ctx, x, ids, scale, *, shift=0.0, name=""):
        assert name == "given" and isinstance(ids, Tensor) and not isinstance(x, DTensor)
        ctx.scale = scale
        return x * scale + shift, ids + 1

    @staticmethod
    def backward(ctx, grad, grad_ids):
        return grad * ctx.scale, None, None


def _layouts(mesh):
    return [(R, R), (S(0), R), (R, S(1)), (S(0), S(1)), (S(1), S(0)), (S(0), S(0))]


def dfunction_with_a_rule_equals_one_device_in_every_layout(world, grid):

    def weighted(a, b, c):
        return (MyAdd.apply(a, b, 0.5) * c).sum()
    for shape in ((4, 6), (5, 3), (1, 2)):
        x, y, w = data(1, *shape), data(2, *shape), data(3, *shape)
        for shapes in (None, "m n, m n -> m n"):
            with register_rule("MyAdd", MY_ADD, shapes=shapes):
                for shift, lx in enumerate(_layouts(grid)):
                    for ly in sampled(_layouts(grid)[::2], 3, shift + (shapes is None)):
                        check_against_one_device(weighted, [x, y, w], [lx, ly, lx], grid, f"{shape} {lx} {ly}")


def dfunction_with_a_rule_moves_nothing_it_need_not(world, line):
    x, y = data(1, 8, 4), data(2, 8, 4)
    with register_rule("MyAdd", MY_ADD):
        for p in (S(0), S(1)):
            a, b = (distribute_tensor(t, line, [p]) for t in (x, y))
            with counted({}):
                out = MyAdd.apply(a, b, alpha=2.0)
            assert out.placements == (p,), out
            equal(out, x + y * 2.0)
        summand = DTensor.from_local(data(world.rank, 8, 4), line, [P])
        with counted({}):
            out = MyAdd.apply(summand, summand)
        assert out.placements == (P,)


def dfunction_saves_tensors_and_reduces_the_shared_operands_gradient(world):
    def scored(a, b):
        return (Scores.apply(a, b) ** 2).mean()

    def by_rows(a, b):
        return (Rows.apply(a, b) ** 2).mean()
    mesh = mesh_2d()
    for shift, (m, k, n) in enumerate(((4, 3, 6), (5, 2, 3), (2, 3, 5))):
        x, w = data(4, m, k) * 0.3, data(5, k, n) * 0.3
        with register_rule("Scores", "S(0), R -> S(0)\nR, S(1) -> S(1)", shapes="m k, k n -> m n"):
            for lx in sampled(_layouts(mesh), 2, shift):
                check_against_one_device(scored, [x, w], [lx, (R, S(1))], mesh, f"{lx}")
    mesh = mesh_1d()
    for rows in (8, 7, 3):
        x, w = data(4, rows, 3) * 0.3, data(5, 3, 4) * 0.3
        for lx, lw in (([S(0)], [R]), ([R], [R]), ([S(1)], [S(0)])):
            check_against_one_device(by_rows, [x, w], [lx, lw], mesh, f"rows {rows} {lx} {lw}")


def dfunction_takes_parameters_and_several_results(world, line):
    x, ids = data(6, 8, 2), Tensor(np.arange(16).reshape(8, 2).astype(np.int32))
    dx = distribute_tensor(x, line, [S(0)])
    p = Parameter(distribute_tensor(x, line, [S(0)]), name="p")
    di = distribute_tensor(ids, line, [S(0)])
    out, more = Both.apply(dx, di, 3.0, shift=1.0, name="given")
    equal(out, x * 3.0 + 1.0)
    equal(more, ids + 1)
    for _ in range(2):  # a stale node of a leaf would cut the second gradient
        value, (grad,) = value_and_grad(lambda: (Both.apply(p, di, 3.0, name="given")[0] * dx).sum(), None, [p])()
        equal(grad, x * 3.0)
        equal(value, (x * x * 3.0).sum())


def dfunction_without_rule_or_placements_refuses_dtensors_on_all_ranks(world, line):
    class Nothing(DFunction):
        forward, backward = staticmethod(MyAdd.forward), staticmethod(MyAdd.backward)

    x = distribute_tensor(data(1, 4, 2), line, [S(0)])
    for cls in (Nothing, MyAdd):
        assert "register_rule" in refused_alike(world, lambda cls=cls: cls.apply(x, x))
    equal(MyAdd.apply(data(1, 4, 2), data(2, 4, 2)), data(1, 4, 2) + data(2, 4, 2))


def dfunctions_nest_and_mix_with_plain_operands_only_by_permission(world, line):
    class Outer(DFunction):
        in_placements, out_placements = ([S(0)],), [S(0)]

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return Scores.apply(x, Tensor(np.eye(3, dtype=np.float32))) + x

        @staticmethod
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            return MyAdd.apply(grad * ops.exp(x), grad)

    x = data(7, 8, 3) * 0.5
    check_against_one_device(lambda a: (Outer.apply(a) * a).sum(), [x], [[S(0)]], line)
    with register_rule("MyAdd", MY_ADD):
        same_on_all_ranks(world, refusal(lambda: MyAdd.apply(distribute_tensor(x, line, [S(0)]), x), MixedOperandError))
    with md.redistribution_policy("explicit"):
        same_on_all_ranks(world, refusal(lambda: Rows.apply(distribute_tensor(x, line, [S(1)]), distribute_tensor(x.swapaxes(0, 1), line)), ImplicitCommError))


# -- register_rule -----------------------------------------------------------------------------------------------------
def a_decorated_local_function_is_an_op(world, grid):
    with register_rule("scaled_rows", "S(0), S(0) -> S(0)\nS(-1), R -> S(-1)\nP, R -> P", shapes="m n, m -> m n") as rule:
        @rule
        def scaled_rows(x, factors, power=1):
            assert not isinstance(x, DTensor) and x.shape[0] == factors.shape[0]
            return x * factors.reshape((-1, 1)) ** power

        for shape in ((4, 6), (5, 3), (3, 1)):
            x, f, w = data(1, *shape), data(2, shape[0]), data(3, *shape)
            for shift, lx in enumerate(_layouts(grid)):
                for lf in sampled(((R, R), (S(0), R), (S(0), S(0))), 3, shift + shape[0]):
                    check_against_one_device(lambda a, b, c: (scaled_rows(a, b, power=2) * c).sum(), [x, f, w], [lx, lf, lx],
                                             grid, f"{shape} {lx} {lf}")
        p = Parameter(distribute_tensor(x, grid, (S(0), R)), name="p")
        f = distribute_tensor(f, grid)
        for _ in range(2):
            _, (g,) = value_and_grad(lambda: scaled_rows(p, f).sum(), None, [p])()
            equal(g, np.broadcast_to(f.asnumpy()[:, None], x.shape))


def uneven_shards_without_shapes_are_gathered_not_guessed(world, line):
    with register_rule("twice", "S(0) -> S(0)") as rule:
        twice = rule(lambda x: ops.cat([x, x], 1))
        for n in (8, 6, 3):
            x = data(1, n, 2)
            out = twice(distribute_tensor(x, line, [S(0)]))
            assert out.shape == (n, 4) and out.placements == ((S(0),) if n % 4 == 0 else (R,)), out
            equal(out, ops.cat([x, x], 1))


# -- local_map ---------------------------------------------------------------------------------------------------------
def local_map_values_and_gradients(world, grid):
    x, w = data(1, 6, 8), data(2, 8, 4)
    column = local_map(lambda a, b: ops.matmul(a, b), [S(0), S(1)], ([S(0), R], [R, S(1)]), redistribute_inputs=True)
    row = local_map(lambda a, b: ops.matmul(a, b), [S(0), P], ([S(0), S(1)], [R, S(0)]), redistribute_inputs=True)
    for shift, fn in enumerate((column, row)):
        def loss(a, b, fn=fn):
            return (fn(a, b) ** 2).mean()
        for at, lx in enumerate(_layouts(grid)):
            for lw in sampled(_layouts(grid)[::2], 3, shift + at):
                check_against_one_device(loss, [x, w], [lx, lw], grid, f"{lx} {lw}")


def local_map_uneven_results_are_compared_across_ranks(world, line):
    double = local_map(lambda a: a * 2, [S(0)], ([S(0)],))
    for n in (8, 7, 5, 2, 0):
        x = data(1, n, 3)
        dx = distribute_tensor(x, line, [S(0)])
        out = double(dx)
        assert out.shape == (n, 3)
        equal(out, x * 2)
        with counted({}):
            equal(local_map(lambda a: a * 2, [S(0)], ([S(0)],), out_shapes=lambda s: (s,))(dx).layout.shape, (n, 3))
    stacked = local_map(lambda a: ops.cat([a, a]), [S(0)], ([S(0)],))
    equal(stacked(distribute_tensor(data(1, 8, 3), line, [S(0)])).shape, (16, 3))
    uneven = distribute_tensor(data(1, 5, 3), line, [S(0)])  # 4, 4, 2, 0 rows are no shards of 10
    same_on_all_ranks(world, refusal(lambda: stacked(uneven), LayoutError))


def local_map_slices_by_rank_and_sums_cotangents(world, line):
    """Replicated inputs, sharded result: ranks do different work, so the cotangents are summands."""
    x, w = data(1, 8, 3), data(2, 8, 3)
    mine = local_map(lambda a: a.narrow(0, 2 * world.rank, 2), [S(0)], ([R],))
    check_against_one_device(lambda a, b: ((mine(a) if isinstance(a, DTensor) else a) * b).sum(), [x, w], [[R], [S(0)]],
                             line)
    gathered = local_map(lambda a: comm_all_gather(line, a), [R], ([S(0)],), in_grad_placements=([S(0)],))
    out = gathered(distribute_tensor(x, line, [S(0)]))
    equal(out, x)


def comm_all_gather(mesh, a):
    """A function that communicates by itself."""
    return mesh.get_group().all_gather(a, 0, [2] * 4)


def to_local_of_a_leaf_keeps_its_gradient(world, line):
    p = Parameter(distribute_tensor(data(1, 8, 4), line, [S(0)]), name="p")
    q = Parameter(distribute_tensor(data(1, 8, 4), line), name="q")
    for placements in (None, [S(0)]):
        g = ms.grad(lambda how=placements: (p.to_local(grad_placements=how) * 3).sum(), None, [p])()[0]
        equal(g, np.full((8, 4), 3, np.float32), str(placements))
    g = ms.grad(lambda: (q.to_local(grad_placements=[P]) * (world.rank + 1)).sum(), None, [q])()[0]
    equal(g, np.full((8, 4), 10, np.float32))
