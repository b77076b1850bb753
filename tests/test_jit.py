# SPDX-License-Identifier: Apache-2.0
"""A compiled graph bypasses dispatch, so a DTensor that enters one is refused."""
from __future__ import annotations

import pytest

from ms_dtensor.errors import OpRuleError


def test_a_jitted_function_refuses_a_dtensor(cpu):
    import mindspore as ms

    from ms_dtensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh, [Shard(0)])
    double = ms.jit(lambda t: t * 2)
    with pytest.raises(OpRuleError, match="For 'ms.jit', an argument is a DTensor"):
        double(x)
    assert (x * 2).sum().item() == 6.0
