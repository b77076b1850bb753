# SPDX-License-Identifier: Apache-2.0
"""Op rules: pure functions from a call to its legal single-axis cases. Table of contents of the package.

`spec.py` says what a rule is, `select.py` how one case per axis is chosen, `names.py` how MindSpore's primitive names
map to canonical ops; the families are in `pointwise`, `matmul`, `reduce`, `view` and `index`. `RULES` maps a canonical
op to its rule; an op that is not in it is refused, never guessed.
"""
from __future__ import annotations

from collections.abc import Callable

from . import (
    arrange,
    attention,
    conv,
    create,
    elementwise,
    fft,
    index,
    linalg,
    lists,
    loss,
    matmul,
    moe,
    names,
    norm,
    pointwise,
    pool,
    random,
    reduce,
    rotary,
    scatter,
    statistics,
    view,
    write,
)
from .nothing import has_empty_shard, has_thin_shard, local_part, results_of_nothing
from .spec import Call, Case, Local, LocalCall, Operand, OpSpec, Unfit, Winners, result_dtype

RULES: dict[str, Callable[[Call], OpSpec]] = {op: pointwise.pointwise for op in names.POINTWISE}
RULES.update(
    cast=pointwise.cast, where=pointwise.pointwise, masked_fill=pointwise.masked_fill, clamp=pointwise.pointwise,
    lerp=pointwise.pointwise, leaky_relu=pointwise.pointwise, elu=pointwise.pointwise, gelu=pointwise.pointwise,
    matmul=matmul.matmul, outer=matmul.outer, linear=matmul.linear, bias_add=matmul.bias_add,
    softmax=reduce.softmax,
    reshape=view.reshape, view_as=view.view_as, flatten=view.flatten, flatten_primitive=view.flatten_primitive,
    permute=view.permute, swap=view.swap, matrix_transpose=view.matrix_transpose, unsqueeze=view.unsqueeze,
    squeeze=view.squeeze, expand=view.expand, tile=view.tile, split=view.split, chunk=view.chunk,
    split_equal=view.split_equal, unbind=view.unbind, cat=view.cat, stack=view.stack,
    slice=index.slices, strided_slice=index.strided_slice, narrow=index.narrow, select=index.select,
    gather=index.gather, take_along=index.take_along, embedding=index.embedding,
    tril=index.triangle, triu=index.triangle,
)
RULES.update({op: reduce.reduction for op in ("sum", "mean", "max", "min", "prod", "all")})

# Further families bring their own names and rules: `NAMES` in the notation of `names.parse`, `RULES` by canonical op.
FAMILIES: tuple = (arrange, index, scatter, random, create, lists, matmul, write, conv,
                   elementwise, statistics, norm, loss, pool, attention, rotary, linalg, fft, moe)
CONSTANTS: dict[str, Callable[[dict], tuple[str, ...]]] = {}  # arguments that may be plain tensors, by canonical op
for family in FAMILIES:
    CONSTANTS.update(getattr(family, "CONSTANTS", {}))
    names.PRIMITIVES.update(names.parse(family.NAMES))
    RULES.update(family.RULES)

__all__ = ["CONSTANTS", "RULES", "Call", "Case", "LocalCall", "Local", "Operand", "OpSpec", "Unfit", "Winners",
           "has_empty_shard", "has_thin_shard", "local_part", "result_dtype", "results_of_nothing"]
