# SPDX-License-Identifier: Apache-2.0
"""Real ranks: fused attention equals one device however it is cut, also in what it drops; nothing is communicated for it."""
from __future__ import annotations

from mindspore import Tensor, ops

from ms_dtensor import distribute_tensor, manual_seed, value_and_grad
from ms_dtensor.errors import ConfigError
from tests.cases import case
from tests.coverage.references_attention import TRIANGLE
from tests.dist.operands import R, S, data, mesh_1d
from tests.dist.support import TOLD, array, counted, equal, refusal

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
