# SPDX-License-Identifier: Apache-2.0
"""What goes from stage to stage: this rank's shard goes to the rank of the same coordinate, and is a shard there.

A DTensor becomes one of the same placements on the receiver's axes of the same names, so nothing is redistributed. The
first message of an edge is a header, which says what comes; the later ones must fit it, also in later steps of batches that
are alike. Each message carries a
name, "F of stage 3, microbatch 5", which both ends compare on host, and which is what errors print.
"""
from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .. import comm
from ..comm.objects import decode, encode
from ..comm.pretended import executing
from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import Partial, Placement, Replicate, Shard
from ..core.tree import leaves, map_leaves
from ..dispatch.cotangent import summed_gradient
from ..dispatch.operands import dtype_name, local_alias, wrap
from ..errors import LayoutError
from .order import Result

FORMS = 16  # of batches that are remembered; the oldest is forgotten, on all ranks alike
_TENSOR = "\0tensor"  # key of what stands for a tensor in a header
Kind = tuple[tuple[int, ...], Any, Layout | None]  # of a tensor: local shape, dtype, layout


def named(result: Result) -> str:
    """A message as errors print it."""
    what, stage, microbatch = result
    return f"{'F' if what == 'F' else 'the gradient'} of stage {stage}, microbatch {microbatch}"


class Edge:
    """What goes over one border between two stages in steps of batches that are alike, and what comes back.

    Args:
        group: of the pipeline's axis.
        peer: the other end, by its index in the group.
        mesh: of which this rank's stages' meshes are a part.
    """

    def __init__(self, group: comm.Group, peer: int, mesh: DeviceMesh):
        self.group, self.peer, self.mesh = group, group.ranks[peer], mesh
        self.tree: Any = None  # what goes forward, with numbers in the place of tensors
        self.kinds: list[Kind] | None = None
        self.around: bytes = b""  # the tree without its tensors, as it was sent

    def send(self, tree: Any, result: Result) -> None:
        """Sends what a stage has made; forward with a header if it is the first."""
        tensors = leaves(tree, Tensor)
        around = b"" if isinstance(tree, Tensor) else encode(map_leaves(lambda x: 0, tree, Tensor))
        if self.kinds is None:
            self._announce(tree, tensors, named(result))
            self.around = around
        elif (found := [_kind(x) for x in tensors]) != self.kinds or around != self.around:
            raise LayoutError(f"For a pipeline, {named(result)} is not what the microbatches before it were.",
                              f"{_said(found)}, before {_said(self.kinds)}" if found != self.kinds else
                              f"{around.decode()}, before {self.around.decode()}",
                              "What goes over a border is of one form, for all batches of one form.",
                              ("microbatches of as many rows each", "the next step takes the new form"))
        self._post(tensors, named(result))

    def receive(self, result: Result) -> Any:
        """What the stage before has made."""
        if self.kinds is None:
            self._listen(named(result))
        numbers = iter(self._take([(shape, dtype) for shape, dtype, _ in self.kinds or ()], named(result)))
        tensors = [x if at is None else wrap(x, at) for x, (_, _, at) in zip(numbers, self.kinds or ())]
        return _filled(self.tree, tensors)

    def send_back(self, gradients: list[Tensor], result: Result) -> None:
        """Sends gradients of what came forward and has one, in order."""
        self._post(gradients, named(result))

    def receive_back(self, result: Result) -> list[Tensor]:
        """Gradients of what went forward and has one."""
        kinds = [(shape, dtype, at) for shape, dtype, at in self.kinds or () if _differentiable(dtype)]
        layouts = [None if at is None else summed_gradient(at) for _, _, at in kinds]
        got = self._take([(shape, dtype) for shape, dtype, _ in kinds], named(result))
        return [x if at is None else wrap(x, at) for x, at in zip(got, layouts)]

    # -- messages ----------------------------------------------------------------------------------------------------

    def _post(self, tensors: list[Tensor], name: str) -> None:
        if tensors:
            with comm.annotate(of=name):
                self.group.exchange([(self.peer, local_alias(x)) for x in tensors], [])

    def _take(self, kinds: list, name: str) -> list[Tensor]:
        if not kinds:
            return []
        with comm.annotate(of=name):
            return self.group.exchange([], [(self.peer, shape, dtype) for shape, dtype in kinds])

    def _announce(self, tree: Any, tensors: list[Tensor], name: str) -> None:
        numbers = iter(range(len(tensors)))
        text = encode((map_leaves(lambda x: {_TENSOR: next(numbers)}, tree, Tensor), [_written(x) for x in tensors]))
        body = Tensor(np.frombuffer(text, np.uint8).copy())
        dry = executing()
        if dry is not None:
            dry.messages[name] = text
        self._post([Tensor(np.array([len(text)], np.int64))], f"size of the header before {name}")
        self._post([body], f"header before {name}")
        self.kinds = [_kind(x) for x in tensors]

    def _listen(self, name: str) -> None:
        dry = executing()
        if dry is not None:
            text = dry.message(name)
            for kind, what in (((1,), ms.int64), "size of the header"), (((len(text),), ms.uint8), "header"):
                self._take([kind], f"{what} before {name}")
            self.tree, written = decode(text)
            self.kinds = [self._read(*w) for w in written]
            return
        size, = self._take([((1,), ms.int64)], f"size of the header before {name}")
        text, = self._take([((int(size.asnumpy()[0]),), ms.uint8)], f"header before {name}")
        self.tree, written = decode(text.asnumpy().tobytes())
        self.kinds = [self._read(*w) for w in written]

    def _read(self, shape: tuple, dtype: str, names: tuple | None, placements: tuple, order: tuple) -> Kind:
        kind = getattr(ms, dtype)
        if names is None:
            return shape, kind, None
        layout = Layout(self.mesh[names] if len(names) > 1 else self.mesh[names[0]], [_placement(*p) for p in placements],
                        shape, dtype, list(order))
        return layout.local_shape(), kind, layout


class Edges:
    """Borders by the stage before, as steps of batches of one form know them.

    Attributes:
        every_step: each step announces anew: not all ranks have the batch, by which they know whether it is as before.
    """

    every_step = False

    def __init__(self) -> None:
        self._known: dict[str, dict[int, Edge]] = {}

    def of(self, batch: Any, training: bool) -> dict[int, Edge]:
        """Those for a batch of this form."""
        form = f"{training} {map_leaves(_form, batch, Tensor)}"
        if self.every_step or form not in self._known:
            if len(self._known) == FORMS:
                del self._known[next(iter(self._known))]
            self._known[form] = {}
        return self._known[form]

    def forget(self) -> None:
        """On all ranks, where a step was given up."""
        self._known.clear()


def _form(x: Tensor) -> str:
    layout = getattr(x, "_layout", None)
    return f"{x.dtype}{list(x._shape)}" if layout is None else layout.describe()


def _differentiable(dtype) -> bool:
    return dtype_name(dtype).startswith(("float", "bfloat"))


def _kind(x: Tensor) -> Kind:
    layout = getattr(x, "_layout", None)
    return tuple(x._shape), x.dtype, layout


def _said(kinds: list[Kind]) -> str:
    return ", ".join(f"{dtype_name(dtype)}{list(shape)}" if at is None else at.describe() for shape, dtype, at in kinds)


def _written(x: Tensor) -> tuple:
    layout = getattr(x, "_layout", None)
    if layout is None:
        return tuple(x._shape), dtype_name(x.dtype), None, (), ()
    placements = []
    for p in layout.placements:
        if type(p) not in (Shard, Replicate, Partial):
            raise LayoutError(f"For a pipeline, a {type(p).__name__} cannot go to another stage.", layout.describe(),
                              "What goes over a border is cut in chunks, replicated or partial.",
                              "x.redistribute(...) before the stage returns it")
        placements.append((type(p).__name__, getattr(p, "dim", 0), getattr(p, "reduce_op", "")))
    return layout.shape, layout.dtype, layout.mesh.mesh_dim_names, tuple(placements), tuple(layout.order)


def _placement(name: str, dim: int, op: str) -> Placement:
    return Shard(dim) if name == "Shard" else Partial(op) if name == "Partial" else Replicate()


def _filled(tree: Any, tensors: list) -> Any:
    if isinstance(tree, dict):
        return tensors[tree[_TENSOR]] if list(tree) == [_TENSOR] else {k: _filled(v, tensors) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_filled(v, tensors) for v in tree)
    return tree
