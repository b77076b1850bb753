# SPDX-License-Identifier: Apache-2.0
"""Memory that comes and goes under tensors: it is really given back, and comes again at the same address."""
from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("cpu")


def test_pages_given_back_are_the_systems():
    """Of a shared mapping they would only leave the process's books: the system would keep them, values and all."""
    from ms_dtensor.comm.fake import FakeBackend
    from ms_dtensor.comm.packing import write
    from ms_dtensor.parallel.sharding.block import HostMemory

    memory = HostMemory([(300, 400), (5,)], ms.float32, FakeBackend(1))
    first, second = memory.tensor(0), memory.tensor(1)
    value = np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32)
    for _ in range(2):
        memory.claim()
        write(memory.tensor(0), ms.Tensor(value))
        write(memory.tensor(1), ms.Tensor(value[0, :5]))
        assert np.array_equal(first.asnumpy(), value) and np.array_equal(second.asnumpy(), value[0, :5])
        memory.release()
        assert not first.asnumpy().any() and not second.asnumpy().any(), "new pages are zeros"
