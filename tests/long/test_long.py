# SPDX-License-Identifier: Apache-2.0
"""The long checks with their own sizes, at night: each prints what it did, and ends with 0 if all is well."""
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOURS = 3 * 3600


@pytest.mark.timeout(HOURS + 60)
@pytest.mark.parametrize("words", [
    "check_checkpoints kills", "check_checkpoints fuzz", "check_failures kills", "check_failures desyncs",
    "check_failures stuck", "check_two_nodes", "check_pipeline --limit 2", "fuzz",
    "check_types", "fuzz_pipeline", "fuzz_pipeline --ranks 4", "fuzz_ranks_differ",
    "fuzz_sharding", "fuzz_shm",
    "fuzz_tokens", "fuzz_tokens --ranks 4", "infer_gate", "soak"])
def test_it_ends_well(words):
    name, *rest = words.split()
    done = subprocess.run([sys.executable, "-m", f"tests.long.{name}", *rest], cwd=ROOT, capture_output=True, text=True,
                          timeout=HOURS, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    if done.stdout.startswith("left out: "):
        pytest.skip(done.stdout.strip())
