# SPDX-License-Identifier: Apache-2.0
"""Every branch that only an Ascend's kernels take, with a double in the kernel's place that is strict about its arguments.

A double binds its arguments by the signature of MindSpore's own primitive, so that it finds them by name wherever they
stand, refuses what Ascend's documents do not have, and computes by the forms for CPU. The kernels themselves were not run.
"""
import ast
import functools
import inspect
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.ops import auto_generate
from mindspore.ops.auto_generate import gen_ops_prim

from ms_dtensor import comm
from ms_dtensor.comm import fused_products
from ms_dtensor.core.balance import Mask
from ms_dtensor.errors import CommError
from ms_dtensor.ops import rng
from ms_dtensor.ops.local import attention, moe, varlen
from ms_dtensor.ops.rules.attention import FAR
from tests.rehearsal.tables import before_joining, copied, ordered

ROOT = Path(__file__).resolve().parents[2]


def test_each_such_branch_has_a_test():
    """A new `ascend_kernels()` needs a double: this is the list of those that there are."""
    found = []
    for path in (*(ROOT / "ms_dtensor").rglob("*.py"), *(ROOT / "model_zoo").rglob("*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "ascend_kernels" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name != "ascend_kernels":
                found += [(path.name, node.name) for call in ast.walk(node)
                          if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "ascend_kernels"]
    assert sorted(found) == [
        ("adamw.py", "_step_on_device"),  # tests/optim/test_adamw.py: test_on_ascend_one_kernel_steps_the_master
        ("attention.py", "flash_attention"), ("fused_products.py", "all_gather_matmul"),
        ("fused_products.py", "matmul_reduce_scatter"), ("moe.py", "finalize_once"), ("moe.py", "gating_of_rows"),
        ("varlen.py", "fused"), ("varlen.py", "fused_grad")]


# -- attention -------------------------------------------------------------------------------------------------------------
class Attention:
    """`FlashAttentionScore`, as Ascend's documents have it."""

    seen: list[dict] = []

    def __init__(self, *args, **kwargs):
        made = inspect.signature(inspect.unwrap(gen_ops_prim.FlashAttentionScore.__init__)).bind(self, *args, **kwargs)
        made.apply_defaults()
        self.made = made.arguments

    def __call__(self, *args, **kwargs):
        given = inspect.signature(gen_ops_prim.FlashAttentionScore.__call__).bind(self, *args, **kwargs)
        given.apply_defaults()
        a, m = given.arguments, self.made
        assert a["padding_mask"] is None and a["prefix"] is None, "reserved by the documents"
        assert m["inner_precise"] == 0 and 0 < m["keep_prob"] <= 1
        assert (m["input_layout"] == "TND") == (a["actual_seq_qlen"] is not None) == (a["actual_seq_kvlen"] is not None)
        if m["sparse_mode"] in (2, 3, 4):
            mask = a["attn_mask"].asnumpy()
            assert mask.shape == (2048, 2048) and (mask == np.triu(np.ones((2048, 2048)), 1)).all(), "the compressed mask"
        kept = None
        if a["drop_mask"] is not None:
            assert a["drop_mask"].dtype == ms.uint8
            kept = np.unpackbits(a["drop_mask"].asnumpy(), -1, bitorder="little").astype(bool)
        assert (kept is None) == (m["keep_prob"] == 1.0)
        Attention.seen.append({**m, **a, "kept": kept})
        return attention.composed(a["query"], a["key"], a["value"], a["real_shift"], a["attn_mask"], m["head_num"],
                                  m["scale_value"], m["pre_tokens"], m["next_tokens"], m["input_layout"], m["sparse_mode"],
                                  (a["actual_seq_qlen"], a["actual_seq_kvlen"]), kept, m["keep_prob"])


def rows(*shape):
    return Tensor(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


COMPRESSED = Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))
FULL = Tensor(np.random.default_rng(3).integers(0, 2, (2, 1, 8, 8)).astype(np.uint8) * np.triu(np.ones((8, 8), np.uint8), 1))
SHAPES = {"BNSD": ((2, 4, 8, 16), (2, 2, 8, 16)), "BSND": ((2, 8, 4, 16), (2, 8, 2, 16)), "BSH": ((2, 8, 64), (2, 8, 32)),
          "SBH": ((8, 2, 64), (8, 2, 32)), "TND": ((16, 4, 16), (16, 2, 16))}
CALLS = [(form, mode, 1.0) for form in SHAPES for mode in (0, 2, 3, 4) if (form, mode) != ("TND", 0)] + [
    (form, 2, 0.7) for form in ("BNSD", "BSH")]


def both(monkeypatch, form, mode, keep):
    """Statistics, result and gradients without the kernel and with its double."""
    q, k, v = rows(*SHAPES[form][0]), rows(*SHAPES[form][1]), rows(*SHAPES[form][1]) * 0.5
    mask = COMPRESSED if mode else FULL if form != "TND" else None
    lengths = ((5, 16), (5, 16)) if form == "TND" else None
    dropped = ((2, 4, 8, 8), ((0, 2), (0, 4), (0, 8), (0, 8))) if keep < 1 else None
    monkeypatch.setattr(rng, "next_key", lambda: rng.Key(11, 3))
    band = (2, 0) if mode == 4 else (FAR, FAR)

    def run(q, k, v):
        top, total, _, out = attention.flash_attention(q, k, v, None, mask, 4, keep, 0.25, *band, form, mode, lengths,
                                                       dropped)
        return (out * rows(*out.shape)).sum(), top, total, out
    results = []
    for there in (False, True):
        monkeypatch.setattr(attention, "ascend_kernels", lambda there=there: there)
        results.append([x.asnumpy() for x in (*run(q, k, v), *ms.grad(lambda *x: run(*x)[0], (0, 1, 2))(q, k, v))])
    return results


@pytest.mark.parametrize("form, mode, keep", CALLS)
def test_the_kernel_of_attention_is_told_what_the_form_for_cpus_is(monkeypatch, form, mode, keep):
    monkeypatch.setattr(attention, "_kernel", Attention)
    Attention.seen.clear()
    want, got = both(monkeypatch, form, mode, keep)
    assert len(Attention.seen) == 2  # with and without gradients
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    told = Attention.seen[0]
    assert (told["head_num"], told["scale_value"], told["keep_prob"]) == (4, 0.25, keep)
    assert told["attn_mask"] is (COMPRESSED if mode else FULL), "in its own slot: without a mask it would see the future"


def test_bits_of_dropped_weights_are_those_of_our_stream(monkeypatch):
    """A set bit keeps: 70 % of them are set, and they are the stream's, in order."""
    monkeypatch.setattr(attention, "_kernel", Attention)
    Attention.seen.clear()
    both(monkeypatch, "BNSD", 2, 0.7)
    kept = Attention.seen[0]["kept"]
    want = rng.keep_mask(rng.Key(11, 3), (2, 4, 8, 8), 0.7, ((0, 2), (0, 4), (0, 8), (0, 8)))
    assert (kept == want).all() and 0.6 < kept.mean() < 0.8


# -- a ring's blocks ---------------------------------------------------------------------------------------------------
class AttentionGrad:
    """`FlashAttentionScoreGrad` in TND: what a block of keys gives, from the statistics it is handed, in NumPy."""

    seen: list[dict] = []

    def __init__(self, *args, **kwargs):
        made = inspect.signature(inspect.unwrap(gen_ops_prim.FlashAttentionScoreGrad.__init__)).bind(self, *args, **kwargs)
        made.apply_defaults()
        self.made = made.arguments

    def __call__(self, *args, **kwargs):
        given = inspect.signature(gen_ops_prim.FlashAttentionScoreGrad.__call__).bind(self, *args, **kwargs)
        given.apply_defaults()
        a, m = given.arguments, self.made
        assert all(a[n] is None for n in ("pse_shift", "drop_mask", "padding_mask", "softmax_in", "prefix"))
        assert m["input_layout"] == "TND" and m["keep_prob"] == 1.0 and m["inner_precise"] == 0
        assert (m["sparse_mode"], m["next_tokens"]) in ((3, 0), (0, FAR)) and m["pre_tokens"] == FAR
        assert (a["atten_mask"] is not None) == (m["sparse_mode"] == 3)
        assert a["dy"].shape == a["attention_in"].shape == a["query"].shape and a["attention_in"].dtype == a["query"].dtype
        AttentionGrad.seen.append({**m, **a})
        q, k, v, dy, out = (a[n].asnumpy() for n in ("query", "key", "value", "dy", "attention_in"))
        (t, h, _), g = q.shape, k.shape[1]
        stats = [a[n].asnumpy() for n in ("softmax_max", "softmax_sum")]
        assert m["head_num"] == h and all(s.shape == (t, h, 8) and (s == s[..., :1]).all() for s in stats)
        grads, q0, k0 = [np.zeros_like(x) for x in (q, k, v)], 0, 0
        for q1, k1 in zip(a["actual_seq_qlen"], a["actual_seq_kvlen"], strict=True):
            seen = np.ones((q1 - q0, k1 - k0), bool)
            if m["sparse_mode"] == 3:
                seen = np.tril(seen, (k1 - k0) - (q1 - q0))
            for i in range(h):
                x, keys, values, d = q[q0:q1, i], k[k0:k1, i * g // h], v[k0:k1, i * g // h], dy[q0:q1, i]
                p = np.where(seen, np.exp(x @ keys.T * m["scale_value"] - stats[0][q0:q1, i, :1]), 0)
                p = p / stats[1][q0:q1, i, :1]
                ds = p * (d @ values.T - (d * out[q0:q1, i]).sum(1, keepdims=True)) * m["scale_value"]
                for total, more in zip(grads, (ds @ keys, ds.T @ x, p.T @ d)):
                    at = (slice(q0, q1), i) if total is grads[0] else (slice(k0, k1), i * g // h)
                    total[at] += more
            q0, k0 = q1, k1
        return *(Tensor(x) for x in grads), None


def test_blocks_of_a_ring_are_what_the_whole_is_by_statistics_of_all_keys(monkeypatch):
    """Two runs of queries over two blocks of keys each, one of them on the diagonal: joined, they are the fused call over
    all keys, and the gradient kernel, handed the joined statistics, gives its gradients."""
    q, k, v, dout = rows(9, 4, 8), rows(14, 2, 8), rows(14, 2, 8) * 0.5, rows(9, 4, 8) * 0.3
    ends = (4, 9), (6, 14)  # run 0 sees 2 keys before its own 4, run 1 three before its own 5
    for there in (False, True):
        monkeypatch.setattr(attention, "_kernel", Attention)
        monkeypatch.setattr(varlen, "_grad_kernel", AttentionGrad)
        for module in (attention, varlen):
            monkeypatch.setattr(module, "ascend_kernels", lambda there=there: there)
        Attention.seen.clear()
        AttentionGrad.seen.clear()
        want = varlen.runs(q, k, v, *ends, Mask(), 0.35)
        grads = ms.grad(lambda *x: (varlen.runs(*x, *ends, Mask(), 0.35) * dout).sum(), (0, 1, 2))(q, k, v)
        far, near = np.r_[0:2, 6:9], np.r_[2:6, 9:14]
        blocks = [((k[far.tolist()], v[far.tolist()]), (2, 5), False), ((k[near.tolist()], v[near.tolist()]), (4, 9), True)]
        whole = None
        for keys, k_ends, diagonal in blocks:
            whole = varlen.joined(whole, varlen.fused(q, *keys, ends[0], k_ends, diagonal, 0.35))
        np.testing.assert_allclose(whole.out.asnumpy(), want.asnumpy(), rtol=2e-5, atol=1e-6)
        dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
        for (keys, k_ends, diagonal), at in zip(blocks, (far, near)):
            one = varlen.fused_grad(q, dout, whole, *keys, ends[0], k_ends, diagonal, 0.35)
            dq += one[0].asnumpy()
            dk[at] += one[1].asnumpy()
            dv[at] += one[2].asnumpy()
        for got, x in zip((dq, dk, dv), grads, strict=True):
            np.testing.assert_allclose(got, x.asnumpy(), rtol=2e-5, atol=1e-6)
        assert len(AttentionGrad.seen) == 2 * there and len(Attention.seen) == 4 * there


# -- mixture of experts ----------------------------------------------------------------------------------------------
def test_the_kernel_of_gating_is_told_what_the_form_for_cpus_is(monkeypatch):
    seen = []

    def kernel(*args, **kwargs):
        a = inspect.signature(gen_ops_prim.MoeGatingTopKSoftmax.__call__).bind(None, *args, **kwargs).arguments
        assert a.get("finished") is None and a["k"] == 2
        seen.append(a)
        return moe.gating(a["x"], None, a["k"])
    x = rows(6, 8)
    want = moe.gating_of_rows(x, 2, 12, 6)
    monkeypatch.setattr(moe, "ascend_kernels", lambda: True)
    monkeypatch.setattr(auto_generate, "moe_gating_top_k_softmax_op", kernel)
    got = moe.gating_of_rows(x, 2, 12, 6)
    assert len(seen) == 1
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
    assert got[2].asnumpy()[:2].tolist() == [[6, 18], [7, 19]], "rows are numbered among all ranks'"


@pytest.mark.parametrize("mine", [True, False])
def test_the_kernel_of_finalizing_is_told_what_the_form_for_cpus_is(monkeypatch, mine):
    seen = []

    def kernel(*args, **kwargs):
        a = inspect.signature(auto_generate_finalize).bind(*args, **kwargs).arguments
        seen.append(a)
        return moe.finalize(a["expanded_x"], a["x1"], a.get("x2"), a.get("bias"), a.get("scales"), a["expanded_row_idx"],
                            a["expanded_expert_idx"])
    auto_generate_finalize = auto_generate.moe_finalize_routing
    n, k, h, count = 6, 2, 8, 3
    order = Tensor(np.random.default_rng(0).permutation(n * k).astype(np.int32))
    experts = Tensor(np.random.default_rng(1).integers(0, count, (n, k)).astype(np.int32))
    operands = rows(n * k, h), rows(n, h), rows(n, h) * 2, rows(count, h), rows(n, k), order, experts, mine
    want = moe.finalize_once(*operands)
    monkeypatch.setattr(moe, "ascend_kernels", lambda: True)
    monkeypatch.setattr(auto_generate, "moe_finalize_routing", kernel)
    got = moe.finalize_once(*operands)
    assert len(seen) == 1 and (got.asnumpy() == want.asnumpy()).all()
    assert seen[0]["x1"].asnumpy().any() == mine, "one rank adds what is whole"


# -- products and their collectives ------------------------------------------------------------------------------------
class Fused:
    """`all_gather_matmul` and `matmul_reduce_scatter`, by the signatures of MindSpore's primitives and its pages."""

    def __init__(self, monkeypatch, group):
        self.group, self.seen = group, []
        monkeypatch.setattr(fused_products, "ascend_kernels", lambda: True)
        monkeypatch.setattr(group.backend, "communicator", lambda ranks: "the group's", raising=False)
        for name, primitive in (("all_gather_matmul", gen_ops_prim.AllGatherMatmul),
                                ("matmul_reduce_scatter", gen_ops_prim.MatmulReduceScatter)):
            monkeypatch.setattr(fused_products.ops, name, functools.partial(self.call, name, primitive))

    def call(self, name, primitive, x, w, group, world_size, **how):
        own = set(inspect.signature(primitive.__call__).parameters) - {"self"}
        assert {"input", "x2", "group", "world_size", *how} <= own, (name, how, own)
        assert (group, world_size) == ("the group's", self.group.size) and how.keys() <= {"trans_x2"}
        inner = w._shape[1 if how["trans_x2"] else 0]
        assert x.ndim == w.ndim == 2 and x._shape[1] == inner and x.dtype == w.dtype == ms.float16 and 256 <= inner < 65535
        self.seen.append(name)
        w = ms.mint.transpose(w, 0, 1) if how["trans_x2"] else w
        if name == "all_gather_matmul":
            there = self.group.backend.all_gather(x, 0, [x._shape[0]] * world_size, self.group.ranks)
            return ms.mint.matmul(there, w), there
        assert x._shape[0] % world_size == 0
        return self.group.backend.reduce_scatter(ms.mint.matmul(x, w), "sum", 0, [x._shape[0] // world_size] * world_size,
                                                 self.group.ranks)


def test_fused_products_are_told_what_mindspores_pages_say(monkeypatch):
    with comm.fake_world(2):
        group = comm.group((0, 1))
        x, w, b = rows(4, 256).astype(ms.float16), rows(6, 256).astype(ms.float16), rows(256, 5).astype(ms.float16)

        def run():
            with comm.record() as events:
                out = [*fused_products.all_gather_matmul(group, x, w, True),
                       *fused_products.all_gather_matmul(group, x, b, False),
                       fused_products.matmul_reduce_scatter(group, x, w, True),
                       fused_products.matmul_reduce_scatter(group, x, b, False)]
            return [y.asnumpy() for y in out], [(e.op, e.bytes) for e in events]
        want, told = run()
        double = Fused(monkeypatch, group)
        got, seen = run()
        for a, c in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, c)
        assert seen == told and double.seen == ["all_gather_matmul"] * 2 + ["matmul_reduce_scatter"] * 2
        for wrong in (rows(4, 255).astype(ms.float16), rows(4, 256)):
            with pytest.raises(CommError, match="the kernel does not take these operands"):
                fused_products.all_gather_matmul(group, wrong, wrong, True)
            with pytest.raises(CommError, match="float16 or bfloat16"):
                fused_products.matmul_reduce_scatter(group, wrong, wrong, True)


# -- which kernels a copy is: the views that CANN's `contiguous.cpp` gives as examples, and those of packing -----------
ROWS, WIDE = 64, 200  # gathered rows of so many ranks, each of so many elements


@pytest.mark.parametrize(("view", "kernels"), [
    (((6, 7, 5, 4), (7, 1, 42, 210), 0, 840), ["Transpose"]),  # these three are CANN's own
    (((2, 2, 3), (42, 7, 1), 109, 210), ["Slice"]),
    (((3, 2, 2), (42, 28, 2), 46, 210), ["StridedSlice"]),
    (((4, 5), (5, 1), 40, 210), []),
    (((3, 1, 5), (5, 77, 1), 0, 15), []),  # a dim of one element lies anywhere
    (((3, 5), (0, 1), 0, 5), ["BroadcastTo"]),
    (((ROWS, 128), (WIDE, 1), 72, ROWS * WIDE), ["Slice"]),
    (((ROWS, 128), (WIDE, 1), 73, ROWS * WIDE), ["AsStrided"]),  # no box: it would reach over a row's end
    (((2, ROWS, 64), (64, WIDE, 1), 0, ROWS * WIDE), ["AsStrided"]),  # two tensors side by side, of long pieces
    (((2, ROWS, 8), (8, WIDE, 1), 0, ROWS * WIDE), ["Slice", "Transpose"])])
def test_a_view_is_put_in_order(view, kernels):
    assert ordered(*view) == kernels


def test_a_copy_is_as_many_kernels_as_it_has_to_cast_and_to_order():
    whole, place = ((ROWS, 8), (8, 1), 0, ROWS * 8), ((ROWS, 8), (WIDE, 1))
    assert copied((ROWS, 8), (8, 1), whole, False) == ["TensorMove"]
    assert copied((ROWS, 8), (8, 1), whole, True) == ["Cast"], "a cast writes where it goes"
    assert copied(*place, whole, False) == ["ViewCopy"]
    assert copied(*place, whole, True) == ["Cast", "ViewCopy"], "into a row it cannot"
    assert copied(*place, (*place, 0, ROWS * WIDE), True) == ["Slice", "Cast", "ViewCopy"]
    assert copied((8, ROWS), (1, 8), ((8, ROWS), (ROWS, 1), 0, ROWS * 8), False) == ["Transpose"]


def test_what_lies_in_order_is_joined_at_once():
    whole, strided = ((ROWS, 8), (8, 1), 0, ROWS * 8), ((ROWS, 8), (WIDE, 1), 0, ROWS * WIDE)
    assert before_joining([whole] * 32) == [] and before_joining([whole, strided]) == ["Slice"]
    assert before_joining([whole] * 33) == ["ConcatD"], "and what that gives with the last one"
