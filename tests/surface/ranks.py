# SPDX-License-Identifier: Apache-2.0
"""What every rank of the table's launch runs: `python -m tests.surface.ranks FIRST COLUMNS [TEXT]`, cells from FIRST on.

Rank 0 reports {"begins": number} before and the cell after it. Where ranks do not answer alike the cell is "parted"; where
they lost step the launch ends and the next one goes on behind the cell.
"""
from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from tests.msrun import REPORTS, report
from tests.rank_main import BAD, LOST_STEP, OK, PENDING, agree, in_step
from tests.surface.table import COLUMNS, SLICE, Laid, all_rows, reference, run

LIMIT = 90.0  # seconds for one cell


def main(first: int, columns: str, text: str) -> int:
    from ms_dtensor import comm

    faulthandler.enable()
    world = comm.start("cpu")
    cells = [cell for cell in cells_of(world.size, text) if not columns or cell[1] in columns.split(";")]
    sync = os.open(Path(os.environ[REPORTS]) / "sync.bin", os.O_RDWR | os.O_CREAT)
    os.ftruncate(sync, len(cells) * world.size)
    everyone = comm.group(tuple(range(world.size)))
    wanted, of = None, None
    for number, (row, column) in list(enumerate(cells))[first:]:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if world.rank == 0:
            report({"begins": number})
        if row is not of:
            of, wanted = row, reference(row)
        cell = run(row, Laid(column), wanted)
        faulthandler.cancel_dump_traceback_later()
        alike = agree(sync, number, world.rank, world.size, OK if cell["state"] in ("equal", "refused") else BAD)
        parted = PENDING in alike or (BAD in alike and not in_step(comm, world, number))
        if not parted:
            states = everyone.all_gather_object([cell["state"], cell["text"].splitlines()[:1]])
            if len(set(map(str, states))) > 1 and (cell["state"] != "wrong" or {s for s, _ in states} != {"wrong"}):
                cell = {"state": "parted", "text": "\n".join(map(str, states)) + "\n" + cell["text"]}
        if world.rank == 0 or parted:
            report({"number": number, "group": row.group, "name": row.name, "column": column,
                    **(cell if not parted else {"state": "parted", "text": cell["state"] + ": " + cell["text"]})})
        if parted:
            return LOST_STEP
    return 0


def cells_of(size: int, text: str) -> list:
    """Rows x columns that a world of this size runs; only rows whose group or name contains `text`, or a `SLICE`."""
    if text == SLICE:
        columns = [column for each in COLUMNS.values() for column in each]
        mine = [(row, columns[i % len(columns)]) for i, row in enumerate(all_rows())]
        return [(row, column) for row, column in mine if column in COLUMNS[size]]
    return [(row, column) for row in all_rows() for column in COLUMNS[size] if text in f"{row.group}: {row.name}"]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], " ".join(sys.argv[3:])))
