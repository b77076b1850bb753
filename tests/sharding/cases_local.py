# SPDX-License-Identifier: Apache-2.0
"""`fully_shard(..., local_inputs=True)`: cells of local tensors with collectives of their own, against one device."""
from __future__ import annotations

import itertools
from collections import Counter

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common._grad_function import _Function

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, checkpoint_wrapper, distribute_tensor, fully_shard, init_device_mesh, value_and_grad
from ms_dtensor.errors import ConfigError, LayoutError, MixedOperandError, OpRuleError
from tests.cases import case
from tests.operands import filled
from tests.rehearsal.session import rehearsed
from tests.support import counted, each, equal, refusal
from tests.tiers import sampled

ROWS = np.random.default_rng(3).normal(size=(8, 6)).astype(np.float32)
LABELS = np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32)
STEPS = 2  # of one program: the first plans, the second is what it costs


class Summed(_Function):
    """A user's own collective: a sum over ranks, whose gradients are summed, too, as each rank has a loss of its own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return group.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, grad):
        return ctx.group.all_reduce(grad.contiguous(), "sum"), None


def local(p, said=None):
    return p.to_local(grad_placements=said) if isinstance(p, md.DTensor) else p


class Block(nn.Cell):
    """A norm's weight, replicated; a product cut by columns and one cut by rows, and the sum of its parts."""

    said: list | None = None  # how the cotangent of the norm's weight lies

    def __init__(self, d: int, h: int, group=None) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.zeros(d, np.float32)), name="scale")
        self.up = Parameter(Tensor(np.zeros((h, d), np.float32)), name="up")
        self.down = Parameter(Tensor(np.zeros((d, h), np.float32)), name="down")
        self.group = group

    def construct(self, x):
        y = x * local(self.scale, self.said)
        y = mint.matmul(mint.tanh(mint.matmul(y, local(self.up).t())), local(self.down).t())
        return x + (y if self.group is None else Summed.apply(y, self.group))


class Net(nn.Cell):
    def __init__(self, group=None) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block(6, 8, group) for _ in range(2)])
        self.head = Parameter(Tensor(np.zeros((3, 6), np.float32)), name="head")
        filled(self)

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return mint.matmul(x, local(self.head).t())


def laid_out(mesh) -> Net:
    """The model as tensor-parallel code of local tensors has it: parameters are DTensors on tp, where there is one."""
    if "tp" not in mesh.mesh_dim_names:
        return Net()
    tp = mesh["tp"]
    net = Net(tp.get_group())
    for cell, key, where in [(b, k, w) for b in net.blocks for k, w in (("scale", Replicate()), ("up", Shard(0)),
                                                                        ("down", Shard(1)))] + [(net, "head", Replicate())]:
        p = cell._params[key]
        cell._params[key] = Parameter(distribute_tensor(p, tp, [where]), name=p.name)
    return net


def loss_on(net, x, y):
    return ((net(x) - y) ** 2).mean()


def reference(rows=ROWS, labels=LABELS):
    net = Net()
    return ms.value_and_grad(lambda: loss_on(net, Tensor(rows), Tensor(labels)), None, net.trainable_params())()


def _meshes(world) -> dict:
    if world.size == 2:
        return {"dp2": init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
                "tp2": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))}
    return {"dp2 tp2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
            "copies": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "dp"))}


def data_of(mesh):
    return mesh["copy", "dp"] if "copy" in mesh.mesh_dim_names else mesh["dp"]


def wrapped(mesh, each=lambda cell: {}, **how):
    net = laid_out(mesh)
    for cell in (*net.blocks, net):
        fully_shard(cell, mesh=data_of(mesh), local_inputs=True, **each(cell), **how)
    return net


def mine(mesh, rows=ROWS, labels=LABELS):
    data = data_of(mesh)
    at, n = data.get_group().rank_index, data.size()
    return Tensor(np.split(rows, n)[at]), Tensor(np.split(labels, n)[at])


def part_of_loss(mesh) -> float:
    """All tensor-parallel ranks compute one loss: each begins with its part."""
    return 1 / (mesh.size() // data_of(mesh).size())


def expected(mesh, reshards: bool = True) -> Counter:
    """What a step communicates: units of one collective each, and of replicated parameters one more over tp."""
    data, tp = data_of(mesh), "tp" in mesh.mesh_dim_names
    count: Counter = Counter()
    if data.size() > 1:
        count += Counter({("all_gather", "forward"): 3, ("reduce_scatter", "backward"): 3})
        if reshards:
            count += Counter({("all_gather", "backward"): 2})
    if "copy" in mesh.mesh_dim_names:
        count += Counter({("all_reduce", "backward"): 3})
    if tp:  # the blocks' own sums, which do not say in which direction they are; norms' weights and the head are summed
        count += Counter({("all_reduce", "forward"): 2 + 2, ("all_reduce", "backward"): 3})
    return count


def check_grads(net, grads, want, what: str, rtol: float = 2e-5) -> None:
    for p, g, w in zip(net.trainable_params(), grads, want, strict=True):
        assert isinstance(g, md.DTensor) and g.layout.placements == p.layout.placements, (what, p, g)
        equal(g, w, f"{what}: {p.name}", rtol)


@case((2, 4), timeout=240)
def local_cells_have_the_gradients_of_one_device(world):
    loss, want = reference()
    ways = {"cut": {}, "kept till the backward": {"reshard_after_forward": False},
            "by dim 1": {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 else None}}

    @each((*on, way) for on in _meshes(world).items() for way in sampled(ways, 2))
    def both(_, mesh, way):
        how = ways[way]
        net, (x, y) = wrapped(mesh, **how), mine(mesh)
        params = list(net.trainable_params())
        assert [type(p).__name__ for p in params] == ["DTensorParameter"] * 7
        step = value_and_grad(lambda: loss_on(net, x, y) * part_of_loss(mesh), None, params)
        for _ in range(STEPS):
            with counted() as count:
                got = step()
        assert count == expected(mesh, "reshard_after_forward" not in how), count
        assert type(got[0]) is Tensor
        total = data_of(mesh).get_group().all_reduce(got[0].reshape((1,)), "avg") / part_of_loss(mesh)
        equal(total, loss.reshape((1,)), "loss")
        check_grads(net, got[1], want, "gradient")
        with counted() as again, md.recorded(net):
            md.backward(loss_on(net, x, y), gradient=Tensor(part_of_loss(mesh), ms.float32))
        assert again == count, again
        for p, g in zip(params, got[1]):
            assert p.grad.to_local().asnumpy().tobytes() == g.to_local().asnumpy().tobytes(), p.name
        net.zero_grad()
        assert all(p.grad is None for p in params)
        net.set_reduce_op_type("sum")
        check_grads(net, step()[1], [w * data_of(mesh).size() for w in want], "sum")


@case(2)
def local_cells_on_emulated_devices_have_the_same_gradients(world):
    """Averages are scaled where they lie, and sums are not."""
    _, want = reference()
    with rehearsed(clock=False):
        mesh = init_device_mesh("npu", (2,), mesh_dim_names=("dp",))
        for how in ({}, {"reshard_after_forward": False}):
            net, (x, y) = wrapped(mesh, **how), mine(mesh)
            step = value_and_grad(lambda net=net, x=x, y=y: loss_on(net, x, y), None, net.trainable_params())
            for _ in range(STEPS):
                got = step()
            check_grads(net, got[1], want, f"average {how}", 1e-4)
            net.set_reduce_op_type("sum")
            check_grads(net, step()[1], [w * 2 for w in want], f"sum {how}", 1e-4)


@case((2, 4), timeout=240)
def local_cells_keep_parameters_whole_where_they_are_told_to(world):
    _, want = reference()

    def whole(cell):
        return {"replicate_params": [p for _, p in cell.parameters_and_names() if p.name in ("scale", "head")
                                     or p.name.endswith((".scale", ".up"))]}

    @each(_meshes(world).items())
    def check(_, mesh):
        net, (x, y) = wrapped(mesh, whole), mine(mesh)
        scale = net.blocks[0].scale
        assert all(p.is_replicate() for p in scale.placements), scale

        def stepped(what: str) -> None:
            params = list(net.trainable_params())
            grads = value_and_grad(lambda: loss_on(net, x, y) * part_of_loss(mesh), None, params)()[1]
            check_grads(net, grads, [w for w, p in zip(want, net.get_parameters()) if p.requires_grad], what)
        stepped("kept")
        for block in net.blocks if "tp" in mesh.mesh_dim_names else ():
            block.said = [md.Partial()]
        with counted() as count:
            stepped("said")
        assert count["all_reduce", "backward"], count
        for cell in net.blocks:
            checkpoint_wrapper(cell)
        stepped("recompute")
        net.blocks[0].up.requires_grad = False
        stepped("frozen")
        assert type(net(x)) is Tensor, "without a gradient"


CUT_OR_KEPT = {"cut": lambda cell: {}, "kept": lambda cell: {"replicate_params": cell.get_parameters()}}


@case((2, 4), timeout=240)
def main_gradients_add_up_micro_batches_in_float32(world):
    policy = md.MixedPrecisionPolicy(reduce_dtype=ms.float32, apply_grad_on_fp32_main_grad=True)
    want = [sum(parts) for parts in zip(*(reference(ROWS[i::2], LABELS[i::2])[1] for i in range(2)))]

    @each(itertools.product(_meshes(world).values(), CUT_OR_KEPT))
    def check(mesh, way):
        net = wrapped(mesh, CUT_OR_KEPT[way], mp_policy=policy)
        params = list(net.trainable_params())
        for _ in range(2):  # steps
            for i in range(2):
                x, y = mine(mesh, ROWS[i::2], LABELS[i::2])
                net.set_requires_all_reduce(i == 1)
                with md.recorded(net):
                    md.backward(loss_on(net, x, y), gradient=Tensor(part_of_loss(mesh), ms.float32))
            assert all(getattr(p, "grad", None) is None and p.main_grad.dtype == ms.float32 for p in params)
            check_grads(net, [p.main_grad for p in params], want, "sums")
            net.zero_grad()
        x, y = mine(mesh, ROWS[::2], LABELS[::2])
        grads = value_and_grad(lambda: loss_on(net, x, y) * part_of_loss(mesh), None, params)()[1]
        assert all(not g.to_local().asnumpy().any() for g in grads), "they are in main_grad"
        check_grads(net, [p.main_grad for p in params], reference(ROWS[::2], LABELS[::2])[1], "value_and_grad")


def half_of_the_rows(net, rank: int):
    """The gradients of one rank's loss, on one device."""
    x, y = (Tensor(np.split(v, 2)[rank]).astype(ms.float16) for v in (ROWS, LABELS))
    return ms.value_and_grad(lambda: loss_on(net, x, y).astype(ms.float32), None, net.trainable_params())()[1]


@case(2)
def a_low_precision_computation_is_summed_in_float32(world):
    """Float16 in the cells, float32 between the ranks: sums of float16 numbers to more digits than float16 has."""
    mesh = _meshes(world)["dp2"]
    policy = md.MixedPrecisionPolicy(param_dtype=ms.float16, reduce_dtype=ms.float32, apply_grad_on_fp32_main_grad=True)
    half = Net()
    for p in half.get_parameters():
        p.set_dtype(ms.float16)
    parts = [half_of_the_rows(half, r) for r in range(2)]
    for how in CUT_OR_KEPT.values():
        net = wrapped(mesh, how, mp_policy=policy)
        x, y = mine(mesh)
        with md.recorded(net):
            md.backward(loss_on(net, x, y.astype(ms.float16)).astype(ms.float32))
        for p, a, b in zip(net.trainable_params(), *parts):
            equal(p.main_grad, (a.asnumpy().astype(np.float32) + b.asnumpy().astype(np.float32)) / 2, p.name, 1e-6)


@case(2)
def what_local_cells_cannot_do_is_refused_in_four_parts(world):
    mesh = _meshes(world)["dp2"]
    net, (x, y) = wrapped(mesh), mine(mesh)
    text = refusal(lambda: net(distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)), MixedOperandError)
    assert "a DTensor is among the inputs of Net" in text and "x.to_local()" in text and "f32[4@dp, 6]" in text, text
    assert "the other mode" in refusal(lambda: fully_shard(wrapped_inside(mesh), mesh=mesh), ConfigError)
    assert "set_reduce_op_type" in refusal(lambda: net.set_reduce_op_type("max"), ConfigError)
    assert "DTensors" in refusal(lambda: fully_shard(Net(), mesh=mesh).set_reduce_op_type("sum"), ConfigError)
    bare = Net()
    with counted() as count:
        text = refusal(lambda: fully_shard(bare.blocks[0], mesh=mesh, local_inputs=True,
                                           replicate_params=[bare.blocks[0].scale, bare.head]), ConfigError)
    assert "head; Block has blocks.0." in text and "their own cell" in text and "blocks.0.scale; " not in text, text
    assert not count and not isinstance(bare.blocks[0].up, md.DTensor), "nothing was laid out"
    tied = Net()
    tied._params["more"] = tied.blocks[0].up
    fully_shard(tied.blocks[0], mesh=mesh, local_inputs=True)
    assert "is of a unit already" in refusal(lambda: fully_shard(tied, mesh=mesh, local_inputs=True), LayoutError)
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    kept = laid_out(both)
    kept.blocks[0].__class__ = type("Forgets", (Block,), {"construct": lambda self, x: x * self.scale})
    fully_shard(kept.blocks[0], mesh=both["dp"], local_inputs=True)
    assert "parameter.to_local()" in refusal(lambda: kept.blocks[0](Tensor(ROWS)), OpRuleError)
    styled = nn.SequentialCell(nn.Dense(6, 4))
    md.parallelize_module(styled[0], both["tp"], md.ColwiseParallel())
    fully_shard(styled, mesh=both["dp"], local_inputs=True)
    assert "collectives in the cell" in refusal(lambda: styled(Tensor(ROWS)), LayoutError)
    step = value_and_grad(lambda: loss_on(net, x, y), None, net.trainable_params())
    check_grads(net, step()[1], reference()[1], "after refusals")


def wrapped_inside(mesh):
    net = Net()
    fully_shard(net.blocks[0], mesh=mesh, local_inputs=True)
    return net


class WithExperts(nn.Cell):
    """A net whose middle is an expert's: of two, the one that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.blocks[1] = self.experts = Experts()

    def construct(self, x):
        return self.net(x)


class Experts(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.both = Parameter(Tensor(np.random.default_rng(8).normal(0.3, 0.4, (12, 6)).astype(np.float32)), name="both")
        self.which: int | None = None  # on one device

    def construct(self, x):
        w = local(self.both)
        return x + mint.tanh(mint.matmul(x, (w if self.which is None else w[6 * self.which:6 * self.which + 6]).t()))


@case((2, 4), timeout=120)
def experts_lie_across_the_axes_of_the_rest(world):
    """Experts over ranks that cut the other parameters, too: each is summed over the ranks that have it."""
    line = init_device_mesh("cpu", (world.size,), mesh_dim_names=("world",))
    dense, sparse = line.unflatten(0, (world.size, 1), ("dp", "tp")), line.unflatten(0, (world.size // 2, 2), ("edp", "ep"))
    plain = WithExperts()

    def whole():
        losses = []
        for r, (x, y) in enumerate(zip(np.split(ROWS, world.size), np.split(LABELS, world.size))):
            plain.experts.which = r % 2
            losses.append(loss_on(plain, Tensor(x), Tensor(y)))
        return sum(losses[1:], losses[0]) / world.size
    want = ms.value_and_grad(whole, None, plain.trainable_params())()[1]
    net = WithExperts()
    both = net.experts.both
    net.experts._params["both"] = Parameter(distribute_tensor(both, sparse["ep"], [Shard(0)]), name=both.name)
    for cell, mesh in ((net.experts, sparse["edp"]), (net.net.blocks[0], dense["dp"]), (net, dense["dp"])):
        fully_shard(cell, mesh=mesh, local_inputs=True).set_reduce_op_type("sum")
    assert net.experts.both.device_mesh.mesh_dim_names == ("edp", "ep") and net.experts.both.to_local().shape == (
        12 // world.size, 6)
    x, y = (Tensor(np.split(a, world.size)[world.rank]) for a in (ROWS, LABELS))
    step = value_and_grad(lambda: loss_on(net, x, y) / world.size, None, net.trainable_params())
    for _ in range(STEPS):
        with counted() as count:
            grads = step()[1]
        check_grads(net, grads, want, "experts")
    own = world.size > 2  # copies of an expert, which are cut as well
    assert count == Counter({("all_gather", "forward"): 2 + own, ("all_gather", "backward"): 1 + own,
                             ("reduce_scatter", "backward"): 2 + own}), count
    other = WithExperts()
    other.experts._params["both"] = Parameter(distribute_tensor(both, sparse["ep"], [Shard(0)]), name=both.name)
    assert "no common root" in refusal(lambda: fully_shard(other, mesh=dense["dp"], local_inputs=True), LayoutError)
