# SPDX-License-Identifier: Apache-2.0
"""What ranks that share experts tell each other before tokens leave: how many come, and what is wrong with them.

Here the host waits for a device, once for all of it. Invariant: what is wrong on one member all of them are told, so that
they refuse together, before a token is sent.
"""
from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from .. import comm
from ..comm.group import Group
from ..comm.pretended import executing
from ..errors import DTensorError
from ..internals.target import on_cpu
from ..ops.local.dtypes import full, wider
from .experts_rows import call


@dataclass(frozen=True, slots=True)
class Owners:
    """Which experts the members of a group have: `bounds[i]` of member i, one behind another."""

    group: Group
    bounds: tuple[tuple[int, int], ...]

    @property
    def mine(self) -> tuple[int, int]:
        return self.bounds[self.group.rank_index]

    def owner(self) -> np.ndarray:
        """The member that has an expert, for each expert."""
        return np.repeat(np.arange(len(self.bounds)), [b - a for a, b in self.bounds])


def counts_there() -> bool:
    """Whether choices are counted and sorted by the host: of a CPU it is at hand; a device would be waited for each time."""
    return on_cpu() or executing() is not None


def known(owners: Owners, experts: int, weights: Tensor, chosen: Tensor, once: bool) -> tuple[np.ndarray, np.ndarray]:
    """This rank's choices [n, k], and [members, numbers]: what each member has counted for this one.

    Numbers are, where a token goes once to a rank, how many come, and then the choices of each expert. With them goes how
    many of a member's tokens have weights that are not finite, and how many of its choices are no experts. Sizes of tensors
    are made of all that: a device is waited for here, once, and nowhere else.
    """
    dry, me = executing() is not None, owners.group.rank_index
    each = [once + b - a + 2 for a, b in owners.bounds]
    if counts_there():
        host = on_host(chosen)
        bad = int((~np.isfinite(wider(weights).asnumpy())).any(1).sum()) if len(host) and not dry else 0
        counts = np.bincount(host[(host >= 0) & (host < experts)], minlength=experts)
        first = [[n] for n in goes_to(owners, host).sum(1)] if once else [[]] * len(each)
        rest = [bad, unknown(host, experts)]
        counted = [np.concatenate((f, counts[a:b], rest)) for f, (a, b) in zip(first, owners.bounds)]
        mine = Tensor(np.concatenate(counted).astype(np.int32))
    else:
        mine = _counted_there(owners, experts, weights, chosen, once)
    with comm.annotate(src="how many tokens", dst="their experts"):
        got = owners.group.all_to_all_rows(mine, each, [each[me]] * len(each))
    if dry:  # the others' tokens are assumed to choose as this rank's
        return host, np.tile(counted[me][:-2].astype(np.int64), (len(each), 1))
    if counts_there():
        theirs = got.asnumpy()
    else:
        both = mint.cat((chosen.reshape(-1).astype(ms.int32), got)).asnumpy()
        host, theirs = both[:both.size - got.shape[0]].reshape(chosen.shape), both[both.size - got.shape[0]:]
    theirs = theirs.reshape(-1, each[me])

    def told(column: int, what: str) -> str:
        return ", ".join(f"rank {r}: {c} {what}" for r, c in zip(owners.group.ranks, theirs[:, column]) if c)
    if theirs[:, -1].any():
        raise no_such(told(-1, "choices"), experts)
    if theirs[:, -2].any():
        raise DTensorError("For 'moe', weights of experts are NaN or infinite.", _named(told(-2, "tokens")),
                           "A router whose scores are NaN chooses nothing.",
                           "look at the logits of the router, and at what came before it, on these ranks")
    return host, theirs[:, :-2]


def _counted_there(owners: Owners, experts: int, weights: Tensor, chosen: Tensor, once: bool) -> Tensor:
    """i32: the numbers for each member, one behind another, counted by the device."""
    if not chosen.shape[0]:
        return full((sum(once + b - a + 2 for a, b in owners.bounds),), 0, ms.int32)

    def total(mask):
        return mask.astype(ms.int64).sum().reshape(1)
    has = ops.one_hot(chosen, experts).astype(ms.int64).sum(1)  # of what is no expert a row of zeros
    rest = [total(ops.logical_not(ops.isfinite(wider(weights)).all(1))),
            total(ops.logical_or(chosen < -1, chosen >= experts))]
    parts = []
    for a, b in owners.bounds:
        if once:
            parts.append(total(has[:, a:b].sum(1) > 0) if b > a else full((1,), 0, ms.int64))
        parts += [has[:, a:b].sum(0), *rest] if b > a else rest
    return mint.cat(parts).astype(ms.int32)


def goes_to(owners: Owners, chosen: np.ndarray) -> np.ndarray:
    """bool[members, n]: whether a token has any of a member's experts."""
    owner = owners.owner()
    goes = np.zeros((len(owners.bounds), len(chosen)), bool)
    token, column = np.nonzero((chosen >= 0) & (chosen < len(owner)))
    goes[owner[chosen[token, column]], token] = True
    return goes


def on_host(chosen: Tensor) -> np.ndarray:
    """[n, k]: the numbers of the experts; in a dry run those that are assumed."""
    dry = executing()
    return chosen.asnumpy() if dry is None else dry.choices(tuple(chosen._shape))


def unknown(chosen: np.ndarray, experts: int) -> int:
    """How many choices are no experts, nor -1."""
    return int(np.count_nonzero((chosen < -1) | (chosen >= experts)))


def no_such(told: str, experts: int) -> DTensorError:
    return DTensorError("For 'moe', tokens have chosen experts that there are not.", _named(told),
                        f"Experts are 0 to {experts - 1}, and -1 is none.", "a router of as many experts as w1 has")


def _named(told: str) -> str:
    """Behind the name of w1, which says which layer it is."""
    return ", ".join(filter(None, (call.get().name, told)))
