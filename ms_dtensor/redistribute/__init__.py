# SPDX-License-Identifier: Apache-2.0
"""From one layout to another: `plan` (pure search), `cost` (pure model), `execute` (runs a plan, differentiably)."""
