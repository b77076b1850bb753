# SPDX-License-Identifier: Apache-2.0
"""ms_dtensor: distributed tensors for MindSpore. The public names, and where each is taught.

Names load on first use, so that the pure modules (layouts, plans, rules) can be used without MindSpore. The folders, low
to high, each importing only those before it: core, internals, comm, redistribute, ops, dispatch, tensor, debug, custom_ops,
parallel, optim, pipeline, checkpoint, compat, tools.
"""
from __future__ import annotations

import importlib
import logging
import sys
import types

from .core.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:  # for editors and type checkers, who cannot see what loads on first use; a test compares the lists
    from . import checkpoint as checkpoint, comm as comm, compat as compat, debug as debug, errors as errors, optim as optim
    from . import parallel as parallel, pipeline as pipeline
    from .core import layout as layout, mesh as mesh, placements as placements, tokens as tokens
    from .core.layout import Layout as Layout
    from .core.mesh import DeviceMesh as DeviceMesh
    from .core.placements import (
        FusedShard as FusedShard, Partial as Partial, Placement as Placement, Replicate as Replicate, Shard as Shard)
    from .core.tokens import Tokens as Tokens, balance as balance, head_tail as head_tail, in_order as in_order
    from .custom_ops import function as function, register
    from .custom_ops.function import DFunction as DFunction
    from .custom_ops.local_map import local_map as local_map
    from .custom_ops.register import register_rule as register_rule, unregister_rule as unregister_rule
    from .debug import CommDebugMode as CommDebugMode, checks as checks, explain as explain, verify as verify
    from .debug import visualize_sharding as visualize_sharding
    from .dispatch import modes as modes
    from .dispatch.modes import (
        SkipDTensorDispatch as SkipDTensorDispatch, implicit_replication as implicit_replication, redistribution_policy as
        redistribution_policy)
    from .ops import rng, rules as rules
    from .ops.rng import get_rng_state as get_rng_state, manual_seed as manual_seed, set_rng_state as set_rng_state
    from .parallel import (
        ColwiseParallel as ColwiseParallel, ContextParallel as ContextParallel,
        FusedColwiseParallel as FusedColwiseParallel, MixedPrecisionPolicy as
        MixedPrecisionPolicy, ParallelStyle as ParallelStyle,
        PrepareModuleInput as PrepareModuleInput, PrepareModuleInputOutput as PrepareModuleInputOutput, PrepareModuleOutput
        as PrepareModuleOutput, RowwiseParallel as RowwiseParallel, SequenceParallel as SequenceParallel, loss_parallel as
        loss_parallel, checkpoint_wrapper as checkpoint_wrapper, context_attention as context_attention,
        fully_shard as fully_shard,
        ExpertParallel as ExpertParallel, Router as Router, expert_balance_loss as expert_balance_loss,
        expert_counts as expert_counts, moe as moe, router_z_loss as router_z_loss, update_expert_bias as update_expert_bias,
        parallelize_module as parallelize_module, register_fsdp_forward_method as register_fsdp_forward_method,
        replicate as replicate,
        suggest_plan as suggest_plan)
    from .tensor import dtensor as dtensor, factories as factories, init as init
    from .dispatch.recorded import backward as backward, recorded as recorded
    from .tensor.autograd import grad as grad, value_and_grad as value_and_grad
    from .tensor.distribute import (
        distribute_module as distribute_module, distribute_tensor as distribute_tensor, init_device_mesh as init_device_mesh)
    from .tensor.dtensor import DTensor as DTensor
    from .tensor.factories import (
        arange as arange, empty as empty, empty_like as empty_like, eye as eye, full as full, full_like as full_like,
        linspace as linspace, ones as ones, ones_like as ones_like, rand as rand, rand_like as rand_like, randint as randint,
        randn as randn, randn_like as randn_like, zeros as zeros, zeros_like as zeros_like)
    random, registry, interop = rng, register, compat

_EXPORTS = {
    "core.placements": ("Shard", "FusedShard", "Replicate", "Partial", "Placement"),
    "core.mesh": ("DeviceMesh",),
    "core.layout": ("Layout",),
    "core.tokens": ("Tokens", "balance", "in_order", "head_tail"),
    "tensor.dtensor": ("DTensor",),
    "tensor.distribute": ("init_device_mesh", "distribute_tensor", "distribute_module"),
    "dispatch.recorded": ("recorded", "backward"),
    "tensor.autograd": ("value_and_grad", "grad"),
    "tensor.factories": ("zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace", "eye",
                         "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    "ops.rng": ("manual_seed", "get_rng_state", "set_rng_state"),
    "custom_ops.function": ("DFunction",),
    "custom_ops.register": ("register_rule", "unregister_rule"),
    "custom_ops.local_map": ("local_map",),
    "debug": ("CommDebugMode", "checks", "explain", "visualize_sharding"),
    "dispatch.modes": ("SkipDTensorDispatch", "implicit_replication", "redistribution_policy"),
    "parallel": ("parallelize_module", "ParallelStyle", "ColwiseParallel", "ContextParallel", "RowwiseParallel",
                 "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput",
                 "FusedColwiseParallel", "MixedPrecisionPolicy", "checkpoint_wrapper", "context_attention",
                 "fully_shard", "loss_parallel", "register_fsdp_forward_method", "replicate", "suggest_plan",
                 "ExpertParallel", "Router", "moe", "update_expert_bias", "expert_counts", "expert_balance_loss",
                 "router_z_loss"),
}
# import paths that people use -> where the module is
_ALIASES = {
    "placements": "core.placements", "mesh": "core.mesh", "layout": "core.layout", "tokens": "core.tokens",
    "dtensor": "tensor.dtensor",
    "factories": "tensor.factories", "init": "tensor.init", "random": "ops.rng", "rules": "ops.rules",
    "registry": "custom_ops.register", "function": "custom_ops.function", "modes": "dispatch.modes",
    "verify": "debug.verify", "interop": "compat", "interop.msadapter": "compat.msadapter",
}
logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent until the user says otherwise
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = ["__version__", *_HOME]


class _Alias(types.ModuleType):
    """A module under another path; loads on first use."""

    def __init__(self, alias: str, home: str):
        super().__init__(f"{__name__}.{alias}")
        self.__dict__["_home"] = f"{__name__}.{home}"

    def __getattr__(self, name: str):
        if name in ("__path__", "__file__"):  # it has no files of its own
            raise AttributeError(name)
        return getattr(importlib.import_module(self._home), name)

    def __dir__(self):
        return dir(importlib.import_module(self._home))


sys.modules.update({f"{__name__}.{alias}": _Alias(alias, home) for alias, home in _ALIASES.items()})


if not TYPE_CHECKING:
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
