# SPDX-License-Identifier: Apache-2.0
"""A griffe extension: docstrings say "Example:", griffe's section of doctests is called "Examples:"."""
from __future__ import annotations

import re

import griffe


class Sections(griffe.Extension):
    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
