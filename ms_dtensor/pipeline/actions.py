# SPDX-License-Identifier: Apache-2.0
"""What a schedule is: a list of actions for each rank, as a value, as text and as CSV in PyTorch's form.

An action names its stage and microbatch, never a time: times come from `order.py`. Nothing here says whether an order is
right; that is `check.py`.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..core.files import regular
from ..debug.text import columns
from ..errors import ScheduleError

Result = tuple[str, int, int]  # what an action makes: ("F" activation | "B" gradient of its input | "W", stage, microbatch)
_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)(?:OVERLAP_F_B)?")


class Action(NamedTuple):
    """One piece of computation of one stage on one microbatch.

    Args:
        kind: `F` forward; `B` whole backward, or its two parts: `I` the gradient of the input, `W` those of the weights.
        stage: index of the stage, 0 is where the data enters.
        microbatch: index of the microbatch.

    Example:
        >>> str(Action("F", 2, 0))
        '2F0'
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Itself; of a pair, both."""
        return (self,)

    @property
    def result(self) -> Result:
        """What others may wait for."""
        return "B" if self.kind == "I" else self.kind, self.stage, self.microbatch

    def inputs(self, stages: int) -> tuple[Result, ...]:
        """Results that it needs, of a model of so many stages."""
        kind, s, m = self
        if kind == "F":
            return (("F", s - 1, m),) if s else ()
        if kind == "W":
            return (("B", s, m),)
        return (("F", s, m),) if s == stages - 1 else (("F", s, m), ("B", s + 1, m))


class Overlap(NamedTuple):
    """A forward and a backward of one rank that may share the time of each other's communication; they run in this order.

    Example:
        >>> str(Overlap(Action("F", 2, 1), Action("B", 0, 0)))
        '(2F1;0B0)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        return tuple(self)


@dataclass(frozen=True)
class Actions:
    """A schedule: what each rank computes, in its order.

    Args:
        ranks: the actions of each rank.
        owner: the rank of each stage; by default the one that has most of its actions, -1 where nobody has one.

    Example:
        >>> from ms_dtensor.pipeline import Actions, one_f_one_b
        >>> order = one_f_one_b(2, 2)
        >>> print(order.csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
        >>> Actions.parse(order.csv()) == order, order.owner, order.microbatches
        (True, (0, 1), 2)
    """

    ranks: tuple[tuple[Action | Overlap, ...], ...]
    owner: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        found = [part for rank in self.ranks for action in rank for part in action.parts]
        stage = max((part.stage for part in found), default=0)
        microbatch = max((part.microbatch for part in found), default=0)
        if max(stage, microbatch) >= len(found) or self.owner and len(self.owner) <= stage:
            raise ScheduleError(f"For 'Actions', the {len(found)} actions of {len(self.ranks)} ranks are no schedule.",
                                f"the largest stage is {stage}, the largest microbatch {microbatch}; owner={self.owner}",
                                "Each stage has a rank, and actions for each microbatch; both count from 0.",
                                "look at the largest index: it may be a misprint")
        if not self.owner:
            of: list[Counter] = [Counter() for _ in range(1 + stage)]
            for rank, actions in enumerate(self.ranks):
                for action in actions:
                    for part in action.parts:
                        of[part.stage][rank] += 1
            object.__setattr__(self, "owner", tuple(max(count, key=count.__getitem__, default=-1) for count in of))

    @property
    def microbatches(self) -> int:
        """How many there are: one more than the largest index."""
        return 1 + max(part.microbatch for _, _, part in computing(self.ranks))

    def csv(self) -> str:
        """A row per rank and an action per cell, as PyTorch writes its `compute_only` files."""
        return "".join(",".join(map(str, rank)) + "\n" for rank in self.ranks)

    def text(self) -> str:
        """A grid: a row per rank, a column per place in the list."""
        return grid(self.ranks)

    @classmethod
    def parse(cls, text: str) -> Actions:
        """Reads CSV; empty cells are waiting times, which an order does not need."""
        rows = [[cell.strip() for cell in line.split(",")] for line in text.rstrip().splitlines()]
        read = [[(cell, _action(cell)) for cell in row if cell] for row in rows]
        wrong = [f"rank {r}, place {i}: {cell[:40]!r}" for r, row in enumerate(read)
                 for i, (cell, action) in enumerate(row) if action is None]
        if wrong:
            raise ScheduleError(f"For 'Actions.parse', {len(wrong)} cells are no actions.", "\n".join(wrong[:8]),
                                "A cell is a stage, one of F B I W and a microbatch, or a forward and a backward as a pair.",
                                ("cells like 2F0, 2B0, 2I0, 2W0, (2F1;0B0)OVERLAP_F_B",
                                 "leave messages and gathering out (SEND, RECV, UNSHARD, ...): they are derived"))
        return cls(tuple(tuple(action for _, action in row if action is not None) for row in read))

    @classmethod
    def load(cls, path: str | Path) -> Actions:
        """Reads a CSV file."""
        try:
            text = regular(Path(path)).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"For 'Actions.load', '{path}' cannot be read.", str(error), "A schedule is a CSV file.",
                                "python -m ms_dtensor pipeline --schedule 1f1b --pp 2 --micro 4 --csv FILE") from None
        return cls.parse(text)


def _action(cell: str) -> Action | Overlap | None:
    one, two = _ACTION.fullmatch(cell), _OVERLAP.fullmatch(cell)
    if one:
        return Action(one[2], int(one[1]), int(one[3]))
    forward, backward = (_action(half.strip()) for half in two.groups()) if two else (None, None)
    if isinstance(forward, Action) and isinstance(backward, Action) and forward.kind == "F" and backward.kind in "BI":
        return Overlap(forward, backward)
    return None


def computing(ranks: Sequence[Sequence]) -> Iterator[tuple[int, int, Action]]:
    """(rank, place in its list, action) of all that computes, pairs taken apart; messages left out."""
    for rank, actions in enumerate(ranks):
        for place, action in enumerate(actions):
            if isinstance(action, Action | Overlap):
                for part in action.parts:
                    yield rank, place, part


def grid(ranks: Sequence[Sequence], rank: int | None = None, place: int = 0) -> str:
    """The lists side by side; with a rank and a place only the cells around it, and itself in brackets.

    Example:
        >>> print(grid([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], 1, 3))
        place     1    2      3
        rank 0  0F1  0B0    0B1
        rank 1  1B0  1F1  [1B1]
    """
    rows = range(len(ranks)) if rank is None else range(max(0, rank - 1), min(len(ranks), rank + 2))
    longest = max(len(ranks[r]) for r in rows)
    places = range(longest) if rank is None else range(max(0, place - 2), max(min(longest, place + 3), place + 1))
    cells: list[tuple[str, ...]] = [("place", *map(str, places))]
    for r in rows:
        row = [str(ranks[r][c]) if c < len(ranks[r]) else "" for c in places]
        cells.append((f"rank {r}", *(f"[{text}]" if (r, c) == (rank, place) else text for c, text in zip(places, row))))
    return columns(cells, right=range(1, len(places) + 1))
