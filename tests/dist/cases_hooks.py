# SPDX-License-Identifier: Apache-2.0
"""Gradients of a replicated cell's parameters, reduced in buckets, whichever op reads the parameter; backward hooks see global,
reduced ones; and what stands around a training step, where it communicates and where it refuses: `tests/surface` has values.
"""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore.train import MAE, Metric

import ms_dtensor as md
from ms_dtensor import DTensor, MixedPrecisionPolicy, distribute_module, distribute_tensor, replicate
from ms_dtensor.errors import ImplicitCommError, LayoutError, MixedOperandError
from tests.cases import cases
from tests.dist.cases_surface import _mlp, placed
from tests.dist.operands import Built, R, S, data, filled, mesh_1d, mesh_2d
from tests.dist.support import RTOL, array, counted, equal, refusal
from tests.tiers import sampled


def parameter_hooks_see_the_reduced_gradient_once(world):
    x = data(1, 8, 6)
    plain = _mlp(3)
    for p in plain.get_parameters():
        p.register_hook(lambda g: 3 * g)
    plain[0].weight.register_hook(lambda g: g + 1)
    want = ms.grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
    for early, bucket in sampled(((True, 25), (False, 25), (True, 0), (False, 0)), 3):  # at push: early and bucketed, late and not
        net, seen = _mlp(3), []

        def three(g, seen=seen):
            seen.append(g)
            return 3 * g

        def hook(net=net, three=three):
            for p in net.get_parameters():
                p.register_hook(three)
            net[0].weight.register_hook(lambda g: (g + 1).redistribute())
        if early:
            hook()
        md.parallelize_module(net, mesh_2d()["tp"], {"0": md.ColwiseParallel(use_local_output=False),
                                                  "2": md.RowwiseParallel(use_local_output=False)})
        md.replicate(net, mesh=mesh_2d()["dp"], bucket_mb=bucket)
        if not early:
            hook()
        for _ in range(2):
            seen.clear()
            got = ms.grad(lambda t, m=net: (m(t) ** 2).mean(), None, net.trainable_params())(
                placed(x, mesh_2d(), S(0), R))
            assert len(seen) == 4 and all(isinstance(g, md.DTensor) for g in seen), seen
            equal(got, want, f"{early} {bucket}")
    handle = net[2].bias.register_hook(lambda g: g * 0)
    handle.remove()
    got = ms.grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(placed(x, mesh_2d(), S(0), R))
    equal(got[3], want[3])


def activation_hooks_see_global_gradients(world, grid):
    x, w = data(1, 6, 8), data(2, 8, 4)

    def whole(t):
        return t.redistribute(placements=[R, R]) if isinstance(t, md.DTensor) else t
    ways = {"cut": lambda t, w: t * 2, "gathered": lambda t, w: whole(t * 2), "partial": lambda t, w: t @ w,
            "view": lambda t, w: whole(t * 2).reshape(8, 6), "number": lambda t, w: (t * t).sum(),
            "input": lambda t, w: t, "max": lambda t, w: t.amax(1)}
    changes = {"None": lambda g: None, "same": lambda g: g, "scaled": lambda g: 3 * g, "moved": lambda g: whole(g * g),
               "0-d": lambda g: Tensor(0.5, ms.float32)}

    def loss(make, change, log):
        def fn(t, w):
            u = make(t, w)
            handle = u.register_hook(lambda g: (log.append(g), change(g))[1])
            handles.append(handle)
            if u.shape == (6, 8):  # with work of each rank's own, and of all alike
                return (u @ w).sum() + (u * u).mean()
            return (u * u).sum()
        return fn
    for name, make in ways.items():
        for how, change in changes.items():
            handles, seen, wanted = [], [], []
            # a plain gradient must have its own shape, which MindSpore does not check
            plain = (lambda g: g * 0 + 0.5) if how == "0-d" else (lambda g: g) if how == "None" else change
            want = ms.grad(loss(make, plain, wanted), (0, 1))(x, w)
            got = ms.grad(loss(make, change, seen), (0, 1))(placed(x, grid, S(0), S(1)), placed(w, grid, R, S(0)))
            for handle in handles:
                handle.remove()
            assert len(seen) == 1 and isinstance(seen[0], md.DTensor) and not seen[0].layout.has_partial(), (name, how, seen)
            equal(seen[0], wanted[0], f"{name} {how} seen")
            for i in range(2):
                equal(got[i], want[i], f"{name} {how} {i}")
    u = placed(x, grid, S(0), S(1))

    def late(t):
        u = (t * 2).redistribute(placements=[R, R])
        out = (u @ placed(w, grid, R, S(1))).sum()
        u.register_hook(lambda g: g)
        return out
    assert "before the tensor's first use" in refusal(lambda: ms.grad(late)(u))
    assert "not the gradient" in refusal(lambda: ms.grad(lambda t: _hooked(t * 2, lambda g: g.to_local()).sum())(u), LayoutError)


def _hooked(u, hook):
    u.register_hook(hook)
    return u


def backward_hooks_of_cells(world):
    x = data(1, 8, 6)

    def hooked(net, log):
        def after(cell, grad_input, grad_output):
            log.append((grad_input[0], grad_output[0]))
            return grad_input[0] * 2

        def before(cell, grad_output):
            log.append((grad_output[0],))
            return (grad_output[0] * 3,)
        net[0].register_backward_hook(after)
        net[2].register_backward_hook(after)
        net[1].register_backward_pre_hook(before)
        return net
    want_log: list = []
    plain = hooked(_mlp(3), want_log)
    want = ms.grad(lambda t: (plain(t) ** 2).mean(), 0, plain.trainable_params())(x)
    for early in (True, False):
        log: list = []
        net = _mlp(3)
        if early:
            hooked(net, log)
        md.parallelize_module(net, mesh_2d()["tp"], {"0": md.ColwiseParallel(use_local_output=False),
                                                  "2": md.RowwiseParallel(use_local_output=False)})
        md.replicate(net, mesh=mesh_2d()["dp"])
        if not early:
            hooked(net, log)
        for _ in range(2):
            log.clear()
            got = ms.grad(lambda t, m=net: (m(t) ** 2).mean(), 0, net.trainable_params())(placed(x, mesh_2d(), S(0), R))
            equal(got, want, f"early {early}")
            assert len(log) == len(want_log) == 3
            for a, b in zip(log, want_log):
                for g, w in zip(a, b, strict=True):
                    assert isinstance(g, md.DTensor)
                    equal(g, w, f"{early} hook")


def labels_of_a_replicated_loss(world, grid):
    rows = slice(4 * grid.get_coordinate()[0], 4 * grid.get_coordinate()[0] + 4)
    out, y = data(1, 8, 6), data(2, 8, 6)
    logits, mine = placed(out, grid, S(0), S(1)), Tensor(array(y)[rows])
    message = refusal(lambda: nn.MSELoss()(logits, mine), MixedOperandError)
    assert "DTensor.from_local" in message and "replicate(loss_fn" in message
    loss = md.replicate(nn.MSELoss(), mesh=grid["dp"])
    with counted() as count:
        got = loss(logits, mine)
    assert count == {("all_gather_object", "forward"): 1}, count  # how many rows each rank brings
    equal(got, nn.MSELoss()(out, y))
    metric = MAE()
    with counted() as count:
        metric.update(logits, mine)  # laid out when the loss took it
    assert {op for op, _ in count} == {"all_gather"}, count
    np.testing.assert_allclose(metric.eval(), np.abs(array(out) - array(y)).sum() / 8, rtol=1e-6)


class _Last(Metric):
    def clear(self):
        self.seen = None

    def update(self, *inputs):
        self.seen = self._convert_data(inputs[0])

    def eval(self):
        return self.seen


def metrics_refuse_what_they_cannot_know(world):
    x, plain = placed(data(1, 8, 3), mesh_1d(), S(0)), data(2, 2, 3)
    with counted({}):
        message = refusal(lambda: MAE().update(x, plain), MixedOperandError)
        assert "MAE.update" in message and "replicate(loss_fn" in message
        with md.redistribution_policy("explicit"):
            assert "MAE.update" in refusal(lambda: MAE().update(x, x), ImplicitCommError)
    with md.implicit_replication():
        metric = MAE()
        metric.update(x, data(1, 8, 3))
    assert metric.eval() == 0
    own = _Last()
    own.update(x)
    np.testing.assert_array_equal(own.eval(), array(data(1, 8, 3)))


def a_scalars_array_is_its_value(world):
    x = data(1, 8, 3)
    total = placed(x, mesh_1d(), S(0)).sum()
    assert total.placements[0].is_partial()
    np.testing.assert_allclose(total.asnumpy(), array(x).sum(), rtol=1e-5)
    assert total.asnumpy().shape == () and total.asnumpy().dtype == np.float32
    with md.redistribution_policy("explicit"):
        assert "For 'asnumpy'" in refusal(total.asnumpy, ImplicitCommError)


def a_parameter_of_no_dims_counts_as_a_number_outside_gradients(world):
    x, scale = data(1, 8, 3), Parameter(Tensor(3.0, ms.float32), name="scale")
    dx = placed(x, mesh_1d(), S(0))
    for _ in range(2):  # a plan made on one side is not taken on the other
        equal(dx * scale, array(x) * 3)
        refusal(lambda: ms.grad(lambda t: (t * scale).sum(), None, [scale])(dx), MixedOperandError)
    scale.requires_grad = False
    equal(ms.grad(lambda t: (t * scale).sum())(dx), np.full((8, 3), 3))


def plans_see_through_the_wrappers_of_mixed_precision(world):
    def net():
        return nn.SequentialCell(nn.Dense(6, 8), nn.LayerNorm((8,)), nn.Dense(8, 4))
    for level in sampled(("O2", "O1", "O3", "O1"), 2, 1):  # MindSpore's second rewriting makes other classes than its first
        cell = amp.auto_mixed_precision(net(), level)
        md.parallelize_module(cell, mesh_1d(), {"0": md.ColwiseParallel(use_local_output=False)})
        cut = [p.name for p in cell.get_parameters() if getattr(p, "placements", None)]
        assert len(cut) == 2 and all(".0." in f".{name}" for name in cut), (level, cut)
    spelled = amp.auto_mixed_precision(net(), "O3")
    md.parallelize_module(spelled, mesh_1d(), {"_backbone.2": md.ColwiseParallel(use_local_output=False)})
    assert len([p for p in spelled.get_parameters() if getattr(p, "placements", None)]) == 2
    every = amp.auto_mixed_precision(nn.SequentialCell(nn.Dense(6, 8), nn.Dense(8, 4)), "O3")
    md.parallelize_module(every, mesh_1d(), {"*": md.ColwiseParallel(use_local_output=False, output_layouts=R)})
    assert len([p for p in every.get_parameters() if getattr(p, "placements", None)]) == 4


F = mint.nn.functional
BF16 = MixedPrecisionPolicy(ms.bfloat16, ms.float32)
ROUNDING = 2.5e-2  # of the largest element: a few roundings to 8 bits, each 2^-9, through a square and a root


class With(nn.Cell):
    """A function of the input and of parameters of these shapes."""

    def __init__(self, fn, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.fn, self.count = fn, len(shapes)
        for i, shape in enumerate(shapes):
            setattr(self, f"w{i}", Parameter(Tensor(np.zeros(shape, np.float32)), name=f"w{i}"))

    def construct(self, x):
        return self.fn(x, *(getattr(self, f"w{i}") for i in range(self.count)))


def tied() -> nn.Cell:
    """A language model's two uses of one table."""
    net = Built(lambda c, ids: c.head(mint.tanh(c.table(ids))), table=nn.Embedding(9, 4),
                head=nn.Dense(4, 9, has_bias=False))
    net.head.weight = net.table.embedding_table
    return net


RNG = np.random.default_rng(3)
IDS = np.array([5, 0, 1, 8, 2, 2, 3, 0], np.int32)
IMAGES = RNG.normal(size=(8, 4, 6, 6)).astype(np.float32)
ROWS = RNG.normal(size=(8, 6)).astype(np.float32)
READERS = {  # how parameters are read: kernels, substitutes for kernels that the CPU lacks, views, indices
    "nn.Embedding": (lambda: nn.Embedding(9, 4), IDS), "mint.nn.Embedding": (lambda: mint.nn.Embedding(9, 4), IDS),
    "gather": (lambda: With(lambda i, w: ops.gather(w, i, 0), (9, 4)), IDS), "tied": (tied, IDS),
    "w[i]": (lambda: With(lambda i, w: w[i], (9, 4)), IDS),
    "index_select": (lambda: With(lambda i, w: mint.index_select(w, 0, i), (9, 4)), IDS),
    "nn.Dense": (lambda: nn.Dense(6, 3), ROWS), "mint.nn.Linear": (lambda: mint.nn.Linear(6, 3), ROWS),
    "ops.matmul of 3 dims": (lambda: With(lambda x, w: ops.matmul(x.reshape(8, 2, 3), w), (3, 2)), ROWS),
    "nn.LayerNorm": (lambda: nn.LayerNorm((6,)), ROWS), "mint.nn.LayerNorm": (lambda: mint.nn.LayerNorm((6,)), ROWS),
    "rms_norm": (lambda: With(lambda x, w: ops.rms_norm(x, w)[0], (6,)), ROWS),
    "nn.Conv2d": (lambda: nn.Conv2d(4, 2, 3, has_bias=True), IMAGES), "mint.nn.Conv2d": (lambda: mint.nn.Conv2d(4, 2, 3), IMAGES),
    "nn.GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGES), "nn.BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGES),
    "nn.PReLU": (lambda: nn.PReLU(4), IMAGES), "nn.Conv2dTranspose": (lambda: nn.Conv2dTranspose(4, 2, 3), IMAGES),
    "addmm": (lambda: With(lambda x, b, w: mint.addmm(b, x, w), (3,), (6, 3)), ROWS),
    "addcmul": (lambda: With(lambda x, w: mint.addcmul(w, x, x), (6,)), ROWS),
    "gelu, softmax": (lambda: With(lambda x, w: F.gelu(w) * F.softmax(w, -1) * x, (6,)), ROWS),
    "where, maximum": (lambda: With(lambda x, w: mint.where(x > 0, w, x) * mint.maximum(x, w), (6,)), ROWS),
    "einsum": (lambda: With(lambda x, w: mint.einsum("bi,ij->bj", x, w), (6, 3)), ROWS),
    "masked_fill, clamp": (lambda: With(lambda x, w: ops.masked_fill(w, w > 0.5, 0.0) * x * mint.clamp(w, 0.2, 0.6), (6,)), ROWS),
    "norm, std": (lambda: With(lambda x, w: x / mint.norm(w) * mint.std(w), (6,)), ROWS),
    "pow, flip": (lambda: With(lambda x, w: (mint.abs(w) + 0.5) ** x * mint.flip(w, (0,)), (6,)), ROWS),
    "triu": (lambda: With(lambda x, w: x @ mint.triu(w), (6, 3)), ROWS),
    "repeat_interleave": (lambda: With(lambda x, w: x * mint.repeat_interleave(w, 2), (3,)), ROWS),
}
# What is computed of a parameter alone, the same on all ranks, is reduced before the parameter is; so are statistics.
SEVERAL = {"nn.BatchNorm2d", "gelu, softmax", "masked_fill, clamp", "norm, std", "pow, flip", "triu", "repeat_interleave"}


def one_device(make, x, mesh):
    """Plain MindSpore's gradients; of a replica, where plain MindSpore has no CPU kernel."""
    try:
        return gradients(filled(make()), Tensor(x))
    except RuntimeError as e:
        assert "kernel" in str(e) or "only supports Ascend" in str(e), e
        return gradients(distribute_module(filled(make()), mesh), distribute_tensor(Tensor(x), mesh))


def gradients(net, x):
    loss, grads = ms.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(x)
    return [loss, *(grads if isinstance(grads, tuple | list) else [grads])]


@cases(4, {"whichever_op_reads_a_parameter_its_bucket_gets_the_sum": (None, 2, RTOL),
           "whichever_op_reads_a_parameter_it_sees_bfloat16_and_the_gradient_is_float32": (BF16, 6, ROUNDING)}, timeout=240)
def whichever_op_reads_a_parameter(world, policy, every: int, rtol: float) -> None:
    """`every`: at push one of so many."""
    mesh, grid = mesh_1d(4, "dp"), mesh_2d()
    for shift, (name, (make, x)) in enumerate(sampled(READERS.items(), every)):
        if policy is not None and name in ("nn.BatchNorm2d", "nn.Conv2dTranspose", "masked_fill, clamp"):
            continue  # statistics of few numbers, and values that rounding takes across a border
        want = one_device(make, x, mesh)
        for axis, tp in sampled(((mesh, None), (grid["dp"], grid["tp"])), 2, shift):
            net = replicate(filled(make()) if tp is None else distribute_module(filled(make()), tp), mesh=axis, mp_policy=policy)
            rows = Tensor(np.array_split(x, axis.size())[axis.get_local_rank()])
            if policy is not None:
                assert net(rows).dtype == ms.bfloat16, name
            with counted() as count:
                loss, *grads = gradients(net, rows)
            assert all(t.dtype == ms.float32 for t in (*grads, *net.trainable_params())), name
            equal((loss.float(), *grads), want, name, rtol)
            assert name in SEVERAL or count["all_reduce", "backward"] == 1, (name, count)


def a_rank_without_rows_hands_its_gradients_in_as_the_others_do(world):
    """Five rows are 2, 2, 1 and none: in whichever order an op tells the gradients of several parameters, all ranks have it."""
    for name, (make, x) in READERS.items():
        net = replicate(filled(make()), mesh=mesh_1d(4, "dp"))
        if name == "tied" or len(net.trainable_params()) > 1:
            equal(gradients(net, Tensor(x[2 * world.rank:5][:2])), one_device(make, x[:5], mesh_1d(4, "dp")), name, 5 * RTOL)


def the_last_batch_may_be_smaller_and_other_rows_are_refused_on_all_ranks(world):
    mesh, x = mesh_1d(4, "dp"), ROWS[:7]
    want = gradients(filled(nn.Dense(6, 3)), Tensor(x))
    net = replicate(filled(nn.Dense(6, 3)), mesh=mesh)
    full = gradients(net, Tensor(np.array_split(ROWS, 4)[world.rank]))
    equal(full, gradients(filled(nn.Dense(6, 3)), Tensor(ROWS)))
    net = replicate(filled(nn.Dense(6, 3)), mesh=mesh)
    cuts = (0, 2, 4, 6, 7)
    rows = Tensor(x[cuts[world.rank]:cuts[world.rank + 1]])
    equal(gradients(net, rows), want)
    with counted() as count:
        y = net(rows)
    assert isinstance(y, DTensor) and y.shape == (7, 3)
    assert count == {("all_gather_object", "forward"): 1}, count  # each call asks: no rank knows that another's rows changed
    for cuts in ((0, 1, 3, 5, 7), (0, 2, 4, 7, 7)):
        net = replicate(filled(nn.Dense(6, 3)), mesh=mesh)
        text = refusal(lambda: net(Tensor(x[cuts[world.rank]:cuts[world.rank + 1]])), LayoutError)
        assert "not the rows of one batch" in text and "rank 3 brings" in text
    wide = Tensor(ROWS[2 * world.rank:2 * world.rank + 2, :5 + world.rank % 2])
    assert "rank 0 brings [2, 5]" in refusal(lambda: replicate(filled(nn.Dense(6, 3)), mesh=mesh)(wide), LayoutError)
