# SPDX-License-Identifier: Apache-2.0
"""A run of a unit's cell, and when the unit's parameters are whole for it: in the forward, and again in the backward.

One autograd node, `Unshard`, stands for all trainable cut parameters: forward it hands out whole tensors that lie in the
unit's memory, backward it has all their gradients at once. Autograd says when that is. So a parameter that is used past its
unit is an ordinary cut DTensor there, and right. The memory is given back between forward and backward. Who fills it again:
a node behind the cell's outputs (pre-backward); and, for gradients that come past the outputs, a hook on the result of every
op that reads a whole parameter (`dispatch/op_plan.py`). The outermost call is the step: it knows in which order units ran.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from mindspore import Tensor, nn, ops

from ...comm.packing import added, copy, write
from ...core.tree import map_leaves
from ...dispatch.cotangent import as_copy
from ...dispatch.held import holding
from ...dispatch.memo import memo_of
from ...dispatch.operands import LAID_OUT, local_alias, wrap
from ...dispatch.patches.gradients import in_this_gradient
from ...dispatch.patches.recomputed import recomputing, sought, standing_in
from ...errors import LayoutError, OpRuleError
from ...internals.names import Function, NoFallbackGuard, executor, no_grad, recording, set_requires_grad
from ...internals.target import on_cpu
from ...redistribute.execute import redistribute_local
from ...tensor.dtensor import DTensor
from . import local
from .block import Block
from .reduce import in_order
from .rooms import Room
from .stand_in import lend, standing
from .sums import blank, is_blank
from .unit import State, Unit, cells_in

UNIT = "_ms_dtensor_unit"  # cell attribute: its `Unit`


def runs_as_unit(given: Callable) -> Callable:
    """A method of a unit's cell, `construct` as a rule: inside it the parameters are whole."""
    @functools.wraps(given)
    def run(cell: nn.Cell, *args, **kwargs):
        unit: Unit = cell.__dict__[UNIT]
        args, kwargs = unit.policy.cast_inputs(args, kwargs)
        call = Call.of(unit, cell)
        comes_back = call.recorded and unit.blocks
        if comes_back:
            args, kwargs = call.way_out((args, kwargs))
        with call.running(cell):
            outputs = map_leaves(call.apart, given(cell, *args, **kwargs), Tensor)
        outputs = unit.policy.cast_output(outputs)
        # behind nodes that gather the parameters again when a gradient arrives, as a rule the first to
        return map_leaves(lambda x: _behind(x, call.enter), outputs, Tensor) if comes_back else outputs
    return run


def units_of(*cells: nn.Cell) -> list[Unit]:
    """The units of cells and of those inside, each once, in an order that all ranks have."""
    return units_among(cells_in(*cells))


def units_among(cells: Iterable[nn.Cell]) -> list[Unit]:
    """The same, of a walk's cells."""
    return list({c.__dict__[UNIT]: None for c in cells if UNIT in c.__dict__})


def held_back(units: list[Unit]) -> set[int]:
    """Ids of parameters as whose gradients backwards of these units hand out zeros, and owe them.

    Not a question to the parameter: it may lie in several stages of one rank, each with a unit of its own.
    """
    return {key for unit in units if not unit.reduction.sync for key in unit.params}


class Call:
    """One run of a unit's cell, or of its cells one after another; a recorded one has a backward, too."""

    def __init__(self, unit: Unit):
        self.unit, self.recorded, self.sought = unit, recording(), sought.get()
        self.holding = holding.get() if self.recorded else None  # whose backward comes in two parts; one reads weights
        if self.holding is not None and unit.local:
            raise local.no_parts(unit)
        self.ran: list[nn.Cell] = []
        self.stand_ins: dict[int, Tensor] = {}  # while cells run, by id of the parameter
        self.lent = set[int]()  # ids of parameters for which tensors in the unit's memory stand; for others copies do
        self.read: list[str] = []  # parameters, in the order in which recorded ops have read them
        self.rooms: tuple[Room, ...] = ()  # on a device, in which the whole tensors lie, and so what is saved of them
        self.left: tuple[weakref.ref[Room], ...] = ()  # the same, when all gradients are there: whose memory may go
        self.unseen = unit.local  # whether local tensors of them are read, of which nobody is told in the backward
        self.taken: dict[int, Tensor] = {}  # summands of gradients that autograd knows as blanks, by id of the parameter
        self.awaited = 0  # gradients, of parameters and of inputs, that come before the memory may go
        self.before: Call | None = None  # in the step
        self.last: Call | None = None  # if this is the step, inside of it
        self.order, self.shared = list[str](), dict[Unit, Call]()  # units' labels as called, and calls of several cells

    def trains(self, p) -> bool:
        """Whether a gradient of a parameter is recorded. One node has all of a unit's, so for any one that is asked for
        autograd computes those of all that the node stands for: what is known to be unwanted is left out."""
        return self.recorded and p.requires_grad and (self.sought is None or id(p) in self.sought)

    @classmethod
    def of(cls, unit: Unit, cell: nn.Cell) -> Call:
        """A new one, but for a cell that runs as one unit with others that have run."""
        around, call = standing_in.get(), cls(unit)
        if len(unit.cells) == 1 or not around:
            return call
        shared = around[0].shared
        if unit not in shared or cell in shared[unit].ran:
            shared[unit] = call
        return shared[unit]

    # -- forward -----------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, cell: nn.Cell) -> Iterator[None]:
        """The slots of the cell hold whole tensors inside."""
        unit, around, again = self.unit, standing_in.get(), recomputing.get()
        slots = self._slots_in([cell]) if unit.cells[1:] else unit.standing
        unit.check(slots)
        root = not around and not again
        units = units_of(cell) if root else []
        for other in units:
            other.begin()
        if self.recorded:
            in_this_gradient.update(units)
        gives_back = unit.reshards and len(units) < 2 and not again
        if not self.ran:
            if again:
                unit.unshard("backward")
            else:
                when = self._note_order(around[0] if around else self)
                # Between a recording, or `vjp`, and its backward anybody may write what nobody sees.
                goes_on = self.recorded and self.sought is not None
                unit.unshard("forward", when, keep_row=goes_on and gives_back)
                for other in [unit.next] if unit.forward_prefetch is None and unit.next else unit.forward_prefetch or ():
                    other.prefetch("forward", when)
            self.rooms = unit.rooms()
            self.stand_ins = self._made(unit.standing)
        token = standing_in.set((*around, self))
        try:
            with standing(self, slots, self.stand_ins):
                yield
        finally:
            standing_in.reset(token)
        self.ran.append(cell)
        if root:  # what was gathered ahead for cells that did not run goes; and all ranks have come to the same cells
            self.last = None  # or calls would refer to each other, and what they keep wait for the collector of garbage
            for other in units:
                if other.state is State.GATHERING:
                    other.reshard(forced=True)
            if unit.mesh.size() > 1:
                unit.mesh.get_group().agree(f"cells that ran: {in_order(self.order)}")
        elif len(self.ran) < len(unit.cells):
            return
        lend(self, self.stand_ins)
        self.stand_ins = {}  # they know the call, in memory that Python does not see
        if not self.recorded or gives_back and not unit.entered:
            unit.reshard(keep_part=self.recorded)

    def _slots_in(self, cells: Sequence[nn.Cell]) -> list:
        inside = set(map(id, cells_in(*cells)))
        return [slot for slot in self.unit.standing if id(slot[0]) in inside]

    def _note_order(self, step: Call) -> str:
        """Which call of the step this is, for the comparison between ranks: they may not come to cells in another order."""
        step.order.append(self.unit.label)
        if step is not self:
            self.before, step.last = step.last or step, self
            self.before.unit.next = self.unit
        return f"at call {len(step.order)} of the step, {self.unit.label}"

    def _made(self, slots: list) -> dict[int, Tensor]:
        """What stands in the slots, by id of the parameter; recorded where a gradient is asked for."""
        unit, params = self.unit, {id(p): p for _, _, p in slots}
        trained = {k: p for k, p in params.items() if k in unit.place and self.trains(p)}
        out: dict[int, Tensor] = {}
        self.awaited += bool(trained) and self.holding is None
        with NoFallbackGuard():
            nodes = Unshard.apply(self, tuple(unit.place[k] for k in trained), *trained.values()) if trained else ()
            of = dict(zip(trained, nodes if isinstance(nodes, tuple) else (nodes,)))
        for k, p in params.items():
            if k in unit.place:
                out[k] = self._whole(k, p, of.get(k))
            elif unit.local:
                out[k] = local.kept(self, p)
            else:
                out[k] = unit.policy.copy_of(p if self.holding is None or not p.requires_grad else self.holding.gate(p))
            if out[k] is not p:
                out[k].inited_param = p  # which cells then list in its place
        if self.recorded:
            lend(self, out)
        if self.holding is not None:
            for k in (k for k, p in params.items() if p.requires_grad):
                self.holding.weight(out[k])
        return out

    def _whole(self, key: int, p, node: Tensor | None) -> Tensor:
        """What stands for a cut parameter, in the unit's memory; its gradient goes to `node`, if it is asked for."""
        block, i = self.unit.place[key]
        held, layout = block.memory.tensor(i), block.whole[i]
        if self.recorded and node is None and p.ndim < 2:  # statistics, say, which ops write, also before the backward
            with no_grad():
                held = copy(held)
        else:
            self.lent.add(key)
        if node is None:
            set_requires_grad(held, False)  # a fresh tensor is taken for one whose gradient is wanted
        elif self.holding is not None:
            node = self.holding.gate(node, Tensor, held if block.reduce_dtype is None else None)
        if self.unit.local:
            if node is not None and block.reduce_dtype is not None:
                node = as_copy(held, self.summed(key, node), block.reduce_dtype, layout.gradient(self.unit.partial_on[key]))
            return local.stands_for(self, p, held if node is None else node, layout)
        return wrap(held, layout) if node is None else self._connected(key, node, held)

    def _connected(self, key: int, node: Tensor, data: Tensor) -> Tensor:
        """What the node handed out as a DTensor: it expects summands of the cotangent, which is reduced on other axes."""
        block, i = self.unit.place[key]
        layout = block.whole[i]
        if block.reduce_dtype is None and self.holding is None:
            summand = layout.gradient(self.unit.partial_on[key])
            out = wrap(redistribute_local(node, layout, layout, layout.gradient(), summand, data=node), layout)
            memo_of(out).source = node, layout, summand
            return out
        stand_in = self.summed(key, node)
        if block.reduce_dtype is None:  # a leaf, of which each use is converted by itself
            return stand_in
        out = wrap(as_copy(data, stand_in, block.reduce_dtype, layout.gradient()), layout)
        memo_of(out).copy_of = stand_in, block.reduce_dtype
        return out

    def summed(self, key: int, node: Tensor) -> Tensor:
        """The same, of which summands of the gradient stay what they are; on a device they are kept as they come, so that
        a block's are cast together."""
        block, i = self.unit.place[key]
        out = wrap(node, block.whole[i])
        memo_of(out).partial_grad_axes = self.unit.partial_on[key]
        memo_of(out).takes = None if on_cpu() or self.holding is not None else functools.partial(self._take, key)
        return out

    def write_back(self, x: Tensor) -> None:
        """What stood for a parameter was written."""
        param = x.inited_param
        memo_of(param).written_back += 1
        if id(param) not in self.lent:
            write(self.values(param), local_alias(x))
        if id(param) in self.unit.place:
            block, i = self.unit.place[id(param)]
            block.write_own(i)

    def renew(self, x: Tensor) -> None:
        """A parameter was written while `x` stands for it."""
        param = x.inited_param
        if id(param) in self.unit.place:
            self.unit.unshard("forward", rooms=self.rooms)
        if id(param) not in self.lent:
            write(local_alias(x), self.values(param))

    def values(self, param) -> Tensor:
        """Of a parameter, whole: in the unit's memory, or its own. Of what is written there autograd is not told."""
        block, i = self.unit.place.get(id(param), (None, 0))
        return local_alias(param) if block is None else block.memory.tensor(i)

    @contextmanager
    def again(self, cells: Sequence[nn.Cell]) -> Iterator[Call]:
        """The whole tensors stand once more in the slots of cells that run again in the backward. A function, or a cell that
        is none of the unit's, as it was made in their forward, may call any of these."""
        known = cells and cells[0] in self.unit.inside
        slots = self._slots_in(cells) if known else self.unit.standing
        call = Call(self.unit)
        self.enter()
        self.unit.unshard("backward", rooms=self.rooms)  # if it has others, too
        call.recorded, call.rooms = self.recorded, self.rooms
        with nullcontext() if self.recorded else no_grad():
            made = call._made(slots)
        with standing(call, slots, made):
            yield call

    def apart(self, x: Tensor) -> Tensor:
        """An output, with memory of its own: not that of gathered parameters, which goes."""
        unit = self.unit
        if on_cpu():
            lies = any(block.memory.holds(x) for block in unit.blocks)
        else:  # its address would wait for the device
            lies = getattr(getattr(x, "_memo", None), "lent", None) is not None
        return x * 1 if lies else x

    def way_out(self, inputs: tuple) -> tuple:
        """Inputs behind nodes that say that the backward has left the cell, where gradients of its parameters do not: of
        frozen ones there are none, and of gated ones they come later."""
        if self.holding is None and all(self.trains(p) for block in self.unit.blocks for p in block.params):
            return inputs

        def behind(x: Tensor) -> Tensor:
            self.awaited += x._requires_grad and x.is_floating_point()
            return _behind(x, self.leave)
        return map_leaves(behind, inputs, Tensor)

    # -- backward ----------------------------------------------------------------------------------------------------

    def enter(self, param=None, version: int = 0, grad: Tensor | None = None) -> None:
        """The backward is about to read the whole parameters; a hook of what was computed of one of them, too.

        Raises:
            OpRuleError: it was written meanwhile in a way that MindSpore refuses.
        """
        unit = self.unit
        if param is not None and memo_of(param).versioned != version:
            raise OpRuleError(f"For '{unit.who}', the backward needs parameter '{param.name}', which was written since.",
                              f"{param.layout.describe()} of {unit.name}", "As in MindSpore, what `copy_` and the like "
                              "write between a use and its backward would change the gradient.",
                              ("ops.assign(parameter, value)", "write it before its cell runs, or after the gradient"))
        if recording() and not recomputing.get():  # what is computed of them now reads them again, and no hook says when
            unit.differentiated = True
        if self in unit.entered and unit.has(self.rooms):
            return
        if self.left:
            self._come_back()
        unit.entered[self] = None
        executor.queue_backward_final_callback(unit.end_backward)
        unit.unshard("backward", rooms=self.rooms)
        ahead = unit.backward_prefetch
        for other in ahead if ahead is not None else [self.before.unit] if self.before is not None else ():
            other.prefetch("backward")

    def _take(self, key: int, grad: Tensor) -> Tensor | None:
        if key in self.taken:  # autograd adds up uses before; one more goes to it
            return None
        self.taken[key] = grad
        return blank(grad._shape, self.unit.place[key][0].reduce_dtype)

    def summand(self, key: int, grad: Tensor) -> Tensor:
        """A parameter's gradient: what autograd has, and what was kept."""
        kept = self.taken.pop(key, None)
        if kept is None:
            return grad
        with NoFallbackGuard():
            return kept if is_blank(grad) else added(grad, kept)

    def leave(self) -> None:
        """All gradients of parameters are there, or that of an input."""
        unit = self.unit
        self.awaited -= 1
        if self not in unit.entered and not unit.has(self.rooms):
            raise LayoutError(f"For '{unit.who}', the backward reached {unit.name} past the cell's outputs.",
                              f"{sum(len(b.params) for b in unit.blocks)} parameters, given back after the forward",
                              "Local tensors of them were used, and lead to the loss by a way that nobody saw.",
                              ("reshard_after_forward=False for this cell",
                               "return all tensors that the loss depends on, in tuples, lists, dicts or dataclasses"))
        if self.awaited <= 0:
            unit.entered.pop(self, None)
            if not unit.entered:
                unit.reshard()
            if self.rooms:
                self.left, self.rooms = tuple(map(weakref.ref, self.rooms)), ()

    def _come_back(self) -> None:
        """What reads the whole parameters after all gradients were there finds the rooms, if these are not gone."""
        rooms = [room for ref in self.left if (room := ref()) is not None]
        if len(rooms) < len(self.left):
            raise LayoutError(f"For '{self.unit.who}', the backward came back to {self.unit.name} after all its gradients.",
                              self.unit.label, "The memory in which its forward had the parameters is gone.",
                              ("return all tensors that the loss depends on, in tuples, lists, dicts or dataclasses",
                               "take the gradient of frozen parameters, too"))
        self.rooms, self.left = tuple(rooms), ()


class Unshard(Function):
    """A unit's trainable cut parameters, whole; the one node whose backward has all their gradients."""

    @staticmethod
    def forward(ctx, call: Call, places: tuple[tuple[Block, int], ...], *params):
        ctx.call, ctx.places = call, places
        # MindSpore casts a gradient as its tensor has it; if they are reduced in another dtype, that is a blank's of that
        return tuple(block.memory.tensor(i) if block.reduce_dtype is None else blank(block.shapes[i], block.reduce_dtype)
                     for block, i in places)

    @staticmethod
    def backward(ctx, *grads):
        call: Call = ctx.call
        call.unit.reduction.check()
        if call.holding is None:
            call.leave()
        summands = [call.summand(id(block.params[i]), grad) for (block, i), grad in zip(ctx.places, grads)]
        return None, None, *call.unit.reduction.whole(ctx.places, summands, f"read: {in_order(call.read)}")


class Border(Function):
    """An input or output of a unit's cell; when its gradient arrives, `passed` is called."""

    @staticmethod
    def forward(ctx, x, passed: Callable[[], None]):
        ctx.passed = passed
        # An alias is `x` to autograd, which then skips this node; of a view products keep a copy.
        return ops.stop_gradient(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.passed()
        return grad, None


def _behind(x: Tensor, passed: Callable[[], None]) -> Tensor:
    if not x._requires_grad or not x.is_floating_point():
        return x
    with NoFallbackGuard():
        out = Border.apply(x, passed)
    if isinstance(x, DTensor):
        out = wrap(out, x.layout)
    elif LAID_OUT in x.__dict__:
        out.__dict__[LAID_OUT] = x.__dict__[LAID_OUT]
    return out
