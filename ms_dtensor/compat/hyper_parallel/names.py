# SPDX-License-Identifier: Apache-2.0
"""Where hyper_parallel has its names, and what stands there when its place is taken: a table, read by `registered.py`.

Each row is a module of `hyper_parallel` and its names; `name=module:other` is one of ours of another module. Rows of
`MISSING` are names that raise when they are used, with what to use instead.
"""
from __future__ import annotations

_HERE = "ms_dtensor.compat.hyper_parallel"

_TENSORS = "DTensor distribute_tensor distribute_module"
_PLACEMENTS = "Partial Placement Replicate Shard"
_MESH = "DeviceMesh init_device_mesh"
_STYLES = ("ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel "
           "SequenceParallel parallelize_module")
_FSDP = "CPUOffloadPolicy HSDPModule MixedPrecisionPolicy OffloadPolicy fully_shard"
_SCHEDULES = "Schedule1F1B ScheduleGPipe ScheduleInterleaved1F1B"
_CONTEXT = "ms_dtensor.compat.hyper_context"
_INFERRED = "ms_dtensor.compat.hyper_parallel.inferred"
_LAYOUTS = "get_current_layout get_global_layout"

OFFERED = {
    "": f"{_TENSORS} {_PLACEMENTS} {_MESH} {_STYLES} {_FSDP} Layout PipelineStage {_SCHEDULES} ShardingPlan shard_module "
        "SkipDTensorDispatch DFunction DistributedOp custom_shard get_platform hsdp init_parameters loss_parallel "
        "parallelize_value_and_grad",
    "core.device_mesh": _MESH,
    "core.dtensor": f"{_TENSORS} {_PLACEMENTS} {_MESH} Layout",
    "core.dtensor.dtensor": f"{_TENSORS} SkipDTensorDispatch",
    "core.dtensor.device_mesh": _MESH,
    "core.dtensor.layout": f"Layout _infer_slice_area_by_rank={_INFERRED}:_infer_slice_area_by_rank",
    "core.dtensor.redistribute_infer": f"DevMat={_INFERRED}:DevMat "
                                       f"RedistributionOperatorInfer={_INFERRED}:RedistributionOperatorInfer",
    "core.dtensor.placement_types": _PLACEMENTS,
    "core.shard": "ShardingPlan shard_module",
    "core.shard.api": "shard_module",
    "core.shard.sharding_plan": "ShardingPlan",
    "core.tensor_parallel": _STYLES,
    "core.tensor_parallel.style": _STYLES,
    "core.fully_shard": _FSDP,
    "core.fully_shard.api": _FSDP,
    "core.fully_shard.utils": _FSDP,
    "core.activation_checkpoint": "CheckpointPolicy checkpoint_exclude_wrapper checkpoint_wrapper",
    "core.context_parallel": f"ContextParallel={_CONTEXT}:ContextParallel "
                             f"AsyncContextParallel={_CONTEXT}:AsyncContextParallel",
    "core.context_parallel.context_parallel": f"ContextParallel={_CONTEXT}:ContextParallel",
    "core.context_parallel.async_context_parallel": f"AsyncContextParallel={_CONTEXT}:AsyncContextParallel",
    "core.distributed_checkpoint": _LAYOUTS,
    "core.distributed_checkpoint.layout": _LAYOUTS,
    "core.pipeline_parallel": f"PipelineStage {_SCHEDULES}",
    "core.pipeline_parallel.scheduler": _SCHEDULES,
    "core.pipeline_parallel.stage": "PipelineStage",
    "platform": "get_platform",
    "platform.mindspore.autograd_compat": "enable_mindspore_backward_compat=ms_dtensor.compat.backward:"
                                          "enable_mindspore_backward_compat",
}

_RECOMPUTE = "checkpoint_wrapper(cell), policy_fn=... for what is kept on the device; more ranks, or fewer rows, need less"
_OVERLAP = "ScheduleInterleaved1F1B without overlap_b_f; md.pipeline.ScheduleDualPipeV overlaps forward and backward"
_ASCEND = "a kernel of Ascend's own, which hyper_parallel builds in C++; mindspore.ops has its parts"
_SPARSE = "md.ContextParallel and md.context_attention, of dense attention"

MISSING = {
    "core.activation_checkpoint": {_RECOMPUTE: "SwapManager swap_wrapper"},
    "core.context_parallel.dsa_context_parallel": {
        _SPARSE: "DSAIndexerContextParallel DSAIndexerLossContextParallel DSASequenceReplicateCache "
                 "DSASparseAttentionContextParallel"},
    "core.context_parallel.async_dsa_context_parallel": {
        _SPARSE: "AsyncDSAIndexerContextParallel AsyncDSAIndexerLossContextParallel AsyncDSASparseAttentionContextParallel"},
    "core.pipeline_parallel.comm_compute_overlap": {_OVERLAP: "CommComputeOverlap"},
    "core.pipeline_parallel.hook_coordinator": {_OVERLAP: "HookCoordinator HookRole"},
    "core.pipeline_parallel.scheduler": {_OVERLAP: "MetaStepType"},
    "platform.mindspore.pipeline_parallel._utils": {
        "a new schedule of as many micro-batches: Schedule1F1B(stage, n)": "_MicroBatch"},
    "custom_ops.experimental": {
        _ASCEND: "npu_dense_lightning_indexer_grad_kl_loss npu_dense_lightning_indexer_softmax_lse npu_lightning_indexer "
                 "npu_mhc_post npu_mhc_pre_sinkhorn npu_sparse_flash_mla npu_sparse_flash_mla_grad "
                 "npu_sparse_lightning_indexer_grad_kl_loss npu_sparse_lightning_indexer_kl_loss_grad"},
}


def homes() -> dict[str, dict[str, tuple[str, str]]]:
    """Of each module of hyper_parallel, by its path below the package, which name is what: `(our module, name there)`.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel.names import homes
        >>> homes()["core.shard.sharding_plan"]
        {'ShardingPlan': ('ms_dtensor.compat.hyper_parallel', 'ShardingPlan')}
    """
    out: dict[str, dict[str, tuple[str, str]]] = {}
    for module, names in OFFERED.items():
        rows = out[module] = {}
        for name in names.split():
            name, _, home = name.partition("=")
            place, _, other = home.partition(":")
            rows[name] = (place or _HERE, other or name)
    return out


def not_offered() -> dict[str, dict[str, str]]:
    """Of each module what is not offered, and what to use instead.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel.names import not_offered
        >>> not_offered()["platform.mindspore.pipeline_parallel._utils"]
        {'_MicroBatch': 'a new schedule of as many micro-batches: Schedule1F1B(stage, n)'}
    """
    return {module: {name: instead for instead, names in rows.items() for name in names.split()}
            for module, rows in MISSING.items()}
