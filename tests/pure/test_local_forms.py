# SPDX-License-Identifier: Apache-2.0
"""Every local form that a rule names exists."""
from __future__ import annotations

import re
from pathlib import Path

import ms_dtensor.ops.rules
from ms_dtensor.ops.local import LOCAL_OPS


def test_every_form_named_by_a_rule_is_in_the_table():
    named = {name for file in Path(ms_dtensor.ops.rules.__file__).parent.glob("*.py")
             for name in re.findall(r'LocalCall\(\s*"(\w+)"', file.read_text())}
    assert len(named) > 20 and named <= set(LOCAL_OPS), named - set(LOCAL_OPS)
