# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline saved as one checkpoint on real ranks: on other meshes and on none, bit for bit; one error on all."""
import os

import numpy as np
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor import checkpoint
from ms_dtensor.checkpoint.reader import read_index
from ms_dtensor.checkpoint.state import State
from ms_dtensor.errors import CheckpointError
from ms_dtensor.optim import AdamW, clip_grad_norm_
from ms_dtensor.pipeline import Schedule1F1B, ScheduleInterleaved1F1B, pipeline
from tests.cases import case, cases
from tests.operands import filled
from tests.pipeline.cases_run import WAYS, Net, T, X, loss_fn
from tests.support import array, counted, refusal, same_on_all_ranks, shared_folder
from tests.tiers import sampled

# by name: stages a rank, the axis beside pp, and what is done with each stage
PIPELINES = {"pp4": (1, "", ""), "pp2 x fsdp2": (1, "dp", "blocks"), "pp2 x tp2": (1, "tp", "tp"),
             "pp2 of two stages x replicate2": (2, "dp", "replicate")}


class Job:
    """A model in stages, or whole, and its optimizer; the same program on each mesh."""

    def __init__(self, name: str, seed: int, tied: bool = False):
        net, self.over, self.state = filled(Net(tied=tied), seed), None, {}
        if name in PIPELINES:
            v, other, way = PIPELINES[name]
            mesh = md.init_device_mesh("cpu", (2, 2) if other else (4,), mesh_dim_names=("pp", other) if other else ("pp",))
            self.over = mesh["pp"]
            stages = pipeline(net, self.over, n_stages=v * self.over.size())
            for stage in stages if way else ():
                WAYS[way](stage.module, mesh)
            self.schedule = (ScheduleInterleaved1F1B if v > 1 else Schedule1F1B)(stages, 4, loss_fn)
            self.rows = [md.distribute_tensor(Tensor(a), mesh[other], [md.Shard(0) if other == "dp" else md.Replicate()],
                                              src_data_rank=None) if other else Tensor(a) for a in (X, T)]
            model, params = self.schedule, self.schedule.params
        else:
            if name == "fsdp4":
                md.fully_shard(net, mesh=md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
            model, params = net, net.trainable_params()
        self.state = {"model": model, "optimizer": AdamW(params, 0.1), "epoch": seed}

    def steps(self, count: int) -> list[float]:
        losses, optimizer = [], self.state["optimizer"]
        for _ in range(count):
            loss, grads = self.schedule.step(self.rows[0], target=self.rows[1])
            clip_grad_norm_(zip(self.schedule.params, grads), 1.0, over=self.over)
            optimizer(tuple(grads))
            losses.append(float(loss))
        return losses

    def values(self) -> dict[str, np.ndarray]:
        """What this rank's stages have, whole, under all names."""
        held = State(self.state, "test")
        found = {key: array(leaf.tensor).copy() for key, leaf in held.tensors.items()}
        return found | {key: found[first] for key, first in held.tied.items()}


def alike(job: Job, want: dict[str, np.ndarray], what: str) -> None:
    mine = job.values()
    assert mine and mine.keys() <= want.keys(), (what, mine.keys() - want.keys())
    for key, value in mine.items():
        assert value.tobytes() == want[key].tobytes(), (what, key)


@cases(4, {"stages_are_one_checkpoint_that_every_mesh_loads": (False,), "weights_that_stages_share_are_saved_once": (True,)},
       timeout=200)
def every_mesh(world, tied: bool) -> None:
    root, whole = shared_folder(), Job("plain", 5, tied)
    checkpoint.save(whole.state, root / "one")
    one = read_index(root / "one")
    for i, source in sampled(enumerate(PIPELINES), 2, tied):
        job = Job(source, 1, tied)
        job.steps(2)
        checkpoint.save(job.state, root / str(i), over=job.over)
        index = read_index(root / str(i))
        assert [*index.tensors] == [*one.tensors] and [*index.values] == [*one.values] and index.tied == one.tied, source
        assert checkpoint.verify(root / str(i)) == []
        checkpoint.load(whole.state, root / str(i))
        want = whole.values()
        alike(job, want, f"{source} -> one device")
        for target in sampled(("fsdp4", *PIPELINES), 4, i + tied):
            other = Job(target, 2, tied)
            checkpoint.load(other.state, root / str(i), over=other.over)
            alike(other, want, f"{source} -> {target}")
            assert other.state["epoch"] == 1 and other.state["optimizer"].step == 2
    other = Job("pp4", 2, tied)
    checkpoint.load(other.state, root / "one", over=other.over)
    assert other.state["epoch"] == 5


@case(4, timeout=120)
def a_resumed_pipeline_goes_on_bit_for_bit(world):
    for name in sampled(("pp2 x fsdp2", "pp2 of two stages x replicate2"), 2):
        root, straight, first = shared_folder(), Job(name, 1, True), Job(name, 1, True)
        want = straight.steps(4)
        saver = checkpoint.Checkpointer(first.state, root, interval=2, async_save=True, over=first.over)
        assert saver.begin("latest") == 0
        got = first.steps(2)
        saver.after(2)
        saver.finish()
        again = Job(name, 2, True)
        assert checkpoint.Checkpointer(again.state, root, over=again.over).begin("latest") == 2
        assert got + again.steps(2) == want
        mine, theirs = again.values(), straight.values()
        assert mine.keys() == theirs.keys() and all(mine[key].tobytes() == theirs[key].tobytes() for key in mine)


@case(4, timeout=120)
def stages_that_do_not_fit_are_refused_on_all_ranks_before_a_file_is_made(world):
    root, job = shared_folder(), Job("pp2 x fsdp2", 1, True)
    place, line = job.over.get_local_rank(), world.rank % 2
    off = Job("pp2 x fsdp2", 1, True)
    shared = off.state["model"].state_dict()["first.weight"]  # of both stages
    shared.set_data(Tensor(shared.to_local().asnumpy() + place))

    def save(state, over=job.over):
        return lambda: checkpoint.save(state, root / "a", over=over)
    for call, words in ((save(job.state | {"epoch": place}), ("1 keys that several stages have", "'epoch': pp=0 0; pp=1 1")),
                        (save(job.state | {"x": mint.zeros((2 + place,))}),
                         ("another kind", "pp=0 float32[2]; pp=1 float32[3]")),
                        (save(job.state | {"x": Tensor([1.0 + place])}), ("other bytes", "'x': pp=0 hash")),
                        (save(off.state), ("other bytes", "'model.first.weight': pp=0 hash")),
                        (save(job.state | ({"n": line} if place else {})), ("'n': rank 2 0; rank 3 1",)),
                        (save(job.state, None), ("the ranks' states differ", 'over=mesh["pp"]')),
                        (save(job.state, job.over if world.rank else None), ("differ: over", "rank 0 None; rank 1 pp=2")),
                        (save(job.state, job.over.root), ("'over' is", 'mesh["pp"]'))):
        with counted() as count:
            text = refusal(call, CheckpointError)
        assert all(word in text for word in words), text
        same_on_all_ranks(world, text)
        assert not os.listdir(root) and {op for op, _ in count} == {"all_gather_object"}, (text, count)
    checkpoint.save({"model": job.state["model"], "more": 1}, root / "b", over=job.over)
    optimizer = {"optimizer": job.state["optimizer"]}
    for state, over, words in (
            (job.state | {"more": 1}, job.over, ("79 keys that", "only the program has 'epoch'", "'optimizer.first.bias.")),
            ({"model": job.state["model"]}, job.over, ("lacks 1 of its keys", "only the checkpoint has 'more'")),
            ({"model": job.state["model"], "more": 1}, None, ("4 of 4 ranks failed", 'over=mesh["pp"]')),
            ({"more": 1} | (optimizer if place else {}), job.over,
             ("only the program has 'optimizer", "only the checkpoint")),
            ({"more": 1, "model": job.state["model"]}, job.over if world.rank else None, ("differ: over",))):
        text = refusal(lambda state=state, over=over: checkpoint.load(state, root / "b", over=over), CheckpointError)
        assert all(word in text for word in words), text
        same_on_all_ranks(world, text)
    done = checkpoint.load({"model": job.state["model"], "new": 1}, root / "b", strict=False, over=job.over)
    assert (done.missing, done.unused) == (("new",), ("more",))
