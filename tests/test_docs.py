# SPDX-License-Identifier: Apache-2.0
"""The documentation holds: links lead somewhere, blocks run, commands have their options, public names have a place."""
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import typing
from functools import cache
from pathlib import Path

import mindspore
import pytest
import yaml

import ms_dtensor
from model_zoo.llama.config import Config
from tests import cases_docs
from tests.msrun import PATIENCE
from tests.mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SITE = DOCS / "site" / "mkdocs.yml"
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "model_zoo/llama/README.md"]
PAGES = sorted(DOCS.rglob("*.md"))
# pages whose Python runs below, in one process
HERE = {"checkpoints": 3, "concepts": 5, "recipes_models": 3, "howto/port_from_mindformers": 1,
        "howto/predict": 2, "howto/dry_run": 1, "howto/several_nodes": 1, "howto/ascend": 1}
PROGRAMS = {"python", "python3.11", "msrun", "pip", "source", "cd", "export", "git", "mkdocs", "srun"}
name_of = {page: str(page.relative_to(ROOT)) for page in (*OUTSIDE, *PAGES)}


@cache
def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@cache
def prose(page: Path) -> str:
    """The page without its blocks and without what stands between backticks."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda m: re.sub(r"[\[\]()]", "", m[0]), text)


@cache
def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", (*OUTSIDE, *PAGES), ids=name_of.get)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_blocks_of_every_page_run():
    """Here, on ranks, or in a test that names the page."""
    texts = [path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    run = {f"{name}.md" for name in (*HERE, *cases_docs.PAGES, "tutorial", "zh/tutorial")}
    for page in PAGES:
        if any(language == "python" for language, _ in fences(page)):
            name = str(page.relative_to(DOCS))
            assert name in run or any(page.name in text for text in texts), f"nothing runs the blocks of {name}"


@pytest.mark.parametrize("page", HERE)
def test_blocks_run_in_one_process(page, cpu):
    cases_docs.run_page(page, HERE[page])


def commands(page: Path) -> list[list[str]]:
    found = []
    for language, text in fences(page):
        if language not in ("bash", ""):
            continue
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            words = shlex.split(line, comments=True)
            if words and (language == "bash" or words[0] in PROGRAMS):
                found.append(words)
    return found


def knows(file: Path, option: str) -> bool:
    """Whether a script, or one it hands its arguments to, has that option."""
    section, _, key = option.removeprefix("--").partition(".")
    if key:
        kind = typing.get_type_hints(Config).get(section)
        return any(hasattr(k, key.partition(".")[0]) for k in (kind, *typing.get_args(kind)))  # null or not
    files = [file, file.with_suffix(".py"), *(file.parent / name for name in ("train.py", "configio.py", "ranks.py"))]
    if file.suffix == ".sh":
        files += [ROOT / "model_zoo/llama/launch.py", ROOT / "model_zoo/llama/train.py"]
    return any(re.search(rf"{re.escape(option)}\b", path.read_text("utf-8")) for path in files if path.exists())


MSRUN = (Path(mindspore.__file__).parent / "parallel/cluster/run.py").read_text("utf-8")
SCRIPT = re.compile(r"^(scripts|model_zoo|tests|docs/tools)/.+\.(py|sh|yaml)$")


@pytest.mark.parametrize("page", (*OUTSIDE, *PAGES), ids=name_of.get)
def test_commands_have_files_and_options(page):
    for words in commands(page):
        while "=" in words[0]:
            words = words[1:]  # VARIABLE=value before a command
        assert words[0] in PROGRAMS or (ROOT / words[0]).is_file(), words
        scripts = [w for w in words if SCRIPT.match(w)]
        for word in scripts:
            assert (ROOT / word).is_file(), word
        if words[0].startswith("python") and words[1] == "-m":
            module = words[2]
            assert module in ("venv", "pip") or importlib.util.find_spec(module), module
        programs = [w for w in scripts if not w.endswith(".yaml")]
        if not programs:
            continue
        after = words[words.index(programs[0]) + 1:]
        before = words[: words.index(programs[0])]
        for word in after:
            if word.startswith("--"):
                assert knows(ROOT / programs[0], word.partition("=")[0]), (programs[0], word)
        if words[0] == "msrun":
            assert all(w.partition("=")[0] in MSRUN for w in before if w.startswith("--")), words


@pytest.mark.parametrize("page", (*OUTSIDE, *PAGES), ids=name_of.get)
def test_scripts_of_the_shell_are_ones(page):
    for language, text in fences(page):
        if language == "sh":
            done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=PATIENCE, check=False)
            assert done.returncode == 0, done.stderr


def test_an_option_that_is_not_there_is_noticed():
    launch = ROOT / "model_zoo/llama/launch.py"
    assert knows(launch, "--parallel.tp") and knows(launch, "--workers")
    assert not any(knows(launch, option) for option in ("--parallel.nonsense", "--nonsense.tp", "--nonsense"))


def test_the_chinese_tutorial_has_the_same_blocks():
    assert cases_docs.blocks("zh/tutorial") == cases_docs.blocks("tutorial")


def test_every_public_name_is_in_the_reference_once():
    pages = "\n".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    listed = re.findall(r"^::: (ms_dtensor[\w.]*)$", pages, re.MULTILINE)
    assert len(listed) == len(set(listed))
    shown = set()
    for path in listed:
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name, None) if module else importlib.import_module(name)
        shown.add(id(found if found is not None else importlib.import_module(path)))
    for module in ("ms_dtensor", "ms_dtensor.parallel", "ms_dtensor.optim", "ms_dtensor.pipeline", "ms_dtensor.checkpoint",
                   "ms_dtensor.debug", "ms_dtensor.debug.verify"):
        namespace = importlib.import_module(module)
        missing = [n for n in namespace.__all__ if n != "__version__" and id(getattr(namespace, n)) not in shown]
        assert not missing, (module, missing)


def test_the_latest_change_is_of_this_version():
    first = re.search(r"^## (\S+)", (DOCS / "changelog.md").read_text("utf-8"), re.MULTILINE)
    assert first and first[1] == ms_dtensor.__version__


def test_counts_of_the_surface_are_told_alike():
    rows, cells = re.search(r"^(\d+) rows, (\d+) cells", (DOCS / "mindspore_surface.md").read_text("utf-8"), re.M).groups()
    assert f"[{int(cells):,} cells](docs/mindspore_surface.md)" in OUTSIDE[0].read_text("utf-8")
    assert f"| {rows} programs of" in (DOCS / "index.md").read_text("utf-8")


def test_planted_faults_are_counted():
    assert f"node's script: {len(FAULTS)}, each" in (DOCS / "support.md").read_text("utf-8")


def test_every_figure_is_shown():
    shown = "".join(page.read_text("utf-8") for page in (*OUTSIDE, *PAGES))
    assert not [p.name for p in (DOCS / "figures").iterdir() if p.name not in shown]


def test_every_page_is_in_the_navigation():
    nav = str(yaml.safe_load(SITE.read_text("utf-8"))["nav"])
    assert not [str(p.relative_to(DOCS)) for p in PAGES if f"'{p.relative_to(DOCS)}'" not in nav]


def test_tables_of_the_site_have_their_place_and_a_cell_for_each_column():
    sys.path.insert(0, str(DOCS / "site"))
    try:
        import tables
    finally:
        del sys.path[0]
    for page, name in tables.PAGES.items():
        assert tables.NOTE.format(name=name).strip() in (DOCS / page).read_text("utf-8")
        lines = [re.sub(r"\\\|", "", line) for line in tables.rendered(name).splitlines() if line.startswith("|")]
        at = [i for i, line in enumerate(lines) if line.startswith("| ---")]
        for begin, end in zip(at, [*(i - 1 for i in at[1:]), len(lines)]):
            assert len({line.count("|") for line in lines[begin - 1:end]}) == 1, (page, lines[begin - 1])


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="an extra: pip install '.[docs]'")
    pytest.importorskip("material", reason="an extra: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python", reason="an extra: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE), "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170,  # with -q it would not be strict
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    assert (tmp_path / "site/zh/tutorial.html").is_file()
    assert "<td>adaptive_avg_pool</td>" in (tmp_path / "site/op_coverage.html").read_text("utf-8")
    reference = (tmp_path / "site/reference/parallel.html").read_text("utf-8")
    assert 'id="ms_dtensor.parallel.fully_shard"' in reference and "<p>Example:" not in reference
