# SPDX-License-Identifier: Apache-2.0
"""Losses with every reduction, class weights, ignored targets and label smoothing; batches that split unevenly."""
from __future__ import annotations

from mindspore import mint, nn, ops

from ...errors import OpRuleError
from .form import Form
from .samples import F, arrays, both, forms, targets

KINDS = ("mean", "sum", "none")
AB = (arrays((4, 3), (4, 3)), arrays((5, 2), (5, 2)), arrays((3,), (3,)))
CLASSES32 = (both(arrays((4, 3)), targets((4,), 3)), both(arrays((5, 4)), targets((5,), 4)))
IGNORED = tuple(both(arrays((n, c)), targets((n,), c, ignored=-100)) for n, c in ((4, 3), (5, 4), (7, 2)))
WEIGHTED = tuple(both(arrays((n, c)), targets((n,), c, ignored=1), arrays((c,), low=0.5, high=2.0)) for n, c in ((4, 3), (5, 4), (7, 3)))
MAPS = (both(arrays((4, 3, 2)), targets((4, 2), 3)), both(arrays((5, 2, 3)), targets((5, 3), 2, ignored=-100)))
IMAGES = (both(arrays((4, 3, 2, 2)), targets((4, 2, 2), 3, ignored=-100)),)
SOFT = (lambda rng: (rng.normal(size=(4, 3)).astype("f"), rng.dirichlet([1.0] * 3, 4).astype("f")),
        lambda rng: (rng.normal(size=(5, 2)).astype("f"), rng.dirichlet([1.0] * 2, 5).astype("f")))
PROBS = tuple(both(arrays(s, low=0.1, high=0.9), arrays(s, low=0, high=1)) for s in ((4, 3), (5, 2), (3,)))
PROBS_W = tuple(both(arrays(s, low=0.1, high=0.9), arrays(s, s, low=0, high=1)) for s in ((4, 3), (5, 2)))
LOGITS_W = tuple(both(arrays(s), arrays(s, s, w, low=0.1, high=1)) for s, w in (((4, 3), (3,)), ((5, 2), (2,))))


def kinds(name, fn, args) -> list[Form]:
    """One form per reduction."""
    return [Form(f'{name}("{kind}")', lambda *a, k=kind: fn(*a, k), args) for kind in KINDS]


_CROSS = [
    *kinds("ops.cross_entropy", lambda x, t, k: ops.cross_entropy(x, t, reduction=k), IGNORED),
    *kinds("F.cross_entropy", lambda x, t, k: F.cross_entropy(x, t, reduction=k), IGNORED),
    *kinds("ops.cross_entropy(weight, ignore_index)", lambda x, t, w, k: ops.cross_entropy(x, t, w, 1, k), WEIGHTED),
    *kinds("F.cross_entropy(weight, ignore_index)", lambda x, t, w, k: F.cross_entropy(x, t, w, 1, k), WEIGHTED),
    *kinds("ops.cross_entropy(probabilities)", lambda x, t, k: ops.cross_entropy(x, t, reduction=k), SOFT),
    *kinds("F.cross_entropy(probabilities)", lambda x, t, k: F.cross_entropy(x, t, reduction=k), SOFT),
    *kinds("nn.CrossEntropyLoss", lambda x, t, k: nn.CrossEntropyLoss(reduction=k)(x, t), IGNORED),
    *kinds("mint.nn.CrossEntropyLoss", lambda x, t, k: mint.nn.CrossEntropyLoss(reduction=k)(x, t), IGNORED),
    Form("ops.cross_entropy(label_smoothing)", lambda x, t: ops.cross_entropy(x, t, label_smoothing=0.1), IGNORED),
    Form("F.cross_entropy(label_smoothing)", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="sum"), IGNORED),
    Form("ops.cross_entropy(maps)", ops.cross_entropy, MAPS), Form("F.cross_entropy(maps)", F.cross_entropy, MAPS),
    Form("ops.cross_entropy(images)", ops.cross_entropy, IMAGES), Form("F.cross_entropy(images)", F.cross_entropy, IMAGES),
    *kinds("nn.SoftmaxCrossEntropyWithLogits", lambda x, t, k: nn.SoftmaxCrossEntropyWithLogits(reduction=k)(x, t), SOFT),
    *kinds("nn.SoftmaxCrossEntropyWithLogits(sparse)",
           lambda x, t, k: nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction=k)(x, t), CLASSES32),
    Form("ops.SoftmaxCrossEntropyWithLogits", lambda x, t: ops.SoftmaxCrossEntropyWithLogits()(x, t), SOFT),
    Form("ops.SparseSoftmaxCrossEntropyWithLogits", lambda x, t: ops.SparseSoftmaxCrossEntropyWithLogits()(x, t), CLASSES32),
]

_NLL = [
    *kinds("ops.nll_loss", lambda x, t, k: ops.nll_loss(x, t, reduction=k), IGNORED),
    *kinds("F.nll_loss", lambda x, t, k: F.nll_loss(x, t, reduction=k), IGNORED),
    *kinds("F.nll_loss(weight, ignore_index)", lambda x, t, w, k: F.nll_loss(x, t, w, 1, k), WEIGHTED),
    *kinds("nn.NLLLoss", lambda x, t, k: nn.NLLLoss(reduction=k)(x, t), IGNORED),
    *kinds("mint.nn.NLLLoss", lambda x, t, k: mint.nn.NLLLoss(reduction=k)(x, t), IGNORED),
    *kinds("ops.NLLLoss", lambda x, t, w, k: ops.NLLLoss(k, 1)(x, t, w), WEIGHTED),
    Form("ops.nll_loss(label_smoothing)", lambda x, t: ops.nll_loss(x, t, label_smoothing=0.1), CLASSES32),
    Form("F.nll_loss(images)", F.nll_loss, IMAGES), Form("F.nll_loss(maps)", F.nll_loss, MAPS),
]

_DISTANCE = [f for k in KINDS for f in forms(AB, {
    f'F.mse_loss("{k}")': lambda x, y, k=k: F.mse_loss(x, y, k), f'ops.mse_loss("{k}")': lambda x, y, k=k: ops.mse_loss(x, y, k),
    f'F.l1_loss("{k}")': lambda x, y, k=k: F.l1_loss(x, y, k), f'ops.l1_loss("{k}")': lambda x, y, k=k: ops.l1_loss(x, y, k),
    f'F.smooth_l1_loss("{k}")': lambda x, y, k=k: F.smooth_l1_loss(x, y, k),
    f'ops.smooth_l1_loss("{k}")': lambda x, y, k=k: ops.smooth_l1_loss(x, y, 0.7, k),
    f'ops.huber_loss("{k}")': lambda x, y, k=k: ops.huber_loss(x, y, k),
    f'nn.MSELoss("{k}")': lambda x, y, k=k: nn.MSELoss(k)(x, y), f'mint.nn.MSELoss("{k}")': lambda x, y, k=k: mint.nn.MSELoss(k)(x, y),
    f'nn.L1Loss("{k}")': lambda x, y, k=k: nn.L1Loss(k)(x, y), f'mint.nn.L1Loss("{k}")': lambda x, y, k=k: mint.nn.L1Loss(k)(x, y),
    f'nn.SmoothL1Loss("{k}")': lambda x, y, k=k: nn.SmoothL1Loss(reduction=k)(x, y),
    f'mint.nn.SmoothL1Loss("{k}")': lambda x, y, k=k: mint.nn.SmoothL1Loss(reduction=k)(x, y),
    f'nn.HuberLoss("{k}")': lambda x, y, k=k: nn.HuberLoss(k)(x, y), f'nn.MAELoss("{k}")': lambda x, y, k=k: nn.MAELoss(k)(x, y)})]
_DISTANCE += [Form("nn.RMSELoss", lambda x, y: nn.RMSELoss()(x, y), AB), Form("ops.SmoothL1Loss", lambda x, y: ops.SmoothL1Loss()(x, y), AB),
              Form("F.mse_loss(broadcast)", lambda x, y: F.mse_loss(x, y), (arrays((4, 3), (3,)), arrays((5, 1), (1, 2))))]

_BINARY = [
    *kinds("F.binary_cross_entropy", lambda x, t, k: F.binary_cross_entropy(x, t, reduction=k), PROBS),
    *kinds("ops.binary_cross_entropy", lambda x, t, k: ops.binary_cross_entropy(x, t, reduction=k), PROBS),
    *kinds("ops.binary_cross_entropy(weight)", lambda x, t, w, k: ops.binary_cross_entropy(x, t, w, k), PROBS_W),
    *kinds("nn.BCELoss", lambda x, t, k: nn.BCELoss(reduction=k)(x, t), PROBS),
    *kinds("mint.nn.BCELoss", lambda x, t, k: mint.nn.BCELoss(reduction=k)(x, t), PROBS),
    *kinds("F.binary_cross_entropy_with_logits", lambda x, t, k: F.binary_cross_entropy_with_logits(x, t, reduction=k), PROBS),
    *kinds("F.binary_cross_entropy_with_logits(weights)",
           lambda x, t, w, p, k: F.binary_cross_entropy_with_logits(x, t, w, k, p), LOGITS_W),
    *kinds("ops.binary_cross_entropy_with_logits", lambda x, t, w, p, k: ops.binary_cross_entropy_with_logits(x, t, w, p, k), LOGITS_W),
    *kinds("nn.BCEWithLogitsLoss", lambda x, t, k: nn.BCEWithLogitsLoss(reduction=k)(x, t), PROBS),
    *kinds("mint.nn.BCEWithLogitsLoss", lambda x, t, k: mint.nn.BCEWithLogitsLoss(reduction=k)(x, t), PROBS),
    Form("ops.SigmoidCrossEntropyWithLogits", lambda x, t: ops.SigmoidCrossEntropyWithLogits()(x, t), PROBS),
]

_DIVERGENCE = [
    *kinds("ops.kl_div", lambda x, t, k: ops.kl_div(x, t, k), PROBS), *kinds("F.kl_div", lambda x, t, k: F.kl_div(x, t, k), PROBS),
    *kinds("F.kl_div(log_target)", lambda x, t, k: F.kl_div(x, t, k, True), AB[:2]),
    *kinds("nn.KLDivLoss", lambda x, t, k: nn.KLDivLoss(k)(x, t), PROBS), *kinds("mint.nn.KLDivLoss", lambda x, t, k: mint.nn.KLDivLoss(k)(x, t), PROBS),
    Form("ops.kl_div(batchmean)", lambda x, t: ops.kl_div(x, t, "batchmean"), PROBS[:2]),
    Form("F.kl_div(batchmean)", lambda x, t: F.kl_div(x, t, "batchmean"), PROBS[:2]),
]

SIGNS = both(arrays((4, 3), (4, 3)), lambda rng: ((rng.integers(0, 2, (4, 3)) * 2 - 1).astype("f"),))
SIGNED = both(arrays((4, 3)), lambda rng: ((rng.integers(0, 2, (4, 3)) * 2 - 1).astype("f"),))
PAIRED = both(arrays((4, 3), (4, 3)), lambda rng: ((rng.integers(0, 2, 4) * 2 - 1).astype("int32"),))
_MARGIN = [
    *kinds("F.soft_margin_loss", lambda x, t, k: F.soft_margin_loss(x, t, k), SIGNED),
    *kinds("ops.soft_margin_loss", lambda x, t, k: ops.soft_margin_loss(x, t, k), SIGNED),
    *kinds("ops.margin_ranking_loss", lambda x, y, t, k: ops.margin_ranking_loss(x, y, t, reduction=k), SIGNS),
    *kinds("nn.MarginRankingLoss", lambda x, y, t, k: nn.MarginRankingLoss(reduction=k)(x, y, t), SIGNS),
    *kinds("ops.hinge_embedding_loss", lambda x, t, k: ops.hinge_embedding_loss(x, t, reduction=k), SIGNED),
    *kinds("ops.cosine_embedding_loss", lambda x, y, t, k: ops.cosine_embedding_loss(x, y, t, reduction=k), PAIRED),
    *kinds("nn.CosineEmbeddingLoss", lambda x, y, t, k: nn.CosineEmbeddingLoss(reduction=k)(x, y, t), PAIRED),
    *kinds("ops.gaussian_nll_loss", lambda x, t, v, k: ops.gaussian_nll_loss(x, t, v, reduction=k),
           both(arrays((4, 3), (4, 3)), arrays((4, 3), low=0.5, high=1.5))),
    *kinds("nn.PoissonNLLLoss", lambda x, t, k: nn.PoissonNLLLoss(reduction=k)(x, t), PROBS[:2]),
    *kinds("nn.MultiLabelSoftMarginLoss", lambda x, t, k: nn.MultiLabelSoftMarginLoss(reduction=k)(x, t), PROBS[:2]),
]

_REFUSED = [Form("ops.multi_margin_loss", ops.multi_margin_loss, both(arrays((4, 3)), targets((4,), 3, dtype="int64")),
                 raises=OpRuleError)]

FORMS = [*_CROSS, *_NLL, *_DISTANCE, *_BINARY, *_DIVERGENCE, *_MARGIN, *_REFUSED]
