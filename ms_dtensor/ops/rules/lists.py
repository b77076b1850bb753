# SPDX-License-Identifier: Apache-2.0
"""Ops of our own on lists of tensors: einsum, whose equation says every legal case, and the sum of several tensors."""
from __future__ import annotations

from dataclasses import replace

from ...errors import OpRuleError
from .matmul import _out_shape, einsum_cases
from .pointwise import pointwise
from .spec import SUMS, Call, Case, LocalCall, OpSpec

NAMES = ""
_SPARE = "αβγδεζηθικλμνξοπρστυφχψω"  # stand for the dims of an ellipsis; no equation has them


def parse_equation(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """`"...ij,jk"` and the operands' number of dims as (labels of each operand, labels of the result).

    An ellipsis stands for as many dims as its operand has beyond its letters, aligned from the right. Without an arrow
    the result has the ellipsis, then the letters that appear once, in alphabetical order.
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise OpRuleError(f"For 'einsum', the equation {equation!r} has {len(terms)} operands, {len(ndims)} were given.")
    labels, most = [], 0
    for term, nd in zip(terms, ndims):
        extra = nd - len(term.replace("...", ""))
        if extra < 0 or (extra and "..." not in term):
            raise OpRuleError(f"For 'einsum', the term {term!r} of {equation!r} does not fit an operand of {nd} dims.")
        most = max(most, extra)
        labels.append(term.replace("...", _SPARE[len(_SPARE) - extra:]))
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    out = right.replace("...", _SPARE[len(_SPARE) - most:])
    if len(set(out)) != len(out) or not set(out) <= set("".join(labels)):
        raise OpRuleError(f"For 'einsum', the result {right!r} of {equation!r} repeats a letter or has a new one.")
    return labels, out


def einsum(call: Call) -> OpSpec:
    """Any equation in which no operand has a letter twice."""
    equation, operands = call.args["equation"], call.args["operands"]
    labels, out = parse_equation(equation, [x.ndim for x in operands])
    if any(len(set(text)) < len(text) for text in labels):
        raise OpRuleError(f"For 'einsum', an operand of {equation!r} has a letter twice.", "",
                          "A diagonal of a sharded matrix lies across the shards.",
                          "take the diagonal first, e.g. (x * eye).sum(-1)")
    shapes = [x.shape for x in operands]
    return OpSpec((_out_shape(labels, out, shapes),), tuple(einsum_cases(labels, out, shapes, ones=True)),
                  lambda at: LocalCall("einsum", (",".join(labels) + "->" + out, operands)))


def add_n(call: Call) -> OpSpec:
    """The sum of tensors, all of them Partial or none."""
    spec = pointwise(call)
    return replace(spec, cases=(*spec.cases, *(Case((p,) * len(call.operands), (p,)) for p in SUMS)))


RULES = {"einsum": einsum, "add_n": add_n}
