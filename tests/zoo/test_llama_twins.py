# SPDX-License-Identifier: Apache-2.0
"""The Llama's two forms: each fused op that the model names against its CPU twin, values and gradients.

The fused ops run with the library's own CPU forms of them, which `tests/coverage` proves by definition, under a rehearsal.
"""
from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from model_zoo.llama import cpu, experts, model
from model_zoo.llama import parallelize as parallelized
from model_zoo.llama.config import ExpertsConfig, LatentConfig, ModelConfig, ParallelConfig, RopeScaling
from model_zoo.llama.parallelize import parallelize
from ms_dtensor import MixedPrecisionPolicy, Replicate
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.parallel import router

F32 = 2e-5  # of the largest element: sums in another order
BF16 = 2.0**-6  # the fused form rounds tables and turned queries too, the twin once, at the end
CFG = ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=37, rope_theta=100.0,
                  rope_scaling=RopeScaling(original_max_seq_len=16))
LATENT = replace(CFG, n_kv_heads=4, latent=LatentConfig(10, 14, 12, 4, 8), rope_scaling=RopeScaling(
    "yarn", 4.0, original_max_seq_len=16), experts=ExpertsConfig(4, 2, shared=1, dense_layers=1, score="sigmoid", width=24))
OTHER = replace(CFG, qkv_bias=True, out_bias=True, qk_norm=True, head_width=32, sliding_window=5, tied_head=True)
B, T, H, K, E = 2, 12, 4, 2, 16


@pytest.fixture
def mesh():
    return md.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))


def attend(q, key, value):
    with md.implicit_replication():
        return model.attend(CFG, q, key, value)


def rows(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


IDS = np.array([5, 36, 0, 5, 5, 11], np.int32)
TWINS = {  # the fused form as the model calls it, its twin, and what both take
    "embedding": (lambda w: mint.nn.functional.embedding(md.distribute_tensor(Tensor(IDS), w.device_mesh), w),
                  lambda w: cpu.embedding(Tensor(IDS) if type(w) is Tensor else
                                          md.distribute_tensor(Tensor(IDS), w.device_mesh), w), (rows(37, 8),)),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5)[0], lambda x, w: cpu.rms_norm(x, w, 1e-5), (rows(7, 24), rows(24))),
    "swiglu": (lambda g, u: ops.swiglu(mint.stack((g, u), 1), 1).reshape(g.shape), cpu.swiglu,
               (rows(7, 24), rows(7, 25)[:, :24])),
    "attend": (attend, lambda *qkv: cpu.attend(CFG, *qkv),
               (rows(B, T, H, E), rows(B, T, K, E), rows(B, T, K, E + 1)[..., :E])),
}

CHOSEN = np.argsort(np.random.default_rng(4).normal(size=(24, 4)), 1)[:, :2].astype(np.int32)
PLACES = np.concatenate([np.arange(n) for n in (5, 7, 4, 8)]).reshape(B, T).astype(np.int32)


def at(places, cfg=CFG):
    """Attention of rows that hold several documents."""
    def attended(q, key, value):
        with md.implicit_replication():
            return model.attend(cfg, q, key, value, md.distribute_tensor(Tensor(places), q.device_mesh))
    return attended


def mixture(x, weights, *ws):
    with md.implicit_replication():
        chosen = md.distribute_tensor(Tensor(CHOSEN), x.device_mesh)
        return experts.mixture(ExpertsConfig(count=4), x, weights, chosen, *ws)


QKV = (rows(B, T, H, E), rows(B, T, K, E), rows(B, T, K, E + 1)[..., :E])


@pytest.mark.parametrize("form, operands", [
    (mixture, (rows(24, 8), rows(24, 2), rows(4, 6, 8), rows(4, 8, 6), rows(4, 6, 9)[..., :8])),
    (at(PLACES), QKV), (at(PLACES, replace(CFG, sliding_window=3)), QKV)], ids=["experts", "documents", "and a window"])
def test_the_branch_for_devices_is_the_one_for_cpus(form, operands, mesh):
    for dtype, bound in ((ms.float32, F32), (ms.bfloat16, BF16)):
        xs = [md.distribute_tensor(Tensor(v).astype(dtype), mesh, [Replicate()] * 2) for v in operands]
        want = slopes(form, xs)
        with rehearsal("Ascend"):
            close(slopes(form, xs), want, bound)


def slopes(form, operands):
    """Value and gradients of `form`, weighted unevenly."""
    shape = form(*operands).shape
    weight = Tensor(np.random.default_rng(9).normal(size=shape).astype(np.float32))
    if isinstance(operands[0], md.DTensor):
        weight = md.distribute_tensor(weight, operands[0].device_mesh)
    value = form(*operands)
    grads = ms.grad(lambda *xs: (form(*xs).astype(ms.float32) * weight).sum(), tuple(range(len(operands))))(*operands)
    return [(x.full_tensor() if isinstance(x, md.DTensor) else x).astype(ms.float32).asnumpy()
            for x in (value, *(grads if isinstance(grads, tuple) else (grads,)))]


def close(got, want, bound):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and np.abs(a - b).max() <= bound * np.abs(b).max(), np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_equals_the_fused_op(name, mesh):
    fused, twin, operands = TWINS[name]

    def placed(dtype):
        return [md.distribute_tensor(Tensor(v).astype(dtype), mesh, [Replicate()] * 2) for v in operands]
    with rehearsal("Ascend"):
        want = slopes(fused, placed(ms.float32))
    close(slopes(twin, [Tensor(v) for v in operands]), want, F32)
    on_dtensors = twin if name != "attend" else md.local_map(
        twin, [Replicate()] * 2, ([Replicate()] * 2,) * 3, device_mesh=mesh)
    close(slopes(on_dtensors, placed(ms.float32)), want, F32)
    with rehearsal("Ascend"):
        want = slopes(fused, placed(ms.bfloat16))
    close(slopes(on_dtensors, placed(ms.bfloat16)), want, BF16)


def sorted_by_numpy(x, *, dim, descending, stable):
    assert dim == 1 and descending and stable
    order = np.argsort(-x.asnumpy(), 1, "stable")
    return Tensor(np.take_along_axis(x.asnumpy(), order, 1)), Tensor(order)


def on_its_own(mesh):
    """Experts of a rank's own tokens, whose ops have doubles on DTensors alone: on those of one rank."""
    def run(cfg, *tensors):
        with md.implicit_replication():
            whole = (md.DTensor.from_local(x, mesh, [md.Replicate()] * mesh.ndim) for x in tensors)
            return experts.mixture(cfg, *whole).to_local()
    return run


@pytest.mark.parametrize("cfg, dtype, joined", [
    (CFG, "float32", False), (CFG, "bfloat16", False), (OTHER, "float32", False), (CFG, "float32", True),
    (OTHER, "float32", True), (replace(CFG, qk_norm=True, qk_norm_over="all"), "float32", False), (LATENT, "float32", True)],
    ids=["float32", "bfloat16", "biases, norms and a window", "joined", "joined, biases, norms and a window",
         "one norm of all", "latent attention"])
def test_the_model_is_the_same_on_either_kind_of_device(cfg, dtype, joined, mesh, monkeypatch):
    """Logits, loss and every gradient of the device's branch against the CPU's."""
    monkeypatch.setattr(router.mint, "sort", sorted_by_numpy)  # a CPU has no kernel for a stable one
    ids = np.random.default_rng(0).integers(0, 37, (2, T + 1)).astype(np.int32)
    x, y = (md.distribute_tensor(Tensor(np.ascontiguousarray(a)), mesh) for a in (ids[:, :-1], ids[:, 1:]))
    policy = MixedPrecisionPolicy(ms.bfloat16, ms.float32) if dtype == "bfloat16" else None

    def run():
        net = model.Llama(cfg, joined)
        model.init_weights(net, 3, std=0.3)
        parallelize(net, mesh, ParallelConfig(loss_parallel=False), policy)

        def logits(a):
            out = net(a)
            return out[0] if isinstance(out, tuple) else out
        loss, grads = md.value_and_grad(lambda a, b: model.cross_entropy(logits(a), b), None, net.trainable_params())(x, y)
        return [v.full_tensor().astype(ms.float32).asnumpy() for v in (logits(x), loss, *grads)]
    want = run()
    with rehearsal("Ascend"):
        monkeypatch.setattr(parallelized, "mixture", on_its_own(mesh))
        close(run(), want, F32 if dtype == "float32" else 12 * BF16)
