# SPDX-License-Identifier: Apache-2.0
"""What a device can compute at most, where it was published, for the share of it that a run reaches (MFU).

Dense products of 16-bit floats, in TFLOP/s. A device that is not in the table has no peak: a share of a guess says nothing.
"""
from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """TFLOP/s, and who says so."""

    tflops: float
    source: str


_ATLAS = "the product name of its server, Atlas 800T A2"
_NVIDIA = "NVIDIA's data sheet, dense"
# Pattern of the whole name that `mindspore.hal.get_device_name()` gives.
PEAKS: dict[str, Peak] = {
    "Ascend910B2": Peak(376.0, f"{_ATLAS} 64G-376T"),
    "Ascend910B3": Peak(313.0, f"{_ATLAS} 64G-313T"),
    "Ascend910B4": Peak(280.0, f"{_ATLAS} 280T"),
    "NVIDIA A[18]00.*": Peak(312.0, _NVIDIA),
    "NVIDIA H[18]00 PCIe": Peak(756.0, _NVIDIA),
    "NVIDIA H[128]00(?! PCIe).*": Peak(989.0, _NVIDIA),
}


def peak(device_name: str) -> Peak | None:
    """The peak of a device by its name, or None.

    Example:
        >>> peak("Ascend910B2").tflops, peak("CPU")
        (376.0, None)
    """
    return next((value for name, value in PEAKS.items() if re.fullmatch(name, device_name)), None)
