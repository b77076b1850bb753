# SPDX-License-Identifier: Apache-2.0
"""The one contract every communication backend keeps, stated once.

A `Backend` moves plain local tensors between ranks. It knows nothing of meshes, placements or gradients, and callers
never pad: sizes may be uneven and may be zero, dims may be any dim, tensors may be 0-d. The invariant: every method is
called by *all* members of its `group`, in the same order on each of them, and returns fresh memory.
Read next: `group.py` (what the upper layers use), then `shm/engine.py` (the reference implementation).
"""
from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from ..errors import CommError
from . import tally as tallies

if TYPE_CHECKING:
    from mindspore import Tensor

    from .parts import Parts

T = TypeVar("T")
Ranks = tuple[int, ...]
Result: TypeAlias = Any  # a Tensor, or with `async_op=True` a Work[Tensor]: a union would have to be narrowed at every call

REDUCE_OPS = ("sum", "max", "min", "prod", "avg")


class Work(Generic[T]):
    """The handle of a collective that may still be running.

    Args:
        result: the value, when it is there already; or, with `finish`, what will hold it.
        finish: called once by the first `wait`; returns the value.
    """

    __slots__ = ("_finish", "_result")

    def __init__(self, result: T | None = None, finish: Callable[[], T] | None = None):
        self._result, self._finish = result, finish

    def wait(self) -> T:
        """Blocks (on a device: orders the stream) until the result may be used, and returns it."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            tally = tallies.running
            self._result = finish() if tally is None else tally.waited(finish)
        return self._result  # type: ignore[return-value]

    @property
    def pending_result(self) -> T | None:
        """What will hold the value once it is waited for; None where the backend makes it only then."""
        return self._result


class Backend(ABC):
    """Collectives over plain local `mindspore.Tensor`s.

    `group` is a tuple of global ranks; the caller is one of them and its index is its position in the tuple.
    With `async_op=True` a tensor collective returns a `Work`; a backend may complete it at once.
    Arguments are checked by `Group`, not here.
    """

    name: str = "?"
    on_host: bool = False  # tensors lie where NumPy can share their memory
    needs_scheduler: bool = False  # msrun's extra process has something to do
    rank: int = 0
    size: int = 1
    _given_up: CommError | None = None
    named: dict[str, Ranks] | None = None  # groups that have been made with a name, by it

    @classmethod
    @abstractmethod
    def start(cls, rank: int, size: int, blocking: bool) -> Backend:
        """Joins the job; called once in each process.

        Args:
            rank: this rank, as the launcher says; 0 in the scheduler.
            size: number of ranks.
            blocking: MindSpore's ops have run when they return.
        """

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str, group: Ranks, async_op: bool = False) -> Result:
        """The reduction of every member's `x`, in a new tensor; bit-identical on every member."""

    def all_reduce_(self, x: Tensor, op: str, group: Ranks) -> Work[Tensor]:
        """Writes the reduction into `x` (on host it lies in a `buffer`), which has it after the wait."""
        x.asnumpy()[...] = self.all_reduce(x, op, group).asnumpy()
        return Work(x)

    def buffer(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Fresh memory from which `all_reduce_` has the least to copy. Host backends only."""
        return np.empty(count, dtype)

    def window(self, nbytes: int) -> Any:
        """Memory for `all_gather_into`, with `claim()` and `release()`, or None where there is no such memory."""
        return None

    def all_gather_into(self, pieces: Sequence[Tensor], window: Any, parts: Parts, dtype: np.dtype, group: Ranks,
                        async_op: bool = False) -> Work:
        """Puts the members' pieces, cast to a dtype, together as whole tensors in a `window`; done after the wait."""
        raise NotImplementedError

    def reduce_scatter_from(self, wholes: dict[int, Tensor], parts: Parts, op: str, group: Ranks) -> Tensor:
        """The reduction of whole tensors, by number in `parts`, as the caller's pieces one behind another.

        Offered where windows are; the tensors are of one dtype.
        """
        raise NotImplementedError

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], group: Ranks, async_op: bool = False) -> Result:
        """The members' tensors joined on `dim`; member i contributes `sizes[i]` there."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], group: Ranks,
                       async_op: bool = False) -> Result:
        """The caller's slice (`sizes[index]` on `dim`) of the reduction; `x.shape[dim] == sum(sizes)`."""

    @abstractmethod
    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   group: Ranks, async_op: bool = False) -> Result:
        """Piece i of `split_dim` goes to member i; the pieces received are joined on `concat_dim` in group order."""

    @abstractmethod
    def all_to_all_rows(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: Ranks,
                        async_op: bool = False) -> Result:
        """Rows of dim 0, in the order of who gets them, to all members; the result has them in the order of who sent them.

        Sizes are each member's own: member i's `send_sizes[j]` is member j's `recv_sizes[i]`, zero included. All members
        call it, also those with no rows at all.
        """

    @abstractmethod
    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        """Batched point-to-point between global ranks; deadlock free whatever the order.

        Args:
            sends: `(destination rank, tensor)`.
            recvs: `(source rank, shape, dtype)`; messages of one pair of ranks match in order.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, src: int, group: Ranks, async_op: bool = False) -> Result:
        """Rank `src`'s tensor. Other members pass a tensor of its shape and dtype; its values are not read."""

    @abstractmethod
    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, group: Ranks, *, shape: Sequence[int],
                dtype: Any, async_op: bool = False) -> Result:
        """The caller's slice of `src`'s tensor, whose global `shape` and `dtype` every member states.

        `x` is read on `src` only; other members may pass None.
        """

    @abstractmethod
    def barrier(self, group: Ranks) -> None:
        """Returns when every member has called it."""

    @abstractmethod
    def all_gather_object(self, obj: Any, group: Ranks) -> list[Any]:
        """Every member's object (see `objects`), in group order."""

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int, group: Ranks) -> Any:
        """Rank `src`'s object (see `objects`)."""

    def agree(self, what: str, group: Ranks) -> None:  # noqa: B027
        """Raises unless all members say the same; nothing where calls are compared now and then only (`agree.py`)."""

    def give_up(self, error: CommError, group: Ranks) -> None:
        """This rank leaves a step of many calls by an exception: the others get the error in place of what they wait for.

        Not here: where nobody is told, they wait on.
        """
        self._given_up = error

    def resume(self, group: Ranks) -> None:
        """Begins the next: where a step was given up the members meet, and what was in flight is void.

        Raises:
            CommError: this cannot be done.
        """
        if self._given_up is not None:
            raise CommError(f"For 'resume', what was in flight stays there on '{self.name}'.", f"after: {self._given_up}",
                            "A step begins with nothing in flight.", "end the process; restart from a checkpoint")

    def communicator(self, group: Ranks) -> str | None:
        """The name by which MindSpore's own collectives know these ranks, after all of them have called this; or None."""
        return None

    def close(self, reason: str = "") -> None:  # noqa: B027  most backends have nothing to do
        """Leaves the job (`reason`: the error that ends this rank). Others fail only if they wait for this rank."""


def communicator_name(ranks: Ranks) -> str:
    """A name for a set of ranks, equal on all of them, short however many they are (HCCL allows 128 characters)."""
    return f"msdt_{len(ranks)}_{hashlib.sha1(repr(ranks).encode()).hexdigest()[:24]}"


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each piece starts: `offsets((3, 2, 2)) == [0, 3, 5, 7]` (the last entry is the total)."""
    return list(accumulate(sizes, initial=0))


def cut(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    """The index that takes `[start, stop)` of `dim` and all of every other dim."""
    return (slice(None),) * dim + (slice(start, stop),)


@cache
def dtype_text(dtype) -> str:
    """A dtype in messages; `shm` carries bfloat16 as two bytes."""
    return "bfloat16" if str(dtype) == "|V2" else str(dtype)


def kind(x, *open_dims: int) -> str:
    """Dtype and shape of a tensor or array for comparison between ranks, with the dims that may differ left open."""
    return f"{dtype_text(x.dtype)}[{', '.join('·' if d in open_dims else str(s) for d, s in enumerate(x.shape))}]"


def with_dim(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with `size` on `dim`."""
    return (*shape[:dim], size, *shape[dim + 1:])
