# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md holds: its recipes run, the files it names are there, and the path it shows is the one calls take."""
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor

import ms_dtensor as md
from ms_dtensor.comm import registry
from ms_dtensor.debug.verify import Report
from ms_dtensor.dispatch.dispatcher import clear_cache
from ms_dtensor.ops.rules import RULES, names
from ms_dtensor.tools.forms.run import verify_form

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ms_dtensor"
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
RECIPES = {title: re.findall(r"^ *```python\n(.*?)^ *```", part, re.DOTALL | re.MULTILINE)
           for title, part in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)}
STEPS = re.findall(r"^\| `([\w/]+\.py): (?:\w+\.)?(\w+)` \|.*\| (first)? ?\|$", TEXT, re.MULTILINE)


def run(code: str) -> dict:
    known: dict = {}
    exec(re.sub(r"^   ", "", code, flags=re.MULTILINE) if code.startswith("   ") else code, known)
    return known


def test_the_recipe_for_an_op(cpu, monkeypatch):
    form, rule = map(run, RECIPES["Add an op"])
    report = Report()
    verify_form(form["FORMS"][0], report)
    assert f"`{report.wrong[0]}`" in TEXT, report.wrong
    for table, entries in ((names.PRIMITIVES, names.parse(rule["NAMES"])), (RULES, rule["RULES"])):
        for name, entry in entries.items():
            monkeypatch.setitem(table, name, entry)
    report = Report()
    verify_form(form["FORMS"][0], report)
    assert report and report.compared > 20 and report.ops["cross"].cases == {
        "S(0), S(0) -> S(0)", "S(2), S(2) -> S(2)", "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)"}


def test_the_recipe_for_a_backend(cpu, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(registry, "serving", dict(registry.serving))
    made = run(RECIPES["Add a backend"][0])["Logging"](4)
    assert issubclass(registry.load("logging"), type(made))
    with md.comm.fake_world(4) as world:
        monkeypatch.setattr(type(world), "backend", made)
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        md.ones((3, 2), device_mesh=mesh).sum()
        assert capsys.readouterr().out == ""
        md.DTensor.from_local(md.ones((3, 2), device_mesh=mesh).to_local(), mesh, [md.Partial()]).reduce_partial()
    assert capsys.readouterr().out == "all_reduce sum (3, 2) (0, 1, 2, 3)\n"


@pytest.mark.parametrize("title", ["Add a placement", "Add a style", "Add a pipeline schedule"])
def test_other_recipes(title, cpu):
    for code in RECIPES[title]:
        run(code)


def test_the_recipe_for_an_optimizer(cpu):
    made = run(RECIPES["Add an optimizer"][0])["Adagrad"]
    start, grads = np.float32([1.0, -2.0, 3.0]), [np.float32([0.5, 1.0, -2.0]), np.float32([-1.0, 0.25, 0.0])]
    w = Parameter(Tensor(start), name="w")
    optimizer, want, squares = made([w], lr=0.1), start.astype(np.float64), 0.0
    for g in grads:
        optimizer([Tensor(g)])
        squares = squares + g.astype(np.float64) ** 2
        want = want - 0.1 * g / (np.sqrt(squares) + 1e-10)
    assert np.allclose(w.asnumpy(), want, rtol=1e-6) and optimizer.state_dict()["w"]["step"] == 2
    with pytest.raises(ValueError, match="'lr' = -1 is out of range"):
        made([w], lr=-1)


def test_the_files_and_names_it_speaks_of_are_there():
    found = {path: next((at for at in (PACKAGE / path, ROOT / path) if at.is_file()), None)
             for path in re.findall(r"`((?:[\w.]+/)+\w+\.\w+)", TEXT)}
    assert None not in found.values(), found
    named = [(path, name) for name, path in re.findall(r"`(\w+)` in\s`([\w/]+\.py)`", TEXT)]
    named += [(path, name) for path, names in re.findall(r"`([\w/]+\.py): ([\w.]+)`", TEXT) for name in names.split(".")]
    gone = [(path, name) for path, name in named if not re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ",
                                                                  found[path].read_text("utf-8"), re.MULTILINE)]
    assert len(named) > 20 and not gone
    for path, word in re.findall(r"(tests/\S+\.py) -k (\w+)", TEXT):
        tests = (ROOT / path).read_text("utf-8")
        assert re.search(rf"^def test_\w*{word}", tests, re.MULTILINE), f"-k {word} selects nothing"


def traced(fn) -> list[tuple[str, str]]:
    """(file, function) of every call into the package."""
    seen = []

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            seen.append((code.co_filename[len(str(PACKAGE)) + 1:], code.co_name))
    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return seen


def in_order(steps, calls) -> list:
    """The steps that are not found among the calls, each after the one before it."""
    rest = iter(calls)
    return [step for step in steps if step not in rest]


def test_the_path_of_a_product_and_its_sum_is_the_one_shown(cpu):
    with md.comm.fake_world(4):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = md.ones(8, 6, device_mesh=mesh, placements={"dp": md.Shard(0)})
        w = Parameter(md.ones(6, 4, device_mesh=mesh), name="w")

        def loss(x):
            y = x @ w
            return y.sum()
        step = md.value_and_grad(loss, None, [w])
        clear_cache()
        first, later = traced(lambda: step(x)), traced(lambda: step(x))
    # Python 3.10's profiler holds what a traced call returns: who counts references sees one more, and wraps
    retag = ("dispatch/operands.py", "retag" if sys.version_info >= (3, 11) else "wrap")
    steps = [(retag if name == "retag" else (path, name), when) for path, name, when in STEPS]
    always = [step for step, when in steps if not when]
    assert not in_order([step for step, _ in steps], first)
    assert not in_order(always, later)
    assert not {(path, name) for path, name, when in STEPS if when} & set(later)
    engine = {path for path, _ in later if path.startswith(("dispatch/", "tensor/", "ops/"))}
    assert engine <= {path for path, _ in always}  # no file of the engine is passed through in silence
    assert in_order(always[::-1], later) and in_order([("dispatch/faces.py", "face")], later)
