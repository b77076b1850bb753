# SPDX-License-Identifier: Apache-2.0
"""Checks and fuzzers of minutes to hours: `python -m tests.long.NAME --help`, or all by `scripts/test.sh -m night`."""
