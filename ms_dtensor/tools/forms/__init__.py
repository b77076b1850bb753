# SPDX-License-Identifier: Apache-2.0
"""The corpus of `python -m ms_dtensor verify`: every public call form, with sample arguments, a file for each family."""
