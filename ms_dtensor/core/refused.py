# SPDX-License-Identifier: Apache-2.0
"""How a command of `python -m ms_dtensor` says that it cannot be answered."""
from __future__ import annotations

import json
import sys


def refused(error: object, as_json: bool) -> int:
    """Prints why, on stdout as JSON where that is asked for, else on stderr; gives the exit code."""
    print(json.dumps({"error": str(error)}) if as_json else f"error: {error}", file=sys.stdout if as_json else sys.stderr)
    return 2
