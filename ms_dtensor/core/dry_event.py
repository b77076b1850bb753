# SPDX-License-Identifier: Apache-2.0
"""What one rank does in a step, as a plain value: the list that a dry run hands to whoever turns it into seconds.

An event is either *work* (an op of this rank's shards) or a *move* (a collective, or a message). A list of them is in the
order in which the rank issues them, so an event refers only to events before it. How long an event takes is not here: a
cost model is a function of such a list and of a machine. Invariant: an event says sizes only, never a time or a value.
"""
from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"  # the stream of all work; each set of axes has a stream of its own


@dataclass(frozen=True, slots=True)
class DryEvent:
    """One thing that a rank does.

    Attributes:
        op: canonical name of the op ("matmul", "softmax"), or of the collective ("all_gather", "exchange"). Of what
            MindSpore does by itself: "copy_of_view", which a kernel reads, and "accumulate", a sum of two gradients.
        stream: "compute", or the axes of a move joined by "," ("tp", "dp,cp"). Events of one stream run one after another,
            in the order of the list.
        after: places in the list of events of other streams that must have ended before this one begins; sorted.
        flops: of work: floating-point operations, a product and a sum are two. 0 where only bytes count.
        read: bytes of the operands of work.
        written: bytes of its results; 0 of a view.
        bytes: of a move: what this rank gives to other ranks under the usual ring algorithm, as in `CommEvent`.
        payload: of a move: bytes of the tensor that this rank passes in.
        mapped: of a move: bytes of memory that a host puts under the addresses of its result first, where these stay.
        axes: of a move: the mesh axes it runs over; empty if it is over none.
        ranks: of a move: how many take part. 0 of work.
        stride: of a move: the distance between neighbours in its group, in global ranks: a group of 8 with stride 1 lies on
            one host of 8, with stride 8 on 8 hosts.
        span: of a move: the distance between its first and its last rank, in global ranks.
        group: of a move: the global ranks that take part.
        sends, takes: of an "exchange": the global ranks that this rank sends to, and those whose messages it waits for.
        dtype: of the first operand, as layouts write it ("bfloat16").
        phase: "forward", "backward" or "optimizer".
        site: "file:line" of the user's code.

    Example:
        >>> from ms_dtensor.core.dry_event import COMPUTE, DryEvent
        >>> product = DryEvent("matmul", COMPUTE, flops=2 * 4 * 8 * 16, read=640, written=256)
        >>> summed = DryEvent("all_reduce", "tp", (0,), bytes=256, payload=256, axes=("tp",), ranks=2, stride=1, span=1)
        >>> [e.op for e in (product, summed) if e.is_move]
        ['all_reduce']
    """

    op: str
    stream: str = COMPUTE
    after: tuple[int, ...] = ()
    flops: int = 0
    read: int = 0
    written: int = 0
    bytes: int = 0
    payload: int = 0
    mapped: int = 0
    axes: tuple[str, ...] = ()
    ranks: int = 0
    stride: int = 0
    span: int = 0
    group: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    dtype: str = "float32"
    phase: str = "forward"
    site: str = ""

    @property
    def is_move(self) -> bool:
        """Whether ranks communicate."""
        return self.ranks > 0
