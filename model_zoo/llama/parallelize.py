# SPDX-License-Identifier: Apache-2.0
"""Lays the Llama of `model.py` out over a mesh with axes ("dp", "tp"): Megatron's cuts, as a plan of styles.

With "cp" between these a batch is one list of tokens, cut over dp and cp: `own_list`.
With parallel.ep, "dp" is two axes, ("dp", "ep"): both cut the batch, and "ep" cuts the experts, too; so may "cp".

Not here: any arithmetic. Every style keeps activations DTensors (`use_local_output=False`), because `model.py` speaks
of global sizes. Inputs are DTensors on the whole mesh, `Shard(0)` on dp and `Replicate` on tp.

Communication of one block over tp, forward (the backward mirrors it):
  without sequence parallelism  2 all-reduces: after wo and after w2;
  with it                       2 all-gathers (into attention, into feed_forward) and 2 reduce-scatters (after wo, w2),
                                each in pieces beside the products if `tp_overlap` says so.
Sequence parallelism cuts the list of tokens f32[n, d], which dp has cut already: f32[n@dp@tp, d].
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_dtensor import (
    DeviceMesh,
    DTensor,
    Layout,
    MixedPrecisionPolicy,
    Partial,
    Placement,
    Replicate,
    Shard,
    balance,
    context_attention,
    distribute_module,
    head_tail,
    implicit_replication,
    in_order,
    init_device_mesh,
    local_map,
)
from ms_dtensor.custom_ops.rows import connected
from ms_dtensor.internals.target import on_cpu
from ms_dtensor.parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    OverlappedColwise,
    OverlappedGradients,
    OverlappedRowwise,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    moe,
    parallelize_module,
    replicate,
)
from ms_dtensor.parallel.pieces import Pieces
from ms_dtensor.pipeline import Absent
from ms_dtensor.tensor.distribute import distribute_parameter, set_parameter

from .at_once import Head
from .config import ExpertsConfig, ModelConfig, ParallelConfig, mesh_axes
from .experts import Experts, kept, mixture, most, one_hot, with_shared
from .latent import Latent
from .layers import Joined
from .lora import adapted
from .model import Listed, Llama, rotate


class Cut(ParallelStyle):
    """Parameters of a cell that others compute with, or whose inputs lie as they are to: no hooks."""

    def __init__(self, **placements: Placement):
        self.placements = placements

    def check(self, module, device_mesh):
        return self.placements

    def apply(self, module, device_mesh):
        def cut(name, cell, mesh):
            for key, placement in self.placements.items():
                set_parameter(cell, key, distribute_parameter(cell._params[key], mesh, [placement], src_data_rank=0))
        return distribute_module(module, device_mesh, cut)


def adapter_plan(block: nn.Cell) -> dict[str, ParallelStyle]:
    """LoRA's matrices in a block: B is cut as the outputs are, A as the inputs are, else they are whole."""
    plan: dict[str, ParallelStyle] = {}
    for name, _ in adapted(block):
        if name.endswith(("wo", "w2")):
            plan[f"{name}.lora_a"] = Cut(weight=Shard(1))
        else:
            plan[f"{name}.lora_b"] = Cut(weight=Shard(0))
    return plan


def outer_plan(cfg: ParallelConfig) -> dict[str, ParallelStyle]:
    """The plan over tp of what is around the blocks; between these the token list is cut, or whole."""
    between = Shard(0) if cfg.sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=False),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1) if cfg.loss_parallel else Replicate(),
                                  use_local_output=False),
    }
    return plan | {"norm": SequenceParallel(sequence_dim=0)} if cfg.sequence_parallel else plan


def block_plan(cfg: ParallelConfig, block: nn.Cell) -> dict[str, ParallelStyle]:
    """The plan over tp of one block. Of latent attention heads are cut, and what makes the short vectors is whole."""
    between = Shard(0) if cfg.sequence_parallel else Replicate()
    columns = ColwiseParallel(use_local_output=False)
    rows = RowwiseParallel(output_layouts=between, use_local_output=False)
    has = {name for name, _ in block.cells_and_names()}
    plan: dict[str, ParallelStyle] = {f"attention.{name}": columns for name in ("wq", "wk", "wv", "wq_b", "wkv_b")}
    plan["attention.wo"] = rows
    inner = "feed_forward.shared" if block.mixed else "feed_forward"
    plan |= {f"{inner}.w1": columns, f"{inner}.w3": columns, f"{inner}.w2": rows}
    plan = {name: style for name, style in plan.items() if name in has} | {name: FusedColwiseParallel(
        tuple(cell.parts.values()), units=cell.units, use_local_output=False, split_output=False)
        for name, cell in block.cells_and_names() if isinstance(cell, Joined)}
    if block.mixed and cfg.expert_tp and cfg.ep == 1:
        plan["feed_forward.experts"] = Cut(w1=Shard(1), w2=Shard(2), w3=Shard(1))
    if cfg.sequence_parallel:
        # one all-gather at the door of each half of a block, shared by q, k, v and by w1, w3
        whole, length = (Replicate(),), (None,)
        plan |= {
            "attention_norm": SequenceParallel(sequence_dim=0),
            "attention": PrepareModuleInput(input_layouts=(between, *length), desired_input_layouts=(*whole, *length)),
            "ffn_norm": SequenceParallel(sequence_dim=0),
            "feed_forward": PrepareModuleInput(input_layouts=(between, *length[:block.mixed]),
                                               desired_input_layouts=(*whole, *length[:block.mixed])),
        }
    if cfg.tp_overlap != 1:
        hidden = OverlappedRowwise(pieces=cfg.tp_overlap, sequence_dim=0)
        plan |= {"attention": overlapped(block.attention, cfg.tp_overlap, "wq", "wk", "wv"),
                 "feed_forward": overlapped(block.feed_forward, cfg.tp_overlap, "w1", "w3"),
                 "attention.wo": hidden, "feed_forward.w2": hidden, "": OverlappedGradients()}
        plan = {name: style for name, style in plan.items() if style is not columns
                and not isinstance(style, FusedColwiseParallel)}
    return plan | adapter_plan(block)


def overlapped(cell: nn.Cell, pieces: Pieces, *names: str) -> OverlappedColwise:
    """The style of a cell whose matrices of these names read its input, or are one."""
    joined = {name: tuple(inside.parts.values()) for name, inside in cell.name_cells().items() if isinstance(inside, Joined)}
    return OverlappedColwise(*(joined or names), pieces=pieces, sequence_dim=0, parts=next(iter(joined.values()), ()))


def over_data(p: Parameter) -> Placement | None:
    """How `fully_shard` cuts a parameter; None: dim 0, joined ones by parts. Experts' have too few rows for many ranks."""
    return Shard(1) if p.ndim == 3 else None


def parallelize(model: nn.Cell, mesh: DeviceMesh, cfg: ParallelConfig,
                mp_policy: MixedPrecisionPolicy | None = None) -> nn.Cell:
    """Applies the plan over mesh["tp"], lays attention out over its heads, then data parallelism over mesh["dp"].

    Block by block: of a model made under `no_init_parameters` no rank has more at a time than its shards and a block.

    Returns `model`, all of it or a stage of a pipeline, whose mesh has no axis "pp".

    Initial weights are those of rank 0 of each axis. Afterwards every parameter and buffer is a DTensor on `mesh`.
    """
    model_cfg = model.cfg
    data, apart = token_axes(mesh), []  # apart: cells whose parameters are copied over "dp" alone
    cut = cfg.fsdp or cfg.zero1  # ZeRO-1 is FSDP with weights that stay whole until the backward has read them
    for layer in here([*model.layers, *(module.block for module in getattr(model, "ahead", ()))]):
        parallelize_module(layer, mesh["tp"], block_plan(cfg, layer))
        layer.attention.core = attention_on_lists(model_cfg, mesh, cfg) if context_axes(mesh) else \
            attention_on_heads(layer.attention.core, mesh)
        at_once_on_rows(layer, mesh, cfg)
        if layer.mixed:
            lay_out_experts(layer.feed_forward, mesh, cfg)
        if layer.mixed and cfg.ep > 1:
            parallelize_module(layer.feed_forward.experts, mesh[(*expert_axes(mesh, cfg), "tp")], CutExperts(cfg.expert_tp))
            apart.append(layer.feed_forward.experts)
            rest = tuple(a for a in ("dp", *context_axes(mesh)) if a not in expert_axes(mesh, cfg))
            copies = mesh[rest].flatten("tokens_of_experts") if len(rest) > 1 else mesh[rest]
            if cfg.fsdp:
                fully_shard(apart[-1], mesh=copies, mp_policy=mp_policy, shard_placement_fn=lambda p: Shard(1))
            else:
                replicate(apart[-1], mesh=copies, mp_policy=mp_policy, zero1=cfg.zero1)
        if cut:
            fully_shard(layer, mesh=data, mp_policy=mp_policy, reshard_after_forward=cfg.fsdp, shard_placement_fn=over_data)
    outer = [name for name, cell in model.name_cells().items() if here([cell])]
    parallelize_module(model, mesh["tp"], {k: v for k, v in outer_plan(cfg).items() if k in outer})
    at_once_on_rows(model, mesh, cfg)
    if not cut:
        return replicate(model, mesh=data, mp_policy=mp_policy, ignored_modules=apart)
    return fully_shard(model, mesh=data, mp_policy=mp_policy, reshard_after_forward=cfg.fsdp)


def here(cells: Iterable[nn.Cell]) -> list[nn.Cell]:
    """Those that no other stage of a pipeline has."""
    return [cell for cell in cells if not isinstance(cell, Absent)]


def make_mesh(device: str, cfg: ParallelConfig) -> DeviceMesh:
    """All ranks as ("dp", "tp"); "copies" before these if parameters are copied between parts of dp, and "pp" first.

    "ep" between the two, if experts are cut; "cp" and "ulysses", if ranks share the tokens of dp's rows.
    """
    axes = mesh_axes(cfg)
    return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of this one's stage of a pipeline."""
    names = tuple(name for name in mesh.mesh_dim_names if name != "pp")
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The axes over which the batch is cut."""
    names = tuple(name for name in ("copies", "dp", "ep") if name in mesh.mesh_dim_names)
    return mesh[names] if len(names) > 1 else mesh["dp"]


def context_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Those over which ranks share the tokens of the same rows."""
    return tuple(name for name in ("cp", "ulysses") if name in mesh.mesh_dim_names)


def expert_axes(mesh: DeviceMesh, cfg: ParallelConfig) -> tuple[str, ...]:
    """Those over which experts are cut, if they are."""
    cut = ("ep", *context_axes(mesh)) if cfg.ep_over_cp else ("ep",)
    return tuple(name for name in cut if name in mesh.mesh_dim_names)


def token_axes(mesh: DeviceMesh) -> DeviceMesh:
    """The axes over which tokens are cut, and parameters whole or cut by data parallelism."""
    if context_axes(mesh) or "ep" in mesh.mesh_dim_names:
        return mesh[(*data_axes(mesh).mesh_dim_names, *context_axes(mesh))].flatten("tokens")
    return data_axes(mesh)


def position(mesh: DeviceMesh) -> int:
    """This rank's number on a mesh; no group is asked, as one of a single rank would take buffers of a device, too."""
    return mesh.rank_list.index(mesh.get_rank())


def own_list(mesh: DeviceMesh, cfg: ParallelConfig, window: int | None, ids: np.ndarray, labels: np.ndarray,
             places: np.ndarray | None = None) -> tuple[DTensor, DTensor, Listed]:
    """This rank's part of a global batch [b, t], as lists: rows cut over dp, their tokens over cp in an order of their own.

    Args:
        mesh: with an axis "cp" or "ulysses".
        cfg: which order.
        window: of attention.
        ids: the same on every rank.
        labels: as ids.
        places: each token's in its document; None: rows are documents.
    """
    if places is None:
        places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    data = data_axes(mesh)
    each, part = len(ids) // data.size(), position(data)
    length = ids.shape[1]
    ids, labels, places = (x[part * each:(part + 1) * each].reshape(-1) for x in (ids, labels, places))
    starts = np.flatnonzero(places == 0)
    lengths = np.diff([*starts, len(places)]).tolist()
    ranks = cfg.cp // cfg.ulysses
    tokens = balance(lengths, ranks, window=window) if cfg.cp_order == "balanced" else \
        {"head_tail": head_tail, "in_order": in_order}[cfg.cp_order](lengths, ranks)
    mine = tokens.cut(ids, labels, places, mesh=mesh, axes=(*data.mesh_dim_names, *context_axes(mesh)))
    return mine[0], mine[1], Listed(tokens, mine[2], length)


def attention_on_lists(cfg: ModelConfig, mesh: DeviceMesh, parallel: ParallelConfig):
    """Attention over the list, by place: f32[n@dp@cp, heads@tp, e] throughout."""
    rows = {a: Shard(0) for a in mesh.mesh_dim_names if a != "tp"}
    turn = local_map(partial(rotate, cfg), rows | {"tp": Shard(1)}, (rows | {"tp": Shard(1)}, rows, None), device_mesh=mesh,
                     redistribute_inputs=True, out_shapes=lambda x, places: x)
    attention = context_attention(mesh[context_axes(mesh)], parallel.cp_algorithm)

    def run(q, key, value, t: Listed):
        q, key = (turn(x, t.places, max(t.tokens.documents)) for x in (q, key))
        return attention(q, key, value, t.tokens, window=cfg.sliding_window)
    return run


def own_rows(rows: np.ndarray, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of a global batch that every rank has: rows cut over the data axes, the same over tp."""
    if mesh is None:
        return Tensor(np.ascontiguousarray(rows))
    data = data_axes(mesh)
    each = len(rows) // data.size()
    first = position(data) * each
    return DTensor.from_local(Tensor(np.ascontiguousarray(rows[first:first + each])), mesh,
                              dict.fromkeys(data.mesh_dim_names, Shard(0)))


def attention_mapped(core, mesh: DeviceMesh):
    """Attention of plain tensors on each rank's sequences and heads; `Latent`'s third operand is of all heads.

    Sequences are whole: where a model that trained on lists is asked for texts, ranks along "cp" compute the same.
    """
    whole = dict.fromkeys(context_axes(mesh), Replicate())
    heads = {a: Shard(2) if a == "tp" else Shard(0) for a in mesh.mesh_dim_names} | whole
    rows = heads | {"tp": Replicate()}
    width = core.cfg.latent.value if isinstance(core, Latent) else None
    operands = (heads, heads, heads if width is None else rows, rows)
    maps = {count: local_map(core, heads, operands[:count], device_mesh=mesh, redistribute_inputs=True,
                             out_shapes=lambda q, *rest: (*q[:3], width or q[3])) for count in (3, 4)}
    return lambda *operands: maps[len(operands)](*operands)


def at_once_on_rows(cell: nn.Cell, mesh: DeviceMesh, cfg: ParallelConfig) -> None:
    """Products of `at_once.py` on each rank's tokens, whose weights' gradients are summands of the ranks; of a block, or of
    the model around the blocks.

    Axis "tp" has one rank; over it all lies as the plan says, so that nothing is copied from one layout to another.
    """
    def lies(tp: Placement, others: Placement) -> dict[str, Placement]:
        return {a: tp if a == "tp" else others for a in mesh.mesh_dim_names}
    tokens, columns = lies(Replicate(), Shard(0)), lies(Shard(1), Shard(0))
    between = lies(Shard(0), Shard(0)) if cfg.sequence_parallel else tokens
    by_rows, by_columns = Shard(0), Shard(1)  # weights of columns have rows that are cut

    def mapped(core, x: dict, weights: Sequence[Placement], results, shapes):
        return local_map(core, results, (x, *(lies(p, Replicate()) for p in weights)),
                         in_grad_placements=(x, *(lies(p, Partial()) for p in weights)), device_mesh=mesh,
                         redistribute_inputs=True, out_shapes=shapes)
    if isinstance(cell, Llama):
        if isinstance(cell.output, Head):
            words = lies(Shard(1) if cfg.loss_parallel else Replicate(), Shard(0))
            cell.output.core = mapped(cell.output.core, tokens, (by_rows,), words, lambda x, w: (x[0], w[0]))
        return
    if not cell.mixed and cell.feed_forward.core is not None:
        cell.feed_forward.core = mapped(cell.feed_forward.core, tokens, (by_rows, by_rows, by_columns), between,
                                        lambda x, *ws: x)
    core = getattr(cell.attention, "products", None)
    if core is not None:
        last = mapped(core, columns, (by_columns,), between, lambda x, w: (x[0], w[0]))
        first = mapped(core, tokens, (by_rows,) * 3, (columns,) * 3, lambda x, *ws: tuple((x[0], w[0]) for w in ws))
        cell.attention.products = lambda x, *ws: (last if len(ws) == 1 else first)(x, *ws)


def attention_on_heads(core, mesh: DeviceMesh):
    """Attention, whose sequences and heads know nothing of each other: f32[b@dp, t, heads@tp, e] throughout.

    The ops that a device has for it have rules which say so; the CPU's form is mapped over shards as it is.
    """
    if on_cpu():
        return attention_mapped(core, mesh)

    def run(*operands):
        with implicit_replication():  # tables and mask
            return core(*operands)
    return run


class CutExperts(ParallelStyle):
    """Weights of experts over (axes, "tp"): each rank has some of them or, with `widths`, a part of each of some."""

    def __init__(self, widths: bool):
        self.widths = widths

    def apply(self, module, device_mesh):
        def cut(name, cell, mesh):
            for key, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
                placements = [*[Shard(0)] * (mesh.ndim - 1), Shard(dim) if self.widths else Replicate()]
                set_parameter(cell, key, distribute_parameter(cell._params[key], mesh, placements, src_data_rank=0))
        return distribute_module(module, device_mesh, cut)


def lay_out_experts(cell: Experts, mesh: DeviceMesh, cfg: ParallelConfig) -> None:
    """Sets what runs in a mixture of experts; its results lie as the tokens do between blocks."""
    rows = {a: Replicate() if a == "tp" else Shard(0) for a in mesh.mesh_dim_names}
    between = rows | {"tp": Shard(0) if cfg.sequence_parallel else Replicate()}
    cell.left = within_capacity(cell.cfg, mesh)
    if context_axes(mesh):
        cell.of_sequences = balance_of_shared_sequences(mesh)
    if cfg.ep > 1:  # what a capacity drops is not sent
        run = partial(moe, mesh=mesh[expert_axes(mesh, cfg)], dedup="auto" if cfg.expert_dedup is None else cfg.expert_dedup)
        if cell.cfg.capacity is not None and not cfg.expert_dedup and not on_cpu():  # a CPU has no one to wait for
            cell.room = partial(room_of_rank, cell.cfg, mesh)
    else:
        run = experts_on_widths(partial(mixture, cell.cfg), mesh, cfg.expert_tp, rows)

    def core(*operands, **how):
        return run(*operands, **how).redistribute(placements=between)
    cell.core = core if cfg.ep > 1 else with_shared(core)


def room_of_rank(experts: ExpertsConfig, mesh: DeviceMesh, n: int, t: int | Listed) -> int:
    """The most choices that an expert can have of one rank's part of n tokens, by its capacity in each sequence."""
    length, data, shared = t.length if isinstance(t, Listed) else t, data_axes(mesh).size(), context_axes(mesh)
    tokens = n // data if not shared else -(-n // (data * mesh[shared].size()))
    return min(n // length // data * most(experts, length), tokens)


def within_capacity(experts: ExpertsConfig, mesh: DeviceMesh):
    """Of choices i32[n@dp, k] those for which the expert has room in its sequence; -1 in the place of the others.

    Where ranks share a sequence each has all its choices, in its own order; tokens stay where they are.
    """
    rows = {a: Replicate() if a == "tp" else Shard(0) for a in mesh.mesh_dim_names}
    whole = rows | dict.fromkeys(context_axes(mesh), Replicate())

    def left(chosen, length, tokens):
        if tokens is None:
            return mint.where(kept(experts, chosen, length) > 0, chosen, -1)
        order = tokens.index()  # where the tokens of this list stand in the sequences
        there, back = (Tensor(x.astype(np.int32)) for x in (np.argsort(order), order))
        room = ops.gather(kept(experts, ops.gather(chosen, there, 0), length), back, 0)
        return mint.where(room > 0, chosen, -1)
    mapped = local_map(left, whole, (whole, None, None), redistribute_inputs=True, out_shapes=lambda chosen, *_: (chosen,))

    def run(chosen, t):
        one = mapped(chosen, t.length, t.tokens) if isinstance(t, Listed) else mapped(chosen, t, None)
        return one.redistribute(placements=rows)
    return run


def balance_of_shared_sequences(mesh: DeviceMesh):
    """`expert_balance_loss` where ranks share sequences: each adds up its tokens' choices and scores, by sequence.

    What is sent are these sums, f32[2, sequences, experts], by one all-reduce a layer; never a token's scores.
    """
    shared = context_axes(mesh)
    rows = {a: Replicate() if a == "tp" else Shard(0) for a in mesh.mesh_dim_names}
    sums = {a: Partial() if a in shared else Shard(1) if p.is_shard() else p for a, p in rows.items()}

    def add_up(scores, chosen, length, tokens):
        (first, last), = Layout(mesh[shared], [Shard(0)] * len(shared), (len(tokens),)).local_box()
        sequence = tokens.index()[first:last] // length
        whole = ops.zeros((2, len(tokens) // length, scores.shape[1]), scores.dtype)
        if first == last:  # a rank without tokens
            return connected(whole, scores)
        share = one_hot(chosen, scores.shape[1]).sum(1).astype(scores.dtype)
        both = ops.stack((share, scores / scores.sum(-1, keepdims=True)))
        return mint.index_add(whole, 1, Tensor(sequence.astype(np.int32)), both)

    @lru_cache
    def mapped(length):
        return local_map(add_up, sums, (rows, rows, None, None), redistribute_inputs=True,
                         out_shapes=lambda scores, *_: ((2, scores[0] // length, scores[1]),))

    def run(scores, chosen, t):
        share, score = mapped(t.length)(scores, chosen, t.length, t.tokens).redistribute(
            placements=sums | dict.fromkeys(shared, Replicate()))
        return (share * score).sum() * scores.shape[1] / (scores.shape[0] * t.length)
    return run


def experts_on_widths(core, mesh: DeviceMesh, cut: bool, rows):
    """The experts of f32[n@dp, d]: with their widths cut, each tp rank has a summand of the result.

    Each rank sorts its own rows; on DTensors the device's ops sort those of all, for which rows and products would travel.
    """
    weights = [{"tp": Shard(dim)} if cut else {} for dim in (1, 2, 1)]
    return local_map(core, rows | ({"tp": Partial()} if cut else {}), (rows, rows, rows, *weights), device_mesh=mesh,
                     redistribute_inputs=True, out_shapes=lambda x, *rest: x)
