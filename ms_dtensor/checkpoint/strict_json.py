# SPDX-License-Identifier: Apache-2.0
"""JSON of a file that may come from anywhere: no key twice, no huge numbers, no endless depth, no odd exceptions."""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

DIGITS = 20


def strict_json(data: bytes, refuse: Callable[[str], NoReturn], *, fractions: bool = False) -> dict[str, Any]:
    """The object that the bytes are.

    Args:
        data: UTF-8.
        refuse: raises; gets what is wrong, as a sentence.
        fractions: whether numbers may be other than whole.

    Example:
        >>> from ms_dtensor.checkpoint.strict_json import strict_json
        >>> strict_json(b'{"a": [1, 2]}', print)
        {'a': [1, 2]}
    """
    def once(pairs):
        if len(dict(pairs)) < len(pairs):
            (name, _), = Counter(name for name, _ in pairs).most_common(1)
            refuse(f"it has {short(name)} twice.")
        return dict(pairs)

    def integer(text: str) -> int:
        return int(text) if len(text) <= DIGITS else refuse(f"it has a number of {len(text)} digits.")

    def fraction(text: str) -> float:
        return float(text) if fractions else refuse(f"it has the number {short(text)}; all are whole.")

    if not data.startswith(b"{"):
        refuse("it does not begin with '{'.")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_int=integer, parse_float=fraction,
                          parse_constant=lambda text: refuse(f"it has the number {text}."))
    except UnicodeDecodeError as e:
        refuse(f"it is no UTF-8 at byte {e.start}.")
    except json.JSONDecodeError as e:
        refuse(f"it is no JSON: {e.msg} at character {e.pos}.")
    except RecursionError:
        refuse("it is nested too deeply.")


def short(value: Any) -> str:
    """A value of a file as messages print it: of bounded length, and nothing in it that a terminal would take for more."""
    text = ascii(value[:40] if isinstance(value, list | str) and len(value) > 100 else value)
    return text if len(text) <= 100 else text[:97] + "..."
