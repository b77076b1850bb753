# SPDX-License-Identifier: Apache-2.0
"""How the parameters of a model are called in somebody else's files: patterns of names.

`*` stands for one part of a name between dots. If the other name has one `*` more, the parameter holds a row of tensors,
stacked along a new first dim (the experts of a layer).
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import CheckpointError


class Names(NamedTuple):
    """What a parameter is called."""

    names: tuple[str, ...]
    """One; or, if stacked, one for each index of the first dim."""
    stacked: bool


def translate(name: str, key_map: Mapping[str, str] | None, shape: Sequence[int]) -> Names | None:
    """The other names of a parameter of this shape by the first pattern that it matches; None if there is none.

    Example:
        >>> from ms_dtensor.checkpoint.key_map import translate
        >>> key_map = {"layers.*.wq": "model.*.q_proj", "layers.*.w1": "model.*.experts.*.w1"}
        >>> translate("layers.7.wq", key_map, (4, 4)).names, translate("layers.7.w1", key_map, (2, 4)).names
        (('model.7.q_proj',), ('model.7.experts.0.w1', 'model.7.experts.1.w1'))
    """
    if key_map is None:
        return Names((name,), False)
    if not isinstance(key_map, Mapping):
        raise CheckpointError(f"For 'key_map', {key_map!r} is no dict.", "", "It has a pattern of names by another.")
    for pattern, other in key_map.items():
        found = _regex(pattern).fullmatch(name)
        if found is None:
            continue
        extra = other.count("*") - len(found.groups())
        if extra not in (0, 1) or extra and not shape:
            raise CheckpointError(f"For 'key_map', '{pattern}' and '{other}' do not go together.", f"{name} {list(shape)}",
                                  "The second has as many stars as the first or, for stacked tensors, one more.")
        if not extra:
            return Names((_filled_in(other, found.groups()),), False)
        return Names(tuple(_filled_in(other, (*found.groups(), str(i))) for i in range(shape[0])), True)
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of these."""
    return any(_regex(p).fullmatch(name) for p in patterns)


def _regex(pattern: str) -> re.Pattern:
    return re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)"))


def _filled_in(pattern: str, parts: Sequence[str]) -> str:
    first, *rest = pattern.split("*")
    return first + "".join(part + text for part, text in zip(parts, rest, strict=True))
