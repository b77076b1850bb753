# SPDX-License-Identifier: Apache-2.0
"""The cluster benchmarks: their arithmetic by hand, hostfiles, the runner over two local "nodes", and the page."""
import json
import re
import shlex
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ms_dtensor.debug import svg
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.bench import arithmetic, columns, report, run, suites
from ms_dtensor.tools.bench.hosts import Host, read_hosts, shell_text
from tests.msrun import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
HOSTS = "localhost slots=1\nlocalhost:1  # the same host twice: two nodes\n"


# -- arithmetic, against numbers worked out by hand --------------------------------------------------------------------
@pytest.mark.parametrize("op, on_2, on_8", [("all_reduce", 1.0, 1.75), ("all_gather", 0.5, 0.875),
                                            ("reduce_scatter", 0.5, 0.875), ("all_to_all", 0.5, 0.875), ("broadcast", 1, 1)])
def test_bus_bandwidth_is_what_a_link_carries(op, on_2, on_8):
    assert arithmetic.bus_factor(op, 2) == on_2 and arithmetic.bus_factor(op, 8) == on_8
    assert arithmetic.bandwidths(op, 8, 4_000_000_000, 0.5) == (8.0, 8.0 * on_8)


def test_operations_are_counted_as_published_figures_do():
    assert arithmetic.matmul_flops(2, 3, 5) == 60
    assert arithmetic.attention_flops(1, 4, 2, 8, False) == 2 * 2 * 2 * 4 * 4 * 8 / 2
    assert arithmetic.attention_flops(1, 4, 2, 8, True) == 3.5 * 512
    # LLaMA3.1-8B at 2703 tokens/s/p is 130 TFLOP/s, LLaMA2-7B at 4160 is 168, by 6N
    known = {(k["model"], k["seq"]): k for k in arithmetic.KNOWN["mindformers"]["rows"]}
    for key, want in {("LLaMA3.1-8B", 8192): 130.2, ("LLaMA2-7B", 4096): 168.2}.items():
        row = known[key]
        assert round(arithmetic.flops_per_token(row["parameters"]) * row["tokens_s_p"] / 1e12, 1) == want
        assert columns.published(*key, 376)[0]["tflops_6n"] == want
    assert columns.published("LLaMA3.1-8B", 8192, 376)[0]["mfu_6n"] == 0.3464
    assert arithmetic.flops_per_token(10, layers=3, seq=7, attention_width=5) == 60 + 6 * 3 * 7 * 5


def test_a_peak_is_stated_or_absent():
    assert arithmetic.peak_of("Ascend910B2", "bfloat16") == 376
    assert arithmetic.peak_of("Ascend910B3", "bfloat16") is None and arithmetic.peak_of("CPU", "float32") is None
    assert arithmetic.peak_of("Ascend910B3", "bfloat16", {"bfloat16": 313.0}) == 313
    assert arithmetic.share(94, 376) == 0.25 and arithmetic.share(94, None) is None
    assert all(row["source"] for row in arithmetic.KNOWN["peaks"])


def test_efficiency_of_weak_and_strong_scaling():
    weak = [{"ranks": 8, "batch": 8, "tokens_s_p": 100.0}, {"ranks": 64, "batch": 64, "tokens_s_p": 90.0}]
    assert arithmetic.efficiency(weak, "weak") == [1.0, 0.9]
    strong = [{"ranks": 8, "batch": 64, "tokens_s_p": 100.0}, {"ranks": 64, "batch": 64, "tokens_s_p": 75.0}]
    assert arithmetic.efficiency(strong, "strong") == [1.0, 0.75]
    with pytest.raises(ValueError, match="no strong scaling"):
        arithmetic.efficiency(weak, "strong")


# -- hosts and pieces --------------------------------------------------------------------------------------------------
def test_hostfiles_are_read_or_refused():
    assert read_hosts("# mine\nworker-1 slots=8\n\nuser@worker-2:8\n") == [Host("worker-1", 8), Host("user@worker-2", 8)]
    for text, why in (("worker-1\n", "line 1"), ("a slots=8\nb slots=4\n", "slots"), ("", "slots"),
                      ("localhost slots=8\nworker-2 slots=8", "first host")):
        with pytest.raises(ValueError, match=why):
            read_hosts(text)


def test_the_text_for_ssh_survives_a_shell(monkeypatch):
    monkeypatch.setenv("HCCL_IF_IP", "a b'c")
    show = [sys.executable, "-c", "import os, sys; e = os.environ; print(e['HCCL_IF_IP'], e['X'], sys.argv[1], os.getcwd())"]
    text = shell_text([*show, '{"a": "$HOME \'"}'], {"X": "1;2"}, "export Y=1")
    monkeypatch.chdir(ROOT)
    clean = subprocess.run(["env", "-i", "bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert clean.strip() == f"a b'c 1;2 {{\"a\": \"$HOME '\"}} {ROOT}"
    assert shlex.split(text.split(" && ")[2])[0] == "env"


def test_pieces_have_names_of_their_own_and_layouts_that_fit():
    for hosts, slots in ((1, 8), (2, 1), (8, 8), (64, 8)):
        for suite in suites.SUITES:
            pieces = suites.plan(suite, hosts, slots, "/out", set(suites.BENCHMARKS), ["a", "b"])
            assert len({p.name for p in pieces}) == len(pieces)
            for p in pieces:
                if p.benchmark == "llama":
                    layout = p.options["layout"]
                    assert layout.get("dp", 1) * layout.get("tp", 1) == p.hosts * p.slots <= hosts * slots
    models = {p.options["name"] for p in suites.plan("full", 8, 8, "/out", {"llama"}, [])}
    assert models == {"LLaMA2-7B", "LLaMA3.1-8B", "LLaMA3.1-70B"}
    grown = [(p.options["scaling"], p.hosts, p.slots, p.options["train"]["batch"])
             for p in suites.plan("full", 4, 8, "/out", {"scaling"}, [])]
    assert grown == [("weak", 1, 8, 8), ("strong", 1, 8, 32), ("weak", 2, 8, 16), ("strong", 2, 8, 32), ("weak", 4, 8, 32),
                     ("strong", 4, 8, 32)]


def test_what_needs_the_recipe_is_refused_by_name_or_left_out(tmp_path, monkeypatch, capsys):
    assert suites.chosen(None) == set(suites.BENCHMARKS) and suites.recipe() == [str(ROOT)]
    assert suites.home("scaling") == suites.RECIPE and suites.home("compute") == "ms_dtensor.tools.bench.compute"
    monkeypatch.setattr(suites, "RECIPE", "no_such_zoo.llama.bench")
    assert suites.recipe() == [] and suites.chosen(None) == set(suites.BENCHMARKS) - {"llama", "scaling"}
    with pytest.raises(ConfigError) as told:
        suites.chosen({"llama", "dispatch"})
    assert told.value.attempt == "For 'bench', llama cannot be measured." and told.value.fix[1] == "--only dispatch"
    assert run.main(["--only", "scaling", "--out", str(tmp_path)]) == 2
    assert "checkout" in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(run.Run, "all", lambda self: None)
    assert run.main(["--suite", "toy", "--json", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "left out, as they are measured in a checkout only: llama, scaling" in said.err
    assert json.loads(said.out)["left"][:2] == ["startup_first_2", "collectives"]


def piece(name, benchmark="compute", rows=()):
    return {"piece": name, "benchmark": benchmark, "ranks": 2, "rows": list(rows)}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A run whose launches are this test's: called with (pieces, write), it gives what `Nodes.wait` would."""
    (tmp_path / "hosts").write_text(HOSTS)
    seen: list[list[str]] = []

    def start(act, minutes=1.0):
        class Nodes:
            def __init__(self, hosts, slots, argument, logs, *rest):
                self.names = [p["name"] for p in json.loads(argument)["pieces"]]

            def wait(self, deadline):
                seen.append(self.names)
                done = tmp_path / "out/pieces"

                def write(name):
                    (tmp_path / "out/at_work").write_text(name)
                    (done / f"{name}.json").write_text(json.dumps(piece(name)))
                return act(self.names, write, tmp_path / "out/at_work")
        monkeypatch.setattr(run, "Nodes", Nodes)
        made = run.Run(run.parse(["--hostfile", str(tmp_path / "hosts"), "--out", str(tmp_path / "out"), "--suite", "toy",
                                  "--only", "collectives,dispatch,checkpoint", "--budget-minutes", str(minutes)]))
        made.all()
        return made, seen
    return start


def test_a_piece_that_kills_its_launch_is_written_down_and_the_rest_goes_on(planned):
    def act(names, write, at_work):
        for name in names:
            if name == "dispatch":
                at_work.write_text(name)
                return "node 1 (localhost) ended with 1"
            write(name)
        return ""
    made, seen = planned(act)
    assert seen == [["collectives", "dispatch", "checkpoint"], ["checkpoint"]]
    assert "node 1" in (made.pieces_dir / "dispatch.failed").read_text() and made.left() == []
    _, seen = planned(lambda names, write, at_work: [write(n) for n in names] and "")  # again: only what is missing
    assert seen[2:] == [["dispatch"]] and not list(made.pieces_dir.glob("*.failed"))


def test_a_start_that_fails_is_not_tried_for_each_piece_and_a_spent_budget_blames_nobody(planned):
    made, seen = planned(lambda names, write, at_work: "node 0 (localhost) ended with 1")
    assert len(seen) == 1 and len(list(made.pieces_dir.glob("*.failed"))) == 3

    def slow(names, write, at_work):
        time.sleep(0.3)
        return "not done in time"
    for file in made.pieces_dir.iterdir():
        file.unlink()
    made, seen = planned(slow, minutes=0.002)
    assert len(seen) == 2 and not list(made.pieces_dir.iterdir()) and len(made.left()) == 3


def test_a_folder_is_of_one_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run.Run, "all", lambda self: None)
    for text, code in ((HOSTS, 0), (HOSTS, 0), ("localhost slots=1\n", 2), ("localhost slots\n", 2)):
        (tmp_path / "hosts").write_text(text)
        assert run.main(["--hostfile", str(tmp_path / "hosts"), "--out", str(tmp_path / "out"), "--suite", "toy"]) == code
    err = capsys.readouterr().err
    assert "has a run of {'nodes': 2}; this is one of {'nodes': 1}" in err and "line 1" in err


@pytest.mark.parametrize("content", ['{"piece": "disp', "{}", "[]", "", "null", '{"piece": 1}', "\udcff",
                                     '{"piece": "dispatch", "benchmark": "dispatch", "ranks": 2, "rows": [3]}'])
def test_a_damaged_piece_is_missing_to_the_runner_and_named_by_the_report(planned, content, capsys, tmp_path):
    made, _ = planned(lambda names, write, at_work: [write(n) for n in names] and "")
    run.describe(made.options, 2, 1)
    file = made.pieces_dir / "dispatch.json"
    file.write_text(content, "utf-8", "surrogateescape")
    assert report.main([str(made.out), "--out", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert f"For '{file}', the file is damaged" in err and "Traceback" not in err and not (tmp_path / "page.html").exists()
    _, seen = planned(lambda names, write, at_work: [write(n) for n in names] and "")
    assert seen[1:] == [["dispatch"]] and "dispatch.json', the file is damaged" in capsys.readouterr().out
    assert report.main([str(made.out), "--out", str(tmp_path / "page.html")]) == 0
    assert run.finished(made.out).exists() and not (made.out / "at_work").exists()
    (made.out / "run.json").write_text(content, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match="run.json', the file is damaged"):
        run.describe(made.options, 2, 1)


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert report.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "page.html")]) == 2
    assert f"For '{tmp_path}/nowhere', there is no run" in capsys.readouterr().err


DROPPED = """
import os, runpy, signal, sys, time, weakref
from ms_dtensor.tools import cli

class Gone:
    pass

def ended(_):  # as at the end of each import: what is raised here Python drops
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

def main(words):
    gone = Gone()
    told = weakref.ref(gone, ended)
    del gone
    time.sleep(50)
    return 0
cli.main = main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = ["bench"]
runpy.run_module("ms_dtensor", run_name="__main__")
"""


def test_an_interruption_that_python_drops_comes_again():
    """It did nothing in one of three hundred starts of the command, within its imports."""
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_interrupted_run_says_so_by_its_exit_code_and_a_hostfile_that_is_no_text_is_named(tmp_path, monkeypatch, capsys):
    def interrupted(self):
        raise KeyboardInterrupt
    monkeypatch.setattr(run.Run, "all", interrupted)
    words = ["--hostfile", str(tmp_path / "hosts"), "--out", str(tmp_path / "out"), "--suite", "toy"]
    (tmp_path / "hosts").write_text(HOSTS)
    assert run.main(words) == 130 and "interrupted" in capsys.readouterr().out
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\0")
    assert run.main(words) == 2 and f"{tmp_path}/hosts is no text" in capsys.readouterr().err


def test_without_a_suite_a_machine_without_a_device_takes_the_toy(tmp_path, monkeypatch):
    (tmp_path / "driver").touch()
    for drivers, suite, threads in ((), "toy", {"OMP_NUM_THREADS": "1"}), ((str(tmp_path / "driver"),), "full", {}):
        monkeypatch.setattr(suites, "DEVICES", drivers)
        assert (run.parse([]).suite, run.parse([]).env) == (suite, threads)
        assert run.parse(["--suite", "full"]).suite == "full"


@pytest.mark.parametrize("words", [["--peak", "bfloat16=abc"], ["--peak", "bfloat16=0"], ["--ranks", "0"], ["--ranks", "-1"],
                                   ["--budget-minutes", "nan"], ["--budget-minutes", "-5"], ["--peak", "float8=1"],
                                   ["--peak", "float32=1", "--peak", "float32=2"]], ids=" ".join)
def test_what_is_no_number_is_told_before_anything_begins(words, capsys):
    with pytest.raises(SystemExit) as ended:
        run.parse(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and any(part in said for part in (words[1].rpartition("=")[2], "given twice"))


def test_a_path_that_cannot_be_used_is_told_in_four_parts(tmp_path, capsys):
    (tmp_path / "file").touch()
    for words in (["--out", str(tmp_path / "file")], ["--hostfile", str(tmp_path / "none"), "--out", str(tmp_path / "out")]):
        assert run.main(["--suite", "toy", *words]) == 2
        said = capsys.readouterr().err
        assert "cannot be used" in said and all(part in said for part in ("on:", "rule:", "fix:")), said
    assert not (tmp_path / "out").exists(), "nothing is left of what was refused"


# -- for real ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The toy suite on two local "nodes" of one rank, in one launch: all but the smaller world of the scaling."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "hosts").write_text(HOSTS)
    command = [sys.executable, "-m", "ms_dtensor", "bench", "--hostfile", str(folder / "hosts"), "--suite",
               "toy", "--out", str(folder / "run"), "--budget-minutes", "4", "--peak", "float32=0.5", "--only",
               "startup,collectives,compute,dispatch,llama,checkpoint"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "9 of 9 pieces are done" in done.stdout, done.stdout + done.stderr
    return folder / "run", {p.stem: json.loads(p.read_text()) for p in (folder / "run/pieces").glob("*.json")}


@pytest.mark.dist
@pytest.mark.timeout(300)
class TestToy:
    def test_collectives(self, toy):
        rows = [r for r in toy[1]["collectives"]["rows"] if "op" in r]
        seen = {(r["group"], r["op"], r["interface"]) for r in rows}
        every = {(g, op, "ms_dtensor") for g in ("world", "first and last") for op in
                 ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")}
        assert seen == every | {(g, op, "mindspore") for g, op, _ in every if op in ("all_reduce", "broadcast")}
        for r in rows:
            assert r["ranks"] == 2 and r["size"] in (1024, 16384) and r["algorithm"] == "mccl" and r["type"] == "float"
            each = r["size"] // 4 // (2 if r["op"] in ("all_gather", "reduce_scatter", "all_to_all") else 1)
            assert r["count"] == each and r["redop"] == ("sum" if "reduce" in r["op"] else "none")
            for key in {"in", "out"} & r.keys():
                w = r[key]
                assert w["wrong"] == 0 and w["time"] > 0
                assert w["algbw"] == pytest.approx(r["size"] / w["time"] / 1e3, rel=2e-3, abs=1e-6)
                factor = 0.5 if r["op"] in ("all_gather", "reduce_scatter", "all_to_all") else 1.0
                assert w["busbw"] == pytest.approx(w["algbw"] * factor, rel=2e-3)
        assert {"in", "out"} <= next(r for r in rows if r["op"] == "all_reduce" and r["interface"] == "ms_dtensor").keys()
        head, lines = columns.nccl(rows[:2])
        assert head[:9] == ("size(B)", "count(elements)", "type", "redop", "root", "time(us)", "algbw(GB/s)", "busbw(GB/s)",
                            "#wrong") and lines[0][0] == 1024 and len(lines[0]) == len(head)
        head, lines = columns.hccl(rows[:2])
        assert head == ("data_size(Bytes)", "aveg_time(us)", "alg_bandwidth(GB/s)", "check_result")
        assert lines[0][3] == "success"

    def test_compute(self, toy):
        rows = {r["op"]: r for r in toy[1]["compute_tp1"]["rows"]}
        assert rows["matmul w1"]["shape"] == "32 x 64 x 96"
        for name, operations in (("matmul w1", 2 * 32 * 64 * 96), ("attention forward", 4 * 4 * 32 * 32 * 16 / 2),
                                 ("attention forward and backward", 7 * 4 * 4 * 32 * 32 * 16 / 4)):
            r = rows[name]
            assert r["tflops"] == pytest.approx(operations / r["time"] / 1e6, rel=2e-3)
            assert r["share"] == pytest.approx(r["tflops"] / 0.5, rel=2e-3) and r["peak"] == 0.5
        assert rows["swiglu"]["gbs"] == pytest.approx(3 * 4 * 32 * 96 / rows["swiglu"]["time"] / 1e3, rel=2e-3)
        assert rows["adamw float32"]["gbs"] and rows["rms_norm"]["tflops"] is None and rows["rotary"]["fastest"] > 0

    def test_dispatch_checkpoints_and_start(self, toy):
        rows = {r["op"]: r for r in toy[1]["dispatch"]["rows"]}
        assert set(rows) == {"add", "matmul", "to_local", "fb add", "fb matmul", "fb to_local"}
        assert rows["add"]["mode"] == "blocking" and rows["add"]["floor added"] is not None
        for r in toy[1]["checkpoint"]["rows"]:
            assert r["bytes"] == 2 << 20 and r["gbs"] == pytest.approx(r["bytes"] / r["seconds"] / 1e9, rel=0.3)
        assert {"plain write", "save", "plain read", "load", "async save, stall"} <= {r["what"] for r in
                                                                                      toy[1]["checkpoint"]["rows"]}
        start = toy[1]["startup_first_2"]
        assert start["world"] == {"device": "CPU", "kind": "cpu", "backend": "mccl", "ranks": 2}
        assert [r["stage"] for r in start["rows"]] == ["launch to process", "python", "import mindspore", "world", "mesh",
                                                       "first collective"]

    def test_llama(self, toy):
        pieces = [p for name, p in toy[1].items() if name.startswith("llama_")]
        rows = [p["rows"][0] for p in pieces]
        assert {columns.way(r) for r in rows} == {"dp2-tp1", "dp1-tp2-sp", "dp2-tp1-fsdp", "dp2-tp1-fsdp-acc2-recompute"}
        parameters = 2 * 256 * 64 + 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64)
        for r in rows:
            assert r["parameters"] == parameters and r["first_loss"] == pytest.approx(rows[0]["first_loss"], abs=2e-4)
            assert r["tokens_s_p"] == pytest.approx(4 * 16 / r["step_s"] / 2, rel=5e-3)
            assert r["tflops_6n"] == pytest.approx(6 * parameters * r["tokens_s_p"] / 1e12, rel=2e-3)
            assert r["tflops"] == pytest.approx((6 * parameters + 6 * 2 * 16 * 64) * r["tokens_s_p"] / 1e12, rel=2e-3)
            assert r["mfu"] == pytest.approx(r["tflops"] / 0.5, rel=2e-3) and r["memory_gib"] is None
        for make in (columns.mindformers, columns.mindspeed):
            head, lines = make(rows, "CPU x 2")
            assert all(len(line) == len(head) for line in lines) and "toy" in str(lines[-1])

    def test_the_page_needs_nothing_else_and_compares_runs(self, toy, tmp_path):
        one = (toy[0] / "report.html").read_text()
        other = tmp_path / "other"
        other.mkdir()
        (other / "run.json").write_text((toy[0] / "run.json").read_text().replace('"label": "run"', '"label": "<other>"'))
        (other / "pieces").mkdir()
        for name, p in toy[1].items():
            for r in p["rows"]:
                if "out" in r:
                    r["out"]["busbw"] *= 2
            (other / f"pieces/{name}.json").write_text(json.dumps(p))
        (other / "pieces/dispatch.failed").write_text("rank 1: no <memory>")
        none = tmp_path / "none"  # every figure of it is no number
        (none / "pieces").mkdir(parents=True)
        (none / "run.json").write_text((toy[0] / "run.json").read_text())
        for name, p in toy[1].items():
            (none / f"pieces/{name}.json").write_text(re.sub(r"-?\d+\.\d+(e-?\d+)?", "NaN", json.dumps(p)))
        for page in (report.page([none]), report.page([toy[0], none])):
            assert ">n/a<" in page and not re.search(r"\bnan\b|NaN|None", page)
        two = report.page([toy[0], other])
        assert "run / run" not in one and "&lt;other&gt; / run" in two and ">2.000<" in two and "no &lt;memory&gt;" in two
        for page in (one, two):
            assert "say" not in page or "Taken on CPUs" in page
            assert not re.search(r"(src|href)=(?![\"']?#)|url\(|@import|<script|<link", page)
            check = Balanced()
            check.feed(page)
            assert not check.open, check.open
            for title in ("Collectives", "Compute", "Dispatch", "Llama step", "Checkpoints", "Start"):
                assert f">{title}</h2>" in page


class Balanced(HTMLParser):
    """Tags that are open at the end, or closed in another order."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def test_plots_of_hardly_anything():
    assert "<svg" in svg.lines("one", [("a", [(1024, 0.0)]), ("none", [])], "size")
    assert "n/a" in svg.bars("two", ["x", "y"], [("a", [None, -1.0])], "us")
    assert svg.ticks(7.0) == [0, 2, 4, 6, 8] and svg.bytes_short(65536) == "64K"
