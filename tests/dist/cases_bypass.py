# SPDX-License-Identifier: Apache-2.0
"""Real ranks: everything MindSpore does without asking `__fallback__`, in-place ops, and writing by index.

Each case compares with NumPy on the global array, on every rank, over every layout of a 2 x 2 mesh; or it raises the
same error everywhere.
"""
import copy
import itertools
import pickle

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from ms_dtensor import DTensor, comm, value_and_grad
from ms_dtensor.errors import MixedOperandError, OpRuleError
from tests.dist.operands import P, R, S, mesh_1d, mesh_2d, placed
from tests.dist.support import equal, refusal
from tests.tiers import sampled

A = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
B = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)


def layouts(ndim: int = 2):
    """Every pair of placements of a tensor on two axes."""
    return itertools.product([R, *(S(d) for d in range(ndim))], repeat=2)


# -- indexing -------------------------------------------------------------------------------------------------------
INDICES = (0, -1, slice(1, 4), slice(None, None, -2), (slice(None), 2), (Ellipsis, slice(1, 3)), (2, 3), None,
           (slice(None), None, 1), [0, 2, -1], (slice(None), [1, -1]), ([0, 4, -2], [1, 1, 5]), ([[0], [3]], [1, 2]),
           (1, [0, 5]), ([1, 2], None, [3, 4]), np.ix_([0, 2, 4], [1, 5]), slice(3, 2), ())


def getitem_as_numpy(world, grid):
    for shift, placements in enumerate(layouts()):
        x = placed(A, grid, *placements)
        for index in sampled(INDICES, 4, shift):
            equal(x[index], A[index], f"{placements} {index}")
        ids = placed(np.array([3, 0, -1], np.int32), grid, S(0), R)
        equal(x[ids], A[[3, 0, -1]])
        equal(x[ids, ids], A[[3, 0, -1], [3, 0, -1]])
    partial = DTensor.from_local(Tensor(A), mesh_1d(), [P])
    equal(partial[1:3, [0, 2]], 4 * A[1:3][:, [0, 2]])


def getitem_refusals_are_the_same_everywhere(world):
    x = placed(A, mesh_1d(), S(0))
    text = refusal(lambda: x[x > 0])
    assert "mask" in text and "data" in text and "where(" in text
    assert len(set(comm.group(tuple(range(4))).all_gather_object(text))) == 1
    rows = np.array([True, False, True, True, False])  # of which every rank has all
    assert np.array_equal(x[rows].full_tensor().asnumpy(), A[rows])
    refusal(lambda: x[rows[1:]], IndexError)
    for index in (5, (0, 6), (0, 0, 0), [7], (slice(None), [0, -7])):
        refusal(lambda i=index: x[i], IndexError)
    out = placed(np.array([0, 9], np.int32), mesh_1d(), R)
    refusal(lambda: x[out], (IndexError, ValueError, RuntimeError))


def setitem_as_numpy(world, grid):
    for shift, placements in enumerate(layouts()):
        for index in sampled(INDICES, 7, shift):
            if index is None or isinstance(index, tuple) and any(i is None for i in index):
                continue
            want = A.copy()
            region = want[index]
            want[index] = 7.5
            x = placed(A, grid, *placements)
            x[index] = 7.5
            equal(x, want, f"{placements} {index} = scalar")
            for other in ([R, R], [S(0), R], [R, S(max(region.ndim - 1, 0))]):
                if region.ndim == 0 and other != [R, R]:
                    continue
                values = B.reshape(-1)[:region.size].reshape(region.shape)
                want[index] = values
                x = placed(A, grid, *placements)
                x[index] = placed(values, grid, *other)
                final = A.copy()
                final[index] = values
                equal(x, final, f"{placements} {index} = {other}")
        row = placed(B[0], grid, R, R)
        x, want = placed(A, grid, *placements), A.copy()
        x[1:4] = row  # broadcast
        x[:, None, 2] = B[:, :1]  # a literal, one dim more
        want[1:4] = B[0]
        want[:, None, 2] = B[:, :1]
        equal(x, want, "broadcast")
        x[x > 0] = -1.0
        want[want > 0] = -1.0
        equal(x, want, "mask")
        assert tuple(x.placements) == tuple(placements)


def setitem_refusals(world):
    x = placed(A, mesh_1d(), S(0))
    refusal(lambda: x.__setitem__(0, Tensor(B[0])), MixedOperandError)
    refusal(lambda: x.__setitem__(x > 0, placed(B, mesh_1d(), S(0))))
    refusal(lambda: x.__setitem__(0, B))
    refusal(lambda: x.__setitem__(9, 0.0), IndexError)
    refusal(lambda: DTensor.from_local(Tensor(A), mesh_1d(), [P]).__setitem__(0, 1.0))
    plain = Tensor(A)
    assert "x.new_zeros" in refusal(lambda: plain.__setitem__(0, x[0]), MixedOperandError)
    equal(plain, A)
    equal(x, A)


# -- in place -------------------------------------------------------------------------------------------------------
IN_PLACE = {
    "add_": (lambda x, y: x.add_(y), lambda a, b: a + b),
    "add_(alpha)": (lambda x, y: x.add_(y, alpha=2), lambda a, b: a + 2 * b),
    "add_(number)": (lambda x, y: x.add_(1), lambda a, b: a + 1),
    "sub_": (lambda x, y: x.sub_(y), lambda a, b: a - b),
    "mul_": (lambda x, y: x.mul_(y), lambda a, b: a * b),
    "mul_(number)": (lambda x, y: x.mul_(3), lambda a, b: a * 3),
    "div_": (lambda x, y: x.div_(y), lambda a, b: a / b),
    "fill_": (lambda x, y: x.fill_(2.0), lambda a, b: 0 * a + 2),
    "zero_": (lambda x, y: x.zero_(), lambda a, b: 0 * a),
    "copy_": (lambda x, y: x.copy_(y), lambda a, b: b),
    "masked_fill_": (lambda x, y: x.masked_fill_(y > 0, 0.5), lambda a, b: np.where(b > 0, np.float32(0.5), a)),
    "clamp_": (lambda x, y: x.clamp_(-0.5, 0.5), lambda a, b: a.clip(-0.5, 0.5)),
    "exp_": (lambda x, y: x.exp_(), lambda a, b: np.exp(a)),
    "tanh_": (lambda x, y: x.tanh_(), lambda a, b: np.tanh(a)),
    "sigmoid_": (lambda x, y: x.sigmoid_(), lambda a, b: 1 / (1 + np.exp(-a))),
    "floor_": (lambda x, y: x.floor_(), lambda a, b: np.floor(a)),
    "sub_(number)": (lambda x, y: x.sub_(1.5), lambda a, b: a - np.float32(1.5)),
    "div_(number)": (lambda x, y: x.div_(2), lambda a, b: a / 2),
    "floor_divide_": (lambda x, y: x.floor_divide_(2), lambda a, b: a // 2),
    "remainder_": (lambda x, y: x.remainder_(2), lambda a, b: a % 2),
    "F.relu_": (lambda x, y: mint.nn.functional.relu_(x), lambda a, b: a.clip(0)),
}


def in_place_ops_write(world, grid):
    """MindSpore on CPU: `x.add_(y)` leaves x as it was."""
    others = ([R, R], [S(0), S(1)], [S(1), R])
    for shift, ((name, (write, want)), placements) in enumerate(itertools.product(IN_PLACE.items(), layouts())):
        for other in sampled(others, 3, shift):
            x = placed(A, grid, *placements)
            before, y = id(x), placed(B, grid, *other)
            out = write(x, y)
            assert out is x and id(x) == before, name
            assert tuple(x.placements) == tuple(placements), name
            equal(x, want(A, B), f"{name} {placements} {other}", rtol=1e-4)
            equal(y, B)


def in_place_on_parameters(world):
    w = Parameter(placed(A, mesh_1d(), S(0)), name="w")
    same = w
    w.add_(placed(B, mesh_1d(), S(1)))
    w.mul_(2)
    w[0] = 1.0
    want = (A + B) * 2
    want[0] = 1
    assert w is same and isinstance(w, Parameter) and w.name == "w"
    equal(w, want)
    _, (g,) = value_and_grad(lambda: (w * w).sum(), None, [w])()
    equal(g, 2 * want)
    text = refusal(lambda: value_and_grad(lambda: w.add_(1.0).sum(), None, [w])())
    assert "leaf" in text
    equal(w, want)


def in_place_keeps_the_placement_or_refuses(world, line):
    partial = DTensor.from_local(Tensor(A), line, [P])
    text = refusal(lambda: partial.add_(1.0))
    assert "placement" in text and "redistribute the target first" in text
    equal(partial, 4 * A)
    partial.mul_(2)
    partial.add_(DTensor.from_local(Tensor(B), line, [P]))
    assert partial.placements == (P,)
    equal(partial, 8 * A + 4 * B)
    refusal(lambda: partial.exp_())
    x = placed(A, line, S(0))
    x.add_(DTensor.from_local(Tensor(B), line, [P]))
    equal(x, A + 4 * B)
    refusal(lambda: placed(A[0], line, S(0)).add_(x))  # would have to grow
    refusal(lambda: x.add_(Tensor(B)), MixedOperandError)
    refusal(lambda: Tensor(B).add_(x), MixedOperandError)


def in_place_drops_what_was_derived(world):
    """A memo of an earlier value must not answer for the new one."""
    def fn(x):
        y = x * 1
        first = mint.flip(y, (0,))  # y is gathered, and the gathered copy remembered
        y += 1
        return (mint.flip(y, (0,)) * first * x).sum()
    a = A.astype(np.float64)
    f = a[::-1]
    for placements in ([S(0)], [S(1)], [R]):
        value, grad = value_and_grad(fn, 0)(placed(A, mesh_1d(), *placements))
        equal(value, np.float32(((f + 1) * f * a).sum()), rtol=1e-4)
        equal(grad, (f + 1) * f + ((2 * f + 1) * a)[::-1], rtol=1e-4)


# -- views ----------------------------------------------------------------------------------------------------------
VIEWS = {
    "x[1:3]": lambda x: x[1:3], "x[0]": lambda x: x[0], "x[:, 2]": lambda x: x[:, 2], "x[:, 1:4]": lambda x: x[:, 1:4],
    "x.T": lambda x: x.T, "x.reshape(-1)": lambda x: x.reshape(-1), "x.narrow": lambda x: mint.narrow(x, 1, 2, 3),
    "x.chunk": lambda x: x.chunk(2, 1)[1], "x.split": lambda x: x.split(2)[0], "x.unsqueeze": lambda x: x.unsqueeze(0),
    "x.select": lambda x: x.select(0, 3), "x.transpose": lambda x: x.transpose(0, 1),
    "next(iter(x))": lambda x: next(iter(x)),
    "x.detach()": lambda x: x.detach(), "x.T[0]": lambda x: x.T[0], "x[1:4][:, 1]": lambda x: x[1:4][:, 1],
}


def _numpy_view(name, a):
    return {"x.narrow": lambda: a[:, 2:5], "x.chunk": lambda: np.split(a, 2, 1)[1], "x.split": lambda: a[:2],
            "x.unsqueeze": lambda: a[None],
            "x.select": lambda: a[3], "x.transpose": lambda: a.T, "x.detach()": lambda: a}.get(name,
            lambda: VIEWS[name](a))()


def a_write_through_a_view_reaches_the_original_or_raises(world):
    """Peer: `y = x[1:3]; y.zero_()` on a sharded dim leaves x as it was, and says nothing."""
    through = 0
    for placements, (name, view) in sampled(itertools.product(layouts(), VIEWS.items()), 2):
        x = placed(A, mesh_2d(), *placements)
        y = view(x)
        try:
            y.fill_(9.0)
        except OpRuleError as e:
            wrote, text = False, str(e)
        else:
            wrote, text = True, ""
        told = comm.group(tuple(range(4))).all_gather_object((wrote, text.splitlines()[:1]))
        assert len({str(t) for t in told}) == 1, (name, placements, told)
        want = A.copy()
        if wrote:
            _numpy_view(name, want)[...] = 9
            through += 1
        equal(x, want, f"{name} of {placements}")
        if wrote:
            equal(y, _numpy_view(name, want), name)
    assert through > len(sampled(range(60), 2)), through


def a_write_to_the_original_reaches_views_or_raises(world, line):
    x = placed(A, line, S(0))
    y = x[1:3]  # gathered: a copy here, a view on one device
    refusal(lambda: x.zero_())
    refusal(lambda: x.__setitem__(0, 0.0))
    del y
    x.zero_()  # nobody can see the difference any more
    equal(x, 0 * A)
    x = placed(A, line, S(0))
    y = x.reshape((5, 2, 3))
    x.mul_(2)
    equal(y, 2 * A.reshape(5, 2, 3))
    x = placed(A, line, R)
    y = x.redistribute(placements=[S(0)])
    y.zero_()
    equal(x, A, "a redistributed tensor is its own")

    def fn(t):
        a = t * 1
        b = a[:, 1:3]
        b.zero_()
        return a.sum()
    refusal(lambda: value_and_grad(fn, 0)(placed(A, line, S(0))))


# -- Python's and NumPy's protocols ---------------------------------------------------------------------------------
def values_are_global_or_refused(world):
    x = placed(A, mesh_1d(), S(0))
    assert len(x) == 5 and x.ndim == 2 and tuple(x.shape) == (5, 6) and x.numel() == 30 and x.nbytes == 120
    assert x.stride() == (6, 1), x.stride()
    assert x.strides == (24, 4) and x.itemsize == 4 and x.dtype == ms.float32
    assert [float(r.sum().item()) for r in x] and len(list(x)) == 5
    equal(mint.stack(list(x)), A)
    assert abs(x[2, 3].item() - A[2, 3]) < 1e-6 and abs(float(x.sum()) - A.sum()) < 1e-4
    one = placed(np.array([3], np.int32), mesh_1d(), S(0))  # held by one rank only
    assert one.item() == 3 and int(one) == 3 and bool(one) and list(range(4))[one[0]] == 3
    for read in (lambda: x.asnumpy(), lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array(x), lambda: x.tolist(),
                 lambda: x.get_bytes(), lambda: x.item(), lambda: bool(x), lambda: float(x), lambda: Tensor(x),
                 lambda: ms.tensor(x)):
        refusal(read, (OpRuleError, TypeError))
    for swallow in (lambda: np.add(x, x), lambda: np.sin(x), lambda: np.ones((5, 6), np.float32) * x,
                    lambda: np.ones((5, 6), np.float32) + x):
        refusal(swallow, (TypeError, OpRuleError))
    equal(np.float32(2) * x, 2 * A)
    equal(x * np.float32(2), 2 * A)
    equal(x.T, A.T)
    assert "f32[5@tp, 6]" in repr(x) == str(x) == f"{x}" and f"{x.sum():.2f}" == f"{A.sum():.2f}"
    assert hash(x) == id(x) and x in [x] and {x: 1}[x] == 1
    equal(x == x, A == A)
    equal((x > 0) & (x < 1), (A > 0) & (A < 1))
    equal(sum([x, x, x]), 3 * A)
    equal(x.fill(2.5), 0 * A + 2.5)
    assert not (x.data is not x)


def plain_operands_raise_in_every_position(world):
    x, plain = placed(A, mesh_1d(), S(0)), Tensor(B)
    param = Parameter(Tensor(B), name="p")
    for other in (plain, param):
        for mix in (lambda t: t + x, lambda t: x + t, lambda t: t * x, lambda t: t - x, lambda t: t / x,
        lambda t: t ** x,
                    lambda t: t // x, lambda t: t % x, lambda t: t @ x.T, lambda t: t == x, lambda t: t < x,
                    lambda t: t.add(x),
                    lambda t: t.add(other=x), lambda t: t.masked_fill(x > 0, 0.0), lambda t: mint.add(t, other=x),
                    lambda t: mint.add(input=t, other=x), lambda t: mint.add(input=x, other=t),
                    lambda t: mint.where(condition=x > 0, input=t, other=x),
                    lambda t: ops.stack((t, x)), lambda t: ops.addn([t, x]), lambda t: mint.cat([t, x]),
                    lambda t: ops.add(t, x),
                    lambda t: t.copy_(x), lambda t: t.add_(x)):
            refusal(lambda m=mix, t=other: m(t), MixedOperandError)
    equal(plain, B)
    equal(param, B)
    equal(x, A)


def keyword_operands_work(world):
    """MindSpore: "Input has no __fallback__ attribute!"."""
    x, y = placed(A, mesh_1d(), S(0)), placed(B, mesh_1d(), S(1))
    equal(mint.add(input=x, other=y), A + B)
    equal(mint.add(other=y, input=x, alpha=2), A + 2 * B)
    equal(mint.sub(input=x, other=y), A - B)
    equal(mint.mul(input=x, other=y), A * B)
    equal(mint.div(input=x, other=y), A / B)
    equal(mint.where(condition=x > 0, input=x, other=y), np.where(A > 0, A, B))
    equal(mint.max(input=x), A.max())
    equal(mint.max(input=x, dim=1)[0], A.max(1))
    equal(mint.clamp(input=x, min=0), A.clip(0))
    equal(mint.eq(input=x, other=x), A == A)
    equal(x.add(other=y), A + B)
    equal(mint.add(x, other=y), A + B)
    equal(mint.reshape(input=x, shape=(6, 5)), A.reshape(6, 5))
    equal(mint.cat(tensors=(x, y), dim=1), np.concatenate([A, B], 1))
    value, g = value_and_grad(lambda t: mint.mul(input=t, other=t).sum(), 0)(x)
    equal(value, (A * A).sum())
    equal(g, 2 * A)


def lists_of_tensors_are_seen(world):
    """MindSpore: `ops.stack([x, y])` and `AddN` give the local tensors' stack, plain."""
    x, y = placed(A, mesh_1d(), S(0)), placed(B, mesh_1d(), S(1))
    for got, want in ((ops.stack((x, y), 1), np.stack([A, B], 1)), (ops.Stack(0)([x, y]), np.stack([A, B])),
                      (mint.stack([x, y], -1), np.stack([A, B], -1)), (ops.addn((x, y)), A + B),
                      (ops.AddN()([x, y, x]), 2 * A + B),
                      (ops.hstack((x, y)), np.hstack([A, B])), (ops.vstack((x, y)), np.vstack([A, B])),
                      (ops.full_like(x, 2.0), 0 * A + 2), (ops.zeros_like(x), 0 * A)):
        assert isinstance(got, DTensor)
        equal(got, want)


def copies_and_pickles(world, grid):
    x = placed(A, grid, S(0), S(1))
    w = Parameter(placed(A, grid, S(0), R), name="w", requires_grad=False)
    for one in (x, w):
        for again in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert isinstance(again, DTensor) and again.layout is one.layout
            equal(again, A)
    for again in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert isinstance(again, Parameter) and again.name == "w" and not again.requires_grad
        again.zero_()
        equal(w, A, "a deep copy has storage of its own")
    state = copy.deepcopy({"x": x, "list": [x, w]})
    assert state["x"] is state["list"][0], "deepcopy keeps identities"
    equal(state["list"][1], A)
