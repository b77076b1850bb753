# SPDX-License-Identifier: Apache-2.0
"""`launch.py --nodes MIN:MAX`: who meets, who is lost and how that is said; and several launchers on this machine."""
import json
import re
import signal
import sys
import threading
import time
from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from model_zoo.llama import elastic, launch, meeting
from model_zoo.llama.meeting import Meeting, Sign
from ms_dtensor.errors import CommError, ConfigError
from tests.jobs import Job, losses, recipe, soon
from tests.msrun import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml")]


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("LOST", 2.0), ("FRESH", 1.0), ("BEAT", 0.05)):
        monkeypatch.setattr(meeting, name, seconds)


class Machines(dict):
    """Launchers' parts in one process; `meet` asks all at once."""

    def __init__(self, folder, names, counts=(1, 2, 3), patience=10.0, command="the same"):
        self.folder, self.counts, self.patience = folder, counts, patience
        for name in names:
            self.come(name, command)
        assert soon(lambda: all(len([*filter(None, (o.reached for o in self[n]._others.values()))]) == len(names) - 1
                                for n in names))

    def come(self, name, command="the same"):
        self[name] = Meeting(self.folder, "127.0.0.1", command, self.counts, self.patience, name)

    def meet(self, names):
        told: dict = {}

        def ask(name):
            try:
                told[name] = self[name].meet()
            except Exception as error:
                told[name] = error
        threads = [threading.Thread(target=ask, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return told

    def waiting(self, name):
        """What one that has to wait is told, once it is told, and its thread."""
        told: dict = {}
        thread = threading.Thread(target=lambda: told.update(self.meet(name)))
        thread.start()
        return told, thread

    def leave(self, names, how="left"):
        for name in names:
            self[name].leave(how)


@pytest.fixture
def machines(quick, tmp_path):
    made: list[Machines] = []

    def make(names, **how):
        made.append(Machines(tmp_path / "machines", names, **how))
        return made[-1]
    yield make
    for one in made:
        one.leave(one)


def test_all_get_the_same_round_and_the_first_has_the_scheduler(machines):
    m = machines("abc")
    told = m.meet("abc")
    assert {number for number, _ in told.values()} == {1}
    nodes = [told[name][1] for name in "abc"]
    assert [n.rank for n in nodes] == [0, 1, 2] and {(n.count, n.address, n.port) for n in nodes} == {
        (3, "127.0.0.1", nodes[0].port)}
    assert m["a"].lost(1) == ""


@pytest.mark.parametrize(("how", "said"), [
    (lambda one: one._ended.set(), "machine b at 127.0.0.1 is gone: it gave no sign for 2 s"),
    (lambda one: one.say("failed", 1, "rank 3 failed:\nValueError"), "machine b at 127.0.0.1 failed: rank 3 failed:"),
    (lambda one: one.leave("left"), "machine b at 127.0.0.1 was asked to leave")],
    ids=["gone", "failed", "asked"])
def test_a_machine_that_is_lost_is_named_and_the_rest_go_on(machines, how, said):
    m = machines("ab")
    m.meet("ab")
    how(m["b"])
    assert soon(lambda: m["a"].lost(1)).startswith(said)
    m["a"].say("failed", 1)
    if "failed" in said:
        assert [nodes.count for _, nodes in m.meet("ab").values()] == [2, 2]
    else:
        number, nodes = m.meet("a")["a"]
        assert (number, nodes.count, nodes.rank) == (2, 1, 0)


def test_a_machine_that_was_stopped_is_told_that_the_others_went_on(machines):
    m = machines("ab")
    m.meet("ab")
    m["b"].say("wants", 2)
    assert soon(lambda: m["a"].lost(1)) == "machine b at 127.0.0.1 went on to start 2 without this one"


def test_a_machine_whose_network_is_cut_is_named_and_stays_out_until_it_is_back(machines, monkeypatch):
    """Its files go on; no way leads to it, nor from it. That it comes back ends no round; the next one has it."""
    m = machines("ab")
    m.meet("ab")
    connect = meeting.socket.create_connection

    def cut(*_, **how):
        raise OSError("no route to host")
    monkeypatch.setattr(meeting.socket, "create_connection", cut)
    assert soon(lambda: m["a"].lost(1)) == "machine b at 127.0.0.1 is cut off: it gives signs, and was not reached for 2 s"
    for name in "ab":
        m[name].say("failed", 1)
    waits, thread = m.waiting("b")
    assert m.meet("a")["a"][1].count == 1 and not waits
    monkeypatch.setattr(meeting.socket, "create_connection", connect)
    time.sleep(2 * meeting.LOST)
    assert m["a"].lost(2) == "" and not waits, "whoever waits ends no round"
    m["a"].say("failed", 2)
    assert m.meet("a")["a"][1].count == 2
    thread.join(20)
    assert waits["b"][0] == 3 and waits["b"][1].count == 2


def test_only_those_begin_who_all_reach_each_other(machines):
    """a reaches the others and is reached by nobody: b and c go on, though a came first."""
    m = machines("abc", counts=(2, 3))
    m["a"]._listener.close()
    told = m.meet("bc")
    assert [(told[name][1].count, told[name][1].rank) for name in "bc"] == [(2, 0), (2, 1)]
    _, thread = m.waiting("a")
    time.sleep(1)
    m["b"].say("failed", 1)
    m["c"].say("failed", 1)
    assert [nodes.count for _, nodes in m.meet("bc").values()] == [2, 2]
    m.leave("bc", "done")
    thread.join(10)


def test_too_few_and_unlike_commands_are_refused(machines):
    m = machines("a", counts=(2, 3), patience=1.0)
    error = m.meet("a")["a"]
    assert isinstance(error, CommError) and "1 machine came to start, and 2 are needed.\n  on:   here: a" in str(error)
    m.come("b", command="another")
    errors = m.meet("ab").values()
    assert all(isinstance(e, ConfigError) and "started with different commands" in str(e) for e in errors)


def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(machines):
    """It waited for the end of the first, then said that its own was done; or it ended the first as that started again."""
    m = machines("ab", counts=(1, 2), command="first")
    assert [nodes.count for _, nodes in m.meet("ab").values()] == [2, 2]
    m.come("c", command="first")  # stands by: the run can be of two
    waits, thread = m.waiting("c")
    m.come("x", command="second")
    error = m.meet("x")["x"]
    assert isinstance(error, ConfigError)
    assert re.search("another run is at work in the folder.\n  on:   x and [abc], in ", str(error))
    m.come("y", command="second")  # comes as the first run starts again
    for name in "ab":
        m[name].say("failed", 1)
    m["y"].say("wants", 2)
    assert soon(lambda: all("y" in m[name]._living() for name in "abc"))
    told = m.meet("ab")
    assert [nodes.count for _, nodes in told.values()] == [2, 2] and not waits, told
    m.leave("ab", "done")
    thread.join(10)
    assert waits == {"c": None}
    m.leave("cxy")
    m.come("z", command="second")  # the folder is free: what ended there is not this run's end
    assert m.meet("z")["z"][0] == 3


def test_more_machines_than_a_run_can_be_of_stand_by_and_leave_when_it_is_done(machines):
    m = machines("abc", counts=(1, 2))
    told = m.meet("ab")
    waits, thread = m.waiting("c")
    assert [nodes.count for _, nodes in told.values()] == [2, 2]
    time.sleep(0.5)
    assert not waits
    m.leave("ab", "done")
    thread.join(10)
    assert waits == {"c": None}


def test_what_dead_launchers_left_counts_for_nothing(machines, tmp_path):
    folder = tmp_path / "machines"
    folder.mkdir()
    (folder / "round-00000007.json").write_text(json.dumps([{"name": "old", "address": "127.0.0.1", "port": 1}]))
    (folder / "old.sign").write_text(json.dumps(asdict(Sign("old", "127.0.0.1", 1, "another", "runs", 7, 9))))
    (folder / "half.sign").write_text('{"name": "ha')
    m = machines("a", counts=(1,))
    number, nodes = m.meet("a")["a"]
    assert (number, nodes.count) == (8, 1)


def test_the_numbers_of_machines_that_a_run_can_be_of():
    words = [*TINY, "--checkpoint.interval", "5"]
    assert elastic.layouts_of(words, 1, (1, 4)) == {n: ["--parallel.dp", str(n)] for n in (1, 2, 4)}, "its batch is 4"
    assert elastic.layouts_of([*words, "--parallel.tp", "2"], 2, (1, 2)) == {n: ["--parallel.dp", str(n)] for n in (1, 2)}
    with pytest.raises(ConfigError, match="can be of no number of machines from 3 to 3.\n.*3: .*cannot be shared out"):
        elastic.layouts_of(words, 1, (3, 3))
    with pytest.raises(ConfigError, match="nothing to go on from"):
        elastic.layouts_of(TINY, 1, (1, 2))
    with pytest.raises(ConfigError, match="the run's own folder"):
        elastic.layouts_of([*words, "--checkpoint.resume", "elsewhere"], 1, (1, 2))
    assert elastic.least_and_most("2:4") == (2, 4)
    for wrong in ("0:2", "3:2", "a", "1:", ":2"):
        with pytest.raises(ArgumentTypeError):
            elastic.least_and_most(wrong)


# -- launchers of this machine -----------------------------------------------------------------------------------------
STEPS, INTERVAL = 2000, 20
WORDS = ["tiny", "--parallel.tp", "1", "--data.max_bytes", "200000", "--model.n_layers", "1", "--train.steps", str(STEPS),
         "--checkpoint.interval", str(INTERVAL), "--checkpoint.keep_last", "1000", "--optim.schedule", "constant"]


class Launcher(Job):
    """`run_llama.sh` as one machine."""

    def __init__(self, output: Path, *words: str, ranks: int = 1, **env: str):
        super().__init__(output, *recipe(ranks, *WORDS, *words), **env)

    def steps(self) -> int:
        return max(map(int, re.findall(rf"^ *(\d+)/{STEPS}  ", self.said(), re.M)), default=0)


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_a_machine_is_lost_and_one_comes_back(tmp_path):
    """Two machines, one killed: the other goes on alone. One comes, and a rank is killed: both go on. Each part of the run
    has, bit for bit, the losses of one that was started by hand on so many ranks from the same checkpoint."""
    run, all_of_them = tmp_path / "run", []

    def launcher(name, *words, **how):
        all_of_them.append(Launcher(tmp_path / name, *words, **how))
        return all_of_them[-1]
    how = ["--nodes", "1:2", "--nodes_timeout", "60", "--train.log_dir", str(run)]
    try:
        two = [launcher("a", *how), launcher("b", *how)]
        assert soon(lambda: any(one.steps() > INTERVAL for one in two), PATIENCE), [one.said()[-3000:] for one in two]
        first, other = sorted(two, key=lambda one: -one.steps())
        first.process.kill()  # the machine that has the scheduler, and rank 0; its ranks go with it
        killed = time.monotonic()
        assert soon(lambda: other.steps() > INTERVAL, PATIENCE), other.said()[-3000:]
        said = r"machine \S+ at 127.0.0.1 is (gone: it gave no sign|cut off: it gives signs, and was not reached) for 20 s"
        assert time.monotonic() - killed < 90 and re.search(said, other.said()), other.said()[-3000:]
        alone = int(re.findall(r"going on after step (\d+)", other.said())[-1])
        new = launcher("c", *how)
        assert soon(lambda: "waits for" in new.said(), PATIENCE)
        at = other.steps()
        assert soon(lambda: other.steps() > at + INTERVAL, PATIENCE) and other.process.poll() is None
        assert "starting" not in new.said(), "it waits for the next start"
        next(iter(other.ranks().values())).kill()
        third = "machine [01] of 2, start 3"
        assert soon(lambda: all(re.search(third, one.said()) for one in (other, new)), PATIENCE), other.said()[-3000:]

        def later():
            return re.findall(r"going on after step (\d+)", "".join(re.split(third, one.said())[1] for one in (other, new)))
        assert soon(later, PATIENCE), (other.said()[-2000:], new.said()[-2000:])
        both = int(later()[0])
        assert soon(lambda: max(losses(run)) > both + 5, PATIENCE)
        for one in (other, new):
            one.process.send_signal(signal.SIGTERM)
        assert [one.process.wait(PATIENCE) for one in (other, new)] == [143, 143], (other.said()[-2000:], new.said()[-2000:])
        got = losses(run)
        assert INTERVAL <= alone < both and alone % INTERVAL == both % INTERVAL == 0
        for begin, end, ranks, env in ((alone, both, 1, {}), (both, max(got), 2, {"MS_DTENSOR_CPU_BACKEND": "mccl"})):
            by_hand = tmp_path / f"by_hand_{ranks}"
            one = launcher(by_hand.name + ".out", "--parallel.dp", str(ranks), "--train.log_dir", str(by_hand),
                           "--checkpoint.resume", str(run / f"checkpoints/step-{begin:08d}"), "--checkpoint.interval", "0",
                           "--train.steps", str(end), ranks=ranks, **env)
            one.ended()
            want = losses(by_hand)
            assert [*want] == [*range(begin + 1, end + 1)] and want == {step: got[step] for step in want}
    finally:
        for one in all_of_them:
            one.end()


@pytest.mark.parametrize(("option", "value", "said"), [
    *(("--nodes_timeout", seconds, "no number of seconds above 0") for seconds in ("nan", "-3", "0", "inf")),
    ("--nnodes", "2", "leave --nnodes and NNODES out")])
def test_what_does_not_go_with_numbers_of_machines_is_refused(option, value, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch.py", "--nodes", "1:2", option, value])
    with pytest.raises(SystemExit) as end:
        launch.main()
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_signal_lets_the_others_know_first():
    said: list = []
    launch.leaving(Namespace(say=said.append), Namespace(ask_to_end=lambda *asked: said.append(asked)), signal.SIGTERM, None)
    assert said == ["leaving", (signal.SIGTERM, None)]
