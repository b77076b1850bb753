# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for models whose attention is a cell of [batch, sequence, heads, width]: a style around `context.py`.

Rows of a batch are documents of one length, so their tokens have an order without being told one. Invariant: where the
sequence is whole, in generation for instance, the cell runs as it was.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

from mindspore import mint, nn

from ..core.mesh import DeviceMesh
from ..core.placements import Placement, Shard
from ..core.tokens import Tokens, head_tail, in_order
from ..errors import ConfigError
from ..tensor.dtensor import DTensor
from ..tensor.token_lists import HEADS
from .context import context_attention
from .styles import ParallelStyle

_ORDERS: dict[str, Any] = {"in_order": in_order, "head_tail": head_tail}


class ContextParallel(ParallelStyle):
    """Attention of rows whose sequence an axis cuts, for a cell that is called with (query, key, value).

    Where the query's sequence is cut over the axis, `context_attention` takes the place of what the cell computes; a query
    that the axis does not cut is the cell's own. So the arguments say what the cell's own mask and scale are.

    Args:
        algorithm: "gather" or "ring", as of `context_attention`.
        seq_dim: dim of the sequence.
        head_dim: dim of their heads; the one that is left of 0, 1, 2 is the batch, and 3 the width.
        order: how the program cut its rows: "in_order", or "head_tail", where rank r has the r-th piece from the front of
            each row and the r-th from its end. It moves nothing: the program has put its rows, and what belongs to each
            token, in that order, `ids[:, head_tail([length], ranks).index()]`.
        causal: a token sees none behind it.
        window: how many it sees, itself included.
        scale: of the products; None: 1/sqrt(width).

    Raises:
        ConfigError: no such dims or order, or a mesh of several axes; at the call a sequence that is not cut evenly, another
            dim that is cut in its place, or other arguments than the three.

    Source: the style of the same name of hyper_parallel, and `torch.distributed.tensor.experimental.context_parallel`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> class Core(nn.Cell):
        ...     def construct(self, query, key, value):
        ...         return query  # what it makes of whole rows
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> core = md.ContextParallel().apply(Core(), mesh)
        >>> x = md.ones(2, 6, 4, 8, device_mesh=mesh, placements=[md.Shard(1)])
        >>> core(x, x, x)
        DTensor(f32[2, 6@cp, 4, 8], mesh=(cp=1), rank 0 holds [2, 6, 4, 8])
    """

    def __init__(self, algorithm: str = "gather", seq_dim: int = 1, head_dim: int = 2, *, order: str = "in_order",
                 causal: bool = True, window: int | None = None, scale: float | None = None):
        if order not in _ORDERS or len({seq_dim, head_dim} & {0, 1, 2}) != 2:
            raise ConfigError(f"For 'ContextParallel', order {order!r}, seq_dim {seq_dim}, head_dim {head_dim} do not fit.",
                              "", f"Dims are two of 0, 1 and 2; orders are {', '.join(_ORDERS)}.",
                              ("seq_dim=1, head_dim=2", "context_attention, with tokens in any order"))
        self.algorithm, self.seq_dim, self.head_dim, self.order = algorithm, seq_dim, head_dim, order
        self.causal, self.window, self.scale = causal, window, scale

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        if device_mesh.ndim != 1 or HEADS in device_mesh.mesh_dim_names:
            raise ConfigError("For 'ContextParallel', the mesh is not one axis that cuts the sequence.",
                              f"mesh({device_mesh.describe()})", "Keys are fetched over one axis.",
                              ('mesh["cp"]', f"context_attention, which knows '{HEADS}'"))
        context_attention(device_mesh, self.algorithm)  # refuses what is no algorithm
        return {}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.check(module, device_mesh)
        axis, = device_mesh.mesh_dim_names
        attention, whole = context_attention(device_mesh, self.algorithm), module.construct

        def construct(query, *rest, **named):
            if not isinstance(query, DTensor) or all(axis not in _axes(query, dim) for dim in range(query.ndim)):
                return whole(query, *rest, **named)
            if axis not in _axes(query, self.seq_dim):
                raise ConfigError(f"For 'ContextParallel', '{axis}' cuts the query, but not its sequence.",
                                  query.layout.describe(), f"'{axis}' cuts dim {self.seq_dim}, the sequence, alone.",
                                  ("cells that leave [batch, sequence, features] as it is: mint.nn.Linear and "
                                   "mint.nn.Embedding, where nn.Dense and nn.Embedding make one dim of the first two, "
                                   "which moves the cut", f"seq_dim= of '{axis}'"))
            if len(rest) != 2 or named:
                raise ConfigError("For 'ContextParallel', the cell got something else than a query, a key and a value.",
                                  f"{len(rest) + 1} arguments, by name {', '.join(named) or 'none'}",
                                  "Masks of a cut sequence are those that the style names.",
                                  ("causal= and window= of the style", "context_attention, with tokens of your own"))
            return self._attend(attention, axis, query, *rest)
        module.construct = construct
        return module

    def _attend(self, attention, axis: str, *operands: DTensor) -> DTensor:
        batch, = {0, 1, 2} - {self.seq_dim, self.head_dim}
        dims = batch, self.seq_dim, self.head_dim, 3
        query, mesh = operands[0], operands[0].device_mesh
        ranks, rows, length = mesh[axis].size(), query.shape[batch], query.shape[self.seq_dim]
        parts = 1
        for name in _axes(query, batch):
            parts *= mesh[name].size()
        each = 2 * ranks if self.order == "head_tail" else ranks
        cut = _cutting(query, batch, axis)
        if length % each or rows % parts or any(_cutting(x, self.seq_dim, axis) != (axis,) or _cutting(x, batch, axis) != cut
                                                or x.shape[self.seq_dim] != length for x in operands):
            raise ConfigError(f"For 'ContextParallel', rows are not cut evenly and alike over '{axis}'.",
                              "\n".join(x.layout.describe() for x in operands),
                              "Ranks have as many rows, and as many tokens of each; queries, keys and values the same ones.",
                              (f"pad rows to a multiple of {each} tokens", "context_attention, which takes any length"))
        lists = [_as_list(mint.permute(x, dims), axis) for x in operands]
        out = attention(*lists, _rows(rows // parts, length, ranks, self.order), causal=self.causal, window=self.window,
                        scale=self.scale)
        shape = rows, length, *out.shape[1:]
        like = {name: Shard(d) for d, part in enumerate((batch, self.seq_dim, self.head_dim)) for name in _axes(query, part)}
        local = out.to_local()
        back = DTensor.from_local(local.reshape(rows // parts, length // ranks, *local.shape[1:]), mesh, like, shape=shape)
        return mint.permute(back, tuple(dims.index(d) for d in range(4)))


def _axes(x: DTensor, dim: int) -> tuple[str, ...]:
    return tuple(x.device_mesh.mesh_dim_names[a] for a in x.layout.dim_axes[dim])


def _cutting(x: DTensor, dim: int, axis: str) -> tuple[str, ...]:
    """Without axes of one rank, as dp is in many a program: what makes one dim of two leaves them on either."""
    return tuple(name for name in _axes(x, dim) if name == axis or x.device_mesh[name].size() > 1)


def _as_list(x: DTensor, axis: str) -> DTensor:
    """[b@dp, s@cp, h@tp, e] as [n@dp@cp, h@tp, e], in an order of its own: what a rank holds stays where it is."""
    local, (b, s, *rest) = x.to_local(), x.shape
    cut = {name: Shard(0) for name in (*_axes(x, 0), axis)} | {name: Shard(1) for name in _axes(x, 2)}
    return DTensor.from_local(local.reshape(local.shape[0] * local.shape[1], *local.shape[2:]), x.device_mesh, cut,
                              shape=(b * s, *rest))


@lru_cache(maxsize=64)
def _rows(rows: int, length: int, ranks: int, order: str) -> Tokens:
    """Rows of one length, each cut over the ranks alike."""
    one = _ORDERS[order]((length,), ranks)
    return Tokens((length,) * rows,
                  tuple(tuple((row, a, b) for row in range(rows) for _, a, b in runs) for runs in one.runs))
