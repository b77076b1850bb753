# SPDX-License-Identifier: Apache-2.0
"""NumPy on the left of a DTensor: `np.float32(2) * x` is `2.0 * x`; an array, or a function of NumPy's, is refused.

NumPy asks `__array_ufunc__` for operators and functions alike. None there would send it to our reflected operators, which
MindSpore lets fail in its own words, or, for `==` and `!=`, answer False and True without looking.
"""
from __future__ import annotations

import operator

import numpy as np

from ..errors import MixedOperandError

_OPERATORS = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.divide: operator.truediv,
    np.floor_divide: operator.floordiv, np.remainder: operator.mod, np.power: operator.pow, np.equal: operator.eq,
    np.not_equal: operator.ne, np.less: operator.lt, np.less_equal: operator.le, np.greater: operator.gt,
    np.greater_equal: operator.ge, np.bitwise_and: lambda a, x: x & a, np.bitwise_or: lambda a, x: x | a,
    np.bitwise_xor: lambda a, x: x ^ a,
}


def called_by_numpy(self, ufunc, method, *inputs, **options):
    """`DTensor.__array_ufunc__`: NumPy's `ufunc` was called with a DTensor.

    Raises:
        MixedOperandError: an array is among the operands, or it is no operator between a number and a DTensor.
    """
    call = _OPERATORS.get(ufunc)
    number = inputs[0]
    if call is not None and method == "__call__" and not options and np.ndim(number) == 0 and \
            isinstance(number, np.generic | np.ndarray):
        return call(number.item(), self)
    met = "a numpy.ndarray meets a DTensor" if len(inputs) > 1 else "NumPy was given a DTensor"
    raise MixedOperandError(
        f"For '{ufunc.__name__}', {met}.", self._layout.describe(),
        "An array does not say how it is laid out, so one rank's data could pass for the whole.",
        ("distribute_tensor(Tensor(array), device_mesh, placements)", "x.full_tensor().asnumpy(), to work in NumPy",
         "mint's function of the same name"))
