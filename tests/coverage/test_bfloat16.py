# SPDX-License-Identifier: Apache-2.0
"""bfloat16 DTensors on a CPU mesh: every op runs, in float32, and rounds once; so do gradients."""
import mindspore as ms
import mindspore.mint.nn.functional as F  # noqa: N812
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import Replicate, Shard
from ms_dtensor.comm import fake_world

ULP = 2.0**-8
RNG = np.random.default_rng(0)
X, Y, W, T = (RNG.normal(size=s).astype(np.float32) for s in ((4, 6), (4, 6), (5, 6), (7, 6)))
IDS = Tensor(np.array([1, 5, 1, 0], np.int32))

OPS = {
    "matmul": lambda x, y, w, t: mint.matmul(x, mint.transpose(w, 0, 1)),
    "linear": lambda x, y, w, t: F.linear(x, w),
    "sum": lambda x, y, w, t: x.sum(-1),
    "mean": lambda x, y, w, t: mint.mean(x, 0, keepdim=True),
    "max": lambda x, y, w, t: mint.amax(x, 1),
    "exp": lambda x, y, w, t: mint.exp(x),
    "softmax": lambda x, y, w, t: mint.softmax(x, -1),
    "log_softmax": lambda x, y, w, t: F.log_softmax(x, -1),
    "silu": lambda x, y, w, t: F.silu(x),
    "gelu": lambda x, y, w, t: F.gelu(x),
    "where": lambda x, y, w, t: mint.where(x > y, x, y),
    "compare": lambda x, y, w, t: (x >= y).astype(ms.float32),
    "mul scalar": lambda x, y, w, t: x * 1.5,
    "masked_fill": lambda x, y, w, t: x.masked_fill(y > 0, -1.0),
    "layer_norm": lambda x, y, w, t: F.layer_norm(x, (6,)),
    "rms_norm": lambda x, y, w, t: ops.rms_norm(x, t[0])[0],
    "rsqrt": lambda x, y, w, t: mint.rsqrt(mint.abs(x)),
    "gather": lambda x, y, w, t: ops.gather(t, IDS_ON(x), 0),
    "embedding": lambda x, y, w, t: F.embedding(IDS_ON(x), t),
    "slice": lambda x, y, w, t: x[1:3, :4],
    "cat": lambda x, y, w, t: mint.cat([x, y], 1),
    "stack": lambda x, y, w, t: mint.stack([x, y]),
    "reshape": lambda x, y, w, t: x.reshape(2, 12),
    "expand": lambda x, y, w, t: mint.broadcast_to(x[None], (3, 4, 6)),
    "tril": lambda x, y, w, t: mint.tril(x),
    "clone": lambda x, y, w, t: x.clone(),
    "einsum": lambda x, y, w, t: mint.einsum("ij,kj->ik", x, w),
}


def IDS_ON(x):  # noqa: N802
    """The index list beside x: plain, or replicated on its mesh."""
    return IDS if type(x) is Tensor else md.distribute_tensor(IDS, x.device_mesh, [Replicate()])


@pytest.mark.parametrize("name", OPS)
def test_rounds_once(name):
    fn = OPS[name]
    rounded = [Tensor(v).astype(ms.bfloat16).astype(ms.float32).asnumpy() for v in (X, Y, W, T)]
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))

        def placed(dtype):
            return [md.distribute_tensor(Tensor(v).astype(dtype), mesh, [Shard(0)]) for v in rounded]
        seed = None

        def run(dtype):
            nonlocal seed
            out = fn(*placed(dtype))
            if seed is None:
                seed = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
            weight = md.distribute_tensor(Tensor(seed), mesh, [Replicate()])
            _, grads = md.value_and_grad(lambda *xs: (fn(*xs).float() * weight).sum(), (0, 1, 2, 3))(*placed(dtype))
            return out, [g.to_local().astype(ms.float32).asnumpy() for g in grads]
        (low, low_grads), (high, high_grads) = run(ms.bfloat16), run(ms.float32)
        assert low.dtype == (ms.float32 if name == "compare" else ms.bfloat16)
        wanted = high.to_local().astype(ms.bfloat16).astype(ms.float32).asnumpy()
        assert np.allclose(low.to_local().astype(ms.float32).asnumpy(), wanted, rtol=ULP, atol=1e-6)
        for got, exact in zip(low_grads, high_grads):
            assert np.allclose(got, exact, rtol=4 * ULP, atol=4 * ULP * max(1.0, float(np.abs(exact).max())))
