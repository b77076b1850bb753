# SPDX-License-Identifier: Apache-2.0
"""Recipes built on `ms_dtensor`: models without parallel code, and the plans that lay them out."""
