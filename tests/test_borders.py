# SPDX-License-Identifier: Apache-2.0
"""Plain MindSpore is what it was: the calls of `borders.py`, and the edges in one process."""
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import Shard, distribute_tensor, init_device_mesh
from ms_dtensor.errors import MixedOperandError
from tests.borders import CALLS, EAGER_ONLY, compare
from tests.msrun import PATIENCE, ROOT
from tests.tiers import at_night

pytestmark = pytest.mark.usefixtures("cpu")
@pytest.fixture
def x():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    return distribute_tensor(Tensor(np.arange(6, dtype=np.float32).reshape(3, 2)), mesh, [Shard(0)])


@pytest.mark.parametrize("jitted", [False, True])
def test_plain_calls_are_byte_equal(jitted):
    wrong, refused = compare([*(CALLS if at_night() else CALLS[::7]), *([] if jitted else EAGER_ONLY)], jitted)
    assert not wrong, "\n".join(wrong)
    assert refused < (20 if at_night() else 8)
    assert len(CALLS) + len(EAGER_ONLY) > 300


@ms.jit
def _compiled(t):
    return ops.less(t, 1).astype(ms.float32) + mint.mul(t, t) + (t < 3)


def test_compiled_functions_on_plain_tensors_and_in_local_map(x):
    want = (np.arange(6).reshape(3, 2) < 1) + np.arange(6).reshape(3, 2) ** 2 + (np.arange(6).reshape(3, 2) < 3)
    np.testing.assert_array_equal(_compiled(x.to_local()).asnumpy(), want)
    np.testing.assert_array_equal(md.local_map(_compiled, [Shard(0)])(x).to_local().asnumpy(), want)


OTHER_MODES = """
import mindspore as ms
import ms_dtensor as md
from ms_dtensor.errors import OpRuleError
mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
x = md.ones((3, 2), mesh, [md.Shard(0)])
for mode in {modes}:
    def twice(t):
        return t * 2
    def captured(t):
        return x * 2
    twice, captured = (ms.jit(f, capture_mode=mode) for f in (twice, captured))
    for turn in range(2):
        for call in (lambda: twice(x), lambda: captured(x.to_local())):
            try:
                call()
            except OpRuleError as e:
                print(mode, turn, e.attempt, flush=True)
"""


def test_other_capture_modes_refuse_too(tmp_path):
    """In a process of their own: they leave MindSpore's interpreter state as it should not be left."""
    script = tmp_path / "modes.py"
    modes = ("trace", "bytecode") if sys.version_info < (3, 12) else ("trace",)  # MindSpore 2.10 has no bytecode mode there
    script.write_text(OTHER_MODES.replace("{modes}", repr(modes)))
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout
    argument = "For 'ms.jit', an argument is a DTensor."
    capture = {"trace": "For 'ms.jit', a result is a DTensor.",
               "bytecode": "For 'ms.jit', what the function captures is a DTensor."}
    wanted = [f"{mode} {turn} {text}" for mode in modes for turn in range(2) for text in (argument, capture[mode])]
    assert told.splitlines() == wanted, told


def test_an_array_that_meets_a_dtensor_is_named(x):
    array = np.ones((3, 2), np.float32)
    for mixing in (lambda: array + x, lambda: x + array):
        with pytest.raises(MixedOperandError, match="For 'add', a numpy.ndarray meets a DTensor") as error:
            mixing()
        assert "distribute_tensor" in str(error.value)
