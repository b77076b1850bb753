# SPDX-License-Identifier: Apache-2.0
"""QK-Clip: queries and keys of heads whose attention logits grew too large are made smaller, after a step of the optimizer.

Muon lets logits grow (Kimi K2, arXiv:2507.20534): where the largest logit of a head is above a threshold, its query and key
weights are multiplied so that it would have been the threshold. `max_logits` is the monitor, `qk_clip_` the step.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, Tensor, mint

from ..dispatch.modes import implicit_replication
from ..errors import ConfigError, LayoutError
from ..internals.names import NoFallbackGuard, no_grad
from ..tensor.dtensor import DTensor
from .arrays import layout_of, precision, values, write

_ROWS = 512  # of queries at a time: their logits are the memory that this needs


def max_logits(query: Tensor, key: Tensor, scale: float | None = None, causal: bool = True) -> np.ndarray:
    """The largest attention logit of each head, over the batch and all pairs of places that see each other.

    Args:
        query: [batch, heads, places, width], plain or a DTensor in any layout, as attention takes it.
        key: [batch, key heads, places, width]; heads of queries share them in groups, in order.
        scale: what logits are multiplied with; default 1 / sqrt(width).
        causal: a place sees itself and those before it.

    Returns:
        float64[heads], equal on all ranks. Not recorded for a gradient; of DTensors it communicates, as `max` does.

    Raises:
        LayoutError: shapes that do not fit.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import max_logits
        >>> q = ms.Tensor([[[[1.0, 0.0], [2.0, 0.0]]]])
        >>> k = ms.Tensor([[[[3.0, 0.0], [1.0, 0.0]]]])
        >>> max_logits(q, k, scale=1.0), max_logits(q, k * -1, scale=1.0)
        (array([6.]), array([-2.]))
    """
    (batch, heads, places, width), shared = query.shape, key.shape[1]
    if key.shape != (batch, shared, places, width) or heads % shared:
        raise LayoutError("For 'max_logits', query and key do not fit.", f"{tuple(query.shape)}, {tuple(key.shape)}",
                          "Each key head has as many query heads.", "[batch, heads, places, width] of both")
    scale = width ** -0.5 if scale is None else scale
    best: list[np.ndarray] = []
    with no_grad(), implicit_replication():
        grouped = mint.reshape(query, (batch, shared, heads // shared, places, width)) * scale
        for start in range(0, places, _ROWS):
            stop = min(start + _ROWS, places)
            seen = stop if causal else places
            keys = mint.reshape(mint.narrow(key, 2, 0, seen), (batch, shared, 1, seen, width))
            logits = mint.matmul(mint.narrow(grouped, 3, start, stop - start), mint.transpose(keys, 3, 4))
            if causal:
                hidden = np.arange(seen)[None, :] > np.arange(start, stop)[:, None]
                logits = logits + Tensor(np.where(hidden, -np.inf, 0.0).astype(np.float32)).astype(logits.dtype)
            largest = mint.amax(logits, (0, 3, 4))
            whole = largest.full_tensor() if isinstance(largest, DTensor) else largest
            best.append(whole.asnumpy().astype(np.float64).reshape(heads))
    return np.max(best, 0)


def qk_clip_(query: Parameter, key: Parameter, logits: Sequence[float], threshold: float = 100.0) -> np.ndarray:
    """Multiplies rows of the query and key weights, in place, of heads whose largest logit is above the threshold.

    With one key head for each query head both are multiplied by sqrt(threshold / logit). Where several query heads share
    a key head, that one gets the factor of the head that needs the least, and each query head the rest of its own.

    Args:
        query: the weight [heads * width, inputs] of the projection, plain or a DTensor in any layout.
        key: the weight [key heads * width, inputs].
        logits: of `max_logits`, of the step before: one per query head, equal on all ranks.
        threshold: the largest logit that is left alone.

    Returns:
        By what each head's logits are multiplied; ones where nothing is done. Nothing is communicated.

    Raises:
        LayoutError: weights that have not these heads.
        ConfigError: a logit that is not finite, or a threshold that is no positive number; the weights stay as they are.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import qk_clip_
        >>> q, k = (ms.Parameter(ms.Tensor([[8.0], [8.0]]), name=n) for n in "qk")
        >>> qk_clip_(q, k, [400.0, 50.0], threshold=100.0)
        array([0.25, 1.  ])
        >>> q.asnumpy().ravel().tolist(), k.asnumpy().ravel().tolist()
        ([4.0, 8.0], [4.0, 8.0])
    """
    largest = np.asarray(logits, np.float64)
    heads = max(largest.size, 1)
    width, rest = divmod(query.shape[0], heads)
    shared, more = divmod(key.shape[0], max(width, 1))
    if largest.ndim != 1 or not largest.size or rest or more or not shared or heads % shared:
        raise LayoutError("For 'qk_clip_', the weights have not these heads.",
                          f"{list(largest.shape)} logits, {tuple(query.shape)}, {tuple(key.shape)}",
                          "A weight has the rows of its heads, one behind another.", "one logit per query head")
    if not (np.isfinite(largest).all() and 0 < threshold < np.inf):  # weights times no number would stay none
        raise ConfigError("For 'qk_clip_', a logit or the threshold is no number to go by.",
                          f"logits {largest.tolist()[:8]}, threshold {threshold}",
                          "What is too large is made smaller by threshold / logit.",
                          ("leave out a step whose loss or gradients are not finite", "a threshold above 0"))
    factors = np.minimum(1.0, threshold / np.maximum(largest, threshold))
    if (factors < 1).any():
        of_keys = np.sqrt(factors.reshape(shared, -1).min(1))
        _scale_rows(key, np.repeat(of_keys, width))
        _scale_rows(query, np.repeat(factors / np.repeat(of_keys, heads // shared), width))
    return factors


def _scale_rows(param: Parameter, factors: np.ndarray) -> None:
    layout, shape = layout_of(param), tuple(param.shape)
    whole = np.broadcast_to(factors.reshape(-1, *(1 for _ in shape[1:])), shape)
    mine = whole if layout is None else layout.assemble(lambda box: whole[tuple(slice(*extent) for extent in box)])
    with NoFallbackGuard():
        kind = precision(param)
        write(param, values(param, kind) * values(Tensor(np.ascontiguousarray(mine, np.float64)), kind))
