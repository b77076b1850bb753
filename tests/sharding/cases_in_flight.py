# SPDX-License-Identifier: Apache-2.0
"""Several forwards before a backward: one gradient of many, and recordings whose backwards come in any order."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_dtensor import distribute_tensor, value_and_grad
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.internals.names import no_grad
from tests.cases import case, cases
from tests.sharding.support import ROWS, WAYS, Net, alike, data_mesh, own_rows, rows_of, twins
from tests.support import added, counted, crossed, each, equal, equal_each
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


def reordered(net):
    def loss(x):
        net.order = (0, 1, 2)
        y = net(x)
        net.order = (2, 0)
        return (y * net(x * 0.5)).mean()
    return loss


@cases(2, {"a_function_of_several_forwards": ((product, sum_of_three, later_only, unrecorded_between), 4),
           "forwards_in_other_orders_of_cells": ((reordered,), 2)})
def several_forwards(world, losses, every: int) -> None:
    mesh = data_mesh(world)

    @each(crossed(losses, WAYS, every))
    def steps(loss, way):
        plain, net = twins(Net, way, mesh)
        for step in range(2):
            alike(net, plain, mesh, loss, f"step {step}")
        equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation after it")


def cotangent_of(recording: Recording, whole: np.ndarray):
    """Laid out as the output is."""
    y = recording.outputs
    return distribute_tensor(Tensor(whole), y.device_mesh, y.layout.gradient().placements, src_data_rank=None)


def wanted_of_all(plain):
    """Gradients of all inputs and parameters, of all forwards together, on one device."""
    def total(*xs):
        return sum((plain(x) * Tensor(d)).sum() for x, d in zip(xs, COTANGENTS))
    return ms.grad(total, tuple(range(MANY)), plain.trainable_params())(*map(Tensor, INPUTS))


def in_flight(world, way: str, order, sync_last: bool, between: str = "") -> None:
    """All forwards, then all backwards; parameters' gradients added up, inputs' each."""
    mesh = data_mesh(world)
    plain, net = twins(Net, way, mesh)
    theirs = net.trainable_params()
    wanted_dx, wanted = wanted_of_all(plain)
    for again in range(2):
        recordings = []
        for x in INPUTS:
            recordings.append(Recording.of(net, rows_of(mesh, x)))
            if between == "evaluation":
                equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation between")
        total, dxs, sums = None, {}, []
        for n, i in enumerate(order):
            if sync_last:
                net.set_requires_gradient_sync(n == MANY - 1)
            with counted() as count:
                (dxs[i],), grads = recordings[i].backward(cotangent_of(recordings[i], COTANGENTS[i]), theirs)
            sums.append(count["reduce_scatter", "backward"] + count["all_reduce", "backward"])
            total = added(total, grads)
            if between == "evaluation":
                equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation between backwards")
        equal_each(total, wanted, theirs, f"round {again}")
        equal_each(dxs.values(), [wanted_dx[i] for i in dxs], dxs, f"round {again}: gradient of input")
        if sync_last:
            assert sums[:-1] == [0] * (MANY - 1) and sums[-1] > 0, sums
    if sync_last:
        net.set_requires_gradient_sync(True)
    alike(net, plain, mesh, what="an ordinary step after it")


@cases(2, {"recordings_of_their_own": (0, False), "recordings_of_their_own_reduced_once": (1, True),
           "recordings_with_evaluation_between": (2, False, "evaluation")}, timeout=120)
def variations(world, first: int, sync_last: bool, between: str = "") -> None:
    orders = {"in order": range(MANY), "reversed": range(MANY)[::-1], "mixed": (1, 3, 0, 2)}

    @each(sampled(itertools.product(WAYS, orders), 7, first))
    def steps(way, order):
        in_flight(world, way, orders[order], sync_last, between)


@case(2)
def a_recording_whose_backward_never_comes(world):
    """A forward that is dropped leaves nothing behind: neither gathered parameters nor a gradient."""
    mesh = data_mesh(world)

    @each(sampled(WAYS, 2, 1))
    def steps(way):
        plain, net = twins(Net, way, mesh)
        kept = Recording.of(net, rows_of(mesh, INPUTS[0]))
        Recording.of(net, rows_of(mesh, INPUTS[1])).drop()
        alike(net, plain, mesh, what="a step while one is in flight")
        for p in (*plain.get_parameters(), *net.get_parameters()):
            p.set_data(p * 1.25)
        del kept
        alike(net, plain, mesh, what="the step after it")
        equal(net(own_rows(mesh)), plain(Tensor(ROWS)), "evaluation after it")


@case(2)
def what_is_trained_changes_in_flight(world):
    """A forward of which less is trained runs between another and its backward."""
    mesh = data_mesh(world)

    @each(WAYS)
    def steps(way):
        plain, net = twins(Net, way, mesh)
        params, theirs = plain.trainable_params(), net.trainable_params()
        wanted = ms.grad(lambda x: (plain(x) * Tensor(COTANGENTS[0])).sum(), None, params)(Tensor(INPUTS[0]))
        first = Recording.of(net, rows_of(mesh, INPUTS[0]))
        for p in theirs[:3]:
            p.requires_grad = False
        Recording.of(net, rows_of(mesh, INPUTS[1])).drop()
        for p in theirs[:3]:
            p.requires_grad = True
        equal_each(first.backward(cotangent_of(first, COTANGENTS[0]), theirs)[1], wanted, theirs)
        alike(net, plain, mesh, what="a step after it")


@case(2)
def alternating_forwards_and_backwards(world):
    """1F1B: the next forward runs while older ones wait for their backward."""
    mesh = data_mesh(world)

    @each(sampled(WAYS, 2))
    def steps(way):
        plain, net = twins(Net, way, mesh)
        theirs, total = net.trainable_params(), None
        waiting = [Recording.of(net, rows_of(mesh, x)) for x in INPUTS[:2]]
        for n in range(MANY):
            recording = waiting.pop(0)
            total = added(total, recording.backward(cotangent_of(recording, COTANGENTS[n]), theirs)[1])
            waiting += [Recording.of(net, rows_of(mesh, x)) for x in INPUTS[n + 2:n + 3]]
        equal_each(total, wanted_of_all(plain)[1], theirs)


@case(2)
def a_hook_takes_a_gradient_of_the_same_parameters(world):
    """Within a backward in which gradients have arrived already: neither gets what is the other's."""
    mesh = data_mesh(world)

    @each(WAYS)
    def steps(way):
        def both(net, x, other):
            params, inner = net.trainable_params(), []

            def hook(grad):
                if not inner:
                    inner.extend(value_and_grad(lambda x: (net(x) ** 3).mean(), None, params)(other)[1])

            def loss(x):
                y = net(x * 0.5)
                y.register_hook(hook)
                return ((y + net(x)) ** 2).mean()  # of whose backward the later forward's half comes first
            return value_and_grad(loss, None, params)(x)[1], inner
        plain, net = twins(Net, way, mesh)
        for got, want, what in zip(both(net, rows_of(mesh), rows_of(mesh, INPUTS[0])),
                                   both(plain, Tensor(ROWS), Tensor(INPUTS[0])), ("outer", "inner")):
            equal_each(got, want, net.trainable_params(), what)
