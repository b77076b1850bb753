# SPDX-License-Identifier: Apache-2.0
"""Ops at their edges, on real ranks: infinities, no elements, thin shards, plain numbers: one device's values and gradients."""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DTensor, Partial, distribute_tensor
from tests.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import array, check_against_one_device, counted, equal, refusal
from tests.tiers import sampled

ROWS, COLUMNS = ([S(0), R], [R, S(1)])


def outer_flattens_as_on_one_device(world):
    def weighted(x, v):
        return (x.outer(v) * x.outer(v).exp()).sum()
    for shapes in (((3, 3), (3,)), ((4, 2), (5,)), ((6,), (3,)), ((5,), (3,))):
        xs = [data(i, *n) * 0.3 for i, n in enumerate(shapes)]
        for p, q in sampled(itertools.product((ROWS, COLUMNS if len(shapes[0]) > 1 else ROWS, [S(0), S(0)]),
                                              ([R, R], [S(0), R], [S(0), S(0)])), 2):
            dx = [placed(x, mesh_2d(), *how) for x, how in zip(xs, (p, q))]
            equal(dx[0].outer(dx[1]), xs[0].outer(xs[1]), f"{shapes} {p} {q}")
            check_against_one_device(weighted, xs, [p, q], mesh_2d(), f"{shapes} {p} {q}")
    x, y = placed(data(1, 3), mesh_2d(), S(0), R), placed(data(2, 3, 3), mesh_2d(), *COLUMNS)
    assert "no vector" in refusal(lambda: x.outer(y))


def gradients_of_what_broadcasts_are_there_on_all_ranks(world):
    a, v = data(1, 3, 3), Tensor(np.float32([1, -1, 1]))

    def after(x, y):
        return (x.nextafter(y) ** 2 * x).sum()
    wanted = ms.grad(after, (0, 1))(a, mint.broadcast_to(v, (3, 3)))  # MindSpore's own fails where it broadcasts
    ways = itertools.product((ROWS, COLUMNS, [S(0), S(0)], [R, R]), ([S(0), R], [R, R], [R, S(0)]))
    for shift, (p, q) in enumerate(ways):
        dx, dv = placed(a, mesh_2d(), *p), placed(v, mesh_2d(), *q)
        got = ms.grad(after, (0, 1))(dx, dv)
        equal(got[0], wanted[0], f"nextafter {p} {q}")
        equal(got[1], array(wanted[1]).sum(0), f"nextafter {p} {q}")
        for how in sampled(("mean", "sum", "none"), 3, shift + shift // 3):
            def loss(x, y, how=how):
                return (ops.hinge_embedding_loss(x, y, 1.0, how) * 3).sum()
            got = ms.grad(loss, (0, 1))(dx, dv)
            equal(got[0], ms.grad(loss)(a, v), f"hinge {how} {p} {q}")
            equal(got[1], np.zeros(3), f"hinge {how} {p} {q}")


def the_gradient_of_a_partial_maximum_is_whole_once_reduced(world):
    own = np.float32([[3, 1], [2, 5]]) - [[world.rank, -world.rank], [world.rank, world.rank]]
    for mesh, how in ((mesh_1d(), [Partial("max")]), (mesh_2d(), [Partial("max")] * 2), (mesh_1d(), [Partial("min")])):
        op = np.max if how[0].is_partial("max") else np.min
        whole = Tensor(op([np.float32([[3, 1], [2, 5]]) - [[r, -r], [r, r]] for r in range(4)], 0))
        x = DTensor.from_local(Tensor(np.float32(own)), mesh, how, shape=(2, 2))
        best = (lambda t: t.max()) if op is np.max else (lambda t: t.min())
        equal(md.grad(best)(x), ms.grad(best)(whole), f"{how}")
        equal(md.grad(lambda t: (t.reduce_partial() ** 2).sum())(x), 2 * array(whole), f"{how}")
        seen = []

        def hooked(t):
            t.register_hook(seen.append)
            return (t.reduce_partial() ** 2).sum()
        md.grad(hooked)(x)
        equal(seen[0], 2 * array(whole), "what a hook sees")


def sums_of_infinities_are_those_of_the_whole(world):
    parts = [data(10 + r, 4, 3) for r in range(world.size)]
    whole = sum(parts[1:], parts[0])
    x = DTensor.from_local(parts[world.rank], mesh_1d(), [P], shape=(4, 3))
    inf = float("inf")
    forms = {"/ 0": lambda t: t / 0, "/ 0.0": lambda t: t / 0.0, "/ -0.0": lambda t: t / -0.0, "* inf": lambda t: t * inf,
             "inf *": lambda t: -inf * t, "mint.div": lambda t: mint.div(t, 0), "ops.mul": lambda t: ops.mul(t, inf)}
    for what, fn in forms.items():
        assert np.array_equal(array(fn(x)), array(fn(whole))), what
    assert (x / 2).placements == (P,) and (x * 0).placements == (P,)  # no reduction where none is needed


def halves_add_up_as_widely_as_on_one_device(world, line):
    big = np.random.default_rng(1).uniform(20000, 40000, (40, 9)).astype(np.float16)
    apart = np.where(np.random.default_rng(2).uniform(size=(8, 8)) < 0.5, 200, -200).astype(np.float16)
    for name, fn, a in (("mean", lambda t: mint.mean(t, 0), big), ("mean of all", lambda t: t.mean(), big),
                        ("ops.mean", lambda t: ops.mean(t, 1), big), ("var", lambda t: ops.var(t, 0), apart),
                        ("std of all", lambda t: ops.std(t), apart), ("var_mean", lambda t: ops.var_mean(t, 0)[0], apart)):
        for placement in (S(0), S(1)):
            got = fn(placed(Tensor(a), line, placement))
            want = fn(Tensor(a.astype(np.float32)))
            assert got.dtype == ms.float16, (name, got.dtype)
            equal(got, want.astype(ms.float16), name, rtol=2e-3)
    x = placed(Tensor(apart), line, S(0))
    equal(mint.nn.functional.mse_loss(x, x * 0), Tensor(40000, ms.float16), "mse_loss")


def a_softmax_of_one_number_spoils_no_later_gradient(world, line):
    def weighted(t):
        return (ops.Softmax(2)(t) * t).sum()  # along 2: nobody else's, so the first of its kernel in this process
    one, x = data(1, 4, 3, 1), data(2, 4, 3, 5)
    for placement in (S(0), R):
        equal(md.grad(weighted)(placed(one, line, placement)), Tensor(np.ones((4, 3, 1), np.float32)), str(placement))
    a = x.asnumpy().astype(np.float64)
    p = np.exp(a) / np.exp(a).sum(2, keepdims=True)
    equal(md.grad(weighted)(placed(x, line, S(0))), p * (1 + a - (p * a).sum(2, keepdims=True)), "later")


def a_thin_shard_does_not_tell_how_the_whole_lies(world, line):
    x = placed(data(6, 8, 4, 3), line, S(1)) * 1  # one index of dim 1 on each rank: its transpose is contiguous there
    before, flat = array(x), mint.transpose(x, 0, 1).contiguous().view((4, 24))  # a copy on one device
    text = refusal(lambda: flat.copy_(flat * 0))  # noqa: F821
    assert "clone" in text, text
    equal(x, before)
    del flat
    again = x.contiguous().view((8, 12))
    again[0] = 5.0
    assert (array(x)[0] == 5).all() and (array(x)[1:] == before[1:]).all()


def sums_over_no_elements_have_gradients(world):
    nothing = placed(Tensor(np.zeros((5, 8, 0), np.float32)), mesh_1d(), S(1))
    grads = md.grad(lambda t: mint.sum(mint.sum(t * t, -2), -1, keepdim=True).sum())(nothing)
    assert grads.shape == (5, 8, 0) and grads.local_shape == (5, 2, 0)


def integers_have_no_gradient(world, line):
    x = data(8, 2, 6)

    def fn(t):
        whole = (t * 3).astype(ms.int32).astype(ms.float32)
        return (t * 0.5).sum() + (whole * whole).sum() * 0.3 + (whole * 0.7).sum()
    for placement in (R, S(0), S(1)):
        equal(md.grad(fn)(placed(x, line, placement)), np.full((2, 6), 0.5, np.float32), str(placement))


def _filled(x, s):
    y = x * 1
    y[1] = s
    return y


PLAIN_NUMBERS = {  # ops that take a plain 0-d tensor beside a DTensor
    "+": lambda s, x: x + s, "-": lambda s, x: s - x, "mint.sub alpha": lambda s, x: mint.sub(x, s, alpha=3),
    "*": lambda s, x: s * x, "/": lambda s, x: x / s, "0-d / x": lambda s, x: s / (x * x + 1),
    "**": lambda s, x: (x * x + 1) ** s, "0-d ** x": lambda s, x: s ** x, "where": lambda s, x: ops.where(x > 0, x, s),
    "lerp": lambda s, x: ops.lerp(x, x * 2, s), "addcmul": lambda s, x: ops.addcmul(x, x, x + 1, s),
    "clamp": lambda s, x: ops.clamp(x, -s, s), "maximum": lambda s, x: mint.maximum(x, s), "atan2": lambda s, x: ops.atan2(x, s),
    "masked_fill": lambda s, x: x.masked_fill(x > 0, s), "stack": lambda s, x: ops.stack([(x * x).mean(), s]),
    "addmm": lambda s, x: ops.addmm(s, x, x.T), "of a sum": lambda s, x: x.sum(0) * s + s, "x[1] = 0-d": lambda s, x: _filled(x, s),
    "full_like": lambda s, x: ops.full_like(x, s) * x,
    "derived": lambda s, x: x * (s * 2).exp(), "softmax": lambda s, x: ops.softmax(x / s, 0)}


def a_plain_number_has_one_devices_gradient(world):
    """Forward, a plain 0-d tensor is the same on all ranks; each rank's part of its cotangent is not."""
    s, x = Tensor(0.7, ms.float32), data(3, 5, 6)
    laid_out = [(mesh_1d(), [S(0)]), (mesh_1d(), [S(1)]), (mesh_2d(), [S(1), S(0)]), (mesh_1d(), [P])]
    for shift, (name, fn) in enumerate(sampled(PLAIN_NUMBERS.items(), 2)):
        def loss(s, x, fn=fn):
            return (ops.tanh(fn(s, x)) ** 2).mean()
        want = ms.grad(loss, (0, 1))(s, x)
        for mesh, placements in sampled(laid_out[:3 if name == "x[1] = 0-d" else 4], 2, shift):  # what is written stays Partial: refused
            dx = DTensor.from_local(x * ((world.rank + 1) / 10), mesh, [P], shape=(5, 6)) if P in placements else placed(
                x, mesh, *placements)
            equal(md.grad(loss, (0, 1))(s, dx), want, f"{name} {placements}", 1e-4)

    def product(s, x):
        return (ops.tanh(x * s * Tensor(2.0, ms.float32)) ** 2).mean()
    dx = placed(x, mesh_1d(), S(0))
    with counted() as of_both:
        md.grad(product, (0, 1))(s, dx)
    with counted() as of_x:
        md.grad(product, 1)(s, dx)
    assert of_both == {("all_reduce", "backward"): 1} and not of_x, (of_both, of_x)  # none for the constant 2
    equal(md.grad(lambda s, x: md.grad(product)(s, x) ** 2)(s, dx), ms.grad(lambda s, x: ms.grad(product)(s, x) ** 2)(s, x))
    equal(md.grad(lambda s, x: x.new_full((5, 3), s).sum())(s, dx), np.float32(15), "new_full")
    p = Parameter(s, name="p")
    equal(md.grad(lambda x: product(p * 1, x), None, [p])(dx)[0], ms.grad(product)(s, x), "a parameter, by what is made of it")
    with md.implicit_replication():
        equal(md.grad(lambda x: product(p, x), None, [p])(dx)[0], ms.grad(product)(s, x), "a parameter")


def implicit_replication_has_one_devices_gradients(world, line):
    x, w = data(1, 8, 4), data(2, 4)
    p = Parameter(w, name="w")
    for place in (S(0), S(1), R):
        dx = distribute_tensor(x, line, [place])

        def loss(dx=dx):
            with md.implicit_replication():
                return (dx * p).sum()
        value, grads = ms.value_and_grad(loss, None, [p])()
        equal(value, (x * w).sum())
        equal(grads[0], x.sum(0), f"{place}")
        with md.implicit_replication():
            equal(mint.matmul(dx, w.reshape((4, 1))), x @ w.reshape((4, 1)))
