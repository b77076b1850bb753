# SPDX-License-Identifier: Apache-2.0
"""Pictures hold what the timeline says, the command makes them, and the documentation's are those that it makes."""
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ms_dtensor.errors import ScheduleError
from ms_dtensor.pipeline import Actions, draw, dualpipe_v, gpipe, interleaved, one_f_one_b, simulate, zbv
from ms_dtensor.pipeline.builders import BUILDERS
from ms_dtensor.tools import cli
from tests.msrun import python

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["pipeline", *map(str, arguments)])
    return code, *capsys.readouterr()


# -- pictures --------------------------------------------------------------------------------------------------------------
def boxes(text: str) -> dict[str, tuple[float, float]]:
    """Of each action: where its box begins and how wide it is, in pixels."""
    return {box.find(f"{SVG}title").text.split(",")[0]: (float(box.get("x")), float(box.get("width")))
            for box in ElementTree.fromstring(text).iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_picture_has_a_box_for_each_action_at_its_time(name):
    timeline = simulate(BUILDERS[name](4, 8))
    found, slots = boxes(draw(timeline, "svg")), [slot for rank in timeline.slots for slot in rank]
    assert len(found) == len(slots)
    (scale,) = {round(found[str(s.action)][1] / (s.end - s.start), 6) for s in slots}
    (left,) = {round(found[str(s.action)][0] - s.start * scale, 6) for s in slots}
    assert left > 0 and scale > 0


def test_pairs_have_a_frame_and_kinds_a_legend():
    assert draw(simulate(dualpipe_v(2, 4)), "svg").count('class="pair"') == 6
    assert draw(simulate(zbv(2, 4)), "svg").count('class="pair"') == 0
    assert "gradient of the input" not in draw(simulate(gpipe(2, 4)), "svg")
    assert draw(simulate(interleaved(2, 2)), "svg").count('class="deep"') == 8  # F and B of the second stages


def test_a_picture_has_one_size_in_every_unit_of_time():
    costs = {"F": 1000.0, "I": 1000.0, "W": 1000.0}
    assert boxes(draw(simulate(zbv(2, 4), costs), "svg")) == boxes(draw(simulate(zbv(2, 4)), "svg"))
    assert max(len(line) for line in draw(simulate(zbv(2, 4), {"W": 1e-6})).splitlines()) < 20_000
    assert min(width for _, width in boxes(draw(simulate(interleaved(2, 4, 4)), "svg")).values()) >= 11  # room for labels


def test_text_keeps_columns_with_uneven_costs():
    order = one_f_one_b(2, 2)
    assert draw(simulate(order, {(1, "F"): 2})) == ("rank 0  F0 F1 .  .  .  B0 -- .  .  B1 --\n"
                                                    "rank 1  .  F0 -- B0 -- F1 -- B1 -- .  .")
    odd = draw(simulate(order, {"F": 1.0, "B": 1.4, (1, "F"): 0.3}, 0.1)).splitlines()
    assert [re.findall(r"[FB]\d", line) for line in odd] == [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]


def test_a_page_stands_alone():
    text = draw(simulate(zbv(2, 4)), "html")
    assert "<svg" in text and "span 12.5" in text and "src=" not in text and "0F0,0F1,0F2,3F0" in text
    with pytest.raises(ScheduleError, match="no form 'png'"):
        draw(simulate(zbv(2, 4)), "png")


@pytest.mark.parametrize("name", BUILDERS)
def test_the_pages_pictures_are_the_commands(name, tmp_path, capsys):
    code, *_ = run(capsys, "--schedule", name, "--pp", 4, "--micro", 8, "--svg", tmp_path / "picture.svg")
    assert code == 0 and (tmp_path / "picture.svg").read_bytes() == (FIGURES / f"pipeline_{name}.svg").read_bytes()


# -- the command -----------------------------------------------------------------------------------------------------------
def test_it_makes_draws_and_reads_back(tmp_path, capsys):
    files = "--csv", tmp_path / "a.csv", "--html", tmp_path / "a.html"
    code, out, _ = run(capsys, "--schedule", "zbv", "--pp", 2, "--micro", 4, *files)
    assert code == 0 and out.startswith("rank 0  0F0 0F1") and "span 12.5" in out
    assert Actions.load(tmp_path / "a.csv") == zbv(2, 4)
    assert (tmp_path / "a.html").read_text("utf-8") == draw(simulate(zbv(2, 4)), "html")
    code, out, _ = run(capsys, "--check", tmp_path / "a.csv", "--json")
    assert code == 0 and json.loads(out) == {
        "faults": [], "ranks": 2, "stages": 4, "microbatches": 4, "span": 12.5, "idle": [0.5, 0.5], "local_idle": [0.0, 0.0],
        "held": [4, 4], "held_products": [1, 3]}


def test_costs_and_messages_count(capsys):
    _, out, _ = run(capsys, "--schedule", "gpipe", "--pp", 2, "--micro", 1, "--costs", "F=2,B=3", "--hop", 0.5, "--json")
    assert json.loads(out)["span"] == 2 * (2 + 3) + 2 * 0.5


def test_a_wrong_order_is_told_with_exit_code_1(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1W0,1I0,1B1\n", "utf-8")
    code, out, _ = run(capsys, "--check", tmp_path / "a.csv")
    assert code == 1 and out == ("rank 1, place 2, 1W0: needs 1B0, which stands after it\n"
                                 "  place     0    1      2    3    4\n  rank 0  0F0  0F1    0B0  0B1\n"
                                 "  rank 1  1F0  1F1  [1W0]  1I0  1B1\n1 fault\n")
    code, out, _ = run(capsys, "--check", tmp_path / "a.csv", "--json")
    assert code == 1 and len(json.loads(out)["faults"]) == 1


@pytest.mark.parametrize("arguments, said", [
    (["--check", "none.csv"], "cannot be read"), (["--check", "/dev/zero"], "no regular file"),
    (["--schedule", "interleaved", "--pp", "4", "--micro", "6"], "do not fit"),
    (["--schedule", "gpipe", "--pp", "2", "--micro", "2", "--svg", "none/a.svg"], "cannot be written"),
    (["--schedule", "gpipe", "--pp", "2", "--micro", "2", "--costs", "F=0"], "costs are not"),
    (["--schedule", "1f1b", "--pp", "100000", "--micro", "100000"], "too large to look at")])
def test_what_cannot_be_done_is_told_with_exit_code_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2 and said in err and "fix:" in err
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 2 and said in json.loads(out)["error"]


@pytest.mark.parametrize("arguments", [
    "", "--schedule gpipe", "--schedule gpipe --check a.csv", "--check a.csv --pp 2", "--schedule nonsense --pp 2 --micro 2",
    "--schedule gpipe --pp 2 --micro 2 --costs F", "--schedule gpipe --pp 2 --micro 2 --costs F=1,F=2"])
def test_a_wrong_call_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(["pipeline", *arguments.split()])
    assert refused.value.code == 2 and "error:" in capsys.readouterr().err


def test_it_needs_no_mindspore():
    code = ("import sys; sys.modules['mindspore'] = None; from ms_dtensor.tools.cli import main; "
            "sys.exit(main(['pipeline', '--schedule', 'zbv', '--pp', '2', '--micro', '2']))")
    done = python("-c", code)
    assert done.returncode == 0 and "span 7" in done.stdout, done.stderr
