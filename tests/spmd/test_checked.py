# SPDX-License-Identifier: Apache-2.0
"""Checked local functions: faults of other libraries are refused before a step, at their line; what is right passes."""
import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DFunction, Partial, Replicate, Shard, comm, local_map
from ms_dtensor.comm import fake_world
from ms_dtensor.core.layout import Layout
from ms_dtensor.debug import all_gather, all_reduce, all_to_all, checks, convert, reduce_scatter, reinterpret
from ms_dtensor.debug.types import check, typed
from ms_dtensor.errors import ConfigError, LayoutError, OpRuleError
from ms_dtensor.ops.rules import spmd

R, P = Replicate(), Partial()


@pytest.fixture
def mesh():
    with fake_world(4):
        yield md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def lying(mesh, shape, placements, dtype=np.float32):
    here = Layout(mesh, placements, shape).local_shape((0, 0))
    made = np.random.default_rng(len(shape)).uniform(0.5, 2, here).astype(dtype)
    return md.DTensor.from_local(Tensor(made), mesh, placements)


def line_of(fn, text: str) -> str:
    """ "file:line" of the first line of a function with this text."""
    lines, first = inspect.getsourcelines(fn)
    return f"{inspect.getsourcefile(fn)}:{first + next(i for i, x in enumerate(lines) if text in x)}"


def refused(run, *texts: str) -> str:
    with pytest.raises(OpRuleError) as caught:
        run()
    said = str(caught.value)
    assert caught.value.rule and caught.value.fix and caught.value.operands
    for text in texts:
        assert text in said, said
    return said


# -- faults of other libraries -------------------------------------------------------------------------------------------
def test_a_norms_weight_whose_gradient_is_not_summed(mesh):
    """Megatron-LM#7452: a norm over a rank's own heads, with one weight for all: its gradient needs a sum over tp."""
    x, w = lying(mesh, (4, 8, 6), {"dp": Shard(0), "tp": Shard(1)}), lying(mesh, (6,), {})

    def out_norm(x, w):
        scale = mint.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return x * scale * w
    where = {"dp": Shard(0), "tp": Shard(1)}
    wrong = local_map(out_norm, where, (where, {}), in_grad_placements=(where, {}), check=True)
    refused(lambda: wrong(x, w), "invariant over 'dp'", line_of(out_norm, "x * scale * w"), 'convert(x, \'dp\', to=\'R\')')
    right = local_map(lambda x, w: out_norm(x, convert(convert(w, "dp", "R"), "tp", "R")), where, (where, {}),
                      in_grad_placements=(where, {}), check=True)
    assert right(x, w).shape == (4, 8, 6)
    assert local_map(out_norm, where, (where, {}), check=True)(x, w).shape == (4, 8, 6)


def test_rows_that_are_scattered_into_a_value_that_all_have(mesh):
    """hyper-parallel#685: each rank adds its rows into the whole base, and calls that a summand: the base counts twice."""
    base, rows = lying(mesh, (5, 3), {}), lying(mesh, (4, 3), {"tp": Shard(0)})
    ids = lying(mesh, (4,), {"tp": Shard(0)}, np.int32)

    def scatter(base, ids, rows):
        return mint.index_add(base, 0, ids, rows)
    refused(lambda: local_map(scatter, {"tp": P}, check=True)(base, ids, rows), "result 0 is said to be Partial('sum')",
            line_of(scatter, "index_add"))

    def summand(base, ids, rows):
        return reinterpret(mint.index_add(mint.zeros((5, 3)), 0, ids, rows), "tp", "P") + convert(base, "tp", "P")
    assert local_map(summand, {"tp": P}, check=True)(base, ids, rows).placements[1] == P


def test_a_summand_goes_through_a_logarithm(mesh):
    """pytorch#190746: the sum over ranks of logarithms is not the logarithm of the sum."""
    x, s = lying(mesh, (8, 4), {"tp": Shard(0)}), lying(mesh, (8, 4), {"tp": P})

    def loss(x):
        return x.sum().log()
    refused(lambda: local_map(loss, {"tp": P}, check=True)(x), "no summand since 'log'", line_of(loss, "log()"))
    refused(lambda: local_map(loss, {"tp": P}, check=True)(s), "'log'", "partial over 'tp'", line_of(loss, "log()"),
            "all_reduce(x, 'tp') before it")
    assert local_map(lambda x: all_reduce(x.sum(), "tp").log(), {}, check=True)(s).shape == ()


def test_a_row_parallel_cells_summand_taken_for_its_result(mesh):
    """diffusers#14265: the plain output of a row-parallel cell goes on as if it were whole."""
    x, w, b = lying(mesh, (4, 8), {"tp": Shard(1)}), lying(mesh, (3, 8), {"tp": Shard(1)}), lying(mesh, (3,), {})

    def cell(x, w, b):
        out = mint.nn.functional.linear(x, w)
        return out + b
    refused(lambda: local_map(cell, {}, check=True)(x, w, b), "Replicate() over 'tp', which is invariant, and is varying",
            line_of(cell, "out + b"))
    refused(lambda: local_map(cell, {"tp": P}, check=True)(x, w, b), "no summand since 'add'", line_of(cell, "out + b"))
    assert local_map(lambda x, w, b: all_reduce(mint.nn.functional.linear(x, w), "tp") + convert(b, "tp", "I"), {},
                     check=True)(x, w, b).shape == (4, 3)


def test_of_one_row_a_view_does_not_tell_where_the_others_are(mesh):
    x = lying(mesh, (2, 4), {"tp": Shard(0)})

    def flat(x):
        return x.reshape(1, -1).sum(0)
    refused(lambda: local_map(flat, {"tp": P}, check=True)(x), "said to be Partial", line_of(flat, "sum"))
    assert local_map(lambda x: x.sum(0), {"tp": P}, check=True)(x).shape == (4,)


def test_a_sum_over_another_axis(mesh):
    x, w = lying(mesh, (4, 8), {"tp": Shard(1)}), lying(mesh, (8, 3), {"tp": Shard(0)})

    def over(axis, x, w):
        return all_reduce(x @ w, axis)
    refused(lambda: local_map(lambda x, w: over("dp", x, w), {}, check=True)(x, w), "'all_reduce'", line_of(over, "@"))
    assert local_map(lambda x, w: over("tp", x, w), {}, check=True)(x, w).shape == (4, 3)


# -- what a check is -----------------------------------------------------------------------------------------------------
def test_a_function_is_checked_once_for_its_layouts_and_not_at_all_when_off(mesh, monkeypatch):
    asked, made, right, new = [], [], spmd.results, typed.Typed.__new__
    monkeypatch.setattr(spmd, "results", lambda *a: (asked.append(1), right(*a))[1])
    monkeypatch.setattr(typed.Typed, "__new__", staticmethod(lambda *a: (made.append(1), new(*a))[1]))
    x = lying(mesh, (8, 4), {"tp": Shard(0)})
    double = lambda x: x * 2 + x  # noqa: E731
    plain, checked = local_map(double, {"tp": Shard(0)}), local_map(double, {"tp": Shard(0)}, check=True)
    plain(x)
    assert not asked and not made
    checked(x)
    assert len(asked) == 2 * 2 and made  # two ops on two axes
    asked.clear(), made.clear()
    checked(x), checked(x)
    assert not asked and not made
    checked(lying(mesh, (8, 4), {"dp": Shard(1), "tp": Shard(0)}).redistribute(placements={"tp": Shard(0)}))
    assert not asked
    with checks(rules=False, types=True):
        plain(x), plain(x)
    assert len(asked) == 2 * 2
    asked.clear()
    plain(lying(mesh, (8, 4), {"dp": Shard(1), "tp": Shard(0)}))  # the block has ended, and these are new
    assert not asked
    with pytest.raises(OpRuleError):
        local_map(lambda x: x.exp(), {}, check=True)(x)
    assert not check.watched.__wrapped__ or not typed.account.get()


def test_a_checked_call_has_the_bits_of_an_unchecked_one(mesh):
    x = lying(mesh, (4, 3), {})

    def written(x):
        y = x * 1
        y[[0, 2]] = 5.0
        y[1:, [0, 2]] = x[1:, :2] * 3
        y[3] = x[0]
        y += 1
        y.mul_(2)
        y.copy_(y * 2)
        return y
    plain = local_map(written, {})
    for run in (lambda f: f(x), lambda f: md.grad(lambda t: (f(t) * t).sum())(x)):
        want = run(plain).to_local().asnumpy()
        got = run(local_map(written, {}, check=True)).to_local().asnumpy()
        assert np.array_equal(got, want) and not np.array_equal(want, x.to_local().asnumpy())


def test_a_refused_function_is_refused_again(mesh):
    x = lying(mesh, (8, 4), {"tp": P})
    wrong = local_map(lambda x: x.exp(), {"tp": P}, check=True)
    for _ in range(2):
        refused(lambda: wrong(x), "'exp'")


def test_numbers_of_python_are_those_of_all_ranks(mesh):
    x, s = lying(mesh, (8, 4), {"tp": Shard(0)}), lying(mesh, (8, 4), {})

    def scaled(x):
        return x / float(x.max())
    refused(lambda: local_map(scaled, {"tp": Shard(0)}, check=True)(x), "float()", line_of(scaled, "float"))
    for read in (lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: int(x.sum())):
        refused(lambda read=read: local_map(lambda x: x * read(x), {"tp": Shard(0)}, check=True)(x), "each rank's own")
        assert local_map(lambda x, read=read: x * read(x), {}, check=True)(s).shape == (8, 4)


def test_what_python_has_read_may_be_among_the_arguments_of_any_op(mesh):
    x, w, s = lying(mesh, (8, 4), {"tp": Shard(0)}), lying(mesh, (4,), {}), lying(mesh, (4,), {"tp": P})

    def sorted_rows(x):
        order = Tensor(np.argsort(x.asnumpy(), 0).astype(np.int32))
        return mint.gather(x, 0, order) * 2
    both = {"dp": Shard(1), "tp": Shard(0)}
    assert local_map(sorted_rows, both, check=True)(lying(mesh, (8, 4), both)).shape == (8, 4)

    def largest(x, w):
        top = float(x.asnumpy().max())
        return w * top
    refused(lambda: local_map(lambda x, w: largest(x, convert(w, "tp", "I")), {}, check=True)(x, w), "Python has read",
            line_of(largest, "w * top"))
    refused(lambda: local_map(largest, {"tp": P}, check=True)(x, s), "Python has read")
    refused(lambda: local_map(lambda x, w: convert(largest(x, w), "tp", "I"), {}, check=True)(x, w), "'convert'")


def test_tensors_from_elsewhere_are_each_ranks_own(mesh):
    x, mask = lying(mesh, (8, 4), {}), Tensor(np.ones((8, 4), np.float32))
    refused(lambda: local_map(lambda x: x * mask, {}, check=True)(x), "a plain tensor that came from outside")
    believed = local_map(lambda x: x * reinterpret(reinterpret(mask, "tp", "R"), "dp", "R"), {}, check=True)
    assert believed(x).shape == (8, 4)
    assert local_map(lambda x: x + mint.ones((8, 4)), {}, check=True)(x).shape == (8, 4)
    cut = lying(mesh, (8, 4), {"dp": Shard(0), "tp": Shard(1)})
    assert local_map(lambda x: x * mask[:4, :2], {"dp": Shard(0), "tp": Shard(1)}, check=True)(cut).shape == (8, 4)


def test_what_is_written_keeps_its_type(mesh):
    x, w = lying(mesh, (8, 4), {"tp": Shard(0)}), lying(mesh, (8, 4), {"tp": P})

    def write(x, w):
        w[0] = x[0]
        return w
    refused(lambda: local_map(write, {"tp": P}, check=True)(x, w), "write", line_of(write, "x[0]"))


def test_a_groups_collectives_have_types_and_no_gradient(mesh):
    x, group = lying(mesh, (8, 4), {"tp": Shard(0)}), mesh.get_group("tp")

    def top(x):
        return group.all_reduce(x.max(), "max")
    refused(lambda: local_map(lambda x: x - top(x), {"tp": Shard(0)}, check=True)(x), "with a gradient",
            line_of(top, "group"))
    shifted = local_map(lambda x: x - top(ops.stop_gradient(x)), {"tp": Shard(0)}, check=True)
    assert shifted(x).shape == (8, 4)
    counts = local_map(lambda x: group.all_reduce((x > 1).astype(ms.int32).sum()), {}, check=True)
    assert counts(x).shape == ()
    joined = local_map(lambda x: group.all_gather(ops.stop_gradient(x), 0, [4, 4]), {}, check=True)
    assert joined(x).shape == (8, 4)
    pieces = local_map(lambda x: group.all_reduce(ops.stop_gradient(x)), {"tp": Shard(0)}, check=True)
    refused(lambda: pieces(x), "said to be Shard(0)", "is replicated")
    twice = local_map(lambda x: group.all_reduce(group.all_reduce(ops.stop_gradient(x))), {}, check=True)
    refused(lambda: twice(x), "Every rank has the whole already")
    wait = local_map(lambda x: group.all_reduce(ops.stop_gradient(x), async_op=True).wait(), {}, check=True)
    assert wait(x).shape == (4, 4)
    refused(lambda: local_map(lambda x: md.init_device_mesh("cpu", (4,)).get_group().all_reduce(ops.stop_gradient(x)),
                              {"tp": Shard(0), "dp": P}, check=True)(x), "Every rank has the whole already")


def test_random_numbers_are_each_ranks_own(mesh):
    x = lying(mesh, (8, 4), {})
    drop = lambda x: mint.nn.functional.dropout(x, 0.5, True)  # noqa: E731
    refused(lambda: local_map(drop, {}, check=True)(x), "draws numbers of its own")
    assert local_map(lambda x: mint.nn.functional.dropout(x, 0.5, False), {}, check=True)(x).shape == (8, 4)


# -- functions with a gradient of their own ------------------------------------------------------------------------------
class Scaled(DFunction):
    """x * 2, with a kernel that no rule knows."""

    types = (("P", "->", "P"), ("V", "->", "V"))

    @staticmethod
    def forward(ctx, x):
        return Tensor.from_numpy(x.asnumpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Unknown(Scaled):
    types = None


class Squares(DFunction):
    in_placements = ({"tp": Shard(0)},)
    out_placements = {"tp": Partial()}
    out_shapes = ((),)

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Logs(Squares):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).sum().log()


def test_a_function_names_its_types_or_shows_them(mesh):
    x, s = (lying(mesh, (8, 4), {"tp": p}) for p in (Shard(0), P))
    everywhere = {"dp": Shard(0), "tp": P}
    both = local_map(lambda x: Scaled.apply(x), everywhere, check=True)(lying(mesh, (8, 4), everywhere))
    assert both.placements == (Shard(0), P)
    refused(lambda: local_map(lambda x: Scaled.apply(x), {}, check=True)(lying(mesh, (8, 4), {})),
            "Its types are P -> P or V -> V")
    refused(lambda: local_map(lambda x: Unknown.apply(x), {"tp": P}, check=True)(s), "asnumpy()")
    with checks(rules=False, types=True):
        assert Squares.apply(x).shape == ()
        refused(lambda: Logs.apply(x), "no summand since 'log'", line_of(Logs.forward, "log()"))
    with pytest.raises(OpRuleError, match="no signature"):
        Scaled.types, kept = ("V", "V"), Scaled.types
        try:
            local_map(lambda x: Scaled.apply(x), {"tp": Shard(0)}, check=True)(x)
        finally:
            Scaled.types = kept


class Doubled(Scaled):
    _op_name = "doubled_in_a_test"
    types = None


def test_a_rule_that_a_user_registers_is_read(mesh):
    x, s = lying(mesh, (8, 4), {"tp": Shard(0)}), lying(mesh, (8, 4), {"tp": P})
    run = local_map(lambda x: Doubled.apply(x), {"tp": P}, check=True)
    with md.register_rule("doubled_in_a_test", "S(0) -> S(0)\nP -> P", shapes="m n -> m n"):
        assert run(s).placements[1] == P
        assert local_map(lambda x: Doubled.apply(x), {"tp": Shard(0)}, check=True)(x).shape == (8, 4)
    with md.register_rule("doubled_in_a_test", "S(0) -> S(0)", shapes="m n -> m n"):
        refused(lambda: local_map(lambda x: Doubled.apply(x), {"tp": P}, check=True)(s), "'Doubled'", "of a sum is not")


def test_compiled_functions_and_mindspores_own_nodes_are_followed(mesh):
    x = lying(mesh, (8, 4), {"tp": P})
    refused(lambda: local_map(ms.jit(lambda x: x.exp()), {"tp": P}, check=True)(x), "'exp'")

    class Node(md.internals.names.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2
    refused(lambda: local_map(lambda x: Node.apply(x), {"tp": P}, check=True)(x), "'Node'", "give `types=`")


# -- moves ---------------------------------------------------------------------------------------------------------------
def test_moves_that_are_none(mesh):
    x, s, v = lying(mesh, (8, 4), {}), lying(mesh, (8, 4), {"tp": P}), lying(mesh, (8, 4), {"tp": Shard(0)})
    for wrong, on in ((lambda t: all_reduce(t, "tp"), x), (lambda t: all_gather(t, "tp"), s),
                      (lambda t: all_gather(t, "tp"), x),
                      (lambda t: all_to_all(t, "tp", 1, 0), s), (lambda t: convert(t, "tp", "R"), s),
                      (lambda t: convert(t, "tp", "P"), v), (lambda t: convert(t, "tp", "V"), v),
                      (lambda t: reduce_scatter(t, "tp"), x)):
        refused(lambda wrong=wrong, on=on: local_map(wrong, {}, check=True)(on), "at " + __file__)
    with pytest.raises(ConfigError, match="It is one of R, I"):
        local_map(lambda t: all_reduce(t, "tp", to="V"), {})(v)
    with pytest.raises(ConfigError, match="no local function is running"):
        all_reduce(Tensor([1.0]), "tp")
    with pytest.raises(ValueError, match="no axis 'pp'"):
        local_map(lambda t: all_reduce(t, "pp"), {})(v)
    with pytest.raises(LayoutError, match="gradient"):
        local_map(lambda t: t, {"tp": Shard(0)}, ({"tp": Shard(0)},), in_grad_placements=({},), check=True)(v)


@pytest.mark.parametrize("check", (False, True))
def test_moves_of_dims_that_are_none_send_nothing(mesh, check, monkeypatch):
    monkeypatch.setattr(comm.Group, "_collective", lambda *_: pytest.fail("something was sent"))
    v = lying(mesh, (8, 4), {"tp": Shard(0)})
    for dim in (5, -3, "0", None, 1.0, True):
        for move in (lambda t, d=dim: all_gather(t, "tp", d), lambda t, d=dim: reduce_scatter(t, "tp", d),
                     lambda t, d=dim: all_to_all(t, "tp", d, 0), lambda t, d=dim: all_to_all(t, "tp", 1, d),
                     lambda t, d=dim: convert(t.sum(), "tp", "V", d)):
            with pytest.raises(ConfigError) as caught:
                local_map(move, {"tp": Shard(0)}, check=check)(v)
            assert f"is {dim!r}" in caught.value.attempt and caught.value.operands and caught.value.rule and caught.value.fix
    for move in (lambda t: reduce_scatter(t[:, :3], "tp", 1), lambda t: all_to_all(t[:3], "tp", 0, 1)):
        with pytest.raises(ConfigError, match="of 3 is not divided by 2 ranks"):
            local_map(move, {"tp": Shard(0)}, check=check)(v)
