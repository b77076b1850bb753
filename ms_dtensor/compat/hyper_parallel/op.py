# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's `DistributedOp`: says what layout a call's results have, given the operands as they lie.

Our rules say which layouts are legal and move operands that lie otherwise, so `register_rule` is the better way for new
code. Gradients of operands that are replicated where ranks do different work are summed here too; there they are left
partial.
"""
from __future__ import annotations

import inspect
from typing import Any

from ...core.layout import Layout as CoreLayout
from ...custom_ops.function import BY_LAYOUT
from ...custom_ops.local_map import Mapping
from ...errors import ConfigError, LayoutError, OpRuleError
from ...tensor.dtensor import DTensor
from .layout import Layout
from .shard import run_for_results


class DistributedOp:
    """Making an instance of a subclass registers it as the op of that name, for `DFunction._op_name`.

    A subclass defines `infer_layout`, in either of the two forms there have been:
    `infer_layout(cache_values) -> ((layout, ...), None)`, with `preprocess(args, kwargs) -> (local_args, local_kwargs,
    cache_values)`, or `infer_layout(layouts, extra_args=None) -> layout`. `get_expand_impl` may replace the local call.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> from ms_dtensor.compat.hyper_parallel import DFunction, DistributedOp
        >>> class Same(DistributedOp):
        ...     def __init__(self):
        ...         super().__init__("ExampleTwice")
        ...     def infer_layout(self, cache_values):
        ...         return (cache_values[0],), None
        >>> op = Same()
        >>> class Twice(DFunction):
        ...     _op_name = "ExampleTwice"
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        >>> Twice.apply(md.ones((4,), mesh, [md.Shard(0)]))
        DTensor(f32[4@tp], mesh=(tp=1), rank 0 holds [4])
    """

    def __init__(self, op_name: str):
        if not isinstance(op_name, str) or not op_name:
            raise ConfigError(f"For 'DistributedOp', 'op_name' must be a name, but got {op_name!r}.")
        self.op_name = op_name
        BY_LAYOUT[op_name] = self

    def preprocess(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list]:
        """(local args, local kwargs, what decides the layout of the results)."""
        def local(v):
            return v.to_local() if getattr(v, "_layout", None) is not None else v
        layouts = [getattr(v, "layout", None) for v in args]
        return tuple(map(local, args)), {k: local(v) for k, v in kwargs.items()}, layouts

    def infer_layout(self, cache_values, extra_args=None) -> Any:
        """The layouts of the results."""
        raise NotImplementedError("a DistributedOp defines infer_layout")

    def _check_partial_inputs(self, layouts) -> None:
        """For `infer_layout` of an op that is not linear: refuses operands that hold summands."""
        for i, layout in enumerate(layouts):
            if layout is not None and any(p.is_partial() for p in layout.placements):
                raise LayoutError(f"For '{self.op_name}', input {i} has Partial status.", repr(layout),
                                  "This op of a sum is not the sum of what it gives for the summands.", "x.reduce_partial()")

    def get_expand_impl(self, func, infer_result, cache_values):
        """A function to call on the local arguments instead of `func`, or None."""
        return None

    def run(self, name: str, func, args: tuple, kwargs: dict):
        """One call on DTensors: infer, decide each operand's cotangent, run `func` on local tensors, wrap."""
        _, _, known = self.preprocess(tuple(map(_Shown.of, args)), {k: _Shown.of(v) for k, v in kwargs.items()})
        if len(inspect.signature(self.infer_layout).parameters) > 1:
            inferred = self.infer_layout([v for v in known if isinstance(v, Layout | CoreLayout)],
                                         [v for v in args if getattr(v, "_layout", None) is None])
        else:
            inferred = self.infer_layout(known)
        outs = inferred[0] if isinstance(inferred, tuple) and len(inferred) == 2 and inferred[1] is None else inferred
        outs = tuple(outs) if isinstance(outs, tuple | list) else (outs,)
        if not all(isinstance(o, Layout | CoreLayout) for o in outs):
            raise OpRuleError(f"For '{name}', infer_layout gave {outs!r}.", "", "It gives one Layout per result.")
        def local(*shown, **named):
            plain, plain_named, _ = self.preprocess(tuple(map(_Shown.of, args, shown)),
                                                    {k: _Shown.of(kwargs[k], v) for k, v in named.items()})
            return (self.get_expand_impl(func, inferred, known) or func)(*plain, **plain_named)
        outs = tuple(Layout.of(o) if isinstance(o, CoreLayout) else o for o in outs)
        shapes = [o.shape for o in outs]
        mapping = Mapping(name, tuple(_placed(name, o) for o in outs), out_shapes=None if None in shapes else shapes)
        return run_for_results(mapping, local, *args, **kwargs)


def _placed(name: str, layout: Layout):
    """A layout in the form that `local_map` takes of a result."""
    core = layout.core
    if core is core.with_placements(list(core.placements)):
        return list(core.placements)
    if not layout.is_partial():
        return layout.alias_tensor_map
    raise OpRuleError(f"For '{name}', infer_layout gave a partial result with an order of its own.", core.describe(), "",
                      "let the axes of a dim split it in the mesh's order")


class _Shown:
    """A DTensor as `preprocess` sees it: its layout in this module's form, its local tensor the one that was moved."""

    def __init__(self, x: DTensor, local):
        self._x, self._local = x, local
        self.layout = Layout.of(x.layout)

    @classmethod
    def of(cls, value, local=None):
        return cls(value, local) if isinstance(value, DTensor) else value if local is None else local

    @property  # type: ignore[misc]
    def __class__(self):  # `isinstance(x, DTensor)` is asked of it
        return type(self._x)

    def to_local(self):
        return self._x.to_local() if self._local is None else self._local

    def __getattr__(self, name):
        return getattr(self._x, name)
