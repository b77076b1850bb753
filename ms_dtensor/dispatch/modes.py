# SPDX-License-Identifier: Apache-2.0
"""Modes of dispatch: skip dispatch, let plain tensors in, what to do about implicit communication.

The mode in force is an immutable value in a contextvar, so it is per thread and per task. It is folded from the blocks
that are open, oldest first, and a block takes back exactly what it put there: blocks are re-entrant, reusable, safe
against exceptions, and may be left in any order. Not here: what the modes do (`dispatch/dispatcher.py`).
"""
from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..ops.rules.names import PRIMITIVES

POLICIES = ("auto", "warn", "explicit")
# public names of ops that our tables know by other names only
_PUBLIC = {"transpose": ("permute", "swap"), "t": ("matrix_transpose",), "concat": ("cat",), "mm": ("matmul",),
           "bmm": ("matmul",), "mv": ("matmul",), "dot": ("matmul",), "dense": ("linear",), "arange": (),
           "getitem": ("slice", "index", "gather"), "subtract": ("sub",), "multiply": ("mul",), "divide": ("div",),
           "true_divide": ("div",), "negative": ("neg",), "greater": ("gt",), "less": ("lt",), "equal": ("eq",),
           "not_equal": ("ne",), "view": ("reshape",), "broadcast_to": ("expand",), "expand_dims": ("unsqueeze",)}


class Mode(NamedTuple):
    """The modes in force."""

    skip: bool = False
    no_skip: frozenset[str] = frozenset()
    implicit_replication: bool = False
    higher_order: bool = False  # a derivative of a gradient may be asked for
    policy: str = "auto"
    no_gather: bool = False
    constants: bool = False  # see `Constants`
    check_rules: bool = False
    check_gradients: bool = False
    check_types: bool = False
    watch: Any = None  # asked of each call before it runs, see `patches/recomputed.py`


DEFAULT = Mode(check_rules=os.environ.get("MS_DTENSOR_DEBUG", "0") not in ("", "0"))
mode: ContextVar[Mode] = ContextVar("ms_dtensor_mode", default=DEFAULT)
_open: ContextVar[tuple] = ContextVar("ms_dtensor_open_modes", default=())


def _fold(blocks) -> None:
    _open.set(blocks)
    mode.set(DEFAULT._replace(**{k: v for _, fields in blocks for k, v in fields.items()}) if blocks else DEFAULT)


def open_blocks() -> tuple:
    """Those in force, oldest first."""
    return _open.get()


@contextmanager
def reopened(then: tuple) -> Iterator[None]:
    """Inside, the blocks are open that were open then, and no others."""
    now = _open.get()
    _fold(then)
    try:
        yield
    finally:
        _fold(now)


class _Block(ContextDecorator):
    """A `with` block, or a decorator, that replaces fields of the mode."""

    def __init__(self, **fields):
        self._fields = fields

    def __enter__(self):
        _fold((*_open.get(), (self, self._fields)))
        return self

    def __exit__(self, *exc) -> None:
        blocks = list(_open.get())
        for i in reversed(range(len(blocks))):
            if blocks[i][0] is self:
                del blocks[i]
                break
        _fold(tuple(blocks))


class implicit_replication(_Block):  # noqa: N801  PyTorch's name
    """Inside, plain tensors mix with DTensors as if replicated on the DTensor's mesh.

    Meaning as `torch.distributed.tensor.experimental.implicit_replication`, but per thread. The caller vouches that
    every rank passes the same values; their gradients are reduced accordingly.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> with md.implicit_replication():
        ...     md.ones(2, device_mesh=mesh) + ms.Tensor([1.0, 2.0])
        DTensor(f32[2], mesh=(tp=1), rank 0 holds [2])
    """

    def __init__(self):
        super().__init__(implicit_replication=True)


class redistribution_policy(_Block):  # noqa: N801  reads like the function it stands beside
    """What happens to communication that nobody wrote: "auto" records it, "warn" warns of it, "explicit" refuses it.

    That is an op whose operands have to be moved, or whose result (a maximum under autograd) has to be reduced; `item`,
    `float`, `bool` ... of what is not replicated; `local_map` that moves inputs or compares shapes; `set_data`.

    Args:
        policy: "auto", "warn" (once per call, at the caller's file and line) or "explicit" (raises `ImplicitCommError`
            that names the `redistribute()` call to insert, before anything is sent).

    Raises:
        ConfigError: another name.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> with md.redistribution_policy("explicit"):
        ...     md.ones(2, device_mesh=mesh) * 2
        DTensor(f32[2], mesh=(tp=1), rank 0 holds [2])
    """

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise ConfigError(f"For 'redistribution_policy', 'policy' must be one of {POLICIES}, but got {policy!r}.")
        super().__init__(policy=policy)


class checks(_Block):  # noqa: N801  reads like the function it stands beside
    """Inside, what users teach the library is verified before it is trusted; for debugging, it is slow.

    Public as `ms_dtensor.debug.checks`. MS_DTENSOR_DEBUG=1 in the environment turns `rules` on for the whole process.

    Args:
        rules: a rule given to `register_rule` is verified against the whole op, forward and backward: at registration
            with `verify=`, when a function is decorated if `shapes` is text, else before the first call of each
            signature. A wrong one raises `OpRuleError`. And what `from_local` is given, or a function in `local_map`
            returns, as Replicate is compared across ranks, which communicates; a `LayoutError` if ranks differ.
        gradients: before its first call of each signature a `DFunction`'s backward is compared with finite differences.
        types: the first call of each function of `local_map`, and of each `DFunction` with placements, with inputs of given
            layouts is refused where what its tensors mean on an axis does not fit, see `local_map(check=True)`.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import checks
        >>> with checks(), md.register_rule("doubled", "S(0) -> P", shapes="n -> n") as rule:
        ...     try:
        ...         rule(lambda x: x * 2)
        ...     except md.errors.OpRuleError as e:
        ...         print(e.attempt)
        For 'register_rule', the rule of 'doubled' is wrong.
    """

    def __init__(self, rules: bool = True, gradients: bool = False, types: bool = False):
        super().__init__(check_rules=rules, check_gradients=gradients, check_types=types)


# the forward of a gradient that is itself recorded: local ops are made so that it can be differentiated
HigherOrderBlock = partial(_Block, higher_order=True)
LossParallelBlock = partial(_Block, no_gather=True)  # what `loss_parallel()` without arguments returns; see there


class Watched(_Block):
    """Inside, `watch(op, arguments)` is asked of each call first: what it gives, unless None, is called with the call."""

    def __init__(self, watch):
        super().__init__(watch=watch)


class Constants(_Block):
    """Inside, a plain tensor without a gradient is a constant that all ranks made alike: Replicate beside a DTensor.

    Unlike `implicit_replication` it lets no Parameter in and, while gradients are recorded, nothing computed of one. Who
    opens it knows that no plain tensor has come from elsewhere; under `checks()` ranks compare what is taken for one.
    """

    def __init__(self):
        super().__init__(constants=True)


class SkipDTensorDispatch(_Block):
    """Inside, ops see the local tensors: results are plain and nothing is communicated.

    Args:
        no_skip: ops that are still dispatched: callables (`mint.matmul`, a primitive, a DFunction) or names, public
            ("matmul") or MindSpore's ("MatMulExt").

    Raises:
        ConfigError: `no_skip` names no op.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> x = md.ones(2, device_mesh=mesh)
        >>> with md.SkipDTensorDispatch():
        ...     type(x + x).__name__
        'Tensor'
    """

    def __init__(self, no_skip=None):
        super().__init__(skip=True, no_skip=op_names(no_skip, "SkipDTensorDispatch", "no_skip"))


def op_names(given, who: str, what: str) -> frozenset[str]:
    """Names of ops, as `named` compares them; `given` is one or many: callables, public names, or MindSpore's.

    Raises:
        ConfigError: one that names no op.
    """
    names = [_name_of(op) for op in ((given,) if isinstance(given, str) or callable(given) else given or ())]
    known = {*PRIMITIVES, *(op for op, _ in PRIMITIVES.values()), *_PUBLIC, "redistribute", "send_rows"}
    squeezed = {p.lower(): p for p in PRIMITIVES}  # mint.transpose calls itself transpose_ext_view
    names = [name if name in known else squeezed.get(name.replace("_", "").lower(), name) for name in names]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(f"For '{who}', '{what}' names no op: {name!r}.", "", "",
                              f"did you mean {near[0]!r}?" if near else "pass the public function or its name")
    return frozenset(n for name in names for n in (name, *_PUBLIC.get(name, ())))


def canonical(name: str) -> str:
    """An op of MindSpore as rules name it."""
    return PRIMITIVES.get(name, (name,))[0]


def named(name: str, names: frozenset[str]) -> bool:
    """Whether an op of MindSpore is among `op_names`."""
    return name in names or canonical(name) in names


def _name_of(op) -> str:
    if isinstance(op, str):
        return op
    own = getattr(op, "_op_name", None) or getattr(getattr(op, "registration", None), "op", None)
    return str(own or getattr(op, "__name__", None) or getattr(op, "name", op))
