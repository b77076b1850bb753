# SPDX-License-Identifier: Apache-2.0
"""The recipe on real ranks: runs of it against one device, and runs that go on from a checkpoint on any mesh."""
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from model_zoo.llama.config import Config, ParallelConfig
from model_zoo.llama.data import Text, load_text
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor.checkpoint import Checkpointer
from tests.support import array, each_once, shared_folder

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 37}
TEXT = Text(*(np.random.default_rng(n).integers(0, 2, 400).cumsum().astype(np.uint8) % 37 for n in (1, 2)))
LOSS, PARAMETERS = 1e-5, 1e-4  # relative; AdamW divides by roots of small second moments
_alone: dict[str, tuple] = {}


def trainer(cfg: Config, data: Any = None, on_mesh: bool = True) -> Trainer:
    """`data`: default the text that the configuration names."""
    data = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq) if data is None else data
    return Trainer(cfg, data, make_mesh("cpu", cfg.parallel) if on_mesh else None)


def run(one: Trainer, steps: int = 10, begin: int = 0) -> list[list[float]]:
    """Loss and gradient norm of each step, and the held-out loss at the end."""
    results = [one.step(step) for step in range(begin, steps)]
    return [[r.loss for r in results], [r.grad_norm for r in results], [one.held_out_loss()]]


def weights(one: Trainer) -> dict[str, np.ndarray]:
    return {p.name: array(p) for p in one.params}


def held(one: Trainer) -> list[np.ndarray]:
    """All parameters and what the optimizer keeps of them, whole."""
    def walk(node):
        if isinstance(node, dict | list | tuple):
            for child in node.values() if isinstance(node, dict) else node:
                yield from walk(child)
        elif node is not None and not isinstance(node, int):
            yield array(node)
    return list(walk([one.params, {} if one.optimizer is None else one.optimizer.state_dict()]))


def of_one_device(cfg: Config, data: Any = None, steps: int = 10) -> tuple:
    """What `run` gives there, parameters by name, and how many tokens experts got; computed by one of the ranks."""
    cfg = replace(cfg, parallel=ParallelConfig(), train=replace(cfg.train, recompute=False, compile=False))

    def ran():
        one = trainer(cfg, data, on_mesh=False)
        return run(one, steps), weights(one), None if one.loads is None else one.loads.tolist()
    if (key := f"{cfg} {data} {steps}") not in _alone:
        _alone[key], = each_once(ran)
    return _alone[key]


def as_one_device(cfg: Config, data: Any = None, steps: int = 10, loss: float = LOSS, far: float = PARAMETERS,
                  small: float = 0.0) -> Trainer:
    """A run of the mesh has one device's numbers and parameters.

    Args:
        loss: by how much numbers may be off, relative.
        far: by how much a parameter may be off in norm, relative to the norm it has, or to `small`.
    """
    made = trainer(cfg, data)
    want, params, loads = of_one_device(cfg, data, steps)
    for got, wanted in zip(run(made, steps), want, strict=True):
        assert np.allclose(got, wanted, rtol=loss, atol=0), (got, wanted)
    assert (None if made.loads is None else made.loads.tolist()) == loads, "of all layers, on all ranks"
    mine = weights(made)
    assert mine.keys() == params.keys() if cfg.parallel.pp == 1 else mine.keys() <= params.keys(), "a rank has its stages'"
    for name, value in mine.items():
        off = np.linalg.norm(value - params[name]) / max(np.linalg.norm(params[name]), small)
        assert off <= far, (cfg.parallel, name, off)
    return made


def goes_on(make: Callable[[ParallelConfig], Trainer], source: ParallelConfig, targets: Iterable[ParallelConfig],
            at: int, steps: int, loss: float = LOSS) -> None:
    """A run that is left after some steps goes on on other meshes, and on its own bit for bit."""
    straight, first, root = make(source), make(source), shared_folder()
    want = run(straight, steps)[0]
    saver = Checkpointer(first.state(), root / "run", interval=at, over=first.over)
    saver.begin()
    losses = run(first, at)[0]
    saver.after(at)
    saver.finish()
    for parallel in (source, *targets):
        again = make(parallel)
        saved = root / f"run/step-{at:08d}"
        assert Checkpointer(again.state(), root / "none", over=again.over).begin(saved) == at
        got = losses + run(again, steps, at)[0]
        assert np.allclose(got, want, rtol=loss, atol=0), (source, parallel, got, want)
        if parallel is source:
            assert got == want
            assert all(a.tobytes() == b.tobytes() for a, b in zip(held(again), held(straight), strict=True))
