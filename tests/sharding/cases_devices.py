# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` in other dtypes, beside parameters kept whole, copied, on emulated devices, and in the memory of large units.

Into that peers write, and it moves under its addresses.
"""
import copy

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.parallel.sharding import memory
from tests.cases import call
from tests.operands import Built, R, S, mesh_2d
from tests.rehearsal.session import rehearsed
from tests.rehearsal.tables import Rates
from tests.sharding import cases_fully_shard, cases_inside, cases_steps
from tests.sharding.cases_fully_shard import ROWS, Net, both, cut_up, filled, fsdp, loss_of, mine, same_step, scalar
from tests.support import equal
from tests.tiers import sampled


def computing_in_bfloat16(world):
    policy = md.MixedPrecisionPolicy(ms.bfloat16, ms.float32, output_dtype=ms.float32)
    for mesh, tp in sampled(((fsdp(), None), (mesh_2d()["dp"], mesh_2d()["tp"])), 2, 1):
        plain, net = filled(Net()), filled(Net())
        if tp is not None:
            md.parallelize_module(net, tp, {"blocks.*.up": md.ColwiseParallel(use_local_output=False),
                                            "blocks.*.down": md.RowwiseParallel(use_local_output=False)})
        cut_up(net, mesh, mp_policy=policy)
        with md.comm.record() as events:
            same_step(net, plain, mesh, rtol=6e-2)  # of the largest element: bfloat16's 2^-9 through four layers and a square
        gathered = [e.dtype for e in events if e.op == "all_gather" and e.axes == ("dp",)]
        assert gathered[:7] == ["BFloat16"] * 7, gathered
        reduced = [e for e in events if e.phase == "backward" and e.op in ("reduce_scatter", "all_reduce") and e.axes == ("dp",)]
        assert reduced and {e.dtype for e in reduced} == {"Float32"}, reduced


def bfloat16_is_one_devices_bfloat16(world):
    """The loss within 2^-7, gradients within 2^-6 of the largest: each rank rounds its rows' summands by itself."""
    policy, mesh = md.MixedPrecisionPolicy(ms.bfloat16, ms.float32, output_dtype=ms.float32), fsdp()
    alone = md.DeviceMesh("cpu", [world.rank], mesh_dim_names=("dp",))
    one = md.replicate(filled(Net()), mesh=alone, mp_policy=policy)
    many = cut_up(filled(Net()), mesh, mp_policy=policy)
    (want, wanted), (got, grads) = (md.value_and_grad(loss_of(n), None, n.trainable_params())(x)
                                    for n, x in ((one, Tensor(ROWS)), (many, mine(mesh))))
    equal(got, want.to_local(), "loss", rtol=2**-7)
    for p, g, w in zip(many.trainable_params(), grads, wanted, strict=True):
        equal(g, w.to_local(), p.name, rtol=2**-6)


def on_emulated_devices_as_on_the_cpu(world):
    def run(kind: str, again: dict | None = None, **how):
        mesh, out = md.init_device_mesh(kind, (4,), mesh_dim_names=("dp",)), []
        net = cut_up(filled(Net()), mesh, **how)
        if again is not None:
            md.checkpoint_wrapper(net.blocks, **again)
        optimizer = md.optim.AdamW(net.trainable_params(), 0.01)
        step = md.value_and_grad(loss_of(net), None, net.trainable_params())
        for _ in range(3):
            loss, grads = step(mine(mesh))
            md.optim.clip_grad_norm_(list(zip(net.trainable_params(), grads)), 0.5)
            optimizer(grads)
            out.append(loss)
        return [x.full_tensor().asnumpy() for x in (*out, *net.trainable_params())]
    rates = Rates(wire=1e9, saved=1e6, latency=1e-6)
    for how in sampled(({"reshard_after_forward": False}, {"again": {"save": ["matmul"]}}, {"again": {}}, {}), 4, 3):
        want = run("cpu", **how)
        with rehearsed(**({} if how else {"rates": rates})) as device:
            got = run("npu", **how)
        equal(got, want, str(how))
    stood = [still for name, _, _, still in device.times if name == "all_gather_into_tensor"]
    # of a step's 7 the first and, its block having just been given back, the backward's first; the first step knows no order
    assert sum(still == 0 for still in stood) == 2 + 5 + 5, stood
    stood = [still for name, _, _, still in device.times if name == "reduce_scatter_tensor"]
    assert [still == 0 for still in stood] == [True, True, True, False] * 3, stood  # after the last there is no computation


def gradients_completed_late_are_whole_for_whoever_asks(world):
    def run(kind: str):
        mesh, seen, out = md.init_device_mesh(kind, (4,), mesh_dim_names=("dp",)), [], []
        for order in ((0, 1, 2), (1, 1, 2)):  # a unit that runs twice has two sums under way
            net = cut_up(filled(Net(order)), mesh)
            net.blocks[1].up.weight.register_hook(lambda g, seen=seen: seen.append(g) or g * 3)
            outside = net.blocks[1].down.weight  # used past its unit as well
            step = md.value_and_grad(lambda x, net=net, w=outside: (net(x) ** 2).mean() + (w ** 2).sum(), None,
                                  net.trainable_params()[:-1])
            out += step(mine(mesh))[1]
        return [x.full_tensor().asnumpy() for x in (*out, *seen)]
    want = run("cpu")
    with rehearsed():
        got = run("npu")
    equal(got, want)


def a_weight_of_16_bits_whose_uses_differ_over_another_axis(world):
    """Its gradient comes in two layouts, so as two summands: autograd has added up neither, and one is kept as it comes."""
    def scaled(x, w):
        everywhere = x.redistribute(placements=[S(0), S(0)]) if isinstance(x, md.DTensor) else x
        return mint.tanh(x * w).sum() + (everywhere * everywhere * w).sum()

    def made():
        return filled(Built(lambda c, x: scaled(x, c.w), w=Parameter(Tensor([0.0] * 5), name="w")))

    def run(mesh):
        net = md.fully_shard(md.distribute_module(made(), mesh), mesh=mesh["dp"], mp_policy=md.MixedPrecisionPolicy(ms.bfloat16, ms.float32))
        rows = md.distribute_tensor(Tensor(ROWS), mesh, [S(0), R], src_data_rank=None)
        return md.value_and_grad(net, None, net.trainable_params())(rows)
    plain = made()
    want = ms.value_and_grad(plain, None, plain.trainable_params())(Tensor(ROWS))
    got = run(mesh_2d())
    equal(got[1], want[1], "", 2e-2)
    with rehearsed():
        on_device = run(md.init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp")))
        equal(on_device[1], got[1], "on devices", 2**-7)


def several_dtypes_in_a_unit(world):
    def mixed():
        return filled(Built(lambda c, x: c.one(x) * c.scale.astype(ms.float32) + c.shift.astype(ms.float32),
                            one=nn.Dense(5, 6), scale=Parameter(Tensor(np.arange(1, 7) / 4, ms.float64), name="scale"),
                            shift=Parameter(Tensor(np.arange(6) / 3, ms.float16), name="shift")))
    mesh, plain, net = fsdp(), mixed(), mixed()
    md.fully_shard(net, mesh=mesh)
    count = same_step(net, plain, mesh, rtol=1e-3)  # float16's rounding of one gradient
    assert count["all_gather", "forward"] == 3 and count["reduce_scatter", "backward"] == 3, count


def a_copy_of_a_cell_runs_on_its_own(world):
    mesh, net, plain = both()
    same_step(net, plain, mesh)
    twin = copy.deepcopy(net)
    for p, q in zip(twin.get_parameters(), plain.get_parameters(), strict=True):
        p.set_data(p * 2)
        q.set_data(q * 2)
    count = same_step(twin, plain, mesh)
    assert count["all_gather", "backward"] == 3 and count["reduce_scatter", "backward"] == 4, count
    same_step(net, filled(Net()), mesh)


def parameters_kept_whole(world):
    mesh, plain, net = fsdp(), filled(Net()), filled(Net())
    cut_up(net, mesh, shard_placement_fn=lambda p: R if p.ndim == 1 else None)
    assert net.head.bias.placements == (R,) and net.head.weight.placements == (S(0),)
    for sync in (False, True):
        net.set_requires_gradient_sync(sync)
        grads = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))[1]
        total = [a + b for a, b in zip(total, grads)] if sync else grads  # noqa: F821
    want = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(ROWS))[1]
    for p, g, w in zip(net.trainable_params(), total, want, strict=True):
        equal(g, 2 * w, p.name)
    count = same_step(net, plain, mesh)
    assert count["reduce_scatter", "backward"] == 4 and count["all_reduce", "backward"] == 4, count
    scale = scalar()
    md_scale = md.fully_shard(scalar(), mesh=mesh, shard_placement_fn=lambda p: R)
    same_step(md_scale, scale, mesh)
    fused, whole = nn.Dense(5, 12), nn.Dense(5, 12)
    filled(whole)
    md.parallelize_module(filled(fused), mesh_2d()["tp"], md.parallel.FusedColwiseParallel((4, 4, 4), use_local_output=False))
    md.fully_shard(fused, mesh=mesh_2d()["dp"])
    assert fused.weight.placements[0] == fused.bias.placements[0] == md.FusedShard(0, (4, 4, 4)), fused.weight
    x = md.value_and_grad(lambda x: sum((y ** 2).mean() for y in fused(x)), None, fused.trainable_params())(mine(mesh_2d()["dp"]))
    y = ms.value_and_grad(lambda x: sum((y ** 2).mean() for y in mint.split(whole(x), 4, 1)), None,
                          whole.trainable_params())(Tensor(ROWS))
    equal((x[0], *x[1]), (y[0], *y[1]))


AGAIN = (cases_fully_shard.one_collective_a_unit_and_direction, cases_fully_shard.the_optimizer_divided,
         cases_fully_shard.frozen_then_trained, cases_fully_shard.other_dims_and_parameters_left_alone,
         cases_fully_shard.without_gradients_all_is_given_back,
         cases_steps.neighbours_keep_the_parameters_between_forward_and_backward,
         cases_steps.kept_parameters_are_gathered_again_when_they_were_changed,
         cases_steps.a_step_that_raises_forgets_what_was_gathered_up,
         cases_inside.what_runs_again_computes_in_the_policys_dtype, cases_inside.empty_shards_of_bfloat16)


def in_windows(world):
    """None of these units is large enough by itself."""
    small, memory._SMALL = memory._SMALL, 0
    try:
        for one in sampled(AGAIN, 6):
            call(one, world)
    finally:
        memory._SMALL = small


def a_window_goes_with_its_last_array(world):
    backend = comm.group(tuple(range(world.size))).backend
    window = backend.window(1 << 20)
    window.claim()
    part = np.ndarray((1000,), np.float32, window, 8000)
    part[...] = 3.0
    first = window.offset
    del window
    other = backend.window(1 << 20)
    other.claim()
    assert other.offset != first, "what lies under an array that is alive was given away"
    np.ndarray((1000,), np.float32, other, 8000)[...] = 5.0
    assert (part == 3.0).all()
    del part
    third = backend.window(1 << 20)
    third.claim()
    assert third.offset == first, "it comes back"
    other.release()
    assert not other.any() and other.offset is None
    other[:4] = 1
    other.claim()
    assert np.ndarray((1000,), np.float32, other, 8000)[7] == 5.0, "what was written meanwhile went nowhere"
