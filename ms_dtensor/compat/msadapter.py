# SPDX-License-Identifier: Apache-2.0
"""PyTorch-style modules on MindSpore (msadapter and its kin): which adapter is here, and its leaves as DTensors.

An adapter is recognised by what it does, never by its class: a module has `_parameters`, `_buffers` and `_modules`, as
torch.nn.Module has, and a leaf is a `mindspore.Tensor` or turns into one. So any adapter, and a stand-in in a test, will
do. Nothing is imported before it is asked for, and nothing of ours depends on it.
"""
from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..errors import ConfigError

CANDIDATES = ("msadapter", "mindtorch", "msa_torch")


@runtime_checkable
class TorchStyleModule(Protocol):
    """What a module must have."""

    _parameters: dict[str, Any]
    _buffers: dict[str, Any]
    _modules: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was looked for: there and usable, or why not."""

    name: str
    version: str | None
    usable: bool
    reason: str

    def __str__(self):
        return f"{self.name} {self.version or '(not installed)'}: {'usable' if self.usable else self.reason}"


def adapters(names: tuple[str, ...] = CANDIDATES) -> list[Adapter]:
    """Looks for adapters by importing them; says of each whether it can be used, and why not.

    Example:
        >>> from ms_dtensor.interop.msadapter import adapters
        >>> print(adapters(("no_such_adapter",))[0])
        no_such_adapter (not installed): no module of that name
    """
    return [_look(name) for name in names]


def _look(name: str) -> Adapter:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if importlib.util.find_spec(name) is None:
        return Adapter(name, version, False, "no module of that name")
    try:
        module = importlib.import_module(name)
    except Exception as e:  # noqa: BLE001  whatever its import raises is the reason (0.1.0 does not fit MindSpore 2.10)
        return Adapter(name, version, False, f"its import fails: {type(e).__name__}: {e}")
    return Adapter(name, version or getattr(module, "__version__", None), True, "")


def leaves(module: TorchStyleModule, prefix: str = "") -> Iterator[tuple[str, dict, str, Any]]:
    """(path, the dict that holds it, key, leaf) of every parameter and buffer; ties come once per place."""
    _check(module)
    for table in (module._parameters, module._buffers):
        for key, leaf in table.items():
            if leaf is not None:
                yield prefix + key, table, key, leaf
    for name, child in module._modules.items():
        if child is not None:
            yield from leaves(child, f"{prefix}{name}.")


def swap_leaves(module: TorchStyleModule, convert: Callable[[str, Any], Any]) -> TorchStyleModule:
    """Replaces leaves in place; tied leaves stay tied.

    Args:
        module: a torch-style module.
        convert: `(path, leaf) -> leaf`; called once per distinct leaf. All calls are made before anything is replaced,
            so an error leaves the module as it was.

    Returns:
        The same module.
    """
    found = list(leaves(module))
    made: dict[int, Any] = {}
    for path, _, _, leaf in found:
        if id(leaf) not in made:
            made[id(leaf)] = convert(path, leaf)
    for _, table, key, leaf in found:
        table[key] = made[id(leaf)]
    return module


def distribute_leaves(module: TorchStyleModule, device_mesh, plan: Mapping[str, Any] | None = None, *,
                      src_data_rank: int | None = 0) -> TorchStyleModule:
    """Every parameter and buffer becomes a DTensor: as `plan` says by path, else replicated.

    Raises:
        ConfigError: `plan` names a leaf that is not there.
    """
    from mindspore import Parameter

    from ..tensor.distribute import distribute_parameter, distribute_tensor
    plan = dict(plan or {})
    unknown = sorted(set(plan) - {path for path, *_ in leaves(module)})
    if unknown:
        raise ConfigError(f"For 'distribute_leaves', 'plan' names no leaf: {unknown}.", type(module).__name__, "",
                          f"the leaves are {[path for path, *_ in leaves(module)][:8]}")

    def convert(path, leaf):
        tensor = as_mindspore(leaf)
        make = distribute_parameter if isinstance(tensor, Parameter) else distribute_tensor
        return make(tensor, device_mesh, plan.get(path), src_data_rank=src_data_rank)
    return swap_leaves(module, convert)


def as_mindspore(leaf):
    """The `mindspore.Tensor` of an adapter's leaf: itself, or what its conversion gives."""
    from mindspore import Tensor
    if isinstance(leaf, Tensor):
        return leaf
    for name in ("to_mindspore", "__mindspore_tensor__", "ms_tensor"):
        inner = getattr(leaf, name, None)
        inner = inner() if callable(inner) and not isinstance(inner, Tensor) else inner
        if isinstance(inner, Tensor):
            return inner
    raise ConfigError(f"For 'as_mindspore', a {type(leaf).__name__} is no MindSpore tensor.", "",
                      "A leaf is a mindspore.Tensor, or has to_mindspore().", "convert it first")


def _check(module) -> None:
    if not isinstance(module, TorchStyleModule):
        raise ConfigError(f"For 'leaves', a {type(module).__name__} is no torch-style module.", "",
                          "It must have _parameters, _buffers and _modules.", "use distribute_module for an nn.Cell")
