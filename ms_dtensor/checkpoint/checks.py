# SPDX-License-Identifier: Apache-2.0
"""What an index of any format is checked for. Pure.

It may come from anywhere, so nothing in it is believed: types, names and sizes are checked before any is used, no path is in
it, and nothing is allocated for what it merely claims. Read next: `parsing.py`.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import CheckpointError
from .index import FORMAT, TensorInfo, digest, natural
from .safetensors_file import DTYPES
from .strict_json import short

_OPENING = re.compile(rb'\A\{"digest": "([0-9a-f]{32})",\n"index": ')
_ID = re.compile(r"[0-9a-f]{32}")
_DIGITS = 1000  # of the longest whole number


class Checks:
    """Checks of one file."""

    def __init__(self, where: str):
        self.where = where

    def refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"For '{self.where}', this is no sound index: {why}", "",
                              "Nothing of a checkpoint is read before its index is right.",
                              ("load another checkpoint of the run", "python -m ms_dtensor ckpt verify FOLDER tells more"))

    def opened(self, data: bytes) -> dict[str, Any]:
        """The tree, of some version."""
        opening = _OPENING.match(data)
        if opening is None or not data.endswith(b"}\n"):
            self.refuse("it does not begin and end as one; it may be cut off.")
        text = data[opening.end():-2]
        if digest(text) != opening[1].decode():
            self.refuse("its digest is not that of its text: bytes of it have changed.")
        try:
            body = json.loads(text.decode("utf-8"), object_pairs_hook=self._once, parse_int=self._integer,
                              parse_constant=lambda word: self.refuse(f"it has the number {word}."))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
            self.refuse(f"it is no JSON: {type(e).__name__} {str(e)[:80]}.")
        if not isinstance(body, dict) or body.get("format") != FORMAT or type(body.get("version")) is not int:
            self.refuse(f"its format is {short(body.get('format') if isinstance(body, dict) else body)}, not '{FORMAT}'.")
        return body

    def _once(self, pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            self.refuse("a name of it is there twice.")
        return found

    def _integer(self, text: str) -> int:
        return int(text) if len(text) <= _DIGITS else self.refuse(f"it has a number of {len(text)} digits.")

    def fields(self, value: Any, what: str, *names: str) -> None:
        """Refuses what is no map of just these."""
        if not isinstance(value, dict) or set(value) != set(names):
            self.refuse(f"{what} does not have just {', '.join(names)}.")

    def map(self, value: Any, what: str) -> dict[str, Any]:
        """A map."""
        return value if isinstance(value, dict) else self.refuse(f"its '{what}' is no map.")

    def list(self, value: Any, what: str) -> list[Any]:
        """A list."""
        return value if isinstance(value, list) else self.refuse(f"{what} are {short(value)}, no list.")

    def beginning(self, body: dict[str, Any]) -> None:
        """What all versions begin with."""
        if not isinstance(body["id"], str) or not _ID.fullmatch(body["id"]):
            self.refuse(f"its id is {short(body['id'])}.")
        if not isinstance(body["library"], str):
            self.refuse("its 'library' is no text.")
        if body["step"] is not None and not natural(body["step"]):
            self.refuse(f"its step is {short(body['step'])}.")

    def plain(self, body: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Any], dict[str, str]]:
        """Values and ties."""
        values = {key: self._value(key, v) for key, v in self.map(body["values"], "values").items()}
        tied = self.map(body["tied"], "tied")
        for key, target in tied.items():
            if not isinstance(target, str) or target not in tensors:
                self.refuse(f"{short(key)} is tied to {short(target)}, which is no tensor.")
        twice = (tensors.keys() & values.keys()) | (tensors.keys() & tied.keys()) | (values.keys() & tied.keys())
        if twice:
            self.refuse(f"{short(min(twice))} is two things.")
        return values, tied

    def kind(self, key: str, t: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        """A tensor's dtype and shape."""
        dtype = DTYPES.get(t["dtype"]) if isinstance(t["dtype"], str) else None
        shape = t["shape"]
        if dtype is None:
            self.refuse(f"the dtype of {short(key)} is {short(t['dtype'])}.")
        if not isinstance(shape, list) or not all(map(natural, shape)) or len(shape) > 32 or \
                math.prod(max(n, 1) for n in shape) >= 1 << 58:
            self.refuse(f"the shape of {short(key)} is {short(shape)}.")
        return dtype.name, tuple(shape)

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        if isinstance(value, dict | list):
            self.refuse(f"the value of {short(key)} is {short(value)}.")
        return value
