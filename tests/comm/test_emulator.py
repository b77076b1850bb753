# SPDX-License-Identifier: Apache-2.0
"""The emulator refuses: who touches what is on its way, options that HCCL has not, communicators beyond the device's memory.

One process, a fake world of two; `tests/comm/cases_rehearsal.py` has the same on real ranks.
"""
from contextlib import nullcontext

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from ms_dtensor import comm, init_device_mesh
from ms_dtensor.comm import hccl
from ms_dtensor.comm.hccl import HcclBackend
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.names import GroupOptions, NoFallbackGuard
from tests.rehearsal.emulator import Refused, emulated, in_place_of_mindspore, memory
from tests.rehearsal.session import rehearsed

FLOATS = (ms.float32, ms.float16, ms.bfloat16)


@pytest.fixture
def group():
    with comm.fake_world(2), rehearsed(clock=False) as device:
        made = init_device_mesh("npu", (2,)).get_group(0)
        made.device = device
        yield made
        device.flying.clear()  # what a test left on its way


def sent(group, dtype=ms.float32):
    x = Tensor(np.array([[1, 2, 3], [4, 5, 7]]), dtype)
    return x, group.all_reduce_(x)


WRITES = {"mul_": lambda x: x.mul_(2), "add_": lambda x: x.add_(1), "div_": lambda x: x.div_(2),
          "zero_": lambda x: x.zero_(), "fill": lambda x: x.fill_(0),
          "copy_": lambda x: x.copy_(Tensor(np.ones((2, 3)), x.dtype)),
          "setitem": lambda x: x.__setitem__(0, 1), "assign": lambda x: x.assign_value(Tensor(np.ones((2, 3)), x.dtype)),
          "view": lambda x: mint.narrow(x, 1, 1, 2).mul_(2)}
READS = {"plus": lambda x: x + 1, "compared": lambda x: x > 0, "number": lambda x: float(x[0, 0]),
         "asnumpy": lambda x: x.asnumpy(),
         "product": lambda x: mint.matmul(x, x), "function": lambda x: mint.tanh(x), "classic": lambda x: ops.abs(x),
         "cast": lambda x: x.astype(ms.float64), "copy": lambda x: mint.narrow(x, 1, 0, 2).contiguous(),
         "in a list": lambda x: mint.cat([Tensor(np.ones((2, 3)), x.dtype), x]), "reduced": lambda x: x.sum(),
         "by keyword": lambda x: mint.add(input=Tensor(1.0), other=x)}


def passed(x) -> set[str]:
    """What may be done with `x`, within a guard or without."""
    out = set()
    for name, touch in (WRITES | READS).items():
        for guard in (nullcontext, NoFallbackGuard):
            try:
                with guard():
                    touch(x)
                out.add(name)
            except Refused as refused:
                assert "touches the result of all_reduce" in str(refused)
    return out


@pytest.mark.parametrize("dtype", [*FLOATS, ms.int32], ids=str)
def test_whoever_touches_a_result_on_its_way_is_refused(group, dtype):
    """In place, NaN * 2 is NaN and NaN + 1, too: `mul_` on floats used to pass, and the numbers came out right."""
    x, work = sent(group, dtype)
    assert passed(x) == set()
    work.wait()
    assert (x * 1).astype(ms.float32).asnumpy().tolist() == [[1, 2, 3], [4, 5, 7]], "a fake world adds nothing up"


@pytest.mark.parametrize("dtype", [*FLOATS, ms.float64, ms.int32], ids=str)
@pytest.mark.parametrize("change", [lambda a: a * a.dtype.type(2), lambda a: a + a.dtype.type(1), abs, lambda a: -a])
def test_what_nobody_tells_of_shows_in_the_bytes(group, dtype, change):
    """Written past Python's ops, as autograd's accumulation would: a signalling NaN does not survive arithmetic."""
    x = Tensor(np.array([1, 2, 3]), dtype)
    work = group.all_gather(x, 0, [3, 3], async_op=True)
    got = memory(work.pending_result)
    with np.errstate(all="ignore"):
        got[...] = change(got)
    with pytest.raises(Refused, match="writes what was written before the wait"):
        work.wait()


def test_views_and_what_is_already_there_may_be_taken(group):
    x, work = sent(group)
    views = (x.narrow(1, 0, 2), x.reshape(6), x.astype(ms.float32), x.contiguous(), mint.permute(x, (1, 0)))
    assert x.shape == (2, 3) and x.numel() == 6 and len(views) == 5
    work.wait()
    assert (views[0].asnumpy() == x.asnumpy()[:, :2]).all()


def test_what_a_collective_reads_may_be_read_but_not_written(group):
    x = Tensor(np.array([1.0, 2.0, 3.0], np.float32))
    work = group.all_gather(x, 0, [3, 3], async_op=True)
    assert (x * 2).asnumpy().tolist() == [2, 4, 6]
    with pytest.raises(Refused, match="changed before the wait"):
        x.mul_(2.0)
    work.wait()


def test_another_communicator_neither_reads_nor_writes_what_is_on_its_way(group):
    device = group.device
    device.create_group("other", [0, 1], None)
    x, work = sent(group)
    with pytest.raises(Refused, match="reads the result of all_reduce on .* which nobody has waited for"):
        device.all_reduce(x, group="other")
    work.wait()
    y = Tensor(np.ones(3, np.float32))
    work = group.all_gather(y, 0, [3, 3], async_op=True)
    with pytest.raises(Refused, match="reads or writes"):
        device.all_reduce(y, group="other")
    work.wait()
    first = device.all_reduce(y, group="other", async_op=True)
    device.all_reduce(y, group="other", async_op=True).wait()  # one communicator's come one after another
    first.wait()


def test_whatever_makes_the_host_wait_is_counted(group):
    device, x = group.device, Tensor(np.ones(4, np.float32))
    for wait in (lambda: x.asnumpy(), lambda: float(x[0]), lambda: x.data_ptr(), ms.runtime.synchronize,
                 lambda: x.untyped_storage().resize_(16)):
        before = len(device.syncs)
        wait()
        assert len(device.syncs) == before + 1 and "comm/test_emulator.py" in device.syncs[-1], device.syncs
    assert x.untyped_storage().size() == 16


# -- how the backend starts ------------------------------------------------------------------------------------------------
def test_the_backend_starts_as_the_documents_say():
    """`HcclBackend.start` itself, once a process, with keywords that the installed `init_process_group` has."""
    with comm.fake_world(4, rank=2) as world:
        backend = emulated("hccl", world.backend)
        device = backend.double
        assert (backend.rank, backend.size, device.initialised) == (2, 4, True)
        assert backend.communicator((0, 1, 2, 3)) == "world"
        with in_place_of_mindspore(device):
            again = HcclBackend.start(2, 4, False)  # the user has called init_process_group
        assert again.rank == 2
        for wrong in ({"backend": "nccl"}, {"backends": "hccl"}):
            device.initialised = False
            with pytest.raises(Refused, match="init_process_group"):
                device.init_process_group(**wrong)
        with pytest.raises(Refused, match="before init_process_group"):
            device.get_rank()


def test_a_communicator_is_made_with_the_stated_buffer(monkeypatch):
    for told, megabytes in (("", 200), ("64", 64)):
        monkeypatch.setenv("HCCL_BUFFSIZE", told) if told else monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
        with comm.fake_world(4), rehearsed(clock=False) as device:
            mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp"))
            made = [c for c in device.calls if c[0] == "create_group"]
            assert [c[2] for c in made] == [(0, 2), (0, 1)], "with the mesh, axis by axis, before anything is sent"
            assert {device.buffers[c[1]] for c in made} == {2 * megabytes << 20}, "both buffers, in MiB"
            mesh.get_group("tp").all_reduce(Tensor([1.0, 2.0]))
            assert len([c for c in device.calls if c[0] == "create_group"]) == 2
    monkeypatch.setenv("HCCL_BUFFSIZE", "0")
    with pytest.raises(ConfigError, match="no number of MiB"):
        hccl.buffer_megabytes()


def test_more_communicators_than_a_card_holds_are_refused_before_their_members_meet(monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "1000")
    for size, made in ((16 << 30, 3), (0, 4)):  # 0: a driver that does not say
        monkeypatch.setattr(hccl, "card_memory", lambda size=size: size)
        with comm.fake_world(8), rehearsed(clock=False) as device, nullcontext() if not size else pytest.raises(
                ConfigError, match="5 communicators do not fit into a card's memory.*\n.*\n.*\n.*\n.*HCCL_BUFFSIZE=819"):
            mesh = init_device_mesh("npu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
            mesh.get_group(("dp", "cp"))
        assert len([c for c in device.calls if c[0] == "create_group"]) == made


def options(**config):
    made = GroupOptions()
    made.hccl_config = config
    return made


def test_options_that_hccl_has_not_are_refused(group):
    device = group.device
    with pytest.raises(Refused, match="options are a GroupOptions"):
        device.create_group("a", [0, 1], "nonsense")
    with pytest.raises(Refused, match="knows no"):
        device.create_group("b", [0, 1], options(hccl_buffsize=200))
    with pytest.raises(Refused, match="is a number of MiB"):
        device.create_group("c", [0, 1], options(hccl_buffer_size=0))
    device.create_group("d", [0, 1], options(hccl_buffer_size=100))
    assert device.buffers["d"] == 200 << 20


def test_communicators_without_end_and_buffers_in_bytes_are_refused(group):
    device = group.device
    with pytest.raises(Refused, match="30 communicators take 12000 MiB of the device"):
        for i in range(300):
            device.create_group(f"c{i}", [0, 1], None)
    with pytest.raises(Refused, match="MiB of the device for their buffers"):
        device.create_group("bytes", [0, 1], options(hccl_buffer_size=200 << 20))
