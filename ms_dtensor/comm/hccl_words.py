# SPDX-License-Identifier: Apache-2.0
"""What HCCL's error codes mean for a user: who failed, which variable decides about the time, where the logs are. Pure.

The codes and what they stand for are those of CANN's guide to HCCL (8.0 to 8.5, "troubleshooting"); no other is explained,
as a guess would send people the wrong way. HCCL has told them on no device of ours. Read next: `group.py`, which asks here.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

CODE = re.compile(r"\b(EI\d{4})\b")
DEFAULTS = {"HCCL_EXEC_TIMEOUT": "1800 by default, 17340 at most", "HCCL_CONNECT_TIMEOUT": "120 by default, 7200 at most"}
LOGS = "ASCEND_PROCESS_LOG_PATH"
FIRST = "look for the rank that failed first: another one's log may have an earlier error, and these ranks waited for it"


@dataclass(frozen=True, slots=True)
class Meaning:
    """Of a code: what happened, the variable that decides how long it took, and what to do first."""

    happened: str
    variable: str | None
    ways: tuple[str, ...]


MEANINGS = {
    "EI0002": Meaning("A collective had begun, and another rank did not come to it in time: it ended, hangs, computes or "
                      "saves for longer, calls something else, or its link is down.", "HCCL_EXEC_TIMEOUT", (FIRST,)),
    "EI0005": Meaning("Two ranks called collectives of other kinds, sizes or dtypes at the same place.", None,
                      ("MS_DTENSOR_CHECK_EVERY=1 names the two calls with their lines",
                       "the same program, configuration and data on every rank")),
    "EI0006": Meaning("Two ranks that are to exchange data for the first time did not connect in time: one ended, came "
                      "later, or is not reached over the network of the devices.", "HCCL_CONNECT_TIMEOUT",
                      (FIRST, "hccn_tool -i 0 -link -g  on each node: whether the device's port is up")),
    "EI0015": Meaning("A communicator was to be made, and not all of its ranks came to the first one's address in time.",
                      "HCCL_CONNECT_TIMEOUT",
                      (FIRST, "HCCL_IF_IP or HCCL_SOCKET_IFNAME, if the nodes have several networks")),
}


def explain(text: str, environment: Mapping[str, str] = os.environ) -> tuple[str, str, tuple[str, ...]] | None:
    """Of the first known code in what HCCL or MindSpore said: the code, the rule of our message, and the ways out.

    Args:
        text: a message or a log.
        environment: where the time limits and the logs' folder are looked up.

    Example:
        >>> from ms_dtensor.comm.hccl_words import explain
        >>> code, rule, ways = explain("EI0006: Getting socket times out.", {})
        >>> code, ways[-2]
        ('EI0006', 'HCCL_CONNECT_TIMEOUT, now unset (120 by default, 7200 at most): seconds; the same on all ranks')
        >>> explain("out of memory") is None
        True
    """
    for code in CODE.findall(text):
        if meaning := MEANINGS.get(code):
            ways = list(meaning.ways)
            if meaning.variable:
                now = environment.get(meaning.variable, "unset")
                ways.append(f"{meaning.variable}, now {now} ({DEFAULTS[meaning.variable]}): seconds; the same on all ranks")
            ways.append(f"the log of each process, plog, is in {environment.get(LOGS) or '~/ascend/log'}: grep for ERROR")
            return code, meaning.happened, tuple(ways)
    return None
