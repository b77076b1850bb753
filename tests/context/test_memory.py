# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps of a layer whose tokens ranks share: 1/N of one device's, and of gather the keys that came beside it.

Counted on fake worlds of one process, with a node in the place of the kernels that saves what theirs read.
"""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.common._grad_function import _Function

import ms_dtensor as md
from model_zoo.llama import memory
from model_zoo.llama.config import Config, ModelConfig, ParallelConfig, TrainConfig
from model_zoo.llama.model import Block, Listed
from model_zoo.llama.parallelize import attention_on_lists, context_axes, make_mesh
from ms_dtensor.comm import fake_world
from ms_dtensor.core.balance import Mask
from ms_dtensor.core.tokens import keys_by_rank
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.ops.local import varlen
from ms_dtensor.parallel import context
from ms_dtensor.parallel import ring as rounds
from tests.operands import filled
from tests.tiers import sampled

CFG = ModelConfig(dim=48, n_layers=1, n_heads=8, n_kv_heads=4, ffn_dim=64, vocab_size=40)
E, ROWS = CFG.head_dim, 512


class Kernel(_Function):
    """The fused kernel over runs: it keeps its operands, its result and 2 x [T, h, 8] of statistics."""

    @staticmethod
    def forward(ctx, saved, q, k, v):
        out = Tensor(np.random.default_rng(1).normal(size=q._shape).astype(np.float32))
        stats = [Tensor(np.random.default_rng(n).normal(size=(*q._shape[:2], 8)).astype(np.float32)) for n in (2, 3)]
        for x in (q, k, v, out, *stats):
            saved(x)
        return out

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("only forwards are run here")


def in_any_order(x: Tensor) -> bytes:
    return np.sort(x.asnumpy(), None).tobytes()


def kept(ranks: int, documents, algorithm: str, monkeypatch) -> tuple[int, md.Tokens]:
    """Bytes that one block on rank 0 keeps, weights apart."""
    seen: dict[int, Tensor] = {}  # by where its memory lies; tensors are held, so that no place is used twice

    def add(x):
        if x.is_floating_point() and x._shape:
            x = Tensor._make_subclass(Tensor, x)
            seen.setdefault(x.untyped_storage().data_ptr(), x)  # of keys beside values each is a view
        return x
    parallel = ParallelConfig(cp=ranks, cp_algorithm=algorithm)
    with fake_world(max(ranks, 2)):
        mesh = make_mesh("cpu", parallel) if ranks > 1 else md.init_device_mesh(
            "cpu", (2, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
        tokens = md.balance(documents, ranks)
        block = md.distribute_module(filled(Block(CFG, 0)), mesh)
        weights = {in_any_order(p.to_local()) for p in block.get_parameters()}  # a CPU kernel saves a copy of a view
        block.attention.core = attention_on_lists(CFG, mesh, parallel)
        assert context_axes(mesh) == ("cp",)
        monkeypatch.setattr(context, "on_cpu", lambda: False)
        monkeypatch.setattr(varlen, "runs", lambda q, k, v, *rest: Kernel.apply(add, q, k, v))
        x = np.random.default_rng(0).normal(size=(ROWS, CFG.dim)).astype(np.float32)
        places = np.concatenate([np.arange(n) for n in documents])
        x, places = (tokens.cut(a, mesh=mesh, axes=("dp", "cp")) for a in (x, places))
        ring = rounds._FusedRing.forward

        def forward(ctx, q, k, v, *rest):
            out = ring(ctx, q, k, v, *rest)
            for t in ctx.saved_tensors:
                add(t)
            return out
        monkeypatch.setattr(rounds._FusedRing, "forward", staticmethod(forward))
        with ms.saved_tensors_hooks(add, lambda t: t):
            Recording.of(block, x, Listed(tokens, places.astype(ms.int32), max(documents)))
        monkeypatch.undo()
    return sum(t.untyped_storage().nbytes() for t in seen.values() if in_any_order(t) not in weights), tokens


@pytest.mark.parametrize("algorithm", ["gather", "ring"])
def test_what_is_kept_falls_as_one_over_n(algorithm, monkeypatch):
    """Documents that are whole on their ranks: nothing comes, and each rank has 1/N of all, within 2 %."""
    one, _ = kept(1, (64,) * 8, algorithm, monkeypatch)
    for ranks in sampled((4, 2, 8), 3):
        mine, _ = kept(ranks, (64,) * 8, algorithm, monkeypatch)
        assert abs(mine * ranks / one - 1) <= 0.02, (ranks, mine, one)


def test_of_one_long_document_a_ring_keeps_that_and_gather_the_keys_that_came(monkeypatch):
    for algorithm in ("gather", "ring"):
        one, _ = kept(1, (ROWS,), algorithm, monkeypatch)
        for ranks in sampled((4, 2, 8), 3):
            mine, tokens = kept(ranks, (ROWS,), algorithm, monkeypatch)
            rows = sum(hi - lo for lo, hi in keys_by_rank(tokens, Mask())[0].spans) - ROWS // ranks
            rows *= algorithm == "gather"  # each run has its keys one behind another for the kernel
            assert abs((mine - rows * 2 * CFG.n_kv_heads * E * 4) * ranks / one - 1) <= 0.02, (algorithm, ranks, mine, rows)


def test_the_formula_has_both():
    """`memory.py`, in full: all keys of the others where they are gathered, none of a ring's."""
    train = TrainConfig(batch=1, seq=ROWS)
    by = {(cp, how): memory.saved_by_block(Config(model=CFG, parallel=ParallelConfig(cp=cp, cp_algorithm=how),
                                                  train=train), 4) for cp in (1, 2, 4, 8) for how in ("gather", "ring")}
    for cp in (2, 4, 8):
        assert by[cp, "ring"] * cp == by[1, "ring"]
        rows = sum(hi - lo for lo, hi in keys_by_rank(md.head_tail((ROWS,), cp), Mask())[0].spans) - ROWS // cp
        assert by[cp, "gather"] - by[cp, "ring"] == rows * 2 * CFG.n_kv_heads * E * 4
