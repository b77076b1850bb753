# SPDX-License-Identifier: Apache-2.0
"""A few of the kills and of the changed headers; all of them are `python -m tests.long.check_checkpoints kills`, `fuzz`."""
import json

import pytest

from tests.msrun import python


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", [("kills", "--runs=6"), ("fuzz", "--runs=300"), ("memory", "--gib=0.25")],
                         ids=lambda what: what[0])
def test_a_slice_of(what):
    done = python("-m", "tests.long.check_checkpoints", *what, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not json.loads(done.stdout)["wrong"]
