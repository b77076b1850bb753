# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's own `save_checkpoint` and `load_checkpoint`, every rank its pieces: from one mesh to another.

Its context parallelism: Qwen3, its styles and its input hook, sequences of 2,048 tokens, where its compressed mask begins,
which that parallelism wants. The gradient of its router's auxiliary loss, against differences in NumPy.
"""
import tempfile
from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import comm
from tests.cases import case
from tests.support import counted
from tests.third_party.cases_mindformers import STEPS, TOLERANCE, Job, one_device, wheel

GROUP = "mindformers"

HALF = STEPS // 2


def save(world, job: Job, **options) -> str:
    """As its CheckpointCallback saves: files of a folder that all ranks reach."""
    from mindformers.checkpoint import save_checkpoint
    from mindformers.checkpoint.checkpoint import CommonInfo
    from mindformers.checkpoint.sharded_tensor import get_all_sharded_tensor_on_rank0
    from mindformers.checkpoint.utils import gather_param_names_on_rank0
    folder = comm.group(tuple(range(world.size))).all_gather_object(tempfile.mkdtemp())[0]
    common = CommonInfo()
    common.global_step = HALF
    save_checkpoint(HALF, job.net, job.optimizer, common_info=common, user_prefix="tiny", save_checkpoint_path=folder,
                    sharded_tensor_metas=get_all_sharded_tensor_on_rank0(network=[job.net, job.optimizer]),
                    global_model_keys=gather_param_names_on_rank0(set(job.net.parameters_dict())), **options)
    return folder


def goes_on(world, saved: tuple[int, int], *loaded: tuple[int, int], **options) -> None:
    """Half of the steps upon one mesh, the others upon each of the other ones; all as on one device."""
    losses, wanted = one_device()
    from mindformers.checkpoint.checkpoint import load_checkpoint
    job = Job(world, *saved)
    first = [job.step(step) for step in range(HALF)]
    folder = save(world, job, **options)
    for mesh in loaded:
        what, other = f"dp, tp = {saved}, then {mesh}, {options}", Job(world, *mesh)
        other.step(0)  # other weights and moments than those of the files, on all ranks
        load_checkpoint(folder, other.net, other.optimizer)
        assert int(other.optimizer.global_step.asnumpy()) == HALF, what
        for p, q in zip(job.moments(), other.moments(), strict=True):
            assert np.array_equal(p.full_tensor().asnumpy(), q.full_tensor().asnumpy()), (what, p.name)
        got = first + [other.step(step) for step in range(HALF, STEPS)]
        assert np.allclose(got, losses, rtol=TOLERANCE, atol=0), (what, got, losses)
        other.is_one_device(wanted, what)


@case(2, timeout=400)
def its_own_files_go_from_data_to_tensor_parallelism_and_back(world):
    goes_on(world, (2, 1), (1, 2))
    goes_on(world, (1, 2), (2, 1), remove_redundancy=True)


@case(4, timeout=400)
def its_run_goes_on_from_its_own_checkpoint_on_another_mesh(world):
    goes_on(world, (2, 2), (4, 1), (2, 2))


LENGTH, FEW = 2048, 3
LONG = {"seq_length": LENGTH, "max_position_embeddings": LENGTH, "use_attn_mask_compression": True}


def is_one_devices(world, layouts) -> None:
    """Losses and weights of some steps, each rank with its tokens of one sequence."""
    losses, wanted = one_device(FEW, rows=1, **LONG)
    for tp, degree, method, others in layouts:
        what = f"tp={tp} cp={degree} {method}"
        job = Job(world, 1, tp, 1, {"context_parallel": degree, "context_parallel_method": method, **others}, **LONG)
        core = job.net.model.decoder.layers[0].self_attention.core_attention
        assert (core.input_layout, core.sparse_mode) == ("BSH" if method == "colossal" else "BNSD", 2), what
        with counted() as count:
            got = [job.step(step) for step in range(FEW)]
        moved = "all_gather" if method == "colossal" else "all_to_all"
        assert count[moved, "forward"] >= 2 * 2 * FEW, (what, count)  # keys and values, of two layers
        assert np.allclose(got, losses, rtol=TOLERANCE, atol=0), (what, got, losses)
        job.is_one_device(wanted, what)


@case(2, timeout=400)
def its_context_parallelism_is_one_device_on_two_ranks(world):
    is_one_devices(world, ((1, 2, "colossal", {}), (1, 2, "ulysses", {})))


@case(4, timeout=400)
def its_context_parallelism_is_one_device_on_four_ranks(world):
    is_one_devices(world, ((1, 4, "hybrid", {"ulysses_degree_in_cp": 2}), (2, 2, "colossal", {})))


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
