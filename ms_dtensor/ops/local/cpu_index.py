# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: joining, repeating, looking up, masking and filling."""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops

from ...errors import OpRuleError
from .dtypes import as_dtype, full
from .lists import stack
from .lookup import gather, host_values


def embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False):
    """`Embedding`; the row `padding_idx` gets no gradient."""
    if max_norm is not None or scale_grad_by_freq:
        raise OpRuleError("For 'embedding', 'max_norm' and 'scale_grad_by_freq' are not supported on CPU.", "",
                          "They rewrite the table, or weigh gradients by counts over all ranks.", "leave them out")
    out = gather(weight, input, 0)
    if padding_idx is not None:
        pad = mint.reshape(input == padding_idx % weight._shape[0], (*input._shape, 1))
        out = mint.where(pad, ops.stop_gradient(out), out)
    return out


def repeat_interleave(input, repeats, dim=None, output_size=None):
    """`RepeatInterleaveInt`."""
    if dim is None:
        input, dim = mint.reshape(input, (-1,)), 0
    dim %= len(input._shape)
    shape = input._shape
    wide = mint.broadcast_to(mint.unsqueeze(input, dim + 1), (*shape[:dim + 1], repeats, *shape[dim + 1:]))
    return mint.reshape(wide, (*shape[:dim], shape[dim] * repeats, *shape[dim + 1:]))


def repeat(input, *repeats):
    """`Repeat`."""
    nested = len(repeats) == 1 and isinstance(repeats[0], tuple | list)
    return mint.tile(input, tuple(repeats[0] if nested else repeats))


def roll(input, shifts, dims=None):
    """`Roll`."""
    if dims is None or dims == () or dims == []:
        return mint.reshape(roll(mint.reshape(input, (-1,)), shifts, 0), input._shape)
    shifts = (shifts,) if isinstance(shifts, int) else shifts
    dims = (dims,) if isinstance(dims, int) else dims
    for shift, dim in zip(shifts, dims):
        n = input._shape[dim]
        shift = shift % n if n else 0
        if shift:
            input = mint.cat((mint.narrow(input, dim, n - shift, shift), mint.narrow(input, dim, 0, n - shift)), dim)
    return input * 1 if input.dtype != ms.bool_ else input


def masked_fill(input, mask, value):
    """`MaskedFill`, whose kernel takes a value of the input's own dtype only."""
    value = value.astype(input.dtype) if isinstance(value, Tensor) else Tensor(value, input.dtype)
    return ops.masked_fill(input, mask, value)


def scatter_add(input, dim, index, src):
    """`ScatterAddExt`."""
    if tuple(src._shape) != tuple(index._shape):
        for d, n in enumerate(index._shape):
            src = mint.narrow(src, d, 0, n)
    return ops.tensor_scatter_elements(input, index, src, dim, "add")


def pad(input, padding, value=0.0):
    """`ConstantPadND`: pairs (before, after) from the last dim on; a negative one cuts."""
    for i in range(0, len(padding), 2):
        dim = len(input._shape) - 1 - i // 2
        for amount, front in ((padding[i], True), (padding[i + 1], False)):
            n = input._shape[dim]
            if amount < 0:
                input = mint.narrow(input, dim, -amount if front else 0, n + amount)
            elif amount > 0:
                edge = full((*input._shape[:dim], amount, *input._shape[dim + 1:]), value, input.dtype)
                input = mint.cat((edge, input) if front else (input, edge), dim)
    return input


def filled(x, shape, value, dtype=None):
    """`value` everywhere; the local form of every creation op."""
    return full(shape, value, as_dtype(dtype) or x.dtype)


def _new(value):
    def call(input, size, dtype=None, device=None):
        return filled(input, (size,) if isinstance(size, int) else tuple(size), value, dtype)
    return call


def _like(value):
    def call(input, dtype=None, *_, **__):
        return filled(input, input._shape, value, dtype)
    return call


TABLE = {
    "StackExt": stack, "TrilExt": lambda input, diagonal=0: ops.tril(input, diagonal),
    "IndexSelect": lambda input, dim, index: gather(input, mint.reshape(index, (-1,)), dim), "Embedding": embedding,
    "RepeatInterleaveInt": repeat_interleave, "Repeat": repeat, "Roll": roll, "ScatterAddExt": scatter_add,
    "ConstantPadND": pad, "MaskedFill": masked_fill,
    "OneHotExt": lambda tensor, num_classes, on_value, off_value, axis=-1: ops.one_hot(
        tensor, int(host_values(tensor).max()) + 1 if num_classes == -1 else num_classes, on_value, off_value, axis),
    "FullLike": lambda input, fill_value, dtype=None, **_: filled(input, input._shape, fill_value, dtype),
    "ZerosLikeExt": _like(0), "OnesLikeExt": _like(1), "EmptyLike": _like(0),
    "NewZeros": _new(0), "NewOnes": _new(1), "NewEmpty": _new(0),
    "NewFull": lambda input, size, fill_value, dtype=None: _new(fill_value)(input, size, dtype),
}
FORMS = {"filled": filled}
