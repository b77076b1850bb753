# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's names: its programs run by changing imports, or unedited, and nothing else.

    from ms_dtensor.compat.hyper_parallel import DFunction, DistributedOp, Shard, distribute_tensor, init_device_mesh

or `python -m ms_dtensor run --as hyper_parallel script.py`, or `register()` before the script imports `hyper_parallel`
(`names.py` lists what it finds there). Which names mean something else here says `docs/howto/port_from_hyper_parallel.md`.
"""
from ...core.placements import Partial, Placement, Replicate, Shard
from ...custom_ops.function import DFunction
from ...debug import CommDebugMode
from ...dispatch.modes import SkipDTensorDispatch
from ...parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from ...tensor.distribute import distribute_module
from ...tensor.dtensor import DTensor
from ...tensor.factories import empty, full, ones, zeros
from .checkpoints import get_current_layout, get_global_layout
from .fsdp import CPUOffloadPolicy, HSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from .layout import DeviceMesh, Layout, distribute_tensor, init_device_mesh
from .op import DistributedOp
from .pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from .platform import get_platform
from .recompute import CheckpointPolicy, checkpoint_exclude_wrapper, checkpoint_wrapper
from .registered import register, unregister
from .shard import (
    ShardingPlan,
    custom_shard,
    hsdp,
    init_parameters,
    parallelize_value_and_grad,
    shard_module,
)

__all__ = ["CPUOffloadPolicy", "CheckpointPolicy", "ColwiseParallel", "CommDebugMode", "DFunction", "DTensor", "DeviceMesh",
           "DistributedOp", "HSDPModule", "Layout", "MixedPrecisionPolicy", "OffloadPolicy", "ParallelStyle", "Partial",
           "PipelineStage", "Placement", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput",
           "Replicate", "RowwiseParallel", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B", "SequenceParallel",
           "Shard", "ShardingPlan", "SkipDTensorDispatch", "checkpoint_exclude_wrapper",
           "checkpoint_wrapper", "custom_shard", "distribute_module",
           "distribute_tensor", "empty", "full", "fully_shard", "get_current_layout", "get_global_layout", "get_platform",
           "hsdp", "init_device_mesh", "init_parameters", "loss_parallel", "ones", "parallelize_module",
           "parallelize_value_and_grad", "register", "shard_module", "unregister", "zeros"]
