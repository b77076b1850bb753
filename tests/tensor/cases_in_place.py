# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what is written in place, by ops and through views, is written on every rank, or nothing is.

Each case compares with NumPy on the global array, over every layout of two axes; or it raises the same error everywhere.
"""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DTensor, comm, distribute_tensor, value_and_grad
from ms_dtensor.errors import MixedOperandError, OpRuleError
from tests.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import array, equal, refusal, same_on_all_ranks
from tests.tensor.cases_indexing import A, B, layouts
from tests.tiers import sampled

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


def an_expanded_view_is_not_written_on_any_rank(world):
    x = placed(data(9, 6, 4), mesh_1d(), S(0)) * 1  # the last rank has no row
    wide = mint.unsqueeze(x, 0).expand((2, 6, 4))
    text = same_on_all_ranks(world, refusal(lambda: wide.copy_(wide * 2)))
    assert "share one place" in text, text


def a_write_through_a_view_reaches_its_siblings_or_raises(world, line):
    """A sibling that is a copy here: `c = x[2:7]` was gathered, `x[:, 1:3][:] = -1` writes into the storage of `x`."""
    x = distribute_tensor(data(1, 8, 5), line, [S(0)])
    c = x[2:7]
    before = array(c).copy()
    try:
        x[:, 1:3][:] = -1
    except OpRuleError:
        assert np.array_equal(array(x), array(data(1, 8, 5))) and np.array_equal(array(c), before)
    else:
        assert np.array_equal(array(c), array(x)[2:7])
    del c
    x[:, 1:3][:] = -1
    assert (array(x)[:, 1:3] == -1).all()
    scalar = x[3, 3].clone()
    scalar[...] = 7.0
    assert scalar.shape == () and scalar.item() == 7.0
