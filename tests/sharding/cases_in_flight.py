# SPDX-License-Identifier: Apache-2.0
"""Several forwards before a backward: one gradient of many, and recordings whose backwards come in any order."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_dtensor import distribute_tensor
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.internals.names import no_grad
from tests.cases import case
from tests.dist.support import counted, equal
from tests.sharding.support import ROWS, WAYS, Net, alike, collected, data_mesh, filled, none_of, own_rows, rows_of
from tests.tiers import sampled

MANY = 4
INPUTS = [np.random.default_rng(20 + i).normal(size=(8, 4)).astype(np.float32) for i in range(MANY)]
COTANGENTS = [np.random.default_rng(40 + i).normal(size=(8, 4)).astype(np.float32) for i in range(MANY)]


def product(net):
    return lambda x: (net(x) * net(x * 0.5 + 1)).mean()


def sum_of_three(net):
    def loss(x):
        y, z = net(x), net(x * 2)
        return (y ** 2).mean() + (y * z * net(z)).mean()
    return loss


def later_only(net):
    def loss(x):
        y = net(x)
        net(x * 3)  # of which nothing is used
        return (y ** 2).mean()
    return loss


def unrecorded_between(net):
    def loss(x):
        y = net(x)
        with no_grad():
            seen = net(x * 0.1)
        return (y * ops.stop_gradient(seen)).mean() + (net(y) ** 2).mean()
    return loss


@case(2)
def a_function_of_several_forwards(world):
    mesh, faults = data_mesh(world), []
    for shift, loss in enumerate((product, sum_of_three, later_only, unrecorded_between)):
        for way, wrap in sampled(WAYS.items(), 4, shift):
            def steps(wrap=wrap, loss=loss):
                plain, net = filled(Net()), filled(Net())
                wrap(net, mesh, net.blocks)
                for step in range(2):
                    alike(net, plain, mesh, loss, f"step {step}")
                equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation after it")
            collected(faults, f"{way}, {loss.__name__}", steps)
    none_of(faults)


@case(2)
def forwards_in_other_orders_of_cells(world):
    mesh, faults = data_mesh(world), []

    def reordered(net):
        def loss(x):
            net.order = (0, 1, 2)
            y = net(x)
            net.order = (2, 0)
            return (y * net(x * 0.5)).mean()
        return loss
    for way, wrap in sampled(WAYS.items(), 2):
        def steps(wrap=wrap):
            plain, net = filled(Net()), filled(Net())
            wrap(net, mesh, net.blocks)
            for step in range(2):
                alike(net, plain, mesh, reordered, f"step {step}")
        collected(faults, way, steps)
    none_of(faults)


def cotangent_of(recording: Recording, whole: np.ndarray):
    """Laid out as the output is."""
    y = recording.outputs
    return distribute_tensor(Tensor(whole), y.device_mesh, y.layout.gradient().placements, src_data_rank=None)


def in_flight(world, way: str, order, sync_last: bool, between: str = "") -> None:
    """All forwards, then all backwards; parameters' gradients added up, inputs' each."""
    mesh, plain, net = data_mesh(world), filled(Net()), filled(Net())
    WAYS[way](net, mesh, net.blocks)
    params, theirs = plain.trainable_params(), net.trainable_params()

    def total(*xs):
        return sum((plain(x) * Tensor(d)).sum() for x, d in zip(xs, COTANGENTS))
    wanted_dx, wanted = ms.grad(total, tuple(range(MANY)), params)(*map(Tensor, INPUTS))
    for again in range(2):
        recordings = []
        for x in INPUTS:
            recordings.append(Recording.of(net, rows_of(mesh, x)))
            if between == "evaluation":
                equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation between")
        total_grads, dxs, sums = None, {}, []
        for n, i in enumerate(order):
            if sync_last:
                net.set_requires_gradient_sync(n == MANY - 1)
            with counted() as count:
                (dxs[i],), grads = recordings[i].backward(cotangent_of(recordings[i], COTANGENTS[i]), theirs)
            sums.append(count["reduce_scatter", "backward"] + count["all_reduce", "backward"])
            total_grads = grads if total_grads is None else [a + g for a, g in zip(total_grads, grads)]
            if between == "evaluation":
                equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation between backwards")
        for p, g, w in zip(theirs, total_grads, wanted, strict=True):
            equal(g, w, f"round {again}: {p.name}")
        for i, dx in dxs.items():
            equal(dx, wanted_dx[i], f"round {again}: gradient of input {i}")
        if sync_last:
            assert sums[:-1] == [0] * (MANY - 1) and sums[-1] > 0, sums
    if sync_last:
        net.set_requires_gradient_sync(True)
    alike(net, plain, mesh, what="an ordinary step after it")


def variations(world, first: int, **how) -> None:
    faults: list[str] = []
    orders = {"in order": range(MANY), "reversed": range(MANY)[::-1], "mixed": (1, 3, 0, 2)}
    for way, (name, order) in sampled(itertools.product(WAYS, orders.items()), 7, first):
        collected(faults, f"{way}, {name}", lambda way=way, order=order: in_flight(world, way, list(order), **how))
    none_of(faults)


@case(2, timeout=120)
def recordings_of_their_own(world):
    variations(world, 0, sync_last=False)


@case(2, timeout=120)
def recordings_of_their_own_reduced_once(world):
    variations(world, 1, sync_last=True)


@case(2, timeout=120)
def recordings_with_evaluation_between(world):
    variations(world, 2, sync_last=False, between="evaluation")


@case(2)
def a_recording_whose_backward_never_comes(world):
    """A forward that is dropped leaves nothing behind: neither gathered parameters nor a gradient."""
    mesh, faults = data_mesh(world), []
    for way, wrap in sampled(WAYS.items(), 2, 1):
        def steps(wrap=wrap):
            plain, net = filled(Net()), filled(Net())
            wrap(net, mesh, net.blocks)
            kept = Recording.of(net, rows_of(mesh, INPUTS[0]))
            Recording.of(net, rows_of(mesh, INPUTS[1])).drop()
            alike(net, plain, mesh, what="a step while one is in flight")
            for n in (plain, net):
                for p in n.get_parameters():
                    p.set_data(p * 1.25)
            del kept
            alike(net, plain, mesh, what="the step after it")
            equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation after it")
        collected(faults, way, steps)
    none_of(faults)


@case(2)
def what_is_trained_changes_in_flight(world):
    """A forward of which less is trained runs between another and its backward."""
    mesh, faults = data_mesh(world), []
    for way, wrap in WAYS.items():
        def steps(wrap=wrap):
            plain, net = filled(Net()), filled(Net())
            wrap(net, mesh, net.blocks)
            params, theirs = plain.trainable_params(), net.trainable_params()
            wanted = ms.grad(lambda x: (plain(x) * Tensor(COTANGENTS[0])).sum(), None, params)(Tensor(INPUTS[0]))
            first = Recording.of(net, rows_of(mesh, INPUTS[0]))
            for p in theirs[:3]:
                p.requires_grad = False
            Recording.of(net, rows_of(mesh, INPUTS[1])).drop()
            for p in theirs[:3]:
                p.requires_grad = True
            _, grads = first.backward(cotangent_of(first, COTANGENTS[0]), theirs)
            for p, g, w in zip(theirs, grads, wanted, strict=True):
                equal(g, w, p.name)
            alike(net, plain, mesh, what="a step after it")
        collected(faults, way, steps)
    none_of(faults)


@case(2)
def alternating_forwards_and_backwards(world):
    """1F1B: the next forward runs while older ones wait for their backward."""
    mesh, faults = data_mesh(world), []
    for way, wrap in sampled(WAYS.items(), 2):
        def steps(wrap=wrap):
            plain, net = filled(Net()), filled(Net())
            wrap(net, mesh, net.blocks)
            params, theirs = plain.trainable_params(), net.trainable_params()
            wanted = ms.grad(lambda *xs: sum((plain(x) * Tensor(d)).sum() for x, d in zip(xs, COTANGENTS)), None, params)(
                *map(Tensor, INPUTS))
            waiting = [(i, Recording.of(net, rows_of(mesh, INPUTS[i]))) for i in range(2)]
            total = None
            for n in range(MANY):
                i, recording = waiting.pop(0)
                _, grads = recording.backward(cotangent_of(recording, COTANGENTS[i]), theirs)
                total = grads if total is None else [a + g for a, g in zip(total, grads)]
                if n + 2 < MANY:
                    waiting.append((n + 2, Recording.of(net, rows_of(mesh, INPUTS[n + 2]))))
            for p, g, w in zip(theirs, total, wanted, strict=True):
                equal(g, w, p.name)
        collected(faults, way, steps)
    none_of(faults)
