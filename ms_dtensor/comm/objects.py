# SPDX-License-Identifier: Apache-2.0
"""Objects between ranks as text that is data: what arrives is read, never run.

Not pickle, which may call anything when it is read. JSON, with one-entry dicts that say what JSON has no word for. What
cannot be sent is sent as a word of that, so that every member of the group raises the same error, none of them before the
collective. The invariant: `decode(encode(x))` equals `x`, in value and in type.
"""
from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CommError

_PLAIN = (type(None), bool, int, float, str)
_ARRAYS = "biufcSUmM"  # kinds of dtypes whose bytes are their values
_UNSENDABLE = "unsendable"


class _Unsendable(Exception):
    pass


def encode(obj: Any) -> bytes:
    """An object as bytes.

    Example:
        >>> from ms_dtensor.comm.objects import decode, encode
        >>> decode(encode({"shapes": ((2, 3), (4,)), 7: b"x"}))
        {'shapes': ((2, 3), (4,)), 7: b'x'}
    """
    try:
        return json.dumps(_written(obj)).encode()
    except _Unsendable as e:
        reason = str(e)
    except (ValueError, RecursionError) as e:  # a number of thousands of digits; lists in lists in lists
        reason = f"{type(obj).__qualname__}: {e}"
    return json.dumps({_UNSENDABLE: reason}).encode()


def decode(data: bytes) -> Any:
    """The object; raises if its sender could not send it."""
    return _read(json.loads(data))


def _written(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is list:
        return [_written(v) for v in x]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_written(v) for v in x]}
    if kind is dict:
        return {"dict": [[_written(k), _written(v)] for k, v in x.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(x).decode()}
    if kind is complex:
        return {"complex": [x.real, x.imag]}
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in _ARRAYS:
        word = "array" if isinstance(x, np.ndarray) else "scalar"
        return {word: [x.dtype.str, x.shape, base64.b64encode(x.tobytes()).decode()]}
    raise _Unsendable(f"{kind.__module__}.{kind.__qualname__}")


def _array(parts: list) -> np.ndarray:
    dtype, shape, data = parts
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()


def _raise(kind: str) -> None:
    raise CommError("For an exchange of objects, one of them cannot be sent.", kind,
                    "Ranks send None, booleans, numbers, text, bytes, NumPy arrays, and lists, tuples, sets and dicts of "
                    "these: nothing that could be code.",
                    ("send what it is made of; of a named tuple, tuple(x)", "send tensors with 'all_gather' or 'broadcast'"))


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda v: tuple(map(_read, v)), "set": lambda v: set(map(_read, v)),
    "frozenset": lambda v: frozenset(map(_read, v)), "dict": lambda v: {_read(k): _read(x) for k, x in v},
    "bytes": base64.b64decode, "bytearray": lambda v: bytearray(base64.b64decode(v)), "complex": lambda v: complex(*v),
    "array": _array, "scalar": lambda v: _array(v)[()], _UNSENDABLE: _raise,
}


def _read(x: Any) -> Any:
    if type(x) is list:
        return [_read(v) for v in x]
    if type(x) is dict:
        ((kind, value),) = x.items()
        return _READERS[kind](value)
    return x
