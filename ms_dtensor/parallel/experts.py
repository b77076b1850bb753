# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts whose experts are on different ranks: tokens travel to their experts, results travel home.

Dropless: every choice is computed, whatever the loads are. Tokens are cut over the ranks that share the experts, so these
axes are data axes with one difference: of experts each rank has some. A token goes once to each of its experts, or once to
each rank that has any of them (`dedup`), where results are weighted and added up.

Invariant: all ranks make every call, forward and backward, also a rank without tokens, or to which none come. `SendRows` and
`ReturnRows` hold to it; what a rank makes of nothing is connected to all that it would have been made of.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from functools import lru_cache, partial
from numbers import Integral
from typing import Literal

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import auto_generate

from .. import comm
from ..comm.pretended import executing
from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import PARTIAL, REPLICATE, Placement, Shard
from ..custom_ops.local_map import local_map
from ..custom_ops.rows import ReturnRows, Rows
from ..debug.types.doors import declared
from ..errors import ConfigError, LayoutError
from ..internals.target import on_cpu
from ..ops.local import Nothing
from ..ops.local.dtypes import full, rounded, wider
from ..ops.local.swiglu_cpu import SwigluRows, beside
from ..tensor.dtensor import DTensor
from .experts_counts import Owners, counts_there, goes_to, known, no_such, on_host, unknown
from .experts_room import by_room, within
from .experts_rows import Call, added_at, call, rows_at, sent, weighted
from .layouts import around_construct, shard_parameter
from .styles import ParallelStyle

Dedup = bool | Literal["auto"]
_style: ContextVar[Dedup] = ContextVar("dedup", default="auto")  # what the style around a call says
_WORTH = 0.95  # of the bytes: from here on the work of adding up on the far side is saved for nothing


class ExpertParallel(ParallelStyle):
    """Cuts the experts of a cell over one axis, or over several: each rank has some of them, and tokens go there.

    The cell, or cells in it, has the experts' weights, of three dims `[E, ..]`, and calls `moe`. Only these are cut; a rank
    may have one expert fewer than others, or none. The batch is cut over the same axes: data parallelism goes over all data
    axes for the other parameters, and over those without experts for these.

    Args:
        dedup: a token goes once to each rank that has any of its experts. "auto": where that saves bytes.

    Raises:
        LayoutError: there are no such weights.

    Example:
        >>> import mindspore as ms, numpy as np, ms_dtensor as md
        >>> from mindspore import nn
        >>> class Experts(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w1, self.w2, self.w3 = (ms.Parameter(ms.Tensor(np.ones(s, np.float32)))
        ...                                      for s in ((2, 6, 4), (2, 4, 6), (2, 6, 4)))
        ...     def construct(self, x, weights, chosen):
        ...         return md.moe(x, weights, chosen, self.w1, self.w2, self.w3)
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        >>> cell = md.parallelize_module(Experts(), mesh, md.ExpertParallel())
        parallelize_module over ep=1:
            ExpertParallel: Experts
        >>> cell.w1.layout
        f32[2@ep, 6, 4]
    """

    def __init__(self, dedup: Dedup = "auto"):
        self.dedup = _asked(dedup, "ExpertParallel")

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        if not any(p.ndim == 3 for p in module.get_parameters()):
            raise LayoutError(f"For 'ExpertParallel', {type(module).__name__} has no experts.",
                              ", ".join(f"{p.name}{list(p.shape)}" for p in module.get_parameters()),
                              "Experts are parameters of three dims, one beside the other: [E, ..].",
                              "name the cell that has them, or stack the experts' weights")
        return {key: Shard(0) for key, p in module._params.items() if p is not None and p.ndim == 3}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.check(module, device_mesh)
        for _, cell in module.cells_and_names():
            for key, param in cell._params.items():
                if param is not None and param.ndim == 3:
                    shard_parameter(cell, key, device_mesh, [Shard(0)] * device_mesh.ndim, self.src_data_rank)

        def wrap(construct):
            def run(*args, **kwargs):
                token = _style.set(self.dedup)
                try:
                    return construct(*args, **kwargs)
                finally:
                    _style.reset(token)
            return run
        around_construct(module, wrap)
        return module


def moe(x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *, mesh: DeviceMesh | None = None,
        dedup: Dedup = "auto", room: int | None = None, shared: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The weighted sum of each token's experts, `w2 (silu(w1 x) * w3 x)`; with experts cut, over the ranks that have them.

    Of plain tensors, and where experts are whole on each rank, each rank computes its tokens. Over axes that cut dim 0 of
    the experts, tokens are sent (one all-to-all of numbers, then the rows there and back; as many in the backward). Axes
    may cut the experts' widths, too (dim 1 of w1 and w3, dim 2 of w2): the result is a sum over these. Gradients of experts
    are summed over those axes only that cut tokens and not experts.

    Args:
        x: f[n, d]: tokens. Cut over the axes that cut the experts.
        weights: f[n, k], of each token's experts, as `Router` makes them.
        chosen: i32[n, k]: which these are; -1: none (what a capacity has dropped), which costs nothing.
        w1: f[E, f, d].
        w2: f[E, d, f].
        w3: f[E, f, d].
        mesh: axes that cut the experts; None: those on which w1 is cut.
        dedup: send a token once to each rank, not to each expert; "auto": where it saves bytes, or as the style says.
        room: an expert takes so many choices of each rank at most, in the order of its tokens; what is over is dropped. All
            sizes are known then, and a device is not waited for; nor are weights that are NaN told, or wrong experts,
            which are dropped.
        shared: a cell, or a function, of x: f[n, d] of each token, which is added (DeepSeek's shared experts). It computes
            while tokens are on their way to their experts, and its backward while gradients are on theirs.

    Returns:
        f[n, d], laid out as x; over axes that cut widths a sum. Where the result of `shared` lies otherwise, as this one,
        of which sums are reduced first.

    Raises:
        ConfigError: shapes or dtypes that do not fit, more experts a token than there are, a room that is no whole number.
        LayoutError: experts are cut over an axis that does not cut the tokens.
        DTensorError: weights that are NaN (where experts are cut), or experts that there are not; told by all
            ranks that share experts, before tokens are sent, with the name of w1, where it is a parameter.

    Source: Shazeer et al. 2017; Gale et al. 2022, "MegaBlocks" (dropless).

    Example:
        >>> import mindspore as ms, numpy as np, ms_dtensor as md
        >>> x, w = ms.Tensor([[1.0], [2.0]]), ms.Tensor(np.array([[[1.0]], [[10.0]]], np.float32))
        >>> one = ms.Tensor([[1.0], [1.0]])
        >>> md.moe(x, one, ms.Tensor([[0], [1]], ms.int32), w, w, w).asnumpy().ravel().astype(int)
        array([   0, 4000])
    """
    _check_operands(x, weights, chosen, w1, w2, w3)
    _asked(dedup, "moe")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"For 'moe', 'mesh' is {mesh!r}.", "", "It is the part of the mesh that cuts the experts.",
                          'mesh["ep"]')
    if shared is not None and not callable(shared):
        raise ConfigError(f"For 'moe', 'shared' is {shared!r}.", "", "It is called with x.", "a cell, or a function of x")
    if room is not None and (not isinstance(room, Integral) or isinstance(room, bool) or room < 1 or dedup is True):
        raise ConfigError("For 'moe', 'room' does not fit.", f"room = {room!r}, dedup = {dedup}",
                          "An expert has room for one choice at least, a whole number; each choice goes to its expert.",
                          ("room=math.ceil(...)", "room=None: whatever the loads are", 'dedup="auto"'))
    room = None if room is None else int(room)  # NumPy's whole numbers are no sizes to MindSpore
    if not any(isinstance(t, DTensor) for t in (x, weights, chosen, w1, w2, w3)):
        y = mixture(x, weights, chosen if room is None else within(chosen, w1.shape[0], room), w1, w2, w3)
        return y if shared is None else _sum(y, shared(x))
    run = _mapped(comm.world_key(), *(getattr(t, "layout", None) for t in (x, weights, chosen, w1, w2, w3)),
                  None if mesh is None else mesh.mesh_dim_names, _style.get() if dedup == "auto" else dedup, room)
    stood_for = getattr(w1, "inited_param", None)  # whole values have no name
    name = getattr(w1 if stood_for is None else stood_for, "name", "")
    made: list[Tensor] = []
    around = copy_context()  # what is shared is no local code, which has a context of its own in dry runs and checks
    token = call.set(Call(name, None if shared is None else lambda: made.append(around.run(shared, x))))
    try:
        with comm.annotate(of=name):
            y = run(x, weights, chosen, w1, w2, w3)
    finally:
        call.reset(token)
    return y if shared is None else _sum(y, made[0] if made else shared(x))  # where nothing was sent it has not run


def _sum(y: Tensor, more: Tensor) -> Tensor:
    """Of the experts' result and the shared ones', laid out as this one."""
    if not isinstance(more, Tensor) or isinstance(more, DTensor) != isinstance(y, DTensor) or more.shape != y.shape or \
            isinstance(y, DTensor) and more.device_mesh != y.device_mesh:
        raise LayoutError("For 'moe', the result of 'shared' does not lie on the tokens' mesh, or has another shape.",
                          f"{_told(more)}, tokens {_told(y)}", "It is added to the experts' result, row by row.",
                          "a cell, or a function of x, which gives f[n, d]")
    if isinstance(y, DTensor) and y.placements != more.placements:
        lies = [REPLICATE if p.is_partial() else p for p in more.placements]
        y, more = y.redistribute(placements=lies), more.redistribute(placements=lies)
    return y + more


def _told(x) -> str:
    return x.layout.describe() if isinstance(x, DTensor) else f"{type(x).__name__}{list(getattr(x, 'shape', ()))}"


def _asked(dedup, who: str) -> Dedup:
    if dedup not in (True, False, "auto"):
        raise ConfigError(f"For '{who}', 'dedup' is {dedup!r}.", "", "It is True, False or 'auto'.", 'dedup="auto"')
    return dedup


def _check_operands(x, weights, chosen, w1, w2, w3) -> None:
    if chosen.is_floating_point() or chosen.dtype == ms.bool_:
        raise ConfigError(f"For 'moe', 'chosen' is {chosen.dtype}.", f"chosen{list(chosen.shape)}",
                          "It has numbers of experts.", "chosen.astype(ms.int32)")
    if any(t.dtype != x.dtype for t in (w1, w2, w3)) or not x.is_floating_point():
        raise ConfigError("For 'moe', tokens and experts are not of one dtype.",
                          ", ".join(f"{k} {t.dtype}" for k, t in zip(("x", "w1", "w2", "w3"), (x, w1, w2, w3))),
                          "Their products take floats of one dtype; a rank that no token comes to would not notice.",
                          "x.astype(w1.dtype)")
    shapes = [tuple(t.shape) for t in (x, weights, chosen, w1, w2, w3)]
    n, d, k, count, f = (shapes[i][j] if len(shapes[i]) > j else 0 for i, j in ((0, 0), (0, 1), (1, 1), (3, 0), (3, 1)))
    if shapes != [(n, d), (n, k), (n, k), (count, f, d), (count, d, f), (count, f, d)] or not 1 <= k <= count:
        names = zip(("x", "weights", "chosen", "w1", "w2", "w3"), shapes)
        raise ConfigError("For 'moe', the shapes do not fit each other.", ", ".join(f"{k}{list(v)}" for k, v in names),
                          "x [n, d], weights and chosen [n, k] with 1 <= k <= E, w1 and w3 [E, f, d], w2 [E, d, f].",
                          "reshape x to a list of tokens, and chosen to [n, 1] of one expert a token; transpose weights "
                          "that are [E, in, out]")


# -- layouts -------------------------------------------------------------------------------------------------------------
# on an axis that cuts tokens and experts, tokens alone, widths, or nothing
_TYPED = declared(("V", "*", "->", "V"), ("V", "V", "V", "R", "R", "R", "->", "V"),
                  ("R", "R", "R", "V", "V", "V", "->", "P"), ("I", "*", "->", "I"))


@lru_cache(maxsize=256)
def _mapped(world, x: Layout | None, weights, chosen, w1: Layout | None, w2, w3, names: Sequence[str] | None, dedup: Dedup,
            room: int | None):
    """The local function for tensors of these layouts, mapped over shards; `world`: whose rank this is."""
    laid = {"x": x, "weights": weights, "chosen": chosen, "w1": w1, "w2": w2, "w3": w3}
    if x is None or w1 is None or len({t and t.mesh for t in laid.values()}) > 1:
        raise LayoutError("For 'moe', some tensors are plain, or on another mesh.",
                          "\n".join(f"{name} {'plain' if t is None else t.describe()}" for name, t in laid.items()),
                          "Tokens and experts are DTensors on one mesh, or all are plain.",
                          ("replicate or fully_shard the model over the data axes: its parameters move to the common mesh",
                           "distribute_tensor(t, mesh, placements)"))
    mesh, k = x.mesh, weights.shape[1]
    cut = [a for a, p in enumerate(w1.placements) if p.is_shard(0)]
    if names is not None and [mesh.axis_index(n) for n in names] != cut:
        raise LayoutError(f"For 'moe', the experts are not cut over {', '.join(names)}.", w1.describe(),
                          "`mesh` names the axes that cut dim 0 of w1, w2 and w3.",
                          ("leave mesh out", f"parallelize_module(cell, mesh[{', '.join(map(repr, names))}], "
                           "ExpertParallel())"))
    whole = [mesh.mesh_dim_names[a] for a in cut if not x.placements[a].is_shard(0) and mesh.shape[a] > 1]
    if whole:
        otherwise = not x.placements[mesh.axis_index(whole[0])].is_replicate()
        raise LayoutError(f"For 'moe', experts are cut over {whole[0]!r}, and the tokens are not: every rank of "
                          f"{whole[0]!r} has {'a part of ' * otherwise}all tokens.", f"{x.describe()}, w1 {w1.describe()}",
                          "Each rank sends the tokens that it has, whole ones; and no two ranks the same.",
                          ("x.redistribute(placements=[Shard(0), ...]) before the router, and back behind the experts"
                           if otherwise else "cut the tokens there, too (sequence parallelism, of 'tp')",
                           f"leave {whole[0]!r} out of the axes of ExpertParallel"))
    rows: list[Placement] = [p if p.is_shard(0) else REPLICATE for p in x.placements]
    width = [a for a, p in enumerate(w1.placements) if p.is_shard(1) and rows[a].is_replicate()]
    ws = [[Shard(0) if a in cut else Shard(dim) if a in width else REPLICATE for a in range(mesh.ndim)] for dim in (1, 2, 1)]
    out = [PARTIAL if a in width else p for a, p in enumerate(rows)]
    here = mesh.get_coordinate()
    run = mixture
    if room is not None:
        def run(x, weights, chosen, *ws):
            return mixture(x, weights, within(chosen, w1.shape[0], room), *ws)
    if here is not None and math.prod(mesh.shape[a] for a in cut) > 1:
        axes, members = tuple(mesh.mesh_dim_names[a] for a in cut), Layout(mesh, ws[0], w1.shape)
        group = mesh.get_group(axes)
        bounds = tuple(members.local_box(mesh.coordinate_of(r))[0] for r in group.ranks)
        size = np.dtype({"bfloat16": "f2"}.get(x.dtype, x.dtype)).itemsize
        once = ratio(w1.shape[0], k, group.size, x.shape[1] * size) < _WORTH if dedup == "auto" else dedup

        form = _by_rank if once else _by_choice
        if room is not None:  # no rank has more choices than of all its tokens
            tokens = Layout(mesh, rows, x.shape)
            most = max(tokens.local_shape(mesh.coordinate_of(r))[0] for r in group.ranks)
            form = partial(by_room, min(room, max(most * k, 1)), swiglu_rows)

        def run(*tensors):
            return form(Owners(mesh.get_group(axes), bounds), w1.shape[0], *tensors)  # a dry run has a group of its own
        run.__name__ = "moe"
    return local_map(_TYPED(run), out, (rows, rows, rows, *ws), redistribute_inputs=True,
                     out_shapes=lambda *shapes: (x.shape,))


def ratio(experts: int, k: int, ranks: int, row: int) -> float:
    """Expected bytes of tokens sent once to each rank, over those sent once to each expert; `row`: bytes of a token.

    A rank has none of a token's k experts with probability C(E - E/N, k) / C(E, k). Numbers of experts (2 bytes) and weights
    (4) go with a token on one of its two ways.

    Example:
        >>> from ms_dtensor.parallel.experts import ratio
        >>> round(ratio(64, 8, 8, 2048 * 2), 3), ratio(8, 2, 8, 4096) > 1
        (0.683, True)
    """
    some = 1 - math.comb(experts - experts // ranks, k) / math.comb(experts, k)
    return ranks * some * (2 * row + 6 * k) / (k * 2 * row)


# -- on one rank ---------------------------------------------------------------------------------------------------------
def mixture(x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """`moe` of plain tensors."""
    (n, k), flat, order = chosen.shape, *_by_expert(on_host(chosen))
    if odd := unknown(flat, w1.shape[0]):
        raise no_such(f"{odd} choices", w1.shape[0])
    sizes = np.bincount(flat[order], minlength=w1.shape[0])
    if _at_once(order, w1):
        return _summed(x, weights, order, sizes, w1, w2, w3)
    y = swiglu_rows(rows_at(x, order // max(k, 1)), sizes, w1, w2, w3)
    return weighted(_at_home(y, order, n * k), weights, x)


def _at_once(at: np.ndarray | Tensor, w1: Tensor) -> bool:
    """Whether choices of these numbers go through experts in one node of products: on a CPU, if there is anything to do."""
    return on_cpu() and len(at) > 0 and w1.shape[1] > 0


@declared(("V", "V", "V", "V", "V", "->", "V"), ("V", "V", "R", "R", "R", "->", "V"), ("R", "R", "V", "V", "V", "->", "P"),
          ("R", "*", "->", "R"), ("I", "*", "->", "I"))  # tokens and experts are cut, tokens alone, widths, or nothing
def _summed(x: Tensor, weights: Tensor, at: np.ndarray, sizes: np.ndarray, *ws: Tensor) -> Tensor:
    """[n, d]: the weighted sum of each row's choices; `at` has their numbers, expert by expert."""
    tensors = [wider(t) for t in (x, weights, *ws)]
    if (dry := executing()) is not None:
        (_, d), hidden = x.shape, (len(at), ws[0].shape[1])
        own = (hidden, hidden), *beside(sizes, d, hidden[1])
        return rounded(dry.node("swiglu_rows", tensors, x.shape, 6 * math.prod(hidden) * d, own), x)
    return rounded(SwigluRows.apply(sizes, at, *tensors), x)


def swiglu_rows(rows: Tensor, sizes: np.ndarray, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Rows f[m, d] through their experts: the first `sizes[0]` through expert 0, and so on; [m, d]."""
    if not rows.shape[0] or not w1.shape[1]:
        return Nothing.apply(tuple(rows.shape), rows.dtype, rows, w1, w2, w3)
    if not on_cpu():
        counts = Tensor(np.asarray(sizes, np.int64))

        def product(a, w):
            return auto_generate.grouped_matmul_v4([a], [mint.transpose(w, 1, 2)], group_list=counts, split_item=3,
                                                   group_type=0, group_list_type=1)[0]
        return product(ops.swiglu(mint.cat((product(rows, w1), product(rows, w3)), 1), 1), w2)
    product = ops.MatMul(transpose_b=True)  # many times as fast as mint's
    used = [int(c) for c in sizes if c]
    parts = mint.split(wider(rows), used) if len(used) > 1 else (wider(rows),)
    of = [w for w, c in zip(zip(*(ops.unstack(wider(w)) for w in (w1, w2, w3))), sizes) if c]
    out = [product(mint.nn.functional.silu(product(a, gate)) * product(a, up), down)
           for a, (gate, down, up) in zip(parts, of)]
    return rounded(mint.cat(out) if len(out) > 1 else out[0], rows)


def _by_expert(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The experts of all choices, one behind another; and the numbers of the choices that are not -1, sorted by expert."""
    flat = chosen.reshape(-1)
    return flat, np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0):]


def _at_home(y: Tensor, index: np.ndarray, count: int) -> Tensor:
    """[count, d]: row i of y is row `index[i]`, and there is one at most for each."""
    return rows_at(y, np.argsort(index, kind="stable")) if len(index) == count else added_at(y, index, count)


# -- over ranks ----------------------------------------------------------------------------------------------------------
def _by_choice(owners: Owners, experts: int, x, weights, chosen, w1, w2, w3) -> Tensor:
    """A copy of a token for each of its experts; weights stay at home."""
    host, theirs = known(owners, experts, weights, chosen, False)
    (n, k), flat, order = chosen.shape, *_by_expert(host)
    counts = np.bincount(flat[order], minlength=experts)
    send, recv = [int(counts[a:b].sum()) for a, b in owners.bounds], theirs.sum(1).tolist()
    got, = sent(Rows(n, order // max(k, 1), send, recv, "tokens", "their experts"), owners.group, x)
    each = theirs.shape[1]
    by = np.argsort(np.repeat(np.tile(np.arange(each), len(theirs)), theirs.reshape(-1)), kind="stable")
    if _at_once(by, w1):
        y = _summed(got, full((len(by), 1), 1, got.dtype), by, theirs.sum(0), w1, w2, w3)
    else:
        y = _at_home(swiglu_rows(rows_at(got, by), theirs.sum(0), w1, w2, w3), by, len(by))
    home = Rows(n * k, order, send, recv, "tokens", "their experts")
    back, = ReturnRows.apply(home, owners.group, y)
    return weighted(back, weights, x)


def _by_rank(owners: Owners, experts: int, x, weights, chosen, w1, w2, w3) -> Tensor:
    """A copy of a token for each rank that has any of its experts, with its weights; there they are added up."""
    host, theirs = known(owners, experts, weights, chosen, True)
    (n, k), goes = chosen.shape, goes_to(owners, host)
    token, send, recv, sizes = np.nonzero(goes)[1], goes.sum(1), theirs[:, 0], theirs[:, 1:].sum(0)
    dtype, there = ms.int16 if experts < 2 ** 15 else ms.int32, Rows(
        n, token, send.tolist(), recv.tolist(), "tokens", "their experts' ranks")
    numbers = Tensor(host, dtype) if counts_there() else chosen.astype(dtype)
    got, w, ids = sent(there, owners.group, x, weights, numbers)
    at = row = np.zeros(0, np.int32)
    if counts_there():
        ids = _received(ids, host, token, send, owners) if recv.sum() else np.zeros((0, k), np.int32)
        (first, end), flat = owners.mine, ids.reshape(-1)
        at = np.nonzero((flat >= first) & (flat < end))[0]
        at = at[np.argsort(flat[at], kind="stable")]
        row = at // max(k, 1)
        sizes = np.bincount(flat[at] - first, minlength=end - first)
    elif sizes.sum():
        at = _sorted_there(ids.reshape(-1), *owners.mine)[:int(sizes.sum())]
        row = ops.floor_div(at, k)
    if _at_once(at, w1):
        y = _summed(got, w, at, sizes, w1, w2, w3)
    else:
        y = swiglu_rows(rows_at(got, row), sizes, w1, w2, w3)
        y = wider(y) * wider(rows_at(w.reshape(-1, 1), at)) if len(at) else y  # w is of one node with `got`
        y = added_at(y, row, int(recv.sum())).astype(x.dtype)
    return ReturnRows.apply(there, owners.group, y)[0]


def _received(ids: Tensor, host: np.ndarray, token: np.ndarray, send: np.ndarray, owners: Owners) -> np.ndarray:
    """The choices of tokens that have come; in a dry run those of this rank's, from each."""
    if executing() is None:
        return ids.asnumpy()
    me = owners.group.rank_index
    first = int(send[:me].sum())
    return np.tile(host[token[first:first + int(send[me])]], (len(owners.bounds), 1))


def _sorted_there(ids: Tensor, first: int, end: int) -> Tensor:
    """i32: the numbers of choices, those of experts `first` to `end` before others and by expert, as they came."""
    ids = ids.astype(ms.int32)
    key = mint.where(ops.logical_and(ids >= first, ids < end), ids - first, end - first)
    return mint.sort(key, dim=0, stable=True)[1].astype(ms.int32)
