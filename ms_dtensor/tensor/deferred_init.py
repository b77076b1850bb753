# SPDX-License-Identifier: Apache-2.0
"""Deferred parameters (`mindspore.nn.utils.no_init_parameters`): each rank keeps its shard, with the eager values.

MindSpore's initialisers draw one seed each from NumPy's global generator, in the order in which parameters are made. So
what an eager model would have held is known from the generator's state at that moment: `remember` walks a model in that
order, notes the state for each deferred parameter and lets the generator go on as if it had been drawn from. Whatever
the plan, the mesh, or the order in which cells are cut, a parameter then gets the values it would have had on one device,
bit for bit. Rank 0's state is sent to all (`src_data_rank=0`), 2.5 KB for the whole model where its values would be sent.
The order is a cell's own parameters first, then its sub-cells: MindSpore keeps no other. Where a cell makes parameters
of its own after its sub-cells, the values are as random as ever and the same on every mesh, but in another order than eager.

MindSpore's C++ generators start at the first element, so a random parameter is drawn whole, one at a time, and cut; only
its shard is kept. Constant ones are made as shards. `ms_dtensor.init` draws shards only, from a stream of its own.
"""
from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import initializer as ms_init

from ..comm.pretended import executing, keeps_values
from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..dispatch.operands import local_alias
from ..internals.target import is_meta
from ..redistribute.execute import cut_whole

_STATE = "_ms_dtensor_random_state"  # Parameter attribute: NumPy's generator just before its eager initialisation
_ONE_DRAW = (ms_init.Normal, ms_init.Uniform, ms_init.TruncatedNormal, ms_init.XavierNormal, ms_init.XavierUniform,
             ms_init.HeNormal, ms_init.HeUniform)
_CONSTANT = (ms_init.Zero, ms_init.One, ms_init.Constant)


def is_deferred(x) -> bool:
    """Whether `x` is a parameter whose values have not been made yet, and will be by its initialiser."""
    return isinstance(x, Parameter) and bool(getattr(x, "has_init", False)) and not is_meta(x)


def remember(module: nn.Cell, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Notes for each deferred parameter of a model what its eager initialisation would draw from.

    Communicates once (the generator's state of `src_data_rank`) if there are such parameters; they are on all ranks or
    on none. Whoever lays a model out begins here, so a dry run refuses one of the user's here.
    """
    keeps_values(p for _, p in module.parameters_and_names())
    found = [p for _, p in module.parameters_and_names() if is_deferred(p) and _STATE not in p.__dict__]
    if not found:
        return
    own = np.random.get_state()
    source = _agreed(own, mesh, src_data_rank)
    for p in found:  # this rank's generator goes on as it would have
        _draw(p)
    after = np.random.get_state()
    np.random.set_state(source)
    for p in found:
        p.__dict__[_STATE] = np.random.get_state()
        _draw(p)
    np.random.set_state(after)


def materialise(param: Parameter, layout: Layout, src_data_rank: int | None) -> Tensor:
    """This rank's shard of a deferred parameter."""
    dry = executing()
    if dry is not None:
        return dry.ledger.new(layout.local_shape(), param.dtype, "parameters")
    init, dtype = param.init_mode.init, param.dtype
    state = param.__dict__.pop(_STATE, None)
    if state is None:  # it was given alone
        state = _agreed(np.random.get_state(), layout.mesh, src_data_rank)
        _draw(param)
    if isinstance(init, _CONSTANT) and all(layout.local_shape()):
        return ms_init.initializer(init, layout.local_shape(), dtype).init_data()
    after = np.random.get_state()
    np.random.set_state(state)
    try:
        whole = ms_init.initializer(init, layout.shape, dtype).init_data()
    finally:
        np.random.set_state(after)
    local = cut_whole(local_alias(whole), layout)
    return Tensor(local.asnumpy().copy()) if local.size and local.size < whole.size else local


def _draw(param: Parameter) -> None:
    """Lets NumPy's generator go on as this parameter's initialisation would."""
    init = param.init_mode.init
    if isinstance(init, _ONE_DRAW):
        np.random.randint(low=1, high=1 << 63, dtype=np.int64)  # as mindspore.common.initializer draws its seed
    elif not isinstance(init, _CONSTANT):  # how much it draws is its own affair
        ms_init.initializer(init, tuple(param.shape), param.dtype).init_data()


def _agreed(state: Any, mesh: DeviceMesh, src_data_rank: int | None) -> tuple:
    """The generator's state of a coordinate of the mesh, or this rank's own."""
    if src_data_rank is None or mesh.size() == 1 or mesh.get_coordinate() is None:
        return state
    kind, words, at, has_gauss, gauss = state
    packed = np.concatenate([words.astype(np.uint32), np.array([at, has_gauss], np.uint32),
                             np.array([gauss], np.float64).view(np.uint32)]).view(np.int32)
    group = mesh.get_group()
    got = group.broadcast(Tensor(packed), group.ranks[src_data_rank]).asnumpy().view(np.uint32)
    return kind, got[:-4].copy(), int(got[-4]), int(got[-3]), float(got[-2:].copy().view(np.float64)[0])
