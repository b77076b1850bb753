# SPDX-License-Identifier: Apache-2.0
"""When the gradients of a unit are added up over ranks: now, when the backward ends, or in a later backward.

Whole gradients of cut parameters come from the unit's node (`call.py`), and their reduction to shards begins. Of kept
parameters each rank's summand comes to a hook, which puts it in its place in a bucket; buckets are reduced when the
backward ends, on a device as soon as they are full. Autograd is handed *blanks* for all of them (`sums.py`). When the
backward is over, `deliver` puts sums in the place of blanks, with what ops past the unit have given to a cut parameter, and
runs the hooks that users registered. Without synchronisation all of this is owed: added up on each rank, zeros handed out,
until a backward that synchronises. Where the policy says so, sums are kept in `main_grad`, and zeros handed out. Invariant:
where a gradient goes is fixed when the unit is made; the order in which gradients arrive is only compared between ranks.
"""
from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mindspore import Tensor

from ... import comm
from ...comm.packing import ArrayOps, TensorOps, add_into, added, cast, copy, numpy_dtype, write
from ...dispatch.memo import memo_of
from ...dispatch.patches.gradients import REDUCED_BY, asked_for, in_this_gradient
from ...dispatch.patches.hooks import run_hooks
from ...dispatch.patches.recomputed import weakly
from ...errors import OpRuleError
from ...internals.names import NoFallbackGuard, recording
from ...internals.target import on_cpu
from ...redistribute.cost import nbytes
from .sums import Sums, add_main, blank, fresh, gradient, is_blank

if TYPE_CHECKING:
    from .block import Block
    from .unit import Unit

class Bucket:
    """Gradients of kept parameters of one dtype, one behind another in one piece of memory.

    Args:
        label: of the unit, and which bucket it is.
        params: DTensor Parameters.
        group: the ranks to sum over.
        dtype: in which to add up; None: that of the gradients.
    """

    def __init__(self, label: str, params: list, group, dtype):
        self.label, self.group, self.dtype = label, group, dtype
        self.shapes = [p.local_shape for p in params]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.starts = [0, *itertools.accumulate(self.sizes)]
        self.on_host = group.backend.on_host
        self.params = params
        self.places: dict[int, Tensor] = {}  # of those that have arrived, theirs in `flat`, by number
        self.flat: Any = None  # new for every backward
        self.work: comm.Work | None = None  # the reduction, once it has begun

    def put(self, number: int, grad: Tensor) -> None:
        """A summand has arrived."""
        if self.flat is None:
            self.flat = self._memory(self.starts[-1], self.dtype or grad.dtype)
        self.places[number] = self._place(number, self.starts[number])
        write(self.places[number], grad)
        if len(self.places) == len(self.params) and not self.on_host:
            self.begin("")

    def _place(self, number: int, at: int) -> Tensor:
        ops = ArrayOps if self.on_host else TensorOps
        return ops.tensor(ops.shaped(ops.take(ops.of(self.flat), 0, at, at + self.sizes[number]), self.shapes[number]))

    def _memory(self, elements: int, dtype) -> Tensor:
        if self.on_host:
            return Tensor.from_numpy(self.group.backend.buffer(elements, numpy_dtype(dtype)))
        return fresh((elements,), dtype, zero=False)

    def begin(self, seen: str) -> None:
        """Begins to reduce what has arrived, if anything has, side by side in the order of the parameters."""
        if self.work is not None or not self.places:
            return
        if len(self.places) < len(self.params):
            apart, at = self.places, 0
            self.flat = self._memory(sum(self.sizes[i] for i in apart), self.flat.dtype)
            self.places = {}
            for i in sorted(apart):
                self.places[i] = self._place(i, at)
                write(self.places[i], apart[i])
                at += self.sizes[i]
        with comm.annotate(phase="backward", src="gradient bucket", dst="gradient bucket", of=self.label + seen):
            self.work = self.group.all_reduce_(self.flat, "sum")

    def finish(self, scale: float) -> dict[int, Tensor]:
        """Sums of all that had arrived, times a number, by id of the parameter; the bucket is empty again."""
        places = self.places
        self.forget()
        return {id(self.params[i]): place if scale == 1 else place * scale for i, place in places.items()}

    def forget(self) -> None:
        """The bucket is empty again."""
        if self.work is not None:
            self.work.wait()
        self.places, self.flat, self.work = {}, None, None


class Reduction:
    """Of one unit."""

    def __init__(self, unit: Unit):
        self.unit, self.params = unit, unit.params
        self.sync = self.sync_copies = True  # whether backwards reduce at all, and over ranks that hold copies
        self._owed: dict[int, Tensor] = {}  # summands of this rank, by id of the parameter
        self.owed_shards: dict[int, Tensor] = {}  # sums over the axes that cut, not yet over those that copy
        self._sums: dict[int, Tensor] = {}  # over all ranks, not delivered; of cut ones, what ops past the unit have given
        copying = unit.axes.copying
        self._copied = bool(copying) and unit.mesh[copying].size() > 1  # whether several ranks hold the same shard
        self.copies = unit.mesh.get_group(copying) if self._copied and unit.blocks else None
        # What sums of gradients are multiplied with: an average, as in PyTorch, or the gradient of a global loss.
        self.scale = 1 / unit.mesh.size() if unit.local else 1.0
        self.main = unit.policy.apply_grad_on_fp32_main_grad
        self.buckets: list[Bucket] = []
        self._due: list[Sums] = []  # of cut parameters, under way
        self._hooked = set[int]()  # ids of parameters whose users' hooks wait for that
        for p in self.params.values():
            p.__dict__[REDUCED_BY] = self
            if id(p) in unit.place:
                memo_of(p).late_gradient = self._hooked
        self.read: list[str] = []  # kept ones, as recorded ops have read them since the last reduction; ranks compare it
        self._arrived: list[str] = []  # the same, as their gradients have arrived
        self._places: dict[int, tuple[Bucket, int]] = {}  # of kept parameters, by id: which bucket, and at which place there
        self.begin()

    @property
    def _keeps(self) -> bool:
        """Whether gradients are owed; of kept parameters one sum goes over all ranks, copies or not."""
        return not self.sync or self._copied and not self.sync_copies

    def regroup(self) -> None:
        """The parameters lie on other axes now."""
        self._places = {}
        self.begin()

    def beside(self, block: Block, numbers: Iterable[int]) -> dict[tuple[int, ...], list[int]]:
        """Of parameters of a block those with copies on axes that bring no data, by these axes; of local cells."""
        out = dict[tuple[int, ...], list[int]]()
        for i in numbers if self.unit.local else ():
            p, on = block.params[i], self.unit.partial_on[id(block.params[i])]
            axes = tuple(a for a in on if a not in self.unit.on(p) and p.device_mesh.shape[a] > 1)
            if axes:
                out.setdefault(axes, []).append(i)
        return out

    def begin(self) -> None:
        """A forward begins. Buckets are of those parameters that are trained now: made anew when others are.

        Of at most so many MiB, filled in reverse order of the parameters, as the backward is expected to meet them.
        """
        trained = [p for key, p in self.params.items() if key not in self.unit.place and p.requires_grad]
        if set(map(id, trained)) == self._places.keys():
            return
        self.buckets, self._places = [], {}
        unit, filled = self.unit, list[list]()
        if unit.mesh.size() == 1 and not unit.local and not self.main and self.sync and not self._owed:
            return  # a sum of one
        last, size = dict[Any, list](), dict[Any, float]()
        for p in reversed(trained):
            memo = memo_of(p)
            if memo.late_gradient is not self._hooked:  # the hook holds neither, as it lives as long as its tensor
                memo.late_gradient = self._hooked
                Tensor.register_hook(p, functools.partial(weakly(self._keep), id(p)))
            memo.partial_grad_axes, memo.reads = unit.partial_on[id(p)], (self.read, p.name)
            kind, need = (p.layout.dtype, unit.partial_on[id(p)]), nbytes(p.local_shape, p.layout.dtype)
            if kind not in last or size[kind] + need > unit.bucket_mb * 2 ** 20:
                last[kind], size[kind] = [], 0
                filled.append(last[kind])
            last[kind].append(p)
            size[kind] += need
        for members in filled:
            self._add_bucket(members)

    def _add_bucket(self, members: list) -> None:
        unit, first = self.unit, members[0]
        dtype = unit.policy.reduce_dtype or unit.policy.param_dtype
        group = first.device_mesh.get_group(unit.partial_on[id(first)]) if unit.local else unit.mesh.get_group()
        bucket = Bucket(f"{unit.label} bucket {len(self.buckets)}", members, group,
                        None if dtype in (None, first.dtype) else dtype)
        self.buckets.append(bucket)
        self._places |= {id(p): (bucket, i) for i, p in enumerate(members)}

    # -- as gradients arrive -----------------------------------------------------------------------------------------

    def whole(self, places: tuple[tuple[Block, int], ...], grads, read: str) -> list[Tensor]:
        """Whole gradients of cut parameters begin to be added up, or are owed; shards that are blank.

        `places`: of each its block and number there. `read`: in which order the forward has read them, which ranks compare.
        Of one that is frozen by now MindSpore takes no gradient: what is owed of it stays so, and is delivered.
        """
        given: dict[Block, dict[int, Tensor]] = {block: {} for block in self.unit.blocks}
        with NoFallbackGuard():
            for (block, i), g in zip(places, grads):
                if block.params[i].requires_grad and asked_for(block.params[i]):
                    key, owes = id(block.params[i]), self._owed or not self.sync
                    given[block][i] = self._with_owed(key, g, block.reduce_dtype, not self.sync) if owes else g
        for block, wholes in given.items():
            if self.sync and wholes:
                self._due.append(Sums(self, block, wholes, read))
                if on_cpu():  # where nothing goes on by itself
                    self._collect()
        return [block.blanks[i] for block, i in places]

    def check(self) -> None:
        """A gradient has arrived that nobody will differentiate.

        Raises:
            OpRuleError: somebody will.
        """
        if recording():
            raise OpRuleError(f"For '{self.unit.who}', a derivative of a parameter's gradient was asked for.",
                              self.unit.label, "Gradients of a unit are reduced outside autograd.",
                              (f"distribute_module(cell, device_mesh) instead of {self.unit.who}",
                               "take the inner gradient with respect to the inputs"))

    def _with_owed(self, key: int, grad: Tensor, dtype, keeps: bool) -> Tensor:
        """A summand and what is owed; if this backward `keeps` it, that is owed from here on."""
        owed = self._owed.pop(key, None)
        if owed is not None:
            # what was cast may be autograd's, and that of another parameter, too; a copy is nobody else's
            grad = add_into(owed, grad) if dtype is None else added(owed, grad)
        if keeps:
            own = grad if owed is not None else copy(grad) if dtype is None else cast(grad, dtype)
            self._owed[key] = gradient(own)
        return grad

    def _keep(self, key: int, grad: Tensor) -> Tensor:
        """This rank's summand of the gradient of a kept parameter has arrived."""
        in_this_gradient.add(self.unit)  # no cell of it need have run
        self.check()
        param = self.params[key]
        if key not in self._places:  # trained when its forward ran, and not when the last one did
            self._add_bucket([param])
        bucket, number = self._places[key]
        with NoFallbackGuard():
            summand = self._with_owed(key, grad, bucket.dtype, self._keeps)
            if not self._keeps:
                self._arrived.append(param.name)
                bucket.put(number, summand)
            return blank(grad._shape, grad.dtype)

    # -- when a backward ends ----------------------------------------------------------------------------------------

    def end(self, gradients: dict[int, Tensor]) -> None:
        """The backward is over: its sums are all under way, and what is owed of parameters that it has not reached."""
        if not self.sync:
            return
        reached = {key for sums in self._due for key in sums.numbers} if self.owed_shards else ()
        for block in self.unit.blocks if self._owed or self.owed_shards else ():
            asked = {i: key for i, p in enumerate(block.params) if (key := id(p)) in gradients and (
                key in self._owed or self.sync_copies and key in self.owed_shards and key not in reached)}
            with NoFallbackGuard():
                due = {i: self._owed.pop(key) if key in self._owed else fresh(block.shapes[i], self.owed_shards[key].dtype)
                       for i, key in asked.items()}
            self._due += [Sums(self, block, due, "owed")] if due else []
        if not (self._places or self._owed) or self._keeps:
            return
        for key in [key for key in self.params if key in self._owed and key in gradients]:  # in one order on all ranks
            if key not in self._places:  # it has been frozen since
                self._add_bucket([self.params[key]])
            bucket, number = self._places[key]
            bucket.put(number, self._owed.pop(key))
        seen = f"arrived: {in_order(self._arrived)}" if self._arrived else "owed"
        for bucket in self.buckets:
            bucket.begin(f", {seen}, read: {in_order(self.read)}")
        self._arrived.clear()
        self.read.clear()

    def _collect(self, buckets: Iterable[Bucket] = ()) -> None:
        """What is under way is waited for."""
        due: list[Sums | Bucket] = [*self._due, *buckets]
        self._due = []
        for each in due:
            for key, total in each.finish(self.scale).items():
                self._sums[key] = added(self._sums[key], total) if key in self._sums else total

    def deliver(self, gradients: dict[int, Tensor]) -> None:
        """In place of blanks stand the sums: of what this backward has reached, and of what was owed; or zeros."""
        sums, place, keeps = self._sums, self.unit.place, self._keeps
        with NoFallbackGuard():
            self._collect(self.buckets)
            for key, param in self.params.items():
                if key not in gradients or key not in place and key not in self._places:
                    continue
                # Not by its values: a shard may be zeros by chance, and users' hooks have to run as on other ranks.
                if key in place and not is_blank(grad := gradients[key]):  # ops past the unit have given to it
                    sums[key] = added(sums[key], grad) if key in sums else copy(grad) if keeps or self.main else grad
                total = None if keeps else sums.pop(key, None)
                if self.main and total is not None:
                    add_main(param, total)
                if keeps or self.main:
                    gradients[key] = fresh(param.local_shape, param.dtype)
                elif total is not None:
                    gradients[key] = gradient(cast(total, param.dtype))
        for key in [key for key in self.params if key in self._hooked and key in gradients] if self._hooked else ():
            if not keeps:
                self._hooked.remove(key)
            if not keeps or key in place:  # they see zeros of what is held back, but for kept ones, which wait
                gradients[key] = run_hooks(self.params[key], gradients[key])

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, another gradient is taken, within the backward in which all this has arrived."""
        arrived = self._due, self._sums, self.buckets, self._places
        self._due, self._sums, self.buckets, self._places = [], {}, [], {}
        self.begin()
        try:
            yield
        finally:
            self._due, self._sums, self.buckets, self._places = arrived

    def forget(self) -> None:
        """Drops what is owed."""
        self._owed, self.owed_shards, self._sums = {}, {}, {}

    def abandon(self) -> None:
        """The gradient has raised: nothing is left of what has arrived, or is owed."""
        self.forget()
        for kept in (self.read, self._arrived, self._due, self._hooked):
            kept.clear()
        for bucket in self.buckets:
            bucket.forget()


def in_order(names: list[str]) -> str:
    """Names as a call shows them, whose text has an end; the number at its end tells all of them."""
    text = " ".join(names)
    return f"{text[:500]}{'...' * (len(text) > 500)} ({len(names)}, {zlib.crc32(text.encode()):08x})"
