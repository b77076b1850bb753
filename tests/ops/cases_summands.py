# SPDX-License-Identifier: Apache-2.0
"""Products and sums of what is still to be added up: their results and gradients are one device's, reduced once."""
import mindspore as ms
from mindspore import mint

from ms_dtensor import DTensor
from tests.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import check_against_one_device, counted, equal


def a_partial_used_three_times_is_reduced_once(world, line):
    """Peer: three all-reduces, no memo."""

    def three(t):
        p = (t * 2).sum(0)
        return (mint.exp(p) + mint.sin(p) * mint.cos(p)).sum()
    count = check_against_one_device(three, [data(17, 8, 4)], [[S(0)]], line)
    assert sum(n for (_, phase), n in count.items() if phase == "forward") == 1, count


def whole(x):
    """The sum of the summands, made here and nowhere else; a plain tensor as it is."""
    return x.reduce_partial() if isinstance(x, DTensor) else x


def lora_under_row_parallel_weights_is_one_all_reduce(world):
    """x W^T + (x A^T) B^T: what A gives is a summand, and so is what B makes of it."""
    x, w, a, b = data(1, 6, 8), data(2, 5, 8), data(3, 3, 8), data(4, 5, 3)

    def lora(x, w, a, b):
        return (whole(mint.matmul(x, w.t()) + 2.0 * mint.matmul(mint.matmul(x, a.t()), b.t())) ** 3).mean()
    for mesh, extra in ((mesh_1d(), []), (mesh_2d(), [S(0)])):
        rest = [R] * len(extra)
        layouts = [[*extra, S(1)], [*rest, S(1)], [*rest, S(1)], [*rest, R]]
        count = check_against_one_device(lora, [x, w, a, b], layouts, mesh, f"lora on {mesh}")
        assert {k: n for k, n in count.items() if k[1] == "forward"} == {("all_reduce", "forward"): 1}, count
    inputs = [placed(v, mesh, *p) for v, p in zip((x, w, a, b), layouts, strict=True)]
    with counted({}):
        mid = mint.matmul(inputs[0], inputs[2].t())
        out = mint.matmul(mid, inputs[3].t())
    assert mid.placements == out.placements == (S(0), P)


def a_chain_of_products_keeps_the_summand(world, line):
    x, ws = data(1, 4, 8), [data(2, 8, 8), data(3, 8, 6), data(4, 6, 5)]

    def chain(x, *ws):
        for w in ws:
            x = mint.matmul(x, w)
        return (whole(x) ** 2).mean()
    layouts = [[S(1)], [S(0)], [R], [R]]
    count = check_against_one_device(chain, [x, *ws], layouts, mesh_1d(), "chain")
    assert {k: n for k, n in count.items() if k[1] == "forward"} == {("all_reduce", "forward"): 1}, count
    p = DTensor.from_local(x, line, [P])  # every rank's summand is x
    with counted({}):
        out = mint.matmul(mint.matmul(p, placed(ws[0], line, R)), placed(ws[1], line, R))
    assert out.placements == (P,)
    equal(out, 4 * mint.matmul(mint.matmul(x, ws[0]), ws[1]))
    both = DTensor.from_local(x.t(), line, [P])
    equal(mint.matmul(p, both), 16 * mint.matmul(x, x.t()))  # not the sum of the summands' products, 4 of them


def losses_of_micro_steps_add_up(world):
    """At every step the sum is a DTensor of the same layout, and its gradient is that of the sum."""
    xs, w = [data(i, 8, 6) for i in range(5)], data(9, 6, 4)

    def total(w, *xs):
        loss = 0.0
        for x in xs:
            micro = (mint.matmul(x, w) ** 2).mean()
            loss += micro
            if isinstance(w, DTensor):
                assert isinstance(loss, DTensor) and loss.shape == (), type(loss)
        return loss / len(xs)
    for mesh, x_lies, w_lies in ((mesh_1d(), [R], [S(1)]), (mesh_1d(), [S(0)], [R]), (mesh_2d(), [S(0), R], [R, S(1)])):
        check_against_one_device(total, [w, *xs], [w_lies, *[x_lies] * 5], mesh, str(x_lies))
        parts = [placed(t, mesh, *p) for t, p in ((w, w_lies), *((x, x_lies) for x in xs))]
        with counted() as five:
            ms.value_and_grad(total)(*parts)
        with counted() as one:
            ms.value_and_grad(total)(*parts[:2])
        forward = five["all_reduce", "forward"], one["all_reduce", "forward"]
        assert forward[0] <= 5 * forward[1], (five, one)
        equal(total(*parts), total(w, *xs))
