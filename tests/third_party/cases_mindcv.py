# SPDX-License-Identifier: Apache-2.0
"""Models of mindcv, as they are in the package, on two real ranks against one device."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindcv.models import convnext, crossvit, efficientnet, mlpmixer, mobilenetv3, poolformer, resnet, swintransformer, vit
from mindspore import Tensor, nn

import ms_dtensor as md
from tests.cases import case
from tests.dist.support import equal

GRADIENTS, PARAMETERS = 2e-4, 1e-6  # deep nets in float32, and batch statistics
MODELS = {
    "vit": lambda: vit.VisionTransformer(image_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4, num_classes=5),
    "mixer": lambda: mlpmixer.MLPMixer(depth=2, patch_size=8, n_patches=16, n_channels=12, token_dim=8, channel_dim=16,
                                       num_classes=5),
    "convnext": lambda: convnext.ConvNeXt(3, 5, depths=[1, 1, 2, 1], dims=[8, 12, 16, 20]),
    "swin": lambda: swintransformer.SwinTransformer(image_size=32, patch_size=2, num_classes=5, embed_dim=12, depths=[2, 2],
                                                    num_heads=[2, 4], window_size=4, drop_path_rate=0.),
    "poolformer": lambda: poolformer.PoolFormer([1, 1, 1, 1], embed_dims=(8, 12, 16, 20), mlp_ratios=(2, 2, 2, 2),
                                                downsamples=(True, True, True, True), num_classes=5),
    "resnet18": lambda: resnet.resnet18(num_classes=5),
    "mobilenet_v3": lambda: mobilenetv3.mobilenet_v3_small_075(num_classes=5),
    "efficientnet": lambda: efficientnet.EfficientNet("efficientnet_b0", 0., 0.25, 0.25, num_classes=5, drop_path_prob=0.),
    "crossvit": lambda: crossvit.VisionTransformer(img_size=[32, 24], patch_size=[8, 6], num_classes=5, embed_dim=[16, 24],
                                                   depth=[[1, 2, 0]], num_heads=[2, 4], mlp_ratio=[2, 2, 1], qkv_bias=True),
}


def made(name: str) -> nn.Cell:
    net = MODELS[name]()
    for i, p in enumerate(net.get_parameters()):
        if not p.name.endswith(("moving_mean", "moving_variance", "mean", "variance", "index")) and p.dtype == ms.float32:
            p.set_data(Tensor((np.random.default_rng(i).normal(size=p.shape) * 0.1 + p.name.endswith("gamma")
                               ).astype(np.float32)))
    for _, cell in net.cells_and_names():
        if isinstance(cell, nn.Dropout):
            cell.p = 0.0
    return net.set_train()
