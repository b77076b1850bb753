# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors made in place: each rank makes its own shard, nothing is communicated, no rank holds the whole.

Random ones come from the global stream (`rng.py`): for a given seed the same global tensor on every mesh, bit for
bit. Sizes are integers or one tuple; after a tuple, mesh and placements may be positional.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np

from ..comm.pretended import executing
from ..core.layout import Layout, in_dtype, layout_for
from ..core.mesh import resolve_mesh
from ..dispatch import patches
from ..dispatch.operands import dtype_name, wrap
from ..errors import LayoutError
from ..ops import rng
from ..ops.local.cpu_index import filled
from ..ops.local.random import kind, tensor
from .dtensor import DTensor


def _parse(name: str, args: tuple, device_mesh, placements):
    """(size, mesh, placements) from `f(2, 3, ...)` or `f((2, 3), mesh, placements)`."""
    if args and isinstance(args[0], tuple | list):
        size, rest = args[0], args[1:]
        if len(rest) > 2 or (rest and device_mesh is not None) or (len(rest) == 2 and placements is not None):
            raise LayoutError(f"For '{name}', after the size come at most 'device_mesh' and 'placements', "
                              f"but got {len(rest)} more arguments.")
        device_mesh = rest[0] if rest else device_mesh
        placements = rest[1] if len(rest) == 2 else placements
    else:
        size = args
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in size):
        raise LayoutError(f"For '{name}', 'size' must be non-negative integers or one tuple of them, but got {size!r}.")
    return tuple(int(n) for n in size), device_mesh, placements


def _layout(name: str, size, dtype, device_mesh, placements) -> Layout:
    layout = layout_for(name, resolve_mesh(device_mesh, name), placements, size, dtype_name(dtype))
    if layout.has_partial():
        raise LayoutError(f"For '{name}', Partial is no way to lay out new values.", layout.describe(),
                          "Which summand would each rank hold?", "use Replicate(), or DTensor.from_local")
    return layout


def _made(array, layout: Layout, dtype) -> DTensor:
    patches.install()
    return wrap(tensor(array, dtype), layout)


def _filled(value, layout: Layout, dtype) -> DTensor:
    patches.install()
    dry = executing()
    return wrap(filled(None, layout.local_shape(), value, dtype) if dry is None else dry.of_layout(layout), layout)


def _drawn(draw, layout: Layout, dtype) -> DTensor:
    rng.rehearse(lambda *at: tensor(np.asarray(draw(*at, kind(dtype))), dtype), layout.shape)
    rng.agree(layout.mesh)
    key, dry = rng.next_key(), executing()
    if dry is not None:
        return _filled(0, layout, dtype)
    return _made(layout.assemble(lambda box: draw(key, layout.shape, box, kind(dtype))), layout, dtype)


def _full(name, args, value, dtype, device_mesh, placements) -> DTensor:
    size, mesh, placed = _parse(name, args, device_mesh, placements)
    return _filled(value, _layout(name, size, dtype, mesh, placed), dtype)


def zeros(*size, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Zeros; float32 unless `dtype` says otherwise.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.zeros((4, 4), mesh, [md.Shard(0)])
        DTensor(f32[4@tp, 4], mesh=(tp=1), rank 0 holds [4, 4])
    """
    return _full("zeros", size, 0, dtype or ms.float32, device_mesh, placements)


def ones(*size, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Ones; float32 unless `dtype` says otherwise.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.ones(4, 2, device_mesh=mesh, placements=[md.Shard(0)])
        DTensor(f32[4@tp, 2], mesh=(tp=1), rank 0 holds [4, 2])
    """
    return _full("ones", size, 1, dtype or ms.float32, device_mesh, placements)


def empty(*size, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """A tensor to be written; it holds zeros, so that replicas agree.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.empty(4, device_mesh=mesh)
        DTensor(f32[4], mesh=(tp=1), rank 0 holds [4])
    """
    return _full("empty", size, 0, dtype or ms.float32, device_mesh, placements)


def full(size, fill_value, *args, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """`fill_value` everywhere; `dtype` follows it (bool, int64, float32) unless given.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.full((2, 2), 7, device_mesh=mesh)
        DTensor(i64[2, 2], mesh=(tp=1), rank 0 holds [2, 2])
    """
    size = tuple(size) if isinstance(size, tuple | list) else (size,)
    if dtype is None:
        dtype = ms.bool_ if isinstance(fill_value, bool) else ms.int64 if isinstance(fill_value, int) else ms.float32
    return _full("full", (size, *args), fill_value, dtype, device_mesh, placements)


def _random(name, draw, args, dtype, device_mesh, placements) -> DTensor:
    dtype = dtype or ms.float32
    size, mesh, placed = _parse(name, args, device_mesh, placements)
    return _drawn(draw, _layout(name, size, dtype, mesh, placed), dtype)


def rand(*size, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Uniform numbers in [0, 1).

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.manual_seed(1)
        >>> x = md.rand(4, 2, device_mesh=mesh, placements=[md.Shard(0)])
        >>> bool((x >= 0).all()), bool((x < 1).all())
        (True, True)
    """
    return _random("rand", rng.uniform, size, dtype, device_mesh, placements)


def randn(*size, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Standard normal numbers.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.randn((4, 2), mesh, [md.Shard(1)])
        DTensor(f32[4, 2@tp], mesh=(tp=1), rank 0 holds [4, 2])
    """
    return _random("randn", rng.normal, size, dtype, device_mesh, placements)


def randint(low, high, size, *args, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Integers in [low, high); int64 unless `dtype` says otherwise.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.randint(3, 4, (2,), device_mesh=mesh).tolist()
        [3, 3]
    """
    def draw(key, shape, box, _):
        return rng.integers(key, shape, low, high, box)
    return _random("randint", draw, (size, *args), dtype or ms.int64, device_mesh, placements)


def arange(start, end=None, step=1, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """start, start + step, ... below `end`; int64 if all three are integers, else float32.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.arange(1, 7, 2, device_mesh=mesh).tolist()
        [1, 3, 5]
    """
    start, end = (0, start) if end is None else (start, end)
    integral = all(isinstance(v, int | np.integer) for v in (start, end, step))
    dtype = dtype or (ms.int64 if integral else ms.float32)
    size = max(0, -(-(end - start) // step) if integral else int(np.ceil((end - start) / step)))
    layout = _layout("arange", (size,), dtype, device_mesh, placements)
    kind_ = np.int64 if integral else np.float64
    return _made(layout.assemble(lambda box: start + step * np.arange(*box[0], dtype=kind_)), layout, dtype)


def linspace(start, end, steps, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """`steps` numbers from `start` to `end`, both included.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.linspace(0, 1, 3, device_mesh=mesh).tolist()
        [0.0, 0.5, 1.0]
    """
    layout = _layout("linspace", (int(steps),), dtype or ms.float32, device_mesh, placements)
    whole = np.linspace(start, end, int(steps))
    return _made(layout.assemble(lambda box: whole[slice(*box[0])]), layout, dtype or ms.float32)


def eye(n, m=None, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Ones on the diagonal of an [n, m] matrix (m = n by default).

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.eye(2, device_mesh=mesh).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    layout = _layout("eye", (n, n if m is None else m), dtype or ms.float32, device_mesh, placements)
    array = layout.assemble(lambda box: np.arange(*box[0])[:, None] == np.arange(*box[1])[None, :])
    return _made(array.astype(np.float32), layout, dtype or ms.float32)


def _like(name: str, x, dtype, device_mesh, placements):
    """(layout, dtype) of a tensor like x: x's own layout with Partial as Replicate, unless told otherwise."""
    if not isinstance(x, DTensor):
        raise LayoutError(f"For '{name}', the tensor must be a DTensor, but got {type(x).__name__}.", "", "",
                          f"use mint.{name} for plain tensors")
    own, dtype = x.layout.gradient(), dtype or x.dtype
    if placements is None and device_mesh in (None, own.mesh):
        return in_dtype(own, dtype_name(dtype)), dtype
    return _layout(name, own.shape, dtype, device_mesh or own.mesh, placements), dtype


def zeros_like(x, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Zeros in the shape, dtype and layout of x; Partial becomes Replicate.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.zeros_like(md.ones(4, device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[4@tp], mesh=(tp=1), rank 0 holds [4])
    """
    return _filled(0, *_like("zeros_like", x, dtype, device_mesh, placements))


def ones_like(x, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Ones in the shape, dtype and layout of x.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.ones_like(md.zeros(2, device_mesh=mesh)).tolist()
        [1.0, 1.0]
    """
    return _filled(1, *_like("ones_like", x, dtype, device_mesh, placements))


def empty_like(x, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """A tensor to be written, in the shape, dtype and layout of x.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.empty_like(md.zeros(2, device_mesh=mesh))
        DTensor(f32[2], mesh=(tp=1), rank 0 holds [2])
    """
    return _filled(0, *_like("empty_like", x, dtype, device_mesh, placements))


def full_like(x, fill_value, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """`fill_value` in the shape, dtype and layout of x.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.full_like(md.zeros(2, device_mesh=mesh), 3).tolist()
        [3.0, 3.0]
    """
    return _filled(fill_value, *_like("full_like", x, dtype, device_mesh, placements))


def rand_like(x, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Uniform numbers in [0, 1) in the shape, dtype and layout of x.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.rand_like(md.zeros(4, device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[4@tp], mesh=(tp=1), rank 0 holds [4])
    """
    return _drawn(rng.uniform, *_like("rand_like", x, dtype, device_mesh, placements))


def randn_like(x, *, dtype=None, device_mesh=None, placements=None) -> DTensor:
    """Standard normal numbers in the shape, dtype and layout of x.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.randn_like(md.zeros(4, device_mesh=mesh))
        DTensor(f32[4], mesh=(tp=1), rank 0 holds [4])
    """
    return _drawn(rng.normal, *_like("randn_like", x, dtype, device_mesh, placements))
