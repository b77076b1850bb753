# SPDX-License-Identifier: Apache-2.0
"""MindSpore's collectives over our groups: `mint.distributed` and `mindspore.ops.communication` on shared memory.

MindSpore's own CPU backend has no reduce-scatter and no all-to-all, and no subgroups for most. While this is on, the
primitives below its two modules of collectives run on `Group`, so that MindSpore's functions, with their checks and whatever
is made of them, gathers of objects too, are compared between ranks and recorded as ours are. They are replaced where the
functions look them up, so a function that was imported before is served as well. Functions that return their result have a
gradient; those that write into a tensor have none, as in MindSpore. Read next: `local_autograd.py`.
"""
from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor

from ..errors import CommError, ConfigError
from ..internals.target import on_cpu
from ..internals.undo import Patched
from . import world
from .group import Group
from .local_autograd import AllGather, AllReduce, AllToAll, ReduceScatter, even
from .packing import write

_MODULES = ("mindspore.mint.distributed.distributed", "mindspore.ops.function.comm_func",
            "mindspore.communication.management", "mindspore.communication")
_ISEND = 0  # as MindSpore's `batch_isend_irecv` numbers its kinds


class _Handle:
    """What is waited for, of a call that was made when it was asked for."""

    def wait(self) -> None:
        pass


class _Later(_Handle):
    """A message that goes, or comes, when one of those that wait with it is waited for."""

    def __init__(self, group: Group, send: tuple[int, Tensor] | None, recv: tuple[int, Tensor] | None):
        self.group, self.send, self.recv = group, send, recv
        _waiting.append(self)

    def wait(self) -> None:
        if self in _waiting:
            _meet(self.group)


_waiting: list[_Later] = []  # in the order in which they were asked for


def _meet(group: Group) -> None:
    """All messages of a group that wait, in one exchange, so that no order of them can deadlock."""
    mine = [m for m in _waiting if m.group.ranks == group.ranks]
    _waiting[:] = [m for m in _waiting if m not in mine]
    into = [m.recv for m in mine if m.recv is not None]
    got = group.exchange([m.send for m in mine if m.send is not None],
                         [(src, tuple(x.shape), x.dtype) for src, x in into])
    for (_, x), y in zip(into, got, strict=True):
        write(x, y)


def _plain(op: str, *tensors: Any) -> None:
    for x in tensors:
        if getattr(x, "_layout", None) is not None:
            raise CommError(f"For '{op}', a DTensor was given to MindSpore's collective.", x._layout.describe(),
                            "It would move this rank's shard, and the layout would not know.",
                            ("x.redistribute(...)", "x.to_local()"))


def _group(op: str, name: Any, *tensors: Any) -> Group:
    _plain(op, *tensors)
    return world.of_name(name or None)


def _into(op: str, out: Tensor, got: Tensor) -> tuple[Tensor, _Handle]:
    if tuple(out.shape) != tuple(got.shape) and out.size != got.size or out.dtype != got.dtype:
        raise CommError(f"For '{op}', the output does not fit.", f"{out.dtype}{list(out.shape)}, and "
                        f"{got.dtype}{list(got.shape)} comes", "It has as many elements, of the same dtype.",
                        "mint.empty of that shape")
    write(out, got if tuple(out.shape) == tuple(got.shape) else got.reshape(tuple(out.shape)))
    return out, _Handle()


def _rows(x: Tensor) -> Tensor:
    return x if x.shape else x.reshape((1,))


def _sizes(op: str, given: Sequence[int], x: Tensor, group: Group) -> list[int]:
    return list(given) if given else even(op, x, group)


# -- primitives that write into a tensor ---------------------------------------------------------------------------------


def _all_reduce(x, op, group, async_op):
    return _into("all_reduce", x, _group("all_reduce", group, x).all_reduce(x, op))


def _all_gather_into(out, x, size, group, async_op):
    g = _group("all_gather_into_tensor", group, out, x)
    return _into("all_gather_into_tensor", out, g.all_gather(_rows(x), 0, [_rows(x).shape[0]] * g.size))


def _all_gather_uneven(out, x, sizes, size, group, async_op):
    g = _group("all_gather_into_tensor_uneven", group, out, x)
    return _into("all_gather_into_tensor_uneven", out, g.all_gather(x, 0, _sizes("all_gather", sizes, out, g)))


def _reduce_scatter_tensor(out, x, size, op, group, async_op):
    g = _group("reduce_scatter_tensor", group, out, x)
    return _into("reduce_scatter_tensor", out, g.reduce_scatter(x, op, 0, even("reduce_scatter_tensor", x, g)))


def _reduce_scatter_uneven(out, x, sizes, size, op, group, async_op):
    g = _group("reduce_scatter_tensor_uneven", group, out, x)
    return _into("reduce_scatter_tensor_uneven", out, g.reduce_scatter(x, op, 0, _sizes("reduce_scatter", sizes, x, g)))


def _reduce(x, op, dst, group, async_op):
    g = _group("reduce", group, x)
    got = g.all_reduce(x, op)
    return _into("reduce", x, got) if g.backend.rank == dst else (x, _Handle())


def _broadcast(x, src, rank, group, async_op):
    g = _group("broadcast", group, x)
    return _into("broadcast", x, g.broadcast(x, g.ranks[src]))


def _barrier(group, async_op):
    _group("barrier", group).barrier()
    return Tensor(0.0), _Handle()


def _scatter_tensor(out, x, size, src, rank, group, async_op):
    g, rows = _group("scatter_tensor", group, out, x), _rows(out).shape[0]
    shape = (rows * g.size, *out.shape[1:])
    own = x if g.rank_index == src else None
    return _into("scatter_tensor", out, g.scatter(own, 0, [rows] * g.size, g.ranks[src], shape=shape, dtype=out.dtype))


def _gather_into(out, x, size, dst, rank, group, async_op):
    g = _group("gather_into_tensor", group, out, x)
    got = g.all_gather(_rows(x), 0, [_rows(x).shape[0]] * g.size)
    return _into("gather_into_tensor", out, got) if g.rank_index == dst else (x, _Handle())


def _all_gather(outs, x, size, group, async_op):
    g = _group("all_gather", group, x, *outs)
    flat = x.reshape((-1,))
    _cut("all_gather", outs, g.all_gather(flat, 0, [math.prod(o.shape) for o in outs]))
    return x, _Handle()


def _gather(x, outs, size, dst, rank, group, async_op):
    g = _group("gather", group, x)
    got = g.all_gather(x.reshape((-1,)), 0, [x.size] * g.size)
    if g.rank_index == dst:
        _cut("gather", outs, got)
    return x, _Handle()


def _reduce_scatter(out, parts, size, op, group, async_op):
    g = _group("reduce_scatter", group, out, *parts)
    flat = _joined(parts)
    return _into("reduce_scatter", out, g.reduce_scatter(flat, op, 0, [p.size for p in parts]))


def _scatter(out, parts, size, src, rank, group, async_op):
    g = _group("scatter", group, out, *parts)
    own = _joined(parts) if g.rank_index == src else None
    got = g.scatter(own, 0, [out.size] * g.size, g.ranks[src], shape=(out.size * g.size,), dtype=out.dtype)
    return _into("scatter", out, got)


def _all_to_all(outs, flat, group, send, recv, size, async_op):
    g = _group("all_to_all", group, flat, *outs)
    _cut("all_to_all", outs, g.all_to_all_rows(flat, list(send), list(recv)))
    return flat, _Handle()


def _all_to_all_single(out, flat, group, send, recv, size, empty, async_op):
    g = _group("all_to_all_single", group, out, flat)
    return _into("all_to_all_single", out, g.all_to_all_rows(flat, list(send), list(recv)))


def _isend(x, dst, group, tag):
    g = _group("isend", group, x)
    return x, _Later(g, (g.ranks[dst], x), None)


def _irecv(x, tag, src, group):
    g = _group("irecv", group, x)
    return x, _Later(g, None, (g.ranks[src], x))


def _batch(tensors, group, kinds, peers):
    g = _group("batch_isend_irecv", group, *tensors)
    for x, kind, peer in zip(tensors, kinds, peers, strict=True):
        _Later(g, *((g.ranks[peer], x), None) if kind == _ISEND else (None, (g.ranks[peer], x)))
    _meet(g)
    return tensors[0], _Handle()


def _irecv_new(tag, src, shape, group, dtype):
    return _irecv(ms.ops.zeros(tuple(shape), dtype), tag, src, group)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return ms.mint.cat([p.reshape((-1,)) for p in parts], 0)


def _cut(op: str, outs: Sequence[Tensor], flat: Tensor) -> None:
    at = 0
    for out in outs:
        _into(op, out, ms.mint.narrow(flat, 0, at, out.size) if out.size else flat[:0])
        at += out.size


# -- primitives that give their result, with a gradient ------------------------------------------------------------------


def _new_all_reduce(x, op, group, async_op):
    return AllReduce.apply(x, _group("all_reduce", group, x), op), _Handle()


def _new_all_gather(x, size, group, async_op):
    return AllGather.apply(_rows(x), _group("all_gather_into_tensor", group, x)), _Handle()


def _new_reduce_scatter(x, size, op, group, async_op):
    return ReduceScatter.apply(x, _group("reduce_scatter_tensor", group, x), op), _Handle()


def _new_all_to_all(flat, group, send, recv, size, empty, async_op):
    return AllToAll.apply(flat, _group("all_to_all", group, flat), list(send), list(recv)), _Handle()


def _not_there(*args, **kwargs):
    raise CommError("For 'all_to_all_v_c', there is no such call on our groups.", "", "Its sizes are on the device.",
                    "all_to_all_single with sizes of the host")


def _outputs(output, async_op, exec_sync=False):
    """What MindSpore's functions make of a primitive's result; there is no device to be waited for."""
    result, handle = output
    if async_op:
        return result, handle
    handle.wait()
    return result, None


# -- what is asked of groups --------------------------------------------------------------------------------------------


def _size(group=None, **how):
    return world.of_name(group or None).size


def _rank(group=None, **how):
    return world.of_name(group or None).rank_index


def _ranks(group=None):
    return list(world.of_name(group or None).ranks)


def _member(g: Group, rank: Any, ranks: Sequence[int]) -> int:
    if isinstance(rank, bool) or rank not in ranks:
        raise CommError("For MindSpore's collectives, a rank is none of the group's.", f"rank {rank!r} of {g!r}",
                        f"They are {list(ranks)}.", "get_process_group_ranks(group) says which")
    return int(rank)


def _rank_in(world_rank_id, group=None):
    g = world.of_name(group or None)
    return g.ranks.index(_member(g, world_rank_id, g.ranks))


def _rank_of(group, group_rank_id):
    g = world.of_name(group or None)
    return g.ranks[_member(g, group_rank_id, range(g.size))]


def _create(group, rank_ids, options=None):
    made = world.group(tuple(rank_ids))
    if made.backend.named is None:
        made.backend.named = {}
    made.backend.named[str(group)] = made.ranks


def _forget(group=None):
    named = world.get_backend().named
    if named is not None:
        named.pop(str(group), None)


def _init(*args, **kwargs):
    world.start("cpu")


_OURS: dict[str, Any] = {
    "dist_comm_all_reduce_op": _all_reduce, "dist_comm_all_gather_into_tensor_op": _all_gather_into,
    "dist_comm_all_gather_into_tensor_uneven_op": _all_gather_uneven, "dist_comm_reduce_op": _reduce,
    "dist_comm_reduce_scatter_tensor_op": _reduce_scatter_tensor, "dist_comm_broadcast_op": _broadcast,
    "dist_comm_reduce_scatter_tensor_uneven_op": _reduce_scatter_uneven, "dist_comm_barrier_op": _barrier,
    "dist_comm_scatter_tensor_op": _scatter_tensor, "dist_comm_gather_into_tensor_op": _gather_into,
    "dist_comm_all_gather_op": _all_gather, "dist_comm_gather_op": _gather, "dist_comm_scatter_op": _scatter,
    "dist_comm_reduce_scatter_op": _reduce_scatter, "dist_comm_all_to_all_v_op": _all_to_all,
    "dist_comm_all_to_all_v_single_op": _all_to_all_single, "dist_comm_isend_op": _isend, "dist_comm_irecv_op": _irecv,
    "dist_comm_batch_isend_irecv_op": _batch, "dist_comm_all_to_all_v_c_op": _not_there,
    "inner_comm_all_reduce_op": _new_all_reduce, "inner_comm_all_gather_op": _new_all_gather,
    "inner_comm_reduce_scatter_op": _new_reduce_scatter, "inner_comm_all_to_all_v_op": _new_all_to_all,
    "inner_comm_isend_op": _isend, "inner_comm_irecv_op": _irecv_new,
    "_deal_comm_outputs": _outputs, "_deal_dist_comm_outputs": _outputs,
    "get_cache_group_size": _size, "get_cache_group_rank": _rank, "_get_size_helper": _size, "_get_rank_helper": _rank,
    "_get_local_rank_helper": _rank, "_get_local_size_helper": _size, "_get_group_ranks": _ranks,
    "get_group_size": _size, "get_group_rank_from_world_rank": _rank_in, "get_world_rank_from_group_rank": _rank_of,
    "_get_group_rank_from_world_rank_from_cache_helper": _rank_in, "_get_group_rank_from_world_rank_helper": _rank_in,
    "_get_world_rank_from_group_rank_helper": _rank_of, "_get_group_size": _size, "create_group": _create,
    "_create_group_helper": _create, "_destroy_group_helper": _forget, "init": _init,
    "_is_initialized": lambda: world.current_world() is not None,
}


class MindSporeCollectives:
    """Whether MindSpore's collectives run on our groups; see `mindspore_collectives`.

    Attributes:
        on: whether they do.
    """

    def __init__(self) -> None:
        self._patched = Patched()

    @property
    def on(self) -> bool:
        """Whether they do."""
        return bool(self._patched)

    def enable(self) -> MindSporeCollectives:
        """Begins it; does nothing where it is on."""
        if not self._patched:
            for module in map(importlib.import_module, _MODULES):
                for name, ours in _OURS.items():
                    if name in module.__dict__:
                        self._patched.put(module, name, ours)
        return self

    def disable(self) -> None:
        """Ends it: MindSpore's primitives are where they were."""
        self._patched.take_back()
        _waiting.clear()

    def __enter__(self) -> MindSporeCollectives:
        return self

    def __exit__(self, *exc) -> None:
        self.disable()


_state = MindSporeCollectives()


def mindspore_collectives() -> MindSporeCollectives:
    """On CPU, from here on: `mint.distributed` and `mindspore.ops.communication` work over the groups of our meshes.

    A program's own collectives run on a laptop, those for which MindSpore has no CPU kernel too: reduce-scatter, all-to-all.
    They take `mesh.get_group("tp")`, its name, the name of a `create_group` or `new_group`, or None for all ranks; they are
    recorded (`CommDebugMode`), compared between ranks, and refused alike. An asynchronous one has been made when it
    returns, but for `isend` and `irecv`, which are made when one of them is waited for. Tags mean nothing.

    Returns:
        The state: to be left as a context, or by `disable()`.

    Raises:
        ConfigError: on a device, where MindSpore's own are what they should be.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore.ops import communication
        >>> group = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)).get_group("tp")
        >>> with md.comm.mindspore_collectives():
        ...     out = ms.ops.zeros(2)
        ...     communication.set_comm_ops_inplace(True)
        ...     _ = communication.reduce_scatter_tensor(out, ms.Tensor([1.0, 2.0]), group=group)
        >>> out.asnumpy()
        array([1., 2.], dtype=float32)
    """
    if not on_cpu():
        raise ConfigError("For 'mindspore_collectives', the device has collectives of its own.", "",
                          "Groups of a mesh are MindSpore's communicators there.", "leave the call out")
    return _state.enable()
