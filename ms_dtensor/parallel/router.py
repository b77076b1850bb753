# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, and what keeps experts equally loaded.

A router is arithmetic on each token's scores. What is counted is a *result* of it, never a buffer that a forward writes: a
forward that runs again for recomputing, or for evaluation, counts nothing twice. Not here: the experts (`experts.py`).
"""
from __future__ import annotations

from numbers import Integral
from typing import Literal

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ..core.placements import PARTIAL, REPLICATE
from ..custom_ops.local_map import local_map
from ..debug.types.doors import on_host
from ..errors import ConfigError
from ..internals.target import on_cpu
from ..ops.local.dtypes import full, wider
from ..tensor.dtensor import DTensor


class Router(nn.Cell):
    """Chooses k experts for each token by its scores, in float32; of equal scores the lower expert is taken.

    With groups, experts are in that many groups of neighbours, and only those of the `group_limit` best groups can be
    chosen. A group is as good as its best expert or, of sigmoids, as its two best together (as DeepSeek-V2 and V3 have it).

    Args:
        k: experts for a token.
        score: "softmax" over all experts, or "sigmoid" of each.
        groups: groups of experts; 1: none.
        group_limit: groups that a token may choose from.
        normalise: weights of a token's experts are divided by their sum.
        scale: factor of the weights, after that.
        bias: f32[E], added to scores where experts are chosen, not to weights; it has no gradient. See
            `update_expert_bias`.

    Returns:
        Called with logits f[n, E], plain or DTensor (whose rows may be cut): weights f32[n, k], best first, and chosen
        i32[n, k]. A second argument takes the place of `bias`: a parameter of the cell around it, say.

    Raises:
        ConfigError: numbers that do not fit each other.

    Source: Fedus et al. 2021, "Switch Transformers"; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> weights, chosen = md.Router(2)(ms.Tensor([[0.0, 2.0, 1.0, 2.0]]))
        >>> chosen.asnumpy().tolist(), weights.asnumpy().tolist()
        ([[1, 3]], [[0.5, 0.5]])
    """

    def __init__(self, k: int, *, score: Literal["softmax", "sigmoid"] = "softmax", groups: int = 1, group_limit: int = 1,
                 normalise: bool = True, scale: float = 1.0, bias: Tensor | None = None):
        super().__init__()
        if score not in ("softmax", "sigmoid"):
            raise ConfigError(f"For 'Router', 'score' is {score!r}.", "", "Scores are 'softmax' or 'sigmoid'.",
                              'score="softmax"')
        whole = all(isinstance(n, Integral) and not isinstance(n, bool) for n in (k, groups, group_limit))
        if not whole or k < 1 or not 1 <= group_limit <= groups:
            raise ConfigError("For 'Router', the numbers do not fit each other.",
                              f"k = {k!r}, groups = {groups!r}, group_limit = {group_limit!r}",
                              "A token has at least one expert, from at least one of the groups.",
                              "whole numbers" if not whole else f"group_limit with at most {groups}" if k >= 1 else "k = 1")
        self.k, self.score, self.groups, self.group_limit = int(k), score, int(groups), int(group_limit)
        self.normalise, self.scale, self.bias = normalise, scale, bias

    def construct(self, logits, bias=None):
        bias = self.bias if bias is None else bias
        self._check(logits.shape, bias)
        if not isinstance(logits, DTensor):
            return self._chosen(logits, bias)
        rows, whole = _rows_of(logits), [REPLICATE] * logits.device_mesh.ndim
        given = whole if isinstance(bias, DTensor) else None
        run = local_map(self._chosen, (rows, rows), (rows, given), redistribute_inputs=True,
                        out_shapes=lambda *shapes: ((shapes[0][0], self.k),) * 2)
        return run(logits, bias)

    def scores(self, logits):
        """f32[n, E] of logits f[n, E]: before bias, groups and scale; for `expert_balance_loss`."""
        wide = wider(logits)
        return mint.softmax(wide, -1) if self.score == "softmax" else mint.sigmoid(wide)

    def _check(self, shape, bias) -> None:
        if len(shape) != 2:
            raise ConfigError("For 'Router', the logits are not one row per token.", f"logits{list(shape)}",
                              "They are f[n, experts].", "reshape(-1, experts)")
        count = shape[1]
        if bias is not None and tuple(bias.shape) != (count,):
            raise ConfigError("For 'Router', 'bias' is not of one number per expert.",
                              f"bias{list(bias.shape)}, logits{list(shape)}", "Each expert's score has its own.",
                              f"bias of [{count}]")
        most = count // self.groups * self.group_limit
        if count % self.groups or self.k > most or (self.score == "sigmoid" and 1 < self.groups > count // 2):
            raise ConfigError(f"For 'Router', {count} experts do not fit.",
                              f"k = {self.k}, groups = {self.groups}, group_limit = {self.group_limit}",
                              f"A token chooses k different experts of the {most} in its groups; groups are equal, of "
                              "sigmoids of two at least.",
                              [f"k with at most {most}" if most else "fewer groups", "groups = 1"])

    def _chosen(self, logits, bias):
        n, count = logits.shape
        if not n:  # a rank without tokens; the CPU's kernels refuse it
            return wider(logits)[:, :self.k], full((0, self.k), 0, ms.int32)  # nor has it a gradient of slices of bfloat16
        scores = self.scores(logits)
        choice = ops.stop_gradient(scores if bias is None else scores + bias.astype(scores.dtype))
        # a score that is NaN is never chosen, and a CPU's softmax makes 0 of those beside it: all weights of the row tell it
        nan = choice.sum(-1, keepdims=True) * 0
        if self.groups > 1:
            choice = choice.reshape(n, self.groups, -1)
            best = ops.topk(choice, 2 if self.score == "sigmoid" else 1)[0].sum(-1)
            allowed = ops.one_hot(_best(best, self.group_limit), self.groups).sum(1).reshape(n, -1, 1)
            choice = choice.masked_fill(allowed <= 0, -float("inf")).reshape(n, count)
        chosen = _best(choice, self.k)
        weights = ops.gather_elements(scores, 1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)  # sigmoids may all be 0
        weights = weights + nan
        return weights * self.scale if self.scale != 1.0 else weights, chosen


def _rows_of(x: DTensor) -> list:
    """The placements of x with nothing cut but rows."""
    return [p if p.is_shard() and p.dim in (0, -x.ndim) else REPLICATE for p in x.placements]


def _best(values: Tensor, k: int) -> Tensor:
    """i32[n, k]: columns of the k largest, best first; a kernel for top-k leaves it open which of equal ones it takes."""
    if on_cpu():
        return on_host(lambda x: np.ascontiguousarray(np.argsort(-x, 1, "stable")[:, :k], np.int32), values)
    return mint.sort(values, dim=1, descending=True, stable=True)[1][:, :k].astype(ms.int32)


def expert_counts(chosen: Tensor, experts: int) -> Tensor:
    """i64[experts]: how many choices each expert got; of a DTensor a sum over the axes that cut its rows.

    Args:
        chosen: i32[n, k]; -1: dropped, not counted.
        experts: how many there are.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> md.expert_counts(ms.Tensor([[0, 2], [2, 1]], ms.int32), 4).asnumpy().tolist()
        [1, 1, 2, 0]
    """
    if chosen.ndim != 2:
        raise ConfigError("For 'expert_counts', 'chosen' is not one row per token.", f"chosen{list(chosen.shape)}",
                          "It is i[n, k].", "chosen.reshape(-1, 1), of one expert a token")

    def count(chosen):
        if not chosen.shape[0]:
            return full((experts,), 0, ms.int64)
        return ops.one_hot(chosen, experts).astype(ms.int64).sum((0, 1))
    if not isinstance(chosen, DTensor):
        return count(chosen)
    rows = _rows_of(chosen)
    summands = [PARTIAL if p.is_shard() else p for p in rows]
    return local_map(count, summands, (rows,), redistribute_inputs=True, out_shapes=lambda *_: ((experts,),))(chosen)


def update_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias for the next step: experts below the mean load rise by `rate`, those above fall, and the mean stays.

    Call it once a step, after the optimizer's, with the counts of all micro-batches added up. They are integers, so every
    mesh and every accumulation gives the same bits.

    Args:
        bias: f32[E] or, of all layers beside each other, f32[layers, E].
        counts: i64 of the same shape, from `expert_counts`; a DTensor is summed up by one all-reduce.
        rate: how far an expert moves.

    Returns:
        The new bias, laid out as the old one.

    Raises:
        ConfigError: shapes that differ; counts that are not integers, a bias that is no float.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts".

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> bias = md.update_expert_bias(ms.Tensor([0.0, 0.0]), ms.Tensor([3, 1]), rate=0.5)
        >>> bias.asnumpy()
        array([-0.5,  0.5], dtype=float32)
    """
    if tuple(bias.shape) != tuple(counts.shape):
        raise ConfigError("For 'update_expert_bias', there is not one count for each bias.",
                          f"bias{list(bias.shape)}, counts{list(counts.shape)}", "Both are [E] or [layers, E].",
                          "stack the layers' counts as their biases are")
    if counts.is_floating_point() or not bias.is_floating_point():
        raise ConfigError("For 'update_expert_bias', the dtypes do not fit.", f"bias {bias.dtype}, counts {counts.dtype}",
                          "Counts are integers: a share of the load would be cut to 0. A bias moves by parts of one.",
                          "md.expert_counts(chosen, experts), and a bias of float32")
    loads = (counts.full_tensor() if isinstance(counts, DTensor) else counts).asnumpy().astype(np.int64)
    sign = np.sign(loads.sum(-1, keepdims=True) - loads.shape[-1] * loads)
    step = Tensor((rate * (sign - sign.mean(-1, keepdims=True))).astype(np.float32)).astype(bias.dtype)
    if isinstance(bias, DTensor):
        mesh = bias.device_mesh
        step = DTensor.from_local(step, mesh, [REPLICATE] * mesh.ndim).redistribute(placements=bias.placements)
    return ops.stop_gradient(bias + step)


def expert_balance_loss(scores: Tensor, chosen: Tensor, t: int) -> Tensor:
    """Mean over sequences of `E * sum(share * mean score)`, at least k; experts chosen equally often have the least.

    Each sequence counts by itself, so micro-batches and meshes that cut sequences from each other change nothing.

    Args:
        scores: f32[rows * t, E], from `Router.scores`.
        chosen: i32[rows * t, k].
        t: tokens of a sequence.

    Source: as `load_balancing_loss_func` of `transformers`, per sequence as in DeepSeek-V3, whose loss is this one / k.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> scores = ms.Tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> float(md.expert_balance_loss(scores, ms.Tensor([[0], [1]], ms.int32), t=2))
        1.0
    """
    n, count = scores.shape
    if t < 1 or n % t or chosen.ndim != 2 or chosen.shape[0] != n:
        raise ConfigError(f"For 'expert_balance_loss', the rows are not sequences of {t} tokens.",
                          f"scores{list(scores.shape)}, chosen{list(chosen.shape)}",
                          "Scores are [rows * t, E], and chosen [rows * t, k].",
                          "pass t as the model's sequences have it")
    rows = n // t
    scores = scores / scores.sum(-1, keepdims=True)  # of a softmax it is 1; sigmoids are shares of their sum
    share = ops.one_hot(chosen, count).astype(scores.dtype).sum(1)
    share, score = (v.reshape(rows, t, count).mean(1) for v in (share, scores))
    return (share * score).sum() * count / rows


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of the square of log-sum-exp of logits f[n, E]: keeps them small.

    Source: Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models", equation 5.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> round(float(md.router_z_loss(ms.Tensor([[0.0, 0.0]]))), 4)
        0.4805
    """
    return (ops.logsumexp(wider(logits), -1) ** 2).mean()
