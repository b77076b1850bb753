# SPDX-License-Identifier: Apache-2.0
"""Runs a named scenario of `scenarios.py` in N forked processes on the shared-memory engine, without MindSpore.

`python worker.py SCENARIO N [args...]` prints one JSON line per rank: {"rank", "pid", "ok" or "error", ...}.
Without arguments it does so for each line that it reads, {"args", "timeout", "out"}, in a fork of its own that writes to the
file `out`, and says when that is done: a test of the engine takes as long to import NumPy as to run.
"""
import importlib
import json
import os
import pathlib
import sys
import traceback
import types

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

if "ms_dtensor" not in sys.modules:  # the engine alone: the package's own __init__ may import MindSpore
    package = types.ModuleType("ms_dtensor")
    package.__path__ = [str(ROOT / "ms_dtensor")]
    sys.modules["ms_dtensor"] = package
sys.path.insert(0, str(HERE))

scenarios = importlib.import_module("scenarios")
engine = importlib.import_module("ms_dtensor.comm.shm.rows")


def serve() -> int:
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ["TEST_TIMEOUT"] = asked["timeout"]
            out = os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(out, stream)
            os._exit(run(*asked["args"]))
        os.waitpid(pid, 0)
        print("done", flush=True)
    return 0


def run(scenario: str, ranks: str, *args: str) -> int:
    size = int(ranks)
    name = f"ms_dtensor-test-{os.getpid()}"
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            line = {"rank": rank, "pid": os.getpid(), "name": name}
            code = 1
            e = None
            try:
                timeout = float(os.environ.get("TEST_TIMEOUT", "20"))
                e = engine.RowsEngine(rank, size, name, timeout=timeout, start_timeout=20)
                result = getattr(scenarios, scenario)(e, rank, size, *args)
                line["ok"] = result
                e.close()
                code = 0
            except BaseException as error:
                line["error"] = type(error).__name__
                line["text"] = str(error)
                line["trace"] = traceback.format_exc()
                if e is not None:  # as `world` does at exit
                    e.close(f"{type(error).__name__}: {error}")
            os.write(1, (json.dumps(line) + "\n").encode())
            os._exit(code)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    assert "mindspore" not in sys.modules
    sys.exit(run(*sys.argv[1:]) if sys.argv[1:] else serve())
