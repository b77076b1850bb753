# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's Trainer from its YAML, against one device: data set, scheduler, clipping, optimizers, pipelines.

The reference starts with the weights that its `init_states` gave, takes the whole batch on one device, and steps its
optimizer with `value_and_grad`'s gradients, clipped by their whole norm.
"""
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
import yaml
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.compat.backward import enable_mindspore_backward_compat
from ms_dtensor.internals.names import no_grad
from tests.cases import case
from tests.support import counted, equal
from tests.third_party.cases_mindformers import LENGTH, TINY, TOLERANCE, VOCABULARY, loss_of, wheel

GROUP = "mindformers"

STEPS, GLOBAL, LOCAL, NORM = 20, 8, 2, 0.5
ADAMW = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1}
MUON = {"type": "Muon", "weight_decay": 0.1, "adamw_betas": [0.9, 0.95], "adamw_eps": 1e-3, "qk_clip_enabled": False}
QWEN = {"model_type": "qwen3", "architectures": "Qwen3ForCausalLM", **TINY}
# as pretrain_deepseek3_1b_8p_pynative.yaml, smaller, in float32, and of two layers, one of them with experts
DEEPSEEK = dict(
    model_type="deepseek_v3", architectures="DeepseekV3ForCausalLM", vocab_size=VOCABULARY, seq_length=LENGTH,
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64, hidden_act="silu",
    num_attention_heads=4, rms_norm_eps=1e-6, add_bias_linear=False, use_flash_attention=True, multi_latent_attention=True,
    mla_qkv_concat=True, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=8,
    qk_layernorm=True, attention_dropout=0.0, hidden_dropout=0.0, params_dtype="float32", compute_dtype="float32",
    layernorm_compute_dtype="float32", softmax_compute_dtype="float32", rotary_dtype="float32", initializer_range=0.02,
    num_nextn_predict_layers=1, mtp_loss_scaling_factor=0.3, position_embedding_type="yarn", scaling_factor=40, beta_fast=32,
    beta_slow=1, mscale=1, mscale_all_dim=1, rope_theta=10000, router_dense_type="float32", gated_linear_unit=True,
    moe_intermediate_size=24, routed_scaling_factor=2.5, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2,
    n_shared_experts=1, moe_shared_expert_intermediate_size=24, moe_grouped_gemm=True,
    moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.001, scoring_func="sigmoid", norm_topk_prob=True,
    moe_token_drop_policy="probs", moe_router_enable_expert_bias=False, use_pad_tokens=True, topk_group=2, n_group=2)
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]


def rows_of(count: int) -> list[dict]:
    rng = np.random.default_rng(5)
    return [{"input_ids": rng.integers(1, VOCABULARY, LENGTH).astype(np.int32),
             "labels": rng.integers(1, VOCABULARY, LENGTH).astype(np.int32),
             "loss_mask": np.ones(LENGTH, np.float32), "position_ids": np.arange(LENGTH, dtype=np.int32)}
            for _ in range(count)]


def written(folder: Path) -> str:
    """A MindRecord of as many rows as the steps take."""
    from mindspore.mindrecord import FileWriter
    path = str(folder / "rows.mindrecord")
    writer = FileWriter(path, shard_num=1)
    kinds = dict.fromkeys(COLUMNS, "int32") | {"loss_mask": "float32"}
    writer.add_schema({name: {"type": kind, "shape": [LENGTH]} for name, kind in kinds.items()}, "rows")
    writer.write_raw_data(rows_of(STEPS * GLOBAL))
    writer.commit()
    return path


def written_yaml(folder: Path, records: str, model: dict, optimizer: dict, rate: float, **parallelism) -> str:
    """Its configuration file, of the sections that its pretrain_deepseek3_1b_8p_pynative.yaml has."""
    sections = {
        "checkpoint": {"enable_save": False},
        "training": {"steps": STEPS, "local_batch_size": LOCAL, "global_batch_size": GLOBAL, "max_norm": NORM, "seed": 42,
                     "deterministic": False},
        "optimizer": optimizer,
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": rate, "warmup_steps": 4},
        "parallelism": parallelism,
        "train_dataset": {"dataloader": {"type": "MindDataset", "dataset_files": records, "column_names": COLUMNS,
                                         "shuffle": False}, "num_parallel_workers": 1, "drop_remainder": True},
        "model": model}
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(sections), "utf-8")
    return str(path)


def everyone(world, value) -> list:
    return comm.group(tuple(range(world.size))).all_gather_object(value)


def watched():
    """A callback of its kind, which keeps what a run tells."""
    from mindformers.pynative.callback import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self):
            self.losses, self.norms = [], []

        def on_step_end(self, args, state, loss=None, grad_norm=None, **kwargs):
            if loss is not None:  # of a pipeline the last stage has it
                self.losses.append(float(loss.asnumpy()))
            self.norms.append(float(grad_norm.asnumpy()))
    return Watch()


def whole(trainer) -> dict[str, np.ndarray]:
    """Copies of its weights, put together from all ranks."""
    return {name: np.array((p.full_tensor() if isinstance(p, md.DTensor) else p).asnumpy())
            for net in trainer.model for name, p in net.parameters_and_names()}


def batches(world, trainer) -> list[list[np.ndarray]]:
    """Of each step, the rows that its data set gives all ranks, column by column."""
    own = [[row[name].asnumpy() for name in COLUMNS[:2]] for row in
           trainer.train_dataset.create_dict_iterator(output_numpy=False, num_epochs=1)]
    parts = everyone(world, own)[::world.size // trainer.config.parallelism.data_parallel]
    each = trainer.num_accumulation_steps
    steps = [[np.concatenate([part[i][column] for part in parts for i in range(at, at + each)]) for column in range(2)]
             for at in range(0, each * STEPS, each)]
    rows = {row.tobytes() for ids, _ in steps for row in ids}
    assert len(rows) == STEPS * GLOBAL == sum(len(ids) for ids, _ in steps)  # no row is met twice
    return steps


def one_device(config, start: dict, steps: list):
    """Losses, norms and weights of its model and optimizer on one device."""
    from mindformers.pynative.trainer.utils import (
        _build_lr_scheduler,
        _build_model,
        _build_optimizer,
        set_auxiliary_loss_backward_scale,
    )
    from mindformers.pynative.transformers.moe.moe_utils import set_moe_aux_loss_group_info
    set_auxiliary_loss_backward_scale(config.parallelism, enable_parallel=False)
    set_moe_aux_loss_group_info(None, 1)  # of the process: the run before it said tp x cp, which multiplies gradients
    net = _build_model(config)
    for name, p in net.parameters_and_names():
        p.set_data(Tensor(start[name]))
    net.set_train(True)
    optimizer = _build_optimizer(config.optimizer, [net], _build_lr_scheduler(config.lr_scheduler, STEPS))
    params = list(optimizer.parameters)
    losses, norms = [], []
    for ids, labels in steps:
        loss, grads = ms.value_and_grad(lambda ids=ids, labels=labels: loss_of(net, ids, labels), None, params)()
        norm = float(np.sqrt(sum(np.square(g.asnumpy().astype(np.float64)).sum() for g in grads)))
        scale = min(1.0, NORM / (norm + 1e-6))
        optimizer(tuple(g * scale for g in grads))
        if hasattr(net, "_update_expert_bias"):  # a model with experts: its loss callback does that
            net._update_expert_bias(None, 1)
        losses.append(float(loss.asnumpy()))
        norms.append(norm)
    return losses, norms, {name: p.asnumpy() for name, p in net.parameters_and_names()}


def trained(config: str, checkpoint: str | None = None):
    """Its Trainer after its run, what it told, the weights that it began with, and its data."""
    from mindformers.pynative.trainer.trainer import Trainer
    watch = watched()
    try:
        trainer = Trainer(config, callbacks=[watch])
        with no_grad():
            start = whole(trainer)
        trainer.train(checkpoint)
    finally:
        enable_mindspore_backward_compat().disable()  # it turns it on for good
    return trainer, watch, start


def is_one_devices(world, model: dict, optimizer: dict, rate: float = 1e-2, **parallelism):
    records = everyone(world, written(Path(tempfile.mkdtemp())) if world.rank == 0 else "")[0]
    config = written_yaml(Path(tempfile.mkdtemp()), records, model, optimizer, rate, **parallelism)
    with counted() as count:
        trainer, watch, start = trained(config)
    dims, biased = trainer.config.parallelism, bool(model.get("moe_router_enable_expert_bias"))
    assert sum(n for (kind, _), n in count.items() if kind == "reduce_scatter") >= 5 * STEPS, count
    steps = batches(world, trainer)
    losses, norms, wanted = one_device(trainer.config, start, steps)
    what = (optimizer["type"], dims.data_parallel, dims.tensor_parallel)
    assert min(norms) > NORM, norms  # each step is clipped
    assert np.allclose(watch.losses, losses, rtol=TOLERANCE, atol=0), (what, watch.losses, losses)
    assert np.allclose(watch.norms, norms, rtol=TOLERANCE, atol=0), (what, watch.norms, norms)
    for name, p in trainer.model[0].parameters_and_names():
        if name.endswith("tokens_per_expert"):  # each rank has counted its own tokens
            counts = everyone(world, (p.to_local() if isinstance(p, md.DTensor) else p).asnumpy())
            assert np.array_equal(sum(counts), wanted[name]), (what, name, counts, wanted[name])
            assert biased == (wanted[name].sum() == 0), name  # what is counted ends in the bias
        else:
            equal(p, Tensor(wanted[name]), f"{what}: {name}", TOLERANCE)
    return trainer


@case(2, timeout=400)
def its_trainer_runs_twenty_steps_of_its_yaml(world):
    wheel()
    is_one_devices(world, QWEN, ADAMW)
    is_one_devices(world, QWEN, ADAMW, tensor_parallel=2, sequence_parallel=True)


@case(2, timeout=400)
def its_muon_steps_its_deepseek(world):
    """Latent attention, experts that every rank has, a layer of multi-token prediction; 'allgather', its default."""
    wheel()
    is_one_devices(world, DEEPSEEK, MUON)


@case(2, timeout=400)
def its_adamw_steps_its_deepseek(world):
    """At 1e-2 one float32 ulp of the first weights moves one device's own norms by 2e-5 in these steps; at 2e-3 by 1e-7."""
    wheel()
    is_one_devices(world, DEEPSEEK, ADAMW, rate=2e-3)


@case(2, timeout=400)
def its_experts_are_divided_over_ranks(world):
    """expert_parallel: an expert's weights on one rank, tokens sent to it and back; the other weights cut over both."""
    wheel()
    trainer = is_one_devices(world, DEEPSEEK, ADAMW, rate=2e-3, expert_parallel=2)
    weight = trainer.model[0].model.decoder.layers[1].mlp.experts.weight1
    assert weight.device_mesh.mesh_dim_names == ("efsdp", "ep") and weight.to_local().shape[0] == weight.shape[0] // 2


@case(2, timeout=400)
def its_muon_gives_each_matrix_to_one_rank(world):
    """'allgather_deredundency': one rank has a matrix whole, and sends each its part of the update."""
    wheel()
    trainer = is_one_devices(world, DEEPSEEK, MUON | {"comm_strategy": "allgather_deredundency"}, rate=2e-3)
    how = {entry["layout_decision"] for entry in trainer.optimizer._muon_param_meta.values()}
    assert how == {"p2p_shard_domain", "local_3d"}, how  # it would take what it cannot read for a tensor of one rank


@case(2, timeout=400)
def its_deepseek_is_one_devices_on_tensor_parallel_ranks(world):
    """Latent attention by heads, tokens cut between the blocks, experts that every rank has, the auxiliary loss and the bias
    that tokens per expert move, which ranks count each for themselves."""
    wheel()
    trainer = is_one_devices(world, DEEPSEEK | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3},
                             ADAMW, rate=2e-3, tensor_parallel=2, sequence_parallel=True)
    moe = trainer.model[0].model.decoder.layers[1].mlp
    assert moe.tokens_per_expert.placements == (md.Replicate(),) and moe.router._tp_size == 2
    assert np.abs(moe.expert_bias.to_local().asnumpy()).max() > 1e-3


def pipeline_is_one_devices(world, **parallelism) -> None:
    """Every stage's weights, the last one's losses, all ranks' norms; weights begin with what each stage's rank made."""
    records = everyone(world, written(Path(tempfile.mkdtemp())) if world.rank == 0 else "")[0]
    config = written_yaml(Path(tempfile.mkdtemp()), records, DEEPSEEK, ADAMW, 2e-3, pipeline_parallel=2, **parallelism)
    with counted() as count:
        trainer, watch, own = trained(config)
    assert count["exchange", "forward"] >= STEPS, count
    start: dict = {}
    for stage in everyone(world, own):  # the embedding is on both: for tokens, and for those that are predicted ahead
        for name, value in stage.items():
            assert np.array_equal(start.setdefault(name, value), value), name
    losses, norms, wanted = one_device(trainer.config, start, batches(world, trainer))
    told = everyone(world, watch.losses)
    assert [len(of) for of in told] == [0, STEPS] and min(norms) > NORM
    assert np.allclose(told[1], losses, rtol=TOLERANCE, atol=0), (told[1], losses)
    assert np.allclose(watch.norms, norms, rtol=TOLERANCE, atol=0), (watch.norms, norms)
    names = [name for part in trainer.model for name, _ in part.parameters_and_names()]
    assert set().union(*everyone(world, names)) == set(wanted) != set(names)
    for part in trainer.model:
        for name, p in part.parameters_and_names():
            equal(p, Tensor(wanted[name]), name, TOLERANCE)


@case(2, timeout=400)
def its_pipeline_is_one_device(world):
    wheel()
    pipeline_is_one_devices(world)
    pipeline_is_one_devices(world, pipeline_parallel_schedule="gpipe")
