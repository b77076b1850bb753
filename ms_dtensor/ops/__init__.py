# SPDX-License-Identifier: Apache-2.0
"""What ops mean on shards: `rules/` (pure data), `local/` (what one rank runs), `rng.py` (one stream of random numbers)."""
