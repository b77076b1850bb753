# SPDX-License-Identifier: Apache-2.0
"""MindSpore's checkpoint files hold whole values: written once for a mesh, cut again where they are loaded.

`ms.save_checkpoint` of a net, optimizer, list or dict with DTensors gathers each of them on all ranks of the mesh; the
mesh's first rank writes what one device would write, and the others wait for it. `ms.load_param_into_net` and
`Cell.load_state_dict` give each rank its shard of the values that it has read; nothing is communicated. Patched are the
functions inside MindSpore that every entry uses, `ModelCheckpoint` among them. Invariant: no file holds a shard, and no
shard is loaded for the whole.
"""
from __future__ import annotations

import functools
import os
import threading
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.train import serialization

from ...comm.pretended import needs_data
from ...errors import ConfigError, LayoutError, MixedOperandError
from ..operands import local_alias, redistribute

_ELSEWHERE = "__ms_dtensor_written_by_another_rank__"  # the only entry of what a rank that does not write would write
_saving = threading.local()  # .mesh: (process, mesh) of the save under way in this thread
_pieces = False  # see `take_pieces`


def take_pieces(on: bool) -> None:
    """Whether `load_param_into_net` takes a plain value of a shard's shape for this rank's shard, as in hyper_parallel.

    Its programs read pieces of files by layouts and load them so. Elsewhere such a value is refused: a shape does not say
    which piece it is.
    """
    global _pieces
    _pieces = on


def _whole(param, writes: bool):
    """All of a parameter; only the writer keeps it."""
    layout = param._layout
    whole = local_alias(redistribute(param, layout.replicated(), implicit="save_checkpoint"))
    return whole if writes else None


def _to_list(original):
    @functools.wraps(original)
    def convert(save_obj, integrated_save, append_dict, choice_func):
        _saving.mesh = None
        held: Any = save_obj.get_parameters() if isinstance(save_obj, nn.Cell) else (
            save_obj.values() if isinstance(save_obj, dict) else
            [item.get("data") if isinstance(item, dict) else item for item in save_obj])
        found: list[Any] = [p for p in held if getattr(p, "_layout", None) is not None]
        if not found:
            return original(save_obj, integrated_save, append_dict, choice_func)
        needs_data("save_checkpoint")
        for p in found:
            if p._layout.mesh.get_coordinate() is None:
                raise LayoutError("For 'save_checkpoint', this rank is not part of the mesh.", p._layout.describe(),
                                  "The mesh's ranks put the values together.", "save on the mesh's ranks only")
        mesh = max((p._layout.mesh for p in found), key=lambda mesh: mesh.size())
        writes = mesh.get_rank() == mesh.rank_list[0]
        if isinstance(save_obj, nn.Cell):
            named = serialization._convert_cell_param_and_names_to_dict(save_obj, choice_func, False)
            items = [{"name": name, "data": p} for name, p in named.items()]
        else:
            items = original(save_obj, integrated_save, append_dict, choice_func)
        items = [{"name": item["name"], "data": _whole(item["data"], writes)}
                 if getattr(item["data"], "_layout", None) is not None else item for item in items]
        _saving.mesh = os.getpid(), mesh
        return items if writes else [{"name": _ELSEWHERE, "data": ""}]
    return convert


def _write(original):
    @functools.wraps(original)
    def write(ckpt_file_name, data_list, *args, **kwargs):
        saving: Any = getattr(_saving, "mesh", None) or (None, None)
        process, mesh = saving
        _saving.mesh = None
        error: Exception | None = None
        try:
            if _ELSEWHERE not in data_list:
                original(ckpt_file_name, data_list, *args, **kwargs)
        except Exception as e:
            error = e
        if process == os.getpid():  # not where a thread or a process writes behind the program
            told = [t for t in mesh.get_group().all_gather_object(error and f"{type(error).__name__}: {error}") if t]
            if told and error is None:
                raise ConfigError(f"For 'save_checkpoint', '{ckpt_file_name}' was not written: {told[0]}.",
                                  f"mesh({mesh.describe()})", "The first rank of the mesh writes for all.",
                                  "see its log")
        if error is not None:
            raise error
    return write


def _load(param, value) -> None:
    """The values of all of a parameter, a DTensor or whole on every rank, into this rank's shard."""
    if getattr(value, "_layout", None) is not None:
        param.set_data(value.astype(param.dtype))
        return
    array = value.asnumpy()
    shard = np.ascontiguousarray(param._layout.assemble(lambda box: array[tuple(slice(*extent) for extent in box)]))
    param.set_data(Tensor(shard, param.dtype))


def _update(original):
    @functools.wraps(original)
    def update(param, new_param, strict_load):
        own, value = getattr(param, "_layout", None), new_param.data
        given = getattr(value, "_layout", None)
        if own is None and given is not None:
            raise MixedOperandError(f"For 'load_param_into_net', parameter '{param.name}' is plain, its value a DTensor.",
                                    given.describe(), "The parameter would hold this rank's shard only.",
                                    ("distribute the net first", "load value.full_tensor()"))
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        piece = _pieces and own is not None and given is None and shape == own.local_shape() != own.shape
        same = piece or own is not None and shape == own.shape
        if not same or value.dtype != param.dtype and not serialization._type_convert(param, new_param, strict_load):
            return original(param, new_param, strict_load)
        return param.set_data(Tensor(value.asnumpy(), param.dtype)) if piece else _load(param, value)
    return update


def _load_state(original):
    @functools.wraps(original)
    def load(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        given = {name: state_dict.get(prefix + name) for name, p in self._params.items() if getattr(p, "_layout", None)}
        ours = {name: value for name, value in given.items()
                if isinstance(value, Tensor) and tuple(value.shape) == self._params[name].shape}
        for name, value in ours.items():
            _load(self._params[name], value)
        everything = self._params
        self.__dict__["_params"] = {name: p for name, p in everything.items() if name not in ours}
        try:
            original(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        finally:
            self.__dict__["_params"] = everything
        unexpected_keys[:] = [key for key in unexpected_keys if key not in {prefix + name for name in ours}]
    return load


DOORS = ((serialization, "_convert_save_obj_to_param_list", _to_list), (serialization, "_exec_save", _write),
         (serialization, "_update_param", _update), (nn.Cell, "_load_from_state_dict", _load_state))
