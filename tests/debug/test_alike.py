# SPDX-License-Identifier: Apache-2.0
"""The verifier's question whether all ranks get the same kind of thing."""
import subprocess
import sys

import numpy as np
import pytest
from mindspore import Tensor, mint

from ms_dtensor.debug.verify.alike import check_alike
from ms_dtensor.ops.local import run
from tests.msrun import PATIENCE

pytestmark = pytest.mark.usefixtures("cpu")
X = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))

FRESH = """
import mindspore as ms, numpy as np
from mindspore import mint
ms.runtime.launch_blocking()
from ms_dtensor.debug.verify import check_rule
report = check_rule(mint.matmul, np.ones((4, 6), np.float32), np.ones((6, 3), np.float32), axes=((2,),))
assert report.compared and not report.wrong, report.wrong[:1]
print("fine")
"""


def test_a_process_that_imports_nothing_else():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-1500:]


def test_it_tells_a_tensor_from_a_tuple_of_one(monkeypatch):
    def split(x):
        return mint.split(x, 3, 1)
    assert check_alike(split, (X,), {}) == []
    real = run.on_stand_ins
    monkeypatch.setattr(run, "on_stand_ins", lambda *args: real(*args)[0])
    wrong = check_alike(split, (X,), {})
    assert wrong and "tuple(" in wrong[0]
