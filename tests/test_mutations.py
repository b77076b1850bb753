# SPDX-License-Identifier: Apache-2.0
"""The proof has no holes: every fault planted in a rule is found by the verifier."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(300)
def test_every_planted_fault_is_caught():
    done = subprocess.run([sys.executable, "scripts/mutate_rules.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout[done.stdout.index("{"):])
    assert result["planted"] >= 40 and not result["survived"], result
