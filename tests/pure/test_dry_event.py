# SPDX-License-Identifier: Apache-2.0
"""Events of a dry run are plain values; who reads them needs no MindSpore."""
from ms_dtensor.core.dry_event import COMPUTE, DryEvent


def test_an_event_is_a_value_and_says_which_kind_it_is():
    product = DryEvent("matmul", flops=1024, read=640, written=256)
    moved = DryEvent("all_gather", "tp", after=(0,), bytes=96, payload=32, axes=("tp",), ranks=4, stride=2, span=6)
    assert product == DryEvent("matmul", COMPUTE, flops=1024, read=640, written=256)
    assert not product.is_move and moved.is_move
    assert len({product, moved, DryEvent("matmul", flops=1024, read=640, written=256)}) == 2
