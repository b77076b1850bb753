# SPDX-License-Identifier: Apache-2.0
"""Real ranks: cross entropy on class-sharded logits equals one device and never gathers a logit, in every form."""
import contextlib
import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DTensor, distribute_tensor, init_device_mesh, loss_parallel, value_and_grad
from ms_dtensor.dispatch import modes
from ms_dtensor.errors import DTensorError, ImplicitCommError, MixedOperandError
from tests.operands import R, S, data, filled, placed
from tests.support import counted, equal, equal_steps, refusal, refused_alike, same_on_all_ranks
from tests.tiers import sampled

LABELS = np.array([0, 10, -100, 4, -100, 7], np.int32)
WEIGHT = Tensor(np.random.default_rng(3).uniform(0.5, 2, 11).astype(np.float32))


def reference(x: np.ndarray, y: np.ndarray, reduction: str, smoothing: float, ignore: int = -100):
    """(loss, gradient) in float64: the definition, with the mean over the rows that count."""
    x = x.astype(np.float64)
    classes = x.shape[-1]
    log_p = x - x.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    keep = (y != ignore).astype(np.float64)
    target = np.full(x.shape, smoothing / classes)
    np.put_along_axis(target, np.where(y == ignore, 0, y)[..., None].astype(int), 1 - smoothing + smoothing / classes, -1)
    rows = -(target * log_p).sum(-1) * keep
    grad = (np.exp(log_p) - target) * keep[..., None]
    if reduction == "none":
        return rows, grad
    return (rows.sum(), grad) if reduction == "sum" else (rows.sum() / keep.sum(), grad / keep.sum())


def the_function_equals_the_definition(world, grid):
    x = data(6, 6, 11) * 3
    for placements, reduction, smoothing in sampled(itertools.product(
            ((R, S(1)), (S(0), S(1)), (S(1), S(0)), (S(1), S(1)), (S(0), R)), ("mean", "sum", "none"), (0.0, 0.1)), 7):
        want = reference(x.asnumpy(), LABELS, reduction, smoothing)
        dx = distribute_tensor(x, grid, placements)
        dy = distribute_tensor(Tensor(LABELS), grid, [R if p.is_shard(1) else p for p in placements])
        with counted() as count:
            got = value_and_grad(lambda t, y=dy, r=reduction, s=smoothing: loss_parallel(
                t, y, reduction=r, label_smoothing=s), 0)(dx)
        what = f"{placements} {reduction} {smoothing}"
        equal(got[0], want[0].astype(np.float32), what)
        equal(got[1], want[1].astype(np.float32), what + " gradient")
        assert {op for op, _ in count} <= {"all_reduce"}, (what, count)  # rows only ever: nothing is gathered


def of_bfloat16_logits_the_statistics_and_the_loss_are_float32(world, grid):
    x = (data(6, 6, 11) * 3).astype(ms.bfloat16)
    exact = x.astype(ms.float32).asnumpy()
    for placements, reduction in itertools.product(((R, S(1)), (S(0), S(1)), (S(0), R)), ("mean", "none")):
        want = reference(exact, LABELS, reduction, 0.0)
        dx = distribute_tensor(x, grid, placements)
        dy = distribute_tensor(Tensor(LABELS), grid, [R if p.is_shard(1) else p for p in placements])
        loss, grad = value_and_grad(lambda t, y=dy, r=reduction: loss_parallel(t, y, reduction=r), 0)(dx)
        assert loss.dtype == ms.float32 and grad.dtype == ms.bfloat16
        equal(loss, want[0].astype(np.float32), f"{placements} {reduction}")
        equal(grad.float(), want[1].astype(np.float32), f"{placements} {reduction} gradient", rtol=2.0**-8)


def two_small_reductions_forward_and_none_backward(world, line):
    dx = distribute_tensor(data(6, 6, 16), line, [S(1)])
    with counted({("all_reduce", "forward"): 2}):
        value_and_grad(lambda t: loss_parallel(t, Tensor(np.arange(6)), reduction="sum"), 0)(dx)


def the_blocks_cross_entropy_costs_what_the_function_does(world, grid):
    x, y = distribute_tensor(data(6, 6, 16), grid, [S(0), S(1)]), np.array([0, 15, -100, 4, -100, 7], np.int32)
    labels = distribute_tensor(Tensor(y), grid, {"dp": S(0)})

    def cost(fn, block):
        with counted() as count, block():
            value_and_grad(lambda t: fn(t, labels), 0)(x)
        return count
    want = cost(loss_parallel, contextlib.nullcontext)
    assert sum(want.values()) <= 4, want
    for fn in (ops.cross_entropy, mint.nn.functional.cross_entropy, nn.CrossEntropyLoss(), mint.nn.CrossEntropyLoss()):
        assert cost(fn, loss_parallel) == want, fn
    assert sum(cost(ops.cross_entropy, contextlib.nullcontext).values()) > sum(want.values())


def another_index_may_be_ignored(world, line):
    x, y = data(7, 6, 11), np.array([3, 0, 3, 1, 2, 10], np.int32)
    got = value_and_grad(lambda t: loss_parallel(t, Tensor(y), ignore_index=3), 0)(distribute_tensor(x, line, [S(1)]))
    want = reference(x.asnumpy(), y, "mean", 0.0, 3)
    equal(got[0], want[0].astype(np.float32))
    equal(got[1], want[1].astype(np.float32))


def leading_dims_are_rows(world, grid):
    x, y = data(8, 2, 3, 11), np.array([[0, 1, -100], [10, 4, 2]], np.int32)
    for placements in ((S(0), S(2)), (S(1), S(2)), (R, S(2))):
        dy = distribute_tensor(Tensor(y), grid, [R if p.is_shard(2) else p for p in placements])
        got = value_and_grad(lambda t, dy=dy: loss_parallel(t, dy, label_smoothing=0.2), 0)(
            distribute_tensor(x, grid, placements))
        want = reference(x.asnumpy(), y, "mean", 0.2)
        equal(got[0], want[0].astype(np.float32), str(placements))
        equal(got[1], want[1].astype(np.float32), str(placements))


def mindspores_own_losses_inside_the_block(world, grid):
    x, y = data(6, 6, 11) * 3, Tensor(LABELS)
    for placements, reduction, weight, smoothing in sampled(itertools.product(
            ((R, S(1)), (S(0), S(1)), (S(1), S(0)), (S(1), S(1))), ("mean", "sum", "none"), (None, WEIGHT), (0.0, 0.1)), 7):
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        want = ms.value_and_grad(lambda t, o=options: ops.cross_entropy(t, y, **o), 0)(x)
        dy = distribute_tensor(y, grid, [R if p.is_shard(1) else p for p in placements])
        for fn in (ops.cross_entropy, mint.nn.functional.cross_entropy):
            if fn is not ops.cross_entropy and weight is not None and smoothing and reduction == "mean":
                continue  # mint selects the labels that count: a shape that depends on data, which is refused
            dx = distribute_tensor(x, grid, placements)
            with counted() as count, loss_parallel():
                got = value_and_grad(lambda t, f=fn, dy=dy, o=options: f(t, dy, **o), 0)(dx)
            what = f"{fn.__name__} {placements} {reduction} {weight is not None} {smoothing}"
            equal(got, want, what)
            if fn is not ops.cross_entropy or weight is None:
                assert {op for op, _ in count} <= {"all_reduce"}, (what, count)


def mindspores_own_losses_take_every_width_of_logits_and_labels(world, line):
    """On CPU its kernels refuse bfloat16 and look up int32 and int64 only."""
    x = data(6, 6, 11) * 3
    kinds = [(ms.bfloat16, ms.int64, 2.0**-7), (ms.float16, ms.int32, 2.0**-9), (ms.float64, ms.int64, 1e-12)]
    kinds += [(ms.float32, dtype, 1e-5) for dtype in (ms.int8, ms.int16)]
    ways = itertools.product(kinds, (S(1), S(0), R), (loss_parallel, contextlib.nullcontext))
    for (dtype, ids, near), layout, block in sampled(ways, 7):  # each of the three at push, too
        logits = x.astype(dtype)
        want = reference(logits.astype(ms.float64).asnumpy(), LABELS, "mean", 0.1)
        if dtype == ms.float64 and (layout != S(1) or block is not loss_parallel):
            near = 1e-5  # MindSpore's own log_softmax of float64 is off by that
        dx, dy = distribute_tensor(logits, line, [layout]), distribute_tensor(Tensor(LABELS).astype(ids), line, [R])
        for fn in (ops.cross_entropy, mint.nn.functional.cross_entropy):
            what = f"{fn.__name__} {dtype} {ids} {layout} {block.__name__}"
            with block():
                loss, grad = value_and_grad(lambda t, f=fn, y=dy: f(t, y, label_smoothing=0.1), 0)(dx)
            assert loss.dtype == grad.dtype == dtype, what
            for got, exact in ((loss, want[0]), (grad, want[1])):
                off = np.abs(got.full_tensor().astype(ms.float64).asnumpy() - exact)
                assert off.max() <= near * max(np.abs(exact).max(), 0.25), (what, off.max())


def over_an_axis_of_one_rank_the_block_takes_the_same_losses(world):
    mesh, x = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp")), data(6, 6, 11)
    for fn in (ops.cross_entropy, mint.nn.functional.cross_entropy):
        with loss_parallel():
            loss = fn(distribute_tensor(x, mesh, [R, S(1)]), Tensor(LABELS))
        equal(loss, reference(x.asnumpy(), LABELS, "mean", 0.0)[0].astype(np.float32), fn.__name__)


def plain_labels_cells_and_other_shapes_inside_the_block(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    x, y = data(9, 2, 11, 6), Tensor(np.random.default_rng(1).integers(0, 11, (2, 6)).astype(np.int32))
    want = ms.value_and_grad(lambda t: ops.cross_entropy(t, y), 0)(x)
    for placements in ((S(1), S(2)), (S(1), R), (S(1), S(0))):
        with loss_parallel():
            got = value_and_grad(lambda t: ops.cross_entropy(t, y), 0)(distribute_tensor(x, mesh, placements))
        equal(got, want, str(placements))
    with loss_parallel():
        got = nn.CrossEntropyLoss()(distribute_tensor(data(6, 6, 11), mesh, [S(1), R]), Tensor(LABELS))
    equal(got, nn.CrossEntropyLoss()(data(6, 6, 11), Tensor(LABELS)))


def the_gradient_of_each_rows_loss_may_be_laid_out_otherwise(world, grid):
    x, w = data(6, 6, 11), data(7, 6)
    dx = distribute_tensor(x, grid, [S(0), S(1)])
    dw = distribute_tensor(w, grid, [R, R])
    dy = distribute_tensor(Tensor(LABELS), grid, [S(0), R])
    with loss_parallel():
        got = value_and_grad(lambda t: (loss_parallel(t, dy, reduction="none") * dw).sum(), 0)(dx)
    rows, grad = reference(x.asnumpy(), LABELS, "none", 0.0)
    equal(got[0], (rows * w.asnumpy()).sum().astype(np.float32))
    equal(got[1], (grad * w.asnumpy()[:, None]).astype(np.float32))
    assert got[1].placements == (S(0), S(1))


def the_block_refuses_to_gather_logits(world, line):
    x = distribute_tensor(data(6, 6, 12), line, [S(1)])
    with loss_parallel():
        assert "inside loss_parallel()" in refused_alike(world, lambda: mint.sort(x, dim=1), ImplicitCommError)
    equal(mint.sort(x, dim=1)[0], np.sort(data(6, 6, 12).asnumpy(), 1), "outside it may")
    assert modes.mode.get() is modes.DEFAULT
    with md.implicit_replication(), loss_parallel(), loss_parallel():
        assert isinstance(x + data(1, 12), DTensor)
    assert modes.mode.get() is modes.DEFAULT


class Attends(nn.Cell):
    """Two heads, products of three dims: a batch of one row has no second rank's rows."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Dense(8, 7, has_bias=False)
        self.q, self.k, self.v, self.o = (nn.Dense(8, 8, has_bias=False) for _ in range(4))

    def construct(self, ids):
        rows, tokens = ids.shape
        x = self.table(ids.reshape(-1)).reshape(rows, tokens, 8)
        q, k, v = (cell(x).reshape(rows, tokens, 2, 4).swapaxes(1, 2) for cell in (self.q, self.k, self.v))
        y = ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(2, 3)), -1), v)
        return self.head(x + self.o(y.swapaxes(1, 2).reshape(rows, tokens, 8)))


def any_number_of_rows_trains_inside_the_block(world, grid):
    """Of one row products would cut the tokens, which attention gathers; of one token a rank's values are one number a head."""
    def cell():
        return md.ColwiseParallel(use_local_output=False)
    plan = {"q": cell(), "k": cell(), "v": cell(), "o": md.RowwiseParallel(use_local_output=False),
            "head": md.ColwiseParallel(use_local_output=False, output_layouts=S(-1))}

    def cross_entropy(net):
        return lambda x, y: ops.cross_entropy(net(x).reshape(-1, 7), y.reshape(-1))
    for rows, tokens in ((2, 5), (1, 5), (3, 5), (2, 1), (1, 1)):
        plain, net = filled(Attends()), filled(Attends())
        rng = np.random.default_rng(9)
        x, y = (Tensor(rng.integers(0, 7, (rows, tokens)).astype(np.int32)) for _ in range(2))
        net = md.replicate(md.parallelize_module(net, grid["tp"], plan), mesh=grid["dp"])
        with loss_parallel():
            got = value_and_grad(cross_entropy(net), None, net.trainable_params())(*(
                distribute_tensor(t, grid, {"dp": S(0)}) for t in (x, y)))
        want = ms.value_and_grad(cross_entropy(plain), None, plain.trainable_params())(x, y)
        equal_steps(got, want, net.trainable_params())


def labels_that_are_no_class_are_refused_by_all_ranks(world, grid):
    x = data(6, 6, 11)
    OWN = (ops.cross_entropy, mint.nn.functional.cross_entropy)  # noqa: N806
    for bad, least, losses in ((11, 0, ()), (-1, 0, ()), (-12, -11, OWN), (11, -11, OWN)):
        y = np.array([0, 3, -100, 4, 7, bad], np.int32)
        for placements, whole in itertools.product(((S(0), S(1)), (R, S(1)), (S(0), R)), (True, False)):
            dx = distribute_tensor(x, grid, placements)
            dy = distribute_tensor(Tensor(y), grid, [R if p.is_shard(1) or whole else p for p in placements])
            for fn, reduction in itertools.product(losses or (loss_parallel,), ("mean", "sum", "none")):
                with loss_parallel():
                    told = refusal(lambda f=fn, r=reduction: f(dx, dy, reduction=r), IndexError)
                assert f"label {bad} is out of range [{least}, 11)" in told, told
                same_on_all_ranks(world, told)
    equal(loss_parallel(distribute_tensor(x, grid, (S(0), S(1))), Tensor([0, 3, -1, 4, 7, 1]), ignore_index=-1),
          loss_parallel(distribute_tensor(x, grid, (S(0), S(1))), Tensor([0, 3, -100, 4, 7, 1])))


def small_integers_no_rows_and_decorated_functions(world, line):
    x, y = data(3, 3, 9), np.array([1, 8, 3])
    dx = distribute_tensor(x, line, [S(1)])
    for dtype in (np.int8, np.int16, np.uint8, np.int32, np.int64):
        equal(loss_parallel(dx, Tensor(y.astype(dtype))), reference(x.asnumpy(), y, "mean", 0.0)[0].astype(np.float32))
    for layout, reduction in itertools.product(([S(1)], [S(0)], [R]), ("sum", "mean", "none")):
        empty = distribute_tensor(Tensor(np.zeros((0, 9), np.float32)), line, layout)
        got, slope = value_and_grad(lambda t, r=reduction: loss_parallel(t, Tensor(np.zeros(0, np.int32)), reduction=r).sum(),
                                    0)(empty)
        assert slope.shape == (0, 9)
        value = float(got.full_tensor())
        assert np.isnan(value) if reduction == "mean" else value == 0, (layout, reduction, value)

    @loss_parallel()
    def loss(t, labels):
        return ops.cross_entropy(t, labels)
    assert modes.mode.get() is modes.DEFAULT
    equal(loss(dx, Tensor(y.astype(np.int32))), ops.cross_entropy(x, Tensor(y.astype(np.int32))))
    assert modes.mode.get() is modes.DEFAULT


def few_logits_stay_sharded_in_a_loss(world, line):
    weight = Tensor(np.float32([0.5, 1, 2, 1.5]))
    x, y = data(1, 8, 4) * 3, Tensor(np.array([0, 3, 1, 1, 2, -1, 0, -1], np.int32))
    dx = distribute_tensor(x, line, [S(1)])
    fns = (ops.cross_entropy, mint.nn.functional.cross_entropy)
    options = ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.1})
    for shift, (reduction, more) in enumerate(itertools.product(("none", "mean", "sum"), options)):
        how = {"ignore_index": -1, "reduction": reduction, **more}
        want = ms.value_and_grad(lambda t: ops.cross_entropy(t, y, **how), 0)(x)
        for fn in sampled(fns, 2, shift + shift // 4):
            if fn is not ops.cross_entropy and len(more) == 2 and reduction == "mean":
                continue  # mint selects the labels that count: a shape that depends on data, which is refused
            with counted() as count, loss_parallel():
                got = value_and_grad(lambda t: fn(t, y, **how), 0)(dx)
            equal(got, want, f"{fn.__name__} {how}")
            assert got[1].placements == (S(1),)
            if fn is not ops.cross_entropy:  # which moves rows, too; the block lets no logits be gathered
                assert {op for op, _ in count} <= {"all_reduce"}, (how, count)
    with loss_parallel():
        assert "inside loss_parallel()" in refusal(lambda: mint.sort(dx, dim=1), ImplicitCommError)


def cross_entropy_with_uneven_counts(world, line):
    """Peer: the mean of the shards' means, wrong where shards count differently (ignore_index, class weights)."""
    logits = data(5, 8, 5)
    labels = Tensor(np.array([0, -100, -100, -100, 4, 3, -100, 1], np.int32))
    few = Tensor(np.array([0, 1, -100, -100, -100, -100, -100, -100], np.int32))  # three of four ranks count nothing
    weight = Tensor(np.array([0.1, 5, 1, 2, 0.5], np.float32))
    for y, rows, use in itertools.product((labels, few), (8, 7), (False, True)):
        x, y = Tensor(logits.asnumpy()[:rows]), Tensor(y.asnumpy()[:rows])

        def loss(t, labels, weight, use=use):
            return ops.cross_entropy(t, labels, weight if use else None, ignore_index=-100)
        want = ms.value_and_grad(loss, 0)(x, y, weight)
        got = value_and_grad(loss, 0)(placed(x, line, S(0)), placed(y, line, S(0)), placed(weight, line, R))
        equal(got, want, f"weights {use}, {rows} rows")


def loss_parallel_lets_in_labels_and_nothing_else(world, line):
    x, y = data(1, 6, 8), Tensor(np.array([0, 3, 7, 2, 2, 5], np.int32))
    dx = placed(x, line, S(1))
    want = ms.value_and_grad(lambda t: ops.cross_entropy(t, y))(x)
    with md.loss_parallel():
        got = ms.value_and_grad(lambda t: ops.cross_entropy(t, y))(dx)
        equal(got, want)
        equal(nn.CrossEntropyLoss()(dx, y), want[0])
        for mixing in (lambda: dx * x, lambda: x @ dx.T, lambda: ops.cross_entropy(dx * x, y), lambda: mint.cat([dx, x]),
                       lambda: ops.cross_entropy(dx, mint.nn.functional.softmax(x, -1)),
                       lambda: dx + Tensor(np.arange(8, dtype=np.int32))):
            refusal(mixing, MixedOperandError)
        refusal(lambda: dx.redistribute(placements=[R]) and mint.cumsum(dx, 1), (ImplicitCommError, DTensorError))
