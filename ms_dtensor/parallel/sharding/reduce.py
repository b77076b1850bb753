# SPDX-License-Identifier: Apache-2.0
"""When the gradients of a unit are added up over ranks: now, when the backward ends, or in a later backward.

Whole gradients of cut parameters come from the unit's node (`call.py`) and are reduced to shards, on a device while the
backward goes on. Of kept parameters each rank's summand comes to a hook, which puts it in its place in a bucket; buckets are
reduced when the backward ends, on a device as soon as they are full. What is completed that late is written into what the
caller of the gradient was handed, and then the hooks run that users registered. Without synchronisation summands are owed:
added up on each rank, zeros handed out, until a backward that synchronises; what that one does not reach by itself is
delivered at its end (`deliver`). Where the policy says so, sums are kept in `main_grad`, and zeros handed out. Invariant:
where a gradient goes is fixed when the unit is made; the order in which gradients arrive is only compared between ranks.
"""
from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import Tensor

from ... import comm
from ...comm.packing import ArrayOps, TensorOps, add_into, added, cast, copy, numpy_dtype, write
from ...comm.pretended import executing
from ...dispatch.memo import memo_of
from ...dispatch.patches.gradients import REDUCED_BY, asked_for, in_this_gradient
from ...dispatch.patches.hooks import run_hooks
from ...dispatch.patches.recomputed import weakly
from ...errors import OpRuleError
from ...internals.names import NoFallbackGuard, executor, recording
from ...internals.target import on_cpu
from ...redistribute.cost import nbytes
from .sums import Sums, add_main, blank, fresh, gradient, is_blank

if TYPE_CHECKING:
    from .block import Block
    from .unit import Unit

# what has arrived in the backward under way, to be completed at its end: the reductions, and names in order of arrival
_open: ContextVar[tuple[dict, list[str]] | None] = ContextVar("ms_dtensor_backward", default=None)


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
        self.handed: dict[int, Tensor] = {}  # what the caller of the gradient gets, by number
        self.places: dict[int, Tensor] = {}  # theirs in `flat`
        self.flat: Any = None  # new for every backward
        self.work: comm.Work | None = None  # the reduction, once it has begun

    def put(self, number: int, grad: Tensor) -> Tensor:
        """The gradient as the caller gets it, storage of its own into which the sum is written later."""
        dtype = self.dtype or grad.dtype
        if self.flat is None:
            self.flat = self._memory(self.starts[-1], dtype)
        place = self.places[number] = self._place(number, self.starts[number])
        write(place, grad)
        self.handed[number] = own = place if dtype == grad.dtype else copy(grad)
        if len(self.handed) == len(self.params) and not self.on_host:
            self.begin("")
        return own

    def _place(self, number: int, at: int) -> Tensor:
        ops = ArrayOps if self.on_host else TensorOps
        return ops.tensor(ops.shaped(ops.take(ops.of(self.flat), 0, at, at + self.sizes[number]), self.shapes[number]))

    def _memory(self, elements: int, dtype) -> Tensor:
        if self.on_host:
            return Tensor.from_numpy(self.group.backend.buffer(elements, numpy_dtype(dtype)))
        return fresh((elements,), dtype, zero=False)

    def begin(self, seen: str) -> None:
        """Begins to reduce what has arrived, if anything has, side by side in the order of the parameters."""
        if self.work is not None or not self.handed:
            return
        if len(self.handed) < len(self.params):
            apart, at = self.places, 0
            self.flat = self._memory(sum(self.sizes[i] for i in apart), self.flat.dtype)
            self.places = {}
            for i in sorted(apart):
                self.places[i] = self._place(i, at)
                write(self.places[i], apart[i])
                at += self.sizes[i]
        with comm.annotate(phase="backward", src="gradient bucket", dst="gradient bucket", of=self.label + seen):
            self.work = self.group.all_reduce_(self.flat, "sum")

    def finish(self, scale: float, main: bool) -> list[tuple[Any, Tensor]]:
        """(parameter, gradient) of all that had arrived, added up; the bucket is empty again.

        `scale`: what a sum is multiplied with. `main`: it is added to `main_grad`, and zeros are handed out.
        """
        handed, places = self.handed, self.places
        self.forget()
        for i, own in handed.items():
            total = places[i] if scale == 1 else places[i] * scale
            if main:
                add_main(self.params[i], total)
                write(own, ms.ops.zeros_like(own))
            elif own is not total:
                write(own, total)
        return [(self.params[i], own) for i, own in handed.items()]

    def forget(self) -> None:
        """The bucket is empty again."""
        if self.work is not None:
            self.work.wait()
        self.handed, self.places, self.flat, self.work = {}, {}, None, None


class Reduction:
    """Of one unit."""

    def __init__(self, unit: Unit):
        self.unit, self.params = unit, unit.params
        self.sync = self.sync_copies = True  # whether backwards reduce at all, and over ranks that hold copies
        self._owed: dict[int, Tensor] = {}  # summands of this rank, by id of the parameter
        self.owed_shards: dict[int, Tensor] = {}  # sums over the axes that cut, not yet over those that copy
        self.past: dict[int, Tensor] = {}  # of cut parameters, sums over all ranks, of ops past the unit: a tied weight's
        self._past_here = set[int]()  # on a device, ids of those to which such ops have given in this backward
        copying = unit.axes.copying
        self._copied = bool(copying) and unit.mesh[copying].size() > 1  # whether several ranks hold the same shard
        self.copies = unit.mesh.get_group(copying) if self._copied and unit.blocks else None
        self.scale = 1.0  # what sums of gradients are multiplied with
        if unit.local:  # an average over the ranks that bring data, as in PyTorch; of a global loss there is a sum
            self.scale /= unit.mesh.size()
        self.main = unit.policy.apply_grad_on_fp32_main_grad
        self.buckets: list[Bucket] = []
        self._due: list[Sums] = []  # of cut parameters, under way
        self._handed: dict[int, Tensor] = {}  # gradients of cut parameters, which these complete
        for p in self.params.values():
            p.__dict__[REDUCED_BY] = self
        self.read: list[str] = []  # these, as recorded ops have read them since the last reduction; ranks compare it
        self._places: dict[int, tuple[Bucket, int]] = {}  # of kept parameters, by id: which bucket, and at which place there
        self._told = set[int]()  # ids of kept parameters whose gradients come here
        self._silent = [] if on_cpu() else [p for key, p in self.params.items() if key in unit.place]  # cut, with no hook
        self._listen()
        self._make_buckets()

    @property
    def _keeps(self) -> bool:
        """Whether gradients are owed; of kept parameters one sum goes over all ranks, copies or not."""
        return not self.sync or self._copied and not self.sync_copies

    def regroup(self) -> None:
        """The parameters lie on other axes now."""
        self._places = {}

    def beside(self, block: Block, numbers: Iterable[int]) -> dict[tuple[int, ...], list[int]]:
        """Of parameters of a block those with copies on axes that bring no data, by these axes; of local cells."""
        out = dict[tuple[int, ...], list[int]]()
        for i in numbers if self.unit.local else ():
            p = block.params[i]
            names, others = p.device_mesh.mesh_dim_names, set(self.unit.mesh.mesh_dim_names)
            axes = tuple(a for a in self.unit.partial_on[id(p)] if names[a] not in others and p.device_mesh.shape[a] > 1)
            if axes:
                out.setdefault(axes, []).append(i)
        return out

    def _make_buckets(self) -> None:
        """Of at most so many MiB, filled in reverse order of the parameters, as the backward is expected to meet them.

        Of those that are trained now: made anew when others are.
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
            if id(p) not in self._told:
                self._told.add(id(p))
                _when_it_comes(p, self._keep)
            memo_of(p).partial_grad_axes, memo_of(p).reads = unit.partial_on[id(p)], (self.read, p.name)
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
        """Whole gradients of cut parameters as shards; zeros while they are owed or under way, and where nobody asks.

        `places`: of each its block and number there. `read`: in which order the forward has read them, which ranks compare.
        Of one that is frozen by now MindSpore takes no gradient: what is owed of it stays so, and is delivered.
        """
        given: dict[Block, dict[int, Tensor]] = {block: {} for block in self.unit.blocks}
        out: dict[int, Tensor] = {}
        with NoFallbackGuard():
            for (block, i), g in zip(places, grads):
                if block.params[i].requires_grad and asked_for(block.params[i]):
                    given[block][i] = self._with_owed(id(block.params[i]), g, block.reduce_dtype, not self.sync)
        for block, wholes in given.items():
            if not self.sync or not wholes:
                continue
            sums = Sums(self, block, wholes, read)
            if on_cpu():
                out.update(sums.finish())
            else:
                self._due.append(sums)
                self._opened()
        # no caller keeps these: `_hand_out`, `_keep_past`
        zeros = fresh if on_cpu() and not (self._keeps or self.main) else blank
        return [out[id(p)] if id(p) in out else zeros(p.local_shape, p.dtype)
                for p in (block.params[i] for block, i in places)]

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
            grad = self._with_owed(key, grad, bucket.dtype, self._keeps)
            if self._keeps:
                return fresh(param.local_shape, param.dtype)
            self._opened(param.name)
            return bucket.put(number, grad)

    def _hand_out(self, key: int, grad: Tensor) -> Tensor:
        """On a device: where the sum will lie, or storage of its own, to which sums are added when the caller has it."""
        in_this_gradient.add(self.unit)
        with NoFallbackGuard():
            self._opened()
            sums = [each for each in self._due if key in each.numbers]
            if not is_blank(grad):
                self._past_here.add(key)
            place = sums[0].place(key) if len(sums) == 1 and is_blank(grad) else None
            self._handed[key] = gradient(copy(grad)) if place is None else place
            return self._handed[key]

    def _opened(self, *names: str) -> None:
        """Something has arrived that the end of this backward completes."""
        held = _open.get()
        if held is None:
            held = {}, []
            _open.set(held)
        held[0][self] = None
        held[1].extend(names)
        executor.queue_backward_final_callback(complete)  # each time: the first may have been in a backward that raised

    # -- when a backward ends ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """What was under way is in the gradients; users' hooks have run."""
        with NoFallbackGuard():
            (due, self._due), (handed, self._handed) = (self._due, []), (self._handed, {})
            for sums in due:
                for key, shard in sums.finish().items():
                    if key in handed and executing() is None:
                        handed[key].add_(shard)
            done = [(self.params[key], grad) for key, grad in handed.items()]
            for bucket in self.buckets:
                done += bucket.finish(self.scale, self.main)
        self.read.clear()
        for param, grad in done:
            run_hooks(param, grad)

    def deliver(self, gradients: dict[int, Tensor]) -> None:
        """In gradients that this backward has not reached stands what is owed of them, where this one synchronises."""
        with NoFallbackGuard():
            self._keep_past(gradients)
        if not self.sync or not (self._owed or self.owed_shards or self.past):
            return
        sums: dict[int, Tensor] = {}
        for block in self.unit.blocks:
            asked = {i: key for i, p in enumerate(block.params) if (key := id(p)) in gradients
                     and (key in self._owed or self.sync_copies and key in self.owed_shards)}
            with NoFallbackGuard():
                due = {i: self._owed.pop(key) if key in self._owed else fresh(block.shapes[i], self.owed_shards[key].dtype)
                       for i, key in asked.items()}
            sums |= Sums(self, block, due, "owed").finish() if due else {}
        with NoFallbackGuard():
            if not self._keeps:
                self._deliver_kept(gradients, sums)
                for key in [key for key in self.past if key in gradients]:
                    total = self.past.pop(key)
                    if self.main:
                        add_main(self.params[key], total)
                    else:
                        sums[key] = total
            for key, total in sums.items():  # not written: two may have been given one tensor
                gradients[key] = total.astype(gradients[key].dtype) + gradients[key]
        for key in sums:
            run_hooks(self.params[key], gradients[key])

    def _keep_past(self, gradients: dict[int, Tensor]) -> None:
        """What ops past the unit have given to cut parameters is owed where the unit hands out blanks.

        Not by its values: a rank's shard may be zeros by chance, and its users' hooks have to run as those of the others.
        """
        here, self._past_here = self._past_here, set()
        if not (self._keeps or self.main):
            return
        for key in [key for key in gradients if key in self.unit.place]:
            grad = gradients[key]
            came = not is_blank(grad) if on_cpu() else key in here
            if came:
                self.past[key] = gradient(added(grad, self.past[key]) if key in self.past else copy(grad))
            if on_cpu() or came:
                gradients[key] = fresh(grad._shape, grad.dtype)

    def _deliver_kept(self, gradients: dict[int, Tensor], sums: dict[int, Tensor]) -> None:
        """What is owed of kept parameters, added up over the ranks, goes into `sums`."""
        for key, param in self.params.items():  # in one order on all ranks
            if key in self._owed and key in gradients and key not in self._places:  # it has been frozen since
                self._add_bucket([param])
        for bucket in self.buckets:
            for i, key in enumerate(map(id, bucket.params)):
                if key in self._owed and key in gradients:
                    sums[key] = bucket.put(i, self._owed.pop(key))
            bucket.begin(", owed")
            bucket.finish(self.scale, self.main)

    def begin(self) -> None:
        """A forward begins; other parameters may be trained than in the last one."""
        self._listen()
        self._make_buckets()

    def _listen(self) -> None:
        """On a device gradients of cut parameters come here; a frozen one can tell nothing, until it is trained."""
        for p in self._silent:
            if p.requires_grad:
                memo_of(p).late_gradient = True
                _when_it_comes(p, self._hand_out)
        self._silent = [p for p in self._silent if not p.requires_grad]

    def forget(self) -> None:
        """Drops what is owed."""
        self._owed, self.owed_shards, self.past = {}, {}, {}

    def abandon(self) -> None:
        """The gradient has raised: nothing is left of what has arrived, or is owed."""
        self.forget()
        self.read.clear()
        for bucket in self.buckets:
            bucket.forget()
        self._due, self._handed, self._past_here = [], {}, set()
        held = _open.get()
        if held is not None:
            held[0].pop(self, None)
            held[1].clear()


def _when_it_comes(param, method: Callable) -> None:
    """Gives the method the parameter's id and its gradient; holds neither, as a hook lives as long as its tensor."""
    key, told = id(param), weakly(method)
    Tensor.register_hook(param, lambda grad: told(key, grad))


def in_order(names: list[str]) -> str:
    """Names as a call shows them, whose text has an end; the number at its end tells all of them."""
    text = " ".join(names)
    return f"{text[:500]}{'...' * (len(text) > 500)} ({len(names)}, {zlib.crc32(text.encode()):08x})"


def complete() -> None:
    """The backward has ended: all that has arrived in it is completed; a second call does nothing."""
    held = _open.get()
    if held is None:
        return
    _open.set(None)
    seen = f", arrived: {in_order(held[1])}" if held[1] else ""
    with NoFallbackGuard():
        for reduction in held[0]:
            read = f"{seen}, read: {in_order(reduction.read)}"
            for bucket in reduction.buckets:
                bucket.begin(read)
    for reduction in held[0]:
        reduction.finish()
