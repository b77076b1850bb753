# SPDX-License-Identifier: Apache-2.0
"""The norm of all gradients together, as one device would compute it, and clipping by it.

The one invariant: every element of every global gradient counts once. Local sums are reduced over exactly the axes
that shard a gradient; over the axes that replicate it the ranks hold the same numbers and nothing is summed. All
gradients sharded by the same axes travel in one number, all numbers of one axis in one all-reduce. On devices numbers and
norm stay there: the host waits for nothing.
"""
from __future__ import annotations

import math
from collections.abc import Iterable

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ..comm.pretended import executing
from ..core.mesh import DeviceMesh
from ..errors import ConfigError, LayoutError
from ..internals.host import host_array
from ..internals.names import NoFallbackGuard
from ..internals.target import on_cpu
from .arrays import CHUNK, layout_of, local_array

STAGE = "_ms_dtensor_stage"  # attribute of a pipeline's parameter: whether it counts here; of a tied one, on one rank


def clip_grad_norm_(parameters_or_grads: Iterable, max_norm: float, norm_type: float = 2.0, *,
                    over: DeviceMesh | None = None) -> float | Tensor:
    """Scales gradients in place so that their joint norm is at most `max_norm`; returns the norm from before.

    Args:
        parameters_or_grads: gradients (DTensors of any mix of layouts and meshes, or plain tensors of which every
            rank has the whole), or pairs `(parameter, gradient)` whose gradient may be the local tensor that
            `mindspore.value_and_grad` returns: its layout is the parameter's. None gradients are skipped.
        max_norm: the bound; `math.inf` only measures.
        norm_type: p of the p-norm, greater than 0; `math.inf` for the largest |g|, `-math.inf` for the smallest.
        over: the axis over which the stages of a pipeline are dealt, `mesh["pp"]`: the norm is that of all stages. Every
            rank of it calls, also one whose stage has no parameters; a tied one counts once.

    The same number on every rank: a float on CPU, elsewhere a tensor of no dims, whose `float()` waits for the device.
    It is not a number where an element is not. On CPU sums are taken in float64, elsewhere in float32, so there the norm
    of elements above 1e19 is infinite.
    Communicates: one all-reduce of a few numbers per mesh axis that shards a gradient, and one of a number for `over`.

    Raises:
        ConfigError: parameters of a pipeline's stage without `over`: it would be one stage's norm.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> from ms_dtensor.optim import clip_grad_norm_
        >>> clip_grad_norm_([md.full((4,), 3.0, device_mesh=mesh, placements=[md.Shard(0)])], 1.0)
        6.0
    """
    if not norm_type > 0 and norm_type != -math.inf:
        raise ValueError(f"For 'clip_grad_norm_', 'norm_type' = {norm_type} is out of range: greater than 0, or -inf.")
    entries = list(parameters_or_grads)
    found = [(*_with_layout(entry), _counts(entry, over)) for entry in entries]
    grads = [(grad, layout) for grad, layout, _ in found if grad is not None]
    stages = None if over is None or over.size() == 1 else over.get_group()
    parts: dict[tuple, list] = {}  # (mesh, axes that shard) -> the gradients' sums over this rank's elements
    for grad, layout, counts in found:
        if grad is None or not counts:
            continue
        key: tuple = (None, ())
        if layout is not None:
            if any(p.is_partial() for p in layout.placements):
                grad = _reduced(grad)
                layout = layout_of(grad)
            key = (layout.mesh, tuple(axis for axis, p in enumerate(layout.placements)
                                      if p.is_shard() and layout.mesh.shape[axis] > 1))
        parts.setdefault(key, []).append((_measure if on_cpu() else _measure_there)(grad, norm_type))
    if (parts or stages) and not on_cpu():
        with NoFallbackGuard():
            return _clip_there([grad for grad, _ in grads], parts, max_norm, norm_type, stages)
    sums = {key: _join(norm_type, values) for key, values in parts.items()}
    total = _join(norm_type, _over_ranks(sums, norm_type))
    if stages is not None:
        number = Tensor(np.array([total], np.float64))
        total = float(stages.all_reduce(number, "max" if math.isinf(norm_type) else "sum").asnumpy()[0])
    if (dry := executing()) is not None:
        dry.clipped([grad for grad, _ in grads])
        return math.nan
    norm = abs(total) if math.isinf(norm_type) else total ** (1.0 / norm_type)
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0:
        _scale([grad for grad, _ in grads], factor)
    return norm


def _with_layout(entry):
    if isinstance(entry, (tuple, list)):
        param, grad = entry
        own = layout_of(grad)
        return grad, own if own is not None else layout_of(param)
    return entry, layout_of(entry)


def _counts(entry, over: DeviceMesh | None) -> bool:
    """Whether a gradient is a part of the norm: of a parameter that several stages have one is."""
    mark = entry[0].__dict__.get(STAGE) if isinstance(entry, (tuple, list)) else None
    if mark is not None and over is None:
        raise ConfigError("For 'clip_grad_norm_', the parameters are those of one stage of a pipeline.", entry[0].name,
                          "The norm is of all parameters, and other ranks have the others.",
                          'clip_grad_norm_(zip(schedule.params, grads), max_norm, over=mesh["pp"])')
    return mark is not False


def _reduced(grad):
    if layout_of(grad) is None:
        raise LayoutError("For 'clip_grad_norm_', a parameter's layout is Partial but its gradient is a local tensor.",
                          "", "A local tensor cannot be reduced without its layout.", "pass the gradient as a DTensor")
    return grad.reduce_partial()


def _join(norm_type: float, values: list[float]) -> float:
    return float(np.max(values, initial=0.0 if norm_type > 0 else -math.inf)) if math.isinf(norm_type) else math.fsum(values)


def _measure(grad, p: float) -> float:
    """Sum of |g|^p over this rank's elements, in double precision between chunks; the largest of |g|, or of -|g|."""
    if executing() is not None:
        return math.nan
    flat, out = local_array(grad), 0.0 if p > 0 else -math.inf
    for lo in range(0, flat.size, CHUNK):
        part = flat[lo:lo + CHUNK]
        if part.dtype not in (np.float32, np.float64):
            part = part.astype(np.float32)
        if math.isinf(p):
            out = float(np.maximum(out, (np.abs(part) if p > 0 else -np.abs(part)).max()))  # of a NaN NaN; `max` drops it
        elif p == 2.0:
            square = float(np.dot(part, part))
            out += square if square < math.inf else float(np.square(part, dtype=np.float64).sum())  # float32 ends at 3e38
        else:
            out += float((np.abs(part).astype(np.float64) ** p).sum())
    return out


def _over_ranks(parts: dict, norm_type: float) -> list[float]:
    """The sums over all ranks; per mesh axis one all-reduce of the sums that the axis shards."""
    op = "max" if math.isinf(norm_type) else "sum"
    meshes = list(dict.fromkeys(mesh for mesh, _ in parts))
    for mesh in meshes:
        for axis in range(mesh.ndim) if mesh is not None else ():
            keys = [k for k in parts if k[0] == mesh and axis in k[1]]
            if not keys:
                continue
            numbers = Tensor(np.array([parts[k] for k in keys], np.float64))
            result = mesh.get_group(axis).all_reduce(numbers, op)
            for key, value in zip(keys, (numbers if result is None else result).asnumpy().tolist(), strict=True):
                parts[key] = value
    return list(parts.values())


def _scale(grads: list, factor: float) -> None:
    seen = set()  # gradients of two parameters may be one tensor
    for grad in grads:
        with NoFallbackGuard():
            where = Tensor.data_ptr(grad)
            empty = Tensor.numel(grad) == 0
        if empty or where in seen:
            continue
        seen.add(where)
        array = host_array(grad, gaps=True)
        np.multiply(array, factor, out=array, casting="unsafe")


def _measure_there(grad, p: float) -> Tensor:
    """`_measure` as a tensor [1] on the device, in float32; of extremes [2], whether an element is no number beside it."""
    with NoFallbackGuard():
        if not Tensor.numel(grad) or executing() is not None:
            return Tensor([-math.inf if p < 0 else 0.0] + [0.0] * math.isinf(p), ms.float32)
        g = ops.abs(grad.astype(ms.float32))
        if not math.isinf(p):
            return mint.reshape((g * g if p == 2.0 else g ** p).sum(), (1,))
        nan = g != g  # noqa: PLR0124  what `max` makes of one differs between devices
        g = mint.where(nan, ms.Tensor(0.0, ms.float32), g if p > 0 else -g)
        return mint.cat([mint.reshape(g.max(), (1,)), mint.reshape(nan.astype(ms.float32).max(), (1,))])


def _clip_there(grads: list, parts: dict, max_norm: float, p: float, stages=None) -> Tensor:
    """The norm as a tensor, of which the device itself makes the factor."""
    extreme = math.isinf(p)
    width = 1 + extreme

    def joined(values):
        values = mint.reshape(values, (-1, width))
        return values.max(0)[0] if extreme else values.sum(0)
    sums = {key: joined(mint.cat(values)) for key, values in parts.items()}
    for mesh, axis in dict.fromkeys((mesh, axis) for mesh, axes in sums for axis in axes):
        keys = [key for key in sums if key[0] == mesh and axis in key[1]]
        result = mesh.get_group(axis).all_reduce(mint.cat([sums[key] for key in keys]), "max" if extreme else "sum")
        sums.update((key, mint.narrow(result, 0, i * width, width)) for i, key in enumerate(keys))
    values = list(sums.values()) or [Tensor([-math.inf if p < 0 else 0.0] + [0.0] * extreme, ms.float32)]  # of no parameters
    total = joined(mint.cat(values))
    if stages is not None:
        total = stages.all_reduce(total, "max" if extreme else "sum")
    norm = mint.reshape(mint.narrow(total, 0, 0, 1), ())
    norm = ops.abs(norm) + 0.0 / (1.0 - mint.reshape(mint.narrow(total, 0, 1, 1), ())) if extreme else norm ** (1.0 / p)
    if max_norm != math.inf:
        _scale_there(grads, mint.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _scale_there(grads: list, factor: Tensor) -> None:
    """In place, each storage once: gradients of two parameters may be one, and a write to one counts as one to both.

    The address would tell, too, but it waits for the device.
    """
    places: dict[tuple, list] = {}
    for grad in grads if executing() is None else ():
        if Tensor.numel(grad):
            places.setdefault((Tensor.storage_offset(grad), grad._shape), []).append(grad)
    for alike in places.values():
        while alike:
            grad, *others = alike
            versions = [other._version for other in others]
            Tensor.mul_(grad, factor)
            alike = [other for other, version in zip(others, versions) if other is not grad and other._version == version]
