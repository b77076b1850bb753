# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama: one process, or many ranks under msrun.

    python model_zoo/llama/train.py --config model_zoo/llama/configs/tiny.yaml
    msrun --worker_num=8 --local_worker_num=8 --join=True model_zoo/llama/train.py \
        --config model_zoo/llama/configs/quickstart.yaml --train.steps 20

`launch.py` beside it wraps the second form. Rank 0 prints one line a step (`report.py`) and writes `metrics.jsonl` and the
resolved `config.yaml` to `train.log_dir`. What can be refused is refused before MindSpore starts, alike on every rank.
"""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import leave
from ms_dtensor.tools.ranks import guarded, start_device, world_size

if TYPE_CHECKING:
    from model_zoo.llama.chat import Conversations
    from model_zoo.llama.config import Config
    from model_zoo.llama.data import Files, Text


def prepare(argv: list[str], world: int | None, hold: Callable[[Config], object] = lambda cfg: None
            ) -> tuple[Config, str, bool, Text | Files | Conversations | None, dict[str, Any]]:
    """All that can be refused before MindSpore starts: the configuration, its trackers, the run's folder, the data.

    Args:
        argv: the command line.
        world: number of ranks, if it is known.
        hold: is called as soon as there is a folder, to keep other runs out of it.

    Returns:
        The configuration, itself as text, whether it is only to be printed, the data, and what `check_resume` gave.
    """
    from model_zoo.llama.configio import dump, load
    from model_zoo.llama.data import check_same_data, load_text, own_tokenizer
    from model_zoo.llama.report import check_folder
    from ms_dtensor.errors import ConfigError
    from ms_dtensor.tools import trackers

    cfg, show = load(argv, world)
    if show:
        return cfg, dump(cfg), show, None, {}
    trackers.check(cfg.metrics.trackers)
    check_folder(Path(cfg.train.log_dir))
    hold(cfg)
    if cfg.profile.first > cfg.train.steps:
        raise ConfigError("For the configuration, profile.first is beyond the run.",
                          f"profile.first = {cfg.profile.first}, train.steps = {cfg.train.steps}",
                          "Steps count from 1 to train.steps.", f"--profile.first {max(1, cfg.train.steps // 2)}")
    held = check_resume(cfg)
    beside = Path(cfg.train.init_hf or "") / "tokenizer.json"
    if cfg.data.format == "chat" and cfg.data.tokenizer is None and cfg.train.init_hf and beside.is_file():
        cfg = replace(cfg, data=replace(cfg.data, tokenizer=str(beside)))  # bytes are no words of that model
    text = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq)
    check_same_data(cfg.train, text, held.get("data", {}))
    cfg = replace(cfg, data=replace(cfg.data, tokenizer=own_tokenizer(cfg.data)))  # whoever uses the run finds it there
    return cfg, dump(cfg), show, text, held


def check_resume(cfg: Config) -> dict[str, dict[str, Any]]:
    """Refuses a checkpoint that the run cannot go on from, and a new run in the folder of another, before anything starts.

    Returns:
        What the checkpoint says of its model (`model_values`) and its data (`stream_values`), less if it is an old one;
        nothing where there is none.
    """
    from model_zoo.llama.config import checkpoint_folder
    from model_zoo.llama.configio import check_same_model, held_values
    from ms_dtensor.checkpoint.folder import find, latest
    from ms_dtensor.checkpoint.reader import read_index
    from ms_dtensor.errors import CheckpointError, ConfigError

    c, root = cfg.checkpoint, checkpoint_folder(cfg)
    there = latest(root)
    if c.resume is None and there and (c.interval or c.dir is None):
        raise ConfigError(f"For the configuration, '{root}' has checkpoints of a run.", str(there),
                          "A new run's steps, or its config.yaml and metrics, would mix with them.",
                          ["--checkpoint.resume latest goes on with that run", "another --train.log_dir", "remove them"])
    if c.resume is None or c.resume == "latest" and there is None:
        return {}
    try:
        where = there if there and c.resume == "latest" else find(c.resume)
        index = read_index(where)
    except CheckpointError as error:
        raise ConfigError(f"For 'checkpoint.resume', there is nothing to go on from in '{c.resume}'.", error.attempt,
                          "It is `latest`, or the folder of a checkpoint.",
                          ["--checkpoint.resume latest, which begins a run where there is none",
                           f"a folder such as {root / 'step-00000100'}"]) from None
    held = {part: held_values(index.values, part) for part in ("config", "data")}
    if held["config"]:
        check_same_model(cfg, held["config"], str(where))
    return held


def run(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        from model_zoo.llama.configio import USAGE
        print(f"usage: train.py {USAGE}\n\n{__doc__}\n"
              "All keys and their values: --print-config; what they mean: model_zoo/llama/config.py.")
        return
    with ExitStack() as keep:
        _run(argv, keep)


def _run(argv: list[str], keep: ExitStack) -> None:
    from model_zoo.llama.hold import hold

    world = world_size()
    cfg, resolved, show, text, held = prepare(argv, world, lambda cfg: keep.enter_context(hold(cfg)))
    if show:
        print(resolved, end="")
        return

    device = start_device()  # MindSpore is imported from here on

    from model_zoo.llama.fits import refuse_too_large
    from model_zoo.llama.kept import choose
    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.report import Reporter
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor.internals.target import card_memory
    from ms_dtensor.tools.window import Window

    p, t = cfg.parallel, cfg.train
    mesh = make_mesh(device, p) if world > 1 or t.dtype != "float32" else None
    if t.check_memory and device == "npu" and (memory := card_memory()):  # known once the mesh has initialised the device
        refuse_too_large(cfg, world, memory, "this card has", True)
    rank = 0 if mesh is None else mesh.get_rank()
    log_dir = Path(t.log_dir)
    report = Reporter(cfg, world, rank == 0, peak_tflops(cfg), device)
    window = Window(log_dir / "profile", cfg.profile.first, cfg.profile.steps, rank, cfg.profile.mindspore)
    trainer = Trainer(cfg, text, mesh)
    saver, done = None, 0
    if cfg.checkpoint.interval or cfg.checkpoint.resume:
        saver, done = checkpoints(cfg, trainer, report, held)
        if cfg.checkpoint.on_sigterm:
            keep.enter_context(interrupt_saves())
    try:
        report.begin(done, resolved)
        weights, own = trainer.sizes
        report.bubble = trainer.bubble()
        report.say(f"{weights / 1e6:.2f} M parameters{f', {own:,} of them trained,' * (own < weights)} on "
                   f"{world} {'ranks' if world > 1 else 'rank'}: {f'pp={p.pp} ' * (p.pp > 1)}dp={p.dp} "
                   f"{f'cp={p.cp} ' * (p.cp > 1)}tp={p.tp}"
                   f"{' sequence-parallel' if p.sequence_parallel and p.tp > 1 else ''}"
                   f"{' fsdp' if p.fsdp else ' zero1' if p.zero1 else ''}{f' hsdp={p.hsdp}' if p.hsdp > 1 else ''}; "
                   f"{t.batch} x {t.seq} tokens a step; log in {log_dir}")
        if t.recompute:
            report.say(str(choose(trainer.cfg)))
        if done:
            report.say(f"going on after step {done}")
        if window.first and window.first <= done:
            report.say(f"no profile: step {window.first}, where it begins, is done already")
        train(trainer, report, window, saver, done)
    finally:
        window.close()
        report.close()


def train(trainer, report, window, saver, done: int) -> None:
    """Steps until the last one, or until somebody asks to end."""
    t = trainer.cfg.train
    if done and done >= t.steps:
        report.say(f"nothing to do: {done} steps are done, and train.steps = {t.steps}")
        if saver is not None:
            saver.finish()
        report.held_out(done, trainer.held_out_loss())
        return
    report.held_out(done, trainer.held_out_loss())
    report.heading()
    for step in range(done, t.steps):
        window.step(step + 1)
        report.start_step()
        result = trainer.step(step)
        report.step(step, result)
        if result.verdict.action != "go":
            report.warn(step, *result.verdict)
        traced = window.stepped(step + 1)
        if traced:
            report.say(f"profile of steps {window.first} to {window.last} in {traced}")
        if t.eval_every and (step + 1) % t.eval_every == 0 and step + 1 < t.steps:
            report.held_out(step + 1, trainer.held_out_loss())
        if saver is not None and saver.after(step + 1):
            saver.finish()
            report.say(f"ended by SIGTERM after step {step + 1}, which is saved")
            return
    if saver is not None:
        saver.finish()
    report.held_out(t.steps, trainer.held_out_loss())
    report.end()


def peak_tflops(cfg: Config) -> float | None:
    """What a device computes at most in the run's dtype, if the configuration or the table says."""
    import mindspore as ms

    from ms_dtensor.tools.peaks import peak

    if cfg.metrics.peak_tflops is not None:
        return cfg.metrics.peak_tflops
    known = peak(ms.hal.get_device_name(0))
    return known.tflops if known is not None and cfg.train.dtype != "float32" else None


def checkpoints(cfg, trainer, report, held: dict[str, dict[str, Any]]):
    """What saves the run, and how many steps of it have been done; `held`: of `check_resume`."""
    from model_zoo.llama.config import checkpoint_folder
    from ms_dtensor.checkpoint import Checkpointer, latest

    c, state = cfg.checkpoint, trainer.state()
    ours = {part: state[part] for part in ("config", "data")}
    saver = Checkpointer(state, checkpoint_folder(cfg), interval=c.interval or None, keep_last=c.keep_last,
                         async_save=c.async_save, on_sigterm=c.on_sigterm, over=trainer.over)
    if c.resume and (c.resume != "latest" or latest(saver.path)):
        state |= held  # its keys: a load wants the same on both sides
        for known, what in ((held["config"], "its model's configuration"), ("format" in held["data"], "all about its data")):
            if not known:
                report.say(f"this checkpoint does not say {what} (it is an older one): it is not compared")
    done = saver.begin(c.resume)
    state |= ours
    return saver, done


@contextmanager
def interrupt_saves() -> Iterator[None]:
    """Ctrl-C asks as SIGTERM does; the second time it ends the run at once."""
    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    leave(guarded(lambda: run(sys.argv[1:])))
