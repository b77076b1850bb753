# SPDX-License-Identifier: Apache-2.0
"""Every mask x sharing of heads x length x algorithm on 2, 4 and 8 ranks; what goes back, to the byte; names of others.

At push a slice, before a merge all of it. Numbers as in `cases_attention.py`: float64, random cotangents, within 1e-12.
"""
from itertools import product

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.compat import hyper_context
from ms_dtensor.core.balance import Mask
from ms_dtensor.core.tokens import keys_by_rank
from ms_dtensor.errors import ConfigError
from tests.cases import case
from tests.context.cases_attention import HEADS, MASKS, E, bytes_of_rows, compare, drawn, kinds, one_device, shares
from tests.operands import Built
from tests.support import refusal, same_on_all_ranks
from tests.tiers import sampled

ORDERS = {"balanced": md.balance, "head and tail": md.head_tail, "in order": md.in_order}


@case(world_size=(2, 4, 8), timeout=1500)
def the_whole_grid(world):
    """Lengths 1 to 3N + 1, documents shorter than N, many of one token, ranks without tokens or without foreign keys."""
    n = world.size
    mesh = md.init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    cells = list(product(kinds(n), MASKS.items(), HEADS, ("gather", "ring")))
    for number, (documents, (name, mask), (h, g), algorithm) in enumerate(sampled(cells, 41)):
        how = md.balance(documents, n, **mask) if number % 3 else (md.head_tail if number % 2 else md.in_order)(documents, n)
        compare(mesh, ("cp",), algorithm, how, h, g, f"{algorithm} {documents} {name} {h}:{g}", **mask)


@case(world_size=(4, 8), timeout=1500)
def the_grid_of_hybrids_and_of_heads_for_tokens(world):
    n = world.size
    two = md.init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("cp", "ulysses"))
    alone = md.init_device_mesh("cpu", (n,), mesh_dim_names=("ulysses",))
    cells = list(product(kinds(n // 2), MASKS.items(), HEADS[:2], ("gather", "ring")))
    for documents, (name, mask), (h, g), algorithm in sampled(cells, 41):
        what = f"{algorithm} {documents} {name} {h}:{g}"
        compare(two, ("cp", "ulysses"), algorithm, md.balance(documents, n // 2, **mask), h, g, f"hybrid {what}", **mask)
        if algorithm == "gather":
            compare(alone, ("ulysses",), algorithm, md.in_order(documents, 1), 8, 8, f"ulysses {what}", **mask)


def bytes_got(tokens, me, g, causal=True, window=None):
    """What the tables say this rank is sent of keys and values in float64, and so what gradients it sends home."""
    keys = keys_by_rank(tokens, Mask(causal, window))[me]
    return sum(len(rows) for s, rows in enumerate(keys.rows) if s != me) * 2 * g * E * 8


@case(world_size=(2, 4), timeout=200)
def the_backward_sends_what_the_formulas_say(world):
    """By axis and by what it is: of gather the gradients go home, a ring fetches keys again beside that."""
    n, me, g = world.size, world.rank, 2
    mesh = md.init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    for documents, (name, mask), (order, make) in sampled(product(
            ([29, 3, 1, 14], [8 * n], [5, 1]), MASKS.items(), ORDERS.items()), 5):
        tokens = make(documents, n, **mask) if make is md.balance else make(documents, n)
        there, home = bytes_of_rows(tokens, me, g, **mask), bytes_got(tokens, me, g, **mask)
        for algorithm in ("gather", "ring"):
            _, back = compare(mesh, ("cp",), algorithm, tokens, 8, g, f"{algorithm} {documents} {name} {order}", **mask)
            assert {(e.axes, e.implicit) for e in back} <= {(("cp",), False)}, back
            by: dict[str, int] = {}
            for e in back:
                by[e.src] = by.get(e.src, 0) + e.bytes
            if algorithm == "gather":
                assert sum(by.values()) == home and all(s.startswith("kernel order of") for s in by), (documents, by, home)
            else:
                assert by.get("keys and values", 0) == there, (documents, by, there)
                assert by.get("gradients of keys and values", 0) == home and len(by) <= 2, (documents, by, home)


def heads_for_tokens_cost_back_what_they_cost_there(world):
    mesh, (n, h, g) = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)), (12, 8, 2)
    events, back = compare(mesh, ("ulysses",), "gather", md.in_order([7, 4, 1], 1), h, g, "ulysses")
    assert sum(e.bytes for e in back) == sum(e.bytes for e in events) == (2 * h + 2 * g) * E * (n // 2) // 2 * 8
    assert {e.axes for e in back} == {("ulysses",)}


# -- recompute that keeps what came ----------------------------------------------------------------------------------------
def recompute_fetches_keys_again_or_keeps_them(world):
    """The same gradients to the bit; with `save=["send_rows"]` as much is sent as without recompute."""
    mesh, tokens = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), md.balance([9, 6, 4], 2)
    (q, k, v, dout), _ = shares(mesh, tokens, drawn(19, 4, 2), ("cp",))
    made = []
    for how in (None, {}, {"save": ["send_rows"]}):
        net = Built(lambda c, q, k, v: c.attention(mint.matmul(q, c.weight), k, mint.matmul(v, c.weight), tokens),
                    attention=md.context_attention(mesh["cp"]),
                    weight=Parameter(Tensor(np.random.default_rng(7).normal(size=(E, E))), name="weight"))
        net = md.replicate(net, mesh=mesh)
        if how is not None:
            md.checkpoint_wrapper(net, **how)
        with md.comm.record() as events:
            loss, grads = md.value_and_grad(lambda q, k, v, net=net: (net(q, k, v) * dout).sum(), (0, 1, 2),
                                         net.trainable_params())(q, k, v)
        made.append([x.full_tensor().asnumpy() for x in (loss, *grads[0], *grads[1])])
        fetched = sum(e.src == "keys and values" for e in events)
        home = sum(e.op == "all_to_all" for e in events) - fetched
        assert (fetched, home) == (2 if how == {} else 1, 1), (how, events)
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True):
            assert np.array_equal(a, b)


# -- names that others know ------------------------------------------------------------------------------------------------
class Core(nn.Cell):
    """Causal attention of whole sequences, with a mask of its own; `seq`, `head`: its dims of [b, ., ., e]."""

    def __init__(self, seq=1, head=2):
        super().__init__()
        self.order = 0, head, seq, 3

    def construct(self, query, key, value=None):
        a, b, c = (mint.permute(x, self.order) for x in (query, key, value))
        s, share = b.shape[2], a.shape[1] // b.shape[1]
        b, c = (mint.repeat_interleave(x, share, 1) for x in (b, c))
        scores = mint.matmul(a, mint.permute(b, (0, 1, 3, 2))) / np.sqrt(E).item()
        scores = scores + Tensor(np.triu(np.full((s, s), -1e30), 1))
        return mint.permute(mint.matmul(mint.softmax(scores, -1), c), self.order)


@case(world_size=4)
def styles_of_hyper_parallel_are_the_cell_of_whole_sequences(world):
    """Ulysses, colossal and hybrid, [b, s, h, e] and [b, h, s, e], plain shards and DTensors; by place and by name."""
    rng = np.random.default_rng(4)
    mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    q, k, v, dout = (rng.normal(size=(2, 8, heads, E)) for heads in (8, 4, 4, 8))
    flat = [x.reshape(16, *x.shape[2:]) for x in (q, k, v, dout)]
    want = [x.reshape(2, 8, *x.shape[1:]) for x in one_device([8, 8], *flat)]
    for number, (degree, style) in enumerate(product((None, 1, 2), (hyper_context.ContextParallel,
                                                                     hyper_context.AsyncContextParallel))):
        seq, head = (1, 2) if number % 2 else (2, 1)

        def turned(x, seq=seq):
            return x if seq == 1 else np.ascontiguousarray(x.swapaxes(1, 2))
        local = [Tensor(np.ascontiguousarray(np.split(turned(x), 4, seq)[world.rank])) for x in (q, k, v, dout)]
        core = style(seq, head, degree, (0, 1), ("query", "key", "value")).apply(Core(seq, head), mesh)

        def loss(a, b, c, core=core, d=local[3]):
            out = core(a, b, value=c)
            return (out * d).sum(), out
        (_, out), grads = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)(*local[:3])
        for name, got, x in zip(("out", "dq", "dk", "dv"), (out, *grads), want):
            x = np.split(turned(x), 4, seq)[world.rank]
            assert got.__class__ is Tensor and got.shape == x.shape, (degree, name)
            assert np.abs(got.asnumpy() - x).max() / np.abs(x).max() <= 1e-12, (degree, style, name)
        cut = [md.DTensor.from_local(x, mesh, [md.Shard(seq)]) for x in local[:3]]
        whole = core(cut[0], cut[1], value=cut[2])
        assert whole.shape == turned(q).shape and np.abs(whole.full_tensor().asnumpy() - turned(want[0])).max() <= 1e-12
    for call, said in ((lambda: hyper_context.ContextParallel(load_balance=True), "'load_balance' is not here"),
                       (lambda: hyper_context.ContextParallel(ulysses_degree=3).apply(Core(), mesh), "one of [1, 2, 4]"),
                       (lambda: hyper_context.ContextParallel().apply(Core(), mesh)(*(Tensor(x[:, :2, :2]) for x in (
                           q, k, v))), "2 heads are not divided by 4 ranks")):
        text = refusal(call, ConfigError)
        assert said in text and "fix:" in text, text
        same_on_all_ranks(world, text)


def torchs_context_parallel_gives_the_cut_batch(world):
    from ms_dtensor.compat.torch_names.distributed.tensor.experimental import context_parallel
    from ms_dtensor.compat.torch_names.distributed.tensor.experimental._attention import context_parallel_unshard
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    rng = np.random.default_rng(4)
    q, k, v = (rng.normal(size=(2, 8, heads, E)) for heads in (4, 2, 2))
    want, *_ = one_device([8, 8], *(x.reshape(16, *x.shape[2:]) for x in (q, k, v)), np.zeros((16, 4, E)))
    core = md.ContextParallel("ring").apply(Core(), mesh)
    given = [Tensor(x) for x in (q, k, v)]
    with md.comm.record() as events, context_parallel(mesh["cp"], buffers=given, buffer_seq_dims=[1, 1, -3]) as cut:
        assert events == [] and {x.placements for x in cut} == {(md.Shard(1),)}
        out = core(*cut)
        assert {e.src for e in events} == {"keys and values"}
    whole, = context_parallel_unshard(mesh, [out], [1])
    assert np.abs(whole.asnumpy().reshape(want.shape) - want).max() <= 1e-12
    text = refusal(lambda: context_parallel(mesh, buffers=[Tensor(q[:, :7])], buffer_seq_dims=[1]).__enter__(), ConfigError)
    assert "not cut evenly" in text
    same_on_all_ranks(world, text)
