# SPDX-License-Identifier: Apache-2.0
"""Where an op had run before the first mesh, MindSpore's kernels run behind their calls, and find what is there by then."""
from tests.msrun import python

# the reference first, as whoever compares with one device does it
PROGRAM = """
import mindspore as ms, numpy as np, ms_dtensor as md
from mindspore import Tensor, nn
from ms_dtensor.comm import current_world

def drawn(seed, *shape):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))

def cells():
    nets = nn.Dense(300, 200), nn.Dense(200, 300)
    for i, p in enumerate(p for net in nets for p in net.get_parameters()):
        p.set_data(drawn(i, *p.shape))
    return nets

def gradients(first, second, x):
    return ms.grad(lambda x: (second(first(x)) ** 2).mean(), None, first.trainable_params())(x)

x = drawn(9, 400, 300)
want = [g.asnumpy() for g in gradients(*cells(), x)]
out = cells()[0](x).asnumpy()
mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
dx = md.distribute_tensor(x, mesh, [md.Shard(0)])
assert not current_world().blocking
for way in (lambda net: md.fully_shard(net, mesh=mesh), lambda net: md.replicate(net, mesh=mesh, zero1=True),
            lambda net: md.fully_shard(net, mesh=mesh, reshard_after_forward=False)):
    nets = [way(net) for net in cells()]
    for _ in range(2):
        for got, w in zip(gradients(*nets, dx), want):
            assert np.abs(got.full_tensor().asnumpy() - w).max() < 1e-4 * np.abs(w).max(), "gradients"
    optimizer = md.optim.SGD(nets[0].trainable_params(), lr=1.0)
    grads = [g * 0 + 1 for g in gradients(*nets, dx)]
    late = nets[0](dx)
    optimizer(grads)
    assert np.abs(late.full_tensor().asnumpy() - out).max() < 1e-4 * np.abs(out).max(), "an output"
"""


def test_memory_waits_for_kernels_that_read_it():
    done = python("-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
