# SPDX-License-Identifier: Apache-2.0
"""What the verifier does not ask of fused attention: plain constants, the stream of dropout, which layouts move nothing."""
import numpy as np
import pytest
from mindspore import Tensor, ops

from ms_dtensor import DTensor, Replicate, Shard, comm, init_device_mesh, manual_seed
from ms_dtensor.comm import fake_world
from ms_dtensor.errors import MixedOperandError, OpRuleError
from ms_dtensor.ops import rng
from tests.coverage.references import TRIANGLE

RNG = np.random.default_rng(0)


def layers(*shape):
    return [Tensor(RNG.normal(size=shape).astype(np.float32)) for _ in range(3)]


def on_one_rank(*tensors):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    return [DTensor.from_local(x, mesh, [Replicate()]) for x in tensors]


def test_a_plain_compressed_mask_is_a_constant():
    xs = on_one_rank(*layers(2, 3, 4, 4))
    named = {"input_layout": "BSND", "sparse_mode": 2}
    plain = ops.flash_attention_score(*xs, 4, attn_mask=Tensor(TRIANGLE), **named)
    again = ops.flash_attention_score(*xs, 4, attn_mask=Tensor(TRIANGLE), **named)
    whole = ops.flash_attention_score(*xs, 4, attn_mask=on_one_rank(Tensor(TRIANGLE))[0], **named)
    np.testing.assert_array_equal(plain.to_local().asnumpy(), whole.to_local().asnumpy())
    np.testing.assert_array_equal(plain.to_local().asnumpy(), again.to_local().asnumpy())


def test_any_other_plain_mask_is_refused():
    mask = Tensor(np.triu(np.ones((3, 3), bool), 1))
    with pytest.raises(MixedOperandError, match="a plain Tensor of shape"):
        ops.flash_attention_score(*on_one_rank(*layers(2, 3, 4, 4)), 4, attn_mask=mask, input_layout="BSND")


def test_plain_lengths_are_refused_with_the_fix():
    ends = Tensor([2, 6])
    with pytest.raises(OpRuleError, match=r"tuple\(lengths.tolist\(\)\)"):
        ops.flash_attention_score(*on_one_rank(*layers(6, 4, 4)), 4, input_layout="TND", actual_seq_qlen=ends,
                                  actual_seq_kvlen=ends)


def test_dropout_goes_on_in_the_stream():
    def run():
        return ops.flash_attention_score(*xs, 4, keep_prob=0.5, input_layout="BNSD").to_local().asnumpy()
    xs = on_one_rank(*layers(2, 4, 8, 4))
    manual_seed(3)
    first, second = run(), run()
    manual_seed(3)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, run())


def test_ranks_compare_seeds_before_they_drop(monkeypatch):
    asked = []
    monkeypatch.setattr(rng, "agree", asked.append)
    xs = on_one_rank(*layers(2, 4, 8, 4))
    ops.flash_attention_score(*xs, 4, input_layout="BNSD")
    assert not asked
    ops.flash_attention_score(*xs, 4, keep_prob=0.5, input_layout="BNSD")
    ops.speed_fusion_attention(*xs, 4, "BNSD", keep_prob=0.5)
    assert len(asked) == 2


@pytest.mark.parametrize(("form", "shape", "dim"), [
    ("BSND", (8, 3, 4, 2), 2), ("BSND", (8, 3, 4, 2), 0), ("BSH", (8, 3, 8), 2), ("SBH", (3, 8, 8), 1),
    ("BNSD", (4, 8, 3, 2), 1), ("TND", (8, 4, 2), 0), ("TND", (8, 4, 2), 1)])
def test_batch_heads_and_sequences_stay_cut(form, shape, dim):
    with fake_world(2), comm.record() as events:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        local = [n // 2 if d == dim else n for d, n in enumerate(shape)]
        xs = [DTensor.from_local(x, mesh, [Shard(dim)]) for x in layers(*local)]
        heads = {"BNSD": 8}.get(form, 4)
        named = {"actual_seq_qlen": (4, 8), "actual_seq_kvlen": (4, 8)} if form == "TND" else {}
        out = ops.flash_attention_score(*xs, heads, input_layout=form, **named)
        assert out.placements == (Shard(dim),) and out.shape == shape
    assert [e for e in events if e.op != "all_gather_object"] == []
