# SPDX-License-Identifier: Apache-2.0
"""Four real ranks under hyper_parallel's names: the same values and gradients as one device, the same communication as ours."""
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

import ms_dtensor as md
import ms_dtensor.compat.hyper_parallel as hp
from ms_dtensor.compat.hyper_parallel import DeviceMesh, DTensor, Layout, ShardingPlan, distribute_tensor, hsdp, shard_module
from ms_dtensor.errors import ConfigError, LayoutError, MeshError, MixedOperandError
from tests.operands import P, R, S, data
from tests.support import counted, equal, refusal, refused_alike, same_on_all_ranks


def mesh_2d():
    return hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Net(nn.Cell):
    """Two matmuls with an activation of its own between, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.up = Parameter(data(1, 8, 12), name="up")
        self.act = nn.Tanh()
        self.down = Parameter(data(2, 12, 6), name="down")

    def construct(self, x, scale=1.0):
        return mint.matmul(self.act(mint.matmul(x, self.up)), self.down) * scale


def meshes_have_their_names(world):
    mesh = mesh_2d()
    assert (mesh.mesh_shape, mesh.rank, mesh.root_mesh) == ((2, 2), world.rank, None)
    dp, tp = divmod(world.rank, 2)
    assert mesh.get_rank_list_along_axis("dp") == [tp, 2 + tp] and mesh.get_rank_list_along_axis("tp") == [2 * dp, 2 * dp + 1]
    assert mesh.get_device_num_along_axis("tp") == 2
    sub = mesh["tp"]
    assert isinstance(sub, DeviceMesh) and sub.root_mesh == mesh and sub.mesh_shape == (2,)
    assert isinstance(mesh.flatten("all"), DeviceMesh) and mesh["all"].mesh_shape == (4,)
    assert mesh == md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(data(1, 4, 6), mesh, (S(0), S(1)))
    equal(x + x, 2 * data(1, 4, 6))
    quiet = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), init_backend=False)
    assert quiet == mesh and quiet["tp"].get_group().size == 2  # theirs makes them when they are needed, too
    platform = hp.get_platform()
    assert (platform.get_rank(), platform.get_world_size()) == (world.rank, 4)
    assert platform.create_group([0, 1, 2, 3]).size == 4
    p = Parameter(data(world.rank, 3, 2), name="p")
    platform.broadcast(p, 2)
    equal(p, data(2, 3, 2))
    assert refusal(lambda: platform.broadcast(x, 0), LayoutError)


def layouts_say_what_ours_say(world):
    mesh = mesh_2d()
    base = Layout(mesh_shape=(2, 2), alias_name=("dp", "tp"), rank_list=(0, 1, 2, 3))
    assert base.mesh == mesh and base.mesh_shape == (2, 2) and base.alias_name == ("dp", "tp")
    both = base(("tp", "dp"), "None")
    assert both.tensor_map == ((0, 1), -1) and both.alias_tensor_map == (("tp", "dp"), "None")
    assert both.placements == (S(0), S(0)) and not both.is_partial()
    x = DTensor.from_local(data(1, 1, 3), mesh, both.alias_tensor_map)
    assert both == x.layout and x.layout == both and base("dp", "None") != x.layout
    one = base("None", "tp")
    one.set_partial_by_dev_axis("dp", "max")
    assert one.placements == (hp.Partial("max"), S(1)) and one.is_partial()
    same_on_all_ranks(world, refusal(lambda: one.set_partial_by_dev_axis("tp"), LayoutError))
    ours = md.distribute_tensor(data(1, 4, 6), md.init_device_mesh("cpu", (4,), mesh_dim_names=("ours",)), [S(0)])
    assert isinstance(Layout.of(ours.layout).mesh, DeviceMesh) and Layout.of(ours.layout) == ours.layout
    late = Layout.from_device_mesh(mesh)([S(-1), R])
    assert late.placements == (S(-1), R)
    same_on_all_ranks(world, refusal(lambda: late.tensor_map, LayoutError))
    assert late.placement_to_tensor_map(3) == (-1, -1, 1) and late == base("None", "None", "dp")
    assert "hyper_parallel" in refusal(lambda: Layout(mesh, ("dp", "tp")), LayoutError)
    refusal(lambda: Layout((2, 2), ("dp", "tp"), (0, 1)), MeshError)


class _Rowwise(hp.DistributedOp):
    """x @ w.T + b, summands over the axis that cuts the contraction; the bias shared between them."""

    def __init__(self):
        super().__init__("CompatRowwise")

    def preprocess(self, args, kwargs):
        x, w, bias = args
        assert isinstance(x, DTensor)
        return (x.to_local(), w.to_local(), bias.to_local()), {}, [x.layout, w.layout]

    def infer_layout(self, cache_values):
        x, w = cache_values
        self._check_partial_inputs([x, w])
        assert x.alias_tensor_map[-1] == w.alias_tensor_map[-1]
        out = Layout(x.mesh_shape, x.alias_name, x.rank_list)(*x.alias_tensor_map[:-1], w.alias_tensor_map[0])
        if x.alias_tensor_map[-1] != "None":
            out.set_partial_by_dev_axis(x.alias_tensor_map[-1], "sum")
        return (out,), None

    def get_expand_impl(self, func, infer_result, cache_values):
        axis = cache_values[0].alias_tensor_map[-1]
        n = 1 if axis == "None" else cache_values[0].mesh.get_device_num_along_axis(axis)
        return lambda x, w, bias: func(x, w, bias / n)


def a_distributed_op_builds_its_results_layout(world):
    _Rowwise()

    class Linear(hp.DFunction):
        _op_name = "CompatRowwise"

        @staticmethod
        def forward(ctx, x, w, bias):
            ctx.save_for_backward(x, w)
            return mint.matmul(x, w.t()) + bias

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return mint.matmul(grad, w), mint.matmul(grad.t(), x), grad.sum(0)

    mesh = mesh_2d()
    x, w, b = data(1, 4, 8), data(2, 6, 8), data(3, 6)
    dx, dw, db = (distribute_tensor(t, mesh, p) for t, p in ((x, (S(0), S(1))), (w, (R, S(1))), (b, (R, R))))
    with counted({}):
        out = Linear.apply(dx, dw, db)
    assert out.placements == (S(0), P)
    equal(out, mint.matmul(x, w.t()) + b)
    summed = DTensor.from_local(x, mesh, (R, P))
    assert "Partial" in refusal(lambda: Linear.apply(summed, dw, db), LayoutError)

    class Same(hp.DistributedOp):  # the form of infer_layout before there was preprocess, and an argument that is no tensor
        def infer_layout(self, layouts, extra_args=None):
            assert extra_args == [3.0]
            return layouts[0]
    Same("CompatSame")

    class Scaled(hp.DFunction):
        _op_name = "CompatSame"

        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale, None
    odd = distribute_tensor(x, mesh, (R, R)).redistribute(placements=(("tp", "dp"), "None"))  # tp splits first
    out = Scaled.apply(odd, 3.0)
    assert out.layout is odd.layout
    equal(out, 3 * x)
    equal(md.grad(lambda t: (Scaled.apply(t, 3.0) ** 2).sum())(odd), 18 * x)


PLAN = ShardingPlan(
    plan={"up": (R, S(1)), "down": ("tp", "None")},
    input_plan={"input": {"x": (S(0), R)}, "act.input": (S(0), S(1))}, output_plan={"output": (S(0), R)})


def shard_module_equals_one_device(world):
    mesh, x = mesh_2d(), data(3, 4, 8)
    plain = Net()
    loss, grads = hp.parallelize_value_and_grad(lambda t: (plain(t, scale=2.0) ** 2).mean(), plain.trainable_params())(x)
    net = shard_module(Net(), mesh, PLAN)
    assert net.up.placements == (R, S(1)) and net.down.placements == (R, S(0)) and net.up.name == "up"
    dx = distribute_tensor(x, mesh, (R, R))
    with hp.CommDebugMode(module=net) as mode:
        out = net(dx, scale=2.0)
        got, got_grads = hp.parallelize_value_and_grad(lambda t: (net(t, scale=2.0) ** 2).mean(), net.trainable_params())(dx)
    assert out.placements == (S(0), R)
    equal(out, plain(x, scale=2.0))
    equal(got, loss)
    equal(got_grads, grads)
    assert mode.get_comm_counts("op", "axes", "phase")[("all_reduce", ("tp",), "forward")] >= 2
    local = shard_module(Net(), mesh, ShardingPlan(input_plan={"input": (S(0), R)}, return_local_tensor=["act"],
                                                   plan={"up": (R, S(1)), "down": (R, R)}))
    local.act.register_forward_hook(lambda cell, inputs, outputs: seen.append(type(outputs)))
    seen: list = []
    refusal(lambda: local(dx))  # a local tensor meets the DTensor `down`
    assert seen == [Tensor]


def shard_module_refuses_before_it_touches_anything(world):
    mesh = mesh_2d()
    for plan in (ShardingPlan(plan={"up": (R, R), "ups": (R, R)}), ShardingPlan(plan={"up": (R, R)}, input_plan={"acts.input": (R, R)}),
                 ShardingPlan(plan={"up": (R, R)}, output_plan={"act.out": (R, R)}), {"up": (R, R)},
                 ShardingPlan(plan={"up": (R, R)}, return_local_tensor=["acts"])):
        net = Net()
        with counted() as count:
            said = refusal(lambda net=net, plan=plan: shard_module(net, mesh, plan), ConfigError)
        same_on_all_ranks(world, said)
        assert not count and not isinstance(net.up, DTensor)
    net = shard_module(Net(), mesh, ShardingPlan(plan={"up": (R, S(1))}))
    shard_module(net, mesh, ShardingPlan(plan={"up": (R, S(1))}))
    assert "laid out already" in refusal(lambda: shard_module(net, mesh, ShardingPlan(plan={"up": (R, S(0))})), LayoutError)
    two = shard_module(lambda x, y: (x + y, 3), mesh, ShardingPlan(input_plan={"input": ((S(0), R), (S(0), R))},
                                                                output_plan={"output": ((R, R), None)}))
    x, y = data(1, 4, 2), data(2, 4, 2)
    total, three = two(distribute_tensor(x, mesh, (R, R)), distribute_tensor(y, mesh, (R, S(1))))
    assert total.placements == (R, R) and three == 3
    equal(total, x + y)


def placements_beyond_the_axes_may_be_replicate(world):
    mesh, x = mesh_2d(), data(3, 4, 8)
    dx = distribute_tensor(x, mesh, (S(0), R, R, R))
    assert dx.placements == (S(0), R)
    net = shard_module(Net(), mesh, ShardingPlan(plan={"up": (R, S(1), R)}, output_plan={"output": (R, S(1), R)}))
    assert net.up.placements == (R, S(1))
    shard_module(net, mesh, ShardingPlan(plan={"up": (R, S(1), R), "down": (R, R)}))
    out = net(dx)
    assert out.placements == (R, S(1))
    equal(out, Net()(x))
    for placed in ((R, R, S(0)), (S(0),)):
        refused_alike(world, lambda placed=placed: distribute_tensor(x, mesh, placed), LayoutError)


def tied_and_deferred_parameters_are_one_devices(world):
    class Tied(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first = Parameter(initializer("normal", [4, 4]), name="first")
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Dense(4, 8, has_bias=False)
            self.head.weight = self.embed.embedding_table

    mesh = mesh_2d()
    np.random.seed(5)
    plain = Tied()
    np.random.seed(5 + world.rank)  # rank 0's
    with no_init_parameters():
        net = Tied()
    shard_module(net, mesh, ShardingPlan(plan={"embed.embedding_table": (R, S(0))}))
    assert net.head.weight is net.embed.embedding_table
    hp.init_parameters(net)
    equal(net.first, plain.first)
    assert not isinstance(net.first, DTensor)
    equal(net.embed.embedding_table, plain.embed.embedding_table)


def custom_shard_is_local_map_with_one_entry_per_result(world):
    mesh = mesh_2d()
    x, w = data(1, 4, 8), data(2, 8, 6)
    dx, dw = distribute_tensor(x, mesh, (R, R)), distribute_tensor(w, mesh, (R, S(0)))

    def fn(a, b, times):
        return mint.matmul(a, b) * times
    one = hp.custom_shard(fn, mesh, ((S(0), P),), ((S(0), S(1)), (R, S(0)), None))
    out = one(dx, dw, 2)
    assert out.placements == (S(0), P)
    equal(out, 2 * mint.matmul(x, w))
    grads = md.grad(lambda a, b: (one(a, b, 2).reduce_partial() ** 2).sum(), (0, 1))(dx, dw)
    equal(grads, md.grad(lambda a, b: (fn(a, b, 2) ** 2).sum(), (0, 1))(x, w))
    two = hp.custom_shard(device_mesh=mesh, out_placements=((S(0), R), None), in_placements=((S(0), R),))(lambda a: (a * 2, 7))
    doubled, seven = two(dx)
    assert seven == 7 and doubled.placements == (S(0), R)
    equal(fn(x, w, 3), one(x, w, 3))
    refusal(lambda: hp.custom_shard(fn, mesh, ((S(0), R),), ((S(0), R), (R, R), None), redistribute_inputs=False)(dx, dw, 1),
            LayoutError)


def several_results_and_sensitivities(world):
    mesh = mesh_2d()
    x, w = data(1, 4, 8), data(2, 8, 6)

    def both(weight):
        return lambda t: ((mint.matmul(t, weight) ** 2).sum(), mint.matmul(t, weight).sum())
    plain, dist = Parameter(w, name="w"), Parameter(distribute_tensor(w, mesh, (R, S(1))), name="w")
    dx = distribute_tensor(x, mesh, (S(0), R))
    for sens in (None, [0.5, -3.0]):
        (a, b), (want,) = hp.parallelize_value_and_grad(both(plain), plain, sens)(x)
        (got_a, got_b), (got,) = hp.parallelize_value_and_grad(both(dist), [dist], sens)(dx)
        equal(got_a, a)
        equal(got_b, b)
        equal(got, want)
        assert isinstance(got, DTensor) and got.placements == (R, S(1))
    assert np.abs(want.asnumpy() - md.value_and_grad(both(plain), None, [plain], True)(x)[1][0].asnumpy()).max() > 0.1
    refusal(lambda: hp.parallelize_value_and_grad(both(plain), plain, [1.0])(x), ConfigError)


def hsdp_replicates_and_refuses_the_rest(world):
    mesh, rows = mesh_2d(), data(3, 4, 8)
    plain = Net()
    want = hp.parallelize_value_and_grad(lambda t: (plain(t) ** 2).mean(), plain.trainable_params())(rows)
    net = hsdp(shard_module(Net(), mesh, ShardingPlan(plan={"up": (R, S(1))})), shard_size=1)
    assert net.down.placements == (R, R)
    got = hp.parallelize_value_and_grad(lambda t: (net(t) ** 2).mean(), net.trainable_params())(
        distribute_tensor(rows, mesh, (S(0), R)))
    alone = hsdp(Net(), shard_size=1, comm_fusion=True)  # every rank brings its row
    own = hp.parallelize_value_and_grad(lambda t: (alone(t) ** 2).mean(), alone.trainable_params())(
        rows[world.rank:world.rank + 1])
    for loss, grads in (got, own):
        equal(loss, want[0])
        equal(grads, want[1])
    small = hsdp(Net())  # its parameters are smaller than those that would be cut
    assert isinstance(small.up, DTensor) and small.up.placements == (R,)
    for asked in ({"threshold": 0}, {"shard_size": 2, "threshold": 0.1}, {"shard_size": 1, "enable_grad_accumulation": True},
                  {"shard_size": 1, "grad_scale": 0.5}, {"shard_size": 1, "reduce_dtype": "float32"}):
        same_on_all_ranks(world, refusal(lambda asked=asked: hsdp(Net(), **asked), ConfigError))


def the_platforms_collectives_have_gradients(world):
    """What is differentiated is the sum of what all ranks differentiate."""
    mesh, platform, n = mesh_2d(), hp.get_platform(), 2
    group, here = mesh.get_group("tp"), world.rank % 2
    assert platform.create_group(mesh["tp"].rank_list) == group  # one communicator
    ones = [data(10 + 2 * (world.rank // 2) + r, 6) for r in range(n)]
    weights = [data(20 + r, 6) for r in range(n)]
    for op, scale in (("sum", 1), ("avg", 1 / n)):
        with counted() as count:
            value, grad = md.value_and_grad(lambda x, op=op: (platform.differentiable_all_reduce(x, op, group) *
                                                              weights[here]).sum())(ones[here])
        equal(value, (scale * sum(x.asnumpy() for x in ones) * weights[here].asnumpy()).sum())
        equal(grad, scale * sum(w.asnumpy() for w in weights))
        assert count == {("all_reduce", "forward"): 1, ("all_reduce", "backward"): 1}
    send = [[1, 5], [2, 4]]  # from, to
    recv = [send[r][here] for r in range(n)]
    pulls = data(30 + here, sum(recv))
    with counted() as count:
        value, grad = md.value_and_grad(lambda x: (platform.differentiable_all_to_all_single_async(
            x, send[here], recv, str(group)) * pulls).sum())(ones[here])
    pieces = [np.split(x.asnumpy(), [s[0]])[here] for x, s in zip(ones, send)]
    equal(value, (np.concatenate(pieces) * pulls.asnumpy()).sum())
    there = [np.split(data(30 + r, send[0][r] + send[1][r]).asnumpy(), [send[0][r]])[here] for r in range(n)]
    equal(grad, np.concatenate(there))
    assert count == {("all_to_all", "forward"): 1, ("all_to_all", "backward"): 1}
    gathered = [None] * 4
    platform.all_gather_object(gathered, world.rank)
    assert gathered == [0, 1, 2, 3]
    dx = distribute_tensor(data(1, 4, 6), mesh, (R, R))
    for call in (lambda: platform.differentiable_all_reduce(dx), lambda: platform.differentiable_all_to_all_single_async(
            dx, [1, 1], [1, 1])):
        same_on_all_ranks(world, refusal(call, LayoutError))
    same_on_all_ranks(world, refusal(lambda: platform.differentiable_sync_hook(dx, "A", None), ConfigError))
    same_on_all_ranks(world, refusal(lambda: platform.differentiable_all_reduce(ones[0], "sum", "no such"), md.errors.CommError))


def local_cells_under_fully_shard(world):
    """Plain in, plain out; `main_grad` in float32 over micro-batches; parameters as one device has them."""
    mesh = hp.init_device_mesh("npu", (4,), mesh_dim_names=("world",))._unflatten(0, (1, 4), ("pp", "fsdp"))
    net, plain, rows = Net(), Net(), data(3, 8, 8)
    hp.checkpoint_wrapper(net.act, context_fn=lambda: (nullcontext(), nullcontext()), early_stop=True)
    hp.fully_shard(net, mesh=mesh["fsdp"], comm_fusion=False, replicate_params=[net.up], offload_policy=hp.CPUOffloadPolicy(),
                mp_policy=hp.MixedPrecisionPolicy(reduce_dtype=ms.float32, apply_grad_on_fp32_main_grad=True))
    assert isinstance(net, hp.HSDPModule) and not isinstance(net.act, hp.HSDPModule)
    net.set_reduce_op_type("sum")
    want = [0.0, 0.0]
    for half in np.split(rows.asnumpy(), 2):
        mine = Tensor(np.split(half, 4)[world.rank])
        with md.recorded(net):
            out = net(mine)
            assert type(out) is Tensor
            md.backward((out ** 2).sum())
        some = ms.grad(lambda h: (plain(h) ** 2).sum(), None, plain.trainable_params())(Tensor(half))
        want = [a + g.asnumpy() for a, g in zip(want, some)]
    for p, w in zip(net.trainable_params(), want, strict=True):
        equal(p.main_grad, w)
        assert p.main_grad.dtype == ms.float32 and isinstance(p, DTensor)
    assert (net.up.placements, net.down.placements) == ((R,), (S(0),))
    net.zero_grad()
    assert net.up.main_grad is None


def a_piece_is_loaded_as_its_ranks_shard_by_programs_for_hyper_parallel_alone(world):
    """MindFormers reads pieces by layouts, and gives them to `load_param_into_net`."""
    mesh = mesh_2d()
    net = shard_module(Net(), mesh, ShardingPlan(plan={"up": (S(1), S(0)), "down": (R, S(1))}))
    whole = {name: np.random.default_rng(len(name)).standard_normal(p.shape).astype(np.float32)
             for name, p in net.parameters_and_names()}
    given = {name: Parameter(Tensor(np.ascontiguousarray(whole[name][tuple(slice(*e) for e in p.layout.local_box())])), name)
             for name, p in net.parameters_and_names()}
    text = refusal(lambda: ms.load_param_into_net(net, given), RuntimeError)
    assert "same shape" in text, text
    hp.register()
    try:
        with counted() as count:
            assert ms.load_param_into_net(net, given) == ([], [])
        text = refusal(lambda: ms.load_param_into_net(net, {"up": Parameter(Tensor(np.ones((4, 5), np.float32)))}), RuntimeError)
    finally:
        hp.unregister()
    assert not count and "same shape" in text, (count, text)
    for name, p in net.parameters_and_names():
        equal(p, Tensor(whole[name]), name, 0)


def a_counter_is_each_ranks_own_in_programs_for_hyper_parallel_alone(world):
    """MindFormers' layers add their own tokens to a replicated parameter without a gradient, and sum over ranks later."""
    mesh, own = mesh_2d(), Tensor([world.rank + 1.0, 2.0])

    def made(placements, **kwargs):
        return Parameter(distribute_tensor(Tensor([5.0, 7.0]), mesh, placements), name="count", **kwargs)
    count, refused = made((R, R), requires_grad=False), (made((R, R)), made((R, S(0)), requires_grad=False))
    texts = [refusal(lambda: count.add_(own), MixedOperandError)]
    hp.register()
    try:
        with counted() as seen:
            count.add_(own)
            count.add_(Tensor([1, 0], ms.int32))
        texts += [refusal(lambda x=x: x.add_(own), MixedOperandError) for x in refused]
        count.add_(count)
    finally:
        hp.unregister()
    texts.append(refusal(lambda: count.add_(own), MixedOperandError))
    assert not seen and count.to_local().asnumpy().tolist() == [2 * (world.rank + 7), 18], (seen, count.to_local())
    for text in texts:
        assert "meets a DTensor" in text and "fix:" in text, text
        same_on_all_ranks(world, text)


def layouts_in_checkpoints(world):
    mesh = mesh_2d()
    net = shard_module(Net(), mesh, ShardingPlan(plan={"up": (S(1), S(0)), "down": (R, S(1))}))
    net.own = Parameter(data(1, 3), name="own")
    own = hp.get_current_layout(net)
    assert list(own) == [str(world.rank)] and own[str(world.rank)] == {
        "up": {"type": "Float32", "full_shape": (8, 12), "device_matrix": (2, 2), "alias_name": ("dp", "tp"),
               "rank_list": (0, 1, 2, 3), "tensor_map": (0, 1)},
        "down": {"type": "Float32", "full_shape": (12, 6), "device_matrix": (2, 2), "alias_name": ("dp", "tp"),
                 "rank_list": (0, 1, 2, 3), "tensor_map": (-1, 0)},
        "own": {"type": "Float32", "full_shape": (3,)}}
    with counted() as count:
        everybody = hp.get_global_layout(net)
    assert sorted(everybody) == ["0", "1", "2", "3"] and all(v == own[str(world.rank)] for v in everybody.values())
    assert count == {("all_gather_object", "forward"): 1}
