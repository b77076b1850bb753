# SPDX-License-Identifier: Apache-2.0
"""One call as it reached dispatch, and its arguments by the names that rules use."""
from __future__ import annotations

from mindspore import Tensor

from ..errors import OpRuleError
from ..internals.names import TensorOverloadCall
from ..internals.target import cpu_kernels
from ..ops.rules.names import ALIASES, METHODS

_OWN = frozenset(("name", "attrs", "init_attrs", "_update_parameter", "input_names", "output_names"))


class OpCall:
    """`func(*args, **kwargs)`, or `func(primitive, its name, args)` as MindSpore's classic primitives are called.

    `tensors` are those among the arguments, in order of appearance. An op of our own has no `func` and no `args`.
    """

    __slots__ = ("args", "func", "kwargs", "primitive", "tensors")

    def __init__(self, func, primitive, args, kwargs, tensors):
        self.func, self.primitive, self.args, self.kwargs, self.tensors = func, primitive, args, kwargs, tensors

    def compute(self, *args, **kwargs):
        """The same function on other arguments."""
        return self.func(*args, **kwargs) if self.primitive is None else self.func(self.primitive, self.primitive.name, args)


def op_name(func) -> str:
    """The op that a call runs on this device: MindSpore names a method's operator even where it runs other code."""
    if func.__class__ is TensorOverloadCall and cpu_kernels():
        return METHODS.get(func.name, func.name)
    return func.name


def refill(values, tensors):
    """Arguments with their tensors replaced, in order of appearance, by the next of an iterator."""
    if values.__class__ is dict:
        return {k: refill((v,), tensors)[0] for k, v in values.items()}
    out = [next(tensors) if isinstance(v, Tensor) else
           refill(v, tensors) if v.__class__ in (list, tuple) else v for v in values]
    return out if values.__class__ is list else tuple(out)


def bind_arguments(name, params, args, kwargs, primitive=None) -> dict:
    """Arguments by name; a classic primitive's attributes (a stride, ...) come as the argument "attrs"."""
    bound: dict = {}
    i = 0
    for p in params:
        if p[0] == "*":
            if i < len(args):
                bound[p[1:]] = tuple(args[i:])
            i = len(args)
        elif i < len(args):
            bound[p] = args[i]
            i += 1
    if i < len(args):
        raise OpRuleError(f"For '{name}', {len(args)} arguments were given, the rule knows {params}.")
    known = {p.lstrip("*") for p in params}
    for k, v in kwargs.items():
        k = k if k in known else ALIASES.get(k, k)
        if k not in known:
            raise OpRuleError(f"For '{name}', the rule does not know the argument {k!r}.", "", f"It knows {params}.",
                              "pass it positionally, or use local_map")
        bound[k] = v
    if primitive is not None:
        bound["attrs"] = attributes(primitive)
    return bound


def attributes(primitive) -> dict:
    """What a classic primitive was made with (a stride, a probability): in its attributes or merely on the object."""
    out = {k: v for k, v in primitive.__dict__.items() if k not in _OWN}
    out.update((k, v) for k, v in primitive.attrs.items() if k not in _OWN)
    return out
