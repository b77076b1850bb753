# SPDX-License-Identifier: Apache-2.0
"""Ops of a user's own: `register_rule`, `DFunction` (with a gradient), `local_map` (by placements)."""
