# SPDX-License-Identifier: Apache-2.0
"""PyTorch's `context_parallel(mesh, buffers=, buffer_seq_dims=)`: a batch whose sequences the ranks of a mesh share.

There the buffers change in place and attention is replaced inside the block. MindSpore's tensors do not change their shape
in place, so here the block gives the cut tensors; they are DTensors in the order of the sequence, with which any op is
right, and attention sends keys where `ContextParallel` or `context_attention` is told to. New code says `balance` and
`tokens.cut`: work is level then, and any length is taken.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from mindspore import Tensor

from ..core.mesh import DeviceMesh
from ..core.placements import Shard
from ..errors import ConfigError
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor


@contextmanager
def context_parallel(mesh: DeviceMesh, *, buffers: Sequence[Tensor] | None = None,
                     buffer_seq_dims: Sequence[int] | None = None,
                     no_restore_buffers: Iterable[Tensor] | None = None) -> Iterator[tuple[DTensor, ...]]:
    """Buffers, which every rank has whole, as DTensors cut along their sequences: `with ... as (ids, labels):`.

    Args:
        mesh: the axis that cuts sequences, `mesh["cp"]`.
        buffers: tensors, alike on all its ranks; they stay as they are.
        buffer_seq_dims: which dim of each is the sequence.
        no_restore_buffers: taken, and without an effect: there is nothing to restore.

    Raises:
        ConfigError: not one dim a buffer, or a sequence that the ranks do not divide evenly; on all ranks alike.

    Source: `torch.distributed.tensor.experimental.context_parallel` (2.7 and later).

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.compat.torch_context import context_parallel
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> ids, labels = ms.mint.ones((2, 8)), ms.mint.zeros((2, 8))
        >>> with context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1]) as (ids, labels):
        ...     ids
        DTensor(f32[2, 8@cp], mesh=(cp=1), rank 0 holds [2, 8])
    """
    given, dims, ranks = list(buffers or ()), list(buffer_seq_dims or ()), mesh.size()
    if len(given) != len(dims) or mesh.ndim != 1:
        raise ConfigError(f"For 'context_parallel', there are {len(dims)} dims for {len(given)} buffers.",
                          f"mesh({mesh.describe()})", "Each buffer has its sequence along one dim, and one axis cuts them.",
                          'context_parallel(mesh["cp"], buffers=[ids, labels], buffer_seq_dims=[1, 1])')
    for x, dim in zip(given, dims):
        if not -x.ndim <= dim < x.ndim or x.shape[dim] % ranks:
            raise ConfigError("For 'context_parallel', a buffer is not cut evenly.",
                              f"{list(x.shape)}, dim {dim}, {ranks} ranks", "Ranks have as many tokens of each row.",
                              (f"pad sequences to a multiple of {ranks}", "balance and tokens.cut, which take any length"))
    yield tuple(distribute_tensor(x, mesh, [Shard(dim % x.ndim)], src_data_rank=None) for x, dim in zip(given, dims))


def context_parallel_unshard(mesh: DeviceMesh, buffers: Sequence[DTensor], seq_dims: Sequence[int]) -> list[Tensor]:
    """What was computed of them, whole on every rank and in the order of the sequence.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.compat.torch_context import context_parallel_unshard
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> context_parallel_unshard(mesh, [md.ones((2, 8), mesh, [md.Shard(1)])], [1])[0].shape
        (2, 8)
    """
    return [x.full_tensor() for x in buffers]
