# SPDX-License-Identifier: Apache-2.0
"""Where a dry run's tensors would lie on a host, and what its kernels take beside their results."""
from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import mint, ops

import ms_dtensor as md
from ms_dtensor.debug import dry_run
from ms_dtensor.debug.dryrun.pool import Pool

pytestmark = pytest.mark.usefixtures("cpu")


def test_pages_of_a_pool_have_gaps_and_do_not_come_back():
    """Pieces that are given back leave gaps, which serve what fits; the longest free of one size is the first to be used."""
    pool = Pool()
    first = [pool.take(n) for n in (4096, 512, 4096, 512, 8192, 512)]
    for at in (first[2], first[0]):
        pool.give(at)
    assert pool.take(4000) == first[2] and pool.take(8) == first[0], "of two gaps the older; then a part of the other"
    pool.give(first[4])
    most = pool.most
    assert pool.take(12000) == most and pool.most == most + 12288, "no gap is large enough"
    big = pool.take(3 << 30)
    assert pool.most == most + 12288 + (3 << 30)
    pool.give(big)
    assert pool.most == most + 12288 + (3 << 30)


def test_memory_of_a_host_is_what_its_kernels_and_nodes_take():
    """MindSpore's fused Adam makes its three results anew; a norm of ours is NumPy's; silu has a tensor beside its own."""
    size = 4 * 512 * 512

    def changes(device: str, what) -> list[tuple[int, str]]:
        with dry_run(world=2, device=device) as run:
            mesh = md.init_device_mesh("cpu" if device == "CPU" else "npu", (2,), mesh_dim_names=("dp",))
            x = md.ones(512, 512, device_mesh=mesh, placements=[md.Replicate()])
            step = what(x)
            run.forget()
            _alive = step()
        return [(c.bytes, c.where) for c in run._executor.ledger.changes if abs(c.bytes) >= size and c.at]

    def adam(x):
        weight = ms.Parameter(x, name="w")
        optimizer = md.optim.AdamW([weight], 1e-3)
        return lambda: optimizer([x])

    def norm(x):
        return lambda: ops.rms_norm(x, md.ones(512, device_mesh=x.device_mesh, placements=[md.Replicate()]))
    assert changes("CPU", adam) == [(size, "pool")] * 3 + [(-size, "pool")] * 3
    assert changes("Ascend", adam) == [], "a device's writes in place"
    assert (size, "heap") in changes("CPU", norm) and (size, "pool") not in changes("CPU", norm)
    assert changes("CPU", lambda x: lambda: mint.nn.functional.silu(x)) == [(size, "pool"), (size, "pool"), (-size, "pool")]


def test_kernels_of_a_host_read_copies_of_views_and_sums_hand_gradients_on():
    """Counted in MindSpore 2.10's pool: each operand that is a view is copied, and a backward keeps the copy. A cast to its
    own dtype is the tensor itself, and the gradients of a sum are the sum's."""
    size = 4 * 512 * 512

    def changes(what, device: str = "CPU", grad: bool = False) -> list[int]:
        with dry_run(world=2, device=device) as run:
            mesh = md.init_device_mesh("cpu" if device == "CPU" else "npu", (2,), mesh_dim_names=("dp",))
            x = md.ones(512, 512, device_mesh=mesh, placements=[md.Replicate()])
            run.forget()
            if grad:
                md.grad(lambda x: what(x * 1.5).sum())(x)
            else:
                _alive = what(x)
        return [c.bytes for c in run._executor.ledger.changes if abs(c.bytes) >= size and c.at]

    def turned(x):
        return x.reshape(1024, 256)
    assert changes(lambda x: mint.exp(x)) == changes(lambda x: mint.exp(turned(x)), "Ascend") == [size]
    assert changes(lambda x: mint.exp(turned(x))) == [size, size, -size]
    assert changes(lambda x: turned(x) + turned(x)) == [size, size, size, -size, -size]
    assert changes(lambda x: mint.exp(x.astype(ms.float32))) == changes(lambda x: mint.softmax(x, -1)) == [size]
    assert changes(lambda x: mint.exp(turned(x).astype(ms.float32))) == [size, size, -size], "a cast of a view is a copy"
    square, of_views = (sum(c > 0 for c in changes(what, grad=True)) for what in (
        lambda x: mint.mul(x, x), lambda x: mint.mul(turned(x), turned(x))))
    assert of_views == square + 2, "of each view a copy"
    assert changes(lambda x: x + x, grad=True).count(size) == changes(lambda x: mint.exp(x), grad=True).count(size)
    joined = changes(lambda x: mint.cat((x, x)), "Ascend", grad=True)
    assert joined[2] == -size, "a concatenation keeps no operand"
    assert sum(c > 0 for c in joined) == 5, "the gradients of its operands are pieces of its own: the sum alone is made"
