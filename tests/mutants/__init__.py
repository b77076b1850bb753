# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the branch for devices, each with a test that must turn red: `faults.py` the list, `plant.py` how.

At night only: `scripts/test.sh -m night`. `python -m tests.mutants.plant` prints caught and planted as JSON.
"""
