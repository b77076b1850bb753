# SPDX-License-Identifier: Apache-2.0
"""The error hierarchy: every refusal says what was attempted, on what, which rule refused, and the ways out.

Not a logging layer: errors are raised before anything is communicated and read the same on every rank, so the
text never contains a rank's own coordinate or local data. One exception to that invariant is `CommError`, which
reports something that happened to a particular peer.
"""
from __future__ import annotations

from collections.abc import Sequence


def _printable(text: str) -> str:
    r"""Text for a terminal: what would steer one, or not be seen, is written as in Python; lines stay lines.

    Example:
        >>> _printable("a\x1b[2Jb\nc")
        'a\\x1b[2Jb\nc'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class DTensorError(Exception):
    """Base of all errors of this library.

    Args:
        attempt: what was attempted, opening like MindSpore's own messages ("For 'redistribute', ...").
        operands: on what: op, dtype, global shape and layout by axis name.
        rule: which rule refused, and why.
        fix: the cheapest ways out, best first.

    Example:
        >>> from ms_dtensor.errors import LayoutError
        >>> print(LayoutError("For 'redistribute', 'placements' has 2 entries.", "f32[8@tp, 4] on mesh(tp=2)",
        ...                   "There is one placement per mesh axis.", "pass 1 placement"))
        For 'redistribute', 'placements' has 2 entries.
          on:   f32[8@tp, 4] on mesh(tp=2)
          rule: There is one placement per mesh axis.
          fix:  pass 1 placement
    """

    def __init__(self, attempt: str, operands: str = "", rule: str = "", fix: str | Sequence[str] = ()):
        self.attempt, self.operands, self.rule = attempt, operands, rule
        self.fix = (fix,) if isinstance(fix, str) else tuple(fix)
        lines = [attempt]
        if operands:
            lines.append("  on:   " + operands.replace("\n", "\n        "))
        if rule:
            lines.append("  rule: " + rule)
        for i, way in enumerate(self.fix):
            lines.append(("  fix:  " if i == 0 else "  or:   ") + way)
        super().__init__(_printable("\n".join(lines)))

    def __reduce__(self):
        return type(self), (self.attempt, self.operands, self.rule, self.fix)


class MeshError(DTensorError, ValueError):
    """A device mesh that cannot be, or an axis that is not there."""


class LayoutError(DTensorError, ValueError):
    """Placements that do not fit the mesh or the tensor."""


class RedistributeError(LayoutError):
    """A layout that cannot be reached from another."""


class OpRuleError(DTensorError, RuntimeError):
    """An op without a rule, or a rule that refuses its operands."""


class MixedOperandError(OpRuleError, TypeError):
    """A plain tensor met a DTensor in one op."""


class ImplicitCommError(OpRuleError):
    """Under `redistribution_policy("explicit")` an op would have moved data by itself."""


class ConfigError(DTensorError, ValueError):
    """A configuration, plan or launch that does not fit together."""


class ScheduleError(DTensorError, ValueError):
    """A pipeline schedule that cannot be made, read or run."""


class CheckpointError(DTensorError, RuntimeError):
    """Files that cannot be written or read, are damaged, or do not hold what is asked of them."""


class CommError(DTensorError, RuntimeError):
    """Something went wrong between ranks.

    Attributes:
        in_step: all members of the group got this error at one and the same call, so they may go on together.
        given_up: a rank has left a step of a pipeline by an exception; all ranks meet again in the next.
    """

    in_step = False
    given_up = False


class PeerLost(CommError):
    """A peer died, or did not arrive in time."""


class CollectiveMismatch(CommError):
    """The ranks of a group called different collectives."""
