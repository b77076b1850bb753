# SPDX-License-Identifier: Apache-2.0
"""Resizing and sampling of images, beyond the pooling family: nearest and linear classics, grids."""
from __future__ import annotations

from mindspore import mint, nn, ops

from .form import Form
from .samples import F, arrays, both, forms

LINES, PLANES, SPACES = (tuple(arrays((*lead, *(4, 3, 2)[:n])) for lead in ((4, 3), (3, 2))) for n in (1, 2, 3))
PLACES = tuple(both(arrays((*lead, 4, 5)), arrays((lead[0], 3, 4, 2), low=-1.2, high=1.2)) for lead in ((4, 3), (3, 2)))
SPATIAL = (both(arrays((2, 2, 3, 4, 3)), arrays((2, 2, 3, 2, 3), low=-1.0, high=1.0)),)

FORMS = [
    Form("ops.interpolate(nearest, 1d)", lambda x: ops.interpolate(x, size=(6,), mode="nearest"), LINES),
    Form("ops.interpolate(linear)", lambda x: ops.interpolate(x, size=(6,), mode="linear"), LINES),
    Form("ops.interpolate(linear, align_corners)", lambda x: ops.interpolate(x, size=(6,), mode="linear", align_corners=True), LINES),
    *forms(PLANES, {
        "ops.interpolate(nearest)": lambda x: ops.interpolate(x, size=(6, 5), mode="nearest"),
        "ops.interpolate(nearest-exact)": lambda x: ops.interpolate(x, size=(6, 5), mode="nearest-exact"),
        "ops.interpolate(bicubic)": lambda x: ops.interpolate(x, size=(6, 5), mode="bicubic"),
        "ops.upsample(nearest)": lambda x: ops.upsample(x, size=(6, 5), mode="nearest"), "nn.Upsample(nearest)": lambda x: nn.Upsample(size=(6, 5), mode="nearest")(x),
        "ops.ResizeNearestNeighbor": lambda x: ops.ResizeNearestNeighbor((6, 5))(x),
        "F.interpolate(nearest, scale)": lambda x: F.interpolate(x, scale_factor=(2.0, 1.5), mode="nearest"),
        "F.interpolate(bilinear, align_corners)": lambda x: F.interpolate(x, size=(6, 5), mode="bilinear", align_corners=True),
        "F.interpolate(bicubic, scale)": lambda x: F.interpolate(x, scale_factor=(2.0, 2.0), mode="bicubic"),
        "mint.nn.Upsample(size)": lambda x: mint.nn.Upsample(size=(6, 5), mode="bilinear")(x)}),
    *forms(SPACES, {
        "ops.interpolate(nearest, 3d)": lambda x: ops.interpolate(x, size=(5, 4, 3), mode="nearest"),
        "ops.interpolate(nearest, 3d, scale)": lambda x: ops.interpolate(x, scale_factor=(2.0, 2.0, 2.0), mode="nearest"),
        "ops.interpolate(trilinear)": lambda x: ops.interpolate(x, size=(5, 4, 3), mode="trilinear"),
        "F.interpolate(nearest, 3d, scale)": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")}),
    *forms(PLACES, {
        "ops.grid_sample": ops.grid_sample, "ops.grid_sample(nearest)": lambda x, g: ops.grid_sample(x, g, mode="nearest"),
        "F.grid_sample": lambda x, g: F.grid_sample(x, g, "bilinear", "zeros", False),
        "F.grid_sample(border, align_corners)": lambda x, g: F.grid_sample(x, g, "bilinear", "border", True),
        "ops.grid_sample(reflection)": lambda x, g: ops.grid_sample(x, g, padding_mode="reflection", align_corners=True)}),
    Form("ops.grid_sample(3d)", ops.grid_sample, SPATIAL),
    Form("ops.affine_grid", lambda t: ops.affine_grid(t, (t.shape[0], 3, 4, 2)), (arrays((4, 2, 3)), arrays((3, 2, 3)))),
    Form("ops.affine_grid(3d)", lambda t: ops.affine_grid(t, (t.shape[0], 3, 2, 4, 2), align_corners=True), (arrays((2, 3, 4)),)),
]
