# SPDX-License-Identifier: Apache-2.0
"""Attention of packed tokens [n, h, e] on local tensors: whole runs by the fused kernel, or one block of keys at a time.

Runs of queries lie one behind another, and so do the keys that each of them sees: its last query sees its last key. A block
is some of a run's keys; what blocks give is merged by the greatest score and the sum of weights of each query, and the
gradient of a block needs these two of the whole. Not here: who has which keys (`core/tokens.py`), communication.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, mint
from mindspore.ops.auto_generate import gen_ops_prim

from ...comm.pretended import executing
from ...core.balance import Mask
from ...internals.target import ascend_kernels, on_cpu
from ..rules.attention import FAR
from . import varlen_cpu
from .attention import flash_attention, scale_of
from .dtypes import wider


@lru_cache(maxsize=1)
def _triangle() -> Tensor:
    """The kernel's compressed mask."""
    return Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))


_grad_kernel = lru_cache(gen_ops_prim.FlashAttentionScoreGrad)


def runs(q: Tensor, k: Tensor, v: Tensor, q_ends: Sequence[int], k_ends: Sequence[int], mask: Mask, scale: float) -> Tensor:
    """Attention of runs of queries, each over keys of its own; differentiable.

    Args:
        q: [T, h, e], runs one behind another.
        k: [S, g, e], the keys of run 0, of run 1, ...; h is a multiple of g.
        v: [S, g, e].
        q_ends: where each run ends.
        k_ends: where its keys end.
        mask: which of them a query sees; causal: the last query of a run stands where its last key does.
        scale: of the products.
    """
    mode = {"sparse_mode": 0, "pre_tokens": FAR, "next_tokens": FAR}
    if mask.causal:
        mode = {"sparse_mode": 3, "pre_tokens": FAR, "next_tokens": 0}
    if mask.window is not None:
        mode = {"sparse_mode": 4, "pre_tokens": mask.window - 1, "next_tokens": 0}
    run: Any = flash_attention
    return run(q, k, v, None, _triangle() if mask.causal else None, q._shape[1], 1.0, scale, form="TND",
               lengths=(tuple(q_ends), tuple(k_ends)), dropped=None, **mode)[3]


class Block(NamedTuple):
    """What queries make of some of their keys: [h, t, e] not divided, and [h, t, 1] each."""

    out: Tensor
    top: Tensor
    total: Tensor


def by_heads(x: Tensor, groups: int) -> Tensor:
    """[t, h, e] -> [groups, h/groups * t, e], wide: the queries that share keys, beside each other."""
    t, h, e = x._shape
    return mint.reshape(mint.permute(mint.reshape(wider(x), (t, groups, h // groups, e)), (1, 2, 0, 3)),
                        (groups, h // groups * t, e))


def by_tokens(x: Tensor, t: int) -> Tensor:
    """And back: [groups, h/groups * t, e] -> [t, h, e]."""
    groups, rows, e = x._shape
    return mint.reshape(mint.permute(mint.reshape(x, (groups, rows // t, t, e)), (2, 0, 1, 3)), (t, groups * rows // t, e))


def _weights(q: Tensor, k: Tensor, hidden: np.ndarray | None, scale: float) -> Tensor:
    """Scores [groups, h/groups * t, s]; where a query must not look so low that whatever it sees elsewhere outweighs it.

    Finite: a query that sees nothing of this block would make NaN of infinities.
    """
    scores = mint.matmul(q, mint.transpose(k, 1, 2)) * scale_of(scale, q)
    if hidden is None:
        return scores
    all_heads = np.broadcast_to(hidden, (scores._shape[1] // len(hidden), *hidden.shape)).reshape(scores._shape[1:])
    return mint.where(Tensor(all_heads), Tensor(-1e30, scores.dtype), scores)


def block(q: Tensor, k: Tensor, v: Tensor, hidden: np.ndarray | None, scale: float) -> Block:
    """Queries and keys `by_heads`; what queries that see no key of the block get is outweighed once blocks are merged."""
    if hidden is not None and _broken(k, v):
        return _block_one_by_one(q, k, v, hidden, scale)
    scores = _weights(q, k, hidden, scale)
    top = mint.amax(scores, (2,), keepdim=True)
    weights = mint.exp(scores - top)
    return Block(mint.matmul(weights, v), top, mint.sum(weights, (2,), keepdim=True))


def merged(a: Block | None, b: Block) -> Block:
    """Of two sets of keys together."""
    if a is None:
        return b
    top = mint.maximum(a.top, b.top)
    f, g = mint.exp(a.top - top), mint.exp(b.top - top)
    return Block(a.out * f + b.out * g, top, a.total * f + b.total * g)


def block_grad(q: Tensor, k: Tensor, v: Tensor, hidden: np.ndarray | None, scale: float, dout: Tensor, log_total: Tensor,
               delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v) from one block of keys.

    Args:
        q: queries, keys and values `by_heads`.
        k: as q.
        v: as q.
        hidden: bool[t, s], where a query must not look.
        scale: of the products.
        dout: of the whole result, as q.
        log_total: log of the sum of exp(score) over *all* keys of a query, [groups, rows, 1].
        delta: sum of dout * out of a query, as that.
    """
    if hidden is not None and _broken(q, k, v, dout, log_total, delta):
        return _grad_one_by_one(q, k, v, hidden, scale, dout, log_total, delta)
    weights = mint.exp(_weights(q, k, hidden, scale) - log_total)
    ds = weights * (mint.matmul(dout, mint.transpose(v, 1, 2)) - delta) * scale_of(scale, q)
    return (mint.matmul(ds, k), mint.matmul(mint.transpose(ds, 1, 2), q), mint.matmul(mint.transpose(weights, 1, 2), dout))


# -- where something is no number, a query with what it sees alone: a weight of 0 times NaN is NaN --------------------------
def _broken(*operands: Tensor) -> bool:  # a device would have to be waited for
    return on_cpu() and executing() is None and not all(np.isfinite(x.asnumpy()).all() for x in operands)


def _apart(hidden: np.ndarray, *rows: Tensor) -> tuple[np.ndarray, ...]:
    """[groups, h/groups * t, e] -> [groups, h/groups, t, e]."""
    return tuple(x.asnumpy().reshape(x._shape[0], -1, len(hidden), x._shape[2]) for x in rows)


def _as_rows(x: np.ndarray) -> Tensor:
    return Tensor(np.ascontiguousarray(x.reshape(len(x), -1, x.shape[3])))


@np.errstate(invalid="ignore")
def _block_one_by_one(q: Tensor, k: Tensor, v: Tensor, hidden: np.ndarray, scale: float) -> Block:
    (of,), keys, values = _apart(hidden, q), k.asnumpy(), v.asnumpy()
    out = np.zeros((*of.shape[:3], values.shape[2]), of.dtype)
    top, total = np.full((*of.shape[:3], 1), -1e30, of.dtype), np.zeros((*of.shape[:3], 1), of.dtype)
    for i in np.flatnonzero(~hidden.all(1)):
        seen = ~hidden[i]
        scores = of[:, :, i] @ keys[:, seen].swapaxes(1, 2) * of.dtype.type(scale)
        top[:, :, i] = scores.max(2, keepdims=True)
        weights = np.exp(scores - top[:, :, i])
        out[:, :, i], total[:, :, i] = weights @ values[:, seen], weights.sum(2, keepdims=True)
    return Block(*map(_as_rows, (out, top, total)))


@np.errstate(invalid="ignore")
def _grad_one_by_one(q: Tensor, k: Tensor, v: Tensor, hidden: np.ndarray, scale: float, dout: Tensor, log_total: Tensor,
                     delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (of, do, logs, sums), keys, values = _apart(hidden, q, dout, log_total, delta), k.asnumpy(), v.asnumpy()
    dq, dk, dv, factor = np.zeros_like(of), np.zeros_like(keys), np.zeros_like(values), of.dtype.type(scale)
    for i in np.flatnonzero(~hidden.all(1)):
        seen = ~hidden[i]
        weights = np.exp(of[:, :, i] @ keys[:, seen].swapaxes(1, 2) * factor - logs[:, :, i])
        ds = weights * (do[:, :, i] @ values[:, seen].swapaxes(1, 2) - sums[:, :, i]) * factor
        dq[:, :, i] = ds @ keys[:, seen]
        dk[:, seen] += ds.swapaxes(1, 2) @ of[:, :, i]
        dv[:, seen] += weights.swapaxes(1, 2) @ do[:, :, i]
    return _as_rows(dq), Tensor(dk), Tensor(dv)


# -- fused calls over some of the keys -------------------------------------------------------------------------------------
class Part(NamedTuple):
    """What queries make of some of their keys: [t, h, e], divided, in float32 or wider; twice [t, h, 8], all alike, or 1."""

    out: Tensor
    top: Tensor
    total: Tensor


def fused(q: Tensor, k: Tensor, v: Tensor, q_ends: Sequence[int], k_ends: Sequence[int], diagonal: bool,
          scale: float) -> Part:
    """Runs of queries, each over a block of its keys; without a gradient.

    `diagonal`: the last query of a run stands where its last key does; else every query sees all of them.
    """
    if (dry := executing()) is not None:
        return _dry(dry, q, k, v, (), q_ends, k_ends, diagonal)
    if on_cpu() and not ascend_kernels():  # which a test stands in for
        of, keys, values = (wider(x).asnumpy() for x in (q, k, v))
        return Part(*map(Tensor.from_numpy, varlen_cpu.forward(of, keys, values, q_ends, k_ends, Mask(diagonal), scale)))
    mode = {"sparse_mode": 3, "next_tokens": 0} if diagonal else {"sparse_mode": 0, "next_tokens": FAR}
    run: Any = flash_attention
    top, total, _, out = run(q, k, v, None, _triangle() if diagonal else None, q._shape[1], 1.0, scale, pre_tokens=FAR,
                             form="TND", lengths=(tuple(q_ends), tuple(k_ends)), dropped=None, **mode)
    return Part(wider(out), top, total)


def _dry(dry, q: Tensor, k: Tensor, v: Tensor, given: tuple, q_ends: Sequence[int], k_ends: Sequence[int],
         diagonal: bool) -> Any:
    """What a dry run sees of these two, of the gradient if something is given: one op without scores."""
    rows, keys = np.diff(q_ends, prepend=0), np.diff(k_ends, prepend=0)
    met = np.minimum(rows, keys)  # of a diagonal, queries that see some key
    seen = int((keys * met - met * (met - 1) // 2 if diagonal else rows * keys).sum())
    (t, h, e), (*_, wide) = q._shape, v._shape
    cost, each = 2 * seen * h * (e + wide), 8  # a device's kernel gives statistics eight times
    scratch: Any = None
    if on_cpu():
        q, k, v = map(wider, (q, k, v))
        _, (_, *forward), backward = varlen_cpu.beside((t, h, e), k._shape, v._shape, q_ends, k_ends)
        scratch, each = ([], backward if given else forward, []), 1
    if given:
        return dry.node("context_attention", (q, k, v, *given), (t, h, e), cost * 5 // 2, scratch,
                        ((k._shape, k.dtype), (v._shape, v.dtype)))
    made = dry.node("context_attention", (q, k, v), (t, h, wide), cost, scratch, (((t, h, each), wider(q).dtype),) * 2)
    return Part(wider(made[0]), *made[1:])


def joined(a: Part | None, b: Part) -> Part:
    """Of two sets of keys together."""
    if a is None:
        return b
    top = mint.maximum(a.top, b.top)
    f, g = a.total * mint.exp(a.top - top), b.total * mint.exp(b.top - top)
    total = f + g
    share = [mint.narrow(x / total, 2, 0, 1) for x in (f, g)]
    return Part(a.out * share[0] + b.out * share[1], top, total)


def fused_grad(q: Tensor, dout: Tensor, whole: Part, k: Tensor, v: Tensor, q_ends: Sequence[int], k_ends: Sequence[int],
               diagonal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v) from such blocks, given what *all* keys of a query make, `whole`; its result as wide as q.

    That Ascend's kernel takes statistics of more keys than it is given follows from what it computes, and is not written
    in its documents.
    """
    h = q._shape[1]
    if (dry := executing()) is not None:
        return _dry(dry, q, k, v, (dout, *whole), q_ends, k_ends, diagonal)
    if ascend_kernels():
        kernel = _grad_kernel(h, 1.0, scale, FAR, 0 if diagonal else FAR, 0, "TND", 3 if diagonal else 0)
        mask = _triangle() if diagonal else None
        return tuple(kernel(q, k, v, dout, None, None, None, mask, whole.top, whole.total, None, whole.out, None,
                            tuple(q_ends), tuple(k_ends))[:3])
    log_total = mint.narrow(whole.top + mint.log(whole.total), 2, 0, 1)
    if on_cpu():
        a, b, c, d, e, f = (wider(x).asnumpy() for x in (q, k, v, dout, whole.out, log_total))
        made = varlen_cpu.backward(a, b, c, d, e, f, q_ends, k_ends, Mask(diagonal), scale)
        return tuple(map(Tensor.from_numpy, made))  # type: ignore[return-value]
    g, grads, q0, k0 = k._shape[1], [], 0, 0
    for q1, k1 in zip(q_ends, k_ends):
        of, do, o, logs = (by_heads(mint.narrow(x, 0, q0, q1 - q0), g) for x in (q, dout, whole.out, log_total))
        keys, values = (mint.permute(wider(mint.narrow(x, 0, k0, k1 - k0)), (1, 0, 2)) for x in (k, v))
        hidden = np.arange(k1 - k0) > np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) if diagonal else None
        one, dk, dv = block_grad(of, keys, values, hidden, scale, do, logs, mint.sum(do * o, (2,), keepdim=True))
        grads.append((by_tokens(one, q1 - q0), *(mint.permute(x, (1, 0, 2)) for x in (dk, dv))))
        q0, k0 = q1, k1
    return tuple(mint.cat(x) for x in zip(*grads))  # type: ignore[return-value]
