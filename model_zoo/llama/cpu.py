# SPDX-License-Identifier: Apache-2.0
"""The CPU forms of the fused ops that `model.py` names: the same numbers from the kernels that a CPU has and is quick at.

Not the model. Each function here stands for what `model.py` writes beside it, within the rounding of one fused kernel: what
is given in 16 bits is computed in float32 and rounded once. What is odd here is so for speed: on MindSpore's CPU kernels a
product with broadcasting costs ten times one without, transposing q costs more than all products of attention, and `mint`'s
matrix products take two to ten times as long as the classic ones.
"""
from __future__ import annotations

from functools import lru_cache, wraps
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_dtensor import DTensor, moe
from ms_dtensor.core.balance import Mask
from ms_dtensor.dispatch.class_loss import row_losses
from ms_dtensor.errors import OpRuleError
from ms_dtensor.internals.host import host_array
from ms_dtensor.internals.names import Function, recording
from ms_dtensor.ops.local import cpu_nn, varlen_cpu

from .config import ModelConfig
from .rope import angles, score_scale, turn

product, by_rows = ops.MatMul(), ops.MatMul(transpose_b=True)
scores, mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
MASKED = -1e9  # finite, so that a row of the mask never makes a NaN; exp(MASKED - max) is exactly 0 in float32


def rounding_once(form):
    """`form` in float32; its result in the dtype of its first operand."""
    @wraps(form)
    def run(x, *rest):
        if x.dtype == ms.float32:
            return form(x, *rest)
        wide = (v.astype(ms.float32) if isinstance(v, Tensor) and v.dtype == x.dtype else v for v in (x, *rest))
        return form(*wide).astype(x.dtype)
    return run


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """`mint.nn.functional.embedding`, which has no kernel."""
    return ops.gather(weight, ids, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm`, which plain tensors have no kernel of."""
    return (ops.rms_norm if isinstance(x, DTensor) else cpu_nn.rms_norm)(x, weight, eps)[0]


def split(x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    """`mint.split` on the last dim, whose gradient of plain tensors takes what comes to it for dense memory."""
    return (mint if isinstance(x, DTensor) else ops).split(x, widths, x.ndim - 1)


@rounding_once
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`ops.swiglu` of the two beside each other."""
    return mint.nn.functional.silu(gate) * up


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """`mint.nn.functional.cross_entropy`, several times as fast, and without a copy of the logits."""
    keep = labels != ignore_index
    losses = row_losses(logits, (labels * keep.astype(labels.dtype)).reshape(-1, 1))
    keep = keep.astype(logits.dtype)
    return (losses * keep).sum() / keep.sum()


@rounding_once
def mixture(x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """`experts.mixture`."""
    return moe(x, weights, chosen, w1, w2, w3)


class Constants(NamedTuple):
    """What attention needs besides its operands; rows are numbered (b, t, heads) as the projections give them."""

    cos: Tensor
    """f32[b*t*heads, e], of full size"""
    sin: Tensor
    turn: Tensor
    """f32[e, e]: takes (x1, x2) to (-x2, x1); zeros and ones, so exact, and far cheaper than split + concat"""
    by_head: Tensor
    """i32[b*heads*t]: the rows in the order (b, heads, t)"""
    by_token: Tensor
    """i32[b*t*heads]: and back"""


@lru_cache(maxsize=8)
def constants(cfg: ModelConfig, b: int, t: int, heads: int, places: bytes | None = None) -> Constants:
    """For b sequences of t tokens and this many heads; of packed rows by the places that the bytes of i32[b, t] tell."""
    e, angle = cfg.head_dim, angles(cfg, t)
    angle = angle[None] if places is None else angle[np.frombuffer(places, np.int32).reshape(b, t)]
    angle = np.broadcast_to(angle[:, :, None], (b, t, heads, e)).reshape(-1, e)
    by_head = np.arange(b * t * heads, dtype=np.int32).reshape(b, t, heads).transpose(0, 2, 1).reshape(-1)
    return Constants(*map(Tensor, (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), turn(cfg),
                                   by_head, np.argsort(by_head).astype(np.int32))))


@lru_cache(maxsize=2)
def document_mask(t: int, window: int | None, places: bytes) -> Tensor:
    """f32[b, 1, t*t], added to the scores: a token sees its document up to itself."""
    at, place = np.arange(t), np.frombuffer(places, np.int32).reshape(-1, t)
    least = at - (place if window is None else np.minimum(place, window - 1))
    hidden = (at > at[:, None]) | (at < least[:, :, None])
    return Tensor(np.where(hidden, MASKED, 0.0).astype(np.float32).reshape(len(place), 1, t * t))


@lru_cache(maxsize=8)
def causal_mask(t: int, window: int | None) -> Tensor:
    """f32[t*t], added to the scores."""
    hidden = np.triu(np.full((t, t), MASKED, np.float32), 1)
    if window is not None:
        hidden += np.tril(np.full((t, t), MASKED, np.float32), -window)
    return Tensor(hidden.reshape(-1))


def rotary(rows: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
    """`ops.rotary_position_embedding` in mode 0, of rows [b*t*heads, e]."""
    return rows * cos + product(rows, turn) * sin


@lru_cache(maxsize=8)
def turns(cfg: ModelConfig, length: int, places: bytes, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine and sine [n, heads, e] of the angles at the places that the bytes of i32[n] tell, and `Constants.turn`."""
    angle = angles(cfg, length)[np.frombuffer(places, np.int32)][:, None]
    full = (np.repeat(f(angle).astype(np.float32), heads, 1) for f in (np.cos, np.sin))
    return *map(Tensor.from_numpy, full), Tensor(turn(cfg))


@rounding_once
def rotate(x: Tensor, cfg: ModelConfig, places: Tensor, length: int) -> Tensor:
    """`model.rotate`, of a list [n, heads, e]."""
    if not x.shape[0]:
        return x
    cos, sin, turn = turns(cfg, length, places.asnumpy().tobytes(), x.shape[1])
    return x * cos + product(x.reshape(-1, x.shape[-1]), turn).reshape(x.shape) * sin


def attention(q, key, value, mine: Constants, theirs: Constants, mask: Tensor, scale: float) -> Tensor:
    """`ops.flash_attention_score` after `rotary`: see `attend`.

    Keys are never repeated: the g query heads that share a key head are folded into its query rows, so scores are one
    batched product [b*k, g*t, e] x [b*k, t, e]. Heads come before tokens by a lookup of rows, and the mask is added as a
    bias to b*h rows of t*t scores.
    """
    (b, t, h, e), k, width = q.shape, key.shape[2], value.shape[3]
    cos, sin, turn, by_head, by_token = mine
    key_cos, key_sin, _, key_by_head, _ = theirs
    q = rotary(q.reshape(-1, e), cos, sin, turn) * scale
    q = ops.gather(q, by_head, 0).reshape(b * k, h // k * t, e)
    key = ops.gather(rotary(key.reshape(-1, e), key_cos, key_sin, turn), key_by_head, 0).reshape(b * k, t, e)
    value = ops.gather(value.reshape(-1, width), key_by_head, 0).reshape(b * k, t, width)
    score = scores(q, key)
    if mask.ndim == 1:
        score = ops.bias_add(score.reshape(b * h, t * t), mask)
    else:  # of each row its own
        score = score.reshape(b, h, t * t) + mask
    out = mix(mint.softmax(score.reshape(b * k, h // k * t, t), -1), value)
    return ops.gather(out.reshape(-1, width), by_token, 0).reshape(b, t, h, width)


def attend(cfg: ModelConfig, q: Tensor, key: Tensor, value: Tensor, places: Tensor | None = None) -> Tensor:
    """`model.attend` on plain tensors."""
    b, t, h, _ = q.shape
    of = None if places is None else places.asnumpy().tobytes()
    mask = causal_mask(t, cfg.sliding_window) if of is None else document_mask(t, cfg.sliding_window, of)
    form = rounding_once(lambda q, key, value: attention(
        q, key, value, tuple(constants(cfg, b, t, h, of)), tuple(constants(cfg, b, t, key.shape[2], of)), mask,
        score_scale(cfg)))
    return form(q, key, value)


class AtOnce(Function):
    """`AtOnce.apply(cfg, of, q, key, value)`: what `attend` gives, as one node, which keeps no scores.

    `of`: the bytes of i32[b, t], the tokens' places in their documents, or None.
    """

    @staticmethod
    def forward(ctx, cfg: ModelConfig, of: bytes | None, q: Tensor, key: Tensor, value: Tensor):
        b, t = q.shape[:2]
        ctx.cos, ctx.sin, ctx.turn, ends = turned_by(cfg, t, of)
        q, key = (turned(host_array(x), ctx.cos, ctx.sin, ctx.turn) for x in (q, key))
        ctx.rows = [x.reshape(b * t, *x.shape[2:]) for x in (q, key, value.asnumpy())]
        ends = ends or range(t, b * t + 1, t)
        ctx.how = ends, ends, Mask(True, cfg.sliding_window), score_scale(cfg)
        out, top, total = varlen_cpu.forward(*ctx.rows, *ctx.how)
        ctx.result = out, top + np.log(total)
        return Tensor.from_numpy(out.reshape(b, t, *out.shape[1:]))

    @staticmethod
    def backward(ctx, dout: Tensor):
        differentiated_once("Attention at once is")
        of_rows = varlen_cpu.backward(*ctx.rows, host_array(dout).reshape(ctx.result[0].shape), *ctx.result, *ctx.how)
        dq, dkey, dvalue = (x.reshape(*dout.shape[:2], *x.shape[1:]) for x in of_rows)
        dq, dkey = (turned(x, ctx.cos, ctx.sin, ctx.turn, back=True) for x in (dq, dkey))
        return None, None, *map(Tensor.from_numpy, (dq, dkey, dvalue))


def differentiated_once(said: str) -> None:
    """Refuses a derivative of a gradient; `said`: of what, and its verb."""
    if recording():
        raise OpRuleError("For 'train.compile', a second derivative is asked for.", "", f"{said} differentiated once.",
                          "train.compile = false")


@lru_cache(maxsize=8)
def turned_by(cfg: ModelConfig, t: int, of: bytes | None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, list[int]]:
    """f32[b or 1, t, 1, e], cosine and sine of the places, the latter with the sign that it adds with; `turn`, None where
    pairs are halves; where documents end, [] without places."""
    places = np.arange(t)[None] if of is None else np.frombuffer(of, np.int32).reshape(-1, t)
    angle = angles(cfg, t)[places][:, :, None]
    ends = [] if of is None else [*np.flatnonzero(places == 0)[1:].tolist(), places.size]
    cos, sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
    if cfg.latent is not None:
        return cos, sin, turn(cfg), ends
    sin[..., :sin.shape[-1] // 2] *= -1
    return cos, sin, None, ends


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, turn: np.ndarray | None, back: bool = False) -> np.ndarray:
    """x with each pair of numbers turned by its angle, or turned back; see `turned_by`."""
    if turn is not None:
        return x * cos + ((x * sin) @ turn.T if back else (x @ turn) * sin)
    half, out, other = x.shape[-1] // 2, x * cos, np.empty_like(x)
    other[..., :half], other[..., half:] = x[..., half:], x[..., :half]  # NumPy copies short rows faster than it adds them
    other *= sin
    return np.subtract(out, other, out=out) if back else np.add(out, other, out=out)


def compile_attention(model: nn.Cell, cfg: ModelConfig) -> None:
    """Lets the core of every attention run as one node of NumPy's products; before `parallelize`.

    It takes half the time of ops one by one and keeps no scores; nobody sees into it. A mesh maps it over local tensors.
    """
    def core(q: Tensor, key: Tensor, value: Tensor, places: Tensor | None = None) -> Tensor:
        of = None if places is None else places.asnumpy().tobytes()
        return rounding_once(lambda *rows: AtOnce.apply(cfg, of, *rows))(q, key, value)
    for layer in model.layers:
        layer.attention.core = core
