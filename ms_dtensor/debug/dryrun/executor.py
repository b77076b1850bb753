# SPDX-License-Identifier: Apache-2.0
"""What runs in the place of kernels in a dry run: results without data, one event for each op, forward and backward.

A recorded op is one generic autograd node, so MindSpore's engine, hooks, buckets and moves run as they are, and with them
the communication of the backward, in its order. Where a value is used more than once the engine would add up cotangents
with a real kernel: each use takes one output of a chain of forks instead, made of the local tensor, below what the library
notes beside an operand. Invariant: an event here changes nothing about what is communicated.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.ops import stop_gradient

from ...comm.packing import numpy_dtype
from ...comm.record import CommEvent, note, user_site
from ...comm.shm.arena import rounded
from ...comm.world import current_world
from ...core.dry_event import COMPUTE, DryEvent
from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.tree import leaves, map_leaves
from ...dispatch.held import holding
from ...dispatch.memo import stepped
from ...dispatch.modes import implicit_replication
from ...dispatch.op_plan import Abstract
from ...dispatch.operands import DIFFERENTIABLE, as_local, dtype_name, local_alias, make, wrap
from ...dispatch.replaced import PLACE
from ...errors import OpRuleError
from ...internals.names import Function, enabled, recompute_module, recording
from .abstract import Ledger, differentiable, dtype_of, nameless, nbytes, nbytes_of, on_storage_of
from .forks import Fork, Made
from .formulas import BY_NUMPY, MADE_OF_VIEWS, flops, within
from .node import SEVERAL, Job, Op
from .told import Told

_BY_NAME = {("argmax_method", "ArgMinExt"): "int32"}  # the rules have one op for two of MindSpore's
_NO_GRADIENT = ("StopGradient", "Detach")  # of MindSpore's ops that are one in the rules with a copy
_MESHES = {"CPU": "cpu", "Ascend": "npu", "GPU": "gpu"}  # what meshes call devices
_ITSELF = frozenset(("cast", "identity"))


class Executor(Told):
    """Of one dry run; layers below this package meet it as `comm.world.executing()`.

    Attributes:
        events: what the rank has done so far.
        ledger: what is alive.
        forks: by autograd identity of a value, (what keeps it, the value that further uses are forked from).
    """

    nameless = staticmethod(nameless)
    on_storage_of = staticmethod(on_storage_of)

    def __init__(self, values: dict[str, Any], messages: dict[str, bytes], on_host: bool):
        self.on_host = on_host
        super().__init__(values, messages)
        self.events: list[DryEvent] = []
        self.ledger = Ledger(self.events)
        self.forks: dict[Any, tuple[Any, Tensor]] = {}
        self.plain: dict[int, Parameter] = {}  # of cells that are not laid out, by identity
        self.kind = "activations"  # of what moves bring
        self.fork = 0, -1  # the address of the fork made last, and the event that made what it is of
        self.picture: Callable[[], str] = str  # of the last pipeline's schedule
        self.given: tuple[int, ...] = ()  # the events that made what the next communication sends
        self.mapped = 0  # of it: bytes of memory that came under addresses that stay
        self.peers: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # of it: who gets a message, and whose is waited for

    # -- ops ---------------------------------------------------------------------------------------------------------
    def local(self, run, call, tensors):
        """In the place of `LocalRun.run`."""
        what = run.abstract
        if what.shapes is None:
            return self.by_data(run, call, tensors)
        kinds = {self._computed_in(x) for x in tensors if differentiable(x)} if what.op in ("matmul", "linear") else ()
        if len(kinds) > 1 and not recompute_module.get_curr_amp_strategy():  # which casts them
            raise TypeError(f"For '{what.op}' at {user_site()}, the types of operands should be the same, but got "
                            f"{', '.join(sorted(kinds))}.")
        name = getattr(call.func, "name", "")
        dtypes = [dtype_of(_BY_NAME.get((what.op, name), dtype)) for dtype in what.dtypes]
        single = len(what.shapes) == 1 and what.op not in SEVERAL
        cost = flops(what.op, what.arguments, [tuple(x._shape) for x in tensors], what.shapes)
        read = 0 if what.view else sum(prod(x._shape) * x.itemsize for x in tensors)
        written = 0 if what.view else sum(prod(s) * nbytes(d) for s, d in zip(what.shapes, dtypes))
        event = self.note(what.op, note().phase, user_site(), cost, read, written, tensors,
                          tensors[0].dtype if tensors else None)
        if name in _NO_GRADIENT:
            tensors = [stop_gradient(as_local(x)) for x in tensors]
        return self._recorded(what, tensors, dtypes, single, cost, event, run.constants)

    def _computed_in(self, x) -> str:
        """The dtype in which a product takes an operand: a host has no products of bfloat16."""
        return "float32" if self.on_host and dtype_name(x.dtype) == "bfloat16" else dtype_name(x.dtype)

    def _recorded(self, what, tensors, dtypes, single: bool, cost: int, event: int, constants=(), scratch=None):
        """The results of an op, with its node where gradients are recorded; `scratch` as of `node`."""
        if not recording() or not enabled() or not any(x._requires_grad and differentiable(x) and i not in constants
                                      for i, x in enumerate(tensors)) \
                or not any(name.startswith(DIFFERENTIABLE) for name in what.dtypes):
            where = self.where(what.op, scratch)
            read = self.read(what, tensors, self.events[event].phase, where)
            outs = self.made(what, read[0] if read else None, what.shapes, dtypes, event, where)
            _for_itself = self.arrays((*scratch[0], *scratch[1]), dtypes[0], event) if scratch else [
                self.like(x, kind="activations") for x in tensors[:1] for _ in range(within(what.op, self.on_host)[0])]
            return outs[0] if single else outs
        used = [self.forked(x) if x._requires_grad and differentiable(x) and i not in constants
                else _constant(x) for i, x in enumerate(tensors)]
        job = Job(self, what, [x if u._requires_grad else u for x, u in zip(tensors, used)], event, what.shapes, dtypes,
                  single, cost, scratch)
        return Op.apply(job, *used)

    def node(self, op: str, tensors, shape, cost: int, scratch=None, beside=()) -> Any:
        """An op of ours that is one node of NumPy's or one kernel, of which no rule tells; of the first one's dtype.

        `scratch`: of NumPy's, shapes of what it keeps for its backward beside the operands, of what the forward has while it
        runs, and of what the backward has. `beside`: (shape, dtype) of further results; then all come as a tuple.
        """
        xs = [x if getattr(x, "_layout", None) is None else as_local(x) for x in tensors]
        results = [(tuple(shape), xs[0].dtype), *((tuple(s), d) for s, d in beside)]
        dtypes = [d for _, d in results]
        what = Abstract(op, {}, tuple(s for s, _ in results), tuple(map(dtype_name, dtypes)))
        event = self.note(op, note().phase, user_site(), cost, sum(prod(x._shape) * x.itemsize for x in xs),
                          sum(prod(s) * nbytes(d) for s, d in results), xs, xs[0].dtype)
        return self.alone(self._recorded(what, xs, dtypes, not beside, cost, event, scratch=scratch))

    def arrays(self, shapes, dtype, event: int) -> list[Tensor]:
        """Of NumPy, that a node of ours has beside its results."""
        return [self.ledger.new(shape, dtype, "activations", event, "heap") for shape in shapes]

    def product(self, a, b, phase: str) -> Tensor:
        """That of two plain matrices, of which no rule tells."""
        out, size = (a._shape[0], b._shape[1]), nbytes(a.dtype)
        read = size * (prod(a._shape) + prod(b._shape))
        event = self.note("matmul", phase, user_site(), 2 * prod(out) * a._shape[1], read, size * prod(out), (a, b), a.dtype)
        return self.ledger.new(out, a.dtype, "activations", event)

    def where(self, op: str, scratch) -> str:
        """Who hands out the results of an op, and of its backward: NumPy those of the library's own nodes."""
        return "heap" if scratch or self.on_host and op in BY_NUMPY else ""

    def read(self, what, tensors, phase: str, where: str = "") -> list[Tensor]:
        """Operands as kernels read them: on a host copies of views, wherever these begin, which a backward keeps. NumPy,
        `where` is "heap" then, reads the views."""
        return list(tensors) if what.view or where == "heap" or what.op in MADE_OF_VIEWS else self.copies(tensors, phase)

    def copies(self, tensors, phase: str) -> list[Tensor]:
        """Of views that a host's kernel reads, and the others."""
        out = list(tensors)
        if not self.on_host:
            return out
        for i, x in enumerate(out):
            if self.ledger.is_view(x):
                size = prod(x._shape) * x.itemsize
                self.note("copy_of_view", phase, "", 0, size, size, (), x.dtype)
                out[i] = self.like(x, kind="activations")
        return out

    def made(self, what, first, shapes, dtypes, event: int, where: str = "") -> tuple:
        """Results without data: on the first operand's storage, if they are views of it."""
        if what.view and not (what.op == "cast" and self.ledger.is_view(first)):  # which is a copy then
            return tuple(self.view(what.op, first, shape) for shape in shapes)
        outs = tuple(self.ledger.new(s, d, "activations", event, where) for s, d in zip(shapes, dtypes))
        return tuple(self.as_made(what.op, x) for x in outs)

    def as_made(self, op: str, x) -> Tensor:
        """A result, or a gradient, as an op gives it: on a host of some a view."""
        return self.view(op, x, x._shape) if self.on_host and op in MADE_OF_VIEWS else x

    @staticmethod
    def view(op: str, x, shape) -> Tensor:
        """A view; of a cast to its own dtype, or of what is only another name, what the tensor is, a view or none.

        Never the tensor itself: a node's result that is its operand would make the operand a result, a leaf none any more.
        """
        return on_storage_of(x, shape, op not in _ITSELF or bool(Tensor.storage_offset(x)))

    def by_data(self, run, call, tensors):
        """What only data, or a user's function, tells."""
        raise OpRuleError(f"For 'dry_run', '{run.abstract.op}' needs data at {user_site()}.",
                          ", ".join(f"{dtype_name(x.dtype)}{list(x._shape)}" for x in tensors),
                          "The shape of its result depends on values, and a dry run has none.",
                          ("a mask of fixed shape in its place", "leave it out of the step that is run dry"))

    def note(self, op: str, phase: str, site: str, cost: int, read: int, written: int, operands, dtype) -> int:
        """The event of an op; its place."""
        after = sorted({m for x in operands if (m := self.ledger.maker(x)) >= 0 and self.events[m].is_move})
        self.events.append(DryEvent(op, COMPUTE, tuple(after), cost, read, written, phase=phase, site=site,
                                    dtype="" if dtype is None else dtype_name(dtype)))
        return len(self.events) - 1

    def overwritten(self, x, new, recorded: bool) -> None:
        """A tensor has the values of another from here on; it lies where it lay."""
        if recorded:
            raise OpRuleError("For 'dry_run', a recorded tensor is written in place.", user_site(),
                              "MindSpore's node of such a write is of real kernels, and a dry run has no data.",
                              "x = where(mask, value, x), which makes another")
        if self.ledger.has(x):
            self.ledger.written(x, self.ledger.maker(new))

    # -- optimizers --------------------------------------------------------------------------------------------------
    def state(self, shape, dtype):
        """An optimizer's, of NumPy's dtype or MindSpore's; memory that is never touched."""
        if isinstance(dtype, type | np.dtype):
            out = np.empty(shape, dtype)
            return self.ledger.watched(out, "optimizer", out.nbytes)
        return self.ledger.new(shape, dtype, "optimizer")

    def stepped(self, optimizer, places, grads) -> None:
        """A step of some parameters: bytes of their values, gradients and states, once read and once written.

        Raises:
            OpRuleError: an optimizer whose step communicates.
        """
        if not optimizer._ALONE:
            raise OpRuleError(f"For 'dry_run', a step of {type(optimizer).__name__} is not known.", user_site(),
                              "It communicates as its values ask, and a dry run has none.", "AdamW or SGD in its place")
        for i in places:
            param = optimizer.params[i]
            stepped(param)
            kept = prod(param._shape) * param.itemsize + sum(
                prod(a.shape) * a.itemsize for a in (*optimizer._state[i].values(), optimizer._masters[i]) if a is not None)
            event = self.note(type(optimizer).__name__, "optimizer", user_site(), 0,
                              kept + prod(grads[i]._shape) * grads[i].itemsize, kept, (grads[i],), param.dtype)
            made = [self.ledger.new(param._shape, param.dtype, "optimizer", event, "pool")
                    for _ in range(optimizer._makes(i, grads[i]))]
            made.clear()  # until the end of this parameter's step

    def clipped(self, grads) -> None:
        """Of gradients the norm, and then their multiples: read twice, and written."""
        for g in grads:
            size = prod(g._shape) * g.itemsize
            self.note("clip_grad_norm", "optimizer", user_site(), 0, 2 * size, size, (g,), g.dtype)

    # -- local functions ---------------------------------------------------------------------------------------------
    def seen(self, fn):
        """A function of a list of local tensors: it is given DTensors of this rank alone, so its ops are seen."""
        def run(tensors):
            with implicit_replication():
                return self._plain(fn(self.alone(tensors)))
        return run

    def plain_cell(self, cell, fn, args, kwargs):
        """`fn` of plain tensors, which runs a cell: if nothing of this is laid out over ranks, its ops are seen."""
        tensors = [*leaves((args, kwargs), Tensor), *cell.get_parameters()]
        if any(getattr(x, "_layout", None) is not None for x in tensors):
            return fn(args, kwargs)
        for p in cell.get_parameters():
            if id(p) not in self.plain:
                self.plain[id(p)] = p
                self.ledger.change("parameters", prod(p.shape) * p.itemsize, "heap")
        with implicit_replication():
            return self._plain(fn(self.alone(args), self.alone(kwargs)))

    def is_alone(self, *arguments) -> bool:
        """Whether a local function's tensors are among these."""
        return any(x._layout.mesh == self.mesh for x in leaves(arguments, Tensor) if getattr(x, "_layout", None) is not None)

    def unseen(self, name: str, fn, args, kwargs):
        """What a local function does by itself, with NumPy say: it runs, on what is not there."""
        self.assumed[name] = f"what it computes at {user_site()} is not seen: its operations and memory are not counted"
        def counted(x):
            return x if getattr(x, "_layout", None) is not None else Made.apply(x, self)
        self.inside += 1
        try:
            made = fn(*self._plain(args), **self._plain(kwargs))
        finally:
            self.inside -= 1
        return self.alone(map_leaves(counted, made, Tensor))

    def alone(self, tree):
        """Tensors as DTensors of this rank alone, so that ops on them are seen."""
        def one(x):
            layout = getattr(x, "_layout", None)
            return x if layout is not None else wrap(x, Layout(self.mesh, None, tuple(x._shape), dtype_name(x.dtype)))
        return map_leaves(one, tree, Tensor)

    def _plain(self, tree):
        def one(x):
            layout = getattr(x, "_layout", None)
            return as_local(x) if layout is not None and layout.mesh == self.mesh else x
        return map_leaves(one, tree, Tensor)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Of this rank alone."""
        world: Any = current_world()
        return DeviceMesh(_MESHES[world.device_type], [world.rank], mesh_dim_names=("alone",))

    # -- autograd ----------------------------------------------------------------------------------------------------
    def forked(self, x) -> Tensor:
        """One use of a value whose gradient is recorded; for use under the guard."""
        if not enabled():
            return x
        node = x._grad_node
        store = holding.get()
        late = store is not None and bool(store.cut)  # uses whose gradient comes in a part of its own
        if x._is_leaf or node is None:
            key: Any = "leaf", id(x), late
        elif isinstance(node, Function):
            key = id(node), x._output_index, late
        else:
            return x  # a node of MindSpore's own, of which Python gets another object each time
        _, handle = self.forks.get(key, (None, x))
        used, rest = Fork.apply(handle, self, key)
        self.fork = Tensor.data_ptr(used), self.ledger.maker(x)
        self.forks[key] = (x if x._is_leaf else node), rest
        return used

    def forward_begins(self) -> None:
        """A forward whose backward is its own: the forks of parameters in the forwards before it are theirs."""
        self.forks = {key: fork for key, fork in self.forks.items() if key[0] != "leaf"}

    def copied(self, x):
        """A tensor of its own, as `copy.deepcopy` makes it."""
        layout = x._layout
        new = wrap(self.ledger.new(x._shape, x.dtype, self.ledger.kind_of(x)), layout)
        return self.parameter(new, x) if isinstance(x, Parameter) else new

    # -- moves and memory --------------------------------------------------------------------------------------------
    def arrive(self, shape, dtype, *given: Tensor) -> Tensor:
        """What a collective brings; its event comes next."""
        self.give(*given)
        return self.ledger.new(shape, dtype, self.kind, len(self.events), self._shared(prod(shape) * nbytes(dtype)))

    def give(self, *given: Tensor) -> None:
        """What the next communication needs."""
        makers = {self.fork[1] if Tensor.data_ptr(x) == self.fork[0] else self.ledger.maker(x) for x in given}
        self.given = tuple(sorted(m for m in makers if m >= 0))

    def note_move(self, event: CommEvent) -> None:
        """A communication has been recorded."""
        ranks, stream = event.group, ",".join(event.axes)
        after = tuple(m for m in self.given if self.events[m].stream != stream)
        payload = prod(event.shape) * (nbytes_of(event.dtype) if event.dtype else 0)
        self.events.append(DryEvent(
            event.op, stream, after, bytes=event.bytes, payload=payload, mapped=self.mapped, axes=event.axes,
            ranks=len(ranks), stride=abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 0, span=max(ranks) - min(ranks),
            group=ranks, sends=self.peers[0], takes=self.peers[1], dtype=event.dtype.lower(), phase=event.phase,
            site=event.site))
        self.given, self.peers, self.mapped = (), ((), ()), 0

    def forget(self) -> None:
        """Events begin here."""
        self.events.clear()
        self.ledger.forget()
        self.fork, self.given = (0, -1), ()

    def end(self) -> None:
        """Nothing is recorded any more."""
        self.forks.clear()

    def of_layout(self, layout: Layout) -> Tensor:
        """A shard of that layout."""
        return self.ledger.new(layout.local_shape(), dtype_of(layout.dtype), "activations")

    def parameter(self, data, param: Parameter) -> Parameter:
        """A Parameter of the layout of a DTensor; MindSpore's own constructor would make the data."""
        layout = data._layout
        one = wrap(Tensor.from_numpy(np.zeros(1, numpy_dtype(data.dtype))), Layout(layout.mesh, None, (1,), layout.dtype))
        small = Parameter(one, name=param.name, requires_grad=param.requires_grad)
        mine = self.ledger.kind_of(data) == "parameters"  # of which initialisation was deferred
        local = local_alias(data) if mine else self.ledger.new(layout.local_shape(), data.dtype, "parameters")
        out = make(type(small), local)
        out.__dict__.update((k, v) for k, v in small.__dict__.items() if k != PLACE)
        out._layout = layout
        out.param_info.parameter_shape = list(layout.shape)
        out.requires_grad = param.requires_grad
        return out

    def sum(self, a: Tensor, b: Tensor, kind: str = "", into: bool = False) -> Tensor:
        """Of two gradients, a tensor or `into` the first; of its kind, unless it is said otherwise."""
        size = prod(a._shape) * a.itemsize
        at = self.note("accumulate", "backward", "", 0, 2 * size, size, (a, b), a.dtype)
        _until_it_is_there = [] if into else self.copies([a, b], "backward")
        return a if into else self.ledger.new(a._shape, a.dtype, kind or self.ledger.kind_of(a), at)

    def like(self, x: Tensor, shape=None, dtype=None, kind: str = "") -> Tensor:
        """A tensor of its own, of the kind, shape and dtype of another unless it is said otherwise."""
        kind = kind or self.ledger.kind_of(x)
        return self.ledger.new(x._shape if shape is None else shape, dtype or x.dtype,
                               "activations" if kind == "parameters" else kind, self.ledger.maker(x))

    def buffer(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Memory that is never touched, for gradients side by side."""
        out = np.empty(count, dtype)
        return self.ledger.watched(out, "gradients", out.nbytes, where=self._shared(out.nbytes))

    def _shared(self, size: int) -> str:
        """Where what a collective brings lies: a host's ranks have blocks of some sizes, none of which serves another."""
        return f"shared, {rounded(size)}" if self.on_host else "pool"


def _constant(x) -> Tensor:
    return on_storage_of(x, x._shape, bool(Tensor.storage_offset(x))) if x._requires_grad else local_alias(x)
