# SPDX-License-Identifier: Apache-2.0
"""Real ranks: styles, data parallelism and the parallel loss equal one device and communicate as Megatron does."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

import ms_dtensor as md
from model_zoo.llama.at_once import compile_products
from model_zoo.llama.config import ModelConfig, ParallelConfig
from model_zoo.llama.cpu import compile_attention
from model_zoo.llama.model import Llama, cross_entropy, init_weights
from model_zoo.llama.parallelize import parallelize
from ms_dtensor import ColwiseParallel, DTensor, RowwiseParallel, distribute_tensor, parallelize_module, value_and_grad
from ms_dtensor.errors import LayoutError
from tests.cases import case
from tests.operands import Built, R, S, data, mesh_1d, placed
from tests.support import counted, equal, equal_steps, refusal, same_on_all_ranks, trains_as_one_device
from tests.tiers import sampled


def fill(cell, seed: int = 1):
    """Deterministic asymmetric weights, by name."""
    for i, (name, p) in enumerate(sorted(cell.parameters_and_names())):
        p.set_data(Tensor(np.random.default_rng([seed, i]).normal(size=p.shape).astype(np.float32) * 0.3))
        p.name = name
    return cell


class Mlp(nn.Cell):
    def __init__(self, linear, width=12, hidden=20, bias=True):
        super().__init__()
        kind = {"nn": lambda a, b: nn.Dense(a, b, has_bias=bias), "mint": lambda a, b: mint.nn.Linear(a, b, bias=bias)}
        self.up, self.down = kind[linear](width, hidden), kind[linear](hidden, width)

    def construct(self, x):
        return self.down(mint.nn.functional.silu(self.up(x)))


def _compare(make, transform, x, dx, loss=lambda y: (y * y).mean()):
    """One device against a transformed copy; returns the communication of one step."""
    plain, other = make(), make()
    want = ms.value_and_grad(lambda t: loss(plain(t)), None, plain.trainable_params())(x)
    transform(other)
    params = other.trainable_params()
    assert [p.name for p in params] == [p.name for p in plain.trainable_params()]
    with counted() as count:
        got = value_and_grad(lambda t: loss(other(t)), None, params)(dx)
    equal_steps(got, want, params)
    return count


def colwise_then_rowwise_is_one_all_reduce(world, line):
    for kind in ("nn", "mint"):
        for bias in (True, False):
            for local in (True, False):
                plan = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel(use_local_output=False)}
                for hidden in (20, 18):  # 18 on 4 ranks: 5, 5, 5, 3
                    if local and hidden == 18:
                        continue  # plain local tensors do not know uneven widths; refused below
                    x = data(1, 3, 5, 12)
                    count = _compare(lambda h=hidden, k=kind, b=bias: fill(Mlp(k, hidden=h, bias=b)),
                                     lambda m, p=plan: parallelize_module(m, line, p), x, placed(x, line, R))
                    assert count[("all_reduce", "forward")] == 1, (kind, bias, local, hidden, count)


def vocabulary_parallel_embedding_masks_and_offsets(world, line):

    def make(kind, vocab=10):
        return fill(Built(lambda c, ids: c.emb(ids), emb={"nn": nn, "mint": mint.nn}[kind].Embedding(vocab, 6)))
    ids = Tensor(np.array([[0, 9, 3], [7, 5, 5]], np.int32))
    for kind, style in (("nn", RowwiseParallel), ("nn", ColwiseParallel), ("mint", RowwiseParallel)):
        if kind == "mint":  # no Embedding kernel on CPU for the one-device side: compare with the nn one
            other = make("mint")
            parallelize_module(other, line, {"emb": style(input_layouts=R, use_local_output=False)})
            table = other.emb.weight.full_tensor()
            equal(other(ids), ops.gather(table, ids, 0))
            continue
        count = _compare(lambda k=kind: make(k), lambda m, s=style: parallelize_module(
            m, line, {"emb": s(input_layouts=R, use_local_output=False)}), ids, placed(ids, line, R))
        assert count == ({("all_reduce", "forward"): 1} if style is RowwiseParallel else {}), count


def sequence_parallel_block_and_prepared_inputs(world, line):

    def make():
        return fill(Built(lambda c, x: x + c.mlp(c.norm(x)), norm=nn.LayerNorm((12,)), mlp=Mlp("mint")))
    x = data(2, 2, 8, 12)
    plan = {"norm": md.SequenceParallel(),
            "mlp": md.PrepareModuleInput(input_layouts=S(1), desired_input_layouts=R),
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(output_layouts=S(1), use_local_output=False)}
    count = _compare(make, lambda m: parallelize_module(m, line, plan), x, placed(x, line, S(1)))
    assert count[("all_gather", "forward")] == 1 and count[("reduce_scatter", "forward")] == 1, count
    assert count[("all_gather", "backward")] == 1 and count[("reduce_scatter", "backward")] == 1, count


def outputs_are_prepared(world, line):
    x = data(3, 8, 12)
    net = fill(Mlp("mint"))
    want = fill(Mlp("mint"))(x)
    parallelize_module(net, line, md.PrepareModuleInputOutput(
        input_layouts=S(0), desired_input_layouts=R, output_layouts=R, desired_output_layouts=S(0)))
    md.distribute_module(net, line)
    rows = slice(2 * world.rank, 2 * world.rank + 2)
    out = net(Tensor(x.asnumpy()[rows]))
    assert type(out) is Tensor
    equal(out, want.asnumpy()[rows])
    other = fill(Mlp("mint"))
    md.distribute_module(other, line)
    parallelize_module(other, line, md.PrepareModuleOutput(output_layouts=R, desired_output_layouts=S(1),
                                                        use_local_output=False))
    out = other(placed(x, line, R))
    assert out.placements == (S(1),)
    equal(out, want)


def replicate_equals_one_device_in_buckets_and_without(world):
    mesh = mesh_1d(4, "dp")
    x = data(4, 8, 12)
    share = Tensor(x.asnumpy()[2 * world.rank:2 * world.rank + 2])
    for bucket, reductions in ((25, 1), (0, 4), (0.001, 2)):
        count = _compare(lambda: fill(Mlp("nn")), lambda m, b=bucket: md.replicate(m, mesh=mesh, bucket_mb=b), x, share)
        told = {("all_gather_object", "forward"): 1}  # how many rows each rank has
        assert count == {**told, ("all_reduce", "backward"): reductions}, (bucket, count)

    def regularised(y):  # a use of the weights that no batch takes part in
        return (y * y).mean()
    net, plain = fill(Mlp("nn")), fill(Mlp("nn"))
    md.replicate(net, mesh=mesh)

    def loss(m, t):
        return regularised(m(t)) + (m.up.weight * m.up.weight).sum()
    want = ms.value_and_grad(lambda t: loss(plain, t), None, plain.trainable_params())(x)
    got = value_and_grad(lambda t: loss(net, t), None, net.trainable_params())(share)
    equal_steps(got, want, net.trainable_params())


class Fragile(_Function):
    """Identity; its backward raises while `broken`."""

    broken = False

    @staticmethod
    def forward(ctx, x):
        return x.view(x._shape)

    @staticmethod
    def backward(ctx, grad):
        if Fragile.broken:
            raise ZeroDivisionError("as asked")
        return grad


def a_backward_that_raised_leaves_nothing_in_a_bucket(world):
    mesh = mesh_1d(4, "dp")
    x = data(4, 8, 12)
    net, plain = fill(Mlp("nn")), fill(Mlp("nn"))
    md.replicate(net, mesh=mesh)
    fragile = md.local_map(Fragile.apply, out_placements=[S(0)], in_placements=([S(0)],))

    def whole(m, t, between):
        return (m.down(between(mint.nn.functional.silu(m.up(t)))) ** 2).mean()

    def head(m, t, between):  # does not reach the parameters that the failed backward reached
        return (mint.matmul(t, m.up.weight.T) ** 2).mean()
    rows = placed(x, mesh, S(0))
    for loss, params in ((whole, ""), (head, "up.weight"), (whole, "")):
        Fragile.broken = True
        with pytest.raises(ZeroDivisionError):
            value_and_grad(lambda: whole(net, rows, fragile), None, net.trainable_params())()
        Fragile.broken = False
        mine, theirs = ([p for p in m.trainable_params() if params in p.name] for m in (net, plain))
        want = ms.value_and_grad(lambda: loss(plain, x, lambda t: t), None, theirs)()
        got = value_and_grad(lambda: loss(net, rows, fragile), None, mine)()
        equal_steps(got, want, mine)


def distribute_module_replicates_what_is_left(world, grid):
    net = fill(Mlp("nn"), seed=world.rank)
    seen, asked = [], []

    def partition(name, cell, mesh):
        asked.append(name)
        if name == "up":
            weight = cell._params["weight"]
            cell._params["weight"] = Parameter(distribute_tensor(weight, mesh, [R, S(0)]), name=weight.name)
    md.distribute_module(net, grid, partition, lambda cell, inputs, mesh: (distribute_tensor(inputs[0], mesh),),
                      lambda cell, outputs, mesh: seen.append(outputs.layout) or outputs.full_tensor())
    x = data(5, 4, 12)
    out = net(x)
    assert asked == [name for name, _ in net.cells_and_names()]
    assert type(out) is Tensor and seen and net.up.weight.placements == (R, S(0))
    equal(out, fill(Mlp("nn"), seed=0)(x))
    assert all(isinstance(p, DTensor) for p in net.get_parameters())


TINY = ModelConfig(dim=16, n_layers=1, n_heads=8, n_kv_heads=4, ffn_dim=24, vocab_size=19)


def one_block_communicates_as_megatron_says(world):
    mesh = md.init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    per_block = {}
    for sequence in (True, False):
        counts = []
        for layers in (1, 2):
            cfg = ModelConfig(**{**{k: getattr(TINY, k) for k in TINY.__dataclass_fields__}, "n_layers": layers})
            model = Llama(cfg)
            init_weights(model, 3)
            parallelize(model, mesh, ParallelConfig(dp=1, tp=4, sequence_parallel=sequence))
            ids = DTensor.from_local(Tensor(np.arange(16).reshape(2, 8) % 19, ms.int32), mesh, [S(0), R])
            step = ms.value_and_grad(lambda i, m=model: (m(i) ** 2).mean(), None, model.trainable_params())
            with counted() as count:
                step(ids)
            counts.append(count)
        counts[1].subtract(counts[0])
        per_block[sequence] = {k: v for k, v in counts[1].items() if v}
    assert per_block[False] == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}, per_block[False]
    assert per_block[True] == {("all_gather", "forward"): 2, ("reduce_scatter", "forward"): 2,
                               ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 2,
                               ("all_reduce", "backward"): 2}, per_block[True]  # the two norm weights


def a_llama_on_two_axes_equals_one_device(world, grid):
    for tied, sequence, parallel_loss, compiled in sampled(((False, True, True, True), (True, False, False, False)), 2, 1):
        cfg = ModelConfig(**{**{k: getattr(TINY, k) for k in TINY.__dataclass_fields__}, "tied_head": tied})
        ids = np.random.default_rng(1).integers(0, 19, (4, 9)).astype(np.int32)
        plain, model = Llama(cfg), Llama(cfg)
        for m in (plain, model):
            init_weights(m, 5)
        if compiled:
            compile_attention(model, cfg)
        want = ms.value_and_grad(lambda i, y, m=plain: cross_entropy(m(i), y), None, plain.trainable_params())(
            Tensor(ids[:, :-1]), Tensor(ids[:, 1:]))
        parallelize(model, grid, ParallelConfig(dp=2, tp=2, sequence_parallel=sequence, loss_parallel=parallel_loss))
        mine = ids[2 * grid.get_local_rank("dp"):][:2]
        di, dy = (DTensor.from_local(Tensor(np.ascontiguousarray(a)), grid, [S(0), R]) for a in (mine[:, :-1], mine[:, 1:]))

        def loss(i, y, m=model, p=parallel_loss):
            logits = m(i)
            return md.loss_parallel(logits, y.reshape(-1)) if p else cross_entropy(logits, y)
        for _ in range(2):
            got = value_and_grad(loss, None, model.trainable_params())(di, dy)
            equal_steps(got, want, model.trainable_params())


@case(world_size=2, timeout=120)
def a_llama_with_products_at_once_equals_one_device(world):
    mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    ids = np.random.default_rng(1).integers(0, 19, (4, 9)).astype(np.int32)
    plain = Llama(TINY)
    init_weights(plain, 5)
    want = ms.value_and_grad(lambda i, y: cross_entropy(plain(i), y), None, plain.trainable_params())(
        Tensor(ids[:, :-1]), Tensor(ids[:, 1:]))
    mine = ids[2 * mesh.get_local_rank("dp"):][:2]
    di, dy = (DTensor.from_local(Tensor(np.ascontiguousarray(a)), mesh, [S(0), R]) for a in (mine[:, :-1], mine[:, 1:]))
    for sequence, fsdp in ((False, False), (True, False), (False, True), (True, True)):
        counts = []
        for compiled in (False, True):
            model = Llama(TINY)
            init_weights(model, 5)
            if compiled:
                compile_attention(model, TINY)
                compile_products(model)
            parallelize(model, mesh, ParallelConfig(dp=2, sequence_parallel=sequence, fsdp=fsdp))
            run = value_and_grad(lambda i, y, m=model: cross_entropy(m(i), y), None, model.trainable_params())
            run(di, dy)
            with counted() as count:
                got = run(di, dy)
            equal_steps(got, want, model.trainable_params())
            counts.append(dict(count))
        assert counts[0] == counts[1], (sequence, fsdp, counts)


def replicate_takes_unlike_rows_of_any_rank(world):
    for rows in (7, 5, 3, 1):  # nn.Dense makes a matrix of a batch of 3 dims, whose rows lie otherwise
        x = data(rows, rows, 5, 6)
        mine = placed(x, mesh_1d(4, "dp"), S(0)).to_local()
        for styled in (False, True):
            mesh = md.init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
            net, plain = fill(nn.Dense(6, 8)), fill(nn.Dense(6, 8))
            if styled:  # the style's own hook takes the plain rows first
                parallelize_module(net, mesh["tp"], ColwiseParallel(use_local_output=False))
            md.replicate(net, mesh=mesh["dp"])
            trains_as_one_device(net, plain, x, mine)


def styles_take_unlike_plain_shards(world, line):
    for length in (7, 5, 2):
        x = data(length, 2, length, 6)
        local = placed(x, line, S(1)).to_local()
        net, plain = nn.LayerNorm((6,)), nn.LayerNorm((6,))
        md.SequenceParallel(use_local_output=False).apply(net, line)
        trains_as_one_device(net, plain, x, local)
        with counted({}):  # the ranks know what each holds
            net(local)
    odd, other = Tensor(x.asnumpy()[:, :1 + world.rank]), nn.LayerNorm((6,))
    md.SequenceParallel().apply(other, line)
    text = same_on_all_ranks(world, refusal(lambda: other(odd), LayoutError))
    assert "rank 3 holds [2, 2, 6]" in text, text
