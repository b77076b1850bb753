# SPDX-License-Identifier: Apache-2.0
"""Fused attention: batch and heads may be sharded, sequences and head dims are whole.

The sequence is gathered, never attended locally (ring attention is a style of its own, not an op rule). With heads
sharded the local call is told the shard's number of heads. Grouped keys shard with their queries: whole groups only.
"""
from __future__ import annotations

from ...errors import OpRuleError
from .spec import Call, Case, Local, LocalCall, OpSpec, P, R, S

_FLASH = ("query key value real_shift drop_mask padding_mask attn_mask prefix actual_q actual_kv head_num keep_prob scale "
          "pre_tokens next_tokens inner_precise input_layout sparse_mode")
NAMES = f"""
flash_attention:FlashAttentionScore:{_FLASH}
prompt_attention:PromptFlashAttention,IncreFlashAttention,FusedInferAttentionScore,PagedAttention:*args
rotary:RotaryPositionEmbedding:input cos sin mode
apply_rotary:ApplyRotaryPosEmb:*args
"""

LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND", "TH")  # MindSpore's numbers for them are their positions
_DROPPED = "A random mask per head would need the shard's place in the global stream."


def layout_name(value) -> str:
    """The input layout by name, as MindSpore passes it by number."""
    return LAYOUTS[value] if isinstance(value, int) else str(value)


def flash_attention(call: Call) -> OpSpec:
    """`flash_attention_score`: (softmax max, softmax sum, nothing, result); the first three are the kernel's own."""
    q, k, v = (call.args[n] for n in ("query", "key", "value"))
    form = layout_name(call.get("input_layout", 0))
    if form not in ("BSH", "BNSD", "SBH", "BSND"):
        raise OpRuleError(f"For 'flash_attention_score', the layout {form} is not supported on DTensors.", "",
                          "Its sequences are packed along one dim, across shards.", "use BSH or BNSD")
    if call.get("keep_prob", 1.0) != 1.0 or call.get("drop_mask") is not None or call.get("prefix") is not None:
        raise OpRuleError("For 'flash_attention_score', dropout and prefixes are not supported on DTensors.", "", _DROPPED,
                          "use keep_prob=1.0")
    heads = int(call.args["head_num"])
    batch, seq, head = form.index("B"), form.index("S"), form.index("N" if "N" in form else "H")
    shared = (q.shape[1 if form == "BNSD" else 2] // k.shape[1 if form == "BNSD" else 2]) if "N" in form else \
        q.shape[-1] // k.shape[-1]
    stats = (q.shape[batch], heads, q.shape[seq], 8)

    def case(dim, stat, batch_size):
        at = {q.index: S(dim), k.index: S(dim), v.index: S(dim)}
        for name in ("real_shift", "padding_mask", "attn_mask"):
            m = call.get(name)
            if m is not None:
                if m.ndim == 4 and m.shape[stat] == batch_size > 1:
                    at[m.index] = S(stat)
        groups = heads // shared
        even = ((q.index, dim, groups), (k.index, dim, groups)) if stat == 1 else ()
        return call.case(at, S(stat), S(stat), R, S(dim), even=even)

    cases = [case(batch, 0, q.shape[batch]), case(head, 1, heads),
             call.case({v.index: P}, R, R, R, P)]
    far = 2**31 - 1
    if int(call.get("sparse_mode", 0)) == 0 and int(call.get("pre_tokens", far)) == int(call.get("next_tokens", far)) == far:
        cases.append(_queries(call, q, seq))

    def local(at: Local) -> LocalCall:
        parts = at.ins[q.index].divisor(head)
        names = ("query", "key", "value", "real_shift", "attn_mask")
        static = (heads // parts, float(call.get("scale", 1.0)), int(call.get("pre_tokens", 2**31 - 1)),
                  int(call.get("next_tokens", 2**31 - 1)), form, int(call.get("sparse_mode", 0)))
        return LocalCall("flash_attention", (*(call.args.get(n) for n in names), *static))
    if call.get("padding_mask") is not None or call.get("actual_q") is not None or call.get("actual_kv") is not None:
        raise OpRuleError("For 'flash_attention_score', padding masks and sequence lengths are not supported on DTensors.",
                          "", "MindSpore itself does not support them outside packed layouts.", "use attn_mask")
    return OpSpec((stats, stats, (1,), q.shape), tuple(cases), local,
                  ("float32", "float32", q.dtype, q.dtype))


def _queries(call: Call, q, seq: int) -> Case:
    """Some queries of each sequence against all keys: which they are only the masks tell, so these are cut alike."""
    at = {q.index: S(seq)}
    for name in ("real_shift", "attn_mask"):
        m = call.get(name)
        if m is not None and m.shape[-2] > 1:
            at[m.index] = S(m.ndim - 2)
    return call.case(at, S(2), S(2), R, S(seq))


def refused(call: Call) -> OpSpec:
    """Inference kernels that keep a cache."""
    raise OpRuleError(f"For '{call.op}', there is no rule for DTensors.", "",
                      "It works on a key-value cache, whose layout is a serving engine's business.",
                      ("use flash_attention_score", "run it on shards with local_map"))


def rotary(call: Call) -> OpSpec:
    """`rotary_position_embedding(x, cos, sin)`: all dims but the last pointwise; cos and sin broadcast."""
    x, cos, sin = (call.args[n] for n in ("input", "cos", "sin"))
    cases = []
    for d in range(x.ndim - 1):
        split = (o for o in call.operands if o is x or o.shape[d] == x.shape[d] != 1)
        cases.append(call.case({o.index: S(d) for o in split}, S(d)))
    cases.append(call.case({x.index: P}, P))
    return OpSpec((x.shape,), tuple(cases), dtypes=(x.dtype,))


RULES = {"flash_attention": flash_attention, "prompt_attention": refused, "apply_rotary": refused, "rotary": rotary}
