# SPDX-License-Identifier: Apache-2.0
"""Random ops and creation after a pattern: the numbers of a shard are those of the whole, whatever the mesh."""
from __future__ import annotations

import mindspore as ms
import mindspore.mint.nn.functional as F  # noqa: N812
import numpy as np
from mindspore import mint, nn, ops

from ...errors import OpRuleError
from .form import Form


def of(*shapes):
    """Arguments: one float32 array in [0, 1) per shape."""
    return lambda rng: tuple(rng.random(size=s).astype(np.float32) for s in shapes)


X = (of((4, 3)), of((5, 1)), of((7,)), of((2, 3, 4)), of((0, 3)))
WEIGHTS = (of((3, 4)), of((5, 3)), of((6,)))
IMAGE = of((3, 4, 2, 2))

FORMS = [
    Form("F.dropout", lambda x: F.dropout(x, 0.3), X),
    Form("F.dropout(training=False)", lambda x: F.dropout(x, 0.3, False), X[:2]),
    Form("F.dropout2d", lambda x: F.dropout2d(x, 0.5), IMAGE),
    Form("ops.dropout", lambda x: ops.dropout(x, 0.3), X),
    Form("ops.dropout1d", lambda x: ops.dropout1d(x, 0.3), of((3, 4, 2))),
    Form("ops.dropout2d", lambda x: ops.dropout2d(x, 0.5), IMAGE),
    Form("ops.dropout3d", lambda x: ops.dropout3d(x, 0.5), of((3, 4, 2, 1, 2))),
    Form("ops.Dropout", lambda x: ops.Dropout(0.5)(x), X),
    Form("nn.Dropout", lambda x: nn.Dropout(p=0.4).set_train()(x), X),
    Form("nn.Dropout2d", lambda x: nn.Dropout2d(0.5).set_train()(x), IMAGE),
    Form("mint.nn.Dropout", lambda x: mint.nn.Dropout(0.4).set_train()(x), X),
    Form("mint.rand_like", mint.rand_like, X),
    Form("mint.randn_like", lambda x: mint.randn_like(x, dtype=ms.float16), X),
    Form("mint.randint_like", lambda x: mint.randint_like(x, 0, 7), X),
    Form("ops.rand_like", lambda x: ops.rand_like(x), X),
    Form("ops.randn_like", lambda x: ops.randn_like(x), X),
    Form("mint.bernoulli", mint.bernoulli, X),
    Form("ops.bernoulli", lambda x: ops.bernoulli(x, 0.4), X),
    Form("mint.normal(mean, std)", mint.normal, (of((4, 3), (3,)), of((5, 1), (5, 4)))),
    Form("mint.normal(mean)", lambda m: mint.normal(m, 2.0), X[:3]),
    Form("mint.normal(std)", lambda s: mint.normal(1.0, s), X[:3]),
    Form("mint.multinomial", lambda p: mint.multinomial(p, 2), WEIGHTS),
    Form("mint.multinomial(replacement)", lambda p: mint.multinomial(p, 9, True), WEIGHTS),
    Form("ops.multinomial", lambda p: ops.multinomial(p, 7), WEIGHTS),
    Form("ops.multinomial(replacement=False)", lambda p: ops.multinomial(p, 3, False), WEIGHTS),
    Form("x.multinomial", lambda p: p.multinomial(3), WEIGHTS), Form("ops.Multinomial", lambda p: ops.Multinomial()(p, 3), WEIGHTS),
    Form("mint.multinomial of too few", lambda p: mint.multinomial(p, 5), of((3, 4)), raises=OpRuleError),
    Form("mint.zeros_like", mint.zeros_like, X),
    Form("mint.ones_like", lambda x: mint.ones_like(x, dtype=ms.int32), X),
    Form("mint.full_like", lambda x: mint.full_like(x, 2.5), X),
    Form("mint.empty_like", mint.empty_like, X),
    Form("ops.zeros_like", ops.zeros_like, X),
    Form("ops.ones_like", ops.ones_like, X),
    Form("ops.full_like", lambda x: ops.full_like(x, 3), X),
    Form("x.new_zeros", lambda x: x.new_zeros((2, 3)), X),
    Form("x.new_ones", lambda x: x.new_ones((2, 3), dtype=ms.int32), X),
    Form("x.new_full", lambda x: x.new_full((2, 3), 1.5), X),
    Form("x.new_empty", lambda x: x.new_empty((2, 3)), X),
]
