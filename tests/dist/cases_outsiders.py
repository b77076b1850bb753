# SPDX-License-Identifier: Apache-2.0
"""What people from outside ran into: errors on some ranks only, raw errors, gradients that said what was not so."""
import copy
import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DTensor, Partial, distribute_module, distribute_tensor, replicate
from ms_dtensor.dispatch.dispatcher import clear_cache
from ms_dtensor.errors import ConfigError, LayoutError, MixedOperandError, OpRuleError
from ms_dtensor.ops.rules import RULES
from ms_dtensor.ops.rules.spec import Case, OpSpec
from tests.dist.operands import Built, P, R, S, data, mesh_1d, mesh_2d, placed
from tests.dist.support import array, check_against_one_device, counted, equal, refusal, same_on_all_ranks
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


def a_rule_that_is_wrong_is_found_on_all_ranks_or_none(world, line):
    """The last rank's shard is empty, and what it is handed has any shape that is asked for."""
    before = RULES["tril"]
    x = placed(data(1, 3, 5), line, S(0))
    RULES["tril"] = lambda call: OpSpec(((3, 7),), (Case((S(0),), (S(0),)),))
    try:
        text = refusal(lambda: x.tril(-2))
    finally:
        RULES["tril"] = before
        clear_cache()
    assert "the rule says" in text


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


def raw_errors_are_gone(world, line):
    a = data(1, 4, 3)
    x = placed(a, line, S(0))
    equal(x.transpose(None), a.transpose(None))
    equal(x.transpose(), a.transpose())
    for fn in (lambda: x.tile(placed(Tensor([1, 2]), line, R)), lambda: x.reshape(placed(Tensor([3, 4]), line, R))):
        assert "numbers are needed" in refusal(fn)
    assert x.nelement().__class__ is int and x.nelement() == 12
    assert "copy_" in refusal(lambda: x.set_(x * 2))
    clipped = ops.clip_by_global_norm(x, 0.5)
    equal(clipped, ops.clip_by_global_norm(a, 0.5))
    assert isinstance(ops.clip_by_global_norm([x], 0.5), tuple)
    square = placed(data(2, 4, 4), line, S(0))
    for t in (square, square.redistribute(placements=[R])):
        g = ms.grad(lambda u: u.trace(dtype=ms.float64))(t)
        assert g.to_local().dtype == ms.float32 == g.dtype, g
        equal(g, np.eye(4))


def a_parameter_without_gradient_is_written_while_one_is_recorded(world):
    a = data(1, 4, 3)
    for write in (ops.assign, ops.assign_add, ops.assign_sub):
        def step(x, held, write=write):
            def fn(t):
                write(held, t * 2)
                return (held * t * t).sum()
            return ms.grad(fn)(x)
        plain, ours = (Parameter(t, name="held", requires_grad=False)
                       for t in (data(2, 4, 3), placed(data(2, 4, 3), mesh_1d(), S(0))))
        equal(step(placed(a, mesh_1d(), S(0)), ours), step(a, plain), write.__name__)
        equal(ours, plain, write.__name__)


def a_tensor_of_a_sub_mesh_comes_to_its_root_as_the_error_says(world, grid):
    a, b = data(1, 5, 3), data(2, 5, 3)
    x, y = placed(a, grid, S(0), R), placed(b, grid["dp"], S(0))
    text = refusal(lambda: x * y)
    assert "distribute_tensor(t, mesh, {'dp': Shard(0)})" in text, text
    assert "DTensor.from_local(x.to_local(), mesh, {'dp': Shard(0)}, shape=x.shape)" in text, text

    def loss(y):
        return (x * DTensor.from_local(y.to_local(), grid, {"dp": S(0)}, shape=y.shape)).exp().sum()
    with counted({}):
        got = ms.grad(loss)(y)
    equal(got, ms.grad(lambda t: (a * t).exp().sum())(b))


class Tables(nn.Cell):
    """Reads its weights from a tuple, a child's among them, and a constant."""

    def __init__(self, buffer=True):
        super().__init__()
        self.dense = nn.Dense(3, 3)
        self.weights = ParameterTuple([Parameter(data(i, 3, 3), name=f"w{i}") for i in (1, 2)])
        self.all = ParameterTuple([self.dense.weight, *self.weights])
        self.dense.weight.set_data(data(3, 3, 3))
        self.dense.bias.set_data(data(5, 3))
        if buffer:
            self.register_buffer("scale", data(4, 3))
        else:
            self.scale = data(4, 3)

    def construct(self, x):
        for w in self.weights:
            x = mint.tanh(mint.matmul(x, w))
        return self.dense(x) * self.scale + sum(w.sum() for w in self.all)


def weights_in_a_tuple_and_buffers_are_distributed(world):
    x = data(9, 8, 3)
    for what in ("replicate", "distribute_module"):
        plain = Tables()
        wanted = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
        net, mesh = Tables(), mesh_1d(name="dp")
        net = replicate(net, mesh=mesh) if what == "replicate" else distribute_module(net, mesh)
        assert all(isinstance(w, DTensor) for w in (*net.all, net.scale)) and isinstance(net.all, ParameterTuple), what
        assert net.all[0] is net.dense.weight, what
        got = ms.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(placed(x, mesh, S(0)))
        equal(got, wanted, what)
    net = replicate(Tables(buffer=False), mesh=mesh_1d(name="dp"))
    text = refusal(lambda: net(placed(x, mesh_1d(name="dp"), S(0))), MixedOperandError)
    assert "self.register_buffer(name, t)" in text, text


def a_view_of_a_local_output_is_explained(world, line):
    x = data(1, 5, 6)

    def net(heads, local):
        plan = {"up": md.ColwiseParallel(use_local_output=local), "down": md.RowwiseParallel(use_local_output=False)}
        return md.parallelize_module(Built(  # speaks of all heads, by number or by what is left
            lambda c, x: c.down(mint.reshape(c.up(x), (5, heads, 2)).reshape(5, -1)), up=nn.Dense(6, 8),
            down=nn.Dense(8, 6)), line, plan)
    text = refusal(lambda: net(4, True)(x), LayoutError)
    assert "use_local_output=False" in text and "Built" in text, text
    assert net(4, False)(x).shape == net(-1, True)(x).shape == copy.deepcopy(net(1, True))(x).shape == (5, 6)


def local_outputs_that_meet_global_sizes_are_explained(world, line):
    x = data(1, 5, 6)
    table = distribute_tensor(data(2, 8), line, [R])
    eight = data(3, 8, 3)

    def net(what, local=True):
        return md.parallelize_module(Built(lambda c, x: what(c.up(x)), up=nn.Dense(6, 8)), line,
                                     {"up": md.ColwiseParallel(use_local_output=local)})
    for what in (lambda y: mint.matmul(y, eight), lambda y: ops.split(y, [4, 4], 1), lambda y: ops.broadcast_to(y, (5, 8)),
                 lambda y: y + eight[:, 0], lambda y: nn.LayerNorm((8,))(y)):
        text = refusal(lambda what=what: net(what)(x), LayoutError)
        assert "use_local_output=False" in text and "Built" in text, text
    for what in (lambda y: y * table, lambda y: (y * 2.0) * table):  # also of what was computed from it
        text = refusal(lambda what=what: net(what)(x), MixedOperandError)
        assert text.index("use_local_output=False") < text.index("distribute_tensor") and text.count("use_local") == 1, text
        assert net(what, False)(x).shape == (5, 8)

    def own_mistake(y):
        raise ValueError("of the user's")
    assert refusal(lambda: net(own_mistake)(x), ValueError) == "of the user's"


def sync_batch_norm_is_refused_with_what_to_use(world):
    mesh = mesh_1d(name="dp")
    x = data(1, 8, 3, 2, 2)
    distribute_tensor(Tensor(x), mesh, [S(0)])  # from the first DTensor on
    with counted({}):
        text = refusal(lambda: nn.SyncBatchNorm(3), ConfigError)
    assert "nn.BatchNorm2d" in text and "global batch" in text
    one, all_ = nn.BatchNorm2d(3).set_train(), distribute_module(nn.BatchNorm2d(3), mesh).set_train()
    check_against_one_device(lambda t: (one(t) if not isinstance(t, DTensor) else all_(t)) ** 3, [x], [[S(0)]], mesh)
    equal(all_.moving_variance, one.moving_variance)


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


def what_is_written_from_itself_under_autograd(world, line):
    def step(t):
        y = t * 2
        y[1:3] = mint.exp(y[1:3]) * 2
        kept = y[4:] * 3
        y[0] = 5.0
        return (y * t).sum() + kept.sum()
    x = data(5, 7, 6)
    want = ms.grad(step)(x)
    for placement in (R, S(0), S(1)):  # one rank has no column
        equal(md.grad(step)(placed(x, line, placement)), want, str(placement))


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


def an_expanded_view_is_not_written_on_any_rank(world):
    x = placed(data(9, 6, 4), mesh_1d(), S(0)) * 1  # the last rank has no row
    wide = mint.unsqueeze(x, 0).expand((2, 6, 4))
    text = same_on_all_ranks(world, refusal(lambda: wide.copy_(wide * 2)))
    assert "share one place" in text, text


def a_cast_to_its_own_dtype_shares_a_tensor_and_copies_a_view(world):
    views = {"itself": lambda t: t, "computed": lambda t: t * 2, "narrow": lambda t: mint.narrow(t, 1, 0, 2),
             "rows": lambda t: t[:], "turned": lambda t: mint.transpose(t, 0, 1), "split": lambda t: mint.split(t, [3], 0)[0],
             "cast": lambda t: t.astype(t.dtype)}
    casts = {"astype": lambda t: t.astype(t.dtype), "to": lambda t: t.to(t.dtype), "cast": lambda t: ops.cast(t, t.dtype)}
    meshes = (mesh_1d(), [S(0)]), (mesh_1d(), [R]), (mesh_2d(), [S(0), S(1)])
    for dtype in (np.float32, np.int64):
        values = np.random.default_rng(3).integers(-9, 9, (3, 2)).astype(dtype)  # one rank's shard is empty
        for (mesh, how), (kind, view), (name, cast) in sampled(itertools.product(
                meshes, views.items(), casts.items()), 2, dtype is np.int64):
            def tensors(x, view=view, cast=cast):
                v = view(x)
                c = cast(v)
                c[0, :] = 50
                return x, v, c
            want = tensors(Tensor(values))
            try:
                got = tensors(distribute_tensor(Tensor(values), mesh, how))
            except OpRuleError as e:  # what is a view on one device, and a copy of shards here
                assert "a copy here" in str(e) and (kind == "split" or name == "cast"), (kind, name, e)
                continue
            equal(got, want, f"{kind} {name} {dtype}")


def an_index_of_everything_hands_the_tensor_back_where_one_device_does(world):
    values = np.random.default_rng(4).normal(size=(3, 2)).astype(np.float32)
    plain, x = Tensor(values), distribute_tensor(Tensor(values), mesh_1d(), [S(0)])
    for index in (..., (...,), (), (slice(None),), (slice(0, 3), ...), (slice(None), slice(-2, None)), slice(None), slice(0, 9),
                  (slice(0, 2),), (..., slice(1, 2)), None, (None, ...), (slice(None, None, -1),) * 0):
        assert (plain[index] is plain) == (x[index] is x), index
        equal(x[index], plain[index], str(index))


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
