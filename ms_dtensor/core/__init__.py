# SPDX-License-Identifier: Apache-2.0
"""What a layout is: pure values without MindSpore, ranks or communication. Read `layout.py` first."""
