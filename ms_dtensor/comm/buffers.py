# SPDX-License-Identifier: Apache-2.0
"""Device memory that HCCL takes for its communicators: two buffers each, of the size that HCCL_BUFFSIZE says.

No import of MindSpore: what a run needs is asked before it starts.
"""
from __future__ import annotations

import os

from ..errors import ConfigError

MIB = 2**20
SHARE = 2  # of a card's memory communicators get at most one part in so many: a run that has more has no place for tensors


def buffer_megabytes() -> int:
    """Size of one of a communicator's two buffers, by HCCL_BUFFSIZE; equal on all ranks, or HCCL refuses."""
    text = os.environ.get("HCCL_BUFFSIZE", "200")
    if not text.isdecimal() or not 0 < int(text) < 2**32:
        raise ConfigError("For 'HCCL_BUFFSIZE', the value is no number of MiB.", f"HCCL_BUFFSIZE={text[:40]!r}",
                          "Each communicator takes twice so much memory of the device.", "leave it out, which means 200")
    return int(text)


def communicator_bytes() -> int:
    """Of the device's memory, for one communicator."""
    return 2 * buffer_megabytes() * MIB


def check_communicators(count: int, memory: int) -> None:
    """Refuses more communicators than a card has memory for.

    Args:
        count: of this rank, the one to be made among them.
        memory: bytes of the card; 0: it is not known, and nothing is refused.

    Raises:
        ConfigError: their buffers take more than half of it.

    Example:
        >>> from ms_dtensor.comm.buffers import check_communicators
        >>> check_communicators(4, 64 << 30)
    """
    most = memory // SHARE // communicator_bytes()
    if memory and count > most:
        raise ConfigError(
            f"For 'get_group', {count} communicators do not fit into a card's memory.",
            f"2 x {buffer_megabytes()} MiB each make {count * communicator_bytes() / 2**30:.1f} GiB of {memory / 2**30:.1f}",
            f"HCCL gives each two buffers of HCCL_BUFFSIZE; half of a card, {most} of them, is the most that is made.",
            ["fewer groups: one for the same ranks is made once",
             f"HCCL_BUFFSIZE={max(1, memory // SHARE // (2 * MIB * count))}, the same on all ranks"])
