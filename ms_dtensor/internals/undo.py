# SPDX-License-Identifier: Apache-2.0
"""What was patched, in order, so that it can be taken back exactly."""
from __future__ import annotations


class Patched:
    """Attributes that stand in the place of MindSpore's; falsy while there are none."""

    def __init__(self) -> None:
        self._originals: list[tuple[object, str, object]] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    def put(self, holder, name: str, value) -> None:
        """Sets an attribute of a module, class or object."""
        self._originals.append((holder, name, holder.__dict__.get(name)))
        setattr(holder, name, value)

    def take_back(self) -> None:
        """Restores all, last first; an attribute that was inherited is inherited again."""
        while self._originals:
            holder, name, original = self._originals.pop()
            if original is None:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
