# SPDX-License-Identifier: Apache-2.0
"""Real ranks: our optimizers, EMA and MindSpore's on any layout equal one device; what they communicate is counted, to the byte."""
import functools
import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import DTensor, FusedShard, Layout, comm, distribute_tensor, optim, parallelize_module, replicate
from ms_dtensor.errors import ConfigError, LayoutError
from ms_dtensor.tensor.distribute import like_parameter
from tests.operands import Built, R, S, data, filled, mesh_1d, mesh_2d, placed
from tests.optim.test_optimizers import OPTIMIZERS
from tests.rehearsal.session import rehearsed
from tests.support import array, counted, each_once, equal, refusal, refused_alike, same_on_all_ranks
from tests.tiers import sampled

STEPS, CLOSE = 5, 1e-5  # of the largest element, after 5 steps
BUILD = {
    "SGD": lambda ps: optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True, schedule=optim.cosine(8, warmup=2)),
    "Adafactor": lambda ps: optim.Adafactor(ps, 0.3, weight_decay=0.1),
    "Muon": lambda ps: optim.Muon(ps, 0.1, adamw={"lr": 0.05}, schedule=optim.wsd(8, decay=4)),
}
# shape, layout on dp=2 x tp=2: replicated, even, uneven, empty, both dims, one dim twice, inside out, fused, stacks, vectors
PIECES = [((6, 5), [R, R]), ((6, 4), [S(0), R]), ((5, 7), [R, S(1)]), ((7, 5), [S(1), S(0)]),
          ((1, 6), [S(0), R]), ((6, 3), [S(0), S(0)]), ((5, 3), [S(0), S(0)]), ((3, 5), [S(0), S(0)]),
          ((9, 4), (("tp", "dp"), "None")), ((10, 4), [R, FusedShard(0, (4, 3, 3))]),
          ((4, 10), [S(0), FusedShard(1, (5, 5))]), ((3, 4, 5), [S(0), S(2)]), ((2, 5, 3), [S(2), S(1)]),
          ((5,), [S(0), R]), ((1,), [S(0), S(0)]), ((), [R, R])]


def _laid(value, mesh, placements):
    """This rank's shard of a value that all have."""
    return placed(value, mesh, *placements)


def _parameter(value, name, *laid):
    param = Parameter(value, name=name)
    return param if not laid else like_parameter(_laid(value, *laid), param)


def _values(step, pieces, kinds=None):
    draw = np.random.default_rng(100 + step)
    arrays = [draw.normal(size=shape).astype(np.float32) for shape, *_ in pieces]
    return [Tensor(a).astype(kind) for a, kind in zip(arrays, kinds or [ms.float32] * len(arrays), strict=True)]


def _compare(build, pieces, meshes, kinds=None, close=CLOSE):
    """Steps on shards against one device; communication of the steps on this rank."""
    laid = [(mesh, placements) for mesh, (_, placements) in zip(meshes, pieces, strict=True)]
    start = _values(0, pieces, kinds)
    plain = [Parameter(v.copy(), name=f"p{i}") for i, v in enumerate(start)]
    params = [_parameter(v, f"p{i}", *lay) for i, (v, lay) in enumerate(zip(start, laid, strict=True))]
    one, many = build(plain), build(params)
    events = []
    for step in range(1, STEPS + 1):
        grads = _values(step, pieces, kinds)
        one(tuple(grads))
        own = [_laid(g, *lay) for g, lay in zip(grads, laid, strict=True)]
        with comm.record() as heard:
            many(tuple(own if step % 2 else [g.to_local() for g in own]))
        events += heard
    for p, w, s, piece in zip(params, plain, start, pieces, strict=True):
        assert p.local_shape == p.layout.local_shape(), p
        equal(p, w.astype(ms.float32) if p.dtype == ms.bfloat16 else w, f"{piece}", rtol=close)
        assert np.abs(array(w).astype(np.float64) - array(s).astype(np.float64)).max() > 1e-3, f"{piece} moved by less than 1e-3"
    return events, many


def sgd_steps_on_any_layout_and_says_nothing(world):
    events, _ = _compare(BUILD["SGD"], PIECES, [mesh_2d()] * len(PIECES))
    assert not events


def others_that_step_element_by_element_do_so_on_any_layout_and_say_nothing(world):
    for name, options in OPTIMIZERS.items():
        made = getattr(optim, name)
        if made._ALONE and name not in BUILD:
            events, _ = _compare(functools.partial(made, **options), PIECES, [mesh_2d()] * len(PIECES))
            assert not events, name


MINDSPORES = {
    "nn.Adam": lambda ps: nn.Adam(ps, learning_rate=0.05, weight_decay=0.01),
    "nn.Adam(amsgrad)": lambda ps: nn.Adam(ps, learning_rate=0.05, use_amsgrad=True),
    "nn.AdamWeightDecay": lambda ps: nn.AdamWeightDecay(ps, learning_rate=0.05, weight_decay=0.1),
    "nn.SGD": lambda ps: nn.SGD(ps, learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    "nn.Momentum": lambda ps: nn.Momentum(ps, learning_rate=0.1, momentum=0.9),
    "nn.Adagrad": lambda ps: nn.Adagrad(ps, learning_rate=0.1, weight_decay=0.1),
    "nn.AdamOffload": lambda ps: nn.AdamOffload(ps, learning_rate=0.05),
    "nn.Adadelta": lambda ps: nn.Adadelta(ps, learning_rate=1.0, epsilon=1e-2),
    "nn.FTRL": lambda ps: nn.FTRL(ps, learning_rate=0.1),
    "experimental SGD": lambda ps: ms.experimental.optim.SGD(ps, lr=0.1, momentum=0.9),
    "experimental Adam": lambda ps: ms.experimental.optim.Adam(ps, lr=0.05),
    "experimental AdamW": lambda ps: ms.experimental.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
    "experimental RMSprop": lambda ps: ms.experimental.optim.RMSprop(ps, lr=0.05),
}


def mindspores_optimizers_step_on_any_layout_and_say_nothing(world):
    pieces = [PIECES[i] for i in (1, 3, 4, 7, 13)]  # each parameter is compiled: an even one, uneven ones, and empty shards
    for name, build in sampled(MINDSPORES.items(), 3):
        events, _ = _compare(build, pieces, [mesh_2d()] * len(pieces), close=1e-4)  # Adam divides by roots of small squares
        assert not events, name


def adafactor_equals_one_device_with_two_reductions_an_axis(world, grid):
    events, optimizer = _compare(BUILD["Adafactor"], PIECES, [grid] * len(PIECES))
    assert [(e.op, e.axes) for e in events] == [("all_reduce", (a,)) for _ in range(2 * STEPS) for a in ("dp", "tp")]
    for axis, name in enumerate(grid.mesh_dim_names):  # rows where columns are cut, columns where rows are, and numbers
        numbers = 0
        for shape, placements in PIECES:
            layout = Layout(grid, placements, shape)
            local, p = layout.local_shape(), layout.placements[axis]
            if p.is_shard() and len(shape) > 1:
                last, rest = len(shape) - 1, math.prod(local[:-2])
                numbers += {last: rest * (local[-2] + 1), last - 1: rest * (local[-1] + 1)}.get(p.dim, 0)
            numbers += 2 * p.is_shard()
        sent = sum(math.prod(e.shape) for e in events if e.axes == (name,))
        assert sent == numbers * STEPS, (name, sent, numbers)
    state = optimizer.state_dict()
    rows, columns = state["p3"]["rows"], state["p3"]["columns"]
    assert rows.local_shape == (PIECES[3][0][0] // 2 + (grid.get_local_rank("tp") == 0),)
    assert (rows.placements, columns.placements) == ((R, S(0)), (S(0), R)), (rows, columns)


def muon_equals_one_device_with_two_exchanges(world, grid):
    events, optimizer = _compare(BUILD["Muon"], PIECES, [grid] * len(PIECES))
    assert {e.op for e in events} == {"exchange"} and len(events) == 2 * STEPS, events
    assert {e.axes for e in events} == {("dp", "tp")}
    matrices = [i for i, (shape, _) in enumerate(PIECES) if len(shape) == 2]
    state = optimizer.state_dict()
    assert sorted(n for n, kinds in state.items() if "momentum" in kinds) == sorted(f"p{i}" for i in matrices)
    assert len(state) == len(PIECES) and all({"exp_avg", "momentum"} & kinds.keys() for kinds in state.values())
    assert len(set(optimizer._owners.values())) == 4, "every rank works"
    wanted = 0  # of this rank: its shard, where another rank of its copy works on it, and all others' of its own matrices
    for i, owner in optimizer._owners.items():
        layout = Layout(grid, PIECES[i][1], PIECES[i][0])
        sizes = {r: math.prod(layout.local_shape(grid.coordinate_of(r))) for r in grid.rank_list}
        there = grid.coordinate_of(owner)
        cut = [a for a, p in enumerate(layout.placements) if p.is_shard()]
        copy = grid.ranks_along(cut, there)
        mine = sum(n for r, n in sizes.items() if r != owner) if owner == world.rank else sizes[world.rank] * (
            world.rank in copy)
        wanted += mine
    assert sum(e.bytes for e in events) == 4 * wanted * STEPS


def muon_on_one_axis_sends_no_more_than_it_must(world):
    mesh = mesh_1d(4, "fsdp")
    pieces = [((8, 8), [S(0)])] * 4
    events, _ = _compare(BUILD["Muon"], pieces, [mesh] * 4)
    # 3 shards of the own matrix come, 3 go; an all-gather would bring 9 shards, and all ranks would do all the work
    assert [e.bytes for e in events] == [3 * 16 * 4] * 2 * STEPS
    events, _ = _compare(BUILD["Muon"], [((8, 8), [R])] * 4, [mesh] * 4)
    assert [e.bytes for e in events] == [3 * 64 * 4] * STEPS, "nothing to gather where all have it whole"


def optimizers_take_several_meshes_dtypes_and_plain_parameters(world):
    meshes = [mesh_2d(), mesh_1d(4), mesh_2d()["tp"]]
    pieces = [((6, 5), [S(0), S(1)]), ((6, 5), [S(0)]), ((5, 5), [S(0)])]
    for name, build in BUILD.items():
        for kinds in (None, [ms.float64, ms.float32, ms.float64]):
            events, _ = _compare(build, pieces, meshes, kinds)
            if name == "Adafactor":
                assert {e.dtype for e in events} == ({"Float32", "Float64"} if kinds else {"Float32"}), name
        _compare(build, [*pieces[:1], ((1, 6), [S(0), R])], meshes[:1] * 2, [ms.bfloat16] * 2, 2e-2)
        start = data(5, 6, 5)
        plain, mixed = (_parameter(start, "a"), _parameter(start, "b")), (_parameter(start, "a"), _parameter(
            start, "b", meshes[0], [S(1), S(0)]))
        for params in (plain, mixed):
            optimizer = build(list(params))
            for step in range(2):
                grads = data(6 + step, 6, 5), data(8 + step, 6, 5)
                optimizer([grads[0], grads[1] if params is plain else _laid(grads[1], meshes[0], [S(1), S(0)])])
        equal(mixed, plain, name, CLOSE)


def ranks_outside_a_mesh_step_their_own_parameters(world, grid):
    there = md.DeviceMesh("cpu", [1, 3], mesh_dim_names=("x",))
    for name, build in BUILD.items():
        start, plain = [data(1, 6, 5), data(2, 4, 6)], []
        plain = [Parameter(t.copy(), name=n) for t, n in zip(start, "ab", strict=True)]
        lay = [(grid, [S(0), R]), (there, [S(1)])]
        params = [_parameter(t, n, *where) for t, n, where in zip(start, "ab", lay, strict=True)]
        one, many = build(plain), build(params)
        for step in range(3):
            grads = data(10 + step, 6, 5), data(20 + step, 4, 6)
            one(grads)
            many([_laid(g, *where) for g, where in zip(grads, lay, strict=True)])
        equal(params[0], plain[0], name, rtol=CLOSE)
        if world.rank in (1, 3):
            equal(params[1], plain[1], name, rtol=CLOSE)
        else:
            assert math.prod(params[1].local_shape) == 0


def two_layers() -> nn.Cell:
    return filled(Built(lambda c, x: c.down(mint.tanh(c.up(x))), up=nn.Dense(6, 10), down=nn.Dense(10, 3)))


STYLES = {"up": md.ColwiseParallel(), "down": md.RowwiseParallel()}


def _fully(net, mesh):
    for cell in (net.up, net.down, net):
        md.fully_shard(cell, mesh=mesh)


WRAPS = {
    "tp and replicate": lambda net, m: replicate(parallelize_module(net, m["tp"], STYLES), mesh=m["dp"]),
    "fsdp": lambda net, m: _fully(net, mesh_1d(4, "fsdp")),
    "hsdp": _fully,
    "tp and fsdp": lambda net, m: _fully(parallelize_module(net, m["tp"], STYLES), m["dp"]),
    "zero1": lambda net, m: replicate(net, mesh=mesh_1d(4, "fsdp"), zero1=True),
}


def training_equals_one_device(world, grid):
    x = data(3, 8, 6)
    for shift, (name, build) in enumerate(BUILD.items()):
        plain = two_layers()
        (want, weights), = each_once(lambda build=build, plain=plain: (
            _trained(build, plain, x), list(map(array, plain.trainable_params()))))
        for how, wrap in sampled(WRAPS.items(), 4, shift):
            net = two_layers()
            wrap(net, grid)
            got = _trained(build, net, x[world.rank // 2 * 4:][:4] if how[:2] == "tp" else x[world.rank * 2:][:2])
            assert np.allclose(got, want, rtol=CLOSE), (name, how, got, want)
            equal(net.trainable_params(), weights, f"{name} {how}", CLOSE)


def _trained(build, net, x):
    """The loss after the steps, of the averages and of the parameters."""
    params = net.trainable_params()
    optimizer, ema = build(params), optim.EMA(params, 0.5)
    run = ms.value_and_grad(lambda t: (net(t) ** 2).mean(), None, params)
    for _ in range(STEPS):
        _, grads = run(x)
        assert math.isfinite(optim.step_if_finite(optimizer, grads, 1.0))
        with counted({}):
            ema.update()
    with ema.swapped():
        averaged = float(run(x)[0])
    return averaged, float(run(x)[0])


def _stepped(kind, build, dtype):
    """Parameters and averages after three steps on meshes of a kind of device; yields before and after them."""
    mesh = md.init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    pieces = [piece for piece in PIECES if "Fused" not in str(piece)]  # the CPU has no bfloat16 kernel that cuts them
    values = [[_laid(v, mesh, lay) for v, (_, lay) in zip(_values(step, pieces, [dtype] * len(pieces)), pieces, strict=True)]
              for step in range(4)]
    params = [like_parameter(v, Parameter(Tensor(0.0), name=f"p{i}")) for i, v in enumerate(values[0])]
    optimizer, ema = build(params), optim.EMA(params, 0.5)
    yield
    for grads in values[1:]:
        optimizer(grads)
        ema.update()
    with ema.swapped():
        yield
        averages = [array(p.astype(ms.float32)) for p in params]
    yield [*averages, *(array(p.astype(ms.float32)) for p in params)]


def emulated_devices_do_the_same_and_are_never_waited_for(world):
    collectives = {"SGD": 0, "Adafactor": 4, "Muon": 2}
    for number, (name, build) in sampled(enumerate(BUILD.items()), 2):
        for dtype, close in sampled([(ms.float32, CLOSE), (ms.bfloat16, 2e-2)], 2, number // 2):
            *_, want = _stepped("cpu", build, dtype)
            with rehearsed() as device:
                run = _stepped("npu", build, dtype)
                next(run)
                device.counts.clear()
                next(run)
                counts = device.counts["syncs"], device.counts["launches"]
                got = next(run)
            assert counts == (0, 3 * collectives[name]), (name, counts)
            equal(got, want, f"{name} {dtype}", rtol=close)


def one_ranks_overflow_stops_the_step_of_all(world, grid):
    for build in (*BUILD.values(), lambda ps: nn.Momentum(ps, 0.1, 0.9)):
        params = [_parameter(data(1, 6, 5), "a", grid, [S(0), R]), _parameter(data(2, 5, 3), "b", grid, [R, S(1)])]
        before, optimizer = [array(p).copy() for p in params], build(params)

        def grads(largest, mesh=grid):
            first = _laid(data(3, 6, 5), mesh, [S(0), R]).to_local().asnumpy().copy()
            first[0, 0] = largest
            return [DTensor.from_local(Tensor(first), mesh, [S(0), R]), _laid(data(4, 5, 3), mesh, [R, S(1)])]
        with counted({("all_reduce", "forward"): 2}):
            norm = optim.step_if_finite(optimizer, grads(np.inf if world.rank < 2 else 1.0), 1.0)  # in one of two shards
        assert norm == math.inf, norm
        same_on_all_ranks(world, str(norm))
        assert all(np.array_equal(array(p), b) for p, b in zip(params, before, strict=True))
        assert math.isfinite(optim.step_if_finite(optimizer, grads(1.0), 1.0))
        assert all(np.abs(array(p) - b).max() > 1e-4 for p, b in zip(params, before, strict=True))


def gradients_and_states_of_other_layouts_are_refused_on_all_ranks(world, grid):
    value = data(1, 8, 4)
    for build in BUILD.values():
        param = _parameter(value, "w", grid, [S(0), S(0)])
        optimizer = build([param])
        for wrong in (_laid(value, grid, [R, S(0)]), _laid(value, grid, (("tp", "dp"), "None"))):
            text = refused_alike(world, lambda wrong=wrong, optimizer=optimizer: optimizer([wrong]), LayoutError)
            assert "laid out differently" in text
        other = build([_parameter(value, "w", grid, [S(0), R])])
        text = refusal(lambda other=other, optimizer=optimizer: other.load_state_dict(optimizer.state_dict()), LayoutError)
        same_on_all_ranks(world, text)


def the_state_of_shards_is_the_one_device_state_cut(world, grid):
    kinds = [ms.bfloat16 if i % 3 == 1 else ms.float32 for i in range(len(PIECES))]
    for build in (*BUILD.values(), lambda ps: optim.AdamW([{"params": ps[::2]}, {"params": ps[1::2], "lr": 0.02}], 0.05)):
        start, grads = _values(0, PIECES, kinds), _values(1, PIECES, kinds)
        plain = [Parameter(v.copy(), name=f"p{i}") for i, v in enumerate(start)]
        params = [_parameter(v, f"p{i}", grid, placements) for i, (v, (_, placements)) in enumerate(zip(start, PIECES))]
        one, many, again = build(plain), build(params), build(params)
        numbers = [int(p.name[1:]) for p in one.params]
        one([grads[i] for i in numbers])
        many([_laid(grads[i], grid, PIECES[i][1]) for i in numbers])
        want, got = one.state_dict(), many.state_dict()
        assert sorted(want) == sorted(got) == sorted(p.name for p in params)
        for name, state in want.items():
            assert [*state] == [*got[name]] and state["step"] == got[name]["step"] == 1
            for kind in [*state][1:]:
                assert isinstance(got[name][kind], DTensor) and not isinstance(state[kind], DTensor)
                equal(got[name][kind], state[kind], f"{kind} of {name}", rtol=CLOSE)
        again.load_state_dict({name: {kind: x if kind == "step" else x.copy() for kind, x in state.items()}
                               for name, state in got.items()})
        assert again.step == 1
        for name, state in again.state_dict().items():
            for kind in [*state][1:]:
                equal(state[kind], want[name][kind], f"{kind} of {name}", rtol=CLOSE)


def clipped_heads_are_one_devices(world, grid):
    """Largest logits by head on any layout; then the weights, and the logits that they give."""
    batch, heads, shared, places, width = 2, 4, 2, 6, 3
    x = data(5, batch * places, 8)
    wq, wk = data(1, heads * width, 8) * 4, data(2, shared * width, 8) * 4

    def projected(w, rows, n):
        return mint.transpose(mint.reshape(mint.matmul(rows, w.t()), (batch, places, n, width)), 1, 2)
    q, k = (projected(w, x, n).asnumpy().astype(np.float64) for w, n in ((wq, heads), (wk, shared)))
    scores = np.einsum("bhid,bhjd->bhij", q, np.repeat(k, heads // shared, 1)) / width ** 0.5
    hidden = np.triu(np.ones((places, places), bool), 1)
    for causal in (True, False):
        want = (np.where(hidden, -np.inf, scores) if causal else scores).max((0, 2, 3))
        for placements in ([R, R], [S(0), S(1)], [S(2), R], [S(1), S(0)]):
            dq, dk = (distribute_tensor(projected(w, x, n), grid, placements) for w, n in ((wq, heads), (wk, shared)))
            got = optim.max_logits(dq, dk, causal=causal)
            assert np.allclose(got, want, rtol=1e-5), (placements, got, want)
            same_on_all_ranks(world, str(got.tolist()))
    largest = optim.max_logits(projected(wq, x, heads), projected(wk, x, shared))
    limit = float(np.sort(largest)[1]) * 1.01  # two heads are above it
    one = [Parameter(w, name=n) for w, n in ((wq, "q"), (wk, "k"))]
    factors = optim.qk_clip_(*one, largest, limit)
    assert (factors < 1).sum() == 2
    after = optim.max_logits(projected(one[0], x, heads), projected(one[1], x, shared))
    assert np.allclose(after, largest * factors, rtol=1e-5) and after.max() <= limit * 1.00001
    for placements in ([R, R], [S(0), S(0)], [S(1), S(0)], [R, S(1)], [R, FusedShard(0, [4, 2])]):
        many = [Parameter(distribute_tensor(w, grid, [R, S(0)] if isinstance(placements[1], FusedShard) and n == "q" else
                                            placements), name=n) for w, n in ((wq, "q"), (wk, "k"))]
        with counted({}):
            optim.qk_clip_(*many, largest, limit)
        equal(many, one, str(placements), 1e-6)
    before = [p.asnumpy().copy() for p in one]
    for logits, threshold in ((largest[:3], 1.0), ([], 1.0), ([largest], 1.0), ([*largest[:3], np.nan], 1.0),
                              ([np.inf, *largest[:3]], 1.0), (largest, 0.0), (largest, -1.0), (largest, np.nan)):
        same_on_all_ranks(world, refusal(lambda logits=logits, t=threshold: optim.qk_clip_(*one, logits, t),
                                         LayoutError if threshold == 1.0 and np.isfinite(logits).all() else ConfigError))
    assert all(np.array_equal(a, p.asnumpy()) for a, p in zip(before, one))
