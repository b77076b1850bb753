# SPDX-License-Identifier: Apache-2.0
"""What a run says of each step: a line, a record in `metrics.jsonl`, numbers for the trackers. Rank 0's; silent elsewhere.

Not here: what a step is, or any communication. The one invariant: a number that is not known is null, "n/a" on the line, and
never a guess.
"""
from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any

import psutil

from ms_dtensor.comm.tally import Tally
from ms_dtensor.core.files import beside, make_folder, own_file, replacing
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools import trackers
from ms_dtensor.tools.screen import Screen

from .config import Config
from .flops import flops_per_token
from .loads import Loads

if TYPE_CHECKING:  # it imports MindSpore, and folders are looked at before that starts
    from .trainer import StepResult

GIB = 2**30


class Reporter:
    """Measures steps and reports them.

    Args:
        cfg: of the run.
        devices: how many ranks compute.
        speaks: whether this rank reports.
        peak: TFLOP/s of a device, or None where nobody knows.
        device: "cpu", or the kind of device whose memory is asked for.
    """

    def __init__(self, cfg: Config, devices: int, speaks: bool, peak: float | None, device: str):
        self.cfg, self.devices, self.speaks, self.peak, self.device = cfg, devices, speaks, peak, device
        self.folder = Path(cfg.train.log_dir)
        self.flops = flops_per_token(cfg.model, cfg.train.seq, cfg.lora is not None)
        self.screen = Screen(cfg.metrics.bar and speaks)
        self.tally = Tally() if cfg.metrics.communication and speaks else None
        self.loads = Loads(cfg) if cfg.model.experts is not None else None
        self.bubble: float | None = None  # of a pipeline, by simulation
        self._bubbles: list[float] = []
        self._file: IO[str] | None = None
        self._trackers: list[trackers.Tracker] = []
        self._process = psutil.Process()
        self._started = 0.0

    # -- begin and end -----------------------------------------------------------------------------------------------------
    def begin(self, step: int, resolved: str) -> None:
        """Opens the files; of an earlier run that is gone on with, the lines up to this step stay, others are put aside."""
        if self.speaks:
            with self._writing():
                path = self.folder / "metrics.jsonl"
                kept: list[str] = []
                if step and os.path.lexists(path):
                    with open(path, encoding="utf-8", opener=own_file) as file:
                        kept = [line for line in file if line.endswith("}\n") and json.loads(line)["step"] <= step]
                elif os.path.lexists(path):
                    put_aside(path, self.folder / "config.yaml")
                for name, text in (("config.yaml", resolved), ("metrics.jsonl", "".join(kept))):
                    with replacing(self.folder / name) as new:
                        new.write(text.encode())
                self._file = open(path, "a", encoding="utf-8", opener=own_file)  # noqa: SIM115  until `close`
            names = self.cfg.metrics.trackers
            self._trackers = trackers.start(names, self.folder, self.cfg.metrics.project, self.folder.name, asdict(self.cfg))
        if self.tally is not None:
            self.tally.__enter__()

    def close(self) -> None:
        """Ends the bar, the file and the trackers."""
        if self.tally is not None and self._file is not None:
            self.tally.__exit__()
        self.screen.close()
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take was said when it was written
                self._file.close()
            self._file = None
        while self._trackers:
            with self._writing():
                self._trackers.pop().close()

    def _writing(self) -> Writing:
        return Writing(self.folder)

    # -- what is said ------------------------------------------------------------------------------------------------------
    def say(self, line: str) -> None:
        """A line for people."""
        if self.speaks:
            try:
                self.screen.say(line)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a pipe that nobody reads any more, say
                    raise
                with self._writing():  # under msrun it goes into a log of the folder
                    raise

    def record(self, **values: Any) -> None:
        """A line of the file; what is no number is null there."""
        if self._file is not None:
            with self._writing():
                self._file.write(json.dumps(values) + "\n")
                self._file.flush()

    def heading(self) -> None:
        """What the columns of the steps are."""
        self.say(f"{'step':>9}  {'loss':>8}  {'grad norm':>9}  {'lr':>9}  {'ms':>7}  {'tokens/s':>9}  {'/device':>8}  "
                 f"{'TFLOP/s':>8}  {'MFU':>6}  {'memory':>9}  {'comm':>5}")
        if self.speaks:
            self.screen.begin(self.cfg.train.steps)

    def start_step(self) -> None:
        """A step begins now."""
        if self.tally is not None:
            self.tally.take()  # that of evaluations and checkpoints is no step's
        self._started = time.perf_counter()

    def step(self, step: int, result: StepResult) -> None:
        """A step (from 0) has ended; what is a number of its result is recorded by its name."""
        seconds = time.perf_counter() - self._started
        if not self.speaks:
            return
        tokens = self.cfg.train.rows_at(step) * self.cfg.train.seq
        values = {**{name: number(value) for name, value in result._asdict().items() if isinstance(value, int | float)},
                  "ms": seconds * 1e3, **self._rates(seconds, tokens)}
        comm = {} if self.tally is None else self.tally.take()
        if self.device == "cpu" and self.tally is not None:  # of a device the host's clock knows nothing
            values["comm_share"] = sum(line.seconds for line in comm.values()) / seconds
            if self.bubble is not None:
                values["bubble"] = sum(line.seconds for (_, axes), line in comm.items() if axes == ("pp",)) / seconds
                self._bubbles.append(values["bubble"])
        lines = {f"{op} {','.join(axes)}".rstrip(): [line.calls, line.bytes, line.seconds * 1e3]
                 for (op, axes), line in comm.items()}
        mfu, share = values.get("mfu"), values.get("comm_share")
        self.say(f"{step + 1:>4}/{self.cfg.train.steps:<4}  {result.loss:8.4f}  {result.grad_norm:9.4f}  {result.lr:9.2e}  "
                 f"{values['ms']:7.0f}  {values['tokens_per_s']:9.0f}  {values['tokens_per_s_per_device']:8.0f}  "
                 f"{_digits(values['tflops_per_device']):>8}  {'n/a' if mfu is None else f'{mfu:.1%}':>6}  "
                 f"{values['memory_gib']:5.2f} GiB  {'n/a' if share is None else f'{share:.0%}':>5}")
        self.screen.done(step + 1)
        told = self._experts(result.loads, tokens, None if self.tally is None else comm)
        if result.logits is not None:
            values["max_logit"] = number(float(result.logits.max()))
            told["max_logits"] = [[number(x) for x in row] for row in result.logits.tolist()]
        self.record(step=step + 1, **values, **({"comm": lines} if self.tally is not None else {}), **told)
        self._track(step + 1, values)

    def _experts(self, loads: Any, tokens: int, comm: Any) -> dict[str, Any]:
        if self.loads is None or loads is None:
            return {}
        told = self.loads.step(loads, tokens, comm)
        if idle := self.loads.idle():
            self.say(f"experts: no token for {self.cfg.metrics.idle_expert} steps: {'; '.join(idle[:8])}"
                     + (f" and {len(idle) - 8} more" if len(idle) > 8 else ""))
            told["idle_experts"] = idle
        return {"experts": told}

    def _rates(self, seconds: float, tokens: int) -> dict[str, float | None]:
        tflops = self.flops * tokens / seconds / self.devices / 1e12
        return {"tokens_per_s": tokens / seconds, "tokens_per_s_per_device": tokens / seconds / self.devices,
                "tflops_per_device": tflops, "mfu": None if self.peak is None else tflops / self.peak,
                "memory_gib": self._memory() / GIB}

    def _memory(self) -> int:
        """Bytes: of a device what tensors had at most; of a CPU what this process has."""
        if self.device == "cpu":
            return self._process.memory_info().rss
        import mindspore as ms
        return ms.runtime.max_memory_allocated()

    def held_out(self, step: int, loss: float) -> None:
        """The loss on held-out text after so many steps."""
        self.say(f"held-out loss at step {step}: {loss:.4f}")
        self.record(step=step, held_out_loss=number(loss))
        self._track(step, {"held_out_loss": loss})

    def end(self) -> None:
        """The last step is done."""
        if self.loads is not None and self.loads.total.any():
            self.say(self.loads.summary())
        if self.bubble is not None:
            measured = f"{median(self._bubbles):.0%} measured" if self._bubbles else "not measured"
            self.say(f"bubble: {self.bubble:.0%} of a step simulated, of stages that are alike; {measured}, "
                     "what rank 0 waits for other stages in a step, the median")
        self.say(f"predicted beside measured: python model_zoo/llama/tools/predict.py {self.folder} writes "
                 f"{self.folder / 'predicted.html'}")

    def warn(self, step: int, action: str, reason: str) -> None:
        """What the guard found."""
        self.say(f"guard: {reason}" + ("; this step is left out" if action == "skip" else ""))
        self.record(step=step + 1, guard=action, reason=reason)

    def _track(self, step: int, values: dict[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if value is not None}
        with self._writing():
            for tracker in self._trackers:
                tracker.log(step, numbers)


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1e}"


def put_aside(*paths: Path) -> None:
    """Renames what an earlier run left: metrics.jsonl to metrics-20261122-231500.jsonl, by its own time.

    A number follows where another run has that name already: two within a second, or a clock that was put back.
    """
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(paths[0].lstat().st_mtime))
    for number in count(1):
        aside = [path.with_name(f"{path.stem}-{when}{f'-{number}' * (number > 1)}{path.suffix}") for path in paths]
        if not any(map(os.path.lexists, aside)):
            break
    for path, other in zip(paths, aside, strict=True):
        if os.path.lexists(path):
            os.rename(path, other)


def check_folder(folder: Path) -> None:
    """Refuses a run's folder in which nothing can be written, before anything is made."""
    with Writing(folder):
        make_folder(folder)
        probe = beside(folder / "probe")
        try:
            with open(probe, "xb") as file:
                file.write(bytes(1 << 16))  # a full disk often still takes a name
        finally:
            probe.unlink(missing_ok=True)


class Writing:
    """What cannot be written into a run's folder is said in one message."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ConfigError(
                f"For 'train.log_dir', '{self.folder}' cannot be written.",
                f"{error.strerror}: {error.filename or self.folder}",
                "The run's metrics, its configuration and the logs of its ranks go there.",
                ["--train.log_dir with a folder of yours, on a disk with room", "df -h; ls -ld the folder"]) from error
