# SPDX-License-Identifier: Apache-2.0
"""Groups, the recorder and the fake world, in one process."""
import contextlib
import inspect
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.comm import registry, world
from ms_dtensor.comm.fake import FakeBackend
from ms_dtensor.comm.group import Group
from ms_dtensor.errors import CommError, ConfigError
from tests.rehearsal.emulator import emulated

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def tensor(cpu):
    from mindspore import Tensor
    return lambda *shape, dtype="float32": Tensor.from_numpy(np.arange(int(np.prod(shape)) + 1)[1:].astype(dtype)
                                                             .reshape(shape))


@contextlib.contextmanager
def fake_group(size, rank=0, axes=("tp",)):
    with comm.fake_world(size, rank):
        yield comm.group(range(size), axes)


def test_importing_comm_does_not_import_mindspore():
    code = "import ms_dtensor.comm, sys; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parent.parent).returncode == 0


# -- fake world ------------------------------------------------------------------------------------------------------
def test_fake_world_nests_and_is_of_this_thread():
    seen = []
    outer = comm.current_world()
    with comm.fake_world(8, rank=3) as a:
        assert comm.current_world() is a and comm.world_key() == (3, 8, False)
        with comm.fake_world(65536, rank=65535) as b:
            assert comm.current_world() is b and comm.get_backend().size == 65536
            thread = threading.Thread(target=lambda: seen.append(comm.world_key()))
            thread.start()
            thread.join()
        assert comm.current_world() is a and comm.start("npu") is a
    assert comm.current_world() is outer and comm.world_key() is None and seen == [None]


def test_fake_world_needs_a_rank_of_it():
    with pytest.raises(ConfigError, match="rank 4 is not in a world of 4"), comm.fake_world(4, rank=4):
        pass


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "complex64"])
def test_fake_results_have_real_shapes(tensor, dtype):
    for rank in range(4):
        sizes = (3, 2, 2, 0)
        with fake_group(4, rank) as g:
            x = tensor(sizes[rank], 5, dtype=dtype)
            assert g.all_gather(x, 0, sizes).shape == (7, 5)
            y = tensor(7, 5, dtype=dtype)
            for got, shape in ((g.all_reduce(y, "prod"), (7, 5)),
                               (g.reduce_scatter(y, "prod", 0, sizes), (sizes[rank], 5)),
                               (g.broadcast(y, 2), (7, 5)), (g.scatter(y, 0, sizes, 1), (sizes[rank], 5)),
                               (g.all_to_all(x, 1, (2, 1, 1, 1), 0, sizes), (7, (2, 1, 1, 1)[rank])),
                               (g.exchange([(1, y)], [(2, (3, 4), y.dtype)])[0], (3, 4))):
                assert got.shape == shape and got.dtype == x.dtype
            assert g.all_reduce(y, "prod", async_op=True).wait().shape == (7, 5)
            assert len(g.all_gather_object("a")) == 4 and g.broadcast_object(1, 0) == 1
            g.barrier()


# -- groups ----------------------------------------------------------------------------------------------------------
def test_group_of_one_copies_and_records_nothing(tensor):
    with comm.fake_world(4, 2), comm.record() as events:
        g = comm.group((2,))
        x = tensor(2, 3)
        for got in (g.all_reduce(x), g.all_gather(x, 0, [2]), g.reduce_scatter(x, "avg", 1, [3]),
                    g.all_to_all(x, 0, [2], 1, [3]), g.broadcast(x, 2), g.scatter(x, 0, [2], 2),
                    g.exchange([(2, x)], [(2, (2, 3), x.dtype)])[0], g.all_reduce(x, async_op=True).wait()):
            np.testing.assert_array_equal(got.asnumpy(), x.asnumpy())
            assert not np.shares_memory(got.asnumpy(), x.asnumpy())
        g.barrier()
        assert g.all_gather_object(5) == [5] and g.broadcast_object(6, 2) == 6
    assert events == []


@pytest.mark.parametrize("call, message", [
    (lambda g, t: g.all_reduce(t(2, dtype="int32"), "avg"), "average of integers"),
    (lambda g, t: g.all_reduce(t(2, dtype="bool"), "sum"), "sum of booleans"),
    (lambda g, t: g.all_reduce(t(2, dtype="complex64"), "max"), "no order"),
    (lambda g, t: g.all_reduce(t(2), "mean"), "'mean' is not a reduction"),
    (lambda g, t: g.all_gather(t(2), 1, [1, 1]), "Dim 1 is out of range"),
    (lambda g, t: g.all_gather(t(2), -1, [2, 1]), "Dim -1 is out of range"),
    (lambda g, t: g.all_gather(t(2), 0, [1, 1]), "has size 2"),
    (lambda g, t: g.all_gather(t(2), 0, [2]), "not one size per member"),
    (lambda g, t: g.reduce_scatter(t(3), "sum", 0, [2, 2]), "ask for 4"),
    (lambda g, t: g.reduce_scatter(t(3), "sum", 0, [4, -1]), "not one size per member"),
    (lambda g, t: g.all_to_all(t(2, 2), 0, [1, 1], 0, [2, 2]), "one dim"),
    (lambda g, t: g.all_to_all(t(2, 2), 0, [1, 1], 1, [1, 1]), "ask for 1"),
    (lambda g, t: g.all_to_all_rows(t(3), [1, 1], [1, 0]), "ask for 2"),
    (lambda g, t: g.all_to_all_rows(t(2), [1, 1], [2, 1]), "do not belong together"),
    (lambda g, t: g.all_to_all_rows(t(2), [1, 1], [1]), "do not belong together"),
    (lambda g, t: g.broadcast(t(2), 5), "Source rank 5"),
    (lambda g, t: g.scatter(None, 0, [1, 1], 1), "source passes the tensor"),
    (lambda g, t: g.scatter(t(3), 0, [1, 1], 1), "do not cut"),
    (lambda g, t: g.exchange([(7, t(1))], []), r"\[7\] are not members"),
])
def test_arguments_are_checked_before_anything_is_sent(tensor, call, message):
    with fake_group(2) as g, comm.record() as events, pytest.raises(CommError, match=message):
        call(g, tensor)
    assert events == []


def test_only_members_may_call_and_ranks_are_checked(tensor):
    with comm.fake_world(4, 0):
        with pytest.raises(CommError, match="not a member"):
            comm.group((1, 2)).all_reduce(tensor(2))
        for ranks in ((0, 0), (0, 4), (), (-1, 0)):
            with pytest.raises(CommError, match="not a list of ranks"):
                comm.group(ranks)


def test_what_a_pretended_world_left_behind_says_so(tensor):
    with comm.fake_world(4):
        x = md.distribute_tensor(tensor(8, 2), md.init_device_mesh("cpu", (4,)), [md.Shard(0)])
    with comm.fake_world(2), pytest.raises(CommError, match="inside of its block alone"):
        x.full_tensor()


# -- recorder --------------------------------------------------------------------------------------------------------
def test_events_say_what_who_why_and_where(tensor):
    with fake_group(4, axes=("dp", "tp")) as g, comm.record() as outer:
        with comm.record() as inner, comm.annotate(phase="backward", src="f32[8@tp]"):
            with comm.annotate(implicit=True, dst="f32[8]", axes=("tp",), site="model.py:7"):
                g.all_gather(tensor(2, 3), 0, [2] * 4)
            g.reduce_scatter(tensor(8, 3), "sum", 0, [2] * 4)
        g.all_to_all(tensor(4, 1), 0, [1] * 4, 1, [1] * 4)
        g.exchange([(1, tensor(5)), (0, tensor(7))], [(2, (1,), tensor(1).dtype), (0, (7,), tensor(1).dtype)])
    assert outer[:2] == inner
    gather, scatter, swap, exchange = outer
    assert (gather.op, gather.axes, gather.group, gather.shape, gather.dtype) == (
        "all_gather", ("tp",), (0, 1, 2, 3), (2, 3), "Float32")
    assert (gather.phase, gather.implicit, gather.src, gather.dst, gather.site) == (
        "backward", True, "f32[8@tp]", "f32[8]", "model.py:7")
    assert (scatter.axes, scatter.phase, scatter.implicit, scatter.dst) == (("dp", "tp"), "backward", False, "")
    assert scatter.site.startswith(__file__ + ":") and swap.phase == "forward"
    assert [e.bytes for e in outer] == [3 * 24, 96 * 3 // 4, 16 * 3 // 4, 20]
    assert exchange.seconds >= 0


def test_rows_are_recorded_as_an_all_to_all_with_what_leaves(tensor):
    with fake_group(4, axes=("cp",)) as g, comm.record() as events:
        assert g.all_to_all_rows(tensor(6, 3), [1, 0, 3, 2], [1, 4, 0, 0]).shape == (5, 3)
        assert g.all_to_all_rows(tensor(0, 3), [0] * 4, [0] * 4, async_op=True).wait().shape == (0, 3)
    assert [(e.op, e.axes, e.shape, e.bytes) for e in events] == [
        ("all_to_all", ("cp",), (6, 3), 5 * 12), ("all_to_all", ("cp",), (0, 3), 0)]


def test_annotation_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), comm.annotate(phase="backward", site="x:1"):
        raise ZeroDivisionError
    assert comm.user_site().startswith(__file__)


# -- world -----------------------------------------------------------------------------------------------------------
def test_wrong_names_are_refused():
    with pytest.raises(ConfigError, match="not a device type"):
        comm.start("tpu")
    with pytest.raises(ConfigError, match="not a backend"):
        comm.set_cpu_backend("gloo")


@pytest.fixture
def launched(monkeypatch):
    """Pretends that msrun started this process as rank 1 of 2; a registered name and the choice of it end with the test."""
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    monkeypatch.setattr(registry, "serving", dict(registry.serving))
    for name, value in {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_NODE_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_registered_backend_serves_cpu_and_the_log_says_so(cpu, launched, caplog):
    class Counting(FakeBackend):
        @classmethod
        def start(cls, rank, size, blocking):
            return cls(size, rank, "counting")
    comm.register_backend("counting", Counting)
    comm.set_cpu_backend("counting")
    with caplog.at_level("INFO", "ms_dtensor"):
        started = world._start("CPU")
    assert (started.rank, started.size, isinstance(started.backend, Counting)) == (1, 2, True)
    assert caplog.messages == ["rank 1 of 2 started on CPU with Counting"]
    launched.setenv("MS_ROLE", "MS_SCHED")
    with pytest.raises(SystemExit):
        world._start("CPU")  # which has nothing for msrun's scheduler to do
    with pytest.raises(ConfigError, match="shm, mccl, counting"):
        comm.set_cpu_backend("hccl")


def test_the_log_has_groups_and_plans_and_is_silent_by_default(cpu, caplog, capfd):
    import mindspore as ms

    from ms_dtensor.dispatch.dispatcher import clear_cache

    def run():
        with comm.fake_world(2):
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            clear_cache()
            md.DTensor.from_local(ms.ops.ones((3, 5)), mesh, [md.Partial()]).redistribute(placements=[md.Replicate()]) * 2
    run()
    assert capfd.readouterr() == ("", "")
    with caplog.at_level("DEBUG", "ms_dtensor"):
        run()
    assert [m.split(" ")[0] for m in caplog.messages] == ["made", "cache"] and "f32[3, 5]" in caplog.messages[1]


@pytest.mark.parametrize("env", [{"MS_WORKER_NUM": "2", "MS_NODE_ID": "2"}, {"MS_WORKER_NUM": "two"}, {}])
def test_a_broken_launch_environment_is_refused(env, monkeypatch):
    for name in ("MS_WORKER_NUM", "MS_NODE_ID", "RANK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MS_ROLE": "MS_WORKER", **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="does not fit together"):
        world._environment("CPU")


def test_two_ranks_for_one_process_are_refused(launched):
    launched.setenv("RANK_ID", "0")
    with pytest.raises(ConfigError, match="MS_NODE_ID and RANK_ID name two ranks") as caught:
        world._environment("CPU")
    assert "'MS_NODE_ID': '1', 'RANK_ID': '0'" in str(caught.value)
    launched.setenv("RANK_ID", "1")
    assert world._environment("CPU") == ("MS_WORKER", 1, 2)
    launched.setenv("RANK_ID", "0")
    launched.setenv("MS_ROLE", "MS_SCHED")  # whose it is not
    assert world._environment("CPU") == ("MS_SCHED", 0, 2)


# -- device backends, call by call -----------------------------------------------------------------------------------
def calls(kind, run, size=4, rank=1):
    """The calls a device backend makes to MindSpore, by name and the sizes it hands over."""
    with comm.fake_world(size, rank) as world:
        backend = emulated(kind, world.backend)
        run(lambda ranks=range(size): comm.Group(backend, ranks))
    return [(c[0], *c[2:]) if c[0] != "create_group" else (c[0], len(c[1]) < 120, c[2]) for c in backend.double.calls]


def test_hccl_calls(tensor):
    def run(group):
        g = group()
        g.all_reduce(tensor(2, 3), "avg")
        g.all_gather(tensor(2, 2), 1, [3, 2, 1, 0])                       # blocks padded to 2 x 3
        g.reduce_scatter(tensor(2, 6), "max", 1, [3, 2, 1, 0])
        g.all_to_all(tensor(4, 1), 0, [1] * 4, 1, [1] * 4)
        g.broadcast(tensor(), 2)
        g.all_reduce(tensor(3, dtype="float64"))                          # HCCL does not reduce it
        g.all_reduce(tensor(0, 2))                                        # nothing to send
        g.all_gather(tensor(2, dtype="bool"), 0, [2] * 4)
        g.exchange([(0, tensor(2, 2)), (1, tensor(1))], [(3, (3, 1), tensor(1).dtype), (1, (1,), tensor(1).dtype)])
    assert calls("hccl", run) == [
        ("all_reduce", (2, 3), {"op": "sum"}),                            # of what was divided before
        ("all_gather_into_tensor", (24,), (6,), {}),
        ("reduce_scatter_tensor", (6,), (24,), {"op": "max"}),
        ("all_to_all_single", (4,), (4,), {}),
        ("broadcast", (1,), {"src": 2}),
        ("all_gather_into_tensor", (12,), (3,), {}),
        ("all_gather_into_tensor", (8,), (2,), {}),
        ("isend", (2, 2), {"peer": 0}),
        ("irecv", (3, 1), {"peer": 3}),
    ]


def test_nccl_calls(tensor):
    def run(group):
        g = group()
        g.all_reduce(tensor(2, 3), "sum")
        g.all_reduce(tensor(2, 3), "avg")                                 # as a sum of parts
        g.all_gather(tensor(2, 2), 1, [3, 2, 1, 0])
        g.reduce_scatter(tensor(2, 6), "max", 1, [3, 2, 1, 0])
        g.all_to_all(tensor(4, 1), 0, [1] * 4, 1, [1] * 4)
        g.broadcast(tensor(), 2)
        g.exchange([(0, tensor(2, 2)), (3, tensor(1))], [(0, (3, 1), tensor(1).dtype), (3, (1,), tensor(1).dtype)])
    assert calls("nccl", run) == [
        ("AllReduce", (2, 3), {"op": "sum"}),
        ("AllReduce", (2, 3), {"op": "sum"}),
        ("AllGather", (6,), {}),
        ("ReduceScatter", (24,), {"op": "max"}),
        ("AlltoAll", (4,), {}),
        ("Broadcast", (1,), {"root": 2}),
        ("Receive", {"of": 0, "tag": 0}),                                 # the lower rank of a pair sends first
        ("Send", (2, 2), {"to": 0, "tag": 0}),
        ("Send", (1,), {"to": 3, "tag": 0}),
        ("Receive", {"of": 3, "tag": 0}),
    ]


@pytest.mark.parametrize("kind", ["hccl", "nccl"])
def test_communicators_are_made_once_over_sorted_ranks_with_short_names(tensor, kind):
    def run(group):
        for ranks in (range(4), (3, 1), (1, 3), (3, 1), range(3, -1, -1)):
            group(ranks).all_reduce(tensor(2))
        group(range(1, 400)).all_reduce(tensor(2))
    made = [c for c in calls(kind, run, size=400) if c[0] == "create_group"]
    assert made == [("create_group", True, (0, 1, 2, 3)), ("create_group", True, (1, 3)),
                    ("create_group", True, tuple(range(1, 400)))]


@pytest.mark.parametrize("kind", ["hccl", "nccl"])
def test_async_handles_are_waited_for_before_the_result_is_used(tensor, kind):
    with comm.fake_world(2) as world:
        g = comm.Group(emulated(kind, world.backend), range(2))
        x = tensor(3, 2)
        work = g.all_gather(x, 1, [2, 2], async_op=True)
        np.testing.assert_array_equal(work.wait().asnumpy(), np.concatenate([x.asnumpy()] * 2, 1))
        assert work.wait() is work.wait()


def test_devices_refuse_complex_numbers(tensor):
    with pytest.raises(CommError, match="no complex numbers"):
        calls("hccl", lambda group: group().all_reduce(tensor(2, dtype="complex64")))


@pytest.mark.parametrize("module", ["hccl", "nccl", "mccl"])
def test_documented_api_is_there(cpu, module):
    """The names and arguments the device backends call exist in the installed MindSpore."""
    from mindspore import communication, ops
    from mindspore.mint import distributed as dist
    inspect.signature(communication.create_group).bind("name", [0])
    wanted = {"hccl": {"all_reduce": dict(tensor=0, op="sum", group="", async_op=True),
                       "all_gather_into_tensor": dict(output_tensor=0, input_tensor=0, group="", async_op=True),
                       "reduce_scatter_tensor": dict(output=0, input=0, op="", group="", async_op=True),
                       "all_to_all_single": dict(output=0, input=0, group="", async_op=True),
                       "broadcast": dict(tensor=0, src=0, group="", async_op=True),
                       "batch_isend_irecv": dict(p2p_op_list=[])},
              "mccl": {"all_gather": dict(tensor_list=[], tensor=0, group=""), "barrier": dict(group=""),
                       "send": dict(tensor=0, dst=0, group=""), "recv": dict(tensor=0, src=0, group="")},
              "nccl": {"AllReduce": dict(op="", group=""), "AllGather": dict(group=""),
                       "ReduceScatter": dict(op="", group=""), "Broadcast": dict(root_rank=0, group=""),
                       "AlltoAll": dict(split_count=1, split_dim=0, concat_dim=0, group=""),
                       "Send": dict(sr_tag=0, dest_rank=0, group=""),
                       "Receive": dict(sr_tag=0, src_rank=0, shape=[], dtype=None, group="")}}[module]
    for name, kwargs in wanted.items():
        target = getattr(ops, name).__init__ if module == "nccl" else getattr(dist, name)
        # MindSpore wraps a primitive's __init__; its own signature is what counts
        target = inspect.unwrap(getattr(target, "__wrapped__", target))
        parameters = inspect.signature(target).parameters
        assert set(kwargs) <= set(parameters), (name, parameters)


def test_a_backend_from_elsewhere_serves_its_owner_only():
    class Mine(FakeBackend):
        pass

    def told(call):
        try:
            call()
        except CommError as e:
            return str(e)
        return ""
    comm.register_backend("mine", Mine)
    try:
        backend = registry.load("mine")(2, 0)
        assert isinstance(backend, Mine) and registry.load("mine") is type(backend)
        assert not issubclass(registry.load("shm"), registry.Owned)
    finally:
        del registry._classes["mine"]
    group, others = Group(backend, (0, 1)), []
    group.barrier()
    thread = threading.Thread(target=lambda: others.append(told(group.barrier)), name="other")
    thread.start()
    thread.join()
    assert others[0].startswith("For 'barrier', another thread communicates for this rank."), others
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, told(lambda: group.all_gather_object(1)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        assert f.read().startswith("For 'all_gather_object', this process is a forked child of the rank's.")
    os.waitpid(pid, 0)
    group.barrier()


# -- what HCCL says in codes -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("said", "code", "words"), [
    ("Call Distribute failed\nEI0006: Getting socket times out. Reason: ...", "EI0006", "HCCL_CONNECT_TIMEOUT, now 600 "),
    ("EI0002: The wait execution of the Notify register times out.", "EI0002", "HCCL_EXEC_TIMEOUT, now unset (1800 by "),
    ("EI0005: The arguments for collective communication are inconsistent", "EI0005", "MS_DTENSOR_CHECK_EVERY=1"),
    ("topo exchange server get socket timeout! EI0015", "EI0015", "HCCL_SOCKET_IFNAME")])
def test_a_code_of_hccl_is_said_in_words(tensor, monkeypatch, said, code, words):
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "600")
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", "/var/log/npu")
    with fake_group(4, rank=2) as group:
        def fails(*_):
            raise RuntimeError(said)
        monkeypatch.setattr(group.backend, "all_reduce", fails)
        with pytest.raises(CommError) as refused:
            group.all_reduce(tensor(2, 3))
    text = str(refused.value)
    assert f"HCCL told rank 2 {code}" in text and "Float32[2, 3] over ranks (0, 1, 2, 3) (tp)" in text and words in text
    assert "test_group.py:" in text and "/var/log/npu" in text and isinstance(refused.value.__cause__, RuntimeError)


def test_other_words_stay_as_they_are(tensor, monkeypatch):
    with fake_group(2) as group:
        def fails(*_):
            raise RuntimeError("EI9999: Inner Error!")
        monkeypatch.setattr(group.backend, "all_reduce", fails)
        with pytest.raises(RuntimeError, match="^EI9999: Inner Error!$"):
            group.all_reduce(tensor(2))


def test_what_comes_later_is_said_behind_the_traceback(capsys):
    from ms_dtensor.tools.ranks import guarded

    def run():
        raise RuntimeError("Sync stream failed. EI0002: The wait execution of the Notify register times out.")
    assert guarded(run) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and said.index("HCCL's EI0002: A collective had begun") > said.index("RuntimeError: Sync")


def test_numpys_dtypes_are_known_without_a_warning_to_the_user(cpu, monkeypatch):
    import mindspore as ms

    from ms_dtensor.internals import host
    monkeypatch.setattr(host, "_dtypes", {})
    monkeypatch.setattr(host.mstype, "dtype_to_nptype", None)  # MindSpore warns of its end whoever's program it is
    for name in "bool_ int8 int32 int64 uint8 uint64 float16 bfloat16 float32 float64 complex64 complex128".split():
        dtype = getattr(ms, name)
        assert host.numpy_dtype(dtype) == ms.Tensor([1]).astype(dtype).asnumpy().dtype, name
