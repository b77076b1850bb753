# SPDX-License-Identifier: Apache-2.0
"""How the machines of a run find each other, again and again: launch.py's `--nodes MIN:MAX` meets here before each start.

Each launcher writes one file in a folder that all machines see (the checkpoints are there, too), twice a second, with a
number that grows; who has not grown for LOST seconds is gone, by the reader's own clock, so clocks need not agree. It also
tries the others' addresses: whose network is cut is gone, though its files go on. Who starts is written once, as
`round-00000003.json`, by a hard link that one writer alone can make; the first machine of it has the scheduler. So no
machine has to outlive the others. Not here: ranks, configurations. No import of MindSpore.
"""
from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ms_dtensor.core.files import make_folder, own_file
from ms_dtensor.errors import CommError, ConfigError
from ms_dtensor.tools.ranks import free_port

from .nodes import Nodes

LOST = 20.0  # seconds without a sign, or without a way there, after which a machine is gone
FRESH = 6.0  # seconds for which a way to a machine counts when a round is made; less than LOST, so that all agree
BEAT = 0.5
SIZE = 1 << 13  # bytes of a machine's file, at least: written at once and in place, so that a network's file system shows it
WORDS = 2000  # characters of a reason
AT_WORK = "another run is at work in the folder"


@dataclass(frozen=True, slots=True)
class Sign:
    """What a machine's file says.

    Attributes:
        name: of the launcher: host and process, and when it began.
        address, port: where it can be tried.
        command: a sum of the configuration; all machines are to have the same.
        state: "wants" to start the round, "runs" it, is "leaving" it because somebody asks, "failed" in it, was "done" with
            it, or has "left" for good.
        round: which.
        beat: grows.
        why: of a failure.
        reaches: names of the others that it has reached.
    """

    name: str
    address: str
    port: int
    command: str
    state: str = "wants"
    round: int = 0
    beat: int = 0
    why: str = ""
    reaches: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    sign: Sign
    since: float
    alive: float = 0.0  # when the number grew; 0: never yet, so it may be a file that a dead launcher left
    reached: float = 0.0
    trying: bool = False


@dataclass
class Meeting:
    """One launcher's part.

    Args:
        folder: that all machines see; made if it is not there.
        address: of this machine, for the others.
        command: see `Sign`.
        counts: of how many machines a run can be, ascending.
        patience: seconds until too few machines are an error; a tenth of it is waited for more than are needed.
    """

    folder: Path
    address: str
    command: str
    counts: Sequence[int]
    patience: float
    name: str = field(default_factory=lambda: f"{time.time_ns():020d}-{socket.gethostname()}-{os.getpid()}")

    def __post_init__(self):
        make_folder(self.folder)
        self._lock = threading.RLock()  # a signal's handler says something, too
        self._others: dict[str, _Seen] = {}
        self._ended = threading.Event()
        self._done = 0  # the last round that this machine has been in
        self._begun, self._size = 0.0, SIZE  # when that began; how long the file is
        self._listener = socket.create_server((self.address, 0), backlog=64)
        self._sign = Sign(self.name, self.address, self._listener.getsockname()[1], self.command)
        threading.Thread(target=self._answer, name="meeting-answers", daemon=True).start()
        self._file = os.open(self.folder / f"{self.name}.sign", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o644)
        self._beat()
        self._look()
        threading.Thread(target=self._go_on, name="meeting-signs", daemon=True).start()

    # -- what goes on beside ---------------------------------------------------------------------------------------------
    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._listener.accept()[0].close()

    def _go_on(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):  # of a folder that is away for a moment: others see no sign then
                self._beat()
                self._look()

    def _beat(self) -> None:
        with self._lock:
            now = time.monotonic()
            reaches = tuple(n for n, o in self._others.items() if o.reached and now - o.reached < FRESH)
            self._sign = replace(self._sign, beat=self._sign.beat + 1, reaches=reaches)
            text = json.dumps(asdict(self._sign)).encode()
            self._size = max(self._size, len(text))
        os.pwrite(self._file, text.ljust(self._size), 0)

    def _look(self) -> None:
        for path in self.folder.glob("*.sign"):
            try:
                sign = Sign(**json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError):  # half written, or gone
                continue
            if sign.name != path.stem or sign.name == self.name:
                continue
            with self._lock:
                seen = self._others.get(sign.name)
                if seen is None:
                    self._others[sign.name] = _Seen(sign, time.monotonic())
                    continue
                if sign.beat != seen.sign.beat:
                    seen.alive = time.monotonic()
                seen.sign = sign
                try_it = seen.alive and not seen.trying
                seen.trying = bool(seen.trying or try_it)
            if try_it:
                threading.Thread(target=self._try, args=(seen,), daemon=True).start()

    def _try(self, seen: _Seen) -> None:
        try:
            socket.create_connection((seen.sign.address, seen.sign.port), timeout=LOST / 4,
                                     source_address=(self.address, 0)).close()
            seen.reached = time.monotonic()
        except OSError:
            pass
        finally:
            seen.trying = False

    # -- what a launcher asks --------------------------------------------------------------------------------------------
    def say(self, state: str, number: int | None = None, why: str | None = None) -> None:
        """Tells the others."""
        with self._lock:
            self._sign = replace(self._sign, state=state, round=self._sign.round if number is None else number,
                                 why=self._sign.why if why is None else why[:WORDS])
        self._beat()

    def leave(self, state: str) -> None:
        """The last word of this launcher."""
        with contextlib.suppress(OSError):
            self.say(state)
        self._ended.set()  # the file stays open while a thread may write it
        self._listener.close()

    def meet(self) -> tuple[int, Nodes] | None:
        """Waits until a round begins that this machine is in; its number, and the machines. None: the run is done.

        Raises:
            CommError: too few machines came in time.
            ConfigError: a run of another command is at work in the folder, or wants to start there, too.
        """
        since = changed = time.monotonic()
        before: tuple[str, ...] = ()
        while True:
            number, members = self._latest()
            if number > self._done and self.name in [m["name"] for m in members]:
                self._done, self._begun, first = number, time.monotonic(), members[0]
                self.say("runs", number, "")
                if len(members) == 1:  # an address of a network that is down is none
                    return number, Nodes()
                return number, Nodes(len(members), [m["name"] for m in members].index(self.name), first["address"],
                                     first["port"])
            now, running = time.monotonic(), self._running(number, members)
            if any(m.get("command", self.command) != self.command for m in members) and running:
                raise self._another(members[0]["name"], AT_WORK)
            self.say("wants", number + 1)
            if running:
                since = changed = now  # a machine that comes back waits for the next start
            elif self._has_ended(number, members):
                return None
            here = self._who_would_start(number + 1)
            if here != before:
                before, changed = here, now
            fits = [n for n in self.counts if n <= len(here)]
            if fits and here[0] == self.name and not running and self._knows_all() and (
                    fits[-1] == self.counts[-1] or now - changed > self.patience / 10):
                self._write(number + 1, here[:fits[-1]])
                continue
            if now - since > self.patience:
                raise self._too_few(here)
            time.sleep(BEAT)

    def lost(self, number: int) -> str:
        """Why a round cannot go on, as far as other machines are the reason; "" while it can."""
        now, (_, members) = time.monotonic(), self._latest(number)
        with self._lock:
            for member in members:
                if member["name"] == self.name:
                    continue
                seen = self._others.get(member["name"]) or _Seen(Sign(member["name"], member["address"], 0, ""), 0.0)
                sign, who = seen.sign, f"machine {member['name']} at {member['address']}"
                if sign.state == "left":
                    return f"{who} was asked to leave"
                if sign.state == "failed" and sign.round == number:
                    return f"{who} failed: {sign.why}"
                if sign.round > number:  # this one was stopped for so long that the others took it for gone
                    return f"{who} went on to start {sign.round} without this one"
                if sign.state == "done" and sign.round == number:
                    continue
                if now - max(seen.alive, self._begun) > LOST:
                    return f"{who} is gone: it gave no sign for {LOST:.0f} s"
                if now - max(seen.reached, self._begun) > LOST:
                    return f"{who} is cut off: it gives signs, and was not reached for {LOST:.0f} s"
        return ""

    def left(self, number: int) -> bool:
        """Whether a machine of the round was asked to leave: all have ended then, and the others can go on."""
        with self._lock:
            return any(o.sign.state in ("leaving", "left") and o.sign.round == number for o in self._others.values())

    # -- rounds ----------------------------------------------------------------------------------------------------------
    def _rounds(self) -> Iterator[int]:
        for path in self.folder.glob("round-*.json"):
            yield int(path.stem.removeprefix("round-"))

    def _latest(self, number: int | None = None) -> tuple[int, list[dict]]:
        number = max(self._rounds(), default=0) if number is None else number
        if not number:
            return 0, []
        try:
            return number, json.loads((self.folder / f"round-{number:08d}.json").read_bytes())
        except (OSError, ValueError):  # a newer one took its place
            return number, []

    def _living(self) -> dict[str, Sign]:
        now = time.monotonic()
        with self._lock:
            return {name: o.sign for name, o in self._others.items()
                    if o.alive and now - o.alive < LOST and o.sign.state != "left"}

    def _running(self, number: int, members: Sequence[dict]) -> bool:
        """Whether somebody is in this round, or has not noticed yet, or has not ended its ranks yet."""
        names = {m["name"] for m in members}
        return any(n in names and s.round == number and s.state in ("wants", "runs", "leaving", "failed")
                   for n, s in self._living().items())

    def _has_ended(self, number: int, members: Sequence[dict]) -> bool:
        names = {m["name"] for m in members}
        with self._lock:
            return any(n in names and o.alive and o.sign.round == number and o.sign.state == "done"
                       and o.sign.command == self.command for n, o in self._others.items())

    def _knows_all(self) -> bool:
        """Whether each file of the folder has been watched for long enough to tell that nobody lives behind it."""
        now = time.monotonic()
        with self._lock:
            return all(o.alive or now - o.since > 4 * BEAT for o in self._others.values())

    def _who_would_start(self, number: int) -> tuple[str, ...]:
        """The most machines of those who want to start that all reach each other; of as many those who came first."""
        wants = {n: s for n, s in self._living().items() if s.state == "wants" and s.round == number}
        others = [n for n, s in wants.items() if s.command != self.command]
        if others and not self._of_its_run(number - 1):  # of the run that was here, it goes on: who came to it is refused
            theirs = any(m.get("command") == wants[others[0]].command for m in self._latest(number - 1)[1])
            raise self._another(others[0], AT_WORK if theirs else "machines were started with different commands")
        wants = {n: s for n, s in wants.items() if n not in others}
        with self._lock:
            wants[self.name] = self._sign
        best: list[str] = []
        for first in sorted(wants):
            found = [first]
            for name in sorted(wants):
                if name != first and all(name in wants[o].reaches and o in wants[name].reaches for o in found):
                    found.append(name)
            best = found if len(found) > len(best) else best
        return tuple(best)

    def _of_its_run(self, number: int) -> bool:
        """Whether this machine's run has made the latest round, and so has the folder."""
        return any(m.get("command") == self.command for m in self._latest(number)[1]) and (
            self._done == number or any(o.sign.command == self.command for o in self._others.values() if o.alive))

    def _another(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"For 'launch.py', {what}.", f"{self.name} and {name}, in {self.folder}",
                           "A folder is of one run: all its machines take the same options and configuration, and code.",
                           ["the same command on each", "another --train.log_dir for another run"])

    def _write(self, number: int, names: Sequence[str]) -> None:
        signs = {**self._living(), self.name: self._sign}
        port = free_port()
        members = [{"name": n, "address": signs[n].address, "port": port, "command": self.command} for n in names]
        own, path = self.folder / f"{self.name}.round", self.folder / f"round-{number:08d}.json"
        with open(own, "wb", opener=own_file) as file:
            file.write(json.dumps(members).encode())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # somebody was quicker: what it wrote holds
            os.link(own, path)
        own.unlink()
        for old in self._rounds():
            if old < number - 1:
                (self.folder / f"round-{old:08d}.json").unlink(missing_ok=True)
        now = time.monotonic()
        for name, seen in list(self._others.items()):
            if now - max(seen.alive, seen.since) > 2 * LOST:
                (self.folder / f"{name}.sign").unlink(missing_ok=True)

    def _too_few(self, here: Sequence[str]) -> CommError:
        with self._lock:
            gone = [f"{n}: {o.sign.state} {o.sign.why}".strip() for n, o in self._others.items() if n not in here]
        return CommError(
            f"For 'launch.py', {len(here)} machine{'s' * (len(here) != 1)} came to start, and {self.counts[0]} are needed.",
            f"here: {', '.join(here)}" + (f"; not: {'; '.join(gone)}"[:800] if gone else ""),
            f"The run can be of {', '.join(map(str, self.counts))} machines, by --nodes and by what its configuration "
            f"divides into; {self.patience:.0f} s were waited.",
            ["start launch.py on more machines: it goes on from the latest checkpoint",
             "--nodes with a smaller least number", "--nodes_timeout with more seconds"])


def address_towards(other: str) -> str:
    """Which of this machine's addresses leads to another; nothing is sent."""
    where = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(where[0], where[1]) as probe:
        probe.connect(where[4])
        return probe.getsockname()[0]
