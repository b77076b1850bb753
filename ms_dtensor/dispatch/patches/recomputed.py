# SPDX-License-Identifier: Apache-2.0
"""Recompute: of a cell's forward nothing is kept, or the results of some ops; the rest is computed again in the backward.

The forward is recorded as ever, but what autograd would save goes through hooks. What a kept op gave stays; of all else a
place is saved. When the backward first asks for the value of a place, the cell runs once more, in a graph that is thrown
away; kept ops and kept moves are not run again: what they gave stands in. The n-th tensor that this run would save is the
n-th of the first run, so both are given the same: arguments, memos, modes, random numbers, dtypes of mixed precision, what
stood in the place of parameters, and what the first run found in what it wrote to (running statistics). What the second run
writes is taken back. All that is known of a forward hangs on its places, and goes with its graph.

Every way to MindSpore's recompute leads here, cells that were told earlier too. Not here: which cells do this
(`parallel/recompute.py`).
"""
from __future__ import annotations

import dis
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakMethod, ref

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ...comm.packing import copy, same_bits, write
from ...comm.pretended import executing
from ...core.tree import leaves, map_leaves
from ...errors import ConfigError, OpRuleError
from ...internals import names
from ...internals.names import Function, NoFallbackGuard, enabled, executor, no_grad, recompute_module
from .. import modes
from ..held import holding
from ..memo import recomputing, times_written, wrote
from ..operands import detached, leaf_of, local_alias, recording, wrap
from .repeated import check_repeated, sample

# Whose cells run now, outermost first. Each has `again(cells)`, inside which it has put tensors in the place of parameters
# anew for all that these may read, and which gives who did.
standing_in: ContextVar[tuple] = ContextVar("ms_dtensor_standing_in", default=())
# Of what the gradients of the forward under way will be, as ids; None: who asks for what is said when it is over.
sought: ContextVar[frozenset[int] | None] = ContextVar("ms_dtensor_sought", default=None)
# The forward whose cell runs, for the first time or again. Nodes keep the context they were made in; what a forward has kept
# is not to live as long as they do.
_running: ContextVar[ref[_Forward] | None] = ContextVar("ms_dtensor_recomputed_forward", default=None)
_WRITES = "_ms_dtensor_writes"  # cell attribute: what its forward writes to, by which of the cells inside are in training
_BESIDE = "_ms_dtensor_beside"  # cell attribute: whether its forward may call cells that are none of its own
_of_all = functools.cache(lambda: frozenset(vars(nn.Cell())))  # names of what every cell has


class Recompute:
    """What a cell runs in place of its `construct`, as its `_recompute_cell`.

    Inside a cell that does this the others only run: what they would keep for themselves is not to be kept.

    Args:
        block: a cell; its `construct`, which is looked up at each call, as styles and units replace it; or a function.
        keeps: `(op, arguments) -> bool`: whether the op's results are kept; None: nothing is.
        contexts: gives what to be in during the first run and the second.
    """

    def __init__(self, block, keeps: Callable[[str, tuple], bool] | None = None, contexts: Callable | None = None):
        self.block, self.keeps, self.contexts = block, keeps, contexts

    def __call__(self, *args, **kwargs):
        cell = self.block if isinstance(self.block, nn.Cell) else getattr(self.block, "__self__", None)
        run = getattr(cell, self.block.__name__) if isinstance(cell, nn.Cell) and cell is not self.block else self.block
        first, second = (nullcontext(), nullcontext()) if self.contexts is None else self.contexts()
        with first:
            if not (recording() and enabled()) or _running.get() is not None:
                return run(*args, **kwargs)
            return _Forward(run, cell if isinstance(cell, nn.Cell) else None, self.keeps, second, args, kwargs).first()


def excluded(call: Callable, reads: Callable[[], Iterable[Tensor]] | None = None, needed: bool = True) -> Callable:
    """The function, which inside of a cell that recomputes runs once only: what it made and saved is kept.

    Args:
        call: the function.
        reads: gives the tensors that it reads beside its arguments. Then neither these nor arguments are kept, as the second
            run has them again, and the function draws no random numbers; None: whatever it saved is kept.
        needed: whether anything after it in the cell saves what depends on its result. If not, the result is not kept
            either: in the second run NaN stands for it.
    """
    @functools.wraps(call)
    def once(*args, **kwargs):
        held, run = _running.get(), partial(call, *args, **kwargs)
        if held is None or (forward := held()) is None:
            return run()
        return forward.region(run, None if reads is None else [*leaves((args, kwargs), Tensor), *reads()], needed)
    return once


class _Place:
    """What is saved in place of a tensor."""

    value: Tensor | None = None  # once the second run has made it

    def __init__(self):
        store = holding.get()
        self.twice = store is not None and bool(store.cut)  # a held product asks for it in both parts of the backward


class _Kept:
    """One call of a kept op."""

    def __init__(self):
        self.saved: list[int | None] = []  # of what autograd saved of it: which operand it was; None: it is kept
        self.result: Any = None  # detached
        self.random: Any = None  # state of the generators after it; None: it draws nothing
        self.lost = False  # nobody needs the result's values: they are not kept


class _Forward:
    """One recorded forward of a cell, and its second run."""

    def __init__(self, run: Callable, cell: nn.Cell | None, keeps, context, args: tuple, kwargs: dict):
        self.run, self.cell, self.keeps, self.context = run, cell, keeps, context
        self.given = map_leaves(_without_memo, (args, kwargs), Tensor)
        # what it is given to call, or has beside its own cells: others may stand in the slots of these, too
        given = leaves(self.given, nn.Cell)
        self.called: list[nn.Cell] = [] if cell is None else [cell, *given]
        own = [c for one in self.called for _, c in one.cells_and_names()]
        reached = _reached_by([run, *given]) if cell is None else _beside(cell, own)
        self.called += reached if cell is not None else []
        self.cells, self.own = own + [c for one in reached for _, c in one.cells_and_names()], len(own)
        # gradients mark their inputs as `_requires_grad` for good, and what ops save depends on it
        self.noted = [(x._version, x._requires_grad) for x in leaves(self.given, Tensor)]
        # what is reached may be a whole model: of that only its statistics are looked after
        params = [_own(x) for c in own for x in c._params.values()]
        self.trained = [(p, p.requires_grad) for p in params if isinstance(p, Parameter)]
        # parameters that the forward does not write itself, and how often they had been written when the first run was over
        self.watched: list[tuple[Parameter, int]] | None = None
        self.blocks, self.present, self.sought = modes.open_blocks(), standing_in.get(), sought.get()
        self.random = recompute_module.get_rng_state()
        self.amp = recompute_module.get_curr_amp_strategy()
        self.calls: list[tuple[str, _Kept | None]] = []  # ops that were asked about, in order
        self.wanted: list[tuple] = []  # place, shape and dtype of what autograd saved
        self.regions: list[_Kept] = []  # calls of excluded functions, in order
        self.number = 0  # how far the second run is in `wanted`
        self.kept: tuple[_Kept, list[Tensor]] | None = None  # the kept op at work, and its operands

    # -- the first run -------------------------------------------------------------------------------------------

    def first(self):
        """The cell's outputs."""
        with self._noting(), ExitStack() as stack, modes.Watched(weakly(self._ask) if self.keeps else None), \
                ms.saved_tensors_hooks(self._pack, self._unpack):
            stack.callback(_running.reset, _running.set(ref(self)))
            out = self._run()
        self.sample = sample(out)
        if self.keeps and not self.calls and self.wanted and not any(map(_is_dtensor, leaves(self.given, Tensor))):
            raise ConfigError(f"For 'checkpoint_wrapper', {self._name()} computed on no DTensor.", "",
                              "Of ops on plain tensors the library sees nothing, so it can keep none of their results.",
                              ("checkpoint_wrapper(module) without save=",
                               "replicate(module, mesh=mesh), on a mesh of one rank if need be"))
        return out

    def _run(self):
        """Each run has arguments with memos of their own, so that both move them alike, whatever others have done."""
        noted = iter(self.noted)

        def reader(x: Tensor) -> Tensor:
            _, recorded = next(noted)
            if x._requires_grad != recorded and x.is_floating_point():
                return leaf_of(x, recorded)
            return _without_memo(x)
        args, kwargs = map_leaves(reader, self.given, Tensor)
        return self.run(*args, **kwargs)

    def _name(self) -> str:
        return type(self.cell).__name__ if self.cell is not None else getattr(self.run, "__name__", str(self.run))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keeps what was in the slots that the forward writes to. Which these are its first run of a kind tells."""
        known: dict[Any, set] = self.cells[0].__dict__.setdefault(_WRITES, {}) if self.cells else {}
        kind = *(c.training for c in self.cells), *map(id, self.called[1:]), getattr(self.run, "__code__", None)
        # where nothing has values, none changes
        written = known.get(kind) if self.cells and executing() is None else set()
        slots = {} if written is not None and not written else self._slots()
        self.before = {k: _copy(x) for k, x in slots.items() if written is None or k in written}
        counts = {k: _writes(slots[k]) for k in self.before}
        was = [(c, dict(c.__dict__)) for c in self.cells] if written is None else []
        yield
        self.told = {k: now for k, count in counts.items() if (now := _writes(slots[k])) != count}
        if written is None:  # on all ranks alike, also where a shard has stayed what it was
            self.before = {k: x for k, x in self.before.items()
                           if k in self.told or not same_bits(x, local_alias(slots[k]))}
            known[kind] = set(self.before)
        found = {id(_own(slots[k])) for k in self.before}
        self.watched = [(p, times_written(p)) for p, _ in self.trained if id(p) not in found]
        anew = [f"{type(c).__name__}.{k}" for c, then in was for k, x in c.__dict__.items()
                if isinstance(x, Tensor) and then.get(k) is not x]
        if anew:
            warnings.warn(f"recompute: {', '.join(anew)} will be set a second time, when the cell runs again; what goes to "
                          "a Parameter or a buffer is written once", UserWarning, stacklevel=2)

    def _slots(self) -> dict[Any, Tensor]:
        """Arguments by number; parameters and buffers by number of the cell and name."""
        return {**dict(enumerate(leaves(self.given, Tensor))), **{
            (n, name): x for n, c in enumerate(self.cells) for held in (c._params, c._buffers)
            for name, x in held.items() if isinstance(x, Tensor)
            and (n < self.own or x.ndim < 2 and not (isinstance(x, Parameter) and x.requires_grad))}}

    def _ask(self, name: str, args: tuple):
        kept = _Kept() if self.keeps(modes.canonical(name), args) else None
        self.calls.append((name, kept))
        return None if kept is None else partial(self._keep, kept, args)

    def _keep(self, kept: _Kept, args: tuple, call: Callable):
        self.kept = kept, leaves(args, Tensor)
        try:
            with modes.Watched(None):
                out = call()
        finally:
            self.kept = None
        kept.result, kept.random = map_leaves(
            lambda x: leaf_of(x, x._requires_grad and x.is_floating_point()), out, Tensor), recompute_module.get_rng_state()
        return out

    def region(self, call: Callable, operands: list[Tensor] | None, needed: bool):
        """One call of an excluded function: as of a kept op, whose operands may be unknown."""
        if self.kept is not None:  # within another one
            return call()
        if not recomputing.get():
            kept = _Kept()
            self.regions.append(kept)
            out = self._keep(kept, tuple(operands or ()), call)
            kept.random = None if operands is not None else kept.random
            if not needed:
                kept.lost, kept.result = True, map_leaves(_without_values, kept.result, Tensor)
            return out
        known = next(self.regions_again, None)
        if known is None:
            raise self._unlike("a function that is excluded was called once more than the first time")
        return self._stand_in(known, operands or [], call)

    def _pack(self, x: Tensor):
        if self.kept is not None:
            kept, operands = self.kept
            at = next((i for i, a in enumerate(operands) if a._shape == x._shape and a.dtype == x.dtype
                       and Tensor.data_ptr(a) == Tensor.data_ptr(x)), None)
            kept.saved.append(at)
            if at is None:
                return detached(x)
        place = _Place()
        self.wanted.append((ref(place), x._shape, x.dtype))
        return place

    def _unpack(self, saved):
        if isinstance(saved, Tensor):
            return saved
        if saved.value is None:
            self._again()
        value = saved.value
        if not saved.twice:
            saved.value = None
        return value

    # -- the second one ------------------------------------------------------------------------------------------

    def _again(self) -> None:
        """Fills the places that live."""
        if self.watched is None:
            raise OpRuleError(f"For 'checkpoint_wrapper', a gradient was asked for inside of {self._name()}.", "",
                              "What is recomputed keeps nothing that a backward inside of it could read.",
                              ("checkpoint_wrapper(cell) of cells beside the gradient",
                               "leave this cell out of checkpoint_wrapper"))
        given = enumerate(zip(leaves(self.given, Tensor), self.noted))
        if any(x._version != version for i, (x, (version, _)) in given if i not in self.before):
            raise OpRuleError(f"For 'checkpoint_wrapper', an argument of {self._name()} was written to since it ran.", "",
                              "What is recomputed reads its arguments again.", "write to a copy: x * 1")
        if any(times_written(p) != count for p, count in self.watched):
            raise OpRuleError(f"For 'checkpoint_wrapper', parameters of {self._name()} were written to since it ran.", "",
                              "What is recomputed reads its parameters again.", "write to them when the gradient is there")
        self.number, self.calls_again, self.regions_again = 0, iter(self.calls), iter(self.regions)
        with ExitStack() as stack:
            self._as_then(stack)
            ask = weakly(self._ask_again) if self.keeps else None
            with modes.reopened(self.blocks), modes.Watched(ask), self.context, \
                    ms.saved_tensors_hooks(weakly(self._pack_again), lambda x: x):
                check_repeated(self._name(), self.sample, self._run())
        if self.number != len(self.wanted):
            raise self._unlike(f"{self.number} tensors were saved, {len(self.wanted)} the first time")

    def _as_then(self, stack: ExitStack) -> None:
        """What surrounds the cell, and what it reads, is as the first run found it; as now when the stack ends."""
        def during(now, then, put: Callable) -> None:
            stack.callback(put, now)
            put(then)
        during(recompute_module.get_rng_state(), self.random, recompute_module.set_rng_state)
        during(executor.enable_grad(), True, executor.set_enable_grad)
        during(executor.grad_flag(), True, executor.set_grad_flag)
        executor.new_empty_graph()
        stack.callback(executor.end_empty_graph)
        for p, was in self.trained:
            if p.requires_grad != was:
                during(p.requires_grad, was, partial(setattr, p, "requires_grad"))
        variables: dict[ContextVar, Any] = {recomputing: True, standing_in: (), sought: self.sought, _running: ref(self)}
        for var, value in variables.items():
            stack.callback(var.reset, var.set(value))
        # who had put tensors in the place of parameters does so anew
        standing_in.set(tuple(stack.enter_context(whose.again(self.called)) for whose in self.present))
        slots = {k: x for k, x in self._slots().items() if k in self.before} if self.before else {}
        self.filled = list(slots.values())
        # others have written these; in one order on all ranks, as who hears of it may gather
        since = [k for k, count in self.told.items() if _writes(slots[k]) != count]
        stack.callback(_fill, slots, {k: _copy(x) for k, x in slots.items()}, since)
        _fill(slots, self.before, self.told)
        if self.amp:
            stack.enter_context(recompute_module.AmpDecorator(self.amp.get_amp_level(), self.amp.get_amp_dtype(),
                                                              self.amp.get_white_list(), self.amp.get_black_list()))
        if self.cell is not None and self.cell.mixed_precision_type is not None:
            executor.set_mixed_precision_type(self.cell.mixed_precision_type)
            stack.callback(executor.set_mixed_precision_type, nn.cell.MixedPrecisionType.NOTSET, False)

    def _ask_again(self, name: str, args: tuple):
        known, kept = next(self.calls_again, ("nothing", None))
        if known != name:
            raise self._unlike(f"{name}, the first time {known}")
        return None if kept is None else partial(self._stand_in, kept, leaves(args, Tensor))

    def _stand_in(self, kept: _Kept, operands: list[Tensor], call: Callable):
        with NoFallbackGuard():
            for i in kept.saved:
                if i is not None:
                    self._pack_again(operands[i])
        if kept.random is not None:
            recompute_module.set_rng_state(kept.random)

        def stands(x: Tensor) -> Tensor:
            out = local_alias(x) if not kept.lost else _copy(x)
            if x._requires_grad:
                with NoFallbackGuard():
                    out = _StandIn.apply(out)
            return wrap(out, x.layout) if _is_dtensor(x) else out
        return map_leaves(stands, kept.result, Tensor)

    def _pack_again(self, x: Tensor) -> None:
        place, *kind = self.wanted[self.number] if self.number < len(self.wanted) else (None, None)
        if kind != [x._shape, x.dtype]:
            raise self._unlike(f"{x.dtype}{list(x._shape)} was saved as number {self.number} of {len(self.wanted)}")
        self.number += 1
        if (place := place()) is not None:  # else nobody will ask for it
            start = Tensor.untyped_storage(x).data_ptr() if self.filled else 0
            # asked now: `set_data` gives a parameter another storage
            there = self.filled and any(Tensor.untyped_storage(y).data_ptr() == start for y in self.filled)
            place.value = _copy(x) if there else detached(x)

    def _unlike(self, what: str) -> OpRuleError:
        return OpRuleError(f"For 'checkpoint_wrapper', {self._name()} did something else when it ran again.",
                           what, "What is recomputed does the same each time it is given the same.",
                           ("no state that a forward changes and reads", "leave this cell out of checkpoint_wrapper"))


class _StandIn(Function):
    """What a kept op gave, behind a node, so that what reads it is recorded as the first time."""

    @staticmethod
    def forward(ctx, kept):
        return ops.stop_gradient(kept)


def _beside(cell: nn.Cell, own: list[nn.Cell]) -> list[nn.Cell]:
    """Cells that its own cells' methods and attributes have, and that are none of these; if its first forward had any."""
    if not cell.__dict__.get(_BESIDE, True):
        return []
    of_all = _of_all()
    known: list[Any] = [x for c in own for k, x in vars(c).items() if k not in of_all and not k.startswith("_ms_dtensor")]
    kinds = dict.fromkeys(t for c in own for t in type(c).__mro__[:type(c).__mro__.index(nn.Cell)])
    known += [dict(vars(t)) for t in kinds]
    inside = set(map(id, own))
    found = [c for c in _reached_by(known) if id(c) not in inside]
    cell.__dict__[_BESIDE] = bool(found)
    return found


@functools.lru_cache(maxsize=1024)
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """Names of globals that it reads, also in functions inside; `co_names` has those of attributes, too."""
    inside = [name for const in code.co_consts if isinstance(const, CodeType) for name in _globals_in(const)]
    return *(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"), *inside


def _reached_by(stack: list) -> list[nn.Cell]:
    """Cells among these, and that functions among them are methods of, find in their closure or know as globals, also by
    functions and lists in closures."""
    found: list[nn.Cell] = []
    seen = set[int]()
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, nn.Cell):
            found.append(x)
        elif isinstance(x, FunctionType):
            stack += [y for name in _globals_in(x.__code__) if isinstance(y := x.__globals__.get(name), nn.Cell)]
            stack += x.__closure__ or ()
        elif isinstance(x, partial | MethodType | CellType) or isinstance(x, list | tuple | dict) and len(x) < 1024:
            stack += gc.get_referents(x)  # longer ones are data
    return found


def _without_values(x: Tensor) -> Tensor:
    """NaN of its shape, in the memory of one number: should anybody need it after all, that does not go unseen."""
    with NoFallbackGuard(), no_grad():
        out = Tensor(np.full((1,) * len(x._shape), np.nan, np.float32)).astype(x.dtype).expand(x._shape)
    out = leaf_of(out, x._requires_grad)
    return wrap(out, x.layout) if _is_dtensor(x) else out


def weakly(method: Callable) -> Callable:
    """A method of what may be gone when it is called; that gives None."""
    held = WeakMethod(method)
    return lambda *args: None if (call := held()) is None else call(*args)


def _own(x):
    """The parameter for which it stands, or itself."""
    own = getattr(x, "inited_param", None)
    return x if own is None else own


def _is_dtensor(x: Tensor) -> bool:
    return getattr(x, "_layout", None) is not None


def _without_memo(x: Tensor) -> Tensor:
    """The same; but what a DTensor was moved from, as its memo has it, would live as long as this."""
    return wrap(local_alias(x), x.layout) if _is_dtensor(x) and not x._is_leaf else x


def _copy(x: Tensor) -> Tensor:
    with NoFallbackGuard(), no_grad():
        return copy(local_alias(x))


def _writes(x: Tensor) -> tuple[int, int]:
    """How often a parameter that is a DTensor was written, as all ranks count it."""
    memo = getattr(x, "_memo", None) if isinstance(x, Parameter) else None
    return (0, 0) if memo is None else (memo.written, memo.written_back)


def _fill(slots: dict[Any, Tensor], values: dict[Any, Tensor], told: Iterable) -> None:
    """`told`: of which a unit is to hear that has gathered them."""
    with NoFallbackGuard(), no_grad():
        for k, x in slots.items():
            write(local_alias(x), values[k])
    for k in told:
        wrote(slots[k])


# -- the ways here -----------------------------------------------------------------------------------------------------


def _call(original):
    """Of a `_RecomputeCell`, which `cell.recompute()` and `ms.recompute(cell, x)` make."""
    def call(self, *args, save_rng_state=True, **kwargs):
        return Recompute(self.wrap_cell.function)(*args, **kwargs)
    return call


def _not_reentrant(original):
    def recompute(block, output_recompute, early_stop, context_fn, *args, save_rng_state=True, **kwargs):
        if output_recompute:
            warnings.warn("recompute: 'output_recompute' does nothing; outputs are kept by who reads them", stacklevel=4)
        return Recompute(block, contexts=context_fn)(*args, **kwargs)
    return recompute


def _reduce_grad_operation(original):
    def reduce_ex(self, protocol):  # which a `_RecomputeCell` has, and a copy of the model copies
        return type(self), (self.get_all, self.get_by_list, self.sens_param)
    return reduce_ex


DOORS = ((names.composite.GradOperation, "__reduce_ex__", _reduce_grad_operation), (names.RecomputeCell, "__call__", _call),
         (recompute_module, "recompute_without_reentrant", _not_reentrant))
