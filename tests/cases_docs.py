# SPDX-License-Identifier: Apache-2.0
"""The blocks of pages that speak of several ranks, run as they stand."""
import contextlib
import io
import os
import re
import sys
import tempfile
import types
from pathlib import Path

from ms_dtensor import comm
from ms_dtensor.parallel import module
from tests.cases import case

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {"training_with_mindspore": 11, "howto/port_from_pytorch": 5, "howto/port_from_hyper_parallel": 2,
         "howto/from_mindformers_2_1": 2, "howto/own_op": 4,
         "howto/own_style": 3, "howto/model_you_did_not_write": 4, "howto/debug_communication": 4, "howto/resume_elsewhere": 1,
         "howto/long_contexts": 2, "howto/experts": 1, "howto/check_local_code": 5, "pipeline": 11}
"""Page -> how many Python blocks it has; each page's run one after the other, with common names."""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """(language, title, text) of each fenced block."""
    return re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', (DOCS / f"{page}.md").read_text("utf-8"),
                      re.MULTILINE | re.DOTALL)


def run_page(page: str, count: int) -> None:
    found = blocks(page)
    code = [text for language, _, text in found if language == "python"]
    assert len(code) == count
    names: dict = {"__name__": __name__}  # MindSpore asks functions for their module
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for text in code:
            exec(compile(text, "train.py", "exec"), names)
    world = comm.current_world()
    if world is None or world.rank == 0:
        check_printed("".join(text for language, _, text in found if language == "text"), printed.getvalue())


def check_printed(expected: str, printed: str) -> None:
    """Each line that a page shows was printed, in that order."""
    said = iter([line.rstrip() for line in printed.splitlines()])
    absent = [line for line in expected.splitlines() if line.strip() and line.rstrip() not in said]
    assert not absent, f"{absent[0]!r} is not in\n{printed}"


def _case(page: str, count: int):
    def run(world):
        run_page(page, count)
    return case(world_size=4, timeout=120)(run)


for _page, _count in PAGES.items():
    vars()[_page.rpartition("/")[2]] = _case(_page, _count)


def tutorial(world):
    """On four ranks where the page has eight: what is printed is the same but for the numbers of ranks."""
    every = blocks("tutorial")
    files = {title: text.replace("(8,)", "(4,)") for language, title, text in every if language == "python"}
    folder = comm.group(tuple(range(world.size))).broadcast_object(tempfile.mkdtemp(), 0)
    sys.modules["net"] = net = types.ModuleType("net")
    exec(compile(files.pop("net.py"), "net.py", "exec"), net.__dict__)
    before, argv = os.getcwd(), sys.argv
    printed = io.StringIO()
    module._told.clear()  # a page before may have told the same plan, which is told once
    try:
        os.chdir(folder)
        for title, text in files.items():
            sys.argv = [title, "2", "2"]
            with contextlib.redirect_stdout(printed):
                exec(compile(text, title, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        sys.argv = argv
        del sys.modules["net"]
    if world.rank:
        return
    expected = "".join(text for language, _, text in every if language == "text")
    for old, new in (("parallelize_module over tp=4", "parallelize_module over tp=2"),
                     ("f32[64@dp, 16], mesh=(dp=8), rank 0 holds [8, 16]", "f32[64@dp, 16], mesh=(dp=4), rank 0 holds [16, 16]"),
                     ("saved/step-00000005: sound\n", "")):
        assert old in expected
        expected = expected.replace(old, new)
    check_printed(expected, printed.getvalue())
