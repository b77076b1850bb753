# SPDX-License-Identifier: Apache-2.0
"""Real ranks: fused projections cut by head or block, plans computed from a model, and what plans tell and refuse."""
import contextlib
import io

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from model_zoo.llama.config import ModelConfig
from model_zoo.llama.model import Llama, cross_entropy, init_weights
from ms_dtensor import ColwiseParallel, DTensor, FusedColwiseParallel, RowwiseParallel, distribute_tensor, parallelize_module
from ms_dtensor.errors import ConfigError, LayoutError, OpRuleError
from tests.operands import Built, R, S, data, mesh_1d, mesh_2d, placed
from tests.parallel.cases_styles import fill
from tests.support import TOLD, array, counted, equal, equal_steps, refusal, refused_alike, same_on_all_ranks


class Attention(nn.Cell):
    """Grouped-query attention with a fused projection; `ranks` counts heads as code on local tensors does."""

    def __init__(self, heads=8, kv_heads=4, width=3, dim=10, bias=True):
        super().__init__()
        self.heads, self.kv_heads, self.width, self.ranks = heads, kv_heads, width, 1
        self.qkv_proj = nn.Dense(dim, (heads + 2 * kv_heads) * width, has_bias=bias)
        self.o_proj = nn.Dense(heads * width, dim, has_bias=False)

    def construct(self, x):
        h, k, w = self.heads // self.ranks, self.kv_heads // self.ranks, self.width
        out = self.qkv_proj(x)
        q, key, value = out if isinstance(out, tuple) else mint.split(out, (h * w, k * w, k * w), -1)
        t = x.shape[0]
        q = q.reshape((t, k, h // k, w))
        key, value = key.reshape((t, k, 1, w)), value.reshape((t, k, 1, w))
        score = (q * key).sum(-1, keepdims=True)  # each query head with its own key head
        return self.o_proj((score * value).reshape((t, h * w)))


class GateUp(nn.Cell):
    def __init__(self, dim=10, hidden=12):
        super().__init__()
        self.gate_up_proj, self.down_proj = mint.nn.Linear(dim, 2 * hidden, bias=False), nn.Dense(hidden, dim)

    def construct(self, x):
        out = self.gate_up_proj(x)
        gate, up = out if isinstance(out, tuple) else mint.chunk(out, 2, -1)
        return self.down_proj(mint.nn.functional.silu(gate) * up)


def _compare(make, plan, mesh, x, dx, after=lambda net: net):
    plain, net = fill(make()), fill(make())
    want = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
    after(parallelize_module(net, mesh, plan))
    with counted() as count:
        got = md.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(dx)
    equal_steps(got, want, net.trainable_params())
    return net, count


# -- fused projections ---------------------------------------------------------------------------------------------------
def fused_qkv_is_cut_by_head(world, line):
    x = data(1, 5, 10)
    for local in (True, False):
        def tell(net, local=local):
            net.ranks = 4 if local else 1
        plan = {"qkv_proj": FusedColwiseParallel((24, 12, 12), units=4, use_local_output=local),
                "o_proj": RowwiseParallel(use_local_output=False)}
        net, count = _compare(Attention, plan, line, x, x if local else distribute_tensor(x, line), tell)
        assert count.pop(TOLD, 0) == local
        assert count == {("all_reduce", "forward"): 1}, (local, count)  # the input is no leaf that is differentiated
        w = net.qkv_proj.weight
        assert w.placements == (md.FusedShard(0, (24, 12, 12)),) and w.local_shape == (12, 10)
        np.testing.assert_array_equal(array(w), fill(Attention()).qkv_proj.weight.asnumpy())
        mine = fill(Attention()).qkv_proj.weight.asnumpy()
        r = world.rank  # two query heads, a key head, a value head
        np.testing.assert_array_equal(w.to_local().asnumpy(), np.concatenate(
            [mine[6 * r:6 * r + 6], mine[24 + 3 * r:27 + 3 * r], mine[36 + 3 * r:39 + 3 * r]]))


def fused_outputs_are_the_parts_in_the_models_order(world, line):
    x = data(1, 5, 10)
    net = fill(Attention())
    want = np.split(net.qkv_proj(x).asnumpy(), (24, 36), -1)
    parallelize_module(net, line, {"qkv_proj": FusedColwiseParallel((24, 12, 12), units=4, use_local_output=False)})
    with counted({}):
        parts = net.qkv_proj(distribute_tensor(x, line, src_data_rank=None))
    assert all(p.placements == (S(1),) for p in parts)
    equal(parts, want)
    wide = net.qkv_proj(placed(x, line, S(0)))  # brought to Replicate
    equal(wide[0], want[0])


def fused_gate_up_is_cut_by_block(world, line):
    x = data(2, 5, 10)
    for local in (True, False):
        plan = {"gate_up_proj": FusedColwiseParallel((12, 12), use_local_output=local),
                "down_proj": RowwiseParallel(use_local_output=False)}
        net, count = _compare(GateUp, plan, line, x, x if local else distribute_tensor(x, line))
        assert count.pop(TOLD, 0) == local
        assert count[("all_reduce", "forward")] == 1 and {op for op, _ in count} == {"all_reduce"}, count
        assert net.gate_up_proj.weight.placements == (md.FusedShard(0, (12, 12)),)


def fused_weights_on_two_axes(world, grid):
    x = data(3, 8, 10)
    share = Tensor(x.asnumpy()[4 * grid.get_local_rank("dp"):][:4])
    plan = {"gate_up_proj": FusedColwiseParallel((12, 12), use_local_output=False),
            "down_proj": RowwiseParallel(use_local_output=False)}
    net, _ = _compare(GateUp, plan, grid["tp"], x, share, lambda m: md.replicate(m, mesh=grid["dp"]))
    assert net.gate_up_proj.weight.placements == (R, md.FusedShard(0, (12, 12)))


def errors_of_fused_projections_name_what_is_right(world, line):
    x = data(1, 5, 10)

    class Unchanged(Attention):
        def construct(self, x):
            qkv = self.qkv_proj(x)
            t = x.shape[0]
            q = qkv.reshape((t, 16, 3))[:, :8]
            return self.o_proj(q.reshape((t, 24)))

    class Splits(Attention):
        def construct(self, x):
            return mint.split(self.qkv_proj(x), (24, 12, 12), -1)[0]
    for make in (Unchanged, Splits):
        for where in ({"qkv_proj": FusedColwiseParallel((24, 12, 12), units=4, use_local_output=False)},):
            net = parallelize_module(fill(make()), line, where)
            told = refusal(lambda n=net: n(distribute_tensor(x, line)), LayoutError)
            assert "a tuple of DTensors" in told and "q, k, v = self.qkv(x)" in told, told
            assert "ColwiseParallel(use_local_output=False)" in told, told
    net = parallelize_module(fill(Unchanged()), line, {"qkv_proj": ColwiseParallel()})
    told = refusal(lambda: net(x), LayoutError)
    assert "use_local_output=False" in told and "FusedColwiseParallel" in told and "-1" not in told, told


def ids_that_all_ranks_pass_whole_are_no_pieces(world, line):
    ids = Tensor(np.array([[3, 1, 2, 0]], np.int32))
    cell = parallelize_module(fill(nn.Embedding(8, 6)), line, RowwiseParallel())
    told = same_on_all_ranks(world, refusal(lambda: cell(ids), LayoutError))
    assert "input_layouts=Replicate()" in told, told
    table = fill(nn.Embedding(8, 6))
    equal(cell(ids[:, world.rank:world.rank + 1]), table(ids), "pieces")
    equal(parallelize_module(fill(nn.Embedding(8, 6)), line, RowwiseParallel(input_layouts=R))(ids), table(ids), "whole")


def a_model_on_one_axis_and_a_batch_on_the_whole_mesh(world, grid):
    x = data(1, 4, 8)

    def own():
        return fill(Built(lambda c, x: mint.nn.functional.linear(x, c.up.weight), up=nn.Dense(8, 8)))
    net = parallelize_module(own(), grid["tp"], {"up": ColwiseParallel(use_local_output=False)})
    told = refusal(lambda: net(distribute_tensor(x, grid, {"dp": S(0)})), OpRuleError)
    assert "replicate(net, mesh=mesh['dp'])" in told, told
    equal(md.replicate(net, mesh=grid["dp"])(distribute_tensor(x, grid, {"dp": S(0)})), own()(x))


def fused_refusals(world, line):
    cell = fill(GateUp()).gate_up_proj
    for wrong in (lambda: FusedColwiseParallel((12, 12), units=5), lambda: FusedColwiseParallel(()),
                  lambda: FusedColwiseParallel((12, 11)).apply(cell, line),
                  lambda: FusedColwiseParallel((12, 12), units=6).apply(cell, line),
                  lambda: FusedColwiseParallel((12, 12)).apply(cell, mesh_2d()),
                  lambda: FusedColwiseParallel((12, 12)).apply(nn.ReLU(), line)):
        refused_alike(world, wrong, (ConfigError, LayoutError))
    FusedColwiseParallel((12, 12)).apply(cell, line)
    assert "laid out already" in refusal(lambda: FusedColwiseParallel((12, 12)).apply(cell, line), LayoutError)


# -- styles by keyword and on named axes -----------------------------------------------------------------------------------
def the_input_may_come_by_keyword(world, line):
    x = data(5, 6, 8)
    for style, make, name in ((ColwiseParallel(output_layouts=R), lambda: nn.Dense(8, 8), "x"),
                              (RowwiseParallel(input_layouts=R), lambda: nn.Dense(8, 8), "x"),
                              (FusedColwiseParallel((4, 4)), lambda: nn.Dense(8, 8), "x"),
                              (md.SequenceParallel(sequence_dim=0), lambda: nn.LayerNorm((8,)), "input_x")):
        cell = parallelize_module(fill(make()), line, style)
        whole = not isinstance(style, md.SequenceParallel)
        given = x if whole else Tensor(np.ascontiguousarray(np.array_split(np.tile(x.asnumpy(), (2, 1)), 4)[world.rank]))
        equal(cell(**{name: given}), cell(given))
        assert "without an input" in refusal(cell, LayoutError)


def styles_speak_of_named_axes_on_a_mesh_of_two(world, grid):
    x = data(6, 8, 4)

    class Seen(nn.Cell):
        def construct(self, x, y=None):
            self.seen = (x, y)
            return x * 2
    cell = parallelize_module(Seen(), grid, md.PrepareModuleInputOutput(
        input_layouts=({"dp": S(0)},), desired_input_layouts=({"dp": R, "tp": S(1)},),
        input_kwarg_layouts={"y": {"tp": S(1)}}, desired_input_kwarg_layouts={"y": {"tp": R}},
        output_layouts=({"dp": R},), desired_output_layouts=({"dp": S(0), "tp": R},), use_local_output=False))
    dp, tp = grid.get_coordinate()
    out = cell(Tensor(x.asnumpy()[4 * dp:][:4]), y=Tensor(np.ascontiguousarray(x.asnumpy()[:, 2 * tp:][:, :2])))
    assert cell.seen[0].placements == (R, S(1)) and cell.seen[1].placements == (R, R) and out.placements == (S(0), R)
    equal(cell.seen[0], x)
    equal(cell.seen[1], x)
    equal(out, x * 2)
    assert "does not say which axis" in refused_alike(world, lambda: parallelize_module(Seen(), grid, md.PrepareModuleInput(input_layouts=S(0), desired_input_layouts=R)), LayoutError)


# -- suggest_plan --------------------------------------------------------------------------------------------------------
TINY = ModelConfig(dim=16, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=24, vocab_size=19)


def _told(fn):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = fn()
    return result, out.getvalue()


def a_suggested_plan_equals_one_device(world, line):
    plain, net = Llama(TINY), Llama(TINY)
    for m in (plain, net):
        init_weights(m, 3)
    before = [type(p) for p in net.get_parameters()]
    (plan, text) = _told(lambda: md.suggest_plan(net, line))
    assert [type(p) for p in net.get_parameters()] == before  # nothing was applied
    assert set(plan) == {"tok_embeddings", "output", *(f"layers.*.attention.w{c}" for c in "qkvo"),
                         *(f"layers.*.feed_forward.w{c}" for c in "123")}
    assert bool(text) == (world.rank == 0) and (world.rank or "layers.*.attention.wq" in text), text
    _, text = _told(lambda: parallelize_module(net, line, plan))
    assert bool(text) == (world.rank == 0) and (world.rank or "layers.0.attention.wq ... layers.1.attention.wq (2 cells)" in text)
    _, text = _told(lambda: parallelize_module(nn.Dense(4, 4), mesh_2d()["tp"], ColwiseParallel()))
    assert bool(text) == (world.rank == 0)  # one rank tells, not one of each sub-mesh
    md.distribute_module(net, line)
    ids = np.random.default_rng(1).integers(0, 19, (2, 9)).astype(np.int32)
    x, y = Tensor(ids[:, :-1]), Tensor(np.ascontiguousarray(ids[:, 1:]))
    dx, dy = distribute_tensor(x, line), distribute_tensor(y, line)
    want = ms.value_and_grad(lambda i: cross_entropy(plain(i), y), None, plain.trainable_params())(x)
    with md.implicit_replication():  # the model makes rotary tables and its mask as it goes: plain, and the same on every rank
        got = md.value_and_grad(lambda i: cross_entropy(net(i), dy), None, net.trainable_params())(dx)
    equal(got[0], want[0], "loss")
    for p, g, w in zip(net.trainable_params(), got[1], want[1], strict=True):
        equal(g, w, p.name, rtol=1e-4)  # two layers deep, sums in another order
    assert isinstance(net.norm.weight, DTensor)


def a_suggested_plan_knows_fused_and_indivisible_cells(world):
    def block(kv_heads=4):
        return Built(lambda c, x: c.mlp(c.attn(x)), attn=Attention(kv_heads=kv_heads), mlp=GateUp())
    mesh, x = mesh_1d(), data(4, 5, 10)
    plan, _ = _told(lambda: md.suggest_plan(nn.SequentialCell(block(), block()), mesh))
    assert repr(plan["*.attn.qkv_proj"]) == repr(FusedColwiseParallel((24, 12, 12), units=4, use_local_output=False))
    assert repr(plan["*.mlp.gate_up_proj"]) == repr(FusedColwiseParallel((12, 12), use_local_output=False))
    _compare(lambda: nn.SequentialCell(block(), block()), plan, mesh, x, distribute_tensor(x, mesh))

    class NeoX(nn.Cell):
        def __init__(self):
            super().__init__()
            self.heads, self.embed_in, self.embed_out = 4, nn.Embedding(8, 12), nn.Dense(12, 8)
            self.query_key_value, self.dense = nn.Dense(12, 36), nn.Dense(12, 12)
            self.mlp = nn.Cell()
            self.mlp.dense_h_to_4h, self.mlp.dense_4h_to_h = nn.Dense(12, 48), nn.Dense(48, 12)
    plan, text = _told(lambda: md.suggest_plan(NeoX(), mesh))
    assert {key: type(style) for key, style in plan.items()} == {
        "embed_in": RowwiseParallel, "embed_out": ColwiseParallel, "query_key_value": ColwiseParallel, "dense": RowwiseParallel,
        "mlp.dense_h_to_4h": ColwiseParallel, "mlp.dense_4h_to_h": RowwiseParallel}
    assert repr(plan["query_key_value"]) == repr(ColwiseParallel(use_local_output=False))
    assert world.rank or "the order of a fused projection is the model's" in text, text
    plan, text = _told(lambda: md.suggest_plan(block(kv_heads=2), mesh))
    assert set(plan) == {"mlp.gate_up_proj", "mlp.down_proj"}
    assert world.rank or "left whole: attn.qkv_proj, because 2 heads do not divide by 4" in text

    class Unlike(nn.Cell):
        """A fused projection without what tells how to cut it."""

        def __init__(self, heads, rows, **cells):
            super().__init__()
            self.attn, self.mlp, self.patch = nn.Cell(), GateUp(), nn.Conv2d(3, 4, 2)
            self.attn.qkv = nn.Dense(12, rows)
            if heads:
                self.attn.num_heads = heads
            for key, cell in cells.items():
                setattr(self.attn, key, cell)
    for model, whole in (
            (Unlike(4, 36, proj=nn.Dense(12, 12)), ("attn.qkv, because no output projection is beside it",
                                                    "attn.proj, because the name is not known",
                                                    "patch, because a Conv2d is cut only if")),
            (Unlike(0, 36, o_proj=nn.Dense(12, 12)), ("attn.qkv, because its cell does not say how many heads",
                                                      "attn.o_proj, because its cell does not say how many heads")),
            (Unlike(4, 40, o_proj=nn.Dense(12, 12)), ("attn.qkv, because the 40 rows of 'qkv' are not q, k and v of 4",))):
        plan, text = _told(lambda: md.suggest_plan(model, mesh))
        assert set(plan) == {"mlp.gate_up_proj", "mlp.down_proj"}
        assert world.rank or all(f"left whole: {line}" in text for line in whole), text

    class Ahead(nn.Cell):
        """A second head that says a later token: DeepSeek-V3's has the table and the output matrix of the model."""

        def __init__(self, first):
            super().__init__()
            table, head = nn.Embedding(8, 12), nn.Dense(12, 8)
            if first:
                self.embed_tokens, self.lm_head = table, head
            self.later = nn.Cell()
            self.later.embed_tokens, self.later.lm_head, self.later.mlp = table, head, GateUp(12, 16)
            if not first:
                self.embed_tokens, self.lm_head = table, head
    for first, prefix in ((True, ""), (False, "later.")):  # a cell at two places is named once, as a plan has to name it
        plan, _ = _told(lambda: md.suggest_plan(Ahead(first), mesh))
        assert set(plan) == {f"{prefix}embed_tokens", f"{prefix}lm_head", "later.mlp.gate_up_proj", "later.mlp.down_proj"}
        parallelize_module(Ahead(first), mesh, plan)
    for wrong in (lambda: md.suggest_plan(nn.Dense(4, 4), mesh), lambda: md.suggest_plan(block(), mesh_2d())):
        refused_alike(world, wrong, ConfigError)


def plans_are_refused_whole_before_anything_is_touched(world, line):

    class Tied(nn.Cell):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Dense(4, 4), nn.Dense(4, 4), nn.ReLU()
            self.b.weight = self.a.weight
    for plan in ({"a": ColwiseParallel(), "c": ColwiseParallel()}, {"a": ColwiseParallel(), "act": ColwiseParallel()},
                 {"a": ColwiseParallel(), "b": RowwiseParallel()}, {"a": ColwiseParallel(), "b": "rows"}):
        net = Tied()
        refused_alike(world, lambda: parallelize_module(net, line, plan), (ConfigError, LayoutError))
        assert not any(isinstance(p, DTensor) for p in net.get_parameters()), plan
        _told(lambda n=net: parallelize_module(n, line, {"[ab]": ColwiseParallel()}))  # still usable
        assert net.a.weight is net.b.weight and net.a.weight.placements == (S(0),)
