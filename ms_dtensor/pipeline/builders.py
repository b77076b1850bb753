# SPDX-License-Identifier: Apache-2.0
"""The six schedules. Each is a short list of (how often, what) for a rank; microbatches are counted as they come.

The formulas are in units of a rank's whole share: F, I and W are the times that all stages of one rank take for one
microbatch, B = I + W, so that one of v stages takes 1/v of it. `p` ranks, `m` microbatches, no time for messages. *Span* is
the time from the first action to the last. *Held* counts forwards of one stage whose weights have no gradient yet.
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import ScheduleError
from .actions import Action, Actions, Overlap

Steps = Iterable[tuple[int, str]]  # how often, which actions: a kind and which of the rank's stages, "F0" or "F0&B1"


def gpipe(ranks: int, n_microbatches: int) -> Actions:
    """All forwards, then all backwards. GPipe, arXiv 1811.06965.

    Span (m + p - 1)(F + B), idle (p - 1)(F + B) on each rank, held m.

    Example:
        >>> print(gpipe(2, 2).csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1F1,1B0,1B1
    """
    return _build("gpipe", ranks, n_microbatches, 1, lambda r, m: [(m, "F0"), (m, "B0")])


def one_f_one_b(ranks: int, n_microbatches: int) -> Actions:
    """A backward as soon as there can be one: as fast as `gpipe`, but rank r holds no more than p - r microbatches.

    PipeDream-Flush, arXiv 2006.09503; also the non-interleaved schedule of Megatron-LM, arXiv 2104.04473.
    Span (m + p - 1)(F + B), idle (p - 1)(F + B), held min(p - r, m).

    Example:
        >>> print(one_f_one_b(2, 3).csv(), end="")
        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2
    """
    def steps(r: int, m: int) -> Steps:
        first = min(ranks - 1 - r, m)
        return [(first, "F0"), (m - first, "F0 B0"), (first, "B0")]
    return _build("one_f_one_b", ranks, n_microbatches, 1, steps)


def interleaved(ranks: int, n_microbatches: int, stages_per_rank: int = 2) -> Actions:
    """1F1B over v stages a rank, dealt out in turn: the idle time is divided by v, more is sent and held.

    Megatron-LM, arXiv 2104.04473, section 2.2. Span m(F + B) + (p - 1)(F + B)/v, idle (p - 1)(F + B)/v, held
    min(2(p - r - 1) + (v - 1)p + 1, mv) stages. The microbatches go in groups of p, so p must divide them: with a smaller
    last group this order would wait for itself.

    Example:
        >>> print(interleaved(2, 2).csv(), end="")
        0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
        1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1
    """
    p, v = ranks, stages_per_rank

    def steps(r: int, m: int) -> Steps:
        forward = [f"F{k // p % v}" for k in range(m * v)]
        backward = [f"B{v - 1 - k // p % v}" for k in range(m * v)]
        first = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        pairs = [f"{f} {b}" for f, b in zip(forward[first:], backward)]
        return [(1, step) for step in (*forward[:first], *pairs, *backward[m * v - first:])]
    return _build("interleaved", p, n_microbatches, v, steps, p)


def zb_h1(ranks: int, n_microbatches: int) -> Actions:
    """1F1B whose weight gradients wait and fill the idle time at the end; every rank holds what 1F1B's first does.

    ZB-H1 of Zero Bubble Pipeline Parallelism, arXiv 2401.10241. For m >= p and a W no longer than F and I: span
    m(F + I + W) + (p - 1)(F + I - W), idle (p - 1)(F + I - W). With F = I = W = 1 and any m: idle p - 1 + max(0, p - m).
    Held min(p, m).

    Example:
        >>> print(zb_h1(2, 3).csv(), end="")
        0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
        1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
    """
    def steps(r: int, m: int) -> Steps:
        first = min(ranks - 1 - r, m)
        late = min(r, m - first)  # so many weight gradients wait till the end
        return [(first, "F0"), (late, "F0 I0"), (m - first - late, "F0 I0 W0"), (first, "I0 W0"), (late, "W0")]
    return _build("zb_h1", ranks, n_microbatches, 1, steps)


def zbv(ranks: int, n_microbatches: int) -> Actions:
    """Two stages a rank in the shape of a V, backward in parts: no rank waits between its first action and its last.

    ZB-V of arXiv 2401.10241; PyTorch's `ScheduleZBVZeroBubble`. Rank r has the stages r and 2p - 1 - r, so the loss lies
    where the data enters. With F = I = W = 1: span 3m + max((p - 1)/2, 2p - 1 - m); from m = 2p - 1 on no rank waits within
    its own work, and (p - 1)/2 is the ramp alone. Held min(2p, 2m, m + 1 + r) stages, the memory of 1F1B's first rank.

    Example:
        >>> print(zbv(2, 2).csv(), end="")
        0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1
        1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,2W1,1I1,1W1
    """
    def steps(r: int, m: int) -> Steps:
        ahead = ranks - r - 1
        return [(2 * ahead + 1, "F0"), (r, "F1 F0"), (ahead + 1, "F1 I1 W1"),
                (m - ranks - ahead, "F0 I0 W0 F1 I1 W1"), (ahead, "I0 W0 F1 I1 W1"),
                (r, "I0 I1"), (ahead + 1, "I0 W0"), (r, "W1"), (r, "W0")]
    return _build("zbv", ranks, n_microbatches, 2, steps, least=2 * ranks - 1, vee=True)


def dualpipe_v(ranks: int, n_microbatches: int) -> Actions:
    """`zbv`'s stages; a forward runs beside a whole backward, so that each may hide the other's communication.

    DualPipe of DeepSeek-V3, arXiv 2412.19437, cut in half as in github.com/deepseek-ai/DualPipe; PyTorch's
    `ScheduleDualPipeV`. Its authors count F, B and W of one stage and a pair F&B as one block: idle (p - 1)(F&B + B - 3W),
    held 2p + 1 stages. Here a pair runs as F then B, so what F makes leaves earlier, which halves that: with a rank's
    F = I = W = 1 and m >= 2p, span 3m + (p - 1)/2; with fewer, idle (p - 1)/2 + min(p - 1, 2p - m) + max(0, p - m), held
    min(2p + 1, 2m, m + 1 + r).

    Example:
        >>> print(dualpipe_v(1, 2).csv(), end="")
        0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1
    """
    def steps(r: int, m: int) -> Steps:
        ahead, half, odd = ranks - r - 1, (r + 1) // 2, (r + 1) % 2
        pairs = m - ranks - ahead
        alone = int(not ahead)  # DeepSeek's code leaves the last rank's first pair apart, which shortens the start
        return [(2 * ahead, "F0"), (r + 1, "F0 F1"), (ahead, "I1 W F1"),
                (alone, "F0 B1 F1&B0"), (pairs - alone, "F0&B1 F1&B0"), (ahead, "B1 F1&B0"),
                (half, "B1 B0"), (odd, "B1 I0"), (half, "I1 I0"), (ahead, "W I0"), (r + 1, "W")]
    return _build("dualpipe_v", ranks, n_microbatches, 2, steps, least=2 * ranks, vee=True)


BUILDERS: dict[str, Callable[[int, int], Actions]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zbh1": zb_h1, "zbv": zbv, "dualpipev": dualpipe_v}
"""By the names of the command and of recipes."""


def _build(name: str, p: int, m: int, v: int, steps: Callable[[int, int], Steps], divisor: int = 1, *, least: int = 1,
           vee: bool = False) -> Actions:
    """Runs the steps of each rank. A schedule made for at least so many microbatches is made for them, and those that are
    not there are left out: each microbatch waits only for itself, so what remains is in a possible order."""
    if not all(isinstance(n, int) and n > 0 for n in (p, m, v)) or m % divisor:
        raise ScheduleError(f"For '{name}', {m} microbatches do not fit.", f"{p} ranks, {v} stages a rank",
                            f"All three are whole numbers from 1 on, and {divisor} divides the microbatches.",
                            ("as many microbatches as ranks, or a multiple", "one_f_one_b, which takes any number of them"))
    owner = [min(s, 2 * p - 1 - s) if vee else s % p for s in range(p * v)]
    lists = []
    for r in range(p):
        mine = [s for s in range(p * v) if owner[s] == r]
        lists.append([a for action in _run(steps(r, max(m, least)), mine) for a in _kept(action, m)])
    return Actions(tuple(map(tuple, lists)), tuple(owner))


def _run(steps: Steps, stages: Sequence[int]) -> list[Action | Overlap]:
    done: list[Action | Overlap] = []
    count: dict[tuple[str, int], int] = defaultdict(int)  # microbatches by kind and stage
    waiting: deque[Action] = deque()  # weight gradients in the order of their input gradients

    def make(word: str) -> Action:
        if word == "W":
            return waiting.popleft()
        kind, stage = word[0], stages[int(word[1:])]
        backward = "B" if kind == "I" else kind
        action = Action(kind, stage, count[backward, stage])
        count[backward, stage] += 1
        if kind == "I":
            waiting.append(Action("W", stage, action.microbatch))
        return action
    for times, words in steps:
        for word in words.split() * times:
            made = [make(half) for half in word.split("&")]
            done.append(Overlap(*made) if len(made) == 2 else made[0])
    return done


def _kept(action: Action | Overlap, m: int) -> Sequence[Action | Overlap]:
    parts = [part for part in action.parts if part.microbatch < m]
    return [action] if len(parts) == len(action.parts) else parts
