# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0, the unedited wheel, on ms_dtensor in the place of hyper_parallel, against one device.

Its Qwen3 (tiny), its configuration, its `ParallelDims` and parallelize functions, its AdamW and Muon. `stand_ins` names what
is not its own.
"""
import copy
import os
import re
import sys
import tempfile

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.ops.communication import set_comm_ops_inplace

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.compat.hyper_parallel import register
from tests.cases import case
from tests.compat.test_interop import PAGE
from tests.support import counted, equal
from tests.third_party import mindformers_stand_ins as stand_ins

GROUP = "mindformers"

WHEEL = os.environ.get("MINDFORMERS_WHEEL", "")
VOCABULARY, LENGTH, ROWS, STEPS = 64, 16, 8, 10
TOLERANCE = 1e-5  # of the largest element, after ten steps
ACCUMULATED = 2
TINY = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, seq_length=LENGTH, params_dtype="float32",
    compute_dtype="float32", layernorm_compute_dtype="float32", softmax_compute_dtype="float32", rotary_dtype="float32",
    use_flash_attention=True, hidden_dropout=0.0, attention_dropout=0.0, hidden_act="silu", qk_layernorm=True,
    add_bias_linear=False, attention_bias=False, position_embedding_type="rope", normalization="RMSNorm",
    gated_linear_unit=True, input_layout="BNSD", tie_word_embeddings=False, pad_token_id=0, apply_rope_fusion=False,
    initializer_range=0.02, rope_theta=10000.0, sparse_mode=0)


def wheel():
    """The wheel's modules, once, with the stand-ins in their places."""
    if "mindformers" not in sys.modules:
        if WHEEL:
            sys.path.insert(0, WHEEL)
        os.environ.setdefault("LOG_MF_PATH", tempfile.mkdtemp())  # else it writes ./output
        register()
        stand_ins.packages()
        stand_ins.kernels()
        import mindformers.pynative.base_models.gpt.parallelize  # noqa: F401
        stand_ins.after_import()
        set_comm_ops_inplace(False)  # its styles take results, and pass no tensor for them


def made(parallelism=None, **config):
    wheel()
    from mindformers.models import configuration_utils
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train_pynative import PyNativeQwen3ForCausalLM
    from mindformers.pynative.distributed.context_parallel import attach_context_parallel_runtime_hints
    apart = copy.deepcopy(configuration_utils.default_transformer_config)  # else what is told to one model is told to all
    config = Qwen3Config(**TINY | config, parallel_config=apart)
    return PyNativeQwen3ForCausalLM(attach_context_parallel_runtime_hints(config, parallelism))


def values_of(name: str, shape) -> np.ndarray:
    """Asymmetric, and the same wherever the parameter lies; norms are near one."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.normal(1.0 if "norm" in name else 0.0, 0.1, tuple(shape)).astype(np.float32)


def filled(net):
    """Each parameter's own part of its values."""
    for name, p in net.parameters_and_names():
        whole = values_of(name, p.shape)
        if isinstance(p, md.DTensor):
            whole = whole[tuple(slice(a, b) for a, b in p.layout.local_box())]
        p.set_data(Tensor(np.ascontiguousarray(whole)))
    return net.set_train(True)


def batch(step: int, rows: int = ROWS, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return tuple(rng.integers(1, VOCABULARY, size=(rows, length)).astype(np.int32) for _ in range(2))


def loss_of(net, ids, labels):
    rows, length = ids.shape
    out = net(input_ids=Tensor(ids), labels=Tensor(labels), loss_mask=Tensor(np.ones(ids.shape, np.float32)),
              position_ids=Tensor(np.tile(np.arange(length, dtype=np.int32), (rows, 1))))
    return (out[0] if isinstance(out, tuple) else out).sum()


def optimizer_of(params):
    from mindformers.pynative.optimizer.adamw import AdamW
    return AdamW(params, learning_rate=1e-2, weight_decay=0.1, eps=1e-3)


def one_device(steps: int = STEPS, rows: int = ROWS, **config):
    """Losses, and parameters by name, of its own model and optimizer on one device."""
    net = filled(made(**config))
    params = list(net.trainable_params())
    optimizer = optimizer_of(params)
    losses = []
    for step in range(steps):
        ids, labels = batch(step, rows, config.get("seq_length", LENGTH))
        loss, grads = ms.value_and_grad(lambda ids=ids, labels=labels: loss_of(net, ids, labels), None, params)()
        optimizer(grads)
        losses.append(float(loss.asnumpy()))
    return losses, {name: p.asnumpy() for name, p in net.parameters_and_names()}


class Job:
    """Its model on ranks: made without values, parallelized by its functions, filled where its shards are.

    Args:
        world, dp, tp: ranks, of which `dp` have rows of their own.
        rows: of a batch, of all ranks.
        context: what its configuration says of context parallelism.
        config: of the model, where it is not TINY.
    """

    def __init__(self, world, dp: int, tp: int, rows: int = ROWS, context: dict | None = None, **config):
        wheel()
        from mindformers.pynative.base_models.gpt.parallelize import parallelize_gptmodel
        from mindformers.pynative.config.config import (
            ParallelismConfig,
            RecomputeCommConfig,
            RecomputeConfig,
            SwapConfig,
        )
        from mindformers.pynative.distributed.parallel_dims import ParallelDims
        parallelism = ParallelismConfig()
        parallelism.data_parallel, parallelism.tensor_parallel = dp, tp
        vars(parallelism).update(context or {})
        self.dims = ParallelDims.from_config(parallelism, world.size)
        self.dims.build_mesh()
        with ms.DeviceCtx("meta"):
            self.net = made(parallelism, **config)
        parallelize_gptmodel(self.net, self.dims, parallelism, RecomputeConfig(), RecomputeCommConfig(), SwapConfig())
        self.net.to_empty()
        filled(self.net)
        self.params = list(self.net.trainable_params())
        self.optimizer = optimizer_of(self.params)
        self.world, self.dp, self.tp, self.rows = world, dp, tp, rows
        self.length = config.get("seq_length", LENGTH)
        self.at = self.dims.get_mesh("fsdp").get_local_rank() // parallelism.context_parallel

    def step(self, step: int, accumulated: int = 1) -> float:
        """One step of its trainer, which gives every rank's loss its share of one."""
        own = [np.split(part, self.dp)[self.at] for part in batch(step, self.rows, self.length)]
        total = 0.0
        for ids, labels in zip(*(np.split(part, accumulated) for part in own)):
            with md.recorded(self.net):
                loss = loss_of(self.net, ids, labels) / accumulated
                md.backward(loss, gradient=Tensor(1 / self.world.size, ms.float32))
            total += float(loss.asnumpy())
        grads = tuple(p.main_grad for p in self.params)
        assert all(isinstance(g, md.DTensor) and g.dtype == ms.float32 for g in grads)
        self.optimizer(grads)
        self.net.zero_grad()
        return sum(comm.group(tuple(range(self.world.size))).all_gather_object(total)) / self.world.size

    def state(self) -> dict:
        return {"net": {n: p for n, p in self.net.parameters_and_names()},
                "optimizer": {p.name: p for p in self.moments()}, "step": self.optimizer.global_step}

    def moments(self) -> list:
        return [*self.optimizer.exp_avg, *self.optimizer.exp_avg_sq]

    def is_one_device(self, wanted: dict, what: str) -> None:
        for name, p in self.net.parameters_and_names():
            equal(p, Tensor(wanted[name]), f"{what}: {name}", TOLERANCE)


def same_steps(world, layouts) -> None:
    losses, wanted = one_device()
    for dp, tp, accumulated in layouts:
        what = f"dp={dp} tp={tp} accumulated={accumulated}"
        job = Job(world, dp, tp)
        weight = job.net.model.decoder.layers[0].self_attention.linear_qkv.weight
        assert ("tp" in weight.device_mesh.mesh_dim_names) == (tp > 1), weight
        with counted() as count:
            got = [job.step(step, accumulated) for step in range(STEPS)]
        if dp > 1:  # six units, each gathered and reduced once a micro-batch
            assert count["reduce_scatter", "backward"] >= 5 * STEPS * accumulated, (what, count)
        assert np.allclose(got, losses, rtol=TOLERANCE, atol=0), (what, got, losses)
        job.is_one_device(wanted, what)


@case(2, timeout=400)
def its_qwen3_has_ten_adamw_steps_of_one_device_on_two_ranks(world):
    same_steps(world, ((2, 1, 1), (2, 1, ACCUMULATED), (1, 2, 1)))


@case(4, timeout=400)
def its_qwen3_has_ten_adamw_steps_of_one_device_on_four_ranks(world):
    same_steps(world, ((2, 2, 1), (2, 2, ACCUMULATED)))


@case(4, timeout=400)
def its_run_goes_on_upon_another_mesh(world):
    losses, wanted = one_device()
    folder = comm.group(tuple(range(world.size))).all_gather_object(tempfile.mkdtemp())[0]
    job = Job(world, 2, 2)
    got = [job.step(step) for step in range(STEPS // 2)]
    md.checkpoint.save(job.state(), folder)
    other = Job(world, 4, 1)
    md.checkpoint.load(other.state(), folder)
    got += [other.step(step) for step in range(STEPS // 2, STEPS)]
    assert np.allclose(got, losses, rtol=TOLERANCE, atol=0), (got, losses)
    other.is_one_device(wanted, "dp2 tp2, then dp4")


@case(2)
def its_adamw_keeps_float32_masters_of_sharded_parameters(world):
    """Its step on shards, under its `SkipDTensorDispatch`, against its step on whole tensors: to the bit, masters too."""
    wheel()
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(6, 4)).astype(np.float16), "odd": rng.normal(size=(3, 2)).astype(np.float16),
               "norm": rng.normal(size=4).astype(np.float32)}
    plain = [Parameter(Tensor(a), name=name) for name, a in weights.items()]
    cut = [Parameter(md.distribute_tensor(Tensor(a), mesh, [md.Replicate() if name == "norm" else md.Shard(0)]), name=name)
           for name, a in weights.items()]
    theirs, ours = optimizer_of(plain), optimizer_of(cut)
    for step in range(4):
        grads = [np.random.default_rng((2, step, i)).normal(size=a.shape).astype(np.float32)
                 for i, a in enumerate(weights.values())]
        theirs(tuple(map(Tensor, grads)))
        with counted() as count:
            ours(tuple(md.distribute_tensor(Tensor(g), mesh, p.placements, src_data_rank=None) for g, p in zip(grads, cut)))
        assert not count, count
    for a, b in ((plain, cut), (theirs.fp32_params, ours.fp32_params), (theirs.exp_avg, ours.exp_avg),
                 (theirs.exp_avg_sq, ours.exp_avg_sq)):
        for p, q in zip(a, b, strict=True):
            assert isinstance(q, md.DTensor) and q.dtype == p.dtype
            assert q.full_tensor().asnumpy().tobytes() == p.asnumpy().tobytes(), p.name
    assert [p.dtype for p in ours.fp32_params] == [ms.float32] * 3
    assert not np.array_equal(cut[0].full_tensor().asnumpy(), weights["w"])


@case(2)
def what_is_not_its_own_is_on_the_page(world):
    wheel()
    assert all(stand_ins.NAMED.values()) and "Attention" not in stand_ins.NAMED
    told = set(re.findall(r"`([^`]*)`", PAGE.read_text("utf-8").partition("\n- MindSpore has no CPU kernel")[2]))
    assert told == {".".join(name.split(".")[-2:]) for name in stand_ins.NAMED} | set(stand_ins.PACKAGES)
