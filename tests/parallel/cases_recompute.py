# SPDX-License-Identifier: Apache-2.0
"""Selective recompute on ranks: one device's numbers, whatever is kept, with whatever it is combined; and what it sends."""
import itertools

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import MixedPrecisionPolicy, checkpoint_wrapper, fully_shard, parallelize_module, replicate, value_and_grad
from tests.operands import Built
from tests.sharding.cases_fully_shard import ROWS, Net, cut_up, filled, fsdp, loss_of, mine, same_step
from tests.sharding.cases_inside import divided, tied, whole
from tests.support import equal
from tests.tiers import sampled

SAVED = (["matmul"], [mint.tanh, "layer_norm_classic"], lambda op, arguments: True, [])


def ops_of_units_are_kept(world):
    mesh = fsdp()
    for save, before in sampled(itertools.product(SAVED, (True, False)), 7):
        plain, net = filled(Net()), filled(Net())
        if before:
            checkpoint_wrapper(net.blocks, save=save)
        cut_up(net, mesh)
        if not before:
            checkpoint_wrapper(net.blocks, save=save)
        for _ in range(2):
            count = same_step(net, plain, mesh)
            assert count == {("all_gather", "forward"): 4, ("all_gather", "backward"): 3,
                             ("reduce_scatter", "backward"): 4}, (before, count)
        plain.order = net.order = (1, 1, 0)
        same_step(net, plain, mesh)


def ops_of_cells_of_a_larger_unit_are_kept(world):
    mesh = fsdp()
    for shift, cut in sampled(enumerate((whole, lambda net, mesh: replicate(net, mesh=mesh), divided)), 2):
        for save in sampled(SAVED[:2], 2, shift):
            plain, net = filled(Net()), filled(Net())
            checkpoint_wrapper(net.blocks[0], save)
            cut(net, mesh)
            checkpoint_wrapper(net, lambda path, cell: path == "blocks.2", save=save)
            before = same_step(cut(filled(Net()), mesh), plain, mesh)
            assert same_step(net, plain, mesh) == before
        plain, net = filled(tied()), cut(filled(tied()), mesh)
        checkpoint_wrapper(net, ["matmul"])
        checkpoint_wrapper(net.two, ["bias_add"])
        same_step(net, plain, mesh)


def cells_that_a_recomputed_one_is_given_are_whole_when_it_runs_again(world):
    """A larger unit has their parameters, which were gathered anew by the ops that met the shards."""
    def given():
        return filled(Built(lambda c, x: c.body(x, c.side), body=Built(lambda c, x, side: c.up(x) + side(x), up=nn.Dense(5, 6)),
                            side=nn.Dense(5, 6)))
    mesh, plain = fsdp(), given()
    want = same_step(whole(given(), mesh), plain, mesh)
    for save in (None, ["matmul"]):
        net = whole(given(), mesh)
        checkpoint_wrapper(net.body, save=save)
        assert same_step(net, plain, mesh) == want, save


def cells_beside_a_recomputed_one_are_whole_when_it_runs_again(world):
    """It knows them by closure or by a list; they were gathered op by op, or it was refused as another forward."""
    def given(way):
        side = nn.Dense(5, 6)
        run = {"closure": lambda c, x: c.up(x) + mint.tanh(side(x)),
               "list": lambda c, x: c.up(x) + mint.tanh(c.others[0](x)),
               "weight": lambda c, x: c.up(x) + mint.tanh(mint.matmul(x, side.weight.T))}[way]
        body = Built(run, up=nn.Dense(5, 6), others=[side])
        return filled(Built(lambda c, x: c.body(x) * 1.5 + c.side(x) * 0.3, body=body, side=side))

    def of_body(net, mesh):
        fully_shard(net.body, mesh=mesh)
        return whole(net, mesh)

    def shorter(net, mesh):
        return fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(ms.float16, ms.float32))
    mesh = fsdp()
    for cut, way in sampled(itertools.product((whole, of_body, divided, shorter), ("closure", "list", "weight")), 5):
        plain, rtol = given(way), 1e-2 if cut is shorter else 2e-5
        want = same_step(cut(given(way), mesh), plain, mesh, rtol=rtol)
        for save in (None, ["matmul"]):
            net = cut(given(way), mesh)
            checkpoint_wrapper(net.body, save=save)
            assert same_step(net, plain, mesh, rtol=rtol) == want, (cut, way, save)


def what_a_forward_makes_may_call_any_cell_when_it_runs_again(world):
    """A function, or a cell made in the forward, knows the model's cells by closure: these have no others' weights, either."""
    def given(again):
        def run(c, x):
            return again(lambda x: c.down(mint.tanh(c.up(x))) + c.scale, x)
        return filled(Built(run, up=nn.Dense(5, 6), down=nn.Dense(6, 5), scale=Parameter(Tensor([0.0] * 5), name="scale")))

    def made(save):
        return lambda body, x: checkpoint_wrapper(Built(lambda c, x: body(x)), save=save)(x)

    def function(body, x):
        return ms.recompute(body, x, use_reentrant=False)

    def shorter(net, mesh):
        return replicate(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(ms.float16, ms.float32))
    mesh = fsdp()
    for cut, rtol in ((whole, 2e-5), (divided, 2e-5), (shorter, 1e-2)):
        plain = given(lambda body, x: body(x))
        want = same_step(cut(given(lambda body, x: body(x)), mesh), plain, mesh, rtol=rtol)
        for again in (made(None), made(["matmul"]), function):
            assert same_step(cut(given(again), mesh), plain, mesh, rtol=rtol) == want, (cut, again)


def kept_moves_are_not_sent_again(world, grid):
    sent = {}
    plan = {f"blocks.{i}.{part}": style(use_local_output=False) for i in range(3)
            for part, style in (("up", md.ColwiseParallel), ("down", md.RowwiseParallel))}
    for name, how in (("none", None), ("nothing", {}), ("matmul", {"save": ["matmul"]}),
                      ("moves", {"save": ["matmul", "redistribute"]})):
        plain, net = filled(Net()), parallelize_module(filled(Net()), grid["tp"], plan)
        cut_up(net, grid["dp"])
        if how is not None:
            checkpoint_wrapper(net.blocks, **how)
        same_step(net, plain, grid["dp"])
        sent[name] = same_step(net, plain, grid["dp"])
    again = sent["nothing"] - sent["none"]
    assert sum(again.values()) == 3, sent  # each block's reduction after `down`
    assert sent["matmul"] == sent["nothing"] and sent["moves"] == sent["none"], sent


def the_same_random_numbers_and_a_shorter_dtype(world):
    def noisy():
        return Built(lambda c, x: c.drop(c.down(c.drop(mint.tanh(c.up(x))))) + x, up=nn.Dense(5, 6), drop=nn.Dropout(p=0.4),
                    down=nn.Dense(6, 5))

    mesh = fsdp()
    policy = MixedPrecisionPolicy(ms.bfloat16, ms.float32)
    for shift, mp_policy in sampled(enumerate((None, policy)), 2, 1):
        def gradients(save):
            net = filled(nn.SequentialCell(noisy(), noisy())).set_train()
            if save is not None:
                checkpoint_wrapper(net, save=save)
            for block in net:
                fully_shard(block, mesh=mesh, mp_policy=mp_policy)
            fully_shard(net, mesh=mesh, mp_policy=mp_policy)
            md.manual_seed(11)
            loss, grads = value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))
            return [loss.float(), *grads], md.get_rng_state()
        want, state = gradients(None)
        for save in sampled((["dropout"], ["matmul"], []), 2, shift):
            got, after = gradients(save)
            assert after == state
            for g, w in zip(got, want, strict=True):
                equal(g, w.full_tensor(), str(save), 1e-6)


def accumulated_and_not_reentrant(world):
    mesh = fsdp()
    for shift, kind in sampled(enumerate(("save", "use_reentrant")), 2, 1):
        for cut in sampled((cut_up, whole), 2, shift):
            plain, net = filled(Net()), filled(Net())
            for block in net.blocks:
                if kind == "save":
                    checkpoint_wrapper(block, ["matmul"])
                else:
                    block.recompute(use_reentrant=False)
            cut(net, mesh)
            count = same_step(net, plain, mesh)
            assert count == same_step(cut(filled(Net()), mesh), plain, mesh), (kind, count)
            params = net.trainable_params()
            step = value_and_grad(loss_of(net), None, params)
            net.set_requires_gradient_sync(False)
            step(mine(mesh)[:1])
            net.set_requires_gradient_sync(True)
            got = step(mine(mesh)[1:])[1]
            want = [ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(rows))[1]
                    for rows in (ROWS[::2], ROWS[1::2])]
            for p, g, a, b in zip(params, got, *want, strict=True):
                equal(g, a + b, f"{kind} {p.name}")
