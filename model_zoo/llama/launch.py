# SPDX-License-Identifier: Apache-2.0
"""Runs `train.py` on several ranks with msrun: free port, dated log folder, live output, clear failure.

    python model_zoo/llama/launch.py --workers 8 --config model_zoo/llama/configs/quickstart.yaml [--section.key value]

On several machines the same command on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment or as
options; `--workers` is the number of ranks on each. A wrong configuration, missing data, a folder that cannot be written and
a port in use are refused before msrun starts. Shows rank 0's output as it comes. When a rank fails or is killed it prints
the traceback of the rank that failed first, ends what is left of this run within seconds and exits non-zero. With
`--max_restarts N` it then starts again, up to N times, from the latest checkpoint (see --checkpoint.interval). With
`--nodes 2:4` in place of NNODES and NODE_RANK it starts with as many of two to four machines as are there, and again with
those that are left when one is lost; one that comes (back) is part of the next start (`meeting.py`). SIGTERM,
Ctrl-C, SIGHUP (a closed terminal) and SIGQUIT reach the ranks as SIGTERM: they may save and end by themselves; when it is
killed itself they do so too. The second time all is ended at once. It ends only processes that it started: msrun's children,
by id and start time.
"""
from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.elastic import held, layouts_of, least_and_most
from model_zoo.llama.hold import hold
from model_zoo.llama.meeting import Meeting, address_towards
from model_zoo.llama.nodes import ALONE, Nodes
from model_zoo.llama.ranks import LAUNCHER, this_process
from ms_dtensor.core.files import new_folder, own_file
from ms_dtensor.errors import CommError, ConfigError
from ms_dtensor.tools.ranks import FAILED, NODE, end_with_parent, failures, free_port
from ms_dtensor.tools.screen import Screen

HERE = Path(__file__).resolve().parent
WHY = {signal.SIGKILL: " (by somebody, or by the system for want of memory)",
       signal.SIGTERM: " (by somebody, or by MindSpore's scheduler, which ends all when a rank is gone, elsewhere too)"}
LEFT = re.compile(r"Worker process (\d+) exit with exception. Error code: (-?)(\d+)")  # msrun's words; by a signal: -
STEP = re.compile(r"^ *(\d+)/(\d+)  ")
GRACE = 5.0  # seconds the scheduler gets to leave by itself once no worker is left


def msrun_command(script: Path, workers: int, log_dir: Path, args: list[str], nodes: Nodes = ALONE) -> list[str]:
    several = [f"--node_rank={nodes.rank}"] if nodes.count > 1 else []
    return [str(Path(sys.executable).parent / "msrun"), f"--worker_num={workers * nodes.count}",
            f"--local_worker_num={workers}", f"--master_addr={nodes.address}", f"--master_port={nodes.port or free_port()}",
            *several, "--join=True", f"--log_dir={log_dir}",
            "--tail_worker_log=99999",  # no such worker: this file shows rank 0's log itself
            str(script), *args]


def environment(nodes: Nodes = ALONE) -> dict[str, str]:
    """Quiet logs, one thread a rank, quick retries while ranks find each other; the user's own settings win."""
    several = {"MS_DTENSOR_CPU_BACKEND": "mccl"} if nodes.count > 1 else {}  # shared memory ends at the machine
    defaults = {"GLOG_v": "3", "OMP_NUM_THREADS": "1", "MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # msrun starts "python"
    return {**defaults, **several, **os.environ, NODE: str(nodes.rank), LAUNCHER: this_process(), "PATH": path,
            "PYTHONUNBUFFERED": "1"}


class Run:
    """One launch; `wait` returns the exit code with nothing of it left alive."""

    def __init__(self, script: Path, workers: int, log_dir: Path, args: list[str], show: bool = True,
                 nodes: Nodes = ALONE, others: Callable[[], str] = str):
        self.log_dir, self.show = log_dir, show
        self.others = others  # says why they make this run end, or nothing
        self.workers = workers
        self.count = workers + (nodes.rank == 0)  # with the scheduler
        self.first = nodes.rank * workers  # of this machine's ranks; rank 0 alone has much to say
        self.screen = Screen(show)
        for old in [*log_dir.glob("worker_*.log"), log_dir / "scheduler.log"]:
            old.unlink(missing_ok=True)
        with open(log_dir / "msrun.log", "wb", opener=own_file) as log:
            self.msrun = subprocess.Popen(msrun_command(script, workers, log_dir, args, nodes), env=environment(nodes),
                                          stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                          start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()))
        self.known: dict[int, psutil.Process] = {}
        self.ranks: dict[int, str] = {}  # by process id
        self.scheduler: int | None = None
        self.killed = ""  # says what a signal ended, that we did not ask for
        self.asked = 0  # to end, by this signal
        self.shown = 0

    def wait(self) -> int:
        alone_since, told = None, False
        try:
            while self.msrun.poll() is None:
                self._look()
                self._print_new()
                self._look_for_killed()
                self.killed = self.killed or ("" if self.asked else self.others())
                if self.asked and not told:
                    told = True
                    say(f"{_name(self.asked)}: ranks end, and save first with checkpoint.on_sigterm; once more ends all now")
                living = [p for p in self.known.values() if _alive(p)]
                left = len(self.known) >= self.count and all(_role(p) == "MS_SCHED" for p in living)
                if self.killed or self.asked and (len(self.ranks) < self.workers or left and LEFT.search(self._msrun_log())):
                    break  # nobody can have anything to save, or has; msrun would wait half a minute for its scheduler
                if left:
                    # no rank is left; after a failure msrun's scheduler would take half a minute to notice
                    alone_since = alone_since or time.monotonic()
                    if time.monotonic() - alone_since > GRACE:
                        self.end()
                else:
                    alone_since = None
                time.sleep(0.2)
        finally:
            self.end(self.killed or self.asked)
            with contextlib.suppress(OSError):  # of a terminal that is gone
                self.screen.close()
            self.msrun.wait()
        self._print_new()
        if self.asked:
            return 128 + self.asked if self.msrun.returncode else 0
        return 1 if self.killed or self.msrun.returncode < 0 else self.msrun.returncode

    def end(self, with_msrun: object = False) -> None:
        """Ends the scheduler and workers that are still there; psutil checks that an id was not reused."""
        self.msrun.send_signal(signal.SIGSTOP)  # it starts nobody while we look
        self._look()
        for process in self.known.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.msrun.send_signal(signal.SIGKILL if with_msrun else signal.SIGCONT)
        until = time.monotonic() + 5
        while any(map(_alive, self.known.values())) and time.monotonic() < until:
            time.sleep(0.02)

    def ask_to_end(self, number: int, *_) -> None:
        """SIGTERM for the ranks, who may save then (--checkpoint.on_sigterm); the second time all is ended."""
        if self.asked:
            if number == signal.SIGHUP:  # shell and system both say that a terminal is gone
                return
            sys.exit(128 + number)  # so that `finally` runs
        self.asked = number
        for pid in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.known[pid].terminate()

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.msrun.pid).children(recursive=True):
                self.known.setdefault(child.pid, child)
                role = _role(child) if child.pid not in self.ranks and child.ppid() == self.msrun.pid else ""
                if role == "MS_SCHED":
                    self.scheduler = child.pid
                if role == "MS_WORKER":
                    self.ranks[child.pid] = child.environ().get("RANK_ID", "?")
                    if self.asked:  # before it was there
                        child.terminate()
        except psutil.Error:
            pass

    def _look_for_killed(self) -> None:
        found, scheduler = LEFT.search(self._msrun_log()), _ended_by(self.scheduler)
        if self.asked or not (scheduler or found and found[2]):
            return
        number, rank = scheduler or int(found[3]), "" if scheduler else self.ranks.get(int(found[1]), "?")
        if rank and any(who == rank for _, who, _ in failures(self.log_dir)):
            return  # it had said why it fails; MindSpore ends by a signal who is late to leave
        why = WHY.get(number, "")
        self.killed = f"{'the scheduler of msrun' if scheduler else f'rank {rank}'} was ended by {_name(number)}{why}:\n" + (
            "it finds the ranks for each other, and msrun asks only at the end how it fared" if scheduler
            else _tail(self.log_dir, rank))

    def _msrun_log(self) -> str:
        return (self.log_dir / "msrun.log").read_text(errors="replace")

    def _print_new(self) -> None:
        log = self.log_dir / f"worker_{self.first}.log"
        if self.show and log.exists():
            with open(log, "rb") as file:
                file.seek(self.shown)
                new = file.read()
            new = new[:new.rfind(b"\n") + 1] if self.msrun.poll() is None else new  # whole lines
            self.shown += len(new)
            output, failed, _ = new.decode(errors="replace").partition(FAILED)
            self.show = not failed  # what follows is said once, by `first_failure`
            try:
                for line in output.splitlines():
                    step = STEP.match(line)
                    if step:
                        self.screen.begin(int(step[2]))
                    self.screen.say(line)
                    if step:
                        self.screen.done(int(step[1]))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self.show = False  # the terminal is gone; what is to follow from that SIGHUP says


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ended_by(pid: int | None) -> int:
    """The signal that ended a process which its parent has not asked about yet; 0 if none did, or it is not known."""
    with contextlib.suppress(OSError):
        state, *_, code = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(code) & 0x7F if state == "Z" else 0
    return 0


def _name(number: int) -> str:
    return signal.Signals(number).name


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # of a terminal that is gone
        print(f"launch.py: {line}", file=sys.stderr, flush=True)


def _role(process: psutil.Process) -> str:
    try:
        return process.environ().get("MS_ROLE", "")
    except psutil.Error:
        return ""


def _tail(log_dir: Path, rank: str) -> str:
    log = log_dir / f"worker_{rank}.log"
    return "".join(log.read_text(errors="replace").splitlines(True)[-5:]) if log.exists() else ""


def first_failure(log_dir: Path) -> str:
    """The words of the rank that failed first; without any, the end of each log that is not rank 0's."""
    said = sorted(failures(log_dir))
    if said:
        return f"rank {said[0][1]} failed first:\n{said[0][2].rstrip()}"
    tails = [f"{log.name}:\n" + "".join(log.read_text(errors="replace").splitlines(True)[-5:])
             for log in sorted(log_dir.glob("*.log"))]
    return "a rank ended without a traceback (killed, or out of memory?):\n" + "\n".join(tails)


def after_signal(log_dir: Path, number: int) -> str:
    """What is said of a run that ended because it was asked to; of ranks that only missed one another nothing."""
    said = [(rank, text) for _, rank, text in sorted(failures(log_dir)) if "PeerLost: " not in text]
    return f"ended by {_name(number)}" + (f", and rank {said[0][0]} failed:\n{said[0][1]}" if said else
                                          "; with --checkpoint.on_sigterm true a run that has begun its steps saves first")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    env = os.environ
    several = int(env.get("NNODES", "1")) > 1 if env.get("NNODES", "1").isdigit() else True
    parser.add_argument("--workers", type=int, default=8, help="number of ranks on this machine; default: 8")
    parser.add_argument("--log-dir", type=Path, help="where the logs of all ranks go; default: logs/DATE in train.log_dir")
    parser.add_argument("--max_restarts", type=int, help="start so many times again after a failure; default: 0, with "
                        "--nodes 3, and then only those in a row count that made no checkpoint")
    parser.add_argument("--force", action="store_true", help="start what does not fit, by formula: check_memory false")
    parser.add_argument("--nnodes", type=int, default=env.get("NNODES", "1"), help="machines; default: $NNODES or 1")
    parser.add_argument("--node_rank", type=int, default=env.get("NODE_RANK", "0") if several else "0",
                        help="which one this is, from 0; default: $NODE_RANK")
    parser.add_argument("--master_addr", default=env.get("MASTER_ADDR", "127.0.0.1") if several else "127.0.0.1",
                        help="address of machine 0; default: $MASTER_ADDR")
    parser.add_argument("--master_port", type=int, default=env.get("MASTER_PORT") if several else None,
                        help="a port of machine 0; default: $MASTER_PORT, on one machine any that is free")
    parser.add_argument("--nodes", type=least_and_most, metavar="MIN:MAX", help="machines, as many as are there: the same "
                        "command on each, without a number; --master_addr names any of them, to tell which network it is")
    parser.add_argument("--nodes_timeout", type=float, default=600.0, help="seconds that fewer than MIN are waited for; a "
                        "tenth of it, more than MIN; default: 600")
    options, rest = parser.parse_known_args()
    if options.nodes and options.nnodes > 1:
        parser.error("--nodes counts machines itself: leave --nnodes and NNODES out")
    if not 0 < options.nodes_timeout < math.inf:
        parser.error(f"argument --nodes_timeout: {options.nodes_timeout} is no number of seconds above 0")
    if options.max_restarts is None:
        options.max_restarts = 3 if options.nodes else 0
    rest += ["--train.check_memory", "false"] * options.force
    nodes = Nodes(options.nnodes, options.node_rank, options.master_addr, options.master_port)
    with contextlib.ExitStack() as keep:
        try:
            if options.nodes:
                return with_those_that_are_there(options, resumed(rest), keep)
            root = preflight(options, nodes, rest, keep)
        except ConfigError as error:
            print(f"launch.py: ConfigError: {error}", file=sys.stderr)
            return 2
        return 0 if root is None else attempts(options, nodes, rest, root)


def attempts(options: argparse.Namespace, nodes: Nodes, rest: list[str], root: Path) -> int:
    """Starts the ranks, again and again if they may fail; the exit code."""
    for attempt in range(options.max_restarts + 1):
        log_dir = new_folder(root / f"restart_{attempt}") if attempt else root
        on = f" on node {nodes.rank} of {nodes.count}" if nodes.count > 1 else ""
        print(f"starting {options.workers} ranks{on}; logs of all ranks in {log_dir}", flush=True)
        run = Run(HERE / "train.py", options.workers, log_dir, rest, nodes=nodes)
        on_signals(run.ask_to_end)
        code = run.wait()
        if not code:
            return 0
        why = why_it_ended(run)
        if run.asked or again_in_vain(why):
            break
        rest = resumed(rest)
    return code


def on_signals(then: Callable[..., object]) -> None:
    """Who asks a launcher to end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, then)


def why_it_ended(run: Run) -> str:
    """The reason, which is said, too."""
    why = (after_signal(run.log_dir, run.asked) if run.asked else run.killed or first_failure(run.log_dir)).rstrip()
    if shutil.disk_usage(run.log_dir).free < 1 << 16:  # then ranks could not say it
        why = f"no space is left on the disk of '{run.log_dir}': make room, or --train.log_dir elsewhere\n{why}"
    say(f"{why}\nlogs: {run.log_dir}")
    return why


def again_in_vain(why: str) -> bool:
    """Whether it would happen again."""
    return bool(re.match(r"(ConfigError|Diverged): ", why.partition("\n")[2]))


def with_those_that_are_there(options: argparse.Namespace, rest: list[str], keep: contextlib.ExitStack) -> int:
    """Of `--nodes`: starts with the machines that meet, and again with those that are left; the exit code."""
    from model_zoo.llama.config import checkpoint_folder
    from model_zoo.llama.configio import dump, load
    from ms_dtensor.checkpoint.folder import latest

    layouts = layouts_of(rest, options.workers, options.nodes)
    most = [*rest, *layouts[max(layouts)]]
    root = preflight(options, Nodes(address=options.master_addr), most, None, options.workers * max(layouts))
    if root is None:
        return 0
    cfg, _ = load(most, options.workers * max(layouts))
    command = hashlib.sha256(repr((dump(cfg), options.workers, options.nodes)).encode()).hexdigest()
    meeting = Meeting(Path(cfg.train.log_dir) / "machines", address_towards(options.master_addr), command, sorted(layouts),
                      options.nodes_timeout)
    on_signals(end_now)
    state, failed, before = "left", 0, latest(checkpoint_folder(cfg))
    try:
        while True:
            say(f"{meeting.name} at {meeting.address} waits for {' or '.join(map(str, layouts))} machines")
            met = meeting.meet()
            if met is None:
                say("the others have ended the run")
                return 0
            number, nodes = met
            with contextlib.ExitStack() as held_meanwhile:
                if nodes.rank == 0:
                    held(held_meanwhile, cfg)
                log_dir = new_folder(root / f"round_{number}")
                print(f"starting {options.workers} ranks as machine {nodes.rank} of {nodes.count}, start {number}; logs in "
                      f"{log_dir}", flush=True)
                run = Run(HERE / "train.py", options.workers, log_dir, [*rest, *layouts[nodes.count]], nodes=nodes,
                          others=partial(meeting.lost, number))
                on_signals(partial(leaving, meeting, run))
                code = run.wait()
                on_signals(end_now)
            if run.asked:
                if code:
                    why_it_ended(run)
                return code
            if not code and not meeting.left(number):
                state = "done"
                return 0
            why = why_it_ended(run) if code else "a machine was asked to leave, and all have saved"
            meeting.say("failed", number, why)
            now = latest(checkpoint_folder(cfg))
            failed, before = (1 if now != before else failed + 1), now
            if failed > options.max_restarts or again_in_vain(why):
                return code
    except CommError as error:
        say(f"CommError: {error}")
        return 1
    finally:
        meeting.leave(state)


def end_now(number: int, _: object) -> None:
    """A signal came while no ranks run."""
    sys.exit(128 + number)


def leaving(meeting: Meeting, run: Run, *asked) -> None:
    """A signal came: the others go on without this machine."""
    meeting.say("leaving")
    run.ask_to_end(*asked)


def preflight(options: argparse.Namespace, nodes: Nodes, rest: list[str], keep: contextlib.ExitStack | None,
              world: int | None = None) -> Path | None:
    """Where the logs go, after everything that one process can refuse; None if the configuration was only to be printed.

    The run's folders are held until `keep` closes, if it is given.
    """
    from model_zoo.llama.fits import machine, refuse_too_large
    from model_zoo.llama.report import Writing, check_folder
    from model_zoo.llama.train import prepare

    if options.workers < 1 or nodes.count < 1:
        raise ConfigError("For 'launch.py', a run has one rank at least.",
                          f"--workers {options.workers}, --nnodes {nodes.count}", "Both count from 1.", "--workers 1")
    if options.max_restarts < 0:
        raise ConfigError("For 'launch.py', --max_restarts is out of range.", f"--max_restarts {options.max_restarts}",
                          "It is 0 or more; a run starts once besides.", "--max_restarts 0")
    nodes.check()
    world = world or options.workers * nodes.count
    holding = (lambda cfg: keep.enter_context(hold(cfg, launcher=True))) if keep and nodes.rank == 0 else (lambda cfg: None)
    cfg, resolved, show, *_ = prepare(rest, world, holding)
    if show:
        print(resolved, end="")
        return None
    if cfg.train.check_memory:
        refuse_too_large(cfg, world, *machine(options.workers))
    if not (Path(sys.executable).parent / "msrun").is_file():
        raise ConfigError("For 'launch.py', there is no msrun.", f"looked in {Path(sys.executable).parent}",
                          "MindSpore brings it.", "python -m ms_dtensor doctor  says what else is missing")
    date = time.strftime("%Y-%m-%d_%H-%M-%S") + (f"_node{nodes.rank}" if nodes.count > 1 else "")
    if options.log_dir is not None:
        root = options.log_dir
        check_folder(root)
    else:  # one that was not there: msrun writes by names that anybody can foretell
        with Writing(Path(cfg.train.log_dir)):
            root = new_folder(Path(cfg.train.log_dir) / "logs" / date)
        check_folder(root)
    return root.resolve()


def resumed(args: list[str]) -> list[str]:
    """The arguments of a run that goes on from its latest checkpoint."""
    return [*args, "--checkpoint.resume", "latest"]


if __name__ == "__main__":
    sys.exit(main())
