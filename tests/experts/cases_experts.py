# SPDX-License-Identifier: Apache-2.0
"""Experts on different ranks: values and all gradients of every token through every expert on one device, in float64."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, comm
from ms_dtensor.core.layout import Layout
from ms_dtensor.errors import CollectiveMismatch, DTensorError, LayoutError
from ms_dtensor.optim import AdamW, clip_grad_norm_
from ms_dtensor.parallel.experts import ratio
from tests.cases import case
from tests.experts.reference import expected, operands, random_choice
from tests.support import array, counted, each_once, equal, equal_each, mesh_1d, refusal
from tests.tiers import sampled


def pieces(array, mesh, placements):
    """A DTensor of a NumPy array that every rank has."""
    layout = Layout(mesh, placements, array.shape)
    box = layout.local_box()
    local = np.ascontiguousarray(array[tuple(slice(a, b) for a, b in box)])
    return md.DTensor.from_local(Tensor(local), mesh, placements, shape=array.shape)


WHATS = ("y", "dx", "dweights", "dw1", "dw2", "dw3")


def to_first(rng, n, experts, k):
    return np.tile(np.arange(k, dtype=np.int32), (n, 1))


def dropped(rng, n, experts, k):
    return np.where(rng.random((n, k)) < 0.3, np.int32(-1), random_choice(rng, n, experts, k))


def ten(n):
    """(tokens, experts, k, choices) by name. Chunks of few tokens leave the last ranks without any."""
    return {"random": (4 * n, 2 * n, 2, random_choice), "all to one expert": (4 * n, 2 * n, 1, to_first),
            "ranks without tokens": (n - 1, 2 * n, 2, random_choice), "one token": (1, 2 * n, 2, random_choice),
            "few tokens, two experts used": (n - 1, 2 * n, 2, to_first), "many experts": (16 * n, 16 * n, 8, random_choice),
            "uneven experts": (3 * n + 1, 2 * n + 1, 3, random_choice),
            "ranks without experts": (5, n - 1, 1, random_choice), "all experts": (5, 5, 5, random_choice),
            "some dropped": (4 * n, 2 * n, 2, dropped)}


@case(world_size=(2, 4, 8), timeout=400)
def results_and_gradients_are_those_of_one_device(world):
    n, mesh, given = world.size, mesh_1d(world.size, "ep"), []
    for seed, (tokens, experts, k, choose) in enumerate(ten(n).values()):
        x, weights, dout, ws = operands(seed, tokens, experts, k)
        given.append((x, weights, choose(np.random.default_rng(seed), tokens, experts, k), dout, ws))
    wanted = each_once(*(lambda of=of: expected(*of) for of in given))
    for name, (x, weights, chosen, dout, ws), want in zip(ten(n), given, wanted, strict=True):
        *cut, picks, cot = (pieces(a, mesh, [Shard(0)]) for a in (x, weights, *ws, chosen, dout))
        for dedup in (False, True):
            def loss(x, weights, *w, picks=picks, cot=cot, dedup=dedup):
                y = md.moe(x, weights, picks, *w, dedup=dedup)
                return (y * cot).sum(), y
            with counted() as count, md.redistribution_policy("explicit"):
                (_, y), grads = md.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True)(*cut)
            assert {g.placements for g in (y, *grads)} == {(Shard(0),)}, name
            equal_each((y, *grads), want, WHATS, f"{name}, {dedup=}", 1e-10)
            rows = {("all_to_all", "forward"): 5 if dedup else 3, ("all_to_all", "backward"): 3 if dedup else 2}
            assert {key: v for key, v in count.items() if key[0] != "all_reduce"} == rows, (name, dedup, count)


CUT, WHOLE = Shard(0), Replicate()
# by ranks: tokens, experts and choices; then axes, how tokens lie, and how an expert's weight does whose widths are dim d
AXES = {
    4: ((9, 5, 2), [
        (("dp", "ep"), [CUT, CUT], lambda d: [WHOLE, CUT]),
        (("ep", "tp"), [CUT, WHOLE], lambda d: [CUT, Shard(d)]),
        (("ep", "tp"), [CUT, WHOLE], lambda d: [CUT, WHOLE]),
        (("dp", "tp"), [CUT, WHOLE], lambda d: [WHOLE, Shard(d)]),
        (("ep", "ep2"), [CUT, CUT], lambda d: [CUT, CUT])]),
    8: ((21, 9, 3), [  # 9 experts do not divide by 2, 4 or 8
        (("dp", "ep", "tp"), [CUT, CUT, WHOLE], lambda d: [WHOLE, CUT, Shard(d)]),
        (("dp", "ep", "tp"), [CUT, CUT, WHOLE], lambda d: [WHOLE, CUT, WHOLE]),
        (("dp", "ep", "tp"), [CUT, CUT, CUT], lambda d: [WHOLE, CUT, CUT]),  # ep within tp: sequence parallel
        (("dp", "cp", "tp"), [CUT, CUT, CUT], lambda d: [WHOLE, WHOLE, CUT]),
        (("dp", "ep", "cp"), [CUT, CUT, CUT], lambda d: [WHOLE, CUT, WHOLE]),
        (("dp", "ep", "cp"), [CUT, CUT, CUT], lambda d: [CUT, CUT, CUT])])}


@case(world_size=(4, 8), timeout=240)
def gradients_of_experts_are_sums_over_the_other_data_axes_alone(world):
    """dp x ep; ep x tp, where tokens are whole over tp and the experts' widths are cut; experts on some of three axes."""
    (tokens, experts, k), layouts = AXES[world.size]
    chosen = random_choice(np.random.default_rng(1), tokens, experts, k)
    x, weights, dout, ws = operands(2, tokens, experts, k)
    want, = each_once(lambda: expected(x, weights, chosen, dout, ws))
    for axes, rows, by_w in layouts:
        mesh = md.init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
        cut = [pieces(a, mesh, rows) for a in (x, weights)]
        cut += [pieces(w, mesh, by_w(d)) for w, d in zip(ws, (1, 2, 1))]
        picks, cot = pieces(chosen, mesh, rows), pieces(dout, mesh, rows)
        for dedup in (False, True):
            def loss(x, weights, *w, picks=picks, cot=cot, dedup=dedup, rows=rows):
                y = md.moe(x, weights, picks, *w, dedup=dedup)
                return (y.redistribute(placements=rows) * cot).sum(), y
            (_, y), grads = md.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True)(*cut)
            equal_each((y, *grads), want, WHATS, f"{axes}, {dedup=}", 1e-10)


@case(world_size=(4, 8), timeout=240)
def a_token_goes_once_to_a_rank_where_that_is_cheaper(world):
    """Counted bytes of both forms are those of the table, and their ratio is near the formula's: of 64 experts over 8 ranks,
    8 for a token, rows of 256 float32, seven tenths."""
    n = world.size
    (tokens, experts, k, d), most, near = {4: ((256, 32, 8, 64), 1.0, 0.03), 8: ((512, 64, 8, 256), 0.7, 0.01)}[n]
    mesh, chosen = mesh_1d(n, "ep"), random_choice(np.random.default_rng(3), tokens, experts, k)
    x, weights, _, ws = operands(4, tokens, experts, k, d=d, f=2)
    cut = [pieces(a, mesh, [CUT]) for a in (x.astype(np.float32), weights.astype(np.float32), chosen,
                                            *(w.astype(np.float32) for w in ws))]
    sent = {}
    for dedup in (False, True, "auto"):
        with md.CommDebugMode() as log:
            md.moe(*cut, dedup=dedup)
        sent[dedup] = sum(comm.group(tuple(range(n))).all_gather_object(sum(e.bytes for e in log.events)))
    owner, home = chosen // (experts // n), np.arange(tokens) // (tokens // n)
    choices = int((owner != home[:, None]).sum())
    ranks = sum(len(set(row) - {h}) for row, h in zip(owner.tolist(), home.tolist()))
    numbers = 4 * n * (n - 1)  # a number of 4 bytes from each rank to each other one
    assert sent[False] == choices * 2 * d * 4 + numbers * (experts // n + 2), (sent, choices)
    assert sent[True] == ranks * (2 * d * 4 + 6 * k) + numbers * (experts // n + 3), (sent, ranks)
    assert sent["auto"] == sent[True] <= most * sent[False], sent
    assert abs(sent[True] / sent[False] - ratio(experts, k, n, d * 4)) < near


class Experts(nn.Cell):
    def __init__(self, d, f, count):
        super().__init__()
        rng = np.random.default_rng(8)
        for name, shape in (("w1", (count, f, d)), ("w2", (count, d, f)), ("w3", (count, f, d))):
            setattr(self, name, Parameter(Tensor(rng.normal(size=shape).astype(np.float32) * 0.5), name=name))

    def construct(self, x, weights, chosen):
        return md.moe(x, weights, chosen, self.w1, self.w2, self.w3)


class Block(nn.Cell):
    """A router, experts and a residual, as a model has them."""

    def __init__(self, d=6, f=5, count=6, k=2, **how):
        super().__init__()
        self.gate = nn.Dense(d, count, has_bias=False)
        self.gate.weight.set_data(Tensor(np.random.default_rng(9).normal(size=(count, d)).astype(np.float32)))
        self.router, self.experts = md.Router(k, **how), Experts(d, f, count)

    def construct(self, x):
        logits = self.gate(x)
        weights, chosen = self.router(logits)
        extra = 0.1 * md.expert_balance_loss(self.router.scores(logits), chosen, 3) + 0.01 * md.router_z_loss(logits)
        return x + self.experts(x, weights, chosen), extra, chosen


def lay_out(cell, mesh, experts, style):
    """Data parallelism of the experts over the axes that do not cut them, of the rest over all."""
    data, left = mesh["dp", "ep"].flatten("data"), [a for a in mesh.mesh_dim_names if a not in experts]
    if left:
        (md.fully_shard if style == "fully_shard" else md.replicate)(cell.experts, mesh=mesh[left[0]])
    if style == "fully_shard":
        md.fully_shard(cell, mesh=data)
    else:
        md.replicate(cell, mesh=data, ignored_modules=[cell.experts])


def a_block_with_its_losses_trains_as_on_one_device(world):
    """ep x dp by replicate, ep x dp by fully_shard, two axes of experts: loss, norm and weights after three steps."""
    rng = np.random.default_rng(10)
    batches = [rng.normal(size=(24, 6)).astype(np.float32) for _ in range(3)]

    def train(cell, place):
        optimizer = AdamW(cell.trainable_params(), lr=0.02)

        def loss(x):
            y, extra, chosen = cell(x)
            return (y * y).mean() + extra, chosen
        told = []
        step = md.value_and_grad(loss, None, cell.trainable_params(), has_aux=True)
        for batch in batches:
            (value, chosen), grads = step(place(batch))
            norm = clip_grad_norm_(grads, 0.5)
            counts = md.expert_counts(chosen, 6)
            counts = counts.full_tensor() if isinstance(counts, md.DTensor) else counts
            told.append((float(value.full_tensor() if isinstance(value, md.DTensor) else value), float(norm),
                         counts.asnumpy().tolist()))
            optimizer(grads)
        return told, {p.name: (p.full_tensor() if isinstance(p, md.DTensor) else p).asnumpy()
                      for p in cell.trainable_params()}
    for how in sampled(({}, {"score": "sigmoid", "groups": 3, "group_limit": 2, "scale": 2.0}), 2, 1):
        want, weights = train(Block(**how), Tensor)
        for axes, experts, style in ((("dp", "ep"), ["ep"], "replicate"), (("dp", "ep"), ["ep"], "fully_shard"),
                                     (("dp", "ep"), ["dp", "ep"], "replicate")):
            mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
            cell = Block(**how)
            part = mesh["ep"] if experts == ["ep"] else mesh
            md.parallelize_module(cell, part, md.ExpertParallel(dedup=style == "replicate"))
            lay_out(cell, mesh, experts, style)
            got, cut = train(cell, lambda b, mesh=mesh: pieces(b, mesh, [Shard(0), Shard(0)]))
            for (a, b, c), (d, e, f) in zip(got, want, strict=True):
                assert abs(a - d) < 1e-6 * abs(d) and abs(b - e) < 1e-5 * e and c == f, (axes, style, got, want)
            for name, w in weights.items():
                assert np.linalg.norm(cut[name] - w) <= 1e-5 * np.linalg.norm(w), (style, name)


@case(world_size=2)
def experts_that_recompute_after_their_style_are_those_of_one_device(world):
    """By the cell of the style itself, whose construct stands around the model's."""
    mesh, (x, weights, _, _) = mesh_1d(2, "ep"), operands(5, 7, 5, 2)
    chosen = random_choice(np.random.default_rng(5), 7, 5, 2)
    x, weights = x.astype(np.float32), weights.astype(np.float32)
    cell, plain = md.parallelize_module(Experts(6, 5, 5), mesh, md.ExpertParallel()), Experts(6, 5, 5)
    cell.recompute()
    cut, cut_weights, picks = (pieces(a, mesh, [Shard(0)]) for a in (x, weights, chosen))
    got = md.grad(lambda t: (cell(t, cut_weights, picks) ** 2).sum(), None, cell.trainable_params())(cut)
    alone = Tensor(weights), Tensor(chosen)
    want = md.grad(lambda t: (plain(t, *alone) ** 2).sum(), None, plain.trainable_params())(Tensor(x))
    equal_each(got, want, cell.trainable_params())


@case(world_size=2)
def a_rank_without_tokens_has_weights_of_the_others_dtype(world):
    mesh, (x, _, _, ws) = mesh_1d(2, "ep"), operands(6, 1, 5, 2)
    logits = np.random.default_rng(6).normal(size=(1, 5))
    weights, chosen = md.Router(2)(pieces(logits, mesh, [Shard(0)]))
    assert weights.layout.dtype == "float64", weights.layout
    y = md.moe(pieces(x, mesh, [Shard(0)]), weights, chosen, *(pieces(w, mesh, [Shard(0)]) for w in ws), dedup=True)
    alone, picks = md.Router(2)(Tensor(logits))
    want = md.moe(Tensor(x), alone, picks, *map(Tensor, ws)).asnumpy()
    np.testing.assert_allclose(y.full_tensor().asnumpy(), want, rtol=1e-10)


@case(world_size=2)
def a_rank_without_tokens_has_gradients_of_logits_in_bfloat16(world):
    mesh, router, logits = mesh_1d(2, "ep"), md.Router(2), np.random.default_rng(6).normal(size=(1, 5))
    got = md.grad(lambda x: (router(x)[0] ** 2).sum())(pieces(logits, mesh, [Shard(0)]).astype(ms.bfloat16))
    want = ms.grad(lambda x: (router(x)[0] ** 2).sum())(Tensor(logits, ms.bfloat16))
    assert (got.to_local().shape[0] > 0) == (world.rank == 0) and array(want).any()
    equal(array(got.astype(ms.float32)), array(want.astype(ms.float32)), rtol=0.01)


@case(world_size=2)
def experts_in_bfloat16_with_room_have_gradients(world):
    mesh, chosen = mesh_1d(2, "ep"), random_choice(np.random.default_rng(7), 7, 5, 2)
    x, weights, dout, ws = operands(7, 7, 5, 2)
    want = expected(x, weights, chosen, dout, ws)
    *cut, cot = (pieces(a, mesh, [Shard(0)]).astype(ms.bfloat16) for a in (x, weights, *ws, dout))
    picks = pieces(chosen, mesh, [Shard(0)])
    grads = md.grad(lambda x, w, *ws: (md.moe(x, w, picks, *ws, room=7) * cot).sum(), (0, 1, 2, 3, 4))(*cut)
    equal_each([g.astype(ms.float32) for g in grads], want[1:], WHATS[1:], rtol=0.03)


class Two(nn.Cell):
    """Alike in all but their names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Experts(6, 5, 5), Experts(6, 5, 5)


@case(world_size=2)
def cells_that_ranks_come_to_in_another_order_are_told(world):
    """Their calls are of equal shapes: numbers would be those of other experts."""
    mesh, (x, weights, _, _) = mesh_1d(2, "ep"), operands(5, 7, 5, 2)
    net = md.parallelize_module(Two(), mesh, {"*": md.ExpertParallel()})
    chosen = random_choice(np.random.default_rng(5), 7, 5, 2)
    args = [pieces(a, mesh, [Shard(0)]) for a in (x.astype(np.float32), weights.astype(np.float32), chosen)]
    for cell in (net.first, net.second):
        cell(*args)
    told = refusal(lambda: (net.second if world.rank else net.first)(*args), CollectiveMismatch)
    assert "first.w1" in told and "second.w1" in told, told


@case(world_size=2)
def what_has_no_room_weighs_nothing(world):
    """Also where its weight is infinite; and a room for more choices than a rank has takes no more memory than these."""
    mesh, (x, weights, _, ws) = mesh_1d(2, "ep"), operands(6, 8, 5, 2)
    chosen = np.tile(np.array([[0, 1]], np.int32), (8, 1))
    *cut, picks = (pieces(a, mesh, [Shard(0)]) for a in (x, weights, *ws, chosen))
    want = array(md.moe(cut[0], cut[1], picks, *cut[2:], room=3))
    weights[3] = np.inf  # the fourth token of the first rank
    odd = pieces(weights, mesh, [Shard(0)])
    y, grads = md.value_and_grad(lambda x, w: (md.moe(x, w, picks, *cut[2:], room=3) ** 2).sum(), (0, 1))(cut[0], odd)
    assert np.array_equal(array(md.moe(cut[0], odd, picks, *cut[2:], room=3)), want)
    assert all(np.isfinite(array(a)).all() for a in (y, *grads)) and not array(grads[1])[3].any()
    assert "1 tokens" in refusal(lambda: md.moe(cut[0], odd, picks, *cut[2:]), DTensorError)
    with comm.record() as events:
        far = md.moe(*cut[:2], picks, *cut[2:], room=2 ** 40)
    assert np.allclose(array(far), array(md.moe(*cut[:2], picks, *cut[2:])), rtol=1e-12)
    assert events[0].shape == (5 * 4 * 2, 6), "of each expert what one rank's tokens can have"


def what_is_not_right_is_refused_by_all_before_tokens_are_sent(world):
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    x, weights, _, ws = operands(1, 8, 4, 2)
    chosen = random_choice(np.random.default_rng(1), 8, 4, 2)
    rows, both = [Shard(0), Replicate()], [Shard(0), Shard(0)]
    tokens = [pieces(a, mesh, rows) for a in (x, weights, chosen)]

    def refused(kind, text, call):
        with counted() as count:
            told = refusal(call, kind)
        assert text in told, told
        assert len(set(comm.group(tuple(range(4))).all_gather_object(told))) in (1, 2)
        return count
    assert not refused(LayoutError, "x.redistribute(placements=[Shard(0), ...])", lambda: md.moe(
        pieces(x, mesh, [Shard(1), Replicate()]), *tokens[1:], *(pieces(w, mesh, rows) for w in ws)))
    count = refused(LayoutError, "every rank of 'tp' has all tokens",
                    lambda: md.moe(*tokens, *(pieces(w, mesh, both) for w in ws)))
    assert not count
    cut = [pieces(w, mesh, rows) for w in ws]
    assert not refused(LayoutError, "not cut over tp", lambda: md.moe(*tokens, *cut, mesh=mesh["tp"]))
    assert not refused(LayoutError, "w1 plain\n", lambda: md.moe(*tokens, *(Tensor(w) for w in ws)))
    weights[6, 1] = np.nan  # in the second half of the tokens
    bad = pieces(weights, mesh, rows)
    count = refused(DTensorError, "1 tokens", lambda: md.moe(tokens[0], bad, tokens[2], *cut))
    assert count == {("all_to_all", "forward"): 1}, count  # of the numbers
    chosen = np.array(chosen)
    chosen[6, 1] = 4  # of experts 0 to 3
    for dedup in (False, True):
        unknown = pieces(chosen, mesh, rows)
        count = refused(DTensorError, "1 choices", lambda: md.moe(*tokens[:2], unknown, *cut, dedup=dedup))  # noqa: B023
        assert count == {("all_to_all", "forward"): 1}, count
    named = [Parameter(cut[0], name="layers.3.w1"), *cut[1:]]
    refused(DTensorError, "on:   layers.3.w1, rank", lambda: md.moe(*tokens[:2], unknown, *named))
    far = np.abs(md.moe(*tokens, *cut).full_tensor().asnumpy()).max()
    assert np.isfinite(far)
