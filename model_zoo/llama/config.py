# SPDX-License-Identifier: Apache-2.0
"""The whole run as one typed tree of frozen dataclasses: defaults <- YAML file <- `--section.key value`.

Not here: anything that needs MindSpore or a process group. A configuration is refused before the first byte is
communicated, by the same text on every rank. The one invariant: a `Config` that `load` returned is consistent with
the world it will run in. Reading and type-checking are in `configio.py`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ms_dtensor.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3's stretch of the rotary wave lengths."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Global sizes; `n_kv_heads` below `n_heads` is grouped-query attention."""

    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 8
    ffn_dim: int = 704
    vocab_size: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Byte-level text; `path` null means the Python standard library's own sources."""

    path: str | None = None
    max_bytes: int = 4_000_000
    held_out_every: int = 20
    """One block of text in this many is held out."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of the mesh axes ("dp", "tp"); they multiply to the number of workers."""

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    """Norms and residuals sharded over tp along the sequence."""
    loss_parallel: bool = True
    """Logits stay sharded by vocabulary over tp up to the loss."""


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW with decoupled weight decay; `clip_norm` 0 turns clipping off."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 10
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr_ratio: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`batch` is the global number of sequences a step, `seq` their length."""

    steps: int = 50
    batch: int = 8
    seq: int = 128
    seed: int = 0
    eval_every: int = 0
    """Held-out loss every so many steps, besides start and end; 0: only those two."""
    eval_batches: int = 2
    compile: bool = False
    """The core of attention runs as one compiled graph."""
    log_dir: str = "runs/llama"


@dataclass(frozen=True, slots=True)
class Config:
    """The tree; section names are the prefixes of the command line."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def check(cfg: Config, world: int) -> None:
    """Raises `ConfigError` for the first thing in `cfg` that cannot run on `world` workers."""
    _check_ranges(cfg)
    _check_model(cfg.model)
    _check_degrees(cfg, world)
    if cfg.train.batch % cfg.parallel.dp:
        raise ConfigError(f"For the configuration, train.batch = {cfg.train.batch} cannot be shared out over "
                          f"dp = {cfg.parallel.dp}.",
                          f"train.batch = {cfg.train.batch}, parallel.dp = {cfg.parallel.dp}",
                          "Every data-parallel rank takes the same number of sequences.",
                          f"--train.batch {-(-cfg.train.batch // cfg.parallel.dp) * cfg.parallel.dp}")


def _check_ranges(cfg: Config) -> None:
    least_one = ("model.dim", "model.n_layers", "model.n_heads", "model.n_kv_heads", "model.ffn_dim",
                 "model.vocab_size", "data.max_bytes", "data.held_out_every", "parallel.dp", "parallel.tp",
                 "train.batch", "train.seq", "train.eval_batches")
    for key in least_one:
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        if value < 1:
            raise ConfigError(f"For the configuration, {key} = {value} is too small.", "", f"{key} is at least 1.")
    for key in ("optim.warmup", "optim.clip_norm", "train.steps", "train.eval_every"):
        section, name = key.split(".")
        value = getattr(getattr(cfg, section), name)
        if value < 0:
            raise ConfigError(f"For the configuration, {key} = {value} is negative.", "", f"{key} is at least 0.")


def _check_model(m: ModelConfig) -> None:
    if m.dim % m.n_heads or m.head_dim % 2:
        raise ConfigError(f"For the configuration, model.dim = {m.dim} does not make model.n_heads = {m.n_heads} "
                          "heads.",
                          f"model.dim / model.n_heads = {m.dim / m.n_heads:g}",
                          "The head width is a whole, even number (rotary embeddings turn pairs).",
                          f"--model.n_heads with one of {[h for h in divisors(m.dim) if m.dim // h % 2 == 0]}")
    if m.n_heads % m.n_kv_heads:
        raise ConfigError(f"For the configuration, model.n_kv_heads = {m.n_kv_heads} does not divide "
                          f"model.n_heads = {m.n_heads}.", "", "Each key head serves the same number of query heads.",
                          f"--model.n_kv_heads with one of {divisors(m.n_heads)}")


def _check_degrees(cfg: Config, world: int) -> None:
    p, m = cfg.parallel, cfg.model
    tp_ok = [t for t in divisors(m.n_kv_heads) if m.n_heads % t == 0]
    if p.dp * p.tp != world:
        pairs = [(world // t, t) for t in tp_ok if world % t == 0]
        raise ConfigError(
            f"For the configuration, the parallel degrees make {p.dp * p.tp} ranks but {world} "
            f"{'workers run' if world != 1 else 'worker runs'}.",
            f"parallel.dp = {p.dp} x parallel.tp = {p.tp} = {p.dp * p.tp}, world size = {world}",
            "The degrees of the mesh axes multiply to the number of workers.",
            [f"with {world} {'workers' if world != 1 else 'worker'}: " + ", ".join(f"dp={d} tp={t}" for d, t in pairs),
             f"start {p.dp * p.tp} workers: --worker_num={p.dp * p.tp} --local_worker_num={p.dp * p.tp}"])
    bad = [name for name, n in (("model.n_heads", m.n_heads), ("model.n_kv_heads", m.n_kv_heads)) if n % p.tp]
    if bad:
        runnable = [t for t in tp_ok if world % t == 0]
        raise ConfigError(
            f"For the configuration, {' and '.join(f'{b} = {getattr(m, b[6:])}' for b in bad)} cannot be divided "
            f"over parallel.tp = {p.tp}.", f"model.n_heads = {m.n_heads}, model.n_kv_heads = {m.n_kv_heads}",
            "Each tensor-parallel rank computes whole heads, the same number of them.",
            [f"--parallel.tp with one of {tp_ok}; with {world} workers "
             + ", ".join(f"dp={world // t} tp={t}" for t in runnable),
             f"--model.n_heads and --model.n_kv_heads that are multiples of {p.tp}"])
