# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's router: the gradient of its auxiliary loss on tensor-parallel ranks, against differences in NumPy."""
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from tests.cases import case
from tests.third_party.cases_mindformers import TOLERANCE, wheel

GROUP = "mindformers"

EXPERTS, CHOSEN, WIDTH, TOKENS, ROWS, SHARE = 4, 2, 8, 6, 3, 0.1


def auxiliary_loss(x: np.ndarray, weight: np.ndarray, by_row: bool) -> float:
    """Of x [TOKENS, ROWS, WIDTH]: of each row, or of all, how often experts are chosen times how likely they were."""
    score = 1 / (1 + np.exp(-x @ weight.T))
    likely = score / score.sum(-1, keepdims=True)
    chosen = np.zeros_like(likely)
    np.put_along_axis(chosen, np.argsort(-likely, -1)[..., :CHOSEN], 1, -1)
    over = 0 if by_row else (0, 1)
    tokens = TOKENS if by_row else TOKENS * ROWS
    total = (likely.sum(over) * chosen.sum(over)).sum() / (ROWS if by_row else 1)
    return SHARE * EXPERTS / (CHOSEN * tokens * tokens) * total


def differences(x: np.ndarray, weight: np.ndarray, by_row: bool, step: float = 1e-6) -> np.ndarray:
    out = np.empty_like(weight)
    for at in np.ndindex(*weight.shape):
        moved = np.zeros_like(weight)
        moved[at] = step
        out[at] = auxiliary_loss(x, weight + moved, by_row) - auxiliary_loss(x, weight - moved, by_row)
    return out / (2 * step)


def router(kind: str, weight: np.ndarray):
    from mindformers.pynative.transformers.moe.router import TopKRouter
    made = TopKRouter(SimpleNamespace(
        hidden_size=WIDTH, num_moe_experts=EXPERTS, moe_router_num_groups=None, moe_router_group_topk=None,
        moe_router_topk=CHOSEN, moe_router_score_function="sigmoid", norm_topk_prob=True, moe_router_topk_scaling_factor=2.5,
        moe_router_force_expert_balance=False, moe_router_dtype=ms.float32, moe_n_hash_layers=0, moe_aux_loss_coeff=SHARE,
        moe_router_load_balancing_type=kind, num_layers=1, mtp_num_layers=None), layer_number=0)
    made.weight.set_data(Tensor(weight, ms.float32))
    return made


def gradient(made, x: np.ndarray) -> Tensor:
    """Of the auxiliary loss alone: the scores themselves are multiplied with nothing."""
    grads = ms.value_and_grad(lambda: (made(Tensor(x, ms.float32))[0] * 0.0).sum(), None, [made.weight])()[1]
    return grads[0]


@case(2)
def the_gradient_of_its_auxiliary_loss_is_one_devices(world):
    """A rank has some tokens of each row, and a share of the loss; what it says of the process stays, and doubles another
    router's gradient."""
    wheel()
    from mindformers.pynative.transformers.moe.moe_utils import _MoEAuxLossAutoScaler, set_moe_aux_loss_group_info
    group = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)).get_group()
    rng = np.random.default_rng(7)
    x, weight = rng.normal(size=(TOKENS, ROWS, WIDTH)), rng.normal(size=(EXPERTS, WIDTH))
    for kind in ("seq_aux_loss", "aux_loss"):
        want = differences(x, weight, kind == "seq_aux_loss")
        assert np.abs(want).max() > 1e-4, want
        both = router(kind, weight)
        both.enable_sequence_parallel(group, 2)
        set_moe_aux_loss_group_info([group], 2)
        _MoEAuxLossAutoScaler.set_loss_scale(Tensor([1 / world.size], ms.float32))
        part = gradient(both, np.split(x, 2)[world.rank])
        got = group.all_reduce(part, "sum").asnumpy()
        assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), (kind, got, want)
        assert np.abs(part.asnumpy() * 2 - want).max() > 1e-2 * np.abs(want).max()  # ranks have parts of it
        _MoEAuxLossAutoScaler.set_loss_scale(Tensor([1.0], ms.float32))
        for size, times in ((2, 2), (1, 1)):
            set_moe_aux_loss_group_info(None, size)
            alone = gradient(router(kind, weight), x).asnumpy()
            assert np.abs(alone - times * want).max() <= times * TOLERANCE * np.abs(want).max(), (kind, size)
