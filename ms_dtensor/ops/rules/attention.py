# SPDX-License-Identifier: Apache-2.0
"""Fused attention: batch and heads may be sharded, head dims are whole; packed sequences are cut between two of them.

A sequence is gathered, never attended locally (ring attention is a style of its own, not an op rule), but for the queries
of one where the masks alone say what each sees. With heads sharded the local call is told the shard's number of heads.
Grouped keys shard with their queries: whole groups only. Dropout draws from the one stream, by an element's place in the
global scores. What Ascend's documents rule out, or leave open, is refused on every device.
"""
from __future__ import annotations

from dataclasses import replace

from ...errors import OpRuleError
from .spec import Call, Case, Local, LocalCall, Operand, OpSpec, P, R, S

_FLASH = ("query key value real_shift drop_mask padding_mask attn_mask prefix actual_q actual_kv head_num keep_prob scale "
          "pre_tokens next_tokens inner_precise input_layout sparse_mode")
_SPEED = ("query key value head_num input_layout seed offset real_shift padding_mask attn_mask scale keep_prob pre_tokens "
          "next_tokens inner_precise prefix actual_q actual_kv sparse_mode gen_mask_parallel sync pse_type q_start kv_start")
_RING = "attn_out softmax_max softmax_sum other_out other_max other_sum actual_q layout"
NAMES = f"""
flash_attention:FlashAttentionScore:{_FLASH}
speed_attention:SpeedFusionAttention:{_SPEED}
ring_update:RingAttentionUpdate:{_RING}
prompt_attention:PromptFlashAttention,IncreFlashAttention,FusedInferAttentionScore,PagedAttention:*args
"""

LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND", "TH")  # MindSpore's numbers for them are their positions
FAR = 2**31 - 1
COMPRESSED = (2048, 2048)


def layout_name(value) -> str:
    """The input layout by name, as MindSpore passes it by number."""
    return LAYOUTS[value] if isinstance(value, int) else str(value)


def constants(arguments: dict) -> tuple[str, ...]:
    """The arguments that may be plain tensors: the one lower triangle; lengths, which are refused for another reason."""
    mask, lengths = arguments.get("attn_mask"), ("actual_q", "actual_kv")
    same = mask is not None and int(arguments.get("sparse_mode") or 0) in (2, 3, 4) and tuple(mask.shape) == COMPRESSED
    return *(["attn_mask"] if same else []), *(n for n in lengths if hasattr(arguments.get(n), "shape"))


def refuse(what: str, rule: str, *fix: str) -> OpRuleError:
    """`flash_attention_score` with something that is not to be had."""
    return OpRuleError(f"For 'flash_attention_score', {what}.", "", rule, fix)


def _check(call: Call, form: str, mode: int) -> None:
    """Refuses what the documents rule out or leave open."""
    mask, lengths = call.get("attn_mask"), (call.get("actual_q"), call.get("actual_kv"))
    if form not in LAYOUTS[:5]:
        raise refuse(f"there is no layout {form}", "MindSpore knows BSH, BNSD, SBH, BSND and TND.", "use BSND")
    if call.get("prefix") is not None or call.get("padding_mask") is not None or not 0 <= mode <= 4:
        raise refuse("prefixes, padding masks and sparse modes above 4 are not supported on DTensors",
                     "They are about whole sequences.", "use attn_mask with sparse_mode 0 to 4")
    if call.get("drop_mask") is not None:
        raise refuse("a drop_mask is not supported on DTensors", "The order of its bits is not documented.",
                     "leave it out: with keep_prob below 1 each layout drops the same weights, by ms_dtensor.manual_seed")
    if any(isinstance(x, Operand) for x in lengths):
        raise refuse("the sequence lengths are a tensor", "Where sequences are cut depends on their values.",
                     "actual_seq_qlen=tuple(lengths.tolist())")
    if (form == "TND") != (lengths[0] is not None) or (form == "TND") != (lengths[1] is not None):
        raise refuse(f"the layout is {form}, and the sequence lengths are {lengths[0]} and {lengths[1]}",
                     "TND packs sequences, and no other layout does.", "pass both with TND, and neither otherwise")
    if mode > 1 and (mask is None or mask.shape != COMPRESSED):
        given = "without attn_mask" if mask is None else f"with one of {list(mask.shape)}"
        raise refuse(f"sparse_mode {mode} comes {given}",
                     "The kernel wants the compressed mask; without one it looks at everything.",
                     "attn_mask=Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1)), the same on every rank")
    if form == "TND" and (call.get("real_shift") is not None or mode < 2 and mask is not None):
        raise refuse("TND comes with real_shift, or with a mask that is not compressed",
                     "Which rows of it belong to a sequence is not documented.", "use sparse_mode 2, 3 or 4")
    if call.get("keep_prob", 1.0) < 1.0 and (form == "TND" or call.args["key"].shape[form.index("S")] % 8):
        raise refuse("dropout is not supported with TND, nor with a key sequence that 8 does not divide",
                     "The mask is of bytes of eight weights; their order in TND is not documented.",
                     "pad the keys and mask them", "use keep_prob=1.0")


def flash_attention(call: Call) -> OpSpec:
    """`flash_attention_score`: (softmax max, softmax sum, nothing, result); the first three are the kernel's own."""
    q, k, v = (call.args[n] for n in ("query", "key", "value"))
    form, mode = layout_name(call.get("input_layout", 0)), int(call.get("sparse_mode", 0))
    _check(call, form, mode)
    heads, keep = int(call.args["head_num"]), float(call.get("keep_prob", 1.0))
    head = form.index("N" if "N" in form else "H")
    own = heads if "N" in form else q.shape[head]  # extent that a rank's heads are a part of
    groups = heads * k.shape[head] // q.shape[head]
    result = (*q.shape[:-1], v.shape[-1] if "N" in form else heads * (v.shape[-1] // groups))
    cases = [*_heads(call, q, k, v, head, heads, groups), call.case({v.index: P}, R, R, R, P)]
    if form == "TND":
        stats = (q.shape[0], heads, 8)
        cases += _between_sequences(call, q, k, v)
    else:
        batch, seq = form.index("B"), form.index("S")
        stats = (q.shape[batch], heads, q.shape[seq], 8)
        at = {x.index: S(batch) for x in (q, k, v)} | _masks(call, 0, q.shape[batch])
        cases.append(call.case(at, S(0), S(0), R, S(batch)))
        far = int(call.get("pre_tokens", FAR)) == int(call.get("next_tokens", FAR)) == FAR
        if mode == 1 or mode == 0 and (far or call.get("attn_mask") is None):
            at = {q.index: S(seq)} | {x.index: S(x.ndim - 2) for x in _of_scores(call) if x.shape[-2] > 1}
            cases.append(call.case(at, S(2), S(2), R, S(seq)))

    def local(at: Local) -> LocalCall | None:
        mine = at.in_shape(q.index)[head] * heads // own
        lengths = None if form != "TND" else _sequences(call, at.in_offset(q.index)[0], at.in_offset(k.index)[0],
                                                        at.in_shape(q.index)[0], at.in_shape(k.index)[0])
        if mine == heads and keep == 1.0 and (lengths is None or lengths == _ends(call)):
            return None
        box = None
        if keep < 1.0:
            (q0, q1), (b0, b1), (h0, h1) = (at.ins[q.index].local_box(at.coordinate)[d] for d in (seq, batch, head))
            rows = k.shape[seq]
            box = ((q.shape[batch], heads, q.shape[seq], rows), ((b0, b1), (h0 * heads // own, h1 * heads // own), (q0, q1),
                                                                 (0, rows)))
        tensors = (call.args.get(n) for n in ("query", "key", "value", "real_shift", "attn_mask"))
        tokens = (int(call.get(n, FAR)) for n in ("pre_tokens", "next_tokens"))
        name = "flash_attention" if box is None else "dropout_attention"
        return LocalCall(name, (*tensors, mine, keep, float(call.get("scale", 1.0)), *tokens, form, mode),
                         {"lengths": lengths, "dropped": box})
    return OpSpec((stats, stats, (1,), result), tuple(cases), local, ("float32", "float32", q.dtype, q.dtype))


def _of_scores(call: Call):
    """The operands that have a place for each score, or broadcast to that; a compressed mask has none."""
    names = ("real_shift",) if int(call.get("sparse_mode", 0)) > 1 else ("real_shift", "attn_mask")
    return [m for m in map(call.get, names) if m is not None]


def _masks(call: Call, dim: int, extent: int) -> dict:
    """Batch or heads are cut: so are the masks that have them."""
    return {m.index: S(dim) for m in _of_scores(call) if m.ndim == 4 and m.shape[dim] == extent > 1}


def _heads(call: Call, q, k, v, head: int, heads: int, groups: int):
    """Whole groups of query heads with their keys; a key that all of them share is whole."""
    at = {q.index: S(head), **_masks(call, 1, heads)}
    stat = S(1)
    if groups == 1 < heads:
        yield call.case(at, stat, stat, R, S(head), even=((q.index, head, heads),))
    yield call.case(at | {k.index: S(head), v.index: S(head)}, stat, stat, R, S(head),
                    even=((q.index, head, groups), (k.index, head, groups)))


def _ends(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the packed sequences end, among queries and among keys."""
    return tuple(map(int, call.args["actual_q"])), tuple(map(int, call.args["actual_kv"]))


def _between_sequences(call: Call, q, k, v) -> list[Case]:
    """Packed sequences cut into equal parts, if each cut is between two sequences, of queries and of keys."""
    ends = set(zip(*_ends(call)))
    for parts in range(len(ends), 1, -1):
        if q.shape[0] % parts == k.shape[0] % parts == 0 and all(
                (q.shape[0] // parts * i, k.shape[0] // parts * i) in ends for i in range(1, parts)):
            return [call.case({x.index: S(0) for x in (q, k, v)}, S(0), S(0), R, S(0),
                              even=tuple((x.index, 0, parts) for x in (q, k, v)))]
    return []


def _sequences(call: Call, q0: int, k0: int, rows: int, cols: int):
    """The ends of the sequences of one rank, whose first query and key are these."""
    pairs = [(q - q0, k - k0) for q, k in zip(*_ends(call)) if not (q <= q0 and k <= k0 and q0 + k0)]
    kept = [(q, k) for q, k in pairs if q <= rows and k <= cols]
    return tuple(q for q, _ in kept), tuple(k for _, k in kept)


_SPEED_FORM = {"flash_attention": "speed_attention", "dropout_attention": "dropout_speed_attention"}


def speed_attention(call: Call) -> OpSpec:
    """`speed_fusion_attention`: (result, softmax max, softmax sum, nothing, seed, offset, size of a mask): see above.

    Its kernel would draw by local places, so a mask comes from our stream here, too, and from the other kernel.
    """
    if call.get("pse_type", 1) != 1 or call.get("q_start") is not None or call.get("kv_start") is not None:
        raise refuse("positions that the kernel makes, and pse_type other than 1, are not supported on DTensors",
                     "They count from the first local row.", "pass pse, with pse_type=1")
    spec = flash_attention(call)
    top, total, nothing, result = spec.shapes
    cases = tuple(Case(c.ins, (c.outs[3], *c.outs[:3], R, R, R), c.even, c.invariant) for c in spec.cases)

    def local(at: Local) -> LocalCall | None:
        outs = *at.outs[1:4], at.outs[0]
        made = None if spec.local is None else spec.local(Local(at.ins, outs, at.coordinate))
        return made and replace(made, name=_SPEED_FORM[made.name])
    return replace(spec, shapes=(result, top, total, (0,), (), (), ()), cases=cases, local=local,
                   dtypes=(call.operands[0].dtype, "float32", "float32", call.operands[0].dtype, *("int64",) * 3))


def ring_update(call: Call) -> OpSpec:
    """`ring_attention_update`: two results of attention as one, (result, softmax max, softmax sum), over [S, B, H]."""
    if str(call.get("layout", "SBH")) not in ("SBH", "2") or call.get("actual_q") is not None:
        raise OpRuleError("For 'ring_attention_update', only the layout SBH is supported on DTensors.", "",
                          "In TND the order of the statistics within a sequence is not documented.",
                          ("layout='SBH'", "run it on shards with local_map"))
    out, stat = call.args["attn_out"], call.args["softmax_max"]
    outs, stats = ("attn_out", "other_out"), ("softmax_max", "softmax_sum", "other_max", "other_sum")
    cases = []
    for d, s in ((0, 2), (1, 0), (2, 1)):
        at = {**{call.args[n].index: S(d) for n in outs}, **{call.args[n].index: S(s) for n in stats}}
        cases.append(call.case(at, S(d), S(s), S(s), even=((0, d, stat.shape[1]),) if s == 1 else ()))
    return OpSpec((out.shape, stat.shape, stat.shape), tuple(cases), dtypes=(out.dtype, stat.dtype, stat.dtype))


def refused(call: Call) -> OpSpec:
    """Inference kernels that keep a cache."""
    raise OpRuleError(f"For '{call.op}', there is no rule for DTensors.", "",
                      "It works on a key-value cache, whose layout is a serving engine's business.",
                      ("use flash_attention_score", "run it on shards with local_map"))


RULES = {"flash_attention": flash_attention, "speed_attention": speed_attention, "ring_update": ring_update,
         "prompt_attention": refused}
CONSTANTS = dict.fromkeys(("flash_attention", "speed_attention"), constants)
