# SPDX-License-Identifier: Apache-2.0
"""What happens inside a unit of `fully_shard`: cells that run again, numbers, empty shards, other dtypes; and arguments."""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import DTensor, MixedPrecisionPolicy, checkpoint_wrapper, fully_shard, replicate
from ms_dtensor.errors import ConfigError, LayoutError, MixedOperandError
from ms_dtensor.internals.names import no_grad
from tests.operands import Built, P, R, S
from tests.rehearsal.session import rehearsed
from tests.sharding.cases_fully_shard import ASKED, ROWS, Net, block, cut_up, filled, fsdp, loss_of, mine, same_step
from tests.support import counted, equal, refusal, same_on_all_ranks, set_trained
from tests.tiers import sampled


def tied() -> nn.Cell:
    """Two projections with one weight, between a frozen one and a number."""
    net = Built(lambda c, x: c.two(mint.tanh(c.one(mint.tanh(c.frozen(x))))) * c.heat, frozen=nn.Dense(5, 5),
                one=nn.Dense(5, 5), two=nn.Dense(5, 5), heat=Parameter(Tensor(0.7, ms.float32), name="heat"))
    net.two.weight = net.one.weight
    set_trained(False, net.frozen)
    return net


def whole(net, mesh, **how):
    return fully_shard(net, mesh=mesh, **how)


def divided(net, mesh, **how):
    return replicate(net, mesh=mesh, zero1=True, **how)


def recomputed(net):
    return checkpoint_wrapper(net.blocks[1].up) and checkpoint_wrapper(net.blocks[0]) and net


def only_gradients_that_were_asked_for_are_gathered_up(world):
    def made(kind: str, cut, again: bool):
        mesh = md.init_device_mesh(kind, (4,), mesh_dim_names=("dp",))
        net = cut(filled(Net((1,))), mesh)
        return mesh, recomputed(net) if again else net

    def run(mesh, net, one: bool, sync: bool):
        params, loss = net.blocks[1].trainable_params(), loss_of(net)
        step, total = md.value_and_grad(loss, None, params), None
        for last in (False, True):
            net.set_requires_gradient_sync(last)
            grads = step(mine(mesh, ROWS * (2 if last else 1)))[1]
            total = [a + b for a, b in zip(total, grads)] if last else grads
            if not last:
                net.set_requires_gradient_sync(sync)
                with counted() as count:
                    if one:  # of one of a block's parameters
                        asked = md.value_and_grad(loss, None, [net.blocks[1].up.weight])(mine(mesh, ROWS * 3))[1][0]
                        total = [t + asked if p is net.blocks[1].up.weight else t for p, t in zip(params, total)]
                    else:  # of the input
                        md.grad(loss, 0)(mine(mesh, ROWS * 3))
                assert count["reduce_scatter", "backward"] == int(one and sync), count
        return [g.full_tensor().asnumpy() for g in total]
    plain = filled(Net((1,)))
    params, at = plain.blocks[1].trainable_params(), 2
    assert params[at] is plain.blocks[1].up.weight
    first, between, last = (ms.value_and_grad(loss_of(plain), None, params)(Tensor(ROWS * n))[1] for n in (1, 3, 2))
    ways = ((cut_up, False), (cut_up, True), (whole, True), (whole, False), (divided, False), (divided, True))
    for nth, (cut, again) in sampled(enumerate(ways), 3):
        mesh, net = made("cpu", cut, again)
        asked = [(False, False), (True, False), (False, True), (True, True)]
        for one, sync in sampled(asked[nth % 4:] + asked[:nth % 4], 4):  # at push one of each way, another each time
            got = run(mesh, net, one, sync)
            for i, (g, a, b, p) in enumerate(zip(got, first, last, params, strict=True)):
                want = a + b + between[i] if one and i == at else a + b
                equal(g, want, f"{cut.__name__} {again=} {one=} {sync=} {p.name}")
    with rehearsed():
        got = run(*made("npu", cut_up, True), True, False)
        for i, (g, a, b, c) in enumerate(zip(got, first, last, between, strict=True)):
            equal(g, a + b + c if i == at else a + b, f"npu {i}")


def a_parameter_unfrozen_after_its_cell_was_wrapped_gets_its_gradient(world):
    mesh = fsdp()
    for cut, before in ((cut_up, True), (whole, False)):
        plain, net = filled(Net()), filled(Net())
        for train in (False, True):
            for n in (plain, net):
                n.blocks[0].up.weight.requires_grad = n.blocks[1].up.weight.requires_grad = train
            if not train:
                net = cut(recomputed(net), mesh) if before else recomputed(cut(net, mesh))
            same_step(net, plain, mesh)


def cells_of_a_larger_unit_run_again(world):
    mesh = fsdp()
    for shift, cut in sampled(enumerate((whole, divided)), 2, 1):
        for before in sampled((True, False), 2, shift):
            plain, net = filled(Net()), filled(Net())
            if before:
                checkpoint_wrapper(net.blocks)
                checkpoint_wrapper(net.blocks[1].up)
            cut(net, mesh)
            if not before:
                checkpoint_wrapper(net.blocks, "every:2")
            for _ in range(2):
                count = same_step(net, plain, mesh)
                assert count["reduce_scatter", "backward"] == 1 and sum(count.values()) == (3 if cut is whole else 2), count
            for order in ((1, 1, 0), (2,), ()):
                plain.order = net.order = order
                same_step(net, plain, mesh)


def plain_outputs_of_styles_pass_a_units_border(world, grid):
    """A style hands out a plain tensor and notes how it lies; behind the unit it is the DTensor that it was."""
    def made():
        return filled(Built(lambda c, x: c.down(mint.tanh(c.up(x))), up=nn.Dense(5, 6), down=nn.Dense(6, 5)))
    plain, net = made(), made()
    md.parallelize_module(net, grid["tp"], {"up": md.ColwiseParallel(use_local_output=False), "down": md.RowwiseParallel()})
    same_step(whole(net, grid["dp"]), plain, grid["dp"])


def tied_frozen_and_single_numbers_run_again(world):
    mesh = fsdp()
    for cut in (whole, divided):
        for kids in (("one",), ("two",), ("one", "two"), ("frozen", "one")):
            plain, net = filled(tied()), cut(filled(tied()), mesh)
            assert isinstance(net.heat, DTensor) and net.heat.placements[0].is_replicate(), net.heat  # a number: every rank has it
            for kid in kids:
                checkpoint_wrapper(getattr(net, kid))
            same_step(net, plain, mesh)
            equal(net(mine(mesh)), plain(Tensor(ROWS)))


def what_runs_again_computes_in_the_policys_dtype(world):
    mesh, policy = fsdp(), MixedPrecisionPolicy(ms.float16, ms.float32)
    for cut in (whole, divided):
        plain, net = cut(filled(tied()), mesh, mp_policy=policy), cut(filled(tied()), mesh, mp_policy=policy)
        for kid in (net.frozen, net.one, net.two):
            checkpoint_wrapper(kid)
        assert net(mine(mesh)).dtype == ms.float16
        want = md.value_and_grad(loss_of(plain), None, plain.trainable_params())(mine(mesh))[1]
        got = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))[1]
        for p, g, w in zip(net.trainable_params(), got, want, strict=True):
            assert g.dtype == ms.float32
            equal(g, w, p.name, 1e-3)


def what_is_read_unrecorded_is_recorded_later(world):
    mesh, plain, net = fsdp(), filled(tied()), replicate(filled(tied()), mesh=fsdp())

    def loss(n):
        def of(x):
            h = n.frozen(x)
            w = n.one.weight * 2
            with no_grad():
                seen = mint.matmul(h, w).sum()
            return (mint.matmul(h, w) ** 2).mean() + seen * 0
        return of
    want = ms.value_and_grad(loss(plain), None, [plain.one.weight])(Tensor(ROWS))
    rows = md.distribute_tensor(Tensor(ROWS), mesh, [S(0)])
    got = md.value_and_grad(loss(net), None, [net.one.weight])(rows)
    equal(got[1][0], want[1][0])


def empty_shards_of_bfloat16(world):
    mesh, rows = fsdp(), Tensor(np.asarray(ROWS))
    want = ms.value_and_grad(lambda x: (mint.matmul(x, Tensor(np.ones((5, 6), np.float32))) ** 2).mean(), 0)(rows)[0]
    for cut in (whole, divided):
        for dtype, policy in ((ms.bfloat16, None), (ms.float32, MixedPrecisionPolicy(ms.bfloat16)),
                              (ms.float32, MixedPrecisionPolicy(ms.bfloat16, ms.float32))):
            v = Parameter(Tensor(np.ones((5, 6), np.float32)).astype(dtype), name="v")
            net = cut(Built(lambda c, x: mint.matmul(x, c.v), v=v), mesh, mp_policy=policy)
            x = mine(mesh).astype(ms.bfloat16)
            value, grads = md.value_and_grad(lambda x, net=net: (net(x).astype(ms.float32) ** 2).mean(), None, [net.v])(x)
            equal(value, want, "value", 2e-2)
            assert grads[0].dtype == dtype and grads[0].shape == (5, 6)
            md.optim.AdamW([net.v])(grads)


def a_unit_of_which_only_some_parameters_are_trained(world):
    """What is upstream of frozen weights gets its gradients, in each model of the process, whichever are trained."""
    mesh = fsdp()
    names = ("norm.gamma", "norm.beta", "up.weight", "down.bias")
    for name, cut in sampled(itertools.product(names, (cut_up, whole, divided)), 5):
        plain, net = filled(Net((0, 1, 1, 2))), filled(Net((0, 1, 1, 2)))
        for n in (plain, net):
            for p in n.blocks[1].get_parameters():
                p.requires_grad = p.name.endswith(name)
        net = cut(net, mesh)
        for _ in range(2):
            same_step(net, plain, mesh)


def another_dtype_is_refused(world):
    mesh = fsdp()
    for cut in (whole, divided):
        net = cut(filled(Net()), mesh)
        net(mine(mesh))
        net.head.weight.set_dtype(ms.float16)
        with counted() as count:
            text = refusal(lambda net=net: net(mine(mesh)), ConfigError)
        assert "head.weight" in text and "another dtype" in text, text
        assert set(count) <= {("all_gather_object", "forward")}, count  # the batch's rows, before any cell runs
        same_on_all_ranks(world, text)


def arguments_of_other_kinds(world):
    mesh, net = fsdp(), block(5, 6)
    for what, call in (
            ("'module' does not take", lambda: fully_shard([net, 3], mesh=mesh)),
            ("a Cell whose construct calls the function", lambda: replicate(lambda y: y.sum(), mesh=mesh)),
            ("'mesh' does not take None", lambda: fully_shard(net, mesh=None)),
            ("'mp_policy' does not take 'bf16'", lambda: fully_shard(net, mesh=mesh, mp_policy="bf16")),
            ("'ignored_params' does not take 'up.weight'", lambda: fully_shard(net, mesh=mesh, ignored_params=["up.weight"])),
            ("gave 1 for parameter", lambda: fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: 1)),
            ("is no floating-point dtype", lambda: MixedPrecisionPolicy(ms.int32)),
            ("is no floating-point dtype", lambda: MixedPrecisionPolicy(None, "float16")),
            ("'no' is no bool", lambda: fully_shard(block(5, 6), mesh=mesh).set_requires_gradient_sync("no"))):
        with counted() as count:
            text = refusal(call, ConfigError)
        assert what in text, (what, text)
        assert not count or "bool" in what, (what, count)


class Scaled(nn.Cell):
    """A projection after a scale of its own, which may work on this rank's rows alone."""

    def __init__(self, local: bool = False) -> None:
        super().__init__()
        self.local, self.up = local, nn.Dense(5, 3)
        self.scale = Parameter(Tensor(np.linspace(-1, 2, 5), ms.float32), name="scale")

    def construct(self, x):
        scaled = x.to_local() * self.scale if self.local else x * self.scale
        return self.up(DTensor.from_local(scaled, x.device_mesh, x.placements, shape=x.shape) if self.local else scaled)


def a_parameter_left_alone_and_used(world):
    """Plain it is each rank's own: it meets no DTensor, and its gradient is of this rank's rows; else as one device's."""
    mesh, plain = fsdp(), filled(Scaled())
    for cut, name in ((whole, "fully_shard"), (divided, "replicate")):
        net = filled(Scaled())
        text = refusal(lambda net=net, cut=cut: cut(net, mesh, **(
            {"ignored_params": [net.scale]} if cut is whole else {"ignored_modules": [net]}))(mine(mesh)), MixedOperandError)
        assert "which data parallelism leaves as it is" in text and "shard_placement_fn" in text and "to_local" in text, text
        same_on_all_ranks(world, text)
        net = cut(filled(Scaled()), mesh)
        text = refusal(lambda net=net, cut=cut: cut(net, mesh), LayoutError)
        assert f"For '{name}', this Scaled was sharded already" in text, text
    net = whole(filled(Scaled()), mesh, shard_placement_fn=lambda p: R if p.name == "scale" else None)
    assert same_step(net, plain, mesh)["all_reduce", "backward"] == 1
    net = filled(Scaled(local=True))
    whole(net, mesh, ignored_params=[net.scale])
    want = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(ROWS))
    with counted() as count:
        got = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))
    assert count == {ASKED: 1, ("all_gather", "forward"): 1, ("all_gather", "backward"): 1, ("reduce_scatter", "backward"): 1}
    for p, g, w in zip(net.trainable_params(), got[1], want[1], strict=True):
        if p is net.scale:
            assert not isinstance(g, DTensor) and not np.allclose(g.asnumpy(), w.asnumpy(), rtol=0.1)
            g = DTensor.from_local(g, mesh, [P])
        equal(g, w, p.name, 2e-5)
