# SPDX-License-Identifier: Apache-2.0
"""Convolutions, pooling and resizing in every public form: batch and channels sharded, space whole."""
from __future__ import annotations

import mindspore.mint.nn.functional as F  # noqa: N812
import numpy as np
from mindspore import mint, nn, ops

from .form import Form


def of(*shapes):
    """Arguments: one float32 array per shape; no two elements equal, so that maxima are unique."""
    def make(rng):
        return tuple((rng.permutation(int(np.prod(s))).reshape(s) / max(np.prod(s), 1) - 0.5).astype(np.float32)
                     for s in shapes)
    return make


def cell(build, **slots):
    """A Cell's call with the probes or DTensors that follow the input in the slots of its parameters."""
    def call(x, *params):
        made = build()
        for name, value in zip(slots, params):
            made._params[name] = value
            if name in made.__dict__:
                made.__dict__[name] = value
        made._is_check_and_refresh = True
        return made(x)
    return call


X1, X2, X3 = (3, 4, 7), (3, 4, 5, 4), (2, 2, 4, 4, 3)
K1, K2, K3 = (6, 4, 3), (6, 4, 3, 2), (4, 2, 3, 2, 2)
CONV2 = (of(X2, K2, (6,)), of((2, 4, 4, 4), (3, 4, 2, 2), (3,)))
W, WB = {"weight": 0}, {"weight": 0, "bias": 0}
P1, P2, P3 = of((2, 3, 8)), (of((3, 4, 6, 5)), of((2, 3, 4, 4))), of((2, 2, 4, 5, 4))

FORMS = [
    Form("F.conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), of(X1, K1, (6,))),
    Form("F.conv1d(padding='same')", lambda x, w: F.conv1d(x, w, padding="same"), of(X1, K1)),
    Form("F.conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), CONV2),
    Form("F.conv2d(no bias)", lambda x, w: F.conv2d(x, w, dilation=2), of((2, 4, 5, 5), (3, 4, 2, 2))),
    Form("F.conv2d(padding='same')", lambda x, w, b: F.conv2d(x, w, b, padding="same"), of(X2, (4, 4, 2, 3), (4,))),
    Form("F.conv2d(groups)", lambda x, w, b: F.conv2d(x, w, b, groups=2), of(X2, (6, 2, 2, 3), (6,))),
    Form("F.conv2d(depthwise)", lambda x, w: F.conv2d(x, w, groups=4), of(X2, (4, 1, 2, 2))),
    Form("F.conv2d(unbatched)", lambda x, w: F.conv2d(x, w), of((4, 5, 5), (6, 4, 3, 3))),
    Form("F.conv3d", lambda x, w, b: F.conv3d(x, w, b, padding=1), of(X3, K3, (4,))),
    Form("F.conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
         of((2, 4, 3, 3), (4, 6, 3, 3), (6,))),
    Form("ops.conv1d", ops.conv1d, of((2, 4, 5), (6, 4, 3))),
    Form("ops.conv2d", lambda x, w, b: ops.conv2d(x, w, b, pad_mode="same", stride=2), CONV2[:1]),
    Form("ops.conv2d(pad)", lambda x, w: ops.conv2d(x, w, pad_mode="pad", padding=(1, 2)), of((2, 4, 5, 5), (6, 4, 3, 3))),
    Form("ops.conv3d", lambda x, w: ops.conv3d(x, w, pad_mode="pad", padding=1), of(X3, K3)),
    Form("nn.Conv1d", cell(lambda: nn.Conv1d(4, 6, 3), **W), of(X1, (6, 4, 1, 3))),
    Form("nn.Conv2d", cell(lambda: nn.Conv2d(4, 6, 3, has_bias=True), **WB), of((2, 4, 5, 5), (6, 4, 3, 3), (6,))),
    Form("nn.Conv2d(group)", cell(lambda: nn.Conv2d(4, 6, 3, group=2), **W), of((2, 4, 5, 5), (6, 2, 3, 3))),
    Form("nn.Conv3d", cell(lambda: nn.Conv3d(2, 4, 2), **W), of(X3, (4, 2, 2, 2, 2))),
    Form("nn.Conv1dTranspose", cell(lambda: nn.Conv1dTranspose(4, 6, 3, stride=2, pad_mode="pad", padding=1), **W),
         of((2, 4, 5), (4, 6, 1, 3))),
    Form("nn.Conv2dTranspose", cell(lambda: nn.Conv2dTranspose(4, 6, 3, stride=2), **W), of((2, 4, 3, 3), (4, 6, 3, 3))),
    Form("nn.Conv3dTranspose", cell(lambda: nn.Conv3dTranspose(2, 4, 2, stride=2, pad_mode="valid"), **W),
         of((2, 2, 3, 3, 2), (2, 4, 2, 2, 2))),
    Form("mint.nn.Conv1d", cell(lambda: mint.nn.Conv1d(4, 6, 3), **WB), of(X1, K1, (6,))),
    Form("mint.nn.Conv2d", cell(lambda: mint.nn.Conv2d(4, 6, (3, 2), padding=1), **WB), of(X2, K2, (6,))),
    Form("mint.nn.Conv3d", cell(lambda: mint.nn.Conv3d(2, 4, (3, 2, 2)), **WB), of(X3, K3, (4,))),
    Form("mint.nn.ConvTranspose2d", cell(lambda: mint.nn.ConvTranspose2d(4, 6, 3), **WB), of((2, 4, 3, 3), (4, 6, 3, 3), (6,))),
    Form("F.max_pool2d", lambda x: F.max_pool2d(x, 2), P2),
    Form("F.max_pool2d(ceil_mode)", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), P2),
    Form("F.max_pool2d(return_indices)", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), P2),
    Form("F.avg_pool1d", lambda x: F.avg_pool1d(x, 2), P1),
    Form("F.avg_pool2d", lambda x: F.avg_pool2d(x, 2, padding=1, ceil_mode=True, count_include_pad=False), P2),
    Form("F.avg_pool3d", lambda x: F.avg_pool3d(x, 2), P3),
    Form("F.adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), P1),
    Form("F.adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (None, 3)), P2),
    Form("F.adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 2), P3),
    Form("F.adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3), P1),
    Form("F.adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), P2),
    Form("ops.max_pool2d", lambda x: ops.max_pool2d(x, 2), P2),
    Form("ops.max_pool3d", lambda x: ops.max_pool3d(x, 2), P3),
    Form("ops.avg_pool1d", lambda x: ops.avg_pool1d(x, 2), P1),
    Form("ops.avg_pool2d", lambda x: ops.avg_pool2d(x, 2), P2),
    Form("ops.avg_pool3d", lambda x: ops.avg_pool3d(x, 2), P3),
    Form("ops.adaptive_avg_pool1d", lambda x: ops.adaptive_avg_pool1d(x, 4), P1),
    Form("ops.adaptive_avg_pool2d", lambda x: ops.adaptive_avg_pool2d(x, 2), P2),
    Form("ops.adaptive_avg_pool3d", lambda x: ops.adaptive_avg_pool3d(x, 2), P3),
    Form("ops.adaptive_max_pool1d", lambda x: ops.adaptive_max_pool1d(x, 4), P1),
    Form("ops.adaptive_max_pool2d", lambda x: ops.adaptive_max_pool2d(x, 2), P2),
    Form("nn.MaxPool1d", lambda x: nn.MaxPool1d(2, 2)(x), P1),
    Form("nn.MaxPool2d", lambda x: nn.MaxPool2d(3, 2, pad_mode="same")(x), P2),
    Form("nn.MaxPool3d", lambda x: nn.MaxPool3d(2)(x), P3),
    Form("nn.AvgPool1d", lambda x: nn.AvgPool1d(2, 2)(x), P1),
    Form("nn.AvgPool2d", lambda x: nn.AvgPool2d(2, 2, pad_mode="pad", padding=1)(x), P2),
    Form("nn.AvgPool2d(same)", lambda x: nn.AvgPool2d(2, 2, pad_mode="same")(x), P2),
    Form("nn.AvgPool3d", lambda x: nn.AvgPool3d(2)(x), P3),
    Form("nn.AdaptiveAvgPool2d", lambda x: nn.AdaptiveAvgPool2d((None, 2))(x), P2),
    Form("nn.AdaptiveAvgPool3d", lambda x: nn.AdaptiveAvgPool3d(2)(x), P3),
    Form("nn.AdaptiveMaxPool2d", lambda x: nn.AdaptiveMaxPool2d(2)(x), P2),
    Form("mint.nn.MaxPool2d", lambda x: mint.nn.MaxPool2d(2)(x), P2),
    Form("mint.nn.AvgPool2d", lambda x: mint.nn.AvgPool2d(2)(x), P2),
    Form("mint.nn.AdaptiveAvgPool2d", lambda x: mint.nn.AdaptiveAvgPool2d(1)(x), P2),
    Form("F.interpolate(nearest)", lambda x: F.interpolate(x, size=(8, 8)), P2),
    Form("F.interpolate(nearest, 1d)", lambda x: F.interpolate(x, size=12), P1),
    Form("F.interpolate(nearest, 3d)", lambda x: F.interpolate(x, size=(5, 6, 7)), P3),
    Form("F.interpolate(bilinear)", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), P2),
    Form("F.interpolate(linear)", lambda x: F.interpolate(x, size=12, mode="linear", align_corners=True), P1),
    Form("F.interpolate(bicubic)", lambda x: F.interpolate(x, size=(8, 8), mode="bicubic"), P2),
    Form("F.interpolate(trilinear)", lambda x: F.interpolate(x, size=(5, 6, 7), mode="trilinear"), P3),
    Form("mint.nn.Upsample", lambda x: mint.nn.Upsample(scale_factor=2.0)(x), P2),
    Form("ops.interpolate(bilinear)", lambda x: ops.interpolate(x, size=(8, 8), mode="bilinear"), P2),
    Form("ops.interpolate(area)", lambda x: ops.interpolate(x, size=(3, 3), mode="area"), P2),
    Form("F.unfold", lambda x: F.unfold(x, 2), P2),
    Form("F.fold", lambda x: F.fold(x, (4, 4), 2), of((2, 16, 9))),
    Form("ops.unfold", lambda x: ops.unfold(x, 2), P2),
    Form("F.pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), of((2, 8, 3, 2))),
    Form("ops.pixel_shuffle", lambda x: ops.pixel_shuffle(x, 2), of((2, 8, 3, 2))),
]
