# SPDX-License-Identifier: Apache-2.0
"""Who touches a tensor while a collective reads or writes it: every op of MindSpore's that Python can name is asked first.

A device would run such an op beside the collective and give what is there, old, new or half. Not asked are views, which
touch no element, and what autograd does in C++: garbage that it takes for numbers shows in the results, and what it writes
in the bytes at the wait. What is asked is counted, too, as "ops" on the device: an op is one kernel at least, and what ops
call within is theirs.
"""
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from mindspore import Tensor, mint, ops
from mindspore.ops import primitive

from ms_dtensor.internals.names import NoFallbackGuard

NUMBERS = ("__array__", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__iter__", "__setitem__")
OPERATORS = tuple(f"__{side}{name}__" for side in ("", "r", "i") for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")) + (
    "__abs__", "__neg__", "__pos__", "__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# looks at what a tensor is, or makes another on the same elements
VIEWS = frozenset("""
chunk diagonal dim dsplit expand expand_as expand_dims broadcast_to hsplit moveaxis movedim narrow permute select split
squeeze swapaxes swapdims t tensor_split transpose unbind unfold unsqueeze unstack view view_as vsplit adjoint
data_ptr depend has_init hooks init_data is_complex is_contiguous is_floating_point is_init is_pinned is_shared is_signed
is_tensor ndimension nelement numel rank register_hook requires_grad_ set_ set_cast_dtype set_const_arg set_dtype
set_init_flag shape size stop_gradient storage storage_offset stride type untyped_storage value wait_pipeline
""".split())
SAME = ("contiguous", "reshape", "flatten", "ravel", "astype", "to", "cast")  # views, where there is nothing to do
ASKS = frozenset((*NUMBERS, "asnumpy", "numpy", "item", "tolist"))  # for what is there already
WRITES = ("__setitem__", "assign_value", "copy_", "assign")


def _trivial(name: str, x, args) -> bool:
    if name in ("astype", "to", "cast"):
        return len(args) > 1 and args[1] == x.dtype
    with NoFallbackGuard():  # of the local tensor: what a DTensor that is a view would be as a whole it does not say
        return Tensor.is_contiguous(x)


def asking(call, name: str, device):
    writes = name in WRITES or name.endswith("_") and not name.startswith("_") or \
        name.startswith("__i") and name in OPERATORS and name != "__invert__"

    @functools.wraps(call)
    def asked(*args, **kwargs):
        nothing = name in SAME and args and isinstance(args[0], Tensor) and _trivial(name, args[0], args)
        if any(device.flying.values()) and not nothing:
            every = [*args, *kwargs.values()]
            tensors = [x for a in every for x in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(x, Tensor)]
            device.touched(name, tensors, writes)
        if device.within or nothing or name in ASKS:
            return call(*args, **kwargs)
        device.counts["ops"] += 1
        device.within = True
        try:
            return call(*args, **kwargs)
        finally:
            device.within = False
    return asked


@contextmanager
def watched(device) -> Iterator[None]:
    """Inside, `device.touched` is told of every op of a Tensor, of `mint` and of `ops` while something is on its way."""
    changed = []

    def ask(place, name):
        call = getattr(place, name, None)  # `mint.__all__` names more than there is
        if callable(call) and not isinstance(call, type):
            changed.append((place, name, name in vars(place), call))
            setattr(place, name, asking(call, name, device))
    for name in dir(Tensor):
        if name in NUMBERS or name in OPERATORS or not name.startswith("_") and name not in VIEWS and \
                not isinstance(vars(Tensor).get(name, None), (staticmethod, classmethod, property)) and name != "from_numpy":
            ask(Tensor, name)
    for module in (mint, mint.nn.functional, ops):
        for name in module.__all__:
            if name not in VIEWS and name[0].islower():
                ask(module, name)
    run_op = primitive._run_op  # of those that are called by themselves: `ops.BatchMatMul()(a, b)`
    changed.append((primitive, "_run_op", True, run_op))
    primitive._run_op = asking(run_op, "_run_op", device)
    try:
        yield
    finally:
        for place, name, own, call in reversed(changed):
            setattr(place, name, call) if own else delattr(place, name)
