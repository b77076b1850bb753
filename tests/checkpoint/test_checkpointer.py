# SPDX-License-Identifier: Apache-2.0
"""When a loop saves and where it goes on: intervals, the end, SIGTERM, a full disk; by hand and in `Model.train`."""
import os
import resource
import signal
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, Model

import ms_dtensor as md
from ms_dtensor.checkpoint import CheckpointCallback, Checkpointer, RandomState, latest
from ms_dtensor.errors import CheckpointError


def run(root, steps: int, kill_after: int = 0, resume="latest", **options) -> list[float]:
    """A "training" whose numbers come from the random stream; returns what it has seen, from the first step on."""
    state = {"seen": np.zeros(40), "random": RandomState()}
    ms.set_seed(4)
    saver = Checkpointer(state, root, **{"interval": 3, **options})
    for step in range(saver.begin(resume), steps):
        state["seen"][step] = np.random.random()
        if step + 1 == kill_after:
            if options.get("on_sigterm"):
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                return []  # as if the process had ended here
        if saver.after(step + 1):
            break
    saver.finish()
    return state["seen"].tolist()


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"keep_last": 1}], ids=str)
def test_a_run_that_was_killed_goes_on_where_it_saved(tmp_path, options):
    want = run(tmp_path / "straight", 10, **options)
    assert run(tmp_path / "cut", 10, kill_after=8, **options) == []
    md.checkpoint.wait()
    assert latest(tmp_path / "cut").name == "step-00000006"
    assert run(tmp_path / "cut", 10, **options) == want and len(set(want[:10])) == 10
    assert latest(tmp_path / "cut").name == "step-00000010"


def test_sigterm_saves_the_step_at_work_and_ends_the_loop(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    want = run(tmp_path / "straight", 10)
    assert np.count_nonzero(run(tmp_path / "cut", 10, kill_after=5, on_sigterm=True)) == 5
    assert latest(tmp_path / "cut").name == "step-00000005" and signal.getsignal(signal.SIGTERM) is before
    assert run(tmp_path / "cut", 10, interval=None, on_sigterm=True) == want
    assert latest(tmp_path / "cut").name == "step-00000005", "without an interval only SIGTERM saves"


def test_a_run_may_go_on_from_any_checkpoint(tmp_path):
    want = run(tmp_path / "a", 9, keep_last=None)
    assert run(tmp_path / "b", 9, resume=tmp_path / "a/step-00000003") == want


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    run(tmp_path, 4)
    with pytest.raises(CheckpointError, match="has checkpoints of a run"):
        run(tmp_path, 4, resume=None)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(tmp_path / "other", 4, resume=tmp_path / "none")
    md.checkpoint.save({"seen": np.zeros(40), "random": RandomState()}, tmp_path / "loose")
    with pytest.raises(CheckpointError, match="is of no step"):
        run(tmp_path / "other", 4, resume=tmp_path / "loose")


@pytest.mark.parametrize("interval", [0, -1, True, 2.5])
def test_an_interval_is_a_number_of_steps(tmp_path, interval):
    with pytest.raises(CheckpointError, match="'interval'"):
        Checkpointer({}, tmp_path, interval=interval)


def test_sigterm_belongs_to_the_main_thread(tmp_path):
    told = []

    def elsewhere():
        try:
            Checkpointer({}, tmp_path, on_sigterm=True)
        except CheckpointError as e:
            told.append(str(e))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in told[0]


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_named_and_the_previous_checkpoint_stays(tmp_path, async_save):
    state = {"w": np.arange(5000.0)}
    saver = Checkpointer(state, tmp_path, interval=1, async_save=async_save)
    saver.begin()
    saver.after(1)
    md.checkpoint.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            state["w"] += 1
            saver.after(2)
            saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Checkpointer(state, tmp_path, interval=1).begin("latest") == 1
    assert state["w"][1] == 1.0


# -- Model.train -------------------------------------------------------------------------------------------------------
class Send(Callback):
    """SIGTERM to this process within a step."""

    def __init__(self, step: int):
        self.step = step

    def on_train_step_begin(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_step_end(self, run_context):
        self.seen.append(float(run_context.original_args().net_outputs))


def rows(first: int = 0):
    draw = np.random.default_rng(0)
    x = draw.standard_normal((24, 4)).astype(np.float32)
    y = draw.standard_normal((24, 2)).astype(np.float32)
    return ms.dataset.NumpySlicesDataset((x[first:], y[first:]), ["x", "y"], shuffle=False).batch(2)


def trained(root, send_at: int | None = None, resume=None, skipped: int = 0):
    ms.set_seed(7)
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    net = md.replicate(nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 2)), mesh=mesh)
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    saving = CheckpointCallback({"model": net, "optimizer": optimizer}, root, interval=5, resume=resume, on_sigterm=True)
    losses = Losses()
    callbacks = [losses, saving] if send_at is None else [losses, Send(send_at), saving]
    model = Model(net, md.replicate(nn.MSELoss(), mesh=mesh), optimizer)
    model.train(1, rows(2 * skipped), callbacks=callbacks, dataset_sink_mode=False)
    return losses.seen, saving


def test_model_train_is_stopped_saved_and_gone_on_with(tmp_path):
    want, whole = trained(tmp_path / "straight")
    assert whole.step == 12 and not whole.stopped and latest(tmp_path / "straight").name == "step-00000012"
    first, saving = trained(tmp_path / "cut", send_at=7)
    assert saving.stopped and latest(tmp_path / "cut").name == f"step-{saving.step:08}" and saving.step in (7, 8)
    rest, again = trained(tmp_path / "cut", resume="latest", skipped=saving.step)
    assert first + rest == want and again.step == 12
