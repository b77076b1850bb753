# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: attention of a list of tokens that is cut over ranks, whose keys are on others.

`gather` brings each rank the keys that its queries see, and no others, by one uneven all-to-all, and attends once; the
gradients of keys go home the same way. `ring` brings them in rounds, one rank's at a time, and merges; it keeps less. Beside
either, or alone, an axis called "ulysses" takes heads for tokens, by a redistribution. Which rows go where is known from the
order of tokens (`core/tokens.py`), on the host, to all ranks alike; so nothing is asked of others. Invariant: the result and
its gradients are those of one device, whatever the order.
"""
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ..comm.group import Group
from ..comm.pretended import executing
from ..core.balance import Mask
from ..core.mesh import DeviceMesh
from ..core.tokens import Tokens, check_mask, keys_by_rank
from ..custom_ops.local_map import local_map
from ..custom_ops.rows import Rows, SendRows, connected
from ..debug.types.doors import declared
from ..dispatch import modes
from ..errors import ConfigError, LayoutError, OpRuleError
from ..internals.target import on_cpu
from ..ops.local import varlen, varlen_cpu
from ..ops.local.dtypes import full, wider
from ..tensor.dtensor import DTensor
from ..tensor.token_lists import HEADS
from .blocks import Runs
from .ring import WHAT, WHO, ends, ring


def context_attention(mesh: DeviceMesh, algorithm: str = "gather"):
    """Attention over lists of tokens that an axis of a mesh cuts, as a function of (q, k, v, tokens).

    Args:
        mesh: the axis that cuts the list, `mesh["cp"]`; with an axis called "ulysses" behind it, which cuts it too, heads
            are cut over that one while attention runs: `mesh["cp", "ulysses"]`, or `mesh["ulysses"]` alone.
        algorithm: "gather" fetches the keys that a rank needs at once; "ring" those of one rank after another, while the
            ones before are worked on. It needs less memory; its gradient fetches keys again.

    Returns:
        `attention(q, k, v, tokens, *, causal=True, window=None, scale=None, dropout=0.0)`. q is `f[n@dp@cp, h@tp, e]`, k
        and v `f[n@dp@cp, g@tp, e]` with h a multiple of g, all in the order of `tokens`, which is this rank's part of the
        batch. `window` counts the token itself, and wants `causal`; `scale` is 1/sqrt(e) by default; `dropout` is 0. The
        result lies as q.
        Rotary embedding comes before, by `tokens.places()`.

    Raises:
        ConfigError: no such algorithm or mask; tokens of another number; heads that an axis does not divide.
        LayoutError: operands that are no such lists.
        OpRuleError: inside a gradient of a gradient. All ranks raise alike, before anything is sent.

    Source: keys by rows as in Llama 3 (Dubey et al. 2024, 3.3.2); Liu et al. 2023, "Ring Attention"; Jacobs et al. 2023,
        "DeepSpeed Ulysses".

    Example:
        >>> import numpy as np, mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> tokens = md.balance((3, 2), ranks=1)
        >>> q, k, v = tokens.cut(*np.random.default_rng(0).normal(size=(3, 5, 2, 4)), mesh=mesh)
        >>> md.context_attention(mesh["cp"])(q, k, v, tokens)
        DTensor(f64[5@cp, 2, 4], mesh=(cp=1), rank 0 holds [5, 2, 4])
    """
    kinds = {"gather": _gathered, "ring": ring}
    names = mesh.mesh_dim_names
    cuts = tuple(name for name in names if name != HEADS)
    if algorithm not in kinds:
        raise ConfigError(f"For '{WHO}', there is no algorithm {algorithm!r}.", "", f"It is one of {', '.join(kinds)}.",
                          f"an axis called '{HEADS}' in the mesh takes heads for tokens")
    if len(cuts) > 1 or names[len(cuts):] not in ((), (HEADS,)):
        raise ConfigError(f"For '{WHO}', the mesh has the axes {', '.join(names)}.", f"mesh({mesh.describe()})",
                          f"One axis cuts the list, and one behind it, '{HEADS}', heads.",
                          ('mesh["cp"]', f'mesh["cp", "{HEADS}"]', 'mesh["cp", "dp"].flatten("all"), for two as one'))
    maps: dict[tuple, Any] = {}

    def attention(q: DTensor, k: DTensor, v: DTensor, tokens: Tokens, *, causal: bool = True, window: int | None = None,
                  scale: float | None = None, dropout: float = 0.0) -> DTensor:
        check_mask(WHO, causal, window)
        if dropout:
            raise ConfigError(f"For '{WHO}', weights cannot be dropped.", f"dropout={dropout}",
                              "Which are dropped goes by a token's row, and in another order the same seed drops others.",
                              ("dropout of the result, behind attention",
                               "flash_attention_score(keep_prob=...) of whole rows, for the bits of one device"))
        if scale is not None and not isinstance(scale, int | float | np.number):
            raise ConfigError(f"For '{WHO}', the scale is a {type(scale).__name__}.", "",
                              "It is a number, alike on all ranks, and has no gradient.", "q * scale, and scale=1.0")
        if scale is not None and not math.isfinite(scale):
            raise ConfigError(f"For '{WHO}', the scale is {scale}.", "",
                              "It is finite: no weight of such products is a number. 0 weighs all that is seen alike.",
                              ("scale=None, for 1/sqrt(width)", "scale=0.0, for the mean"))
        target = _checked((q, k, v), tokens, cuts, names)
        if modes.mode.get().higher_order:
            raise OpRuleError(f"For '{WHO}', a derivative of its gradient was asked for.", q.layout.describe(),
                              "Kernels of attention are differentiated once; of products in their place MindSpore's second "
                              "derivative is wrong.", "take the inner gradient outside the outer function")
        moved = [x.redistribute(placements=target) for x in (q, k, v)]
        run = maps.get(target)
        if run is None:
            run = maps[target] = local_map(_local, (target,), device_mesh=q.device_mesh,
                                           out_shapes=lambda q, k, v: (*q[:2], v[2]))
        group = q.device_mesh.get_group(cuts) if cuts else None
        factor = q.shape[2] ** -0.5 if scale is None else scale
        out, = run(*moved, tokens, Mask(causal, window), factor, group, kinds[algorithm])
        return out if target == _by_dim(q) else out.redistribute(placements=_by_dim(q))
    return attention


def _by_dim(x: DTensor) -> tuple:
    """Per dim the axes that cut it, outermost first."""
    names = x.device_mesh.mesh_dim_names
    return tuple(tuple(names[a] for a in axes) or "None" for axes in x.layout.dim_axes)


def _checked(operands: tuple[DTensor, ...], tokens: Tokens, cuts: tuple[str, ...], names: tuple[str, ...]) -> tuple:
    """Per dim the axes that cut operands while attention runs; refuses what does not fit together."""
    q, k, v = operands
    if not isinstance(tokens, Tokens):
        raise ConfigError(f"For '{WHO}', 'tokens' is a {type(tokens).__name__}.", "",
                          "Of a list that is cut over ranks only its order says which token stands where.",
                          ("balance(documents, ranks)", "in_order(documents, ranks), as the list is"))
    if not all(isinstance(x, DTensor) and x.ndim == 3 for x in operands):
        raise LayoutError(f"For '{WHO}', operands are no lists of tokens.",
                          "\n".join(f"{type(x).__name__}{list(x.shape)}" for x in operands),
                          "They are DTensors [tokens, heads, width].",
                          ("tokens.cut(ids, ...) makes such a list of a batch", "x.reshape(n, heads, width) of a plain one"))
    shown = "\n".join(x.layout.describe() for x in operands)
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise LayoutError(f"For '{WHO}', operands are not of one floating-point dtype.", shown,
                          "Queries, keys and values are multiplied with each other.", "x.astype(ms.float32) of the others")
    mesh = q.device_mesh
    missing = [name for name in names if name not in mesh.mesh_dim_names]
    if missing or k.device_mesh != mesh or v.device_mesh != mesh:
        raise LayoutError(f"For '{WHO}', operands do not lie on one mesh with the axes {', '.join(names)}.", shown,
                          "The mesh given is one, or some of the axes, of the operands' mesh.", 'mesh["cp"] of that mesh')
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape))
    batch, *_ = q.layout.dim_axes
    outer = tuple(mesh.mesh_dim_names[a] for a in batch if mesh.mesh_dim_names[a] not in names)
    ranks, parts = math.prod(sizes[a] for a in cuts), math.prod(sizes[a] for a in outer)
    if tokens.ranks != ranks:
        raise ConfigError(f"For '{WHO}', the tokens are cut over {tokens.ranks} ranks, and the axis has {ranks}.", shown,
                          "Which rank has which tokens is said by their order.", f"balance(documents, ranks={ranks})")
    if not len(q) == len(k) == len(v) == len(tokens) * parts:
        raise ConfigError(f"For '{WHO}', lists have {len(q)}, {len(k)} and {len(v)} rows for {parts} x {len(tokens)} "
                          "tokens.", shown, "Queries and keys are the tokens; each part of the batch has as many.",
                          "the Tokens that the batch was cut by")
    h, g = q.shape[1], k.shape[1]
    if q.shape[2] != k.shape[2]:
        raise ConfigError(f"For '{WHO}', queries are {q.shape[2]} wide, and keys {k.shape[2]}.", shown,
                          "They are multiplied with each other; values may have another width.", "one width for both")
    if v.shape[1] != g or not g or h % g:
        raise ConfigError(f"For '{WHO}', {h} heads of queries do not share {g} of keys and {v.shape[1]} of values.", shown,
                          "Keys and values have as many heads, and each serves as many of queries.",
                          "heads of queries that are a multiple of those of keys")
    heads = tuple(mesh.mesh_dim_names[a] for a in q.layout.dim_axes[1] if mesh.mesh_dim_names[a] not in names)
    heads += tuple(name for name in names if name == HEADS)
    over, taken_too = math.prod(sizes[a] for a in heads), sizes[HEADS] if HEADS in heads else 1
    if g % over:
        each = g // (over // taken_too) if g % (over // taken_too) == 0 else 1
        fits = ", ".join(str(d) for d in range(1, each + 1) if each % d == 0)
        raise ConfigError(f"For '{WHO}', {g} heads of keys are not divided by {over} ranks.",
                          f"{shown}\naxes {', '.join(f'{a}={sizes[a]}' for a in heads)}",
                          "A rank has whole heads of keys, with the queries that share them.",
                          (f"a size of '{HEADS}' among {fits}",
                           f"an axis of another name than '{HEADS}', over which keys are fetched") if HEADS in heads else
                          (f"an axis whose size divides {g}", "keys and values repeated before, so that each rank has some"))
    return (*outer, *cuts) or "None", heads or "None", "None"


@declared(("V", "*", "->", "V"), ("I", "*", "->", "I"))
def _local(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, mask: Mask, scale: float, group: Group | None,
           how) -> tuple[Tensor]:
    """One rank's queries; `group` is of the ranks that share a part of the batch."""
    me = group.rank_index if group is not None else 0
    if group is not None and modes.mode.get().check_rules:
        group.agree(f"{WHO} tokens {hash((tokens, mask))}, scale {scale}")
    table = keys_by_rank(tokens, mask)
    if all(not len(rows) for r, keys in enumerate(table) for s, rows in enumerate(keys.rows) if s != r):
        group = None  # nobody needs another's keys, and everybody knows that
    return (how(q, k, v, tokens, mask, scale, group, me),)


# -- gather ------------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=64)
def _table(tokens: Tokens, mask: Mask, me: int) -> Rows:
    """Which keys this rank gives to whom, its own included: so there is none only where there is no query."""
    keys, count = keys_by_rank(tokens, mask), len(tokens.runs[me])
    gives = [of.rows[me] for of in keys]
    return Rows(tokens.sizes[me], np.concatenate(gives), [len(x) for x in gives], [len(x) for x in keys[me].rows],
                WHAT, f"kernel order of {count} run{'s' if count != 1 else ''}")


def _gathered(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, mask: Mask, scale: float, group: Group | None, me: int):
    keys, g = keys_by_rank(tokens, mask)[me], k._shape[1]
    alike = k._shape[2] == v._shape[2]  # beside each other they are one message
    if group is None:
        there: tuple[Tensor, ...] = (k, v)
        order = np.concatenate(keys.rows)[keys.order]
    else:
        sent = (mint.cat((k, v), 1),) if alike else (k, v)
        there = SendRows.apply(_table(tokens, mask, me), group, *sent)
        order = keys.order
    if not q._shape[0]:  # it gives to others all the same, and must be there in the backward
        return connected(full((0, q._shape[1], v._shape[2]), 0, q.dtype), q, *there)
    if len(order) != there[0]._shape[0] or (order != np.arange(len(order))).any():
        there = tuple(_in_kernel_order(x, order) for x in there)
    rest = ends([run[1:] for run in tokens.runs[me]]), ends(list(keys.spans)), mask, scale
    if (dry := executing()) is not None:
        return _dry(dry, q, there, g, *rest, sum(mask.work(a, b, tokens.documents[d]) for d, a, b in tokens.runs[me]))
    if on_cpu():
        return Runs.apply(q, *(*there, None)[:2], *rest)
    k, v = there if len(there) == 2 else (mint.narrow(there[0], 1, at, g) for at in (0, g))
    return varlen.runs(q, k, v, *rest)


def _dry(dry, q: Tensor, there: tuple[Tensor, ...], g: int, q_ends: list[int], k_ends: list[int], mask: Mask, scale: float,
         pairs: int) -> Tensor:
    """What a dry run sees of the one node, or of a device's one call: no scores, so many pairs of a query and its key."""
    (t, h, e), (s, _, wide), tensors = q.shape, there[-1].shape, (q, *there)
    if on_cpu():
        tensors = tuple(map(wider, tensors))
        own, while_forward, while_backward = varlen_cpu.beside((t, h, e), (s, g, e), (s, g, wide), q_ends, k_ends)
        while_backward.append((t, h, wide))  # heads are apart by a view, of gradients too, and as an array a view is copied
        if len(there) == 2:
            while_forward, while_backward = [*while_forward, (s, g, wide)], [*while_backward, (s, g, wide)]
        else:  # gradients of keys and of values, before they are beside each other
            while_backward += [(g, s, e), (g, s, wide)]
    else:  # the kernel gives the greatest score and the sum of weights of each query eight times, in float32
        own, while_forward, while_backward = [(t, h, 8 * 4 // q.itemsize)] * 2, [], []
    out = dry.node(WHO, tensors, (t, h, wide), 2 * pairs * h * (e + wide), (own, while_forward, while_backward))
    return out.astype(q.dtype) if out.dtype != q.dtype else out


def _in_kernel_order(x: Tensor, order: np.ndarray) -> Tensor:
    if x.dtype == ms.bfloat16:  # no such kernel on CPU; elsewhere a cast there and back changes nothing
        return ops.gather(wider(x), Tensor(order.astype(np.int32)), 0).astype(x.dtype)
    return ops.gather(x, Tensor(order.astype(np.int32)), 0)
