# SPDX-License-Identifier: Apache-2.0
"""Fused kernels of Ascend: norms of a sum, cross entropy; and the k-th value, which a CPU has no kernel for, either."""
from __future__ import annotations

from mindspore import mint, ops
from mindspore.ops import auto_generate as generated

from .form import Form
from .samples import arrays, both, forms, targets

PAIRS = (arrays((4, 6), (4, 6), (6,)), arrays((5, 2, 3), (5, 2, 3), (3,)))
TRIPLES = (arrays((4, 6), (4, 6), (6,), (6,)), arrays((5, 2, 3), (5, 2, 3), (3,), (3,)))
CLASSES = (both(arrays((6, 5)), targets((6,), 5, ignored=-100)), both(arrays((5, 3)), targets((5,), 3)))
WEIGHED = (both(*(arrays((6, 5)), targets((6,), 5, ignored=-100), arrays((5,), low=0.5, high=2.0))),)
LINES = (arrays((4, 6)), arrays((5, 3)), arrays((7,)))


def fused(**named):
    """`CrossEntropyLoss` with these settings: loss and log-probabilities."""
    return lambda x, t, w=None: generated.CrossEntropyLoss()(x, t, w, **named)[:2]


FORMS = [
    *forms(PAIRS, {"ops.add_rms_norm": ops.add_rms_norm, "ops.add_rms_norm(eps)": lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-3),
                   "AddRmsNorm": lambda x, y, w: generated.AddRmsNorm()(x, y, w)}),
    *forms(TRIPLES, {"ops.add_layer_norm": ops.add_layer_norm,
                     "ops.add_layer_norm(eps)": lambda x, y, w, b: ops.add_layer_norm(x, y, w, b, 1e-3, True)}),
    *forms(CLASSES, {"CrossEntropyLoss": fused(), "CrossEntropyLoss(sum)": fused(reduction="sum"), "CrossEntropyLoss(none)": fused(reduction="none"),
                     "CrossEntropyLoss(label_smoothing)": fused(reduction="sum", label_smoothing=0.2)}),
    Form("CrossEntropyLoss(weight)", fused(reduction="sum"), WEIGHED),
    *forms(LINES, {"mint.kthvalue": lambda x: mint.kthvalue(x, 2), "mint.kthvalue(dim)": lambda x: mint.kthvalue(x, 1, 0, True), "x.kthvalue": lambda x: x.kthvalue(3)}),
]
