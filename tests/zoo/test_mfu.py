# SPDX-License-Identifier: Apache-2.0
"""scripts/bench/mfu.py: what is counted a layer does not grow with the ranks that share it, and the host keeps up."""
from __future__ import annotations

import json
import sys

import pytest
import yaml

from ms_dtensor.debug.predict import load_hardware
from scripts.bench import mfu


@pytest.mark.parametrize(("name", "collectives", "device", "hidden", "fits"), [
    ("tp8", 10, (11, 13), 0.0, True), ("tp8 x fsdp64", 13, (12, 15), 0.6, True), ("fsdp8", 3, (50, 70), 0.9, False)])
def test_the_table_of_the_8b(name, collectives, device, hidden, fits):
    """Of tp8 each half of a block gathers and scatters, forward and backward, and gathers once more for weights' gradients;
    of fully_shard there are two gathers and a reduction a unit, over 8 ranks as over 64."""
    config = mfu.ROOT / "model_zoo/llama/configs/llama3_8b.yaml"
    machine = load_hardware("910b")
    of = mfu.counted(config, name, machine)
    made = mfu.row(name, of, machine, {"op": 25.0, "collective": 130.0}, slower=2.2)
    asked = 44 + 12 * ("fsdp" in name)  # `fully_shard`'s kernels, as `fsdp_kernels.py` counts them; docs/support.md
    assert (made["operations a layer"], made["collectives a layer"]) == (asked, collectives)
    assert device[0] < made["device ms a layer"] < device[1]
    assert hidden <= made["hidden"] < hidden + 0.11
    assert made["fits"] is fits
    assert made["host ms a layer, here"] == pytest.approx((asked * 25 + collectives * 130) / 1000, abs=0.06)
    assert made["host ms a layer, slower"] < made["device ms a layer"]
    assert made["MFU, here"] == made["MFU, slower"] > 0.25
    behind = mfu.row(name, of, machine, {"op": 2500.0, "collective": 130.0}, slower=2.2)
    assert behind["MFU, slower"] < behind["MFU, here"] < made["MFU, here"], "a host that is too slow decides"


def test_a_file_of_a_node_is_all_that_goes_in(tmp_path, monkeypatch, capsys):
    """What the host costs is its own then, and nothing is measured here."""
    from ms_dtensor.debug.predict.hardware import MACHINES

    told = yaml.safe_load((MACHINES / "910b.yaml").read_text()) | {"asking_us": {"op": 30.0, "collective": 200.0},
                                                                  "source": "a node"}
    (file := tmp_path / "node.yaml").write_text(yaml.safe_dump(told))
    monkeypatch.setattr(mfu, "host", lambda: {"op": 1.0, "collective": 1.0})
    monkeypatch.setattr(sys, "argv", ["mfu.py", "--machine", str(file), "--rows", "tp8"])
    mfu.main()
    made = json.loads(capsys.readouterr().out)
    assert made["source"] == "a node" and made["host us"] == {"op": 30.0, "collective": 200.0}
    assert made["rows"][0]["host ms a layer, here"] == pytest.approx((44 * 30 + 10 * 200) / 1000, abs=0.06)
    monkeypatch.setattr(sys, "argv", ["mfu.py", "--host"])
    mfu.main()
    assert json.loads(capsys.readouterr().out) == {"op": 1.0, "collective": 1.0}


def test_zero1_hides_what_it_sends_as_fully_shard_does():
    """Its units are the blocks, so that the gathering of the next and the reduction of the last go beside this one."""
    of = mfu.counted(mfu.ROOT / "model_zoo/llama/configs/llama3_8b.yaml", "zero1 on 8, recomputed", load_hardware("910b"))
    assert of.moves == 2 and of.still < 0.1 * of.sent
    assert of.packed == 8, "it gathers once, and fully_shard once more for the backward"
