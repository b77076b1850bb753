# SPDX-License-Identifier: Apache-2.0
"""Attention of a list that ranks share equals one device's in float64, gradients too, and sends what the formulas say."""
from functools import lru_cache
from itertools import product

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.core.balance import Mask
from ms_dtensor.core.tokens import keys_by_rank
from ms_dtensor.errors import CollectiveMismatch, ConfigError, LayoutError, OpRuleError
from tests.cases import case
from tests.rehearsal.session import rehearsed
from tests.support import refusal, same_on_all_ranks
from tests.tiers import sampled

MASKS = {"causal": {}, "window": {"window": 5}, "full": {"causal": False}}
HEADS = ((8, 8), (8, 2), (8, 1))
E = 4


def drawn(n, h, g, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, heads, E)) for heads in (h, g, g, h)]


def one_device(documents, q, k, v, dout, causal=True, window=None):
    """(out, dq, dk, dv) in NumPy, document by document and head by head."""
    out, grads = np.zeros_like(dout), [np.zeros_like(x) for x in (q, k, v)]
    share, at = q.shape[1] // k.shape[1], 0
    for n in documents:
        ahead = np.arange(n)[:, None] - np.arange(n)
        seen = (ahead >= 0) & (ahead < (window or n)) if causal else np.ones((n, n), bool)
        rows = slice(at, at + n)
        for h in range(q.shape[1]):
            a, b, c, d = q[rows, h], k[rows, h // share], v[rows, h // share], dout[rows, h]
            scores = np.where(seen, a @ b.T / np.sqrt(E), -np.inf)
            p = np.exp(scores - scores.max(1, keepdims=True)) if n else scores
            p = p / p.sum(1, keepdims=True)
            out[rows, h] = p @ c
            ds = p * (d @ c.T - ((d @ c.T) * p).sum(1, keepdims=True)) / np.sqrt(E)
            for total, more, head in zip(grads, (ds @ b, ds.T @ a, p.T @ d), (h, h // share, h // share)):
                total[rows, head] += more
        at += n
    return out, *grads


def shares(mesh, tokens, arrays, axes):
    """Each array of the list, in order, as a DTensor; and which rows of the list this rank's are."""
    xs = tokens.cut(*arrays, np.arange(len(tokens)), mesh=mesh, axes=axes)
    return xs[:-1], xs[-1].to_local().asnumpy()


def compare(mesh, axes, algorithm, tokens, h, g, what, **mask):
    """Out and gradients for random cotangents; the events of forward and backward."""
    arrays = drawn(len(tokens), h, g)
    want = one_device(tokens.documents, *arrays, **mask)
    (q, k, v, dout), mine = shares(mesh, tokens, arrays, axes)
    attention = md.context_attention(mesh[axes], algorithm)
    with md.comm.record() as events, md.redistribution_policy("explicit"):
        out = attention(q, k, v, tokens, **mask)
    with md.comm.record() as both:
        grads = md.grad(lambda q, k, v: (attention(q, k, v, tokens, **mask) * dout).sum(), (0, 1, 2))(q, k, v)
    for name, got, x in zip(("out", "dq", "dk", "dv"), (out, *grads), want):
        assert got.layout.placements == q.layout.placements, (what, name, got.layout)
        off = np.abs(got.to_local().asnumpy() - x[mine]).max(initial=0) / max(np.abs(x).max(initial=0), 1.0)
        assert off <= 1e-12, (what, name, off)
    return events, [e for e in both if e.phase == "backward" and e.op == "all_to_all"]


@lru_cache(maxsize=1)
def kinds(n):
    """Documents for n ranks: one of 1 to 3n + 1 tokens, shorter than n, many of one token, what only some ranks have."""
    some = [[m] for m in range(1, 3 * n + 2)]
    return [*some, [7, 3, 1, 1, 12, 2], [3], [1] * 40, [0, 5 * n, 0], [40, 1, 1, 1], [9] * n]


def bytes_of_rows(tokens, me, g, causal=True, window=None):
    """What the tables say this rank sends of keys and values in float64."""
    table = keys_by_rank(tokens, Mask(causal, window))
    return sum(len(keys.rows[me]) for r, keys in enumerate(table) if r != me) * 2 * g * E * 8


@case(world_size=(2, 4), timeout=200)
def gather_and_ring_are_one_device(world):
    n = world.size
    mesh = md.init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    for number, documents in sampled(enumerate(kinds(n)), 3, 1):
        mask = list(MASKS.values())[number // 3 % 3]  # at push each in turn: a window has a ring of its own
        h, g = HEADS[number % len(HEADS) if number % 2 else 1]
        how = md.balance(documents, n, **mask) if number % 4 else (md.head_tail if number % 8 else md.in_order)(documents, n)
        for algorithm in ("gather", "ring"):
            what = f"{algorithm} {documents} {mask} {h}:{g}"
            events, back = compare(mesh, ("cp",), algorithm, how, h, g, what, **mask)
            there = {(e.op, e.axes, e.implicit, e.src) for e in events}
            assert there <= {("all_to_all", ("cp",), False, "keys and values")}, (what, there)
            need = bytes_of_rows(how, world.rank, g, **mask)
            assert sum(e.bytes for e in events) == need, (what, events, need)
            rounds = 1 if algorithm == "gather" else n - 1
            assert len(events) <= rounds and (len(events) == rounds or algorithm == "ring" or not events), (what, events)
            assert len(back) == len(events) * (1 if algorithm == "gather" else 2), (what, back)


def a_document_in_order_costs_what_a_ring_costs_and_whole_documents_nothing(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    g, row = 2, 2 * 2 * E * 8
    for algorithm in ("gather", "ring"):
        full, _ = compare(mesh, ("cp",), algorithm, md.in_order([16], 2), 8, g, "full", causal=False)
        assert [e.bytes for e in full] == [8 * row]                       # 2 g e (n / N) (N - 1) numbers
        tokens = md.head_tail([16], 2)
        some, _ = compare(mesh, ("cp",), algorithm, tokens, 8, g, "head and tail")
        assert sum(e.bytes for e in some) == (4 if world.rank == 0 else 8) * row  # 3/4 of that, over both ranks
        none, back = compare(mesh, ("cp",), algorithm, md.balance([8, 8], 2), 8, g, "whole documents")
        assert none == [] and back == []


def ulysses_is_a_redistribution(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    n, h, g = 12, 8, 2
    for name, mask in MASKS.items():
        events, _ = compare(mesh, ("ulysses",), "gather", md.in_order([7, 4, 1], 1), h, g, f"ulysses {name}", **mask)
        assert {(e.op, e.axes, e.implicit) for e in events} == {("all_to_all", ("ulysses",), False)}, events
        assert sum(e.bytes for e in events) == (2 * h + 2 * g) * E * (n // 2) // 2 * 8  # (2h + 2g) e (n/N) (N-1)/N numbers
    compare(mesh, ("ulysses",), "gather", md.in_order([5, 6], 1), 8, 8, "uneven list")


@case(world_size=4)
def hybrids_are_one_device(world):
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "ulysses"))
    for name, mask in MASKS.items():
        for h, g in HEADS[:2]:
            for algorithm in ("gather", "ring"):
                events, _ = compare(mesh, ("cp", "ulysses"), algorithm, md.balance([13, 1, 9, 4, 2], 2, **mask), h, g,
                                    f"hybrid {algorithm} {name} {h}:{g}", **mask)
                assert {e.axes for e in events} <= {("cp",), ("ulysses",)}, events


@case(world_size=4)
def beside_data_and_tensor_parallelism(world):
    """Each part of the batch has an order of its own; heads are cut over tp."""
    for names in (("dp", "cp"), ("cp", "tp")):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        parts = [[9, 7], [3, 12, 1]] if names[0] == "dp" else [[9, 7]]
        orders = [md.balance(documents, 2) for documents in parts]
        mine = orders[mesh.get_coordinate()[0] if names[0] == "dp" else 0]
        part = orders.index(mine)
        arrays = drawn(16, 8, 2, seed=part)
        want = one_device(mine.documents, *arrays)
        axes = names[:2] if names[0] == "dp" else ("cp",)
        (q, k, v, dout), rows = shares(mesh, mine, arrays, axes)
        if "tp" in names:
            q, k, v, dout = (x.redistribute(placements=[md.Shard(0), md.Shard(1)]) for x in (q, k, v, dout))
        for algorithm in ("gather", "ring"):
            attention = md.context_attention(mesh["cp"], algorithm)
            got = attention(q, k, v, mine)
            grads = md.grad(lambda q, k, v, f=attention, t=mine, d=dout: (f(q, k, v, t) * d).sum(), (0, 1, 2))(q, k, v)
            for name, x, y in zip(("out", "dq", "dk", "dv"), (got, *grads), want):
                assert x.layout.placements == q.layout.placements
                if "tp" in names:
                    y = np.split(y, 2, 1)[mesh.get_coordinate()[1]]
                off = np.abs(x.to_local().asnumpy() - y[rows]).max() / np.abs(y).max()
                assert off <= 1e-12, (names, algorithm, name, off)


def narrow_floats_are_computed_in_float32_and_rounded_once(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens, arrays = md.balance([9, 6], 2), drawn(15, 4, 2)
    for dtype, eps in ((ms.float16, 2.0**-11), (ms.bfloat16, 2.0**-8)):
        exact = [Tensor(x).astype(dtype).astype(ms.float32).asnumpy().astype(np.float64) for x in arrays]
        want = one_device(tokens.documents, *exact)
        (q, k, v, dout), rows = shares(mesh, tokens, arrays, ("cp",))
        q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
        for algorithm in ("gather", "ring"):
            attention = md.context_attention(mesh["cp"], algorithm)

            def loss(q, k, v, f=attention, dout=dout):
                return (f(q, k, v, tokens) * dout).astype(ms.float32).sum()
            grads = md.grad(loss, (0, 1, 2))(q, k, v)
            for name, x, y in zip(("out", "dq", "dk", "dv"), (attention(q, k, v, tokens), *grads), want):
                assert x.dtype == dtype
                off = np.abs(x.to_local().astype(ms.float32).asnumpy() - y[rows]).max() / np.abs(y).max()
                assert off <= 4 * eps, (dtype, algorithm, name, off)


def any_scale_is_as_exact_as_the_operands(world):
    """A number beside float64 is taken for float32 by MindSpore; 1/sqrt(4) would not show it."""
    mesh, tokens, arrays = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), md.balance([9, 6], 2), drawn(15, 4, 2)
    out, dq, dk, dv = one_device([9, 6], arrays[0] * 0.7, *arrays[1:])
    (q, k, v, dout), mine = shares(mesh, tokens, arrays, ("cp",))
    for algorithm, window in (("gather", None), ("ring", None), ("ring", 99)):
        attention = md.context_attention(mesh["cp"], algorithm)

        def run(q, k, v, attention=attention, window=window):
            return attention(q, k, v, tokens, scale=0.35, window=window)
        grads = md.grad(lambda q, k, v, run=run: (run(q, k, v) * dout).sum(), (0, 1, 2))(q, k, v)
        for got, want in zip((run(q, k, v), *grads), (out, dq * 0.7, dk, dv), strict=True):
            assert np.abs(got.to_local().asnumpy() - want[mine]).max() <= 1e-12, (algorithm, window)


def what_is_no_number_reaches_only_what_sees_it(world):
    """A weight of 0 times NaN is NaN: a later token of the document must not reach an earlier one by it, nor back."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    documents, broken = [9, 14, 2], np.array([5, 15])  # of two documents; the third stays whole
    document, place = np.repeat(np.arange(3), documents), np.concatenate([np.arange(n) for n in documents])
    for (algorithm, mask), which in product(product(("gather", "ring"), ({}, {"window": 4})), range(4)):
        tokens, arrays = md.balance(documents, 2, **mask), drawn(25, 4, 2)
        ahead = place[:, None] - place
        sees = (document[:, None] == document) & (ahead >= 0) & (ahead < mask.get("window", 25))
        arrays[which][broken] = (np.nan, np.inf, -np.inf)[which % 3]
        queries = sees[:, broken].any(1) if which in (1, 2) else np.isin(np.arange(25), broken)
        keys = sees[queries].any(0)
        want = one_device(documents, *drawn(25, 4, 2), **mask)
        (q, k, v, dout), mine = shares(mesh, tokens, arrays, ("cp",))

        attention = md.context_attention(mesh["cp"], algorithm)

        def run(q, k, v, attention=attention, tokens=tokens, mask=mask):
            return attention(q, k, v, tokens, **mask)
        grads = md.grad(lambda q, k, v, run=run, dout=dout: (run(q, k, v) * dout).sum(), (0, 1, 2))(q, k, v)
        reached = np.zeros(25, bool) if which == 3 else queries, queries, keys, keys
        for name, got, x, bad in zip(("out", "dq", "dk", "dv"), (run(q, k, v), *grads), want, reached, strict=True):
            whole = ~bad[mine]
            assert np.isfinite(got.to_local().asnumpy()[whole]).all(), (algorithm, mask, which, name)
            if name == "out":
                assert np.abs(got.to_local().asnumpy()[whole] - x[mine][whole]).max(initial=0) <= 1e-12


def a_scale_of_nothing_is_a_scale(world):
    mesh, tokens = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), md.balance([9, 6], 2)
    (q, k, v, _), _ = shares(mesh, tokens, drawn(15, 4, 2), ("cp",))
    for algorithm in ("gather", "ring"):
        attention = md.context_attention(mesh["cp"], algorithm)
        even, other, usual = (attention(a, k, v, tokens, scale=scale).to_local().asnumpy()
                              for a, scale in ((q, 0.0), (q * 3, 0.0), (q, None)))
        assert np.array_equal(even, other) and not np.allclose(even, usual, atol=1e-3), algorithm


def what_does_not_fit_is_refused_by_all_before_anything_is_sent(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    heads = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",))
    tokens, arrays = md.balance([9, 6], 2), drawn(15, 4, 2)
    (q, k, v, _), _ = shares(mesh, tokens, arrays, ("cp",))
    attention, ring = (md.context_attention(mesh["cp"], name) for name in ("gather", "ring"))
    (q1, k1, v1, _), _ = shares(heads, md.in_order([9, 6], 1), drawn(15, 3, 3), ("ulysses",))
    plain = Tensor(arrays[0])
    with md.comm.record() as events:
        texts = [refusal(call, error) for call, error in (
            (lambda: attention(q, k, v, md.balance([9, 7], 2)), ConfigError),
            (lambda: attention(q, k, v, md.in_order([15], 1)), ConfigError),
            (lambda: attention(q, k, v, tokens, causal=False, window=3), ConfigError),
            (lambda: attention(q, q, k, tokens), ConfigError),
            (lambda: attention(q, k[:, :0], v[:, :0], tokens), ConfigError),
            (lambda: attention(q[:, :, :2], k, v, tokens), ConfigError),
            (lambda: attention(q, k, v, tokens, window=2.0), ConfigError),
            (lambda: attention(q, k, v, tokens, scale=Tensor(0.5)), ConfigError),
            (lambda: attention(q, k, v, tokens, scale=float("nan")), ConfigError),
            (lambda: ring(q, k, v, tokens, scale=-np.inf), ConfigError),
            (lambda: attention(q, k, v, tokens, dropout=0.1), ConfigError),
            (lambda: attention(plain, plain, plain, tokens), LayoutError),
            (lambda: attention(q, k, v, None), ConfigError),
            (lambda: attention(q.astype(ms.float32), k, v, tokens), LayoutError),
            (lambda: attention(*(x.astype(ms.int32) for x in (q, k, v)), tokens), LayoutError),
            (lambda: md.context_attention(heads["ulysses"])(q1, k1, v1, md.in_order([9, 6], 1)), ConfigError),
            (lambda: md.context_attention(mesh["cp"], "zigzag"), ConfigError))]
    assert events == []
    for text, said in zip(texts, (
            "15, 15 and 15 rows for 1 x 16", "cut over 1 ranks, and the axis has 2", "no such mask", "do not share",
            "do not share", "queries are 2 wide, and keys 4", "no such mask", "the scale is a Tensor",
            "the scale is nan", "the scale is -inf", "weights cannot be dropped",
            "no lists of tokens", "'tokens' is a NoneType", "one floating-point dtype", "one floating-point dtype",
            "a size of 'ulysses' among 1, 3", "one of gather, ring"), strict=True):
        assert said in text and "fix:" in text, text
        same_on_all_ranks(world, text)
    for which in (attention, ring):  # of gather's, made of products, MindSpore gives zeros
        def inner(x, which=which):
            return (md.grad(lambda y: (which(y, k, v, tokens) ** 2).sum())(x) ** 2).sum()
        with md.comm.record() as events:
            text = refusal(lambda inner=inner: md.grad(inner)(q), OpRuleError)
        assert "a derivative of its gradient" in text and events == []
    whole = md.distribute_tensor(Tensor(arrays[0]), mesh, [md.Shard(1)])
    with md.comm.record() as events, md.redistribution_policy("explicit"):
        attention(whole, k, v, md.balance([9, 6], 2))
    assert [e.implicit for e in events if e.dst.startswith("f64")] == [False] * 2  # of one cut by heads, and back


def another_order_on_some_rank_is_told_to_all_under_checks(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    orders = md.in_order([9, 6], 2), md.head_tail([9, 6], 2)
    (q, k, v, _), _ = shares(mesh, orders[0], drawn(15, 4, 2), ("cp",))
    attention = md.context_attention(mesh["cp"])
    for call, word in ((lambda: attention(q, k, v, orders[world.rank]), "tokens"),
                       (lambda: attention(q, k, v, orders[0], scale=0.5 + world.rank), "scale")):
        with md.checks():
            text = refusal(call, CollectiveMismatch)
        assert word in same_on_all_ranks(world, text), text


@case(world_size=4)
def the_axis_that_cuts_a_part_may_come_first_in_the_mesh(world):
    """`axes` are outermost first, whatever order the mesh has: each coordinate of dp passes its own batch and order."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    here = mesh.get_local_rank("dp")
    documents = ([9, 4, 2], [15])[here]
    tokens, arrays = md.balance(documents, 2), drawn(15, 4, 2, seed=here)
    q, k, v = tokens.cut(*arrays[:3], mesh=mesh, axes=("dp", "cp"))
    want, *_ = one_device(documents, *arrays)
    got = md.context_attention(mesh["cp"])(q, k, v, tokens).to_local().asnumpy()
    assert np.abs(got - want[tokens.index(mesh.get_local_rank("cp"))]).max() <= 1e-12
    for axes in (("dp", "tp"), ("cp", "cp")):
        text = refusal(lambda axes=axes: tokens.cut(arrays[0], mesh=mesh, axes=axes), ConfigError)
        assert "the mesh is not cut by axes" in text


class Core(nn.Cell):
    """Causal attention of whole rows [b, s, h, e]; it counts how often it runs."""

    ran = 0

    def construct(self, q, k, v):
        self.ran += 1
        share, s = q.shape[2] // k.shape[2], q.shape[1]
        a, b, c = (mint.permute(x, (0, 2, 1, 3)) for x in (q, mint.repeat_interleave(k, share, 2),
                                                           mint.repeat_interleave(v, share, 2)))
        scores = mint.matmul(a, mint.permute(b, (0, 1, 3, 2))) / np.sqrt(E).item()
        with md.implicit_replication():
            scores = scores + Tensor(np.triu(np.full((s, s), -1e30), 1))
        return mint.permute(mint.matmul(mint.softmax(scores, -1), c), (0, 2, 1, 3))


@case(world_size=4)
def the_style_is_the_cell_of_whole_rows(world):
    rng = np.random.default_rng(4)
    q, k, v, dout = (rng.normal(size=(2, 8, heads, E)) for heads in (4, 2, 2, 4))
    flat = [x.reshape(16, *x.shape[2:]) for x in (q, k, v, dout)]
    want = [x.reshape(2, 8, *x.shape[1:]) for x in one_device([8, 8], *flat)]
    for names, rest in ((("dp", "cp"), {"dp": md.Shard(0)}), (("cp", "tp"), {"tp": md.Shard(2)})):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for order in ("in_order", "head_tail"):
            cut = md.head_tail if order == "head_tail" else md.in_order
            at = cut([8], 2).index()  # as the program cuts its rows: pieces of each one behind another
            xs = [md.distribute_tensor(Tensor(x[:, at]), mesh, rest | {"cp": md.Shard(1)}, src_data_rank=None)
                  for x in (q, k, v, dout)]
            for algorithm in ("gather", "ring"):
                core = md.ContextParallel(algorithm, order=order).apply(Core(), mesh["cp"])
                got = [core(*xs[:3]), *md.grad(lambda *t, f=core, d=xs[3]: (f(*t) * d).sum(), (0, 1, 2))(*xs[:3])]
                for name, x, y in zip(("out", "dq", "dk", "dv"), got, want):
                    assert x.layout.placements == xs[0].layout.placements, (name, x.layout)
                    off = np.abs(x.full_tensor().asnumpy() - y[:, at]).max() / np.abs(y).max()
                    assert off <= 1e-12, (names, order, algorithm, name, off)
                assert core.ran == 0
    mesh = md.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp"))  # a reshape left dp on the sequence
    core = md.ContextParallel().apply(Core(), mesh["cp"])
    xs = [md.distribute_tensor(Tensor(x), mesh, {"dp": md.Shard(dp), "cp": md.Shard(1)})
          for x, dp in ((q, 1), (k, 1), (v, 0), (dout, 0))]
    got = [core(*xs[:3]), *md.grad(lambda *t: (core(*t) * xs[3]).sum(), (0, 1, 2))(*xs[:3])]
    for x, y in zip(got, want):
        assert np.abs(x.full_tensor().asnumpy() - y).max() <= 1e-12 * np.abs(y).max(), x
    assert core.ran == 0
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    core = md.ContextParallel().apply(Core(), mesh["cp"])
    whole = core(*(md.distribute_tensor(Tensor(x), mesh, src_data_rank=None) for x in (q, k, v)))
    assert core.ran == 1 and np.abs(whole.full_tensor().asnumpy() - want[0]).max() < 1e-6
    heads = md.ContextParallel(seq_dim=2, head_dim=1).apply(Core(), mesh["cp"])
    swapped = [md.distribute_tensor(Tensor(x.swapaxes(1, 2)), mesh, {"cp": md.Shard(2)}, src_data_rank=None)
               for x in (q, k, v)]
    assert np.abs(heads(*swapped).full_tensor().asnumpy() - want[0].swapaxes(1, 2)).max() < 1e-12
    odd = [md.distribute_tensor(Tensor(x[:, :7]), mesh, {"cp": md.Shard(1)}, src_data_rank=None) for x in (q, k, v)]
    other = md.distribute_tensor(Tensor(q), mesh, {"cp": md.Shard(0)}, src_data_rank=None)
    for call, said in ((lambda: core(*odd), "not cut evenly"), (lambda: core(other, *xs[1:3]), "but not its sequence"),
                       (lambda: core(*xs[:3], xs[3]), "something else than"),
                       (lambda: md.ContextParallel(seq_dim=3), "do not fit"),
                       (lambda: md.ContextParallel().apply(Core(), mesh), "not one axis")):
        text = refusal(call, ConfigError)
        assert said in text, text
        same_on_all_ranks(world, text)


def on_a_devices_branch_the_same_is_sent_and_all_is_waited_for(world):
    """Rows as HCCL takes them, in the strict double; one rank has no tokens, and so nothing that it could send."""
    with rehearsed():
        mesh = md.init_device_mesh("npu", (2,), mesh_dim_names=("cp",))
        for tokens in (md.head_tail([16], 2), md.balance([9, 6, 2], 2), md.in_order([1], 2), md.in_order([3], 2)):
            for algorithm in ("gather", "ring"):
                compare(mesh, ("cp",), algorithm, tokens, 4, 2, f"rehearsed {algorithm} {tokens.documents}")


def a_thousand_documents_of_one_token(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for algorithm in sampled(("ring", "gather"), 2):
        events, back = compare(mesh, ("cp",), algorithm, md.balance([1] * 1000, 2), 8, 2, "a thousand documents")
        assert events == [] and back == []
