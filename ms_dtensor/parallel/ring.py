# SPDX-License-Identifier: Apache-2.0
"""A ring: attention of a list that ranks share, with the keys of one rank after another, which are merged.

In round s a rank has the keys of the rank s before it, those that its queries see; the next are under way meanwhile. The
gradient fetches keys again and sends theirs home, round by round. A round is one fused call for blocks that are seen whole
and one for those on the diagonal, and the gradient of each is the kernel's own, given the greatest score and the sum of
weights of *all* keys; with a window, blocks are products. Which rows go where:
`core/tokens.py`. Invariant: what is merged does not depend on the order of rounds but for rounding.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, mint

from .. import comm
from ..comm.group import Group
from ..comm.pretended import executing
from ..core.balance import Mask
from ..core.tokens import Tokens, keys_by_rank
from ..custom_ops.function import Context, DFunction
from ..custom_ops.rows import added_up, taken, zeros_for
from ..errors import ConfigError
from ..internals.names import Function
from ..ops.local import varlen
from ..ops.local.dtypes import full, wider

WHO = "context_attention"
WHAT = "keys and values"


def ring(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, mask: Mask, scale: float, group: Group | None, me: int) -> Tensor:
    """One rank's queries over all keys that they see; differentiable once."""
    if k._shape[2] != v._shape[2]:
        raise ConfigError(f"For '{WHO}', a ring has keys and values of one width.", f"{k._shape[2]} and {v._shape[2]}",
                          "They travel beside each other.", 'algorithm="gather"')
    kind, rest = _FusedRing if mask.window is None else _Ring, (tokens, mask, scale, group, me)
    return kind.apply(q, k, v, *rest) if executing() is None else _Seen.apply(kind, rest, q, k, v)


def ends(runs: list[tuple[int, int]]) -> list[int]:
    """Where runs end that lie one behind another."""
    return np.cumsum([b - a for a, b in runs], dtype=int).tolist()


class _Block(NamedTuple):
    """Some keys of a round that a run of queries sees: which run, its rows, theirs, and the first place of both."""

    number: int
    q0: int
    q1: int
    k0: int
    k1: int
    first_query: int
    first_key: int

    def diagonal(self, mask: Mask) -> bool:
        """Whether some of the queries do not see all of the keys; its last query stands where its last key does then."""
        return mask.causal and self.first_key + self.k1 - self.k0 - 1 > self.first_query


class _Round:
    """What a rank gives, gets and works on in one round: the keys of the rank so many before it."""

    def __init__(self, tokens: Tokens, mask: Mask, me: int, step: int):
        table, n = keys_by_rank(tokens, mask), tokens.ranks
        src, dst = (me - step) % n, (me + step) % n
        self.step = step
        self.gives = table[dst].rows[me] if step else np.zeros(0, np.int64)
        self.send = [len(self.gives) if r == dst else 0 for r in range(n)]
        self.recv = [len(table[me].rows[src]) if r == src and step else 0 for r in range(n)]
        self.busy = bool(step) and any(len(table[r].rows[(r - step) % n]) for r in range(n))
        self.own = table[me].rows[me]
        self.blocks: list[_Block] = []
        q0 = 0
        for number, ((d, a, b), (lo, hi)) in enumerate(zip(tokens.runs[me], table[me].spans)):
            k0 = 0
            for e, c, stop in table[me].pieces[src]:
                first, last = max(c, lo), min(stop, hi)
                if e == d and first < last:
                    self.blocks.append(_Block(number, q0, q0 + b - a, k0 + first - c, k0 + last - c, a, first))
                k0 += stop - c
            q0 += b - a


@lru_cache(maxsize=64)
def _rounds(tokens: Tokens, mask: Mask, me: int) -> tuple[_Round, ...]:
    return tuple(_Round(tokens, mask, me, step) for step in range(tokens.ranks))


def _hidden(mask: Mask, queries: int, keys: int, first_query: int, first_key: int) -> np.ndarray | None:
    """Where a query of a block must not look; None if it sees all of it."""
    if not mask.causal:
        return None
    ahead = first_query - first_key + np.arange(queries)[:, None] - np.arange(keys)
    out = ahead < 0 if mask.window is None else (ahead < 0) | (ahead >= mask.window)
    return out if out.any() else None


class _Ring(DFunction):
    """Rounds of blocks; the gradient fetches keys again and sends theirs home, round by round."""

    @staticmethod
    def forward(ctx, q, k, v, tokens, mask, scale, group, me):
        g = k._shape[1]
        kv = mint.cat((k, v), 1)
        state: dict[int, varlen.Block] = {}
        queries: dict[int, Tensor] = {}
        for there, part in _fetched(kv, tokens, mask, group, me):
            for number, q0, q1, k0, k1, a, c in part.blocks:
                if number not in queries:
                    queries[number] = varlen.by_heads(mint.narrow(q, 0, q0, q1 - q0), g)
                hidden = _hidden(mask, q1 - q0, k1 - k0, a, c)
                mine = varlen.block(queries[number], *_keys_of(there, k0, k1, g), hidden, scale)
                state[number] = varlen.merged(state.get(number), mine)
        outs, logs = [], {}
        for number, (_, a, b) in enumerate(tokens.runs[me]):
            whole = state[number]
            outs.append(varlen.by_tokens(whole.out / whole.total, b - a))
            logs[number] = whole.top + mint.log(whole.total)
        out = mint.cat(outs) if outs else full((0, *q._shape[1:]), 0, wider(q).dtype)
        ctx.save_for_backward(q, k, v, out)
        ctx.rest = tokens, mask, scale, group, me, logs
        return out.astype(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out = ctx.saved_tensors
        tokens, mask, scale, group, me, logs = ctx.rest
        g, wide = k._shape[1], wider(q).dtype
        kv = mint.cat((k, v), 1)
        dkv = zeros_for(kv, kv._shape, wide)
        ready: dict[int, tuple] = {}
        dq: dict[int, Tensor] = {}
        with comm.annotate(phase="backward"):
            for there, part in _fetched(kv, tokens, mask, group, me):
                grads = zeros_for(there, there._shape, wide)
                for number, q0, q1, k0, k1, a, c in part.blocks:
                    if number not in ready:
                        of, do, o = (varlen.by_heads(mint.narrow(x, 0, q0, q1 - q0), g) for x in (q, dout, out))
                        ready[number] = of, do, logs[number], mint.sum(do * o, (2,), keepdim=True)
                    of, do, log_total, delta = ready[number]
                    hidden = _hidden(mask, q1 - q0, k1 - k0, a, c)
                    one, dk, dv = varlen.block_grad(of, *_keys_of(there, k0, k1, g), hidden, scale, do, log_total, delta)
                    dq[number] = dq[number] + one if number in dq else one
                    both = mint.permute(mint.cat((dk, dv)), (1, 0, 2))
                    grads = added_up(both, np.arange(k0, k1), grads)
                dkv = _sent_home(grads, part, group, dkv)
        runs = [varlen.by_tokens(dq[number], b - a) for number, (_, a, b) in enumerate(tokens.runs[me])]
        dq_all = mint.cat(runs) if runs else full(q._shape, 0, wide)
        dkv = dkv.astype(k.dtype)
        return dq_all.astype(q.dtype), mint.narrow(dkv, 1, 0, g).contiguous(), mint.narrow(dkv, 1, g, g).contiguous()


class _Seen(Function):
    """A ring in a dry run, which sees its ops there and back: tensors are this rank's alone, also those that have come."""

    @staticmethod
    def forward(ctx, kind, rest, *tensors):
        ctx.kind, ctx.own = kind, Context()
        return executing().seen(lambda xs: kind.forward(ctx.own, *xs, *rest))(tensors)

    @staticmethod
    def backward(ctx, dout):
        own, ctx.own = ctx.own, None
        return None, None, *executing().seen(lambda xs: ctx.kind.backward(own, *xs))((dout,))


def _here(x: Tensor) -> Tensor:
    """What has come from another rank, as it goes on from here."""
    return x if (dry := executing()) is None else dry.alone(x)


def _fetched(kv: Tensor, tokens: Tokens, mask: Mask, group: Group | None, me: int) -> Iterator[tuple[Tensor, _Round]]:
    """The keys of one rank after another, and what to do with them; the next are under way meanwhile."""
    rounds = [part for part in _rounds(tokens, mask, me) if part.busy or not part.step]

    def start(part: _Round):
        assert group is not None  # who is alone has one round
        with comm.annotate(src=WHAT, dst=f"round {part.step} of a ring"):
            return group.all_to_all_rows(taken(kv, part.gives), part.send, part.recv, async_op=True)
    coming = None
    for number, part in enumerate(rounds):
        there = taken(kv, part.own) if coming is None else _here(coming.wait())
        coming = start(rounds[number + 1]) if number + 1 < len(rounds) else None
        yield there, part


def _keys_of(kv: Tensor, k0: int, k1: int, g: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some rows, by heads."""
    part = wider(mint.narrow(kv, 0, k0, k1 - k0))
    return tuple(mint.permute(mint.narrow(part, 1, at, g), (1, 0, 2)) for at in (0, g))  # type: ignore[return-value]


class _FusedRing(DFunction):
    """The same by fused calls, two a round; they speak of rows, `[t, heads, width]`, throughout."""

    @staticmethod
    def forward(ctx, q, k, v, tokens, mask, scale, group, me):
        state: dict[int, varlen.Part] = {}
        calls = ((there, blocks) for there, part in _fetched(mint.cat((k, v), 1), tokens, mask, group, me)
                 for blocks in _kinds(part, mask))
        for there, blocks in calls:
            made = varlen.fused(_rows_of(q, blocks), *_heads_of(there, blocks, k._shape[1]), _q_ends(blocks),
                                _k_ends(blocks), blocks[0].diagonal(mask), scale)
            at = 0
            for one in blocks:
                mine = varlen.Part(*(mint.narrow(x, 0, at, one.q1 - one.q0) for x in made))
                state[one.number] = varlen.joined(state.get(one.number), mine)
                at += one.q1 - one.q0
        whole = [state[number] for number in range(len(tokens.runs[me]))]
        out, top, total = (mint.cat(x) for x in zip(*whole)) if whole else (full((0, *q._shape[1:]), 0, q.dtype), None, None)
        ctx.save_for_backward(q, k, v, out, top, total)
        ctx.rest = tokens, mask, scale, group, me
        return out.astype(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, top, total = ctx.saved_tensors
        tokens, mask, scale, group, me = ctx.rest
        g, wide = k._shape[1], wider(q).dtype
        kv, dq = mint.cat((k, v), 1), zeros_for(q, q._shape, wide)
        dkv = zeros_for(kv, kv._shape, wide)
        with comm.annotate(phase="backward"):
            for there, part in _fetched(kv, tokens, mask, group, me):
                grads = zeros_for(there, there._shape, wide)
                for blocks in _kinds(part, mask):
                    of, do, *rest = (_rows_of(x, blocks) for x in (q, dout, out.astype(q.dtype), top, total))
                    one, dk, dv = varlen.fused_grad(of, do, varlen.Part(*rest), *_heads_of(there, blocks, g),
                                                    _q_ends(blocks), _k_ends(blocks), blocks[0].diagonal(mask), scale)
                    dq = added_up(one.astype(wide), np.concatenate([np.arange(b.q0, b.q1) for b in blocks]), dq)
                    grads = added_up(mint.cat((dk, dv), 1).astype(wide),
                                     np.concatenate([np.arange(b.k0, b.k1) for b in blocks]), grads)
                dkv = _sent_home(grads, part, group, dkv)
        dkv = dkv.astype(k.dtype)
        return dq.astype(q.dtype), mint.narrow(dkv, 1, 0, g).contiguous(), mint.narrow(dkv, 1, g, g).contiguous()


def _kinds(part: _Round, mask: Mask) -> list[list[_Block]]:
    """Blocks that are seen whole, and those on the diagonal: the kernel has one mask for all of a call's."""
    return [some for some in ([b for b in part.blocks if b.diagonal(mask) == which] for which in (False, True)) if some]


def _rows_of(x: Tensor, blocks: list[_Block]) -> Tensor:
    parts = [mint.narrow(x, 0, b.q0, b.q1 - b.q0) for b in blocks]
    return mint.cat(parts) if len(parts) > 1 else parts[0]


def _heads_of(kv: Tensor, blocks: list[_Block], g: int) -> tuple[Tensor, Tensor]:
    parts = [mint.narrow(kv, 0, b.k0, b.k1 - b.k0) for b in blocks]
    both = mint.cat(parts) if len(parts) > 1 else parts[0]
    return mint.narrow(both, 1, 0, g).contiguous(), mint.narrow(both, 1, g, g).contiguous()


def _q_ends(blocks: list[_Block]) -> list[int]:
    return ends([(b.q0, b.q1) for b in blocks])


def _k_ends(blocks: list[_Block]) -> list[int]:
    return ends([(b.k0, b.k1) for b in blocks])


def _sent_home(grads: Tensor, part: _Round, group: Group | None, dkv: Tensor) -> Tensor:
    """Gradients of a round's keys, added up where these came from."""
    if part.step:
        assert group is not None  # who is alone has one round
        with comm.annotate(src=f"gradients of {WHAT}", dst="whose they are"):
            grads = _here(group.all_to_all_rows(grads, part.recv, part.send))
    return added_up(grads, part.gives if part.step else part.own, dkv)
