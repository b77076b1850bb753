# SPDX-License-Identifier: Apache-2.0
"""Hooks see global, reduced gradients, once; and what stands around a training step, where it communicates and where it refuses.

Values are those of `rows_*.py`.
"""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn
from mindspore.train import MAE, Metric

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, distribute_tensor, replicate
from ms_dtensor.errors import ImplicitCommError, LayoutError, MixedOperandError
from tests.operands import R, S, data, filled, mesh_1d, mesh_2d, placed
from tests.support import array, counted, equal, refusal
from tests.surface.cases_gradients import _mlp
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


def handles_of_moved_hooks_remove_them(world):
    x = data(4, 8, 6)

    def grads(net, t):
        return ms.grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(t)
    for bucket, frozen in ((25, False), (0, True)):  # frozen: while it is laid out
        net, plain = filled(nn.Dense(6, 4)), filled(nn.Dense(6, 4))
        scaled = [lambda g: 2 * g, lambda g: 3 * g, lambda g: 5 * g, lambda g: 7 * g]
        handles = [net.weight.register_hook(fn) for fn in scaled]
        net.weight.register_hook(lambda g: 11 * g)  # nobody keeps its handle
        handles[1].remove()
        want = grads(plain, x)
        net.weight.requires_grad = not frozen
        net = md.parallelize_module(net, mesh_2d()["tp"], ColwiseParallel(use_local_output=False))
        handles[2].remove()
        replicate(net, mesh=mesh_2d()["dp"], bucket_mb=bucket)
        net.weight.requires_grad = True
        mine = distribute_tensor(x, mesh_2d(), [S(0), R])
        for remove, factor in ((None, 2 * 7 * 11), (0, 7 * 11), (3, 11), (3, 11)):
            if remove is not None:
                handles[remove].remove()
            got = grads(net, mine)
            equal(got[0], factor * want[0].asnumpy(), f"{bucket} {factor}")
            equal(got[1], want[1], f"{bucket} bias")
