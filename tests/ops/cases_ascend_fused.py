# SPDX-License-Identifier: Apache-2.0
"""Real ranks: Ascend's fused ops however they are cut: a Mixtral-like block against dense products, attention, also what it drops."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops import auto_generate as ag

from ms_dtensor import distribute_tensor, manual_seed, value_and_grad
from ms_dtensor.errors import ConfigError
from tests.cases import case
from tests.coverage.references import TRIANGLE
from tests.operands import P, R, S, data, mesh_1d, mesh_2d
from tests.support import TOLD, array, counted, equal, refusal

TOKENS, HIDDEN, EXPERTS, WIDTH, K = 6, 4, 5, 7, 2


def routed(x, gate, up, down):
    """Each token through its k experts, by sorting tokens."""
    probs, chosen, _ = ag.moe_gating_top_k_softmax_op(mint.matmul(x, gate), None, K)
    rows, where = ops.moe_token_permute(x, chosen)
    sizes = mint.nn.functional.one_hot(chosen.astype(ms.int64), EXPERTS).sum((0, 1))

    def experts(t, w):
        return ag.grouped_matmul_v4([t], [w], group_list=sizes, split_item=3, group_type=0, group_list_type=1)[0]
    return ops.moe_token_unpermute(experts(mint.nn.functional.silu(experts(rows, up)), down), where, probs)


def dense(x, gate, up, down):
    """Each token through all experts, most of them weighted with 0."""
    probs = mint.softmax(mint.matmul(x, gate), -1)
    least = np.sort(ops.stop_gradient(probs).asnumpy(), -1)[:, -K:-K + 1]
    probs = probs * (probs >= ms.Tensor(least)).astype(ms.float32)
    return sum(probs[:, e:e + 1] * mint.matmul(mint.nn.functional.silu(mint.matmul(x, up[e])), down[e])
               for e in range(EXPERTS))


def experts_cut_over_tp_equal_dense_products(world):
    values = data(1, TOKENS, HIDDEN), data(2, HIDDEN, EXPERTS), data(3, EXPERTS, HIDDEN, WIDTH), data(4, EXPERTS, WIDTH, HIDDEN)
    wanted, grads = ms.value_and_grad(lambda *v: (dense(*v) ** 2).sum(), (0, 1, 2, 3))(*values)
    for mesh, tp in ((mesh_1d(), lambda p: [p]), (mesh_2d(), lambda p: [R, p])):
        inputs = [distribute_tensor(v, mesh, tp(p), src_data_rank=None) for v, p in zip(values, (R, R, S(2), S(1)))]
        with counted({}):
            out = routed(*inputs)
        assert out.placements == tuple(tp(P)), out
        equal(out, dense(*values))
        with counted() as count:
            loss, got = value_and_grad(lambda *v: (routed(*v) ** 2).sum(), (0, 1, 2, 3))(*inputs)
        equal(loss, wanted)
        equal(got, grads, "gradient")
        assert sum(n for (_, phase), n in count.items() if phase == "forward") == 1, count
        assert count["all_reduce", "backward"] == 2, f"the rows' and the weights': {count}"


def gating_of_cut_tokens_counts_all_of_them(world, line):
    x = data(1, 6, EXPERTS)  # 2, 2, 2 and no rows
    whole = distribute_tensor(x, line, [R], src_data_rank=None)
    cut = distribute_tensor(x, line, [S(0)], src_data_rank=None)
    with counted({}):
        parts = ag.moe_gating_top_k_softmax_op(cut, None, K)
    for part, want in zip(parts, ag.moe_gating_top_k_softmax_op(whole, None, K)):
        assert part.placements == (S(0),)
        equal(part, want)


def summands_of_experts_join_the_residual_on_one_rank(world, line):
    rows, x1, bias, scales = data(1, 12, 3), data(2, 6, 3), data(3, EXPERTS, 3), data(4, 6, 2)
    index = ms.Tensor([3, 0, 11, 7, 1, 4, 8, 2, 6, 5, 10, 9], ms.int32)
    chosen = ms.Tensor([[0, 1], [4, 2], [3, 0], [1, 0], [2, 4], [0, 3]], ms.int32)

    def merged(r, x, b, s):
        i, c = (distribute_tensor(t, line, [R], src_data_rank=None) for t in (index, chosen))
        return ag.moe_finalize_routing(r, x, None, b, s, i, c)

    def plain(r, x, b, s):
        return sum(s[:, j:j + 1] * (r[index[6 * j:6 * j + 6]] + b[chosen[:, j]]) for j in range(2)) + x
    inputs = [distribute_tensor(v, line, [R], src_data_rank=None) for v in (x1, bias, scales)]
    w = data(9, 12, 7)
    left = distribute_tensor(w, line, [S(1)], src_data_rank=None)  # a product summed over ranks
    right = distribute_tensor(data(8, 7, 3), line, [S(0)], src_data_rank=None)
    wanted, grads = ms.value_and_grad(
        lambda a, *v: (plain(mint.matmul(a, data(8, 7, 3)), *v) ** 2).sum(), (0, 1, 2, 3))(w, x1, bias, scales)
    with counted({}):
        assert merged(mint.matmul(left, right), *inputs).placements == (P,)
    with counted() as count:
        got, got_grads = value_and_grad(lambda a, *v: (merged(mint.matmul(a, right), *v) ** 2).sum(), (0, 1, 2, 3))(left, *inputs)
    equal(got, wanted)
    equal(got_grads, grads, "gradient")
    assert sum(n for (_, phase), n in count.items() if phase == "forward") == 1, count
    equal(merged(distribute_tensor(rows, line, [S(1)], src_data_rank=None), *inputs), plain(rows, x1, bias, scales))


def labels_say_how_many_classes_there_are(world):
    labels, w = np.array([1, 0, 6, 2, 1]), data(2, 7, 3)  # 2, 2, 1 and none; the largest is one rank's
    want = np.eye(7)[labels]

    def loss(w, ids):
        return (mint.matmul(mint.nn.functional.one_hot(ids).astype(ms.float32), w) ** 2).sum()
    value = ((want @ w.asnumpy()) ** 2).sum()
    grad = 2 * want.T @ (want @ w.asnumpy())
    for mesh, placed, traffic in ((mesh_1d(), [S(0)], 1), (mesh_1d(), [R], 0), (mesh_2d(), [R, S(0)], 1)):
        ids = distribute_tensor(ms.Tensor(labels), mesh, placed, src_data_rank=None)
        with counted() as count:
            hot = mint.nn.functional.one_hot(ids, -1)
        assert hot.shape == (5, 7) and list(hot.placements) == placed and sum(count.values()) == traffic, (hot, count)
        assert np.array_equal(hot.full_tensor().asnumpy(), want)
        got = value_and_grad(loss, 0)(distribute_tensor(w, mesh, [R] * mesh.ndim, src_data_rank=None), ids)
        equal(got[0], ms.Tensor(value, ms.float32))
        equal(got[1], ms.Tensor(grad, ms.float32))
    labels[2] = 3  # the same call, other data
    hot = mint.nn.functional.one_hot(distribute_tensor(ms.Tensor(labels), mesh_1d(), [S(0)], src_data_rank=None), -1)
    assert np.array_equal(hot.full_tensor().asnumpy(), np.eye(4)[labels])


FORMS = {  # layout -> the shapes of queries and keys, and which dims are cut
    "BSND": ((4, 3, 4, 2), (4, 8, 2, 2), (0, 2)), "BNSD": ((4, 4, 3, 2), (4, 2, 8, 2), (0, 1)),
    "BSH": ((4, 3, 8), (4, 8, 4), (0, 2)), "SBH": ((3, 4, 8), (8, 4, 4), (1, 2)), "TND": ((6, 4, 2), (8, 2, 2), (0, 1)),
}
ENDS = {"actual_seq_qlen": (2, 3, 6), "actual_seq_kvlen": (3, 4, 8)}


def attention(form, q, k, v, **named):
    if form == "TND":
        named |= ENDS
    else:
        named["keep_prob"] = 0.7
    if form != "BNSD":
        named |= {"sparse_mode": 3, "attn_mask": Tensor(TRIANGLE)}
    return (ops.flash_attention_score(q, k, v, 4, input_layout=form, scalar_value=0.5, **named) ** 2).mean()


@case(world_size=2)
def every_cut_gives_what_the_whole_gives(world):
    mesh = mesh_1d(2)
    for form, (queries, keys, cuts) in FORMS.items():
        xs = [data(i, *shape) for i, shape in enumerate((queries, keys, keys))]
        answers = []
        for placement in (R, *map(S, cuts)):
            manual_seed(5)
            inputs = [distribute_tensor(x, mesh, [placement]) for x in xs]
            with counted() as count:
                value, grads = value_and_grad(lambda *t, form=form: attention(form, *t), (0, 1, 2))(*inputs)
            answers.append([array(value), *map(array, grads)])
            assert sum(n for what, n in count.items() if what != TOLD) <= 1, (form, placement, count)  # the mean's own
        for placement, answer in zip(cuts, answers[1:]):
            equal(answer, answers[0], f"{form} cut on {placement}")


@case(world_size=2)
def ranks_with_other_seeds_are_refused_together(world):
    mesh = mesh_1d(2)
    xs = [distribute_tensor(data(i, 2, 4, 8, 2), mesh, [S(1)]) for i in range(3)]
    manual_seed(world.rank)
    assert "different places of the random stream" in refusal(lambda: ops.flash_attention_score(*xs, 4, keep_prob=0.5, input_layout="BNSD"), ConfigError)
    manual_seed(0)
