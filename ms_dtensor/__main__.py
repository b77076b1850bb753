# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m ms_dtensor --help` says what it can do."""
import sys

from .tools.cli import piped

sys.exit(piped(sys.argv[1:]))
