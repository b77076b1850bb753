# SPDX-License-Identifier: Apache-2.0
"""What `ascend_first.py` has the ranks do to see whether the numbers are right: collectives, fused ops, losses, a table.

Not here: what is seen of the machine itself (`probes.py`). A part gives a dict; what is in its "failed" makes it fail.
"""
from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "model_zoo/llama/configs"
LOSSES = ROOT / "scripts/quickstart_losses.json"
LOSS_BOUND = 0.02


@contextlib.contextmanager
def world_of(rehearse: bool) -> Iterator:
    """The ranks of this launch, as devices or as emulated ones."""
    from ms_dtensor import comm
    from ms_dtensor.tools.ranks import start_device

    if not rehearse:
        device = start_device()
        if device != "npu":  # MindSpore starts for the CPU, without a word, where its plug-in for Ascend does not load
            raise RuntimeError(f"MindSpore started for {device!r} on this rank, not for an NPU: nothing was run.")
        yield comm.start(device)
        return
    from tests.rehearsal.session import rehearsed

    start_device()
    comm.start("cpu")
    with rehearsed(clock=False):
        yield comm.current_world()


def contract(world, options) -> dict:
    from tests.comm.tensor_suite import CASES, DEVICE, Tensors, bfloat16, groups

    failed, count = {}, 0
    suite = Tensors(world.backend, exact=False, dtypes=DEVICE)
    for ranks in groups(world.size, world.rank):
        for case in (*CASES, bfloat16):
            count += 1
            try:
                bfloat16(world.backend, exact=False) if case is bfloat16 else case(suite, world.rank, ranks)
            except Exception as e:
                failed[f"{case.__name__} on {len(ranks)}"] = f"{type(e).__name__}: {e}"[:600]
    return {"cases": count, "failed": failed}


def fused(mesh) -> dict[str, np.ndarray]:
    """Values and gradients of what the Llama calls on a device, in bfloat16, on a mesh of one rank."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, ops

    import ms_dtensor as md
    from model_zoo.llama import experts, model
    from model_zoo.llama.config import ExpertsConfig, ModelConfig
    from ms_dtensor.optim import AdamW

    draw = np.random.default_rng(0)
    cfg = ModelConfig(dim=512, n_heads=4, n_kv_heads=2)
    b, t, h, k, e = 2, 256, 4, 2, 128
    ids, labels = (draw.integers(0, 96, 64).astype(np.int32) for _ in range(2))
    chosen, ends = np.argsort(draw.normal(size=(64, 4)), 1)[:, :2].astype(np.int32), (100, 160, 2 * t)
    places = np.concatenate([np.arange(n) for n in (100, t - 100, 60, t - 60)]).reshape(b, t).astype(np.int32)

    def rows(*shape):
        return draw.normal(size=shape).astype(np.float32)

    def placed(x):
        return md.distribute_tensor(Tensor(x), mesh)

    def attention(q, key, value):
        with md.implicit_replication():
            return ops.flash_attention_score(q, key, value, h, attn_mask=model.causal_mask(), scalar_value=e ** -0.5,
                                             input_layout="BSND", sparse_mode=2)

    def packed(q, key, value):
        with md.implicit_replication():
            return ops.flash_attention_score(q, key, value, h, attn_mask=model.causal_mask(), scalar_value=e ** -0.5,
                                             actual_seq_qlen=ends, actual_seq_kvlen=ends, input_layout="TND", sparse_mode=3)

    def attended(q, key, value, *where):
        with md.implicit_replication():
            return model.attend(cfg, q, key, value, *where)

    def mixed(x, weights, *ws):
        with md.implicit_replication():
            return experts.mixture(ExpertsConfig(count=4), x, weights, placed(chosen), *ws)

    def rotary(x):
        with md.implicit_replication():
            return ops.rotary_position_embedding(x, *model.rotary_tables(cfg, t, x.dtype), 0)
    calls: dict[str, tuple[Callable, tuple]] = {
        "flash_attention_score": (attention, (rows(b, t, h, e), rows(b, t, k, e), rows(b, t, k, e))),
        "flash_attention_score TND": (packed, (rows(2 * t, h, e), rows(2 * t, k, e), rows(2 * t, k, e))),
        "attention": (attended, (rows(b, t, h, e), rows(b, t, k, e), rows(b, t, k, e))),
        "attention of documents": (lambda *xs: attended(*xs, placed(places)),
                                   (rows(b, t, h, e), rows(b, t, k, e), rows(b, t, k, e))),
        "experts": (mixed, (rows(64, 96), rows(64, 2), rows(4, 48, 96), rows(4, 96, 48), rows(4, 48, 96))),
        "rotary_position_embedding": (rotary, (rows(b, t, h, e),)),
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5)[0], (rows(64, 512), rows(512))),
        "swiglu": (lambda g, u: ops.swiglu(mint.stack((g, u), 1), 1), (rows(64, 96), rows(64, 96))),
        "embedding": (lambda w: mint.nn.functional.embedding(placed(ids), w), (rows(96, 64),)),
        "matmul": (lambda x, w: ops.MatMul(transpose_b=True)(x, w), (rows(64, 512), rows(96, 512))),
        "loss_parallel": (lambda x: md.loss_parallel(x, placed(labels)), (rows(64, 96),)),
        "cross_entropy": (lambda x: model.cross_entropy(x, placed(labels)), (rows(64, 96),)),
    }
    out = {}
    for name, (call, operands) in calls.items():
        xs = [placed(x).astype(ms.bfloat16) for x in operands]
        try:
            value = call(*xs)
            weight = placed(np.random.default_rng(1).normal(size=value.shape).astype(np.float32))

            def weighted(*xs, call=call, weight=weight):
                return (call(*xs).astype(ms.float32) * weight).sum()
            grads = md.grad(weighted, tuple(range(len(xs))))(*xs)
            for i, x in enumerate((value, *(grads if isinstance(grads, tuple) else (grads,)))):
                out[f"{name} {'value' if i == 0 else f'gradient {i - 1}'}"] = \
                    x.astype(ms.float32).full_tensor().asnumpy()
        except Exception as error:
            traceback.print_exc()
            out[f"{name} raised {type(error).__name__}: {error}"[:300]] = np.zeros(0)
    for dtype in (ms.float32, ms.bfloat16):
        weight = Parameter(Tensor(rows(40, 33)).astype(dtype), name="w")
        optimizer = AdamW([weight], lr=3e-4)
        for _ in range(3):
            optimizer([Tensor(rows(40, 33)).astype(dtype)])
        out[f"AdamW of {dtype}"] = weight.astype(ms.float32).asnumpy()
    return out


def ops(world, options) -> dict:
    from ms_dtensor import init_device_mesh

    np.savez(options.folder / "device.npz", **fused(init_device_mesh(options.kind, (1,), mesh_dim_names=("one",))))
    return {}


def recipe(world, options, cfg, fsdp: bool = False):
    """A trainer of a configuration on all ranks: cut over all of them, or tensor and sequence parallel over up to four."""
    from model_zoo.llama.data import load_text
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import init_device_mesh

    tp = 1 if fsdp else next(n for n in (4, 2, 1) if world.size % n == 0)
    cfg = replace(cfg, parallel=replace(cfg.parallel, dp=world.size // tp, tp=tp, sequence_parallel=tp > 1, fsdp=fsdp),
                  train=replace(cfg.train, dtype="bfloat16", compile=False))
    mesh = init_device_mesh(options.kind, (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
    return Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), mesh)


def trained(world, trainer, steps: int) -> dict:
    """Some steps: losses, seconds, memory."""
    import mindspore as ms

    from model_zoo.llama import memory

    cfg, losses, seconds = trainer.cfg, [], []
    for step in range(steps):
        start = time.perf_counter()
        losses.append(trainer.step(step).loss)  # a number: the device has done the step
        seconds.append(time.perf_counter() - start)
    tokens = cfg.train.batch * cfg.train.seq
    usual = float(np.median(seconds[min(2, steps - 1):]))
    return {"losses": [round(x, 5) for x in losses], "first_step_s": round(seconds[0], 2), "step_ms": round(usual * 1e3, 1),
            "tokens_per_s": round(tokens / usual), "tokens_per_s_per_rank": round(tokens / usual / world.size),
            "max_memory_allocated_MiB": round(ms.runtime.max_memory_allocated() / 2**20),
            "max_memory_reserved_MiB": round(ms.runtime.max_memory_reserved() / 2**20),
            "by_formula_MiB": {name: round(v / 2**20) for name, v in memory.per_rank(cfg).items()}}


def as_on_a_cpu(world, options, fsdp: bool, steps: int) -> dict:
    """The quick start's first losses against those that a CPU had, in `quickstart_losses.json`."""
    from model_zoo.llama.tools.bf16_losses import config

    losses = json.loads(LOSSES.read_text())
    want = losses[:steps]
    # its rates follow the number of all steps
    got = trained(world, recipe(world, options, config(len(losses), "bfloat16"), fsdp), steps)
    worst = max(abs(a / b - 1) for a, b in zip(got["losses"], want, strict=True))
    return {**got, "losses_of_a_cpu": want, "worst_relative": round(worst, 5), "bound": LOSS_BOUND,
            "failed": {} if worst <= LOSS_BOUND else {"losses": f"{worst:.4f} apart"}}


def quickstart(world, options) -> dict:
    return as_on_a_cpu(world, options, False, 3 if options.rehearse else 50)


def fsdp(world, options) -> dict:
    """`fully_shard` over all ranks."""
    return as_on_a_cpu(world, options, True, 3 if options.rehearse else 30)


def one_billion(options):
    from model_zoo.llama.configio import load

    return load(["--config", str(CONFIGS / ("quickstart.yaml" if options.rehearse else "llama3_1b.yaml"))])[0]


def step(world, options) -> dict:
    return trained(world, recipe(world, options, one_billion(options)), 2 if options.rehearse else 8)


def fsdp_step(world, options) -> dict:
    return trained(world, recipe(world, options, one_billion(options), True), 2 if options.rehearse else 6)


def machine(world, options) -> dict:
    """The machine's own file: `machine.yaml` in the folder."""
    import yaml

    from ms_dtensor import comm
    from ms_dtensor.tools import host
    from ms_dtensor.tools import machine as measured

    group = comm.group(range(world.size))
    if options.rehearse:  # kernels are a CPU's; sizes that take milliseconds, and no more calls than show that all are made
        measured.PRODUCTS, measured.VECTORS, measured.CACHED = ((8, 8, 8), (64, 64, 64)), (64, 4096), 1 << 20
        measured.REPEATS, measured.MOST, measured.ROUNDS = 3, 3, 1
        measured.LARGE, host.JUNK, host.CHAIN, host.ROUNDS = 1 << 16, 1 << 10, 3, 2
    told = measured.measure_machine("cpu" if options.rehearse else options.kind,
                                    lambda mine: max(group.all_gather_object(mine)), group)
    told["memory"]["communicator_mib"] = 400
    if world.rank == 0:
        (options.folder / "machine.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    return {"source": told["source"]}


def _calls(group, n: int, rank: int, count: int) -> dict[str, tuple]:
    """Name -> (call, its right answer, reduction, bus over algorithm bandwidth)."""
    from mindspore import Tensor

    x = Tensor(np.arange(count, dtype=np.float32) % 7 + rank)
    part, even, square = x[:count // n] * 1, [count // n] * n, x.reshape(n, count // n)
    whole, mine = [np.arange(count) % 7 + r for r in range(n)], slice(rank * count // n, (rank + 1) * count // n)
    share = (n - 1) / n
    return {
        "all_reduce": (lambda: group.all_reduce(x, "sum"), sum(whole), "sum", 2 * share),
        "all_gather": (lambda: group.all_gather(part, 0, even), np.concatenate([w[:count // n] for w in whole]), "none",
                       share),
        "reduce_scatter": (lambda: group.reduce_scatter(x, "sum", 0, even), sum(whole)[mine], "sum", share),
        "all_to_all": (lambda: group.all_to_all(square, 0, [1] * n, 1, even), np.concatenate([w[mine] for w in whole]),
                       "none", share),
        "broadcast": (lambda: group.broadcast(x, 0), whole[0], "none", 1.0),
    }


def collectives(world, options) -> dict:
    """Seconds of a call, by the slowest rank, and whether the numbers are right."""
    import mindspore as ms

    from ms_dtensor import init_device_mesh

    n = world.size
    group = init_device_mesh(options.kind, (n,), mesh_dim_names=("all",)).get_group()
    rows = []
    for size in (2**12, 2**16) if options.rehearse else (2**10, 2**16, 2**20, 2**24, 2**28):
        count = size // 4 // n * n
        for name, (call, want, redop, bus) in _calls(group, n, world.rank, count).items():
            times = 3 if options.rehearse else 20
            try:
                right = np.array_equal(call().asnumpy().reshape(-1), want.reshape(-1))
                for _ in range(3):
                    call()
                group.barrier()
                ms.runtime.synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    out = call()
                ms.runtime.synchronize()
                del out
                seconds = max(group.all_gather_object((time.perf_counter() - start) / times))
                rows.append((name, size, count, "float", redop, round(seconds * 1e6, 2), round(size / seconds / 1e9, 3),
                             round(bus * size / seconds / 1e9, 3), "success" if right else "failed"))
            except Exception as error:
                traceback.print_exc()
                rows.append((name, size, count, "float", redop, "-", "-", "-", f"{type(error).__name__}: {error}"[:200]))
    return {"table": rows, "failed": {f"{r[0]} of {r[1]}": r[-1] for r in rows if r[-1] != "success"}}
