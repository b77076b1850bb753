# SPDX-License-Identifier: Apache-2.0
"""Random data-parallel programs on real ranks against one device; ends with a line of JSON, fails if anything is wrong.

    python -m tests.long.fuzz_sharding [--ranks 2] [--first 0] [--programs 2000] [--minutes 10]
    python -m tests.long.fuzz_sharding --seeds 137,1173                these again

A program is a nested model, how it is wrapped, a mesh and two to five steps (`tests/fuzz/sharding/programs.py`), in float64;
one device runs it without the wraps. Each failing seed is printed with its program, and made small.
"""
import sys

from tests.fuzz.judged import main
from tests.fuzz.sharding.judge import Judge, refer
from tests.fuzz.sharding.programs import generate

if __name__ == "__main__":
    sys.exit(main(__doc__, "tests.long.fuzz_sharding", 2, 2000, generate, refer, Judge))
