# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's styles of context parallelism, as MindFormers 2.1 makes them: around the cell that attends.

The cell keeps its own mask and scale, and speaks of whole sequences, as it does there: Ulysses hands it some of the heads of
all tokens, "colossal" its own queries and all keys, a hybrid both. New code says `context_attention`, which sends the keys
that are seen and no others, or our own `ContextParallel`, which takes the place of what the cell computes.
"""
from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from ..core.mesh import DeviceMesh
from ..core.placements import Placement, Replicate, Shard
from ..dispatch.modes import implicit_replication
from ..errors import ConfigError, LayoutError
from ..parallel.styles import ParallelStyle
from ..tensor.dtensor import DTensor


class ContextParallel(ParallelStyle):
    """Attention of a sequence that the ranks of a mesh share.

    Args:
        seq_dim: dim of the sequence, in queries, keys, values and the result.
        head_dim: dim of their heads.
        ulysses_degree: ranks that take heads for tokens: None: all of them; 1: none, keys are gathered; between the two,
            so many ranks beside each other take heads, and keys are gathered over the rest.
        qkv_indices: which of the cell's arguments are query, key and value.
        qkv_kwarg_names: the names of query, key and value, where they come by name.
        load_balance: not here: it permutes what the cell's own mask is about.
        use_local_output: give plain tensors back; None: where plain ones came.

    Raises:
        ConfigError: `load_balance`; a degree that does not divide the ranks; at the call, heads that it does not divide.
        LayoutError: at the call, an operand on another mesh.

    Source: hyper_parallel 1.0, `core/context_parallel`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import mint, nn
        >>> from ms_dtensor.compat.hyper_context import ContextParallel
        >>> class Core(nn.Cell):
        ...     def construct(self, query, key, value):
        ...         return query + key.sum(1, keepdim=True)
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> core, x = ContextParallel(ulysses_degree=1).apply(Core(), mesh), mint.ones((2, 6, 4, 8))
        >>> core(x, x, x)[0, 0, 0, 0]
        Tensor(shape=[], dtype=Float32, value= 7)
    """

    def __init__(self, seq_dim: int = 1, head_dim: int = 2, ulysses_degree: int | None = None,
                 qkv_indices: tuple[int, ...] = (0, 1, 2), qkv_kwarg_names: tuple[str, ...] = (), load_balance: bool = False,
                 use_local_output: bool | None = None):
        if load_balance:
            raise ConfigError("For 'ContextParallel', 'load_balance' is not here.", f"ulysses_degree={ulysses_degree}",
                              "The cell's mask is about tokens in order, so queries cannot be exchanged behind its back.",
                              ('ms_dtensor.ContextParallel(order="head_tail")', "balance(documents, ranks) and "
                               "context_attention"))
        self.seq_dim, self.head_dim, self.ulysses_degree = seq_dim, head_dim, ulysses_degree
        self.qkv_indices, self.qkv_kwarg_names, self.use_local_output = qkv_indices, qkv_kwarg_names, use_local_output

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        """Wraps what the cell computes; `device_mesh`: the ranks that share sequences, as one axis or (keys, heads)."""
        mesh, whole = self._mesh(device_mesh), module.construct
        layouts = {0: (Shard(self.seq_dim), Shard(self.head_dim)), 1: (Replicate(), Shard(self.head_dim))}

        def construct(*args, **kwargs):
            plain: list[bool] = []
            given, named = list(args), dict(kwargs)
            for n, i in enumerate(self.qkv_indices):
                if i < len(given):
                    given[i] = self._laid_out(given[i], mesh, layouts[n > 0], plain)
            for n, name in enumerate(self.qkv_kwarg_names):
                if name in named:
                    named[name] = self._laid_out(named[name], mesh, layouts[n > 0], plain)
            with implicit_replication():  # masks and tables of the cell, alike on all ranks
                out = whole(*given, **named)
            local = any(plain) if self.use_local_output is None else self.use_local_output
            return self._by_tokens(out, mesh, local)
        module.construct = construct
        return module

    def _mesh(self, device_mesh: DeviceMesh) -> DeviceMesh:
        """(ranks that keys are gathered over, ranks that take heads)."""
        ranks = device_mesh.size()
        heads = ranks if self.ulysses_degree is None else self.ulysses_degree
        if heads < 1 or ranks % heads or device_mesh.ndim > 2 or device_mesh.ndim == 2 and device_mesh.shape[1] != heads:
            raise ConfigError(f"For 'ContextParallel', ulysses_degree = {heads} does not fit the mesh.",
                              f"mesh({device_mesh.describe()})",
                              "It divides the ranks; of two axes the second is those that take heads.",
                              f"ulysses_degree with one of {[d for d in range(1, ranks + 1) if ranks % d == 0]}")
        if device_mesh.ndim == 2:
            return device_mesh
        axis, = device_mesh.mesh_dim_names
        return device_mesh.unflatten(axis, (ranks // heads, heads), (f"{axis}_keys", f"{axis}_heads"))

    def _laid_out(self, x: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], plain: list[bool]):
        if not isinstance(x, Tensor):
            return x
        tokens = (Shard(self.seq_dim),) * 2
        if not isinstance(x, DTensor):
            plain.append(True)
            x = DTensor.from_local(x, mesh, tokens)
        elif x.device_mesh != mesh:
            ranks = [m.mesh.ravel().tolist() for m in (x.device_mesh, mesh)]
            if ranks[0] != ranks[1] or x.placements != tokens[:x.device_mesh.ndim]:
                raise LayoutError("For 'ContextParallel', an operand does not lie by tokens on the mesh of the style.",
                                  x.layout.describe(), f"mesh({mesh.describe()}), Shard({self.seq_dim})",
                                  "x.to_local(), with other axes outside of this one; or our own ContextParallel, which "
                                  "knows them")
            x = DTensor.from_local(x.to_local(), mesh, tokens, shape=tuple(x.shape))
        if x.shape[self.head_dim] % mesh.shape[1]:
            raise ConfigError(f"For 'ContextParallel', {x.shape[self.head_dim]} heads are not divided by "
                              f"{mesh.shape[1]} ranks.", x.layout.describe(), "A rank has whole heads.",
                              "a ulysses_degree that divides the heads of keys")
        return x.redistribute(placements=placements)

    def _by_tokens(self, out: Any, mesh: DeviceMesh, local: bool):
        if isinstance(out, tuple | list):
            return type(out)(self._by_tokens(x, mesh, local) for x in out)
        if not isinstance(out, DTensor):
            return out
        out = out.redistribute(placements=(Shard(self.seq_dim),) * 2)
        return out.to_local() if local else out


class AsyncContextParallel(ContextParallel):
    """The same numbers. The projections named at `apply` are taken and left alone: what they make is sent when attention
    asks for it, not while the next one computes.

    Example:
        >>> from ms_dtensor.compat.hyper_context import AsyncContextParallel
        >>> AsyncContextParallel(seq_dim=0).seq_dim
        0
    """

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh, q_proj: nn.Cell | None = None, k_proj: nn.Cell | None = None,
              v_proj: nn.Cell | None = None) -> nn.Cell:
        return super().apply(module, device_mesh)
