# SPDX-License-Identifier: Apache-2.0
"""The table of types is right: what it accepts keeps what types promise, and a wrong one is caught."""
from __future__ import annotations

import functools
import importlib
import pkgutil

import pytest

import ms_dtensor.tools.forms
from ms_dtensor.core.placements import PARTIAL
from ms_dtensor.ops.rules import spmd
from ms_dtensor.ops.rules.spmd import I, Kind, P, R, Refused, V
from tests.spmd import proof
from tests.spmd.calls import known_calls

pytestmark = pytest.mark.usefixtures("cpu")


@functools.cache
def calls():
    return known_calls()


def asked(table, shapes=((2,),), most=64, stop=False) -> proof.Tally:
    tally = proof.Tally()
    for one in calls():
        for shape in shapes:
            proof.prove(one, shape, table, tally, most)
        proof.prove_reads(one, 2, table, tally)
        if stop and tally.wrong:
            break
    return tally


def test_what_the_table_accepts_is_right():
    tally = asked(spmd.results)
    assert not tally.wrong, tally.wrong[:5]
    assert tally.compared > 70 and tally.cells > 2 * tally.accepted


def test_it_is_right_on_three_ranks_and_on_two_axes_at_once():
    tally = asked(spmd.results, ((3,), (2, 2)), 12)
    assert not tally.wrong, tally.wrong[:5]
    assert tally.compared > 70


# -- wrong tables --------------------------------------------------------------------------------------------------------
def letters(kinds):
    return "".join(k.letter for k in kinds)


def says(answer, when):
    """A table that gives `answer` where `when(op, letters)` holds and the right one refuses or says otherwise."""
    def table(call, spec, kinds, graded):
        try:
            right = spmd.results(call, spec, kinds, graded)
        except Refused:
            right = None
        if when(call.op, letters(kinds)):
            given = answer(right) if callable(answer) else answer
            return (given,) * (len(spec.shapes) if spec else 1)
        if right is None:
            raise Refused(0, "")
        return right
    return table


def without_forms(call, spec, kinds, graded):
    """Cases are read whatever dispatch runs there: a bias on one rank, a value that joins a sum once."""
    import dataclasses
    return spmd.results(call, dataclasses.replace(spec, local=None), kinds, graded)


NONLINEAR = ("exp", "relu", "square", "softmax")
MUTANTS = {
    "a summand through what is not linear": says(P, lambda op, t: op in NONLINEAR and t == "P"),
    "through an extreme": says(P, lambda op, t: op == "max" and t == "P"),
    "through a sum with a number": says(P, lambda op, t: op == "add" and t == "P"),
    "through a product of two": says(P, lambda op, t: op == "mul" and t == "PP"),
    "through a matmul of two": says(P, lambda op, t: op == "matmul" and t == "PP"),
    "a summand and a value, first": says(P, lambda op, t: op == "add" and t == "PR"),
    "a summand and a value, second": says(P, lambda op, t: op == "sub" and t == "RP"),
    "a summand divides": says(P, lambda op, t: op == "div" and t == "RP"),
    "a summand among joined values": says(P, lambda op, t: op == "cat" and t == "PR"),
    "a summand chosen beside a value": says(P, lambda op, t: op == "where" and t in ("RPR", "RRP")),
    "local forms are not looked at": without_forms,
    "a value called a summand": says(P, lambda op, t: set(t) == {"R"}),
    "an invariant called a summand": says(P, lambda op, t: set(t) == {"I"}),
    "a value called invariant": says(I, lambda op, t: set(t) == {"R"}),
    "an invariant called a value": says(R, lambda op, t: set(t) == {"I"}),
    "what varies called a value": says(R, lambda op, t: "V" in t and "P" not in t),
    "what varies called invariant": says(I, lambda op, t: set(t) == {"V"}),
    "an invariant meets what varies": says(V, lambda op, t: set(t) == {"I", "V"}),
    "an invariant meets a value, and is one": says(R, lambda op, t: set(t) == {"I", "R"}),
    "an invariant meets a value, and stays": says(I, lambda op, t: set(t) == {"I", "R"}),
    "an invariant scales a summand": says(P, lambda op, t: op == "mul" and set(t) == {"I", "P"}),
    "a summand meets what varies": says(P, lambda op, t: op == "mul" and set(t) == {"V", "P"}),
    "a summand called what varies": says(V, lambda op, t: set(t) == {"P"}),
    "a summand called a value": says(R, lambda op, t: op == "neg" and t == "P"),
    "any shard's result read as a summand": says(Kind("V", PARTIAL), lambda op, t: set(t) == {"V"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_table_is_caught(name):
    assert asked(MUTANTS[name], stop=True).wrong


# -- the corpus, of which `tests/long/check_types.py` asks every form --------------------------------------------------
def corpus():
    """The forms that have rules."""
    modules = [m.name for m in pkgutil.iter_modules(ms_dtensor.tools.forms.__path__) if m.name.startswith("forms_")]
    return [f for m in modules for f in importlib.import_module(f"ms_dtensor.tools.forms.{m}").FORMS if not f.raises]
