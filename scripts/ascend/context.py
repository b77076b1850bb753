# SPDX-License-Identifier: Apache-2.0
"""What context parallelism needs of Ascend's kernels and of HCCL that no document says: five questions and their answers.

Kernels against NumPy in float64. Not run on hardware: written against the calls that the library makes. A part gives a
dict; what is in its "failed" makes it fail.
"""
from __future__ import annotations

import numpy as np

BOUND = 2.0**-6  # of the largest element, in bfloat16
HEADS, GROUPS, E = 4, 2, 64
Q_ENDS, K_ENDS = (40, 96), (72, 176)  # the first run has 32 keys before its own 40, the second 48 before its own 56


def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, heads, E)) for rows, heads in
            ((Q_ENDS[-1], HEADS), (K_ENDS[-1], GROUPS), (K_ENDS[-1], GROUPS), (Q_ENDS[-1], HEADS))]


def wanted(q, k, v, dout) -> dict[str, np.ndarray]:
    """Result, greatest score, sum of weights, and gradients; the last query of a run stands where its last key does."""
    out, (dq, dk, dv) = np.zeros_like(q), (np.zeros_like(x) for x in (q, k, v))
    top, total, q0, k0 = np.zeros(q.shape[:2]), np.zeros(q.shape[:2]), 0, 0
    for q1, k1 in zip(Q_ENDS, K_ENDS):
        seen = np.tril(np.ones((q1 - q0, k1 - k0), bool), (k1 - k0) - (q1 - q0))
        for h in range(HEADS):
            x, keys, values, d = q[q0:q1, h], k[k0:k1, h * GROUPS // HEADS], v[k0:k1, h * GROUPS // HEADS], dout[q0:q1, h]
            scores = np.where(seen, x @ keys.T / np.sqrt(E), -np.inf)
            top[q0:q1, h] = scores.max(1)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            total[q0:q1, h] = weights.sum(1)
            p = weights / weights.sum(1, keepdims=True)
            out[q0:q1, h] = p @ values
            ds = p * (d @ values.T - (d * out[q0:q1, h]).sum(1, keepdims=True)) / np.sqrt(E)
            dq[q0:q1, h] = ds @ keys
            dk[k0:k1, h * GROUPS // HEADS] += ds.T @ x
            dv[k0:k1, h * GROUPS // HEADS] += p.T @ d
        q0, k0 = q1, k1
    return {"out": out, "top": top, "total": total, "dq": dq, "dk": dk, "dv": dv}


def answers(dtype) -> dict[str, dict[str, float]]:
    """By question, how far what the kernels give is from NumPy, relative to the largest element."""
    import mindspore as ms
    from mindspore import Tensor

    from ms_dtensor.core.balance import Mask
    from ms_dtensor.ops.local import varlen

    arrays = [Tensor(x, ms.float32).astype(dtype) for x in drawn()]
    exact = [x.astype(ms.float32).asnumpy().astype(np.float64) for x in arrays]
    want, (q, k, v, dout), scale = wanted(*exact), arrays, E ** -0.5

    def off(got: dict) -> dict[str, float]:
        values = {n: x.astype(ms.float32).asnumpy() if isinstance(x, Tensor) else x for n, x in got.items()}
        return {n: float(np.abs(x - want[n]).max() / np.abs(want[n]).max()) for n, x in values.items()}
    told = {}

    def loss(q, k, v):
        return (varlen.runs(q, k, v, Q_ENDS, K_ENDS, Mask(), scale).astype(ms.float32) * dout.astype(ms.float32)).sum()
    grads = ms.grad(loss, (0, 1, 2))(q, k, v)
    told["packed sequences whose keys are longer than their queries"] = off(
        {"out": varlen.runs(q, k, v, Q_ENDS, K_ENDS, Mask(), scale), **dict(zip(("dq", "dk", "dv"), grads))})
    one = varlen.fused(q, k, v, Q_ENDS, K_ENDS, True, scale)
    told["statistics of packed tokens lie as [tokens, heads, 8]"] = off({"top": one.top[..., 0], "total": one.total[..., 0]})
    before = [k1 - q1 + q0 - k0 for q0, q1, k0, k1 in zip((0, *Q_ENDS), Q_ENDS, (0, *K_ENDS), K_ENDS)]
    far = np.r_[0:before[0], K_ENDS[0]:K_ENDS[0] + before[1]].astype(np.int32)
    near = np.setdiff1d(np.arange(K_ENDS[-1]), far).astype(np.int32)
    blocks = [([ms.ops.gather(x, Tensor(at), 0) for x in (k, v)], tuple(np.cumsum(ends).tolist()), diagonal, at)
              for at, ends, diagonal in ((far, before, False), (near, np.diff([0, *Q_ENDS]), True))]
    whole = None
    for keys, ends, diagonal, _ in blocks:
        whole = varlen.joined(whole, varlen.fused(q, *keys, Q_ENDS, ends, diagonal, scale))
    told["two blocks of keys, joined by their statistics"] = off(
        {"out": whole.out, "top": whole.top[..., 0], "total": whole.total[..., 0]})
    sums = {n: np.zeros_like(want[n]) for n in ("dq", "dk", "dv")}
    for keys, ends, diagonal, at in blocks:
        parts = varlen.fused_grad(q, dout, whole._replace(out=whole.out.astype(dtype)), *keys, Q_ENDS, ends, diagonal, scale)
        dq, dk, dv = (x.astype(ms.float32).asnumpy() for x in parts)
        sums["dq"] += dq
        sums["dk"][at] += dk
        sums["dv"][at] += dv
    told["the gradient of a block from statistics of all blocks"] = off(sums)
    return told


def context(world, options) -> dict:
    """The kernels' answers, and whether HCCL takes pieces of no rows: the last rank gives none and gets one of each."""
    import mindspore as ms
    from mindspore import Tensor

    from ms_dtensor import comm

    told = answers(ms.float32 if options.rehearse else ms.bfloat16)
    failed = {question: off for question, off in told.items() if max(off.values()) > BOUND}
    n, me = world.size, world.rank
    if n > 1:
        gives = [int(dst == n - 1 and me != n - 1) for dst in range(n)]
        gets = [int(me == n - 1 and src != n - 1) for src in range(n)]
        rows = Tensor(np.full((sum(gives), 3), me, np.float32))
        got = comm.group(tuple(range(n))).all_to_all_rows(rows, gives, gets).asnumpy()
        right = got[:, 0].tolist() == ([float(r) for r in range(n - 1)] if me == n - 1 else [])
        told["pieces of no rows"] = {"taken": right}
        if not right:
            failed["pieces of no rows"] = {"got": got.tolist()}
    return {"off by": told, "bound": BOUND, "failed": failed}
