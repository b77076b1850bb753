# SPDX-License-Identifier: Apache-2.0
"""`suggest_plan`: the tensor-parallel plan of a Llama-shaped model, computed from its cells, printed, and left to you.

Cells are recognised by what Llama, Qwen, Mistral and their kin call them, and a name counts only if the shapes agree: an
attention's output projection takes what its queries give, a feed-forward's second matrix what its first gives. What does
not divide by the axis, and what is not recognised, is left whole, and each matrix of it is said, with the reason. Nothing is
changed or communicated here.
"""
from __future__ import annotations

import re
from typing import TypeAlias

from mindspore import nn

from ..core.mesh import DeviceMesh, resolve_mesh
from ..core.placements import Replicate
from ..errors import ConfigError
from .fused import FusedColwiseParallel
from .styles import ColwiseParallel, ParallelStyle, RowwiseParallel, _is_embedding, _is_linear

_QUERY, _KEY, _VALUE = ("wq", "q_proj", "q", "query"), ("wk", "k_proj", "k", "key"), ("wv", "v_proj", "v", "value")
_OUT = ("wo", "o_proj", "o", "out_proj", "dense")
_QKV, _BY_HEAD = ("wqkv", "qkv_proj", "qkv"), "query_key_value"  # GPT-NeoX, BLOOM and Falcon order its rows head by head
_GATE, _UP, _DOWN = ("w1", "gate_proj", "gate", "fc1", "dense_h_to_4h"), ("w3", "up_proj", "up"), (
    "w2", "down_proj", "down", "fc2", "dense_4h_to_h")
_GATE_UP = ("gate_up_proj", "w13", "gate_up")
_HEAD, _TABLE = ("output", "lm_head", "head", "embed_out"), ("tok_embeddings", "embed_tokens", "embedding", "wte", "embed",
                                                             "embed_in")
_HEADS, _KV_HEADS = ("n_heads", "num_heads", "num_attention_heads", "heads"), ("n_kv_heads", "num_kv_heads",
                                                                               "num_key_value_heads", "kv_heads")


# the styles of an attention's or a feed-forward's linear cells by name, and why it may have to stay whole
_Block: TypeAlias = tuple[dict[str, ParallelStyle], str]
_DTENSORS = {"use_local_output": False}


def suggest_plan(module: nn.Cell, device_mesh: DeviceMesh | None = None) -> dict[str, ParallelStyle]:
    """A plan for `parallelize_module`, from the cells of a Llama-shaped model; printed by one rank.

    Args:
        module: the model.
        device_mesh: mesh of one axis, e.g. `mesh["tp"]`; default the current one.

    Returns:
        {pattern: style}, to read, change and pass on: nothing is applied. Its styles keep activations DTensors
        (`use_local_output=False`), because such models speak of global sizes; `distribute_module` afterwards replicates
        norms and buffers. The order of the rows of a fused q, k, v is the model's, which no shape tells: `qkv_proj` and its
        like are taken as q, k, v one under the other, `query_key_value` is cut so that any order is right. Every
        matrix that the plan leaves out is printed too, with the reason.

    Raises:
        ConfigError: a mesh of several axes, or a model in which nothing is recognised.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> class Mlp(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_proj, self.up_proj, self.down_proj = nn.Dense(4, 8), nn.Dense(4, 8), nn.Dense(8, 4)
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> plan = md.suggest_plan(Mlp(), mesh)
        suggest_plan for Mlp over tp=1:
          gate_proj  ColwiseParallel   1 cell
          up_proj    ColwiseParallel   1 cell
          down_proj  RowwiseParallel   1 cell
        then: parallelize_module(model, mesh, plan); distribute_module(model, mesh)
    """
    mesh = resolve_mesh(device_mesh, "suggest_plan")
    if mesh.ndim != 1:
        raise ConfigError(f"For 'suggest_plan', the mesh has {mesh.ndim} axes.", f"mesh({mesh.describe()})",
                          "The plan is for one axis.", f"pass mesh[{mesh.mesh_dim_names[-1]!r}]")
    plan: dict[str, ParallelStyle] = {}
    cells: dict[str, list[str]] = {}
    alone: list[str] = []
    for path, style, problem in _found(module, mesh.size()):
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        if problem:
            alone.append(f"{pattern}, because {problem}")
        else:
            plan[pattern] = style
            cells.setdefault(pattern, []).append(path)
    if not plan:
        raise ConfigError(f"For 'suggest_plan', this {type(module).__name__} has nothing to cut over {mesh.size()} ranks.",
                          "; ".join(dict.fromkeys(alone)), "It knows the cell names of Llama-shaped models.",
                          "write the plan: {\"layers.*.attention.wq\": ColwiseParallel(), ...}")
    if mesh.get_rank() == mesh.root.rank_list[0]:
        wide = max(map(len, plan))
        print(f"suggest_plan for {type(module).__name__} over {mesh.describe()}:")
        for pattern, style in plan.items():
            n = len(cells[pattern])
            print(f"  {pattern:<{wide}}  {type(style).__name__:<17} {n} cell{'s' if n > 1 else ''}")
        for line in dict.fromkeys(alone):
            print(f"  left whole: {line}")
        if any(pattern.rsplit(".", 1)[-1] in (*_QKV, _BY_HEAD) for pattern in plan):
            print("  the order of a fused projection is the model's: FusedColwiseParallel takes all q, then k, then v;\n"
                  "  ColwiseParallel(use_local_output=False) is right for any order")
        print("then: parallelize_module(model, mesh, plan); distribute_module(model, mesh)", flush=True)
    return plan


def _found(module: nn.Cell, ranks: int):
    """(path, style, "") of every cell that is recognised, and (path, style or None, problem) of those that stay whole."""
    cells = dict(module.cells_and_names())
    paths = {id(cell): path for path, cell in cells.items()}
    for path, cell in cells.items():
        children = dict(cell._cells)
        linear = {k: c for k, c in children.items() if c is not None and _is_linear(c)}
        prefix = path + "." if path else ""
        known: set[str] = set()
        for block in (_attention(cell, linear, ranks), _feed_forward(linear, ranks)):
            styles, problem = block or ({}, "")
            known |= {*styles}
            for key, style in styles.items():
                yield prefix + key, style, problem
        for key, child in children.items():
            if child is not None and paths[id(child)] != prefix + key:
                continue  # it stands elsewhere, too, and goes by the name that it has there
            if child is not None and _is_embedding(child) and key in _TABLE:
                yield prefix + key, RowwiseParallel(input_layouts=Replicate(), **_DTENSORS), ""
            elif key in _HEAD and key in linear:
                yield prefix + key, ColwiseParallel(**_DTENSORS), ""
            elif child is not None and key not in known and any(
                    p is not None and p.ndim > 1 for p in child._params.values()):
                yield prefix + key, None, _why_whole(cell, key, linear)


def _why_whole(cell, key: str, linear) -> str:
    """Why a child that has a matrix was not recognised."""
    if key not in linear:
        return f"a {type(cell._cells[key]).__name__} is cut only if it is an embedding of a known name"
    if key in (*_GATE, *_UP, *_DOWN, *_GATE_UP):
        return "no other matrix of a feed-forward, of a size that fits, is beside it"
    if key not in (*_QUERY, *_KEY, *_VALUE, *_QKV, _BY_HEAD, *_OUT):
        return "the name is not known"
    out, fused = _one(linear, _OUT), _one(linear, (*_QKV, _BY_HEAD))
    if out is None:
        return f"no output projection is beside it: a Linear named {', '.join(_OUT)}"
    if fused is None:
        return f"q, k and v are not all beside it, with {_sizes(linear[out])[1]} features of q, which '{out}' takes"
    if not _number(cell, _HEADS):
        return f"its cell does not say how many heads there are: an attribute {', '.join(_HEADS)}"
    return (f"the {_sizes(linear[fused])[0]} rows of '{fused}' are not q, k and v of {_number(cell, _HEADS)} and "
            f"{_number(cell, _KV_HEADS) or _number(cell, _HEADS)} heads, of which '{out}' takes {_sizes(linear[out])[1]}")


def _one(cells: dict, names: tuple[str, ...]) -> str | None:
    return next((n for n in names if n in cells), None)


def _sizes(cell) -> tuple[int, int]:
    """(output features, input features)."""
    return tuple(cell.weight.shape)


def _number(cell, names) -> int | None:
    return next((v for v in (getattr(cell, n, None) for n in names) if isinstance(v, int) and not isinstance(v, bool)), None)


def _styles(columns: dict[str, ParallelStyle | None], row: str) -> dict[str, ParallelStyle]:
    return {**{k: style or ColwiseParallel(**_DTENSORS) for k, style in columns.items()}, row: RowwiseParallel(**_DTENSORS)}


def _attention(cell, linear, ranks) -> _Block | None:
    out = _one(linear, _OUT)
    if out is None:
        return None
    heads = _number(cell, _HEADS)
    kv_heads = _number(cell, _KV_HEADS) or heads
    odd = [n for n in (heads, kv_heads) if n is not None and n % ranks]
    problem = f"{odd[0]} heads do not divide by {ranks}" if odd else ""
    separate = [key for key in (_one(linear, names) for names in (_QUERY, _KEY, _VALUE)) if key is not None]
    if len(separate) == 3 and _sizes(linear[separate[0]])[0] == _sizes(linear[out])[1]:
        return _styles(dict.fromkeys(separate), out), problem
    fused = _one(linear, (*_QKV, _BY_HEAD))
    if fused is None or not kv_heads or not heads:
        return None
    q = _sizes(linear[out])[1]
    kv = (_sizes(linear[fused])[0] - q) // 2
    if kv <= 0 or kv * heads != q * kv_heads:
        return None
    by_parts = FusedColwiseParallel((q, kv, kv), units=kv_heads, **_DTENSORS)
    return _styles({fused: None if fused == _BY_HEAD else by_parts}, out), problem


def _feed_forward(linear, ranks) -> _Block | None:
    down = _one(linear, _DOWN)
    if down is None:
        return None
    hidden = _sizes(linear[down])[1]
    gate, up, fused = _one(linear, _GATE), _one(linear, _UP), _one(linear, _GATE_UP)
    if fused is not None and _sizes(linear[fused])[0] == 2 * hidden:
        problem = f"{hidden} features do not divide by {ranks}" if hidden % ranks else ""
        return _styles({fused: FusedColwiseParallel((hidden, hidden), **_DTENSORS)}, down), problem
    first = [k for k in (gate, up) if k is not None and _sizes(linear[k])[0] == hidden]
    return (_styles(dict.fromkeys(first), down), "") if first else None
