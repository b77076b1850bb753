# SPDX-License-Identifier: Apache-2.0
"""Real ranks: whole models, written as for one device, give one device's loss and gradients in every layout.

The models know nothing of us. What a case may do is what a user would: lay inputs and parameters out, or apply styles.
"""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

import ms_dtensor as md
from tests.models.gpt2 import GPT2
from tests.models.moe import MoE, Separate, Stacked
from tests.models.qwen2 import Qwen2
from tests.models.vit import UNet, ViT
from tests.support import array, data, each_once, mesh_1d, mesh_2d
from tests.tiers import sampled

R, S = md.Replicate(), md.Shard
RTOL = 1e-4  # float32 through two layers and back: some dozen sums of up to a few hundred terms, each in another order
FLOOR = 1e-3  # of the model's largest gradient: softmax ignores a key's bias, a norm a constant; theirs are rounding only


def filled(model, seed: int = 1):
    """Asymmetric weights by name; norms around one."""
    for i, (name, p) in enumerate(sorted(model.parameters_and_names())):
        noise = np.random.default_rng([seed, i]).normal(size=p.shape).astype(np.float32) * 0.3
        p.set_data(Tensor(noise + (name.endswith("gamma") or "norm" in name and name.endswith("weight"))))
        p.name = name
    return model


def compare(make, inputs, placed, mesh, transform, what: str, steps: int = 1) -> None:
    """Loss, every gradient and every buffer of a transformed copy against the model on one device.

    Args:
        make: () -> model whose output is the loss.
        inputs: global inputs.
        placed: how they are laid out.
        mesh: the mesh.
        transform: model -> None, makes its parameters DTensors.
        what: for messages.
        steps: how many times; nothing of one step may be left in the next.
    """
    plain, model = filled(make()), filled(make())

    def of_one():
        value, grads = ms.value_and_grad(lambda *a: plain(*a), None, plain.trainable_params())(*inputs)
        return value.item(), list(map(array, grads)), [array(p) for p in plain.get_parameters()]
    (want, want_grads, after), = each_once(of_one)
    transform(model)
    params = model.trainable_params()
    assert [p.name for p in params] == [p.name for p in plain.trainable_params()], what
    d_inputs = [md.distribute_tensor(t, mesh, placed, src_data_rank=None) for t in inputs]
    for step in range(steps):
        got, grads = md.value_and_grad(lambda *a: model(*a), None, params)(*d_inputs)
        assert abs(got.item() - want) <= RTOL * abs(want), (what, step, got.item(), want)
        largest = max(float(np.abs(w).max()) for w in want_grads)
        for p, g, b in zip(params, grads, want_grads):
            assert isinstance(g, md.DTensor) and g.layout is p.layout.gradient(), (what, p.name, g, p)
            a = array(g)
            off = float(np.abs(a - b).max()) / max(float(np.abs(b).max()), FLOOR * largest)
            assert a.shape == b.shape and off <= RTOL, f"{what}, step {step}: gradient of {p.name} is off by {off:.1e}"
    held = {p.name: p for p in model.get_parameters()}
    for p, w in zip(plain.get_parameters(), after, strict=True) if steps == 1 else ():  # running statistics
        assert p.requires_grad or np.allclose(array(held[p.name]), w, rtol=RTOL, atol=1e-6), (what, p.name)


def sharded(mesh, choose):
    """A transform: every parameter laid out by `choose(param)`, buffers replicated; ties are kept."""
    def transform(model):
        done = {}

        def partition(name, cell, mesh):
            for key, p in cell._params.items():
                if p is not None and not isinstance(p, md.DTensor):
                    if id(p) not in done:
                        done[id(p)] = Parameter(md.distribute_tensor(p, mesh, choose(p)), name=p.name,
                                                requires_grad=p.requires_grad), p
                    cell._params[key] = done[id(p)][0]
        md.distribute_module(model, mesh, partition)
    return transform


def last(p):
    """Shard of the last dim."""
    return S(p.ndim - 1)


def second(p):
    """Shard of dim 1, of dim 0 where there is no other."""
    return S(1) if p.ndim > 1 else S(0)


def everywhere(make, inputs, dims=(0,)) -> None:
    """A model in the layouts that need no thought about the model: batches and weights cut along any axis."""
    line, grid = mesh_1d(4, "dp"), mesh_2d()
    ways = []
    for cut in map(S, dims):
        ways += [([cut], line, lambda p: [R], f"replicated, inputs {cut}"),
                 ([cut, R], grid, lambda p: [R, S(0)], f"weights S(0) over tp, inputs {cut}")]
    ways += [([R], line, lambda p: [R], "all replicated"),
             ([R], line, lambda p: [last(p)], "weights cut along their last dim, inputs whole"),
             ([S(0)], line, lambda p: [S(0)], "weights and batch over the same axis"),
             ([R, S(0)], grid, lambda p: [second(p), R], "weights S(1) over dp, batch over tp"),
             ([S(0), S(0)], grid, lambda p: [S(0), second(p)], "weights over both axes"),
             ([S(0), R], grid, lambda p: [S(0), S(0)], "weights twice along dim 0")]
    for placed, mesh, cut_up, what in sampled(ways, 5):
        compare(make, inputs, placed, mesh, sharded(mesh, cut_up), what, steps=2 if what.startswith("replicated") else 1)


def ids(seed: int, *shape: int) -> Tensor:
    """Token ids below 17."""
    return Tensor(np.random.default_rng(seed).integers(0, 17, shape).astype(np.int32))


def styled(mesh, plan):
    """A transform: tensor parallel over tp by styles, data parallel over dp."""
    def transform(model):
        md.parallelize_module(model, mesh["tp"], plan)
        md.replicate(model, mesh=mesh["dp"])
    return transform


COLUMNS, ROWS = md.ColwiseParallel(use_local_output=False), md.RowwiseParallel(use_local_output=False)


def gpt2_in_any_layout(world):
    for batch in (4, 5):
        everywhere(lambda: GPT2(layers=1), (ids(1, batch, 6), ids(2, batch, 6)), (0, 1))


def gpt2_tensor_parallel(world):
    grid = mesh_2d()
    plan = {"wte": md.RowwiseParallel(input_layouts=R, use_local_output=False), "h.*.attn.c_attn": COLUMNS,
            "h.*.attn.c_proj": ROWS, "h.*.c_fc": COLUMNS, "h.*.c_proj": ROWS}
    for batch in sampled((4, 3), 2, 1):
        compare(GPT2, (ids(1, batch, 6), ids(2, batch, 6)), [S(0), R], grid, styled(grid, plan), f"styles, batch {batch}")


def qwen2_in_any_layout(world):
    labels = ids(2, 4, 6).asnumpy()
    labels[0, :5] = labels[2, 3] = -100  # unevenly over the batch
    with md.implicit_replication():  # its rotary tables and its mask are plain tensors
        everywhere(lambda: Qwen2(layers=1), (ids(1, 4, 6), Tensor(labels)), (0, 1))


def qwen2_tensor_parallel(world):
    grid = mesh_2d()
    plan = {"embed_tokens": md.RowwiseParallel(input_layouts=R, use_local_output=False),
            "layers.*.self_attn.[qkv]_proj": COLUMNS, "layers.*.self_attn.o_proj": ROWS,
            "layers.*.mlp.gate_proj": COLUMNS, "layers.*.mlp.up_proj": COLUMNS, "layers.*.mlp.down_proj": ROWS,
            "lm_head": md.ColwiseParallel(output_layouts=R, use_local_output=False)}
    with md.implicit_replication():
        compare(Qwen2, (ids(1, 4, 6), ids(2, 4, 6)), [S(0), R], grid, styled(grid, plan), "styles")


def mixture_of_experts_in_any_layout(world):
    for kind in (Separate, Stacked):
        everywhere(lambda k=kind: MoE(k, layers=1), (data(1, 4, 3, 8), data(2, 4, 3, 8)), (0, 1))


def experts_over_an_axis(world):
    grid = mesh_2d()
    inputs = data(1, 4, 3, 8), data(2, 4, 3, 8)
    for experts in sampled((4, 5), 2, 1):
        compare(lambda n=experts: MoE(Stacked, experts=n), inputs, [S(0), R], grid,
                sharded(grid, lambda p: [R, S(0) if p.ndim == 3 else R]), f"{experts} experts over tp")
    plan = {"blocks.*.experts.*.w[13]": COLUMNS, "blocks.*.experts.*.w2": ROWS}
    compare(MoE, inputs, [S(0), R], grid, styled(grid, plan), "each expert cut by styles")


def vit_in_any_layout(world):
    for pool, batch in (("cls", 4), ("mean", 5)):
        labels = Tensor(np.arange(batch, dtype=np.int32))
        everywhere(lambda p=pool: ViT(pool=p, layers=1), (data(1, batch, 3, 8, 8), labels))


def vit_tensor_parallel(world):
    grid = mesh_2d()
    plan = {"blocks.*.attn.qkv": COLUMNS, "blocks.*.attn.proj": ROWS, "blocks.*.mlp.0": COLUMNS, "blocks.*.mlp.2": ROWS}
    compare(ViT, (data(1, 4, 3, 8, 8), Tensor(np.arange(4, dtype=np.int32))), [S(0), R], grid, styled(grid, plan), "styles")


def unet_in_any_layout(world):
    everywhere(UNet, (data(1, 4, 3, 8, 6), data(2, 4, 2, 8, 6)))


def unet_with_batch_norm_in_any_layout(world):
    def make():
        return UNet(norm="batch", down="pool").set_train()
    everywhere(make, (data(1, 5, 3, 8, 6), data(2, 5, 2, 8, 6)))


def unet_with_the_image_or_the_channels_cut(world):
    line = mesh_1d(4)
    for d in sampled((1, 2, 3), 2):
        images = data(1, 2, 3, 8, 6), data(2, 2, 2, 8, 6)
        compare(UNet, images, [S(d)], line, sharded(line, lambda p: [R]), f"inputs S({d})")
