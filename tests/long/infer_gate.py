# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own inference of shapes and dtypes against every rule and CPU form; prints JSON, fails on a mismatch.

    python -m tests.long.infer_gate                    every primitive of corpus and Llama, up to four calls a family
    python -m tests.long.infer_gate attention norm     only ms_dtensor/tools/forms/forms_attention.py and forms_norm.py

No kernel is run for the questions, so they hold for the primitives that only Ascend has. See `tests/coverage/infer.py`.
"""
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.msrun import python

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Command line; returns the exit code."""
    if sys.argv[1:2] == ["--of"]:
        print(json.dumps(asked(sys.argv[2])))
        return 0
    started, agree, wrong, unasked = time.time(), Counter(), [], {}
    known = [p.stem.removeprefix("forms_") for p in sorted((ROOT / "ms_dtensor" / "tools" / "forms").glob("forms_*.py"))]
    with ThreadPoolExecutor(2) as pool:  # a process each, as MindSpore keeps what it compiled
        for answer in pool.map(in_process, sys.argv[1:] or ["the llama", *known]):
            agree.update(answer["agree"])
            wrong += answer["wrong"]
            unasked |= answer["unasked"]
    print(json.dumps({"primitives": len(agree), "calls": sum(agree.values()), "mismatches": wrong,
                      "not_asked": {name: why for name, why in sorted(unasked.items()) if name not in agree},
                      "seconds": round(time.time() - started, 1)}, indent=1))
    return 1 if wrong or not agree else 0


def in_process(family: str) -> dict:
    """One family's answers, from a process of its own."""
    done = python("-m", "tests.long.infer_gate", "--of", family, check=True,
                  env={**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "4"})
    return json.loads(done.stdout.splitlines()[-1])


def asked(family: str) -> dict:
    """One family's answers, in this process."""
    import mindspore as ms
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    from tests.coverage.infer import Gate, ask, calls_of_corpus, calls_of_llama

    gate = Gate()
    calls = calls_of_llama() if family == "the llama" else calls_of_corpus((family,), limit=4)
    with tempfile.TemporaryDirectory() as folder:
        ask(calls, gate, 3, folder)
    return {"agree": gate.agree, "wrong": gate.wrong, "unasked": gate.unasked}


if __name__ == "__main__":
    sys.exit(main())
