# SPDX-License-Identifier: Apache-2.0
"""The recipe over two machines: network namespaces of this one, with addresses of their own and one cable between them.

    python -m tests.long.check_two_nodes [run kill cut slow off unplugged]

Two nodes of two ranks meet over TCP (`mccl`). `run`: the losses of one machine. `kill`: a rank of the second node is killed;
`cut`: the cable goes down; both in the middle of a run: each node ends with an exit code that is not 0 and with the reason
within LIMIT seconds, and started again from the checkpoint, on both nodes, the run ends with the very losses of one that
nobody disturbed. `slow`: 8 Mbit/s on the cable; nothing but slower.

`off` and `unplugged`: the same command on both, with `--nodes 1:2`, and the slow cable. All processes of the first machine
are killed, whether it has the scheduler or not; or the cable goes down. Within LIMIT seconds those that are left name the
other machine and go on alone from the latest checkpoint; they end with the losses, bit for bit, of one machine that goes on
from it by hand. A machine that was cut off waits, and is told that the run has ended.

Needs iproute2 and the right to make namespaces; says "left out" and ends with 0 where there is none.
"""
import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.jobs import Job, losses, recipe

LIMIT = 90.0  # seconds from the fault until both nodes have ended; MindSpore's own limit for a peer is 30
STEPS, AT = 12, 5  # of a run; of the step after which the fault comes
LONGER = 60  # steps of a run that goes on by itself
HOSTS = (f"msdt-a-{os.getpid()}", f"msdt-b-{os.getpid()}")
CABLE = ("netns", "exec", HOSTS[0], "tc", "qdisc")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RUN = ["2", "tiny", "--parallel.dp", "2", "--parallel.tp", "2", "--data.max_bytes", "200000", "--train.steps", str(STEPS),
       "--checkpoint.interval", "4"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def cable() -> Iterator[None]:
    """Two hosts and what joins them."""
    made: list[str] = []
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            made.append(host)
        ip("link", "add", "cable", "netns", HOSTS[0], "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in made:
            ip("netns", "delete", host)


class Both:
    """One run over both nodes."""

    def __init__(self, folder: Path, *more: str, steps: int = STEPS):
        self.folder, self.steps, self.nodes = folder, steps, []
        for i, host in enumerate(HOSTS):
            meets = {} if "--nodes" in more else {
                "NNODES": "2", "NODE_RANK": str(i), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
            output = folder.parent / f"{folder.name}.{i}.{time.time_ns()}"
            words = ["ip", "netns", "exec", host, *recipe(*RUN, "--train.log_dir", folder, *more)]
            self.nodes.append(Job(output, *words, **meets))

    def reaches(self, step: int) -> None:
        try:
            self.nodes[0].until(lambda: any(f" {step}/{self.steps} " in said for said in self.said()), 240)
        except AssertionError:
            self.end()
            raise

    def wait(self, limit: float) -> list[int]:
        """Exit codes of both nodes."""
        until = time.monotonic() + limit
        try:
            return [node.process.wait(max(0.1, until - time.monotonic())) for node in self.nodes]
        finally:
            self.end()

    def end(self) -> None:
        for node in self.nodes:
            node.end()

    def said(self) -> list[str]:
        return [node.said() for node in self.nodes]

    def losses(self) -> list[float]:
        return [*losses(self.folder).values()]


def kill(job: Both) -> None:
    job.nodes[1].ranks()["3"].kill()


def slow_down() -> None:
    """8 Mbit/s from the first machine, and up to 50 ms in the queue; few kernels have netem, which could delay as well."""
    ip(*CABLE, "add", "dev", "cable", "root", "tbf", "rate", "8mbit", "burst", "32kbit", "latency", "50ms")


def cut(job: Both) -> None:
    ip("-n", HOSTS[0], "link", "set", "cable", "down")


def whole(folder: Path) -> list[float]:
    """A run that nobody disturbs."""
    job = Both(folder / "whole")
    codes = job.wait(400)
    assert codes == [0, 0], job.said()
    assert len(job.losses()) == STEPS
    return job.losses()


def check_run(folder: Path, want: list[float]) -> str:
    Job(folder / "one.out", *recipe(4, *RUN[1:], "--train.log_dir", folder / "one")).ended()
    off = max(abs(a / b - 1) for a, b in zip(losses(folder / "one").values(), want, strict=True))
    assert off <= 1e-5, off
    return f"losses of one machine (`shm`) within {off:.1e}"


def disturbed(fault: Callable[[Both], None]) -> Callable[[Path, list[float]], str]:
    def check(folder: Path, want: list[float]) -> str:
        job = Both(folder / fault.__name__)
        job.reaches(AT)
        fault(job)
        since = time.monotonic()
        codes = job.wait(LIMIT)
        took = time.monotonic() - since
        assert 0 not in codes, (codes, job.said())
        for node, said in enumerate(job.said()):
            reasons = "failed first:\nTraceback", "rank 3 was ended by SIGKILL", "MindSpore's scheduler, which ends all when"
            assert any(reason in said for reason in reasons), f"node {node} does not say why:\n{said[-3000:]}"
        ip("-n", HOSTS[0], "link", "set", "cable", "up")
        again = Both(folder / fault.__name__, "--checkpoint.resume", "latest")
        assert again.wait(400) == [0, 0], again.said()
        assert again.losses() == want, (again.losses(), want)
        return f"both nodes ended and said why after {took:.0f} s; resumed, {STEPS} losses bit-equal"
    return check


def check_slow(folder: Path, want: list[float]) -> str:
    slow_down()
    job = Both(folder / "slow")
    since = time.monotonic()
    codes = job.wait(600)
    took = time.monotonic() - since
    ip(*CABLE, "del", "dev", "cable", "root")
    assert codes == [0, 0] and job.losses() == want, job.said()
    return f"8 Mbit/s on the cable, {took:.0f} s: the same losses, bit for bit"


def switch_off(job: Both) -> int:
    """All processes of the first machine; which one is left."""
    for pid in map(int, subprocess.run(["ip", "netns", "pids", HOSTS[0]], capture_output=True, text=True,
                                       check=True).stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 1


def unplug(job: Both) -> int:
    """Which one goes on is theirs to find: the first in the order of their names."""
    cut(job)
    return -1


def on_their_own(fault: Callable[[Both], int]) -> Callable[[Path, list[float]], str]:
    """With `--nodes`: nobody starts them again."""
    def check(folder: Path, want: list[float]) -> str:
        how = ["--train.steps", str(LONGER), "--checkpoint.keep_last", "1000"]
        slow_down()
        job = Both(folder / fault.__name__, *how, "--nodes", "1:2", "--nodes_timeout", "60", "--master_addr", ADDRESSES[0],
                  steps=LONGER)
        job.reaches(AT)
        assert not any("gone" in said or "cut off" in said for said in job.said()), "a slow machine is not a lost one"
        left, since = fault(job), time.monotonic()
        while not any("machine 0 of 1, start 2" in said for said in job.said()):
            assert time.monotonic() - since < LIMIT, job.said()
            time.sleep(0.2)
        took = time.monotonic() - since
        codes = job.wait(400)
        ip("-n", HOSTS[0], "link", "set", "cable", "up")
        ip(*CABLE, "del", "dev", "cable", "root")
        said = job.said()
        if left < 0:
            assert codes == [0, 0] and all("is cut off: it gives signs" in one for one in said), (codes, said)
            assert sum("the others have ended the run" in one for one in said) == 1, said
        else:
            assert codes[left] == 0 and f"at {ADDRESSES[1 - left]} is gone: it gave no sign" in said[left], (codes, said)
        begin = int("".join(said).rpartition("going on after step ")[2].split()[0])
        by_hand = folder / f"{fault.__name__}_by_hand"
        words = [*RUN, *how, "--parallel.dp", "1", "--checkpoint.interval", "0", "--train.log_dir", by_hand,
                 "--checkpoint.resume", job.folder / f"checkpoints/step-{begin:08d}"]
        Job(folder / f"{fault.__name__}.out", *recipe(*words)).ended()
        alone = [*losses(by_hand).values()]
        assert len(alone) == LONGER - begin and job.losses()[begin:] == alone, (job.losses(), alone)
        return (f"a cable of 8 Mbit/s; the other machine was named and the rest went on after {took:.0f} s; "
                f"{len(alone)} losses bit-equal to one machine's from step {begin}")
    return check


CHECKS = {"run": check_run, "kill": disturbed(kill), "cut": disturbed(cut), "slow": check_slow,
          "off": on_their_own(switch_off), "unplugged": on_their_own(unplug)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, []], help="default: all")
    chosen = parser.parse_args().checks or list(CHECKS)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as keep:
        try:
            keep.enter_context(cable())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"left out: no network namespaces here ({error})")
            return 0
        want, wrong = whole(Path(folder)), 0
        for name in chosen:
            try:
                print(f"{name}: {CHECKS[name](Path(folder), want)}", flush=True)
            except Exception as error:  # the others are tried all the same
                wrong += 1
                print(f"{name}: WRONG: {type(error).__name__}: {error}", flush=True)
        return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
