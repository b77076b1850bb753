# SPDX-License-Identifier: Apache-2.0
"""Work as a number that is the same on every machine, idle or busy: calls of functions."""
import sys
from collections.abc import Callable


def calls(fn: Callable[[], object]) -> int:
    """Python and C functions that run meanwhile, generators each time they go on."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return count
