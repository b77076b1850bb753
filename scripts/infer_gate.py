# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own inference of shapes and dtypes against every rule and CPU form; prints JSON, fails on a mismatch.

    python scripts/infer_gate.py                    every primitive of the corpus and of the Llama, up to four calls each
    python scripts/infer_gate.py attention norm     only tests/coverage/forms_attention.py and forms_norm.py

No kernel is run for the questions, so they hold for the primitives that only Ascend has. See `tests/coverage/infer.py`.
"""
from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    """Command line; returns the exit code."""
    import mindspore as ms
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    from tests.coverage.infer import Gate, ask, calls_of_corpus, calls_of_llama

    started, gate, families = time.time(), Gate(), sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        ask(calls_of_corpus(families, limit=4), gate, 3, folder)
        if not families:
            ask(calls_of_llama(), gate, 4, folder)
    unasked = {name: why for name, why in gate.unasked.items() if name not in gate.agree}
    print(json.dumps({"primitives": len(gate.agree), "calls": sum(gate.agree.values()), "mismatches": gate.wrong,
                      "not_asked": unasked, "seconds": round(time.time() - started, 1)}, indent=1))
    return 1 if gate.wrong or not gate.agree else 0


if __name__ == "__main__":
    sys.exit(main())
