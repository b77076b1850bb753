# SPDX-License-Identifier: Apache-2.0
"""The rows of the table on real ranks, a case each: in one column by turns, at night in every column.

`pytest tests/surface/cases_rows.py -k amp` runs those whose group or name has the word, `--tier night` in all columns.
"""
import re

from ms_dtensor import comm
from tests.cases import cases
from tests.surface.table import COLUMNS, Laid, Row, all_rows, reference, run
from tests.tiers import at_night

GROUP = "surface"  # rows rewrite MindSpore's classes and set seeds
NAMED = {re.sub(r"\W+", "_", f"{row.group} {row.name}").strip("_"): (number, row) for number, row in enumerate(all_rows())}


@cases(tuple(COLUMNS), NAMED)
def is_as_on_one_device_or_refused_for_the_stated_reason(world, number: int, row: Row) -> None:
    wanted, columns = reference(row), COLUMNS[world.size]
    for column in columns if at_night() else [columns[number % len(columns)]]:
        cell = run(row, Laid(column), wanted)
        told = comm.group(range(world.size)).all_gather_object([cell["state"], *cell["text"].splitlines()[:1]])
        right = "refused" if row.reason(column) else "equal"
        assert cell["state"] == right, f"[{column}] is {cell['state']} and not {right}: {cell['text']}"
        assert all(one == told[0] for one in told), (column, told)
