# SPDX-License-Identifier: Apache-2.0
"""Which leaves a loss is computed from: parameters, and tensors after `requires_grad_()`.

MindSpore's graph has a node for each leaf, and no way from the node to the tensor. So the tensors are looked up among those
that live: in a memory of those found before, else among the parameters that Python's collector knows, once for new ones.
Tensors that are no parameters are remembered when they are told to be leaves (`know`).
"""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator

from mindspore import Parameter, Tensor

_known: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # leaves by the number of their node


def reached(loss: Tensor) -> list[Tensor]:
    """The leaves that `loss` is computed from, in the order in which a backward may meet them.

    A leaf that is no parameter, and that nobody told of, is left out: an input that an earlier gradient function marked.
    """
    nodes = list(_leaf_nodes(loss))
    if any(_of_node(number) is None for number in nodes):
        know(x for x in gc.get_objects() if issubclass(type(x), Parameter) and x.requires_grad)
    return [x for number in nodes if (x := _of_node(number)) is not None]


def _of_node(number: int) -> Tensor | None:
    x = _known.get(number)
    return x if x is not None and _number(x) == number else None


def know(tensors: Iterable[Tensor]) -> None:
    """Remembers leaves, so that they need not be looked for."""
    for x in tensors:
        _known[_number(x)] = x


def _number(x) -> int:
    return x._grad_node._unique_id()


def _leaf_nodes(loss: Tensor) -> Iterator[int]:
    start = loss._grad_node
    seen, stack = set[int](), [start]
    while stack:
        node = stack.pop()
        number = node._unique_id()
        if number in seen:
            continue
        seen.add(number)
        if node.is_leaf():
            yield number
        stack += [following for following, _ in reversed(node.next_functions) if following is not None]
