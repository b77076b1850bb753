# SPDX-License-Identifier: Apache-2.0
"""Random programs on real ranks against one device; ends with a line of JSON, fails on a wrong result or ranks that part.

    python -m tests.long.fuzz [--ranks 4] [--first 0] [--programs 500] [--minutes 10]
    python -m tests.long.fuzz --seeds 137,1173                         these again

A program is 10 to 30 public calls on inputs of random layouts (`tests/fuzz/programs.py`), on 4 or 8 ranks. Each failing seed
is printed with its program, made small.
"""
import sys

from tests.fuzz.check import Judge
from tests.fuzz.judged import main
from tests.fuzz.programs import generate
from tests.fuzz.reference import refer

if __name__ == "__main__":
    sys.exit(main(__doc__, "tests.long.fuzz", 4, 500, lambda seed, ranks: generate(seed), refer, Judge))
