# SPDX-License-Identifier: Apache-2.0
"""Calls that name all their operands, `mint.add(input=x, other=y)`: MindSpore looks for `__fallback__` by position only.

Its overloaded functions then fail with "Input has no __fallback__ attribute!". Here the leading operands of such a call
are put back in their positions, as the function's own documentation orders them, before MindSpore sees it. Calls
without a DTensor among the keywords are passed on untouched. Also closed here: writing a DTensor into a plain tensor by
index, and making a plain tensor of a DTensor, both of which would take this rank's shard for the whole.
"""
from __future__ import annotations

import functools
import re

from mindspore import Tensor

from ...errors import MixedOperandError
from ...internals.names import functional_overload

_BASE = Tensor.__mro__[1]  # the C++ class, whose methods are wrapped on Tensor itself


def _is_ours(value) -> bool:
    """A DTensor, or a verifier's probe."""
    return isinstance(value, Tensor) and hasattr(value, "_run_own_op")


@functools.cache
def signatures(function) -> list[list[str]]:
    """The positional parameters of each overload that a function's docstring opens with.

    Example:
        >>> from mindspore import mint
        >>> from ms_dtensor.dispatch.patches.keywords import signatures
        >>> signatures(mint.add)[0]
        ['input', 'other']
    """
    found = []
    for text in re.findall(rf"^\s*{function.__name__}\(([^)]*)\)", function.__doc__ or "", re.M):
        names = []
        for part in text.split(","):
            name = part.split("=")[0].split(":")[0].strip()
            if name.startswith("*"):
                break
            if name.isidentifier():
                names.append(name)
        if names:
            found.append(names)
    return found


def _by_position(original, function):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        if kwargs and not (args and _is_ours(args[0])) and any(map(_is_ours, kwargs.values())):
            overloads = signatures(function) or [["input"]]
            names = next((n for n in overloads if set(n) >= set(kwargs)), None) or max(
                overloads, key=lambda n: len(set(n) & set(kwargs)))
            while len(args) < len(names) and names[len(args)] in kwargs:
                args = (*args, kwargs.pop(names[len(args)]))
        return original(self, *args, **kwargs)
    return call


def _set_item(self, index, value):
    """`Tensor.__setitem__` of a plain tensor: a DTensor is refused."""
    if getattr(value, "_layout", None) is not None:
        raise MixedOperandError("For 'setitem', a DTensor cannot be written into a plain tensor.",
                                f"plain {type(self).__name__}{list(self._shape)} <- {value._layout.describe()}",
                                "The plain tensor would hold this rank's shard only.",
                                ("target = x.new_zeros(shape) of a DTensor x, or one ops.cat of the parts",
                                 "distribute_tensor(target, device_mesh, placements) first",
                                 "write value.full_tensor() or value.to_local()"))
    return _BASE.__setitem__(self, index, value)


def _init(self, *args, **kwargs):
    """`Tensor(dtensor)` is refused."""
    if args and getattr(args[0], "_layout", None) is not None and self.__class__ is Tensor:
        raise MixedOperandError("For 'Tensor', the data is a DTensor.", args[0]._layout.describe(),
                                "The new tensor would hold this rank's shard only.",
                                ("x.full_tensor() or x.to_local()", "x.clone()"))
    _BASE.__init__(self, *args, **kwargs)


def doors() -> list[tuple]:
    """Of overloaded functions, and of plain tensors."""
    instances = {name: getattr(functional_overload, f"_{name}_instance", None) for name in functional_overload.__all__}
    # the class, which nobody shares: the graph compiler knows the object, and would not know a function in its place
    return [*((type(one), "__call__", functools.partial(_by_position, function=getattr(functional_overload, name)))
              for name, one in instances.items() if one is not None),
            (Tensor, "__setitem__", lambda _: _set_item), (Tensor, "__init__", lambda _: _init)]
