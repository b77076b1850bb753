# SPDX-License-Identifier: Apache-2.0
"""mindcv 0.3.0, unedited, on two real ranks against one device: models, optimizers, its trainer."""
from importlib import import_module

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor.debug import checks
from tests.cases import case
from tests.support import array, counted

# Of the largest element; of a gradient that is zero but for rounding (a bias before a norm), of a thousandth of the largest
# gradient. Batch statistics of 4 images in float32 are what is least exact.
GRADIENTS, PARAMETERS = 5e-4, 5e-5
IMAGES, LABELS = np.random.default_rng(5).normal(size=(4, 3, 32, 32)).astype(np.float32), np.array([0, 3, 1, 4], np.int32)
MODELS = {
    "vit": ("VisionTransformer", dict(image_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4)),
    "mlpmixer": ("MLPMixer", dict(depth=2, patch_size=8, n_patches=16, n_channels=12, token_dim=8, channel_dim=16)),
    "convnext": ("ConvNeXt", dict(in_channels=3, depths=[1, 1, 2, 1], dims=[8, 12, 16, 20])),
    "swintransformer": ("SwinTransformer", dict(image_size=32, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 4],
                                                window_size=4, drop_path_rate=0.)),
    "poolformer": ("PoolFormer", dict(layers=[1, 1, 1, 1], embed_dims=(8, 12, 16, 20), mlp_ratios=(2, 2, 2, 2),
                                      downsamples=(True, True, True, True))),
    "resnet": ("resnet18", {}),
    "mobilenetv3": ("mobilenet_v3_small_075", {}),
    "efficientnet": ("EfficientNet", dict(arch="efficientnet_b0", dropout_rate=0., width_mult=0.25, depth_mult=0.25,
                                          drop_path_prob=0.)),
    "crossvit": ("VisionTransformer", dict(img_size=[32, 24], patch_size=[8, 6], embed_dim=[16, 24], depth=[[1, 2, 0]],
                                           num_heads=[2, 4], mlp_ratio=[2, 2, 1], qkv_bias=True)),
}


def made(name: str) -> nn.Cell:
    make, arguments = MODELS[name]
    net = getattr(import_module(f"mindcv.models.{name}"), make)(num_classes=5, **arguments)
    for i, p in enumerate(net.trainable_params()):
        draw = np.random.default_rng(i).normal(size=p.shape) * 0.1
        p.set_data(Tensor((draw + p.name.endswith("gamma")).astype(np.float32)))
    for _, cell in net.cells_and_names():
        if isinstance(cell, nn.Dropout):
            cell.p = 0.0
    return net.set_train()


def blocks(net) -> list[nn.Cell]:
    """The cells of which one is called after the other."""
    inside = [b for c in net.cells() for b in (blocks(c) if isinstance(c, nn.CellList) else [c])]
    return [b for b in inside if list(b.get_parameters())]


def spread(net: nn.Cell, how: str) -> tuple[nn.Cell, nn.Cell, list[Tensor]]:
    """The model and its loss over two ranks, and this rank's rows."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if how in ("fsdp", "recompute"):
        for cell in blocks(net):
            if how == "recompute":
                md.checkpoint_wrapper(cell)
            md.fully_shard(cell, mesh=mesh)
        md.fully_shard(net, mesh=mesh)
    else:
        md.replicate(net, mesh=mesh, zero1=how == "zero1")
    md.parallelize_module(net, mesh, constants="replicate")
    mine = slice(2 * mesh.get_rank(), 2 * mesh.get_rank() + 2)
    return net, md.replicate(nn.CrossEntropyLoss(), mesh=mesh), [Tensor(IMAGES[mine]), Tensor(LABELS[mine])]


def step(net, loss_fn, batch):
    return ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, net.trainable_params())(*batch)


def compare(got, wanted, what, close) -> None:
    got, wanted = list(got), list(wanted)
    largest = max(np.abs(array(w)).max() for w in wanted)
    for g, w in zip(got, wanted, strict=True):
        g, w = array(g), array(w)
        off = np.abs(g - w).max() / max(np.abs(w).max(), 1e-3 * largest)
        assert off <= close, (what, off)


def _model(name: str):
    def run(world):
        plain = made(name)
        optimizer = nn.Momentum(plain.trainable_params(), 1e-3, 0.9)
        loss, wanted = step(plain, nn.CrossEntropyLoss(), [Tensor(IMAGES), Tensor(LABELS)])
        optimizer(wanted)
        for how in ("dp", "fsdp", "recompute", "zero1"):
            net, loss_fn, batch = spread(made(name), how)
            with checks(how == "dp"):
                got_loss, got = step(net, loss_fn, batch)
            compare([got_loss], [loss], how, 1e-5)
            compare(got, wanted, how, GRADIENTS)
            nn.Momentum(net.trainable_params(), 1e-3, 0.9)(got)
            compare(net.get_parameters(), plain.get_parameters(), how, PARAMETERS)
    return case(world_size=2, timeout=900)(run)


for _name in MODELS:
    vars()[_name] = _model(_name)
    vars()[_name].__module__ = __name__


def vit_on_two_ranks(qkv, moves: int) -> None:
    """Tensor parallel, its fused projection in the given style: Megatron's two sums a block, and so many all-to-alls."""
    plain, net = made("vit"), made("vit")
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    columns, rows = md.ColwiseParallel(use_local_output=False), md.RowwiseParallel(use_local_output=False)
    md.parallelize_module(net, mesh, {"blocks.*.attn.qkv": qkv, "blocks.*.attn.proj": rows, "blocks.*.mlp.fc1": columns,
                                      "blocks.*.mlp.fc2": rows}, constants="replicate")
    md.distribute_module(net, mesh)
    whole = [Tensor(IMAGES), Tensor(LABELS)]
    _, wanted = step(plain, nn.CrossEntropyLoss(), whole)
    laid = [md.distribute_tensor(x, mesh) for x in whole]
    with counted() as count:
        _, got = step(net, nn.CrossEntropyLoss(), laid)
    compare(got, wanted, "tp", GRADIENTS)
    count.update({("all_to_all", phase): 0 for phase in ("forward", "backward")})
    assert count == {("all_to_all", "forward"): moves, ("all_to_all", "backward"): moves, ("all_reduce", "forward"): 4,
                     ("all_reduce", "backward"): 8}, count


@case(world_size=2, timeout=900)
def vit_with_heads_on_two_ranks(world):
    vit_on_two_ranks(md.ColwiseParallel(use_local_output=False), moves=4)


@case(world_size=2, timeout=900)
def vit_with_its_fused_projection_cut_by_head(world):
    vit_on_two_ranks(md.FusedColwiseParallel((24, 24, 24), units=4, use_local_output=False, split_output=False), moves=0)


@case(world_size=2, timeout=900)
def its_optimizers(world):
    from mindcv.optim.adamw import AdamW
    from mindcv.optim.adan import Adan
    from mindcv.optim.lion import Lion
    from mindcv.optim.nadam import NAdam
    made_by = {
        "adamw": lambda ps: AdamW(ps, 1e-2, weight_decay=0.1), "adamw, clipped": lambda ps: AdamW(ps, 1e-2, clip=True),
        "adamw, groups, scheduled": lambda ps: AdamW([{"params": ps[:9], "weight_decay": 0.1}, {"params": ps[9:]}],
                                                     nn.CosineDecayLR(1e-4, 1e-2, 10)),
        "lion": lambda ps: Lion(ps, 1e-3, weight_decay=0.1), "adan": lambda ps: Adan(ps, 1e-2),
        "nadam": lambda ps: NAdam(ps, 1e-2)}
    values = [[Tensor(np.random.default_rng(100 * k + i).normal(size=p.shape).astype(np.float32))
               for i, p in enumerate(made("vit").trainable_params())] for k in range(3)]
    for what, make in made_by.items():
        plain = made("vit")
        optimizer = make(plain.trainable_params())
        for grads in values:
            optimizer(tuple(grads))
        for how in ("dp", "fsdp"):
            net, _, _ = spread(made("vit"), how)
            optimizer = make(net.trainable_params())
            for grads in values:
                laid = tuple(md.distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
                             for g, p in zip(grads, net.trainable_params(), strict=True))
                with counted() as count:
                    optimizer(laid)
                assert how == "fsdp" or not count, (what, how, count)
            compare(net.trainable_params(), plain.trainable_params(), (what, how), 1e-5)


@case(world_size=2, timeout=900)
def its_trainer(world):
    """`Model.fit` of its own training step: EMA, clipping, a schedule."""
    from mindcv.scheduler import create_scheduler
    from mindcv.utils.trainer_factory import create_trainer

    def fit(net, loss_fn, images, labels):
        rates = create_scheduler(2, scheduler="cosine_decay", lr=1e-2, min_lr=1e-4, warmup_epochs=1, decay_epochs=2,
                                 num_epochs=3)
        optimizer = nn.Momentum(net.trainable_params(), rates, 0.9)
        model = create_trainer(net, loss_fn, optimizer, {"loss"}, "O0", None, "fixed", ema=True, clip_grad=True,
                               clip_value=0.5)
        data = ms.dataset.NumpySlicesDataset((images, labels), ["image", "label"], shuffle=False).batch(len(images) // 2)
        model.fit(3, data, data, dataset_sink_mode=False, callbacks=[])
        return [*net.get_parameters(), *model.train_network.ema_weight]
    plain = made("vit")
    wanted = fit(plain, nn.CrossEntropyLoss(), IMAGES, LABELS)
    for how in ("dp", "fsdp"):
        net, loss_fn, _ = spread(made("vit"), how)
        mine = [2 * k + world.rank for k in range(2)]  # this rank's rows of each batch
        compare(fit(net, loss_fn, IMAGES[mine], LABELS[mine]), wanted, how, 1e-5)
