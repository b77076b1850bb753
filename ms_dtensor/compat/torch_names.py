# SPDX-License-Identifier: Apache-2.0
"""PyTorch's module paths for our names: DTensor code ports by changing its imports, and nothing else of it.

Replace `torch.distributed` by `ms_dtensor.compat.torch_names.distributed`:

    from ms_dtensor.compat.torch_names.distributed.tensor.parallel import parallelize_module

The modules below are made when this one is imported and load their names on first use. A name that we do not have is
absent, so that an import fails rather than a model. What differs in meaning is listed in docs/parity_api.md.
"""
from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence

from ..custom_ops.register import register_rule
from ..ops.rules import Case, OpSpec

_TENSOR = {name: "ms_dtensor" for name in (
    "DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard", "distribute_module", "distribute_tensor", "empty",
    "full", "init_device_mesh", "ones", "rand", "randn", "zeros")}
_PLACEMENTS = {name: "ms_dtensor" for name in ("Partial", "Placement", "Replicate", "Shard")}
_MESH = {name: "ms_dtensor" for name in ("DeviceMesh", "init_device_mesh")}
_PARALLEL = {name: "ms_dtensor.parallel" for name in (
    "ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput",
    "RowwiseParallel", "SequenceParallel", "loss_parallel", "parallelize_module")}
_CONTEXT = {name: "ms_dtensor.compat.torch_context" for name in ("context_parallel", "context_parallel_unshard")}
_EXPERIMENTAL = {"context_parallel": _CONTEXT["context_parallel"], "implicit_replication": "ms_dtensor",
                 "local_map": "ms_dtensor", "register_sharding": __name__}
_DEBUG = {"CommDebugMode": "ms_dtensor.debug", "visualize_sharding": "ms_dtensor.debug"}

# path below this module -> where each of its names lives
MODULES: dict[str, dict[str, str]] = {
    "distributed": {},
    "distributed.device_mesh": _MESH,
    "distributed.tensor": _TENSOR,
    "distributed._tensor": _TENSOR,
    "distributed.tensor.device_mesh": _MESH,
    "distributed.tensor.placement_types": _PLACEMENTS,
    "distributed._tensor.placement_types": _PLACEMENTS,
    "distributed.tensor.parallel": _PARALLEL,
    "distributed.tensor.parallel.style": _PARALLEL,
    "distributed.tensor.experimental": _EXPERIMENTAL,
    "distributed.tensor.experimental._attention": _CONTEXT,
    "distributed.tensor.debug": _DEBUG,
    "distributed.fsdp": {"fully_shard": "ms_dtensor.parallel"},
    "distributed._composable.replicate": {"replicate": "ms_dtensor.parallel"},
    "distributed._composable": {},
}


class _Names(types.ModuleType):
    """A module whose names are found elsewhere on first use."""

    def __init__(self, path: str, homes: dict[str, str]):
        super().__init__(f"{__name__}.{path}", f"The names of torch.{path}.")
        self.__path__: list[str] = []
        self.__dict__["_homes"] = homes
        self.__all__ = sorted(homes)

    def __getattr__(self, name: str):
        home = self.__dict__["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}; see docs/parity_api.md for "
                                 "PyTorch's names that are not here")
        value = getattr(importlib.import_module(home), name)
        setattr(self, name, value)
        return value

    def __dir__(self):
        return self.__all__


def register_sharding(op: str | Sequence[str], *, shapes=None) -> Callable:
    """`torch.distributed.tensor.experimental.register_sharding`, for MindSpore's primitives.

    Args:
        op: primitive name or names, as the error of an op without a rule quotes them.
        shapes: as for `register_rule`; without it only even splits are used.

    Returns:
        A decorator. The function takes the call's arguments, tensors as descriptions with `.shape`, `.ndim` and `.dtype`,
        and returns `(output placements, input placements)` pairs for one mesh axis, None for non-tensor arguments.

    Example:
        >>> from ms_dtensor import Replicate, Shard, unregister_rule
        >>> from ms_dtensor.compat.torch_names.distributed.tensor.experimental import register_sharding
        >>> @register_sharding("MyPrimitive")
        ... def my_primitive(x, dim):
        ...     return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != dim % x.ndim]
        >>> unregister_rule("MyPrimitive")
    """
    def decorate(fn: Callable) -> Callable:
        for name in (op,) if isinstance(op, str) else op:
            register_rule(name, lambda call: _spec(fn, shapes, call))
        return fn
    return decorate


def _spec(fn, shapes, call) -> OpSpec:
    cases = []
    results = 1
    for outs, ins in fn(*call.args.get("inputs", ())):
        placed = tuple(p for p in ins if p is not None)
        if len(placed) != len(call.operands):
            continue
        results = len(outs)
        uneven = () if shapes is not None else tuple((o.index, p.dim % o.ndim, o.shape[p.dim])
                                                     for o, p in zip(call.operands, placed) if p.is_shard())
        cases.append(Case(placed, tuple(outs), uneven))
    return OpSpec((None,) * results if shapes is None else tuple(map(tuple, shapes(call))), tuple(cases))


def _install() -> None:
    for path in sorted(MODULES):
        module = _Names(path, MODULES[path])
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)


__path__: list[str] = []  # so that the import system looks for the modules below this one
_install()
