# SPDX-License-Identifier: Apache-2.0
"""Plants a fault in a copy of the checkout and asks a test about it. The checkout itself is never written.

    python -m tests.mutants.plant [--push] [--only TEXT]

A fault is a small change of text, or a few lines that change behaviour through a public seam, put at the end of a module.
Caught is a fault whose test fails (pytest's exit code 1) where it passes without: one that stops the tests from being
collected says nothing, and is not caught. A fault whose words choose no test is an error.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ms_dtensor", "model_zoo", "scripts", "tests")


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: what it does.
        file: where.
        test: what must turn red, as pytest takes it: files; "file -k words" narrows it.
        old: text of the file that is there once; empty: `new` is put at its end.
        new: what stands there instead.
        why: of a fault that no test can see, why it does no harm.
    """

    name: str
    file: str
    test: str
    old: str
    new: str
    why: str = ""


def copied() -> Path:
    """A copy of the checkout, of nobody but the faults."""
    folder = Path(tempfile.mkdtemp(prefix="ms_dtensor_mutants_"))
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Inside, the copy has the fault."""
    path = folder / fault.file
    text = path.read_text("utf-8")
    assert text.count(fault.old) == 1 or not fault.old, f"'{fault.name}' has lost its place in {fault.file}: point it anew"
    changed = text.replace(fault.old, fault.new) if fault.old else f"{text}\n\n{fault.new}\n"
    compile(changed, fault.file, "exec")
    path.write_text(changed, "utf-8")
    try:
        yield
    finally:
        path.write_text(text, "utf-8")


def asked(tests: list[str], folder: Path) -> tuple[int, str]:
    """pytest's exit code for tests of the copy, and the end of what it said."""
    files = list(dict.fromkeys(file for t in tests for file in t.split(" -k ")[0].split()))
    words = list(dict.fromkeys(t.split(" -k ")[1] for t in tests if " -k " in t))
    chosen = ["-k", " or ".join(f"({w})" for w in words)] if words else []
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, *chosen],
                          cwd=folder, capture_output=True, text=True, timeout=900,
                          env={**os.environ, "PYTHONPATH": str(folder), "GLOG_v": "3", "PYTHONDONTWRITEBYTECODE": "1"})
    if done.returncode == 5:  # of pytest: nothing was collected
        raise ValueError(f"no test of the tier push is {' and '.join(tests)}: point the fault anew")
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def caught(fault: Fault, folder: Path) -> tuple[bool, str]:
    with planted(fault, folder):
        code, said = asked([fault.test], folder)
    return code == 1, said


def main() -> int:
    from tests.mutants.faults import FAULTS
    from tests.mutants.push_faults import PUSH_FAULTS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--push", action="store_true", help="those that the push's tests must see")
    asked_for = parser.parse_args()
    only, faults = asked_for.only, PUSH_FAULTS if asked_for.push else FAULTS
    folder, result = copied(), {"planted": 0, "caught": 0, "harmless": [], "survived": []}
    try:
        for fault in (f for f in faults if only in f.name):
            seen, said = caught(fault, folder)
            result["planted"] += 1
            result["caught"] += seen
            if not seen:
                result["harmless" if fault.why else "survived"].append(fault.name)
            print(f"{'caught' if seen else 'SURVIVED':<10}{fault.name}", file=sys.stderr, flush=True)
            if not seen and not fault.why:
                print(said[-600:], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result, indent=1))
    return 1 if result["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
