# SPDX-License-Identifier: Apache-2.0
"""The table of types is right: what it accepts keeps what types promise, and a wrong one is caught; no result is plain."""
import functools
import importlib
import pkgutil

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
import ms_dtensor.tools.forms
from ms_dtensor.comm import fake_world
from ms_dtensor.core.placements import PARTIAL
from ms_dtensor.core.tree import leaves, map_leaves
from ms_dtensor.debug.types.account import Account, Origin, Types
from ms_dtensor.debug.types.doors import watched
from ms_dtensor.debug.types.typed import Typed
from ms_dtensor.dispatch import patches
from ms_dtensor.errors import OpRuleError
from ms_dtensor.ops.rng import frozen
from ms_dtensor.ops.rules import spmd
from ms_dtensor.ops.rules.spmd import I, Kind, P, R, Refused, V
from tests.spmd import proof
from tests.spmd.proof import OneCall, Tally, calls_of
from tests.tiers import sampled


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


CONSTANTS = {"ops.max()", "ops.min()"}  # the second result is a zero that MindSpore makes

ASKED = {"mint.allclose"}  # it reads a number


@pytest.mark.parametrize("kind", (spmd.V, spmd.P, spmd.R), ids="VPR")
def test_results_of_typed_tensors_are_typed(kind):
    patches.install()
    plain, refused, followed = [], [], 0
    with fake_world(2):
        now = Account("f", md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), (0,))

        def given(a):
            letter = kind if a.dtype.kind == "f" or kind is not spmd.P else spmd.R  # of integers: indices, for one
            return Typed(Tensor(a), Types((letter,), a.dtype.kind == "f", (Origin("an input"),)))
        for form in sampled(corpus(), 12):
            try:
                with watched(now), frozen(0):
                    result = form.fn(*map_leaves(given, form.variants()[0], np.ndarray))
            except OpRuleError:
                refused.append(form.name)
                continue
            except Exception:  # noqa: BLE001, S112  no such kernel on CPU: local code has none either
                continue
            followed += 1
            plain += [form.name for x in leaves([result], Tensor) if not isinstance(x, Typed)]
    assert not set(plain) - CONSTANTS, plain
    assert followed > 20
    assert kind is spmd.P or set(refused) <= ASKED, refused


def array(*shape, seed=0):
    return np.random.default_rng(seed + len(shape)).uniform(0.5, 2.0, shape).astype(np.float32)


A, B, C, W, ROW = array(4, 6), array(4, 6, seed=9), array(4, 6, seed=5), array(6, 2), array(2)
IDS = np.array([3, 0, 2, 2], np.int32)
CALLS = (
    (mint.add, A, B), (mint.sub, A, B), (mint.mul, A, B), (mint.div, A, B), (lambda x: x + 1.5, A), (lambda x: x * 2.5, A),
    (mint.matmul, A, W), (lambda x, w, b: mint.nn.functional.linear(x, w, b), array(4, 6), array(2, 6), ROW),
    (mint.neg, A), (mint.exp, A), (mint.nn.functional.relu, A - 1), (mint.square, A),
    (lambda x: mint.nn.functional.softmax(x, -1), A),
    (lambda x: x.sum(0), A), (lambda x: x.mean(0), A), (lambda x: x.max(), A), (lambda x: x.reshape(3, 8), A),
    (lambda x: mint.permute(x, (1, 0)), A), (lambda x: x[1:3], A), (lambda x, y: mint.cat((x, y), 0), A, B),
    (lambda x, y: mint.where(x > y, x, y), A, B), (lambda x: mint.zeros_like(x), A), (lambda x: x.astype(ms.float64), A),
    (lambda x, i: ops.gather(x, i, 0), A, IDS),
    (lambda x, g, b: mint.nn.functional.layer_norm(x, (6,), g, b), A, array(6), array(6)),
    (lambda x, y, z: mint.addmm(x, y, z), array(4, 2), A, W), (mint.maximum, A, B),
)


def known_calls() -> list[OneCall]:
    """The calls behind these forms, each once."""
    tally = Tally()
    return [one for fn, *args in CALLS for one in calls_of(fn, tuple(args), tally)]
