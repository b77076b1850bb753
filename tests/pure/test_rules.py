# SPDX-License-Identifier: Apache-2.0
"""Rules as data: cases in single-axis notation, and the choice among them, no tensors; every local form of one is there."""
import re
from pathlib import Path

import numpy as np
import pytest

import ms_dtensor.ops.rules
from ms_dtensor.core.layout import Layout
from ms_dtensor.core.mesh import DeviceMesh
from ms_dtensor.core.placements import Partial, Replicate, Shard
from ms_dtensor.errors import OpRuleError
from ms_dtensor.ops.local import LOCAL_OPS
from ms_dtensor.ops.rules import RULES, Call, Operand
from ms_dtensor.ops.rules.nothing import empty_results
from ms_dtensor.ops.rules.select import choose
from ms_dtensor.ops.rules.spec import Local, result_dtype
from ms_dtensor.ops.rules.view import groups, infer_shape
from ms_dtensor.redistribute.cost import CostModel, set_costs

R, P, S = Replicate(), Partial(), Shard
MESH = DeviceMesh("cpu", np.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))


def call(op, *shapes, names=("input", "other"), **static):
    operands = tuple(Operand(i, s, "float32") for i, s in enumerate(shapes))
    return Call(op, {**dict(zip(names, operands)), **static}, operands)


def cases(c):
    return {repr(case) for case in RULES[c.op](c).cases}


def test_matmul_has_exactly_the_cases_of_its_algebra():
    got = {c for c in cases(call("matmul", (4, 6), (6, 8))) if "avg" not in c}
    assert got == {"S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)",
                   "R, P(sum) -> P(sum)"}


def test_broadcast_dims_are_never_sharded():
    assert "S(0), R -> S(0)" in cases(call("add", (4, 6), (1, 6)))
    assert "S(1), S(1) -> S(1)" in cases(call("add", (4, 6), (1, 6)))


def test_only_linear_ops_see_partials():
    assert "P(sum), P(sum) -> P(sum)" in cases(call("add", (4,), (4,)))
    assert "P(sum), R -> P(sum)" in cases(call("add", (4,), (4,)))  # one rank adds what is whole
    assert "P(avg), R -> P(avg)" not in cases(call("add", (4,), (4,)))
    assert {"P(sum), R -> P(sum)", "R, P(sum) -> P(sum)"} <= cases(call("mul", (4,), (4,)))
    assert "P(sum), P(sum) -> P(sum)" not in cases(call("mul", (4,), (4,)))
    assert not any("P" in c for c in cases(call("exp", (4,), names=("input",))))
    assert not any("P" in c for c in cases(call("add", (4,), names=("input",), other=1.0)))


@pytest.mark.parametrize("shape, wanted, expected", [((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
                                                     ((6, 4), (2, 3, 4), [([0], [0, 1]), ([1], [2])]),
                                                     ((4, 3), (3, 4), [([0, 1], [0, 1])])])
def test_reshape_groups(shape, wanted, expected):
    assert groups(shape, wanted) == expected


def test_a_histogram_whose_counts_may_not_fit_its_dtype_is_refused():
    """600 ones of uint8 were 88 of them, and counts of booleans booleans."""
    def counted(n, dtype):
        x = Operand(0, (n,), dtype)
        return RULES["histogram"](Call("histogram", {"input": x, "bins": 2, "low": 0, "high": 1}, (x,)))

    for n, dtype in ((1, "bool"), (128, "int8"), (256, "uint8"), (2 ** 15, "int16")):
        with pytest.raises(OpRuleError, match=f"{n} elements may be too large for {dtype}"):
            counted(n, dtype)
    for n, dtype in ((127, "int8"), (255, "uint8"), (2 ** 15, "int32"), (2 ** 20, "float32")):
        assert [repr(c) for c in counted(n, dtype).cases] == ["S(0) -> P(sum)"]


def test_views_need_even_shards():
    c = call("reshape", (2, 5, 12), names=("input",), shape=(2, 5, 4, 3))
    spec = RULES["reshape"](c)
    x = Layout(MESH, [S(0), S(2)], (2, 5, 12))
    assert choose(c, spec, (x,)).targets[0] is x
    odd = call("reshape", (2, 5, 9), names=("input",), shape=(2, 5, 3, 3))
    x = Layout(MESH, [S(0), S(2)], (2, 5, 9))
    assert choose(odd, RULES["reshape"](odd), (x,)).targets[0].dim_axes[2] == ()


@pytest.mark.parametrize("shape, cut, no_gather, left", [
    ((1, 6, 8), 0, False, S(0)), ((6, 1, 8), 1, False, S(0)),  # the tokens are cut in its place: least to move
    ((1, 6, 8), 0, True, R), ((6, 1, 8), 1, True, R), ((2, 6, 8), 0, True, S(0))])
def test_a_batch_of_one_row_cuts_no_other_dim_where_none_may_be_gathered(shape, cut, no_gather, left):
    c = call("reshape", shape, names=("input",), shape=(shape[0] * shape[1], 8))
    x = Layout(MESH, [S(cut), R], shape)
    assert choose(c, RULES["reshape"](c), (x,), no_gather=no_gather).outs[0].placements == (left, R)


def test_a_shape_that_does_not_fit_is_explained():
    with pytest.raises(OpRuleError, match="It has 6 elements, the new shape 8"):
        infer_shape((2, 3), (2, 4))


def test_faces_are_read_off_the_case():
    c = call("matmul", (8, 6), (6, 8))
    x, w = Layout(MESH, [S(0), R], (8, 6)), Layout(MESH, [R, S(1)], (6, 8))
    choice = choose(c, RULES["matmul"](c), (x, w))
    assert choice.targets == (x, w)
    assert choice.own == ((1,), (0,))  # x's rows meet other columns on tp; w's columns meet other rows on dp


def test_cheapest_side_moves():
    c = call("add", (512, 512), (512, 512))
    big, cut = Layout(MESH, [S(0), R], (512, 512)), Layout(MESH, [R, R], (512, 512))
    assert choose(c, RULES["add"](c), (big, cut)).targets == (big, big)  # cutting a replica is free


def test_orders_of_axes_are_kept():
    turned = Layout(MESH, (("tp", "dp"), "None"), (8, 6))
    c = call("exp", (8, 6), names=("input",))
    placements, order, shape = choose(c, RULES["exp"](c), (turned,)).outs[0]
    assert Layout(MESH, placements, shape, "float32", order) is turned


def test_empty_shards_give_neutral_elements():
    mesh = DeviceMesh("cpu", np.arange(4))
    x, out = Layout(mesh, [S(0)], (3, 2)), Layout(mesh, [Partial("max")], (2,))
    assert empty_results(Local((x,), (out,), (3,))) == (((2,), float("-inf")),)
    assert empty_results(Local((x,), (out,), (0,))) is None


def test_result_dtypes():
    mixed = Call("add", {}, (Operand(0, (2,), "int32"), Operand(1, (2,), "float16")))
    assert result_dtype(mixed) == "float16"


def test_the_choice_follows_the_costs_in_force():
    """A large operand in one collective, or two small ones in two."""
    mesh = DeviceMesh("cpu", np.arange(4))
    c = call("addmm", (4, 1024), (4, 64), (64, 1024), names=("input", "mat1", "mat2"))
    placed = [Layout(mesh, [p], o.shape) for p, o in zip((S(0), S(0), S(1)), c.operands)]
    moved = []
    for alpha in (1, 0):
        set_costs({"cpu": CostModel(alpha=alpha)})
        targets = choose(c, RULES["addmm"](c), tuple(placed)).targets
        moved.append([x is not y for x, y in zip(placed, targets)])
    set_costs(None)
    assert moved == [[False, False, True], [True, True, False]]


# -- local forms -------------------------------------------------------------------------------------------------------
def test_every_form_named_by_a_rule_is_in_the_table():
    named = {name for file in Path(ms_dtensor.ops.rules.__file__).parent.glob("*.py")
             for name in re.findall(r'LocalCall\(\s*"(\w+)"', file.read_text())}
    assert len(named) > 20 and named <= set(LOCAL_OPS), named - set(LOCAL_OPS)
