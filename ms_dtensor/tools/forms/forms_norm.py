# SPDX-License-Identifier: Apache-2.0
"""Normalisations in every public form: cells, functions and the classic primitives."""
from __future__ import annotations

from mindspore import mint, nn, ops

from ...errors import OpRuleError
from .form import Form
from .samples import F, arrays, both, forms

ROWS = (arrays((4, 6), (6,), (6,)), arrays((5, 2, 3), (3,), (3,)), arrays((2, 3), (3,), (3,), dtype="float16"))
PAIRS = (arrays((4, 6), (6,)), arrays((5, 2, 3), (3,)))
IMAGES = (arrays((4, 6, 2, 2)), arrays((3, 4, 3, 1)), arrays((5, 2, 2, 3)))


def stats(*shape, low=0.5):
    """Input, scale, bias, running mean, running variance."""
    c = shape[1]
    return both(arrays(shape), arrays((c,), low=low, high=1.5), arrays((c,), (c,)), arrays((c,), low=low, high=1.5))


BATCH = (stats(4, 6, 2, 2), stats(5, 3, 2, 1), stats(3, 4, 3, 3))
BATCH_2D = (stats(4, 3), stats(5, 2))


def _classic(training):
    def call(x, w, b, m, v):
        m, v = m * 1, v * 1
        return ops.BatchNorm(is_training=training)(x, w, b, m, v)[0]
    return call


_LAYER = [
    *forms(ROWS, {
        "F.layer_norm(weight, bias)": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
        "ops.layer_norm": lambda x, w, b: ops.layer_norm(x, (x.shape[-1],), w, b),
        "ops.LayerNorm": lambda x, w, b: ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1)(x, w, b)}),
    *forms((arrays((4, 6)), arrays((5, 2, 3))), {
        "F.layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)), "nn.LayerNorm": lambda x: nn.LayerNorm((x.shape[-1],))(x),
        "mint.nn.LayerNorm": lambda x: mint.nn.LayerNorm((x.shape[-1],))(x)}),
    Form("F.layer_norm(two dims)", lambda x, w, b: F.layer_norm(x, (3, 4), w, b, 1e-3), arrays((5, 3, 4), (3, 4), (3, 4))),
    Form("nn.LayerNorm(two dims)", lambda x: nn.LayerNorm((3, 4), begin_norm_axis=1, begin_params_axis=1)(x), arrays((5, 3, 4))),
    *forms(PAIRS, {"ops.rms_norm": ops.rms_norm, "ops.rms_norm(eps)": lambda x, w: ops.rms_norm(x, w, 1e-3),
                   "ops.RmsNorm": lambda x, w: ops.RmsNorm()(x, w)}),
]

GROUPS = tuple(both(arrays(s), arrays((s[1],), (s[1],))) for s in ((4, 6, 2, 2), (3, 4, 3, 1), (2, 6, 3, 2)))
_GROUP = [
    *forms(GROUPS, {"F.group_norm(weight, bias)": lambda x, w, b: F.group_norm(x, 2, w, b),
                    "ops.group_norm": lambda x, w, b: ops.group_norm(x, x.shape[1], w, b)}),
    *forms(IMAGES[:2], {"F.group_norm": lambda x: F.group_norm(x, 2), "nn.GroupNorm": lambda x: nn.GroupNorm(2, x.shape[1])(x),
                        "mint.nn.GroupNorm": lambda x: mint.nn.GroupNorm(2, x.shape[1])(x)}),
]

_BATCH = [
    *forms(BATCH, {
        "ops.BatchNorm": _classic(False), "ops.BatchNorm(training)": _classic(True),
        "ops.batch_norm": lambda x, w, b, m, v: ops.batch_norm(x, m, v, w, b),
        "ops.batch_norm(training)": lambda x, w, b, m, v: ops.batch_norm(x, m * 1, v * 1, w, b, training=True),
        "F.batch_norm": lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
        "F.batch_norm(training)": lambda x, w, b, m, v: F.batch_norm(x, m * 1, v * 1, w, b, training=True)}),
    Form("F.batch_norm(2-d)", lambda x, w, b, m, v: F.batch_norm(x, m * 1, v * 1, w, b, training=True), BATCH_2D),
    *forms(IMAGES[:2], {"nn.BatchNorm2d": lambda x: nn.BatchNorm2d(x.shape[1])(x),
                        "nn.BatchNorm2d(training)": lambda x: nn.BatchNorm2d(x.shape[1]).set_train()(x),
                        "mint.nn.BatchNorm2d": lambda x: mint.nn.BatchNorm2d(x.shape[1])(x),
                        "mint.nn.BatchNorm2d(training)": lambda x: mint.nn.BatchNorm2d(x.shape[1]).set_train()(x)}),
    Form("nn.BatchNorm1d", lambda x: nn.BatchNorm1d(x.shape[1])(x), (arrays((4, 3)), arrays((5, 2)))),
    Form("mint.nn.BatchNorm1d", lambda x: mint.nn.BatchNorm1d(x.shape[1])(x), (arrays((4, 3)), arrays((5, 2)))),
    Form("ops.lrn", ops.lrn, IMAGES[:1]),
]

_REFUSED = [Form("nn.InstanceNorm2d", lambda x: nn.InstanceNorm2d(4)(x), arrays((2, 4, 3, 3)), raises=OpRuleError)]

FORMS = [*_LAYER, *_GROUP, *_BATCH, *_REFUSED]
