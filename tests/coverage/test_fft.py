# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms on DTensors equal NumPy's, call after call; a dim that is cut is refused alike on every rank."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, comm
from ms_dtensor.comm import fake_world
from ms_dtensor.errors import OpRuleError

RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(4, 6))
COMPLEX = REAL + 1j * RNG.normal(size=(4, 6))
LINES = {"fft": COMPLEX, "ifft": COMPLEX, "rfft": REAL, "irfft": COMPLEX, "hfft": COMPLEX, "ihfft": REAL,
         "fft2": COMPLEX, "ifft2": COMPLEX, "rfft2": REAL, "irfft2": COMPLEX, "fftn": COMPLEX, "rfftn": REAL,
         "irfftn": COMPLEX}


@pytest.mark.parametrize("norm", (None, "backward", "ortho", "forward"))
@pytest.mark.parametrize("name", LINES)
def test_equal_numpys(name, norm):
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))
        x = md.distribute_tensor(Tensor(LINES[name]), mesh, [Shard(0)])
        for _ in range(3):  # a kernel of MindSpore's alternates between two answers
            got = getattr(ops, name)(x, norm=norm)
            assert np.allclose(got.to_local().asnumpy(), getattr(np.fft, name)(LINES[name], norm=norm))


@pytest.mark.parametrize("name", LINES)
def test_gradients_are_slopes(name):
    weight = RNG.normal(size=getattr(np.fft, name)(LINES[name]).shape)

    def loss(z):
        return float((getattr(np.fft, name)(z).real * weight).sum())
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))
        x, w = (md.distribute_tensor(Tensor(v), mesh, [Shard(0)]) for v in (LINES[name], weight))

        def ours(x):  # of a real result `ops.real` has a wrong gradient in plain MindSpore 2.10
            out = getattr(ops, name)(x)
            return ((ops.real(out) if "Complex" in str(out.dtype) else out) * w).sum()
        found = md.grad(ours)(x).to_local().asnumpy()
    for at in ((0, 0), (1, 2), (3, 1)):
        step = np.zeros((4, 6))
        step[at] = 1e-6
        slope = (loss(LINES[name] + step) - loss(LINES[name] - step)) / 2e-6
        assert np.isclose(found[at].real, slope, atol=1e-5), (at, found[at], slope)


def test_lines_that_are_whole_move_nothing():
    with fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,))
        x = md.distribute_tensor(Tensor(REAL.astype(np.float32)), mesh, [Shard(0)])
        with comm.record() as events:
            out = ops.irfft(ops.rfft(x, dim=-1), n=6)
            md.grad(lambda x: ops.irfft(ops.rfft(x), n=6).sum())(x)
        assert out.placements == (Shard(0),) and out.shape == (4, 6) and not events
        assert np.allclose(out.to_local().asnumpy(), REAL[:2], atol=1e-5)


@pytest.mark.parametrize("call", (
    ops.fft, lambda x: ops.rfft(x, 4, 1), lambda x: ops.irfft(x, n=4), ops.hfft, ops.fft2,
    lambda x: ops.rfftn(x, dim=(1,)), ops.fftshift, lambda x: ops.ifftshift(x, 1)))
def test_a_cut_dim_is_refused(call):
    told = set()
    for rank in (0, 7):  # the last one's shard is empty
        with fake_world(8, rank):
            mesh = md.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
            x = md.distribute_tensor(Tensor(REAL.astype(np.float32)), mesh, [Shard(1)])
            with comm.record() as events, pytest.raises(OpRuleError) as refused:
                call(x)
            assert not events
            told.add(str(refused.value))
    text, = told
    assert "dim 1 is worked on, and it is cut" in text and "6@tp" in text and "redistribute" in text


def test_what_is_cut_on_an_axis_of_one_is_whole():
    with fake_world(2):
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
        x = md.distribute_tensor(Tensor(REAL), mesh, [Shard(1), Replicate()])
        assert np.allclose(ops.rfft(x).to_local().asnumpy(), np.fft.rfft(REAL)) and ops.rfft(x).dtype == ms.complex128
