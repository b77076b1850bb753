# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing moves whole rows of tokens, experts are matrix products.

Which row goes where depends on values, so rows are whole on every rank where they are sorted; what a row consists of may
be cut, and so may the experts' weights: their output dim (the results' columns), or the dim that is summed over (the
results are sums). Where each result row belongs to one token, tokens may be cut too. What Ascend's documents do not say
is refused.
"""
from __future__ import annotations

from ...errors import OpRuleError
from .spec import PARTIALS, SUMS, Call, Case, Local, LocalCall, OpSpec, P, R, S

_QUANT = "scale offset antiquant_scale antiquant_offset"
_ACTIVATION = "activation_input activation_quant_scale activation_quant_offset"
NAMES = f"""
moe_permute:MoeTokenPermute:input indices num_out_tokens padded_mode
moe_unpermute:MoeTokenUnpermute,InnerMoeTokenUnpermute:input indices probs padded_mode restore_shape
moe_gating:MoeGatingTopKSoftmax:input finished k
moe_init_routing:MoeInitRouting:input row_idx expert_idx active_num
moe_init_routing_v2:MoeInitRoutingV2:input expert_idx active_num expert_capacity expert_num drop_pad_mode counts before
moe_finalize:MoeFinalizeRouting:input x1 x2 bias scales row_idx expert_idx
moe_expert_tokens:MoeComputeExpertTokens:input num_expert
grouped_matmul:GroupedMatmul:input weight bias {_QUANT} group_list split_item group_type transpose_a transpose_b
grouped_matmul:GroupedMatmulV2:input weight bias {_QUANT} group_list split_item group_type
grouped_matmul:GroupedMatmulV4:input weight bias {_QUANT} pre_token_scale group_list {_ACTIVATION} split_item group_type \
group_list_type act_type output_dtype
grouped_matmul:Gmm,GmmV2:input weight bias group_list group_type group_list_type
"""


def _refuse(call: Call, what: str, rule: str, fix: str) -> OpRuleError:
    return OpRuleError(f"For '{call.op}', {what} is not supported on DTensors.", "", rule, fix)


def _rows_whole(call: Call, shapes, partials=PARTIALS) -> OpSpec:
    """The first result takes rows of operand 0 with all their columns; the others are about rows, in int32.

    These others every rank makes of the whole indices, so none may have an empty shard, which is not computed.
    """
    x, rest = call.operands[0], (R,) * (len(shapes) - 1)
    cases = [call.case({x.index: S(1)}, S(len(shapes[0]) - 1), *rest, even=((x.index, 1, x.shape[1]),) if rest else ())]
    cases += [call.case({x.index: p}, p, *rest) for p in partials]
    return OpSpec(tuple(shapes), tuple(cases), dtypes=(x.dtype, *("int32" for _ in rest)))


def permute(call: Call) -> OpSpec:
    """Tokens in the order of their experts, and where each (token, choice) went."""
    x, indices = call.args["input"], call.args["indices"]
    if call.get("padded_mode", False):
        raise _refuse(call, "padded_mode", "MoeTokenPermute itself knows only False.", "leave it out")
    rows = x.shape[0] * (indices.shape[1] if indices.ndim == 2 else 1)
    return _rows_whole(call, [(min(call.get("num_out_tokens") or rows, rows), x.shape[1]), (rows,)])


def unpermute(call: Call) -> OpSpec:
    """Each token's rows, weighted and added up. Tokens may be cut: of the permuted rows any may be needed."""
    x, indices, probs = call.args["input"], call.args["indices"], call.get("probs")
    if call.get("padded_mode", False):
        raise _refuse(call, "padded_mode", "MoeTokenUnpermute itself knows only False.", "leave it out")
    tokens = indices.shape[0] if probs is None else probs.shape[0]
    spec = _rows_whole(call, [(tokens, x.shape[1])], PARTIALS if probs is None else SUMS)
    cut = {indices.index: S(0)}
    even: tuple = ()
    cases = list(spec.cases)
    if probs is not None:
        cases += [call.case({probs.index: p}, p) for p in SUMS]
        cut[probs.index], even = S(0), ((indices.index, 0, tokens),)
    return OpSpec(spec.shapes, (*cases, call.case(cut, S(0), even=even)), dtypes=(x.dtype,))


def gating(call: Call) -> OpSpec:
    """(weights, experts, row numbers) of each token's k experts; row numbers count choice by choice through all tokens."""
    x, k = call.args["input"], int(call.get("k", 1))
    if call.get("finished") is not None or x.ndim != 2:
        raise _refuse(call, "'finished', or logits of 3 dims,", "What the kernel makes of them is not documented.",
                      "flatten the tokens: logits of [tokens, experts], without 'finished'")
    rows = x.shape[0]

    def local(at: Local) -> LocalCall | None:
        return LocalCall("moe_gating", (x, k, rows, at.in_offset(0)[0])) if at.in_shape(0)[0] != rows else None
    return OpSpec(((rows, k),) * 3, (Case((S(0),), (S(0),) * 3),), local, (x.dtype, "int32", "int32"))


def init_routing(call: Call) -> OpSpec:
    """(rows by expert, where each (token, choice) went, the experts sorted)."""
    (n, h), k = call.args["input"].shape, call.args["expert_idx"].shape[1]
    return _rows_whole(call, [(min(int(call.args["active_num"]), n) * k, h), (n * k,), (n * k,)])


def init_routing_v2(call: Call) -> OpSpec:
    """(rows by expert, or by expert and place; where each went; counts; counts before the drop)."""
    (n, h), k, experts = call.args["input"].shape, call.args["expert_idx"].shape[1], int(call.args["expert_num"])
    active = int(call.args["active_num"]) or n * k
    rows = (experts, int(call.args["expert_capacity"]), h) if call.args["drop_pad_mode"] else (min(active, n * k), h)
    return _rows_whole(call, [rows, (n * k,), (experts,), (experts,)])


def finalize(call: Call) -> OpSpec:
    """`x1 + x2 + sum over k of scale * (an expert's row + its bias)`.

    The experts' rows alone may be sums: one rank takes in the rest. Their cotangents are whole then, but for the scales'.
    """
    x = call.args["input"]
    rest = [call.args[n].index for n in ("x1", "x2", "bias") if call.get(n) is not None]
    alike = [x.index, *rest]
    cases = [call.case({i: p for i in alike}, p) for p in (S(1), *SUMS)]
    mixed = call.case({x.index: P}, P)
    cases.append(Case(mixed.ins, mixed.outs, invariant=tuple(rest)))

    def local(at: Local) -> LocalCall | None:
        axes = [a for a in at.outs[0].partial_axes if at.ins[rest[0]].placements[a].is_replicate()]
        args = (call.args.get(n) for n in ("input", "x1", "x2", "bias", "scales", "row_idx", "expert_idx"))
        return LocalCall("moe_finalize", (*args, at.is_first(axes))) if axes else None
    return OpSpec((call.args["x1"].shape,), tuple(cases), local, (x.dtype,))


def expert_tokens(call: Call) -> OpSpec:
    """How many of the sorted rows belong to experts up to each."""
    return OpSpec(((int(call.args["num_expert"]),),), ())


def grouped_matmul(call: Call) -> OpSpec:
    """Rows of one matrix by groups, each with its expert's matrix; or (group_type -1) a list of products.

    A bias would be added once per summand, so with one nothing is summed over.
    """
    xs, ws, bs = call.args["input"], call.args["weight"], call.get("bias") or ()
    bs = [b for b in bs if b is not None]
    unknown = *_QUANT.split(), *_ACTIVATION.split(), "pre_token_scale"
    if any(call.get(n) is not None for n in unknown) or call.get("act_type", 0):
        raise _refuse(call, "quantisation", "Scales belong to whole weights.", "multiply by the scales yourself")
    kind = int(call.get("group_type", -1))
    if kind not in (0, -1):
        raise _refuse(call, f"group_type {kind}", "It is the gradient's form, which MindSpore calls itself.",
                      "use group_type 0, or -1 for a list of products")
    each = -1 if kind else 0  # the experts' dim comes first in a weight of group_type 0
    inner, outer = (1, 2) if each == 0 else (0, 1)
    n = len(xs)
    shapes = tuple((*x.shape[:-1], w.shape[outer]) for x, w in zip(xs, ws))

    def of(operands, dim):
        return {o.index: dim(o) for o in operands}
    last = [S(len(s) - 1) for s in shapes]
    cases = [call.case({**of(ws, lambda _: S(outer)), **of(bs, lambda b: S(b.ndim - 1))}, *last)]
    if kind == -1:
        cases += [call.case(of(xs, lambda _, d=d: S(d)), *(S(d),) * n) for d in range(min(x.ndim for x in xs) - 1)]
    if not bs:
        cases.append(call.case({**of(xs, lambda x: S(x.ndim - 1)), **of(ws, lambda _: S(inner))}, *(P,) * n))
        cases += [call.case(of(side, lambda _, p=p: p), *(p,) * n) for side in (xs, ws) for p in SUMS]
    return OpSpec(shapes, tuple(cases), dtypes=tuple(x.dtype for x in xs))


RULES = {"moe_permute": permute, "moe_unpermute": unpermute, "moe_gating": gating, "moe_init_routing": init_routing,
         "moe_init_routing_v2": init_routing_v2, "moe_finalize": finalize, "moe_expert_tokens": expert_tokens,
         "grouped_matmul": grouped_matmul}
