# SPDX-License-Identifier: Apache-2.0
"""A cell's inner tensor that reaches the loss past its outputs, by a forward hook or an attribute: one device's numbers."""
from __future__ import annotations

import itertools

from mindspore import mint, nn, ops

from ms_dtensor import DTensor, Replicate, fully_shard, value_and_grad
from ms_dtensor.errors import LayoutError
from tests.cases import case, cases
from tests.operands import filled
from tests.sharding.support import WAYS, alike, data_mesh, rows_of, twins
from tests.support import crossed, each, refusal, set_trained
from tests.tiers import sampled


class Features(nn.Cell):
    """Two layers; what lies between them is what a loss wants to see."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        self.seen = mint.tanh(self.low(x))
        return mint.tanh(self.high(self.seen))


class Perceptual(nn.Cell):
    """A trained encoder, then features, then a head that may be left out of the loss."""

    def __init__(self, frozen: bool, whole: bool = False) -> None:
        super().__init__()
        self.encoder, self.features, self.head = nn.Dense(4, 4), Features(), nn.Dense(4, 4)
        self.hooked: list = []
        for p in (self if whole else self.features).get_parameters():
            p.requires_grad = not frozen

    def construct(self, x):
        return self.head(self.features(mint.tanh(self.encoder(x))))


def by_attribute(net):
    def loss(x):
        net(x)
        return (net.features.seen ** 2).mean()
    return loss


def by_attribute_and_output(net):
    return lambda x: (net(x) ** 2).mean() + (net.features.seen ** 3).mean()


def hooked(loss):
    """A loss of what a forward hook sees within, and of the output."""
    def of(net):
        def run(x):
            kept = []
            handle = net.features.low.register_forward_hook(lambda cell, inputs, y: kept.append(y))
            y = net(x)
            handle.remove()
            return loss(kept[0], y)
        return run
    return of


LOSSES = {"attribute": by_attribute, "attribute and output": by_attribute_and_output,
          "hook": hooked(lambda seen, y: (mint.tanh(seen) ** 2).mean()),
          "hook and stopped output": hooked(lambda seen, y: (ops.stop_gradient(y) * seen).mean())}


@cases(2, {"features_of_a_frozen_unit": (True,), "features_of_a_trained_unit": (False,),
           "gradients_of_inputs_alone": (True, True)})
def features(world, frozen: bool, whole: bool = False) -> None:
    mesh = data_mesh(world)

    @each(crossed(LOSSES, WAYS, 3))
    def steps(name, way):
        plain, net = twins(lambda: Perceptual(frozen, whole), way, mesh, "encoder features head")
        for step in range(2):
            alike(net, plain, mesh, LOSSES[name], f"step {step}")


@case(2)
def features_of_a_frozen_model_beside_the_trained_one(world):
    """The frozen model is a root of its own; the trained one's output goes through it."""
    mesh = data_mesh(world)

    def loss(n):
        def of(x):
            n[1](mint.tanh(n[0](x)))
            return (n[1].seen ** 2).mean()
        return of

    @each(sampled(WAYS, 2))
    def steps(way):
        plain, net = (nn.CellList([filled(nn.Dense(4, 4)), filled(Features(), 9)]) for _ in range(2))
        set_trained(False, plain[1], net[1])
        WAYS[way](net[0], mesh, ())
        WAYS[way](net[1], mesh, (net[1].low,))
        for step in range(2):
            alike(net, plain, mesh, loss, f"step {step}")


@case(2)
def an_output_of_no_container_that_a_loss_reads(world):
    """Tensors in an object of the user's own class are past the outputs, too."""
    class Out:
        def __init__(self, x):
            self.x = x

    class Wrapped(nn.Cell):
        def __init__(self, frozen: bool) -> None:
            super().__init__()
            self.first, self.inner = nn.Dense(4, 4), nn.Dense(4, 4)
            set_trained(not frozen, self.inner)

        def construct(self, x):
            return Out(mint.tanh(self.inner(mint.tanh(self.first(x)))))

    mesh = data_mesh(world)

    @each([("fully_shard", *rest) for rest in itertools.product((True, False), ("", "inner"))] + [("replicate", False, "")])
    def steps(way, frozen, cells):
        plain, net = twins(lambda: Wrapped(frozen), way, mesh, cells)
        alike(net, plain, mesh, lambda n: lambda x: (n(x).x ** 2).mean())


class Unseen(nn.Cell):
    """What it computes of its local weight reaches the loss by an attribute alone."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Dense(4, 4)

    def construct(self, x):
        weight = self.low.weight.to_local(grad_placements=[Replicate()])
        self.seen = DTensor.from_local(mint.tanh(weight), self.low.weight.device_mesh, [Replicate()])
        return self.low(x)


@case(2)
def local_weights_that_reach_the_loss_alone_are_refused(world):
    """Nobody sees when their backward reads the memory that they lay in."""
    mesh, net = data_mesh(world), filled(Unseen())
    fully_shard(net, mesh=mesh)

    def loss(x):
        net(x)
        return (net.seen ** 2).sum()
    text = refusal(lambda: value_and_grad(loss, None, net.trainable_params())(rows_of(mesh)), LayoutError)
    assert "past the cell's outputs" in text and "reshard_after_forward=False" in text, text
