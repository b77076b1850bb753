# SPDX-License-Identifier: Apache-2.0
"""Real ranks: products beside their communication, piece by piece, are those of one device, gradients too; all is counted."""
import copy
from collections import Counter

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import DTensor, distribute_tensor, fully_shard, parallelize_module, replicate
from ms_dtensor.errors import ConfigError
from ms_dtensor.parallel import ColwiseParallel, OverlappedColwise, OverlappedGradients, OverlappedRowwise, RowwiseParallel
from ms_dtensor.parallel.late import Gate, Late
from tests.cases import case
from tests.operands import R, S, data, mesh_1d
from tests.parallel.cases_styles import fill
from tests.support import array, counted, equal, refusal
from tests.tiers import sampled


class Gated(nn.Cell):
    """Two products of one input, of unlike widths, and one behind each."""

    def __init__(self, kind=nn.Dense, bias: bool = True):
        super().__init__()
        made = (lambda a, b: nn.Dense(a, b, has_bias=bias)) if kind is nn.Dense else (lambda a, b: kind(a, b, bias=bias))
        self.up, self.gate, self.down, self.side = made(6, 8), made(6, 16), made(8, 6), made(16, 6)

    def construct(self, x):
        wide = self.gate(x)
        return self.down(mint.tanh(self.up(x))) + self.side(wide * wide)


def overlapped(net, mesh, pieces, dim):
    OverlappedColwise("up", "gate", pieces=pieces, sequence_dim=dim).apply(net, mesh)
    rows = OverlappedRowwise(pieces=pieces, sequence_dim=dim)
    return parallelize_module(net, mesh, {"down": rows, "side": rows})


def trained(net, x):
    """Loss, gradient of the input and of every parameter, with the communication."""
    params = net.trainable_params()
    weights = Tensor(np.random.default_rng(5).normal(size=x.shape).astype(np.float32))
    if isinstance(x, DTensor):
        weights = distribute_tensor(weights, x.device_mesh, x.placements)
    with counted() as count:
        loss, (dx, grads) = md.value_and_grad(lambda x: (net(x) * weights).sum(), 0, params)(x)
    return [loss, dx, *grads], count


@case(world_size=(2, 4))
def pieces_are_as_the_whole_and_one_collective_each(world):
    """Both orders of dims, biases, two kinds of Linear; pieces that rows divide, and those that are made fewer."""
    mesh = mesh_1d(world.size)
    for dim, shape, kind, bias in sampled((
            (0, (8 * world.size, 6), nn.Dense, True), (1, (3, 4 * world.size, 6), mint.nn.Linear, True),
            (1, (1, 6 * world.size, 6), nn.Dense, False)), 2):
        x, plain = data(1, *shape), fill(Gated(kind, bias))
        want, _ = trained(plain, x)
        for pieces in (1, 2, 4, "kernel"):
            net = overlapped(fill(Gated(kind, bias)), mesh, pieces, dim)
            got, count = trained(net, distribute_tensor(x, mesh, [S(dim)]))
            equal(got, want, f"{shape} {pieces}")
            rows = int(np.prod(shape[:-1])) // world.size
            k = 1 if pieces == "kernel" else max(n for n in range(1, pieces + 1) if rows % n == 0)
            assert rows % 8 or pieces == "kernel" or k == pieces
            asked = Counter({key: n for key, n in count.items() if key[0] in ("all_gather", "reduce_scatter")})
            assert asked == {("all_gather", "forward"): k, ("reduce_scatter", "backward"): k,  # of both columns together
                             ("reduce_scatter", "forward"): 2 * k, ("all_gather", "backward"): 2 * k}, (pieces, count)
            assert set(count) - set(asked) <= {("all_reduce", "backward")}, count
            assert count["all_reduce", "backward"] == 2 * bias, ("of the row-wise biases; the loss stays a sum", count)


def beside_data_parallelism_and_where_rows_are_uneven(world, grid):
    for wrap, n in ((replicate, 16), (fully_shard, 16), (replicate, 10)):
        x, plain, net = data(1, n, 6), fill(Gated()), fill(Gated())
        overlapped(net, grid["tp"], 2, 0)
        wrap(net, mesh=grid["dp"])
        dx = distribute_tensor(x, grid, [S(0), S(0)])
        want, _ = trained(plain, x)
        got, count = trained(net, dx)
        equal(got, want, f"{wrap.__name__} {n}")
        gathers = count["all_gather", "forward"]
        assert gathers == {"replicate": 2, "fully_shard": 3}[wrap.__name__] if n == 16 else gathers >= 1, count
        twin = copy.deepcopy(net)
        before = array(net(dx))
        for p in twin.trainable_params():
            p.set_data(p * 0)
        assert (array(net(dx)) == before).all() and not array(twin(dx)).any(), "a copy computes with its own weights"


class Twice(nn.Cell):
    """A block of two such cells, and a part of it whose products nobody owes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = Gated(), Gated(), Gated()
        for name, p in self.parameters_and_names():
            p.name = name

    def construct(self, x):
        return x + self.second(mint.tanh(x + self.first(x)))


def owing(net, mesh, later: bool):
    for cell in (net.first, net.second, net.idle):
        overlapped(cell, mesh, 2, 0)
    return parallelize_module(net, mesh, {"": OverlappedGradients()}) if later else net


def gradients_of_weights_wait_for_the_next_communication(world, grid):
    """The same bits and collectives; of six functions all but the first's gradients are paid by who sends next."""
    x = distribute_tensor(data(1, 16, 6), grid, [S(0), S(0)])
    want, _ = trained(fill(Twice()), data(1, 16, 6))
    paid, pay, take = Counter(), Late.pay, Gate.backward

    def paying(self):
        paid[f"{len(self._owed)} behind communication"] += 1
        pay(self)

    def taking(ctx, *grads):
        paid["by the gate"] += ctx.debt.compute is not None and not ctx.debt.compute.cache_info().currsize
        return take(ctx, *grads)
    for wrap, again in sampled(((replicate, False), (fully_shard, False), (fully_shard, True)), 2):
        made = []
        for later in (False, True):
            net = owing(fill(Twice()), grid["tp"], later)
            net.second.up.weight.requires_grad = wrap is fully_shard  # one that asks for none has no gate
            if again:
                net.recompute()
            net = wrap(net, mesh=grid["dp"])
            paid.clear()
            try:
                Late.pay, Gate.backward = paying, staticmethod(taking)
                made.append(trained(net, x))
            finally:
                Late.pay, Gate.backward = pay, staticmethod(take)
            delayed = {"1 behind communication": 4 + (wrap is fully_shard),  # at once: the last function's, no older ones
                       "0 behind communication": 2 - (wrap is fully_shard)}
            assert +paid == (delayed if later else {}), (wrap.__name__, again, later, paid)
        (plain, count), (late, counted_late) = made
        assert count == counted_late, (count, counted_late)
        for i, (a, b) in enumerate(zip(plain, late, strict=True)):
            assert array(a).tobytes() == array(b).tobytes(), (wrap.__name__, again, i)
        if wrap is fully_shard:
            equal(late, want, f"{wrap.__name__} {again}")


def other_layouts_than_the_styles_and_bfloat16(world, grid):
    """At 16 bits the values of a gather at the door; what lies otherwise is brought there."""
    policy = md.parallel.MixedPrecisionPolicy(param_dtype=ms.bfloat16)
    x, made = distribute_tensor(data(1, 16, 6), grid, [S(0), S(0)]), []
    at_the_door = fill(Gated())
    md.parallel.PrepareModuleInput(input_layouts=S(0), desired_input_layouts=R).apply(at_the_door, grid["tp"])
    parallelize_module(at_the_door, grid["tp"], {
        "up": ColwiseParallel(use_local_output=False), "gate": ColwiseParallel(use_local_output=False),
        **dict.fromkeys(("down", "side"), RowwiseParallel(output_layouts=S(0), use_local_output=False))})
    for net in (overlapped(fill(Gated()), grid["tp"], 4, 0), at_the_door):
        made.append(trained(replicate(net, mesh=grid["dp"], mp_policy=policy), x)[0])
    for i, (a, b) in enumerate(zip(*made, strict=True)):
        equal(a, b, f"bfloat16 {i}", 3e-2)
    net = overlapped(fill(Gated()), grid["tp"], 4, 0)
    whole = distribute_tensor(data(1, 16, 6), grid["tp"], [R])
    equal(net(whole), fill(Gated())(data(1, 16, 6)), "placed as the style says")


@case(world_size=2)
def overlap_refuses_what_it_cannot_compute(world):
    mesh, net = mesh_1d(2), Gated()
    net.act = nn.Dense(6, 8, activation="relu")
    for style, words in ((OverlappedColwise("up", "nope"), "has no cell 'nope'"), (OverlappedColwise(), "no plain Linear"),
                         (OverlappedColwise("up", pieces=0), "'pieces' is 0"), (OverlappedColwise("act"), "no plain Linear"),
                         (OverlappedColwise("up", pieces=True), "'pieces' is True")):
        assert words in refusal(lambda style=style: style.apply(net, mesh), ConfigError), words
    alone = parallelize_module(Gated(), mesh, {"": OverlappedGradients()})
    x = distribute_tensor(data(1, 16, 6), mesh, [R])
    assert "no cell of Gated has an overlapped style" in refusal(lambda: alone(x), ConfigError)
