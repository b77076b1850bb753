# SPDX-License-Identifier: Apache-2.0
"""A cell's inner tensor that reaches the loss past its outputs, by a forward hook or an attribute: one device's numbers."""
from __future__ import annotations

from mindspore import mint, nn, ops

from ms_dtensor import fully_shard
from tests.cases import case
from tests.sharding.support import WAYS, alike, collected, data_mesh, filled, none_of
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


def by_hook(net):
    def loss(x):
        kept = []
        handle = net.features.low.register_forward_hook(lambda cell, inputs, y: kept.append(y))
        net(x)
        handle.remove()
        return (mint.tanh(kept[0]) ** 2).mean()
    return loss


def by_hook_and_stopped_output(net):
    def loss(x):
        kept = []
        handle = net.features.low.register_forward_hook(lambda cell, inputs, y: kept.append(y))
        y = ops.stop_gradient(net(x))
        handle.remove()
        return (y * kept[0]).mean()
    return loss


LOSSES = {"attribute": by_attribute, "attribute and output": by_attribute_and_output, "hook": by_hook,
          "hook and stopped output": by_hook_and_stopped_output}


def features(world, frozen: bool, whole: bool = False) -> None:
    mesh, faults = data_mesh(world), []
    for shift, (name, loss) in enumerate(LOSSES.items()):
        for way, wrap in sampled(WAYS.items(), 3, shift):
            def steps(loss=loss, wrap=wrap):
                plain, net = filled(Perceptual(frozen, whole)), filled(Perceptual(frozen, whole))
                wrap(net, mesh, (net.encoder, net.features, net.head))
                for step in range(2):
                    alike(net, plain, mesh, loss, f"step {step}")
            collected(faults, f"{way}, {name}", steps)
    none_of(faults)


@case(2)
def features_of_a_frozen_unit(world):
    features(world, True)


@case(2)
def features_of_a_trained_unit(world):
    features(world, False)


@case(2)
def gradients_of_inputs_alone(world):
    features(world, True, whole=True)


@case(2)
def features_of_a_frozen_model_beside_the_trained_one(world):
    """The frozen model is a root of its own; the trained one's output goes through it."""
    mesh, faults = data_mesh(world), []
    for way, wrap in sampled(WAYS.items(), 2):
        def steps(wrap=wrap):
            plain, net = (nn.CellList([filled(nn.Dense(4, 4)), filled(Features(), 9)]) for _ in range(2))
            for n in (plain, net):
                for p in n[1].get_parameters():
                    p.requires_grad = False
            wrap(net[0], mesh, ())
            wrap(net[1], mesh, (net[1].low,))

            def loss(n):
                def of(x):
                    n[1](mint.tanh(n[0](x)))
                    return (n[1].seen ** 2).mean()
                return of
            for step in range(2):
                alike(net, plain, mesh, loss, f"step {step}")
        collected(faults, way, steps)
    none_of(faults)


@case(2)
def an_output_of_no_container_that_a_loss_reads(world):
    """Tensors in an object of the user's own class are past the outputs, too."""
    class Out:
        def __init__(self, x):
            self.x = x

    class Wrapped(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Dense(4, 4), nn.Dense(4, 4)

        def construct(self, x):
            return Out(mint.tanh(self.inner(mint.tanh(self.first(x)))))

    mesh, faults = data_mesh(world), []
    for frozen in (True, False):
        for inner in (False, True):
            def steps(inner=inner, frozen=frozen):
                plain, net = filled(Wrapped()), filled(Wrapped())
                for n in (plain, net):
                    for p in n.inner.get_parameters():
                        p.requires_grad = not frozen
                if inner:
                    fully_shard(net.inner, mesh=mesh)
                fully_shard(net, mesh=mesh)
                alike(net, plain, mesh, lambda n: lambda x: (n(x).x ** 2).mean())
            collected(faults, f"{frozen=} {inner=}", steps)
    none_of(faults)
