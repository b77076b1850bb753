# SPDX-License-Identifier: Apache-2.0
"""Legal single-axis cases that a rule does not list: they cost communication, never rightness.

For one call, every combination of operand placements (R, S(d), P(sum)) that is not a case is run on shards as it is; if
the results and the gradients are those of the full op for some result placements, the rule could have listed it.
`REASONS` says why some are left out on purpose.
"""
from __future__ import annotations

import itertools

import numpy as np

from ...core.layout import Layout
from ...core.mesh import DeviceMesh, coordinates
from ...core.placements import PARTIAL, REPLICATE, Shard
from ...ops.rules import Case
from .oracle import assemble, box_slices, same, split

MOST = 400  # combinations of one call; calls with more operands are left out

# ops, separated by spaces -> why a case of theirs with a partial operand is not listed
REASONS = {
    "max min amax amin argmax argmin var std var_mean logsumexp count_nonzero minimum maximum heaviside nextafter":
        "not additive: true for this sample only (a dim of one element, shares that agree in sign)",
    "add sub": "a number is added: additive if it is 0 only",
    "nansum nan_to_num no_nan": "additive only as long as no share is infinite or NaN",
    "cast": "a narrower dtype rounds or wraps every share",
    "shift": "additive only as long as no share overflows",
    "where masked_fill masked_scatter index_fill pad one_hot write copy fill":
        "additive only if what is put in is shared out too, which a rule that sees no values cannot know",
    "scatter scatter_rows": "not additive: one rule for set, max, mul ..., and in some every element is overwritten",
    "addcmul addcdiv": "additive in `input` and `value` together; `value` is a number in practice",
    "xlogy": "additive in its first operand, which nobody has partial",
    "linear bias_add conv conv_transpose group_norm layer_norm_classic":
        "additive in weight or bias too, but these are parameters, which are never partial",
    "bce_with_logits binary_cross_entropy nll_loss": "additive in the weight of the classes, a constant",
    "grouped_matmul": "additive in a bias too, a parameter; products of one list are laid out alike",
    "rotary": "additive in cos and sin together, which are constants",
    "meshgrid": "additive if all vectors are partial alike; they are coordinates",
    "func_dropout func_dropout_channels rand_like randn_like randint_like bernoulli bernoulli_like normal_of":
        "seed and offset are operands that do not count; the draws come from our own stream",
}
EXACTLY = {
    "lp_norm: S(0) -> P(sum)": "for p = 1 only; a sum of abs does it",
    "index_fill: S(0), R, R, R -> S(0)": "the dim is a tensor, whose value no rule sees",
    "index_fill: S(1), R, R, R -> S(1)": "the dim is a tensor, whose value no rule sees",
    "flash_attention: R, R, P(sum), S(0) -> R, R, P(sum), P(sum)": "in sparse modes the mask is a constant",
    "flash_attention: R, R, P(sum), S(1) -> R, R, P(sum), P(sum)": "in sparse modes the mask is a constant",
    **dict.fromkeys(("grouped_matmul: R, S(0), S(1), R -> S(1), S(0)", "grouped_matmul: R, S(1), S(1), S(0) -> S(1), P(sum)",
                     "grouped_matmul: S(1), S(0), S(0), R -> P(sum), S(0)"), "products of one list are laid out alike"),
    "grouped_matmul: S(1), S(1), P(sum), R -> P(sum)": "a bias is a parameter, which is never partial",
    "moe_expert_tokens: S(0) -> P(sum)": "the kernel searches, and what it finds in a part is not documented",
    "upsample: S(2) -> S(2)": "where output cells divide evenly only; otherwise neighbours are needed",
    "adaptive_avg_pool: S(2) -> S(2)": "where output cells divide evenly only; otherwise neighbours are needed",
}


def reason(op: str, case: str) -> str | None:
    """Why this legal case is not listed, if a reason is on record."""
    if "P(" in case.split(" -> ")[0]:
        for names, why in REASONS.items():
            if op in names.split():
                return why
    return EXACTLY.get(f"{op}: {case}")


def find_missed(trial) -> set[str]:
    """The legal cases that the rule of one call (a `check.Trial`) misses and has no reason to, as text."""
    arrays = trial.arrays
    if any(0 in a.shape for a in (*arrays, *trial.results)) or not arrays:
        return set()
    if any(r.size > 1 and np.all(r == r.flat[0]) for r in trial.results):
        return set()  # a constant answer proves nothing
    choices = [[REPLICATE, *(Shard(d) for d, n in enumerate(a.shape) if n > 2),
                *([PARTIAL] if np.issubdtype(a.dtype, np.number) else [])] for a in arrays]
    if np.prod([len(c) for c in choices]) > MOST:
        return set()
    listed = {c.ins for c in trial.spec.cases}
    found = set()
    for ins in itertools.product(*choices):
        if ins in listed or all(p.is_replicate() for p in ins):
            continue
        outs = _right_results(trial, ins, 2)
        outs = outs and outs & _right_results(trial, ins, 3)
        if outs:
            case = Case(ins, min(outs, key=str))
            if reason(trial.call.op, str(case)) is None:
                found.add(f"{trial.call.op}: {case}")
    return found


def _right_results(trial, ins, n: int) -> set[tuple]:
    """Result placements under which running the op on shards of `ins` on `n` ranks is right, gradients included."""
    mesh = DeviceMesh("cpu", np.arange(n))
    layouts = tuple(Layout(mesh, [p], a.shape, str(a.dtype)) for p, a in zip(ins, trial.arrays))
    parts = [split(a, layout, trial.rng) for a, layout in zip(trial.arrays, layouts)]
    got: list[dict] = [{} for _ in trial.results]
    for at in coordinates(mesh):
        local = [p[at] for p in parts]
        if any(0 in x.shape for x in local):
            return set()
        try:
            results = _run(trial, local)
            if len(results) != len(trial.results):
                return set()
            for j, r in enumerate(results):
                got[j][at] = r.asnumpy()
        except Exception:  # noqa: BLE001  a combination that cannot run is not legal
            return set()
    per_result = []
    for j, whole in enumerate(trial.results):
        fits = []
        for p in (REPLICATE, PARTIAL, *(Shard(d) for d in range(whole.ndim))):
            layout = Layout(mesh, [p], whole.shape, str(whole.dtype))
            if all(v.shape == layout.local_shape(at) and v.dtype == whole.dtype for at, v in got[j].items()) and \
                    not (p.is_partial() and whole.dtype == bool):
                value, unequal = assemble(got[j], layout)
                if not unequal and same(whole, value):
                    fits.append(p)
        per_result.append(fits)
    return {outs for outs in itertools.product(*per_result) if _gradients_right(trial, ins, outs, layouts, parts, mesh)}


def _run(trial, local):
    from mindspore import Tensor
    result = trial.original([x if isinstance(x, Tensor) else Tensor(x) for x in local])
    return list(result) if isinstance(result, tuple | list) else [result]


def _gradients_right(trial, ins, outs, layouts, parts, mesh) -> bool:
    if trial.grads is None:
        return True
    out_layouts = [Layout(mesh, [p], r.shape, str(r.dtype)) for p, r in zip(outs, trial.results)]
    found: list[dict] = [{} for _ in trial.wrt]
    for at in coordinates(mesh):
        cotangents = [None if g is None else g[box_slices(layout, at)] for g, layout in zip(trial.cotangents, out_layouts)]
        try:
            grads = trial.gradients([p[at] for p in parts], cotangents, lambda xs: _run(trial, xs))
        except Exception:  # noqa: BLE001
            return False
        for k, g in enumerate(grads):
            found[k][at] = g
    for k, o in enumerate(trial.wrt):
        value, unequal = assemble(found[k], layouts[o].gradient((0,)))
        if unequal or not same(trial.grads[k], value):
            return False
    return True


__all__ = ["EXACTLY", "REASONS", "find_missed", "reason"]
