# SPDX-License-Identifier: Apache-2.0
"""Linear algebra on batches of matrices: the batch may be cut, a matrix is whole on the rank that works on it.

A kernel refuses a singular matrix, and what stands in for an empty shard is one; so the batch is cut only where every rank
gets as many, and is gathered elsewhere. What is linear in a matrix (its band, its diagonal) lets a Partial through.
"""
from __future__ import annotations

from .spec import SUMS, Call, Case, OpSpec, R, S

NAMES = """
inverse:MatrixInverse,MatrixInverseExt:input
determinant:MatrixDeterminant:input
log_determinant:LogMatrixDeterminant:input
cholesky:Cholesky,CholeskyInverse:input upper
matrix_power:MatrixPower:input
svd:Svd:input full_matrices compute_uv
qr:Qr:input full_matrices
qr:LinalgQr:input mode
eig:Eig:input compute_v
matrix_solve:MatrixSolve:input right
matrix_solve:CholeskySolve:right input
cdist:Cdist:input other p
matrix_band:MatrixBandPart:input lower upper
matrix_set_diag:MatrixSetDiagV3:input diagonal k
"""


def _batched(call: Call, *matrices: tuple[int, ...] | None) -> OpSpec:
    """Results of these trailing shapes, all operands and results cut alike along the batch; None: a result of no use."""
    batch = call.operands[0].shape[:-2]
    cases = [Case((S(d),) * len(call.operands), tuple(R if m is None else S(d) for m in matrices),
                  tuple((o.index, d, n) for o in call.operands))
             for d, n in enumerate(batch) if all(o.shape[:-2] == batch for o in call.operands)]
    return OpSpec(tuple(() if m is None else (*batch, *m) for m in matrices), tuple(cases))


def square(call: Call) -> OpSpec:
    """A matrix of the same size: inverse, power, Cholesky factor."""
    return _batched(call, call.operands[0].shape[-2:])


def solve(call: Call) -> OpSpec:
    """The solution has the shape of the right side, which is told first where the matrix is a Cholesky factor."""
    return _batched(call, call.args["right"].shape[-2:])


def numbers(call: Call) -> OpSpec:
    """One number per matrix, or two: sign and logarithm of a determinant."""
    return _batched(call, *((),) * (1 + (call.op == "log_determinant")))


def svd(call: Call) -> OpSpec:
    """(singular values, U, V); without U and V those two are of one element, which nobody reads."""
    m, n = call.operands[0].shape[-2:]
    k, whole = min(m, n), call.get("full_matrices")
    if not call.get("compute_uv", True):
        return OpSpec(((*call.operands[0].shape[:-2], k), (1,), (1,)), _batched(call, (k,), None, None).cases)
    return _batched(call, (k,), (m, m if whole else k), (n, n if whole else k))


def qr(call: Call) -> OpSpec:
    """(Q, R), both whole or reduced."""
    m, n = call.operands[0].shape[-2:]
    k = m if call.get("full_matrices") or call.get("mode") in (1, "complete") else min(m, n)
    return _batched(call, (m, k), (k, n))


def eig(call: Call) -> OpSpec:
    """(eigenvalues, eigenvectors, or nothing instead)."""
    n = call.operands[0].shape[-1]
    return _batched(call, (n,), (n, n) if call.get("compute_v", True) else None)


def cdist(call: Call) -> OpSpec:
    """Distances between rows: [..., m, k] and [..., n, k] give [..., m, n]."""
    x, y = call.args["input"], call.args["other"]
    rows = x.ndim - 2
    cases = [Case((S(d), S(d)), (S(d),)) for d in range(rows)]
    cases += [Case((S(rows), R), (S(rows),)), Case((R, S(rows)), (S(rows + 1),))]
    return OpSpec(((*x.shape[:-1], y.shape[-2]),), tuple(cases))


def matrix_band(call: Call) -> OpSpec:
    """A matrix without what lies outside a band."""
    x = call.args["input"]
    return OpSpec((x.shape,), tuple(call.like_first(range(x.ndim - 2), SUMS)))


def matrix_set_diag(call: Call) -> OpSpec:
    """A matrix with another diagonal: linear in both."""
    x, v, k = call.args["input"], call.args["diagonal"], call.args["k"]
    cases = [call.case({x.index: S(d), v.index: S(d)}, S(d)) for d in range(x.ndim - 2)]
    return OpSpec((x.shape,), (*cases, *(call.case({x.index: p, v.index: p}, p) for p in SUMS if k is not None)))


RULES = {"inverse": square, "cholesky": square, "matrix_power": square, "matrix_solve": solve, "determinant": numbers,
         "log_determinant": numbers, "svd": svd, "qr": qr, "eig": eig, "cdist": cdist, "matrix_band": matrix_band,
         "matrix_set_diag": matrix_set_diag}
