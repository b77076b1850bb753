# SPDX-License-Identifier: Apache-2.0
"""Lines for people, and a bar below them where a terminal is there and `rich` is installed."""
from __future__ import annotations

import os
import sys
from typing import Any


class Screen:
    """Prints lines; on a terminal it keeps a bar of the steps done under them.

    Args:
        bar: whether a bar is wanted at all.

    Example:
        >>> screen = Screen(bar=False)
        >>> screen.say("step 1")
        step 1
        >>> screen.begin(10); screen.done(1); screen.close()
    """

    def __init__(self, bar: bool = True):
        self._wanted = bar and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._bar: Any = None
        self._task: Any = None

    def begin(self, total: int) -> None:
        """From now on there is a bar of so many steps, where there can be one."""
        if self._bar is not None or not self._wanted:
            return
        try:
            from rich import progress
        except ImportError:
            return
        text = progress.TextColumn
        self._bar = progress.Progress(text("training"), progress.BarColumn(), progress.MofNCompleteColumn(), text("elapsed"),
                                      progress.TimeElapsedColumn(), text("left"), progress.TimeRemainingColumn(),
                                      transient=True)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def say(self, line: str) -> None:
        """Prints a line, above the bar."""
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def done(self, step: int) -> None:
        """So many steps are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
