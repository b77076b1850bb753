# SPDX-License-Identifier: Apache-2.0
"""Linear algebra on matrices and batches of them."""
from __future__ import annotations

import numpy as np
from mindspore import mint, ops

from .form import Form
from .samples import arrays, both, forms


def well(*shape):
    """A maker of matrices far from singular, symmetric and positive definite."""
    def make(rng):
        x = rng.normal(size=shape)
        return ((x @ np.swapaxes(x, -1, -2) / shape[-1] + 2 * np.eye(shape[-1])).astype(np.float32),)
    return make


SQUARE = (well(4, 3, 3), well(3, 2, 2), well(2, 6, 2, 2), well(3, 3))
EIGHT = (well(8, 3, 3), well(8, 8, 2, 2), well(3, 3))  # made-up data of a rank without any are no such matrices
ANY = (arrays((4, 3, 2)), arrays((3, 2, 3)), arrays((4, 3)))
POINTS = (arrays((2, 3, 4), (2, 5, 4)), arrays((4, 3), (5, 3)))

FORMS = [
    *forms(SQUARE, {
        "ops.inverse": ops.inverse, "mint.inverse": mint.inverse, "mint.linalg.inv": mint.linalg.inv, "x.inverse()": lambda x: x.inverse(),
        "ops.MatrixInverse": lambda x: ops.MatrixInverse()(x), "ops.det": ops.det, "x.det()": lambda x: x.det(), "ops.slogdet": ops.slogdet,
        "x.slogdet()": lambda x: x.slogdet(), "ops.logdet": ops.logdet, "x.logdet()": lambda x: x.logdet(),
        "ops.matrix_power": lambda x: ops.matrix_power(x, 3)}),
    *forms(EIGHT, {
        "ops.cholesky": ops.cholesky, "ops.cholesky(upper)": lambda x: ops.cholesky(x, upper=True), "x.cholesky()": lambda x: x.cholesky(),
        "x.matrix_power(-1)": lambda x: x.matrix_power(-1)}),
    *forms(ANY, {
        "ops.svd": lambda x: ops.svd(x), "ops.svd(full_matrices)": lambda x: ops.svd(x, full_matrices=True),
        "ops.svd(compute_uv=False)": lambda x: ops.svd(x, compute_uv=False), "x.svd()": lambda x: x.svd(), "ops.qr": ops.qr,
        "ops.qr(complete)": lambda x: ops.qr(x, "complete"), "mint.linalg.qr": mint.linalg.qr}),
    *forms(SQUARE[:2] + SQUARE[3:], {"ops.eigvals": ops.eigvals, "ops.eig": ops.eig}), Form("ops.pinv", ops.pinv, SQUARE[3:]),
    Form("ops.cholesky_inverse", ops.cholesky_inverse, SQUARE[3:]),
    Form("ops.matrix_solve", ops.matrix_solve, tuple(both(well(*s, 3, 3), arrays((*s, 3, 2))) for s in ((8,), ()))),
    Form("ops.cholesky_solve", lambda x, b: ops.cholesky_solve(b, x), tuple(both(well(*s, 3, 3), arrays((*s, 3, 2))) for s in ((8,), ()))),
    *forms(POINTS, {"ops.cdist": ops.cdist, "mint.cdist": mint.cdist}),
    Form("ops.cdist(p)", lambda x, y: ops.cdist(x, y, 1.0), POINTS[:1]), Form("mint.cdist(p)", lambda x, y: mint.cdist(x, y, p=3.0), POINTS[:1]),
    Form("ops.matrix_band_part", lambda x: ops.matrix_band_part(x, 1, 0), (arrays((4, 3, 3)), arrays((5, 3)))),
    Form("ops.matrix_set_diag", ops.matrix_set_diag, (arrays((4, 3, 3), (4, 3)), arrays((3, 2, 4), (3, 2)))),
    Form("ops.matrix_norm", ops.matrix_norm, ANY), Form("mint.linalg.matrix_norm", mint.linalg.matrix_norm, ANY),
]
