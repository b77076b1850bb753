# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m ms_dtensor ckpt ls | diff | verify | convert`."""
import sys

from .checkpoint.cli import main

sys.exit(main(sys.argv[1:]))
