# SPDX-License-Identifier: Apache-2.0
"""What surrounds a training run, whichever model it trains: the command line, trackers, guard, peaks, traces, plots, doctor.

Nothing here changes a number of a run, and nothing is imported by the layers below. Each file stands alone; what it needs
besides NumPy (matplotlib, a tracker, rich) is imported when it is used. Read first: `cli.py`.
"""
