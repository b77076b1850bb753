# SPDX-License-Identifier: Apache-2.0
"""A group of ranks with a backend: the only thing the layers above use to communicate.

Adds to a `Backend` what every call needs: arguments are checked before anything is sent, one event is recorded, and a
group of one costs nothing. It holds no communicator; making one is free. The invariant: a call that returns has either
communicated exactly once and recorded it, or had no other rank to communicate with. Where the backend is MindSpore's
own, a mesh's group is also the name that MindSpore's own collectives ask for; what these do nobody checks or records.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CommError
from . import tally as tallies
from .hccl_words import explain
from .protocol import REDUCE_OPS, Backend, Result, Work
from .record import CommEvent, active, note, user_site

if TYPE_CHECKING:
    from mindspore import Tensor

    from .parts import Parts


class _Flat(NamedTuple):
    """What a collective of many tensors is in the record: one flat tensor."""

    shape: tuple[int, ...]
    dtype: Any
    itemsize: int


class Group:
    """Some ranks, in order, and the mesh axes they stand for.

    Args:
        backend: what moves the data.
        ranks: global ranks in group order; the calling rank must be one of them to communicate.
        axes: names of the mesh axes the group spans, for the record.
    """

    def __init__(self, backend: Backend, ranks: Sequence[int], axes: Sequence[str] = ()):
        self.backend, self.ranks, self.axes = backend, tuple(ranks), tuple(axes)
        self.size = len(self.ranks)
        distinct = len(set(self.ranks)) == self.size > 0
        if not distinct or min(self.ranks) < 0 or max(self.ranks) >= backend.size:
            raise CommError(f"For 'group', {self.ranks} is not a list of ranks.", f"world of {backend.size}",
                            "A group has each of its ranks once, and all of them in the world.",
                            ("pass distinct ranks from 0 to the world size - 1",
                             "what was made in a fake world or a dry run is of use inside of its block alone"))
        self.rank_index = self.ranks.index(backend.rank) if backend.rank in self.ranks else -1

    def __repr__(self) -> str:
        return f"Group({self.backend.name}, {self.ranks}, axes={self.axes})"

    # -- checks and record -----------------------------------------------------------------------------------------

    def _refuse(self, op: str, x: Any, rule: str, fix: str | Sequence[str] = ()) -> CommError:
        on = f"{x.dtype}{list(x.shape)} over ranks {self.ranks}" if x is not None else f"ranks {self.ranks}"
        return CommError(f"For '{op}', the arguments do not fit.", on, rule, fix)

    def _check(self, op: str, x: Any = None, reduce: str | None = None,
               dims: Sequence[tuple[int, Sequence[int], int]] = ()) -> None:
        """`dims`: (dim, sizes, size that `x` must have there)."""
        if self.rank_index < 0:
            raise self._refuse(op, x, f"Rank {self.backend.rank} is not a member of the group.",
                               "call it on the group's members only")
        if reduce is not None:
            kind = str(x.dtype)
            if reduce not in REDUCE_OPS:
                raise self._refuse(op, x, f"'{reduce}' is not a reduction.", f"use one of {', '.join(REDUCE_OPS)}")
            if reduce == "avg" and not kind.startswith(("Float", "BFloat", "Complex")):
                raise self._refuse(op, x, "The average of integers is not an integer.",
                                   ("reduce with 'sum' and divide", "cast to a float dtype"))
            if kind == "Bool" and reduce == "sum":
                raise self._refuse(op, x, "A sum of booleans is not a boolean.",
                                   ("use 'max' for any, 'min' for all", "cast to int32 to count"))
            if kind.startswith("Complex") and reduce in ("max", "min"):
                raise self._refuse(op, x, "Complex numbers have no order.", "reduce real and imaginary part apart")
        shape = x.shape if dims else ()
        for dim, sizes, have in dims:
            if not 0 <= dim < len(shape):
                raise self._refuse(op, x, f"Dim {dim} is out of range.", "0 <= dim < ndim")
            if len(sizes) != self.size or (sizes and min(sizes) < 0):
                raise self._refuse(op, x, f"{list(sizes)} is not one size per member.", f"pass {self.size} sizes")
            if shape[dim] != have:
                raise self._refuse(op, x, f"Dim {dim} has size {shape[dim]}, the sizes {list(sizes)} ask for {have}.",
                                   "pass the size every member has on this dim")

    def _done(self, op: str, x: Any, fraction: float, call: Callable[[], Any]) -> Any:
        """Runs the call; records it if somebody listens. `fraction` of the payload leaves this rank."""
        listeners, tally = active(), tallies.running
        if not listeners and tally is None:
            return self._called(op, x, call)
        started = time.perf_counter()
        result = self._called(op, x, call)
        seconds = time.perf_counter() - started
        n = note()
        axes = self.axes if n.axes is None else n.axes
        size = 0 if x is None else round(math.prod(x.shape) * x.itemsize * fraction)
        if tally is not None:
            tally.add(op, axes, size, seconds)
        if not listeners:
            return result
        shape, dtype = ((), "") if x is None else (tuple(x.shape), str(x.dtype))
        event = CommEvent(op, axes, self.ranks, shape, dtype, size, user_site(), n.phase, n.implicit, n.src, n.dst, seconds,
                          started, n.module)
        for events in listeners:
            events.append(event)
        return result

    def _called(self, op: str, x: Any, call: Callable[[], Any]) -> Any:
        """The call; what HCCL says in codes is said in words, with the group and the line. On a device others come later."""
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, CommError) or (told := explain(str(error))) is None:
                raise
            code, rule, ways = told
            on = f"{x.dtype}{list(x.shape)} " if x is not None else ""
            axes = f" ({', '.join(self.axes)})" if self.axes else ""
            raise CommError(f"For '{op}', HCCL told rank {self.backend.rank} {code}.",
                            f"{on}over ranks {self.ranks}{axes}, called at {user_site()}", rule, ways) from error

    def _alone(self, x: Tensor, async_op: bool) -> Result:
        """A group of one: a copy, so that results own their memory here too."""
        from .packing import copy
        return Work(copy(x)) if async_op else copy(x)

    def _collective(self, op: str, x: Tensor, fraction: float, async_op: bool, *arguments: Any) -> Result:
        """The backend's collective of this name; its arguments have been checked."""
        if self.size == 1:
            return self._alone(x, async_op)
        call = getattr(self.backend, op)
        return self._done(op, x, fraction, lambda: call(x, *arguments, self.ranks, async_op))

    # -- tensors ---------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Result:
        """The reduction of all members' `x`; bit-identical on every member."""
        self._check("all_reduce", x, op)
        return self._collective("all_reduce", x, 2 * (self.size - 1) / self.size, async_op, op)

    def all_reduce_(self, x: Tensor, op: str = "sum") -> Work[Tensor]:
        """As `all_reduce`, into `x` itself, which has the reduction after the wait; on host it is of `backend.buffer`."""
        self._check("all_reduce", x, op)
        if self.size == 1:
            return Work(x)
        fraction = 2 * (self.size - 1) / self.size
        return self._done("all_reduce", x, fraction, lambda: self.backend.all_reduce_(x, op, self.ranks))

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], *, async_op: bool = False) -> Result:
        """The members' tensors joined on `dim`, where member i has `sizes[i]` (uneven and zero are fine)."""
        self._check("all_gather", x, None, [(dim, sizes, sizes[self.rank_index] if len(sizes) == self.size else -1)])
        return self._collective("all_gather", x, self.size - 1, async_op, dim, sizes)

    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], *, async_op: bool = False) -> Result:
        """This member's slice, `sizes[rank_index]` on `dim`, of the reduction of all members' `x`."""
        self._check("reduce_scatter", x, op, [(dim, sizes, sum(sizes))])
        return self._collective("reduce_scatter", x, (self.size - 1) / self.size, async_op, op, dim, sizes)

    def all_gather_into(self, pieces: Sequence[Tensor], window: Any, parts: Parts, dtype: Any, *,
                        async_op: bool = False) -> Work:
        """The members' pieces of tensors put together in a `backend.window`; one collective, recorded as such."""
        from .packing import numpy_dtype
        self._check("all_gather")
        kind = numpy_dtype(dtype)
        flat = _Flat((parts.totals[self.rank_index],), dtype, kind.itemsize)
        return self._done("all_gather", flat, self.size - 1,
                          lambda: self.backend.all_gather_into(pieces, window, parts, kind, self.ranks, async_op))

    def reduce_scatter_from(self, wholes: dict[int, Tensor], parts: Parts, op: str = "sum") -> Tensor:
        """This member's pieces, one behind another, of the reduction of whole tensors, given by number in `parts`."""
        x = next(iter(wholes.values()))
        self._check("reduce_scatter", x, op)
        flat = _Flat((sum(parts.total(tuple(wholes), r) for r in range(self.size)),), x.dtype, x.itemsize)
        return self._done("reduce_scatter", flat, (self.size - 1) / self.size,
                          lambda: self.backend.reduce_scatter_from(wholes, parts, op, self.ranks))

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   *, async_op: bool = False) -> Result:
        """Piece i of `split_dim` goes to member i; pieces received are joined on `concat_dim` in group order.

        `split_sizes[i]` is what member i gets of `split_dim`, `concat_sizes[i]` what member i brings on `concat_dim`.
        """
        if split_dim == concat_dim:
            raise self._refuse("all_to_all", x, "Split and concat dim are one dim: pieces would only change rank.",
                               "use 'exchange' to move pieces of one dim between ranks")
        mine = concat_sizes[self.rank_index] if len(concat_sizes) == self.size else -1
        self._check("all_to_all", x, None,
                    [(split_dim, split_sizes, sum(split_sizes)), (concat_dim, concat_sizes, mine)])
        return self._collective("all_to_all", x, 1 - split_sizes[self.rank_index] / max(sum(split_sizes), 1), async_op,
                                split_dim, split_sizes, concat_dim, concat_sizes)

    def all_to_all_rows(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], *,
                        async_op: bool = False) -> Result:
        """The first `send_sizes[0]` rows (of dim 0) go to member 0, the next to member 1; received in the members' order.

        All members call it, also those that send or receive nothing. Recorded as an `all_to_all` with this rank's bytes.

        Args:
            x: rows in the order of who gets them; `sum(send_sizes)` of them.
            send_sizes: rows for each member.
            recv_sizes: rows from each member, as that one's `send_sizes` says for this rank.
            async_op: return a `Work`.

        Raises:
            CommError: the sizes do not fit `x`, or what stays here is not what comes from here.
            CollectiveMismatch: two members say different sizes (where the backend sees it).
        """
        self._check("all_to_all_rows", x, None, [(0, send_sizes, sum(send_sizes))])
        me = self.rank_index
        if len(recv_sizes) != self.size or min(recv_sizes) < 0 or recv_sizes[me] != send_sizes[me]:
            raise self._refuse("all_to_all_rows", x, f"Sizes to send {list(send_sizes)} and to receive {list(recv_sizes)} "
                               "do not belong together.",
                               f"pass {self.size} sizes each; what this rank keeps is in both alike")
        if self.size == 1:
            return self._alone(x, async_op)
        away = 1 - send_sizes[me] / max(sum(send_sizes), 1)
        return self._done("all_to_all", x, away,
                          lambda: self.backend.all_to_all_rows(x, send_sizes, recv_sizes, self.ranks, async_op))

    def broadcast(self, x: Tensor, src: int, *, async_op: bool = False) -> Result:
        """Global rank `src`'s tensor; the others pass one of the same shape and dtype, whose values are not read."""
        self._check("broadcast", x)
        self._check_src("broadcast", x, src)
        return self._collective("broadcast", x, float(src == self.backend.rank), async_op, src)

    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, *, shape: Sequence[int] | None = None,
                dtype: Any = None, async_op: bool = False) -> Result:
        """This member's slice of global rank `src`'s tensor.

        Args:
            x: the tensor on `src`; elsewhere None, or a tensor that only shows shape and dtype.
            dim: the dim to cut.
            sizes: what each member gets.
            src: global rank that has the data.
            shape: global shape; needed where `x` is None.
            dtype: needed where `x` is None.
            async_op: return a `Work`.
        """
        self._check("scatter", x)
        self._check_src("scatter", x, src)
        if x is None and (shape is None or dtype is None or src == self.backend.rank):
            raise self._refuse("scatter", x, "The source passes the tensor; the others say its shape and dtype.",
                               "pass shape= and dtype= where x is None")
        shape = tuple(x.shape if shape is None else shape)  # type: ignore[union-attr]
        dtype = x.dtype if dtype is None else dtype  # type: ignore[union-attr]
        if not 0 <= dim < len(shape) or len(sizes) != self.size or sum(sizes) != shape[dim] \
                or (x is not None and (tuple(x.shape) != shape or x.dtype != dtype)):
            raise self._refuse("scatter", x, f"Sizes {list(sizes)} on dim {dim} do not cut {dtype}{list(shape)}.",
                               "the sizes sum up to the dim, one per member")
        if self.size == 1:
            return self._alone(x, async_op)
        kept = sizes[self.rank_index] / max(sum(sizes), 1)
        return self._done("scatter", x, float(src == self.backend.rank) * (1 - kept),
                          lambda: self.backend.scatter(x, dim, sizes, src, self.ranks, shape=shape, dtype=dtype,
                                                       async_op=async_op))

    def _check_src(self, op: str, x: Any, src: int) -> None:
        if src not in self.ranks:
            raise self._refuse(op, x, f"Source rank {src} is not a member of the group.", "pass a member's global rank")

    # -- point to point --------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        """Batched point-to-point between members, by global rank; deadlock free in any order.

        Args:
            sends: `(destination rank, tensor)`; sending to oneself is allowed.
            recvs: `(source rank, shape, dtype)`; messages of one pair match in order.
        """
        self._check("exchange")
        strangers = sorted({*(dst for dst, _ in sends), *(src for src, _, _ in recvs)} - set(self.ranks))
        if strangers:
            raise self._refuse("exchange", None, f"Rank(s) {strangers} are not members of the group.",
                               "pass global ranks of members")
        if not sends and not recvs:
            return []
        if self.size == 1:
            return [self._alone(x, False) for _, x in sends]
        listeners = active()
        x = sends[0][1] if sends else None
        away = sum(math.prod(t.shape) * t.itemsize for dst, t in sends if dst != self.backend.rank) if listeners else 0
        whole = max(math.prod(x.shape) * x.itemsize, 1) if x is not None else 1
        return self._done("exchange", x, away / whole, lambda: self.backend.exchange(sends, recvs))

    def send(self, x: Tensor, dst: int) -> None:
        """Sends one tensor to global rank `dst`."""
        self.exchange([(dst, x)], [])

    def recv(self, shape: Sequence[int], dtype: Any, src: int) -> Tensor:
        """Receives one tensor from global rank `src`."""
        return self.exchange([], [(src, shape, dtype)])[0]

    def agree(self, what: str) -> None:
        """Raises, on all members, unless they say the same: of a program's course, as calls are compared. Not recorded."""
        if self.size > 1:
            self.backend.agree(what, self.ranks)

    def give_up(self, error: CommError) -> None:
        """This rank leaves a step by an exception: members that wait get the error. Not recorded."""
        if self.size > 1:
            self.backend.give_up(error, self.ranks)

    def resume(self) -> None:
        """Before a step: where the one before was given up on some member, all meet. Not recorded."""
        if self.size > 1:
            self.backend.resume(self.ranks)

    # -- objects ---------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when every member has called it."""
        self._check("barrier")
        if self.size > 1:
            self._done("barrier", None, 0, lambda: self.backend.barrier(self.ranks))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every member's object (see `objects`), in group order."""
        self._check("all_gather_object")
        if self.size == 1:
            return [obj]
        return self._done("all_gather_object", None, 0, lambda: self.backend.all_gather_object(obj, self.ranks))

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """Global rank `src`'s object (see `objects`)."""
        self._check("broadcast_object")
        self._check_src("broadcast_object", None, src)
        if self.size == 1:
            return obj
        return self._done("broadcast_object", None, 0, lambda: self.backend.broadcast_object(obj, src, self.ranks))


class NamedGroup(Group, str):
    """A group that is also the name of its communicator, as MindSpore's own collectives take one."""

    def __new__(cls, name: str, *args: Any) -> NamedGroup:
        return str.__new__(cls, name)

    def __init__(self, name: str, *args: Any):
        super().__init__(*args)

    def __reduce__(self) -> Any:
        return str, (str(self),)
