# SPDX-License-Identifier: Apache-2.0
"""Complex numbers: their parts, what makes them of parts, and rotary embeddings written with them."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import mint, ops

from .form import Form
from .samples import arrays, forms


def numbers(*shapes):
    """A maker of complex64 arrays."""
    return lambda rng: tuple((rng.normal(size=s) + 1j * rng.normal(size=s)).astype(np.complex64) for s in shapes)


ONE = (numbers((4, 3)), numbers((5,)), numbers((1, 2, 3)))
PARTS = (arrays((4, 3), (4, 3)), arrays((5, 1), (5, 1)))


def rotate(x, freqs):
    """Rotary embedding as PyTorch models write it: pairs as complex numbers, turned by one more."""
    x = x.reshape(*x.shape[:-1], -1, 2)
    turned = ops.Complex()(x[..., 0], x[..., 1]) * freqs
    return mint.stack([ops.real(turned), ops.imag(turned)], -1).reshape(*x.shape[:-2], -1)


def turn(x, angle):
    """The same, of angles."""
    return rotate(x, ops.polar(ops.ones_like(angle), angle))


FORMS = [
    *forms(ONE, {
        "ops.real": ops.real, "mint.real": mint.real, "x.real()": lambda x: x.real(), "ops.imag": ops.imag, "mint.imag": mint.imag,
        "x.imag()": lambda x: x.imag(), "ops.conj": ops.conj, "x.conj()": lambda x: x.conj(), "ops.angle": ops.angle, "x.angle()": lambda x: x.angle(),
        "ops.Real": lambda x: ops.Real()(x), "ops.Imag": lambda x: ops.Imag()(x), "ops.Conj": lambda x: ops.Conj()(x),
        "ops.ComplexAbs": lambda x: ops.ComplexAbs()(x), "ops.view_as_real": ops.view_as_real, "ops.abs of complex": ops.abs,
        "x * conj(x)": lambda x: ops.real(x * ops.conj(x))}),
    *forms(PARTS, {"ops.Complex": lambda a, b: ops.Complex()(a, b), "ops.polar": ops.polar, "mint.polar": mint.polar,
                   "x.astype(complex64)": lambda a, b: ops.real(a.astype(ms.complex64) * 2)}),
    Form("rotary of complex numbers", lambda x, re, im: rotate(x, ops.Complex()(re, im)), arrays((2, 3, 4), (3, 2), (3, 2))),
    Form("rotary of angles", turn, arrays((2, 3, 4), (3, 2))),
]
