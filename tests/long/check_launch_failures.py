# SPDX-License-Identifier: Apache-2.0
"""Everything that keeps a launch from training: one clear message, a non-zero exit, within 20 seconds, each.

    python -m tests.long.check_launch_failures [--only TEXT] [--limit 20]

Starts `scripts/run_llama.sh` on two ranks of this machine, prints a table, exits non-zero if a case misses. The limit is for
a machine that does nothing else. A launch that waits for a rank that will not come takes minutes, so 60 is right for a busy
machine. What needs the right to mount a small disk is left out, and said, where there is none.
"""
import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from model_zoo.llama.token_file import write  # noqa: E402

TINY = ["2", "tiny", "--parallel.tp", "2", "--data.max_bytes", "200000", "--train.steps", "2000"]
Made = tuple[list[str], dict[str, str]]  # arguments and environment


@contextlib.contextmanager
def arguments(*words: str, **env: str) -> Iterator[Made]:
    yield [*words], env


@contextlib.contextmanager
def taken_port() -> Iterator[Made]:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield ["--master_port", str(holder.getsockname()[1])], {}


@contextlib.contextmanager
def small_disk(fill_when: str = "") -> Iterator[Made]:
    """A disk of 1 MiB that is full, at once or as soon as the run has written a file of this name."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
        if done.returncode:
            raise PermissionError("no right to mount a disk")
        ended = threading.Event()

        def fill() -> None:
            while fill_when and not list(Path(folder).glob(f"**/{fill_when}")):
                if ended.wait(0.2):
                    return
            with contextlib.suppress(OSError), open(f"{folder}/filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        filler = threading.Thread(target=fill)
        filler.start()
        if not fill_when:
            filler.join()
        try:
            yield ["--train.log_dir", f"{folder}/run"], {}
        finally:
            ended.set()
            filler.join()
            subprocess.run(["umount", "-l", folder], check=False)


@contextlib.contextmanager
def file_in_the_way() -> Iterator[Made]:
    with tempfile.NamedTemporaryFile() as file:
        yield ["--train.log_dir", f"{file.name}/run"], {}


@contextlib.contextmanager
def tokens(broken: int) -> Iterator[Made]:
    """Token files, in one of which a byte is another."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train", "held_out"):
            with open(f"{folder}/{name}.tokens", "w+b") as file:
                write(file, "<u2", 256, 0, 4000, iter([np.arange(4000, dtype=np.uint16) % 251]))
                file.seek(broken)
                byte = file.read(1)
                file.seek(broken)
                file.write(bytes([byte[0] ^ 1]))
        yield ["--data.path", folder], {}


# what is wrong -> (how it is made, words that the message has)
CASES: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Made]], str]] = {
    "a key that is none": (lambda: arguments("--train.stesp", "3"), "'train.steps' is the closest match"),
    "a value of another type": (lambda: arguments("--optim.lr", "fast"), "optim.lr cannot be 'fast'"),
    "a file that is not there": (lambda: arguments("--config", "nowhere.yaml"), "there is no file 'nowhere.yaml'"),
    "degrees for another world": (lambda: arguments("--parallel.dp", "4"), "world size = 2"),
    "missing data": (lambda: arguments("--data.path", "/no/such/file"), "/no/such/file"),
    "a token file whose header is damaged": (lambda: tokens(20), "its header is damaged"),
    "a token file with a damaged token": (lambda: tokens(4001), "tokens 0 to 1048576 are damaged"),
    "an unknown tracker": (lambda: arguments("--metrics.trackers", "mlflow"), "'tensorboard', 'wandb', 'swanlab'"),
    "a tracker that is not installed": (lambda: arguments("--metrics.trackers", "[swanlab]"), "'swanlab' is not installed"),
    "a port in use": (taken_port, "is in use"),
    "a node that is none": (lambda: arguments(NNODES="2", NODE_RANK="2", MASTER_PORT="29500"), "NODE_RANK = 2"),
    "a log folder that cannot be": (file_in_the_way, "cannot be written"),
    "a log folder of the system": (lambda: arguments("--train.log_dir", "/proc/run"), "cannot be written"),
    "a full disk": (small_disk, "No space left on device"),
    "a disk that fills up in the run": (lambda: small_disk("metrics.jsonl"), "No space left on device"),
    "a run that diverges": (lambda: arguments("--optim.lr", "1000", "--optim.clip_norm", "0", "--optim.warmup", "0"),
                            "the guard ends the run"),
}


def attempt(made: Made, log_dir: str, limit: float) -> tuple[int, float, str]:
    """Exit code, seconds and all that was printed."""
    words, env = made
    command = ["bash", str(ROOT / "scripts/run_llama.sh"), *TINY, "--train.log_dir", log_dir, *words]
    started = time.monotonic()
    with subprocess.Popen(command, env={**os.environ, "PYTHON": sys.executable, **env}, cwd=log_dir, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        try:
            out, _ = run.communicate(timeout=3 * limit)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGTERM)
            time.sleep(3)
            run.send_signal(signal.SIGTERM)
            out, _ = run.communicate()
    return run.returncode, time.monotonic() - started, out


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--limit", type=float, default=20, help="seconds from the command to its end")
    options = parser.parse_args()
    missed = 0
    print(f"{'':7} {'what is wrong':37} {'exit':>4} {'s':>5}  first line of the message")
    for name, (make, said) in CASES.items():
        if options.only not in name:
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="ms_dtensor_launch_") as folder, make() as made:
                code, seconds, out = attempt(made, folder, options.limit)
        except PermissionError as error:
            print(f"{'left out':8}{name:37} {error}")
            continue
        lines = out.splitlines()
        first = next((line for line in lines if "launch.py:" in line), lines[-1] if lines else "")
        ok = code not in (0, -signal.SIGTERM) and seconds < options.limit and said in out and out.count(said) == 1
        missed += not ok
        shown = first.removeprefix("launch.py: ")[:110]
        print(f"{'ok' if ok else 'MISSED':7} {name:37} {code:4} {seconds:5.1f}  {shown}", flush=True)
        if not ok:
            print("\n".join(f"        | {line}" for line in lines[-25:]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
