# SPDX-License-Identifier: Apache-2.0
"""Pooling, resizing, patches: leading dims (batch, channels) may be sharded, the window's dims are whole.

A window reaches over a shard's border, so a sharded spatial dim is gathered first. Averages and interpolations are
linear and let a Partial through; maxima do not. The native call works on a shard as it stands.
"""
from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, prod

from .conv import per_dim
from .spec import SUMS, Call, Case, Local, LocalCall, OpSpec, R, S

NAMES = """
max_pool_ext:FuncMaxPool2D:input kernel stride padding dilation ceil_mode return_indices
max_pool:MaxPool,MaxPool3D:input
max_pool_argmax:MaxPoolWithArgmaxV2,MaxPool3DWithArgmax:input
avg_pool:AvgPool:input kernel stride pad_mode data_format
avg_pool_3d:AvgPool3D:input
avg_pool_1d:AvgPool1D:input kernel stride padding ceil_mode count_include_pad
avg_pool_2d:AvgPool2D:input kernel stride padding ceil_mode count_include_pad divisor
avg_pool_3d_ext:AvgPool3DExt:input kernel stride padding ceil_mode count_include_pad divisor
adaptive_avg_pool:AdaptiveAvgPool1D,AdaptiveAvgPool2DExt,AdaptiveAvgPool3DExt,AdaptiveAvgPool2D,AdaptiveAvgPool3D:input size
adaptive_max_pool:AdaptiveMaxPool1D,AdaptiveMaxPool2D:input size
upsample:UpsampleNearest1D,UpsampleNearest2D,UpsampleNearest3D:input size scales
upsample_linear:UpsampleLinear1D,UpsampleBilinear2D,UpsampleTrilinear3D,UpsampleBicubic2D:input size scales align_corners
resize:ResizeBilinearV2,ResizeNearestNeighbor:input size align_corners half_pixel_centers
resize:ResizeLinear1D:input size mode
grid_sample:GridSampler2D,GridSampler3D:input grid mode padding align_corners
affine_grid:AffineGrid:input size
unfold:Im2ColExt:input kernel dilation padding stride
unfold_classic:Im2Col:input
fold:Col2ImExt:input size kernel dilation padding stride
pixel_shuffle:PixelShuffle:input factor
"""
_LINEAR = frozenset(("avg_pool", "avg_pool_3d", "avg_pool_1d", "avg_pool_2d", "avg_pool_3d_ext", "adaptive_avg_pool",
                     "upsample", "upsample_linear", "resize", "resize_to", "unfold", "unfold_classic", "fold",
                     "pixel_shuffle"))


def _leading(call: Call, lead: int, *shapes) -> OpSpec:
    """The first `lead` dims of the input may be sharded, in all results alike."""
    sums = SUMS if call.op in _LINEAR and "int" not in call.operands[0].dtype else ()  # a mean of integers is cut off
    return OpSpec(shapes, tuple(call.like_first(range(lead), sums, len(shapes))))


def pooled(n: int, kernel: int, stride: int, before: int, after: int, dilation: int, ceil_mode: bool) -> int:
    """Windows along a dim; with `ceil_mode` the last one may start inside the input and end outside."""
    room = n + before + after - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= n + before else count


def window(call: Call, spatial: int) -> list[int]:
    """Result extents of a pooling given by arguments, or by a classic primitive's attributes."""
    args = {**call.args.get("attrs", {}), **{k: v for k, v in call.args.items() if v is not None}}
    x = call.operands[0]
    kernel = per_dim(args.get("kernel", args.get("kernel_size", args.get("ksize"))), spatial)
    stride = per_dim(args.get("stride", args.get("strides", kernel)), spatial)
    dilation = per_dim(args.get("dilation", 1), spatial, 1)
    space = x.shape[x.ndim - spatial:]
    mode = str(args.get("pad_mode", "")).upper()
    if mode in ("SAME", "1"):
        return [ceil(n / s) for n, s in zip(space, stride)]
    pads = [(p, p) for p in per_dim(args.get("padding", args.get("pads", 0)), spatial)]
    if mode not in ("VALID", "2") and "pad_list" in args:
        flat = args["pad_list"]
        pads = [(flat[2 * d], flat[2 * d + 1]) for d in range(spatial)]
    ceil_mode = bool(args.get("ceil_mode", False))
    return [pooled(n, k, s, lo, hi, d, ceil_mode)
            for n, k, s, (lo, hi), d in zip(space, kernel, stride, pads, dilation)]


def _spatial(call: Call) -> int:
    """Number of window dims of a classic primitive: all but batch and channels."""
    return call.operands[0].ndim - 2


def pool(call: Call) -> OpSpec:
    """One result."""
    x = call.operands[0]
    n = len(call.args["kernel"]) if isinstance(call.args.get("kernel"), tuple) else _spatial(call)
    return _leading(call, x.ndim - n, (*x.shape[:x.ndim - n], *window(call, n)))


def pool_ext(call: Call) -> OpSpec:
    """`mint` pooling; the number of window dims is that of the op's kernel, the input may lack the batch dim."""
    x = call.operands[0]
    n = {"avg_pool_1d": 1, "avg_pool_3d_ext": 3}.get(call.op, 2)
    shape = (*x.shape[:x.ndim - n], *window(call, n))
    if call.op != "max_pool_ext":
        return _leading(call, x.ndim - n, shape)
    at = shape if call.get("return_indices") else mask_shape(shape, per_dim(call.args["kernel"], 2))
    return replace(_leading(call, x.ndim - n, shape, at), dtypes=(x.dtype, "int64" if at is shape else "int8"))


def mask_shape(shape, kernel) -> tuple[int, ...]:
    """Of the second result of a maximum whose positions are not wanted: bits for each place of the window, padded."""
    return *shape[:-2], prod(kernel), 32 * (-(-shape[-2] * shape[-1] // 16) + 1)


def pool_argmax(call: Call) -> OpSpec:
    """(values, position within the plane)."""
    x = call.operands[0]
    shape = (*x.shape[:2], *window(call, _spatial(call)))
    return _leading(call, 2, shape, shape)


def adaptive(call: Call) -> OpSpec:
    """Adaptive pooling to `size`, where None keeps the extent."""
    x = call.operands[0]
    size = call.args.get("size", call.args.get("attrs", {}).get("output_size"))
    size = tuple(size) if isinstance(size, tuple | list) else (size,)
    space = x.shape[x.ndim - len(size):]
    lead = x.ndim - len(size)
    shape = (*x.shape[:lead], *(n if s in (None, -1) else s for n, s in zip(space, size)))
    return _leading(call, lead, *(shape,) * (1 + (call.op == "adaptive_max_pool")))


def upsample(call: Call) -> OpSpec:
    """Resizing to `size` or by `scales`."""
    x = call.operands[0]
    size, scales = call.get("size"), call.get("scales")
    space = tuple(size) if size is not None else tuple(floor(n * f) for n, f in zip(x.shape[2:], scales))
    return _leading(call, 2, (*x.shape[:2], *space))


def grid_sample(call: Call) -> OpSpec:
    """[N, C, ...] read at the places [N, ..., 2 or 3] of a grid: linear in what is read."""
    x, grid = call.args["input"], call.args["grid"]
    cases = [Case((S(0), S(0)), (S(0),)), Case((S(1), R), (S(1),)),
             *(Case((R, S(d)), (S(d + 1),)) for d in range(1, grid.ndim - 1)), *(Case((p, R), (p,)) for p in SUMS)]
    return OpSpec(((*x.shape[:2], *grid.shape[1:-1]),), tuple(cases))


def affine_grid(call: Call) -> OpSpec:
    """A grid for each affine map of the batch: linear in the maps; a rank makes as many as it has."""
    x, size = call.operands[0], tuple(call.args["size"])
    spec = OpSpec(((size[0], *size[2:], len(size) - 2),), tuple(call.like_first((0,), SUMS)))

    def local(at: Local) -> LocalCall:
        made = call.args["attrs"].get("align_corners", False)
        return LocalCall("affine_grid", (x, (at.in_shape(0)[0], *size[1:]), made))
    return replace(spec, local=local)


def unfold(call: Call) -> OpSpec:
    """Patches: channels are merged with the window, so that only the batch may be sharded."""
    x = call.operands[0]
    attrs = call.args.get("attrs", {})
    kernel = per_dim(call.args.get("kernel", attrs.get("ksizes")), 2)
    stride, dilation, pads = (per_dim(call.args.get(a, attrs.get(b)), 2, c) for a, b, c in (
        ("stride", "strides", 1), ("dilation", "dilations", 1), ("padding", "pads", 0)))
    count = [pooled(n, k, s, p, p, d, False) for n, k, s, p, d in zip(x.shape[-2:], kernel, stride, pads, dilation)]
    if call.op == "unfold_classic":
        return _leading(call, 2, (*x.shape[:2], kernel[0] * kernel[1], count[0] * count[1]))
    lead = x.shape[:-3]
    return _leading(call, len(lead), (*lead, x.shape[-3] * kernel[0] * kernel[1], count[0] * count[1]))


def fold(call: Call) -> OpSpec:
    """Patches summed back into an image."""
    x = call.operands[0]
    kernel, size, lead = per_dim(call.args["kernel"], 2), per_dim(call.args["size"], 2), x.shape[:-2]
    return _leading(call, len(lead), (*lead, x.shape[-2] // (kernel[0] * kernel[1]), *size))


def pixel_shuffle(call: Call) -> OpSpec:
    """Channels into space."""
    x, f = call.operands[0], int(call.args["factor"])
    c, h, w = x.shape[-3:]
    return _leading(call, x.ndim - 3, (*x.shape[:-3], c // (f * f), h * f, w * f))


RULES = {
    "max_pool": pool, "avg_pool": pool, "avg_pool_3d": pool, "max_pool_ext": pool_ext, "avg_pool_1d": pool_ext,
    "avg_pool_2d": pool_ext, "avg_pool_3d_ext": pool_ext,
    "max_pool_argmax": pool_argmax, "adaptive_avg_pool": adaptive, "adaptive_max_pool": adaptive,
    "upsample": upsample, "upsample_linear": upsample, "resize": upsample, "resize_to": upsample,
    "grid_sample": grid_sample, "affine_grid": affine_grid, "unfold": unfold, "unfold_classic": unfold,
    "fold": fold, "pixel_shuffle": pixel_shuffle,
}
