# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: parameters keep their dtype, the computation sees copies in a shorter one.

The copies stand in the place of a cell's own parameters while its `construct` runs, and nowhere else: optimizers,
checkpoints and `trainable_params()` meet the parameters themselves, whose gradients have their dtype. The invariant: what
several ranks hold summands of is added up in `reduce_dtype`, on every axis. Not here: master weights of parameters that are
short themselves, which `optim.AdamW` keeps.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, nn

from ..comm.packing import write
from ..core.tree import map_leaves
from ..dispatch.inplace import written_since
from ..dispatch.operands import compute_copy, local_alias
from ..dispatch.replaced import current
from ..errors import ConfigError
from ..tensor.dtensor import DTensor
from .layouts import around_construct

_POLICY = "_ms_dtensor_precision"  # cell attribute: the policy under which its `construct` runs
# of MindSpore's batch norms, which add to them in every forward; of routers, which `update_expert_bias` moves by steps that
# are too small for 16 bits
_STATISTICS = ("moving_mean", "moving_variance", "expert_bias")


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """In which dtypes a cell computes, reduces gradients and answers; names and meanings are PyTorch's.

    Args:
        param_dtype: of the parameters as the computation sees them; None: their own.
        reduce_dtype: in which gradients are added up over ranks; None: the dtype of the computation.
        output_dtype: of the floating-point outputs of the cell the policy is applied to; None: as they come.
        cast_forward_inputs: whether that cell's floating-point inputs are cast to `param_dtype`.
        apply_grad_on_fp32_main_grad: under `fully_shard` and `replicate`, gradients that were added up over ranks are added
            to `parameter.main_grad`, a DTensor in float32, at every backward until it is set to None (`zero_grad()`); what
            a gradient function hands out are zeros, and `.grad` stays as it is. The name is hyper_parallel's.

    With float32 parameters, `MixedPrecisionPolicy(mindspore.bfloat16, mindspore.float32)` is training in bfloat16 with
    float32 master weights. `replicate(cell, mesh=mesh, mp_policy=policy)` applies it, or `apply` by itself: to a plain cell,
    or to one that `parallelize_module` has laid out. MindSpore's CPU kernels hardly know bfloat16 on plain tensors;
    DTensors, of a mesh of one rank too, do.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> policy = md.MixedPrecisionPolicy(ms.bfloat16, ms.float32)
        >>> net = md.replicate(nn.Dense(4, 2), mesh=mesh, mp_policy=policy)
        >>> net(ms.ops.ones((3, 4))).dtype, net.weight.dtype
        (mindspore.bfloat16, mindspore.float32)
    """

    param_dtype: ms.dtype.TensorType | None = None
    reduce_dtype: ms.dtype.TensorType | None = None
    output_dtype: ms.dtype.TensorType | None = None
    cast_forward_inputs: bool = True
    apply_grad_on_fp32_main_grad: bool = False

    def __post_init__(self):
        for what in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, what)
            if dtype not in (None, ms.float16, ms.bfloat16, ms.float32, ms.float64):
                raise ConfigError(f"For 'MixedPrecisionPolicy', '{what}' = {dtype!r} is no floating-point dtype.", "",
                                  "mindspore.float16, bfloat16, float32 or float64; or None.", "mindspore.bfloat16")

    def apply(self, module: nn.Cell) -> nn.Cell:
        """Lets a cell and its sub-cells compute under this policy, in place.

        Raises:
            ConfigError: a cell inside has another policy already.
        """
        if self.apply_grad_on_fp32_main_grad:
            raise ConfigError("For 'MixedPrecisionPolicy', 'apply_grad_on_fp32_main_grad' needs data parallelism.",
                              type(module).__name__, "`main_grad` is what ranks have added up.",
                              ("fully_shard(cell, mesh=mesh, mp_policy=...)", "replicate(cell, mesh=mesh, mp_policy=...)"))
        for name, cell in module.cells_and_names():
            of_unit = getattr(cell.__dict__.get("_ms_dtensor_unit"), "policy", MixedPrecisionPolicy())
            for given in (cell.__dict__.get(_POLICY, self), self if of_unit.param_dtype is None else of_unit):
                if given != self:
                    raise ConfigError(f"For 'MixedPrecisionPolicy', the cell '{name}' has a policy already.", f"{given}",
                                      "A parameter is computed with in one dtype.", "apply one policy")
        for _, cell in module.cells_and_names() if self.param_dtype is not None or self.reduce_dtype is not None else ():
            if any(map(_is_float, cell._params.values())) and _POLICY not in cell.__dict__:
                around_construct(cell, _with_copies)
                cell.__dict__[_POLICY] = self
        if self.cast_forward_inputs and self.param_dtype is not None:
            module.register_forward_pre_hook(lambda cell, args, kwargs: self.cast_inputs(args, kwargs), with_kwargs=True)
        if self.output_dtype is not None:
            module.register_forward_hook(lambda cell, args, output: self.cast_output(output))
        return module

    def cast_inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """What a cell is called with, as it computes with it."""
        return _cast((args, kwargs), self.param_dtype if self.cast_forward_inputs else None)

    def cast_output(self, output):
        """What a cell returns, as its caller gets it."""
        return _cast(output, self.output_dtype)

    def compute_dtype(self, param) -> ms.dtype.TensorType:
        """Of a parameter as the computation sees it; running statistics keep theirs, as the buffers they are in PyTorch."""
        statistic = not param.requires_grad and param.name.rpartition(".")[2] in _STATISTICS
        return param.dtype if self.param_dtype is None or statistic or not param.is_floating_point() else self.param_dtype

    def changes(self, param) -> bool:
        """Whether a copy of the parameter is computed with."""
        dtype = self.compute_dtype(param)
        return param.is_floating_point() and not dtype == (self.reduce_dtype or dtype) == param.dtype

    def copy_of(self, param):
        """A parameter as the computation sees it."""
        dtype = self.compute_dtype(param)
        if isinstance(param, DTensor):
            return compute_copy(param, dtype, self.reduce_dtype or dtype) if self.changes(param) else param
        return param if dtype == param.dtype else param.astype(dtype)


def _is_float(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _cast(value, dtype):
    if dtype is None:
        return value
    return map_leaves(lambda x: x.astype(dtype) if _is_float(x) and x.dtype != dtype else x, value, Tensor)


def _with_copies(given: Callable) -> Callable:
    """Inside, a cell finds copies in the place of its parameters."""
    @functools.wraps(given)
    def construct(cell, *args, **kwargs):
        params = {key: current(p) for key, p in cell._params.items() if _is_float(p)}
        copies = {key: cell.__dict__[_POLICY].copy_of(p) for key, p in params.items()}
        versions = {key: copy._version for key, copy in copies.items()}
        cell.__dict__.update(copies)
        try:
            out = given(cell, *args, **kwargs)
        finally:
            for key in copies:
                cell.__dict__.pop(key, None)
        for key, copy in copies.items():
            if copy is not params[key] and written_since(copy, versions[key]):  # it is the parameter's
                write(local_alias(params[key]), local_alias(copy))
        return out
    return construct
