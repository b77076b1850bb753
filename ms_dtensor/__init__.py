# SPDX-License-Identifier: Apache-2.0
"""ms_dtensor: distributed tensors for MindSpore. The public names, and where each is taught.

Names load on first use, so that the pure modules (layouts, plans, rules) can be used without MindSpore.
"""
from __future__ import annotations

import importlib

from ._version import __version__

_EXPORTS = {
    "placements": ("Shard", "Replicate", "Partial", "Placement"),
    "mesh": ("DeviceMesh",),
    "layout": ("Layout",),
    "dtensor": ("DTensor",),
    "distribute": ("init_device_mesh", "distribute_tensor", "distribute_module"),
    "autograd": ("value_and_grad", "grad"),
    "factories": ("zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "eye",
                  "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    "random": ("manual_seed", "get_rng_state", "set_rng_state"),
    "function": ("DFunction",),
    "registry": ("register_rule", "unregister_rule"),
    "mapping": ("local_map",),
    "modes": ("SkipDTensorDispatch", "implicit_replication", "redistribution_policy"),
    "parallel": ("parallelize_module", "ParallelStyle", "ColwiseParallel", "RowwiseParallel", "SequenceParallel",
                 "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput", "FusedColwiseParallel",
                 "loss_parallel", "replicate", "suggest_plan"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    home = _HOME.get(name)
    if home is None:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as e:
            if e.name == f"{__name__}.{name}":
                raise AttributeError(f"module 'ms_dtensor' has no attribute {name!r}") from None
            raise
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
