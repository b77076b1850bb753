# SPDX-License-Identifier: Apache-2.0
"""Random data-parallel programs in which one rank does something else; ends with a line of JSON, fails if anything is wrong.

    python -m tests.long.fuzz_ranks_differ [--ranks 2] [--first 0] [--programs 300] [--minutes 10]

In the last step a rank calls alike cells in another order, leaves one out, or calls one once more. The only right end is a
`CollectiveMismatch` on all ranks, in which no line stands twice.
"""
import sys

from tests.fuzz.judged import main
from tests.fuzz.sharding.judge import OfDifferent, refer
from tests.fuzz.sharding.programs import differing

if __name__ == "__main__":
    sys.exit(main(__doc__, "tests.long.fuzz_ranks_differ", 2, 300, differing, refer, OfDifferent))
