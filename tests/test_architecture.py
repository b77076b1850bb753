# SPDX-License-Identifier: Apache-2.0
"""The folders are layers: no circles, nothing imports upwards, few things at the root, and the field's words for names.

Every check is a function of text or of a graph, and is shown to fail on a small wrong one.
"""
import ast
import importlib
import re
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import ms_dtensor

ROOT = Path(ms_dtensor.__file__).parent
LAYERS = re.search(r"only those before it: (.*?)\.\n", ms_dtensor.__doc__ or "", re.DOTALL)[1].replace(",", " ").split()
LOWEST = ("", "errors")  # the table of contents, and what needs nothing and every folder may use
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
           for path in ROOT.rglob("*.py")}
TESTS = ROOT.parent / "tests"
PAGES = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *(ROOT.parent / "docs").glob("*.md")]


# -- imports -----------------------------------------------------------------------------------------------------------
def imports(name: str, text: str, package: bool, known) -> set[str]:
    """Modules of ours that a module imports, also within functions; not what only type checkers follow."""
    tree, found = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else ()
        if isinstance(node, ast.ImportFrom):
            base = ["ms_dtensor", *filter(None, name.split("."))]
            base = base[:len(base) + package - node.level] if node.level else []
            whole = ".".join([*base, *filter(None, [node.module])])
            names = [f"{whole}.{n}" if f"{whole}.{n}".removeprefix("ms_dtensor.") in known else whole for n in names]
        found |= {n.partition(".")[2] for n in names if n.partition(".")[0] == "ms_dtensor"}
    return found - {name}


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a folder that stands later in the list of layers, or of the package's own table of contents."""
    height = {**dict.fromkeys(LOWEST, -1), **{folder: i for i, folder in enumerate(LAYERS)}, "__main__": len(LAYERS)}
    return [f"{a} -> {b}" for a, targets in graph.items() for b in sorted(targets)
            if not b or height[b.split(".")[0]] > height[a.split(".")[0]] and a]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of modules, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


GRAPH = {name: imports(name, path.read_text("utf-8"), path.name == "__init__.py", SOURCES) for name, path in SOURCES.items()}


def test_no_folder_imports_from_a_higher_one():
    assert not upward(GRAPH)
    late = imports("core.mesh", "def f():\n    from ..dispatch import modes", False, {"dispatch.modes"})
    assert late == {"dispatch.modes"} and upward({"core.mesh": late}) == ["core.mesh -> dispatch.modes"]
    assert imports("core", "from .. import ops\nimport ms_dtensor", True, {"ops"}) == {"ops", ""}
    assert upward({"core": {""}}) and not upward({"tensor.dtensor": {"core.mesh", "errors"}})
    assert not imports("core.mesh", "if TYPE_CHECKING:\n    from ..ops import rules", False, ())


def test_no_modules_import_in_a_circle():
    assert not circle(GRAPH)
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def crowded(names: list[str]) -> bool:
    files = [n for n in names if "." in n]
    return len(files) > 4 or len(names) - len(files) > 15


def told_in(text: str) -> list[str]:
    """The layers that a page names between backticks, in its order, each where it first stands."""
    named = re.findall(r"`(\w+)/?`", text)
    return list(dict.fromkeys(name for name in named if name in LAYERS))


def test_every_page_tells_the_same_layers():
    readme, how = PAGES[0].read_text("utf-8"), (ROOT.parent / "docs/how_it_works.md").read_text("utf-8")
    contributing = PAGES[1].read_text("utf-8")
    assert told_in(re.search(r"^\| `ms_dtensor/` \|.*$", readme, re.MULTILINE)[0]) == LAYERS
    assert told_in(contributing[contributing.index("**Layers.**"):contributing.index("**Code**")]) == LAYERS
    assert told_in(how[how.index("| folder | what |"):][:3000]) == LAYERS
    assert told_in("`core` and `comm/`, then `core`") == ["core", "comm"]


def test_the_root_is_a_list_of_the_layers():
    names = [path.name for path in ROOT.iterdir() if path.name != "__pycache__"]
    assert not crowded(names) and {n for n in names if "." not in n} == set(LAYERS), sorted(names)
    assert crowded(["a.py", "b.py", "c.py", "d.py", "py.typed"]) and crowded([f"folder{i}" for i in range(16)])


# -- which device -----------------------------------------------------------------------------------------------------
ASKED = re.compile(r"""device_target|current_target|device_type *[!=]= *["']|["'] *[!=]= *[\w.]*device_type""")
MAY_ASK = {"internals.target"}


def test_one_place_asks_which_device():
    wrong = {module: ASKED.findall(path.read_text("utf-8")) for module, path in SOURCES.items() if module not in MAY_ASK}
    assert not {module: found for module, found in wrong.items() if found}, "ask internals.target: on_cpu() or cpu_kernels()"
    for text in ('get_context("device_target")', 'mesh.device_type == "cpu"', '"cpu" != self.mesh.device_type'):
        assert ASKED.search(text), text
    assert not ASKED.search("elif _started.device_type != device:")


# -- words -------------------------------------------------------------------------------------------------------------
# Home-made words that the field has others for. Checked as names: of modules, and of functions, classes, parameters and
# module variables without a leading underscore, whole or as a part between underscores. In prose most of them are good
# English, so error texts, docstrings and headings are searched only for those that were ours in a special sense.
NAME = re.compile(r"(^|_)(faces?|faced|dress|dressed|settled?|become|truth|farewell|blamed?|linger|pump|redirect|pending|"
                  r"invoke|planned|planning)(_|$)|^(moved|own|shown|wanted_gradient|has_odd_partial|head|later|"
                  r"under_way|fake_token)$", re.IGNORECASE)
NAME_IS_FINE = {"pending_result"}
PROSE = re.compile(r"\b((same|own|varying|gradient|right|which|operand's) face|faces|faced|dressed|farewell|blamed?)\b",
                   re.IGNORECASE)


def public_names(module: str, text: str) -> set[str]:
    """What a module defines without a leading underscore, and the last part of its own name."""
    tree = ast.parse(text)
    found = {module.rpartition(".")[2]}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found |= {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    found |= {n.id for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for n in ast.walk(node)
              if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name for name in found if name and not name.startswith("_")}


def home_made(names: set[str]) -> list[str]:
    return sorted(name for name in names - NAME_IS_FINE if NAME.search(name))


def test_every_folder_of_tests_is_collected(pytestconfig):
    folders = {part for kind in ("test", "cases") for path in TESTS.rglob(f"{kind}_*.py")
               for part in path.relative_to(TESTS).parts[:-1]}
    assert "tensor" in folders
    skipped = {f: pattern for f in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(f, pattern)}
    assert not skipped, skipped


def test_names_are_the_fields_words():
    wrong = {module: home_made(public_names(module, path.read_text("utf-8"))) for module, path in SOURCES.items()}
    assert not {module: names for module, names in wrong.items() if names}
    assert home_made(public_names("dispatch.faces", "DRESSED = 1\ndef settle(x, own): ...\ndef _face(): ...")) == [
        "DRESSED", "faces", "own", "settle"]


def test_texts_do_not_use_words_of_our_own():
    wrong = {str(path): PROSE.findall(path.read_text("utf-8")) for path in (*SOURCES.values(), *PAGES)}
    assert not {path: words for path, words in wrong.items() if words}
    assert PROSE.search("## Own face and same face") and PROSE.search('raise OpRuleError("rank 1 is blamed")')
    assert not PROSE.search("on the face of it")


def lost(text: str, files: list[str]) -> list[str]:
    """Python files that a text names between backticks and that are nowhere (the end of a path is enough), nor in it."""
    files = [*files, *re.findall(r'^```python title="(.+)"$', text, re.MULTILINE)]  # a page may have the reader write one
    return [name for name in re.findall(r"`([\w/]+\.py)", text) if not any(f"/{at}".endswith(f"/{name}") for at in files)]


def test_files_that_texts_name_are_there():
    files = [str(path.relative_to(ROOT.parent)) for folder in ("ms_dtensor", "scripts", "tests", "model_zoo", "docs/tools")
             for path in (ROOT.parent / folder).rglob("*.py")]
    wrong = {str(path): lost(path.read_text("utf-8"), files) for path in (*SOURCES.values(), *PAGES)}
    assert not {path: names for path, names in wrong.items() if names}
    assert lost("see `core/layout.py`, `yout.py`, `comm/faces.py`", files) == ["yout.py", "comm/faces.py"]


# -- the package's table of contents -----------------------------------------------------------------------------------
def for_type_checkers(text: str) -> dict[str, str]:
    """What the imports under TYPE_CHECKING tell: "name" or, where it comes under another, "name as other" -> its module."""
    (block,) = [node for node in ast.parse(text).body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    return {a.name if a.asname in (a.name, None) else f"{a.name} as {a.asname}": node.module or ""
            for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}


def test_what_type_checkers_see_is_what_loads_on_first_use():
    seen = for_type_checkers((ROOT / "__init__.py").read_text("utf-8"))
    exported = {name: module for module, names in ms_dtensor._EXPORTS.items() for name in names}
    assert {name: module for name, module in seen.items() if name in exported} == exported
    homes = {name: home for name, home in ms_dtensor._ALIASES.items() if "." not in name}
    modules = {f"{module}.{name}".strip(".") for name, module in seen.items() if name not in exported}
    assert modules == {*homes.values(), "checkpoint", "comm", "debug", "errors", "optim", "parallel", "pipeline"}
    assert for_type_checkers("if TYPE_CHECKING:\n    from .a import b as b, c as d\n    from . import e") == {
        "b": "a", "c as d": "a", "e": ""}


def test_an_alias_is_its_home():
    for alias, home in ms_dtensor._ALIASES.items():
        here, there = (importlib.import_module(f"ms_dtensor.{name}") for name in (alias, home))
        for name in vars(there):
            assert name.startswith("__") or getattr(here, name) is getattr(there, name), f"{alias}.{name}"
    assert importlib.import_module("ms_dtensor.random").Key is not importlib.import_module("ms_dtensor.layout").Layout
