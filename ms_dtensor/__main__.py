# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m ms_dtensor --help` says what it can do."""
import sys

from .tools.interrupts import come_again

if sys.argv[1:2] != ["run"]:  # of a program, which is its own master
    come_again()

from .tools.cli import piped  # noqa: E402  its imports can be interrupted, too

sys.exit(piped(sys.argv[1:]))
