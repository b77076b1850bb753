# SPDX-License-Identifier: Apache-2.0
"""scripts/bench/mfu.py: what is counted a layer does not grow with the ranks that share it, and the host keeps up."""
from __future__ import annotations

import pytest

from ms_dtensor.debug.predict import load_hardware
from scripts.bench import mfu


@pytest.mark.parametrize(("name", "collectives", "device", "fits"), [
    ("tp8", 10, (12, 14), True), ("tp8 x fsdp64", 13, (12, 15), True), ("fsdp8", 3, (50, 70), False)])
def test_the_table_of_the_8b(name, collectives, device, fits):
    """Of tp8 each half of a block gathers and scatters, forward and backward, and gathers once more for weights' gradients;
    of fully_shard there are two gathers and a reduction a unit, over 8 ranks as over 64."""
    config = mfu.ROOT / "model_zoo/llama/configs/llama3_8b.yaml"
    machine = load_hardware("910b")
    of = mfu.counted(config, name, machine)
    made = mfu.row(name, of, machine, {"op": 25.0, "collective": 130.0}, slower=2.2)
    assert (made["operations a layer"], made["collectives a layer"]) == (51, collectives)
    assert device[0] < made["device ms a layer"] < device[1]
    assert made["fits"] is fits
    assert made["host ms a layer, here"] == pytest.approx((51 * 25 + collectives * 130) / 1000, abs=0.06)
    assert made["host ms a layer, slower"] < made["device ms a layer"]
    assert made["MFU, here"] == made["MFU, slower"] > 0.25
    behind = mfu.row(name, of, machine, {"op": 2500.0, "collective": 130.0}, slower=2.2)
    assert behind["MFU, slower"] < behind["MFU, here"] < made["MFU, here"], "a host that is too slow decides"
