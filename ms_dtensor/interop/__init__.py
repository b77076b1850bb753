# SPDX-License-Identifier: Apache-2.0
"""Meeting other libraries at run time, without depending on them. Nothing imports this package otherwise."""
