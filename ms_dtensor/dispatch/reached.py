# SPDX-License-Identifier: Apache-2.0
"""Which leaves a loss is computed from: parameters, and tensors after `requires_grad_()`.

MindSpore's graph has a node for each leaf, and no way from the node to the tensor. So the tensors are looked up among those
that live: in a memory of those found before, else by a walk through what Python's collector knows, once for new ones.
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator

from mindspore import Tensor

from ..errors import OpRuleError

_known: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # leaves by the number of their node


def reached(loss: Tensor) -> list[Tensor]:
    """The leaves that `loss` is computed from, in the order in which a backward may meet them.

    Raises:
        OpRuleError: one of them is gone, so nobody could be given its gradient.
    """
    nodes = dict(_leaf_nodes(loss))
    found = {number: x for number in nodes if (x := _known.get(number)) is not None and _number(x) == number}
    if len(found) < len(nodes):
        know(x for x in gc.get_objects() if issubclass(type(x), _BASE) and _is_leaf(x))
        found = {number: _known[number] for number in nodes if number in _known}
    gone = [nodes[number] for number in nodes if number not in found]
    if gone:
        raise OpRuleError("For 'backward', a leaf that the loss is computed from is gone.", ", ".join(gone[:5]),
                          "A gradient is kept in `.grad` of a tensor that lives.", "keep a name for it, or x.detach()")
    return [found[number] for number in nodes]


def know(tensors: Iterable[Tensor]) -> None:
    """Remembers leaves, so that they need not be looked for."""
    for x in tensors:
        _known[_number(x)] = x


_BASE = Tensor.__mro__[-2]  # C++'s class, of which tensors and parameters are


def _is_leaf(x) -> bool:
    return x._requires_grad and x._is_leaf


def _number(x) -> int:
    return x._grad_node._unique_id()


def _leaf_nodes(loss: Tensor) -> Iterator[tuple[int, str]]:
    start = loss._grad_node
    seen, stack = set[int](), [start]
    while stack:
        node = stack.pop()
        number = node._unique_id()
        if number in seen:
            continue
        seen.add(number)
        if node.is_leaf():
            yield number, node.name()
        stack += [following for following, _ in reversed(node.next_functions) if following is not None]
