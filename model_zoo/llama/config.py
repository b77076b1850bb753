# SPDX-License-Identifier: Apache-2.0
"""The whole run as one typed tree of frozen dataclasses: defaults <- YAML file <- `--section.key value`.

Not here: anything that needs MindSpore or a process group. A configuration is refused before the first byte is
communicated, by the same text on every rank. The one invariant: a `Config` that `load` returned is consistent with
the world it will run in. Reading and type-checking are in `configio.py`, the model's section in `config_model.py`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ms_dtensor.core.divisors import divisors
from ms_dtensor.errors import ConfigError

from .config_model import (
    MODEL_RANGES,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeScaling,
    check_model,
)
from .config_watch import COUNT, WATCH_RANGES, GuardConfig, MetricsConfig, ProfileConfig

__all__ = ["ExpertsConfig", "LatentConfig", "ModelConfig", "RopeScaling"]  # the section `model`; and what is below


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Text as bytes; `path` null means the Python standard library's own sources. Or token files; or conversations."""

    path: str | None = None
    """A text file or a folder of them; a folder of `prepare_data.py`; with format `chat` a file of conversations."""
    format: Literal["text", "chat"] = "text"
    template: Literal["plain", "chatml", "llama3"] = "plain"
    """How conversations become text; see chat.py."""
    documents: bool = False
    """Of token files: a token sees its own document only, and positions begin anew in each."""
    tokenizer: str | None = None
    """A tokenizer.json or its folder, for conversations; null: that of train.init_hf, else bytes. Token files have been
    through theirs; a text is read as bytes, and refused with a tokenizer: `prepare_data.py` makes token files of it."""
    max_bytes: int = 4_000_000
    held_out_every: int = 20
    """One block of text in this many is held out."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of the mesh axes ("pp", "dp", "cp", "tp"); they multiply to the number of workers; `ep` is a part of them."""

    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    """Norms and residuals sharded over tp along the sequence."""
    tp_overlap: Literal[1, 2, 4, 8, 16, "kernel"] = 1
    """With sequence_parallel: a block's products go on beside their communication, in so many pieces; kernel: Ascend's."""
    loss_parallel: bool = True
    """Logits stay sharded by vocabulary over tp up to the loss."""
    fsdp: bool = False
    """Parameters, gradients and optimizer state are cut over dp, and gathered block by block."""
    hsdp: int = 1
    """With fsdp: they are cut over each of so many parts of dp, and copied between these."""
    zero1: bool = False
    """Only the optimizer's work and state are divided over dp."""
    expert_tp: bool = True
    """Each expert's width is cut over tp; false: every tp rank has all of all experts."""
    pp: int = 1
    """Stages of a pipeline, each on dp x tp ranks of its own; a batch goes through them in train.micro_batches."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipev"] = "1f1b"
    """In which order; see docs/pipeline.md."""
    pp_split: tuple[str, ...] | None = None
    """Cells at which the stages but the first begin: [layers.4, layers.9]; null: where the dearest stage costs least."""
    pp_stages_per_rank: int = 1
    """With zbv and dualpipev 2, with interleaved 2 or more, with the others 1."""
    ep: int = 1
    """Experts are cut over so many ranks, and tokens travel to them: a part of dp, or all of cp and a part of dp."""
    expert_dedup: bool | None = None
    """With ep: a token goes once to each rank that has any of its experts; null: where that saves bytes. Where true, a
    device is waited for in each layer, also with a capacity."""

    cp: int = 1
    """Ranks that share the tokens of dp's rows; see docs/howto/long_contexts.md."""
    ulysses: int = 1
    """Over so many of cp, attention takes heads for tokens; over the rest of it keys are fetched."""
    cp_algorithm: Literal["gather", "ring"] = "gather"
    """How they are: what a rank needs at once, or from one rank after another."""
    cp_order: Literal["balanced", "head_tail", "in_order"] = "balanced"
    """Which rank has which tokens."""

    @property
    def stages(self) -> int:
        return self.pp * self.pp_stages_per_rank

    @property
    def ep_over_cp(self) -> bool:
        """Whether experts are cut over cp too: where dp has not enough ranks for them."""
        return self.dp % self.ep != 0

    @property
    def ep_of_dp(self) -> int:
        """The part of dp that they are cut over."""
        return self.ep // self.cp if self.ep_over_cp else self.ep


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters beside frozen weights; see lora.py."""

    rank: int = 8
    alpha: float = 16.0
    """What the adapters add is scaled by alpha / rank."""
    where: Literal["attention", "all"] = "attention"
    """Its four matrices; or those of feed-forwards too."""


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
    offload: bool = False
    """AdamW's moments lie in the host's memory, and come for each parameter's step; on Ascend."""
    qk_clip: float = 0.0
    """Heads whose largest attention logit was above this have their queries and keys made smaller after the step, to it;
    0: logits are not watched."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`batch` is the global number of sequences a step, `seq` their length."""

    steps: int = 50
    batch: int = 8
    seq: int = 128
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters, their gradients and what is added up over ranks are float32 in either."""
    micro_batches: int = 1
    """The batch goes through the model in so many parts, whose gradients are added up."""
    batch_ramp: int = 0
    """Over the first so many steps the batch grows, part by part, from one of `micro_batches` to all; 0: it is whole."""
    recompute: bool = False
    """Of each block only the input is kept for the backward, which computes the block again."""
    recompute_gib: float = 0.0
    """With recompute: so much of a rank's memory may hold what is dearest to compute again; see kept.py."""
    qkv_concat: bool | None = None
    """q, k and v are one weight in memory, and w1 and w3; files are the same, see joined.py. null: on a device, if they can
    be."""
    eval_every: int = 0
    """Held-out loss every so many steps, besides start and end; 0: only those two."""
    eval_batches: int = 2
    compile: bool = False
    """On a CPU, the core of attention runs as one piece that keeps no scores, and nobody sees into it; without tp, LoRA and
    recompute SwiGLU does so, too, products of one input, and the head."""
    log_dir: str = "runs/llama"
    check_memory: bool = True
    """A run that cannot fit into its devices by the formula of memory.py is refused before it starts."""
    init_hf: str | None = None
    """Begin with these weights: a Hugging Face folder, whose config.json gives the section `model`; see `hf.py`."""

    def rows_at(self, step: int) -> int:
        """Sequences of the global batch of a step.

        Example:
            >>> from model_zoo.llama.config import TrainConfig
            >>> ramped = TrainConfig(batch=8, micro_batches=4, batch_ramp=6)
            >>> [ramped.rows_at(step) for step in range(8)]
            [2, 2, 4, 4, 6, 6, 8, 8]
        """
        parts = self.micro_batches
        if step < self.batch_ramp:
            parts = 1 + step * (parts - 1) // self.batch_ramp
        return self.batch // self.micro_batches * parts


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When a run saves, and where it goes on; see docs/checkpoints.md."""

    dir: str | None = None
    """null: `checkpoints` in train.log_dir."""
    interval: int = 0
    """Save after each so many steps, and after the last; 0: never."""
    resume: str | None = None
    """`latest`: go on from the last checkpoint in dir, if there is one. Or the folder of one."""
    keep_last: int = 2
    async_save: bool = False
    """The step goes on while files are written."""
    on_sigterm: bool = False
    """On SIGTERM save after the step at work, and end."""


@dataclass(frozen=True, slots=True)
class Config:
    """The tree; section names are the prefixes of the command line."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


def checkpoint_folder(cfg: Config, log_dir: Path | None = None) -> Path:
    """Where a run saves. `log_dir`: where the run is, if it is not where it was."""
    return Path(cfg.checkpoint.dir or (log_dir or Path(cfg.train.log_dir)) / "checkpoints")


def joins(cfg: Config, on_device: bool = True) -> bool:
    """Whether weights that read the same input are one: as train.qkv_concat says."""
    asked = cfg.train.qkv_concat
    return on_device and not _apart(cfg) if asked is None else asked


def _apart(cfg: Config) -> str:
    """What keeps weights from being one, or nothing."""
    m, p = cfg.model, cfg.parallel
    widths = {"model.ffn_dim": m.ffn_dim}
    if m.experts is not None:
        widths["the shared experts' width"] = m.experts.shared * (m.experts.width or m.ffn_dim)
    uneven = [f"{name} = {n} is no multiple of parallel.tp = {p.tp}" for name, n in widths.items() if n % p.tp]
    return "lora is set" if cfg.lora is not None else next(iter(uneven), "")


def mesh_axes(p: ParallelConfig) -> dict[str, int]:
    """Names and sizes of the mesh's axes, the outermost first."""
    axes = {"pp": p.pp, "copies": p.hsdp, "dp": p.dp // p.hsdp // p.ep_of_dp, "ep": p.ep_of_dp,
            "cp": p.cp // p.ulysses, "ulysses": p.ulysses, "tp": p.tp}
    return {name: n for name, n in axes.items() if n > 1 or name in ("dp", "tp")}


VEE = ("zbv", "dualpipev")  # schedules in which rank r has the stages r and 2 pp - 1 - r
# Of every number in the tree the least and the greatest value; NaN is in no range. The greatest keep checks and sums quick.
RANGES: dict[str, tuple[float, float]] = {
    **MODEL_RANGES,
    "data.max_bytes": (1, 2 ** 40), "data.held_out_every": COUNT, "parallel.dp": (1, 2 ** 20), "parallel.tp": (1, 2 ** 20),
    "parallel.hsdp": (1, 2 ** 20), "parallel.pp": (1, 2 ** 16), "parallel.pp_stages_per_rank": (1, 2 ** 16),
    "parallel.cp": (1, 2 ** 20), "parallel.ep": (1, 2 ** 16), "parallel.ulysses": (1, 2 ** 20),
    "lora.rank": (1, 2 ** 16), "lora.alpha": (0, 1e6),
    "optim.lr": (0, 1e3), "optim.betas": (0, 1 - 1e-9), "optim.eps": (1e-30, 1), "optim.weight_decay": (0, 1e3),
    "optim.warmup": (0, 2 ** 53), "optim.min_lr_ratio": (0, 1), "optim.clip_norm": (0, 1e9),
    "optim.qk_clip": (0, 1e9),
    "train.steps": (0, 2 ** 53), "train.batch": COUNT, "train.seq": COUNT, "train.seed": (0, 2 ** 32 - 1),
    "train.recompute_gib": (0, 2 ** 20), "train.micro_batches": COUNT, "train.batch_ramp": (0, 2 ** 53),
    "checkpoint.interval": (0, 2 ** 53), "checkpoint.keep_last": COUNT,
    "train.eval_every": (0, 2 ** 53), "train.eval_batches": COUNT,
    **WATCH_RANGES,
}


def check(cfg: Config, world: int) -> None:
    """Raises `ConfigError` for the first thing in `cfg` that cannot run on `world` workers."""
    check_ranges(cfg)
    check_model(cfg.model)
    _check_degrees(cfg, world)
    _check_pipeline(cfg)
    _check_context(cfg)
    _check_latent(cfg)
    _check_logits(cfg)
    if cfg.train.qkv_concat and (why := _apart(cfg)):
        raise ConfigError("For the configuration, train.qkv_concat cannot make weights one.", why,
                          "A tensor-parallel rank has the same part of each, and adapters are of single weights.",
                          ["--train.qkv_concat false", "no --train.qkv_concat"])
    if cfg.parallel.tp_overlap != 1 and (missing := [text for text, there in (
            ("parallel.sequence_parallel is false", not cfg.parallel.sequence_parallel), ("lora is set", cfg.lora),
            ("model.latent is set", cfg.model.latent), ("model.experts is set", cfg.model.experts)) if there]):
        raise ConfigError("For the configuration, parallel.tp_overlap has nothing to overlap.", ", ".join(missing),
                          "It hides what sequence parallelism gathers and scatters around a dense block's own matrices.",
                          ["--parallel.tp_overlap 1", "--parallel.sequence_parallel true"])
    if cfg.train.recompute_gib and (missing := [text for text, there in (
            ("train.recompute is false", not cfg.train.recompute), ("lora is set", cfg.lora),
            ("model.latent is set", cfg.model.latent), ("parallel.tp_overlap is not 1", cfg.parallel.tp_overlap != 1))
            if there]):
        raise ConfigError("For the configuration, train.recompute_gib keeps nothing.", ", ".join(missing),
                          "It is for results of the products and of attention in recomputed blocks of the model's own.",
                          ["--train.recompute_gib 0", "--train.recompute true"])
    if cfg.checkpoint.on_sigterm and not cfg.checkpoint.interval:
        raise ConfigError("For the configuration, checkpoint.on_sigterm is set, and checkpoint.interval is 0.", "",
                          "A run that never saves does not on SIGTERM either.", "--checkpoint.interval 100")
    if cfg.train.batch_ramp and (cfg.train.micro_batches == 1 or cfg.parallel.pp > 1):
        raise ConfigError("For the configuration, train.batch_ramp has nothing to grow by.",
                          f"train.micro_batches = {cfg.train.micro_batches}, parallel.pp = {cfg.parallel.pp}",
                          "The batch grows by micro-batches, of which a pipeline's order has always as many.",
                          ["--parallel.pp 1" if cfg.parallel.pp > 1 else "--train.micro_batches 4", "--train.batch_ramp 0"])
    shares = cfg.parallel.dp * cfg.train.micro_batches
    if cfg.train.batch % shares:
        raise ConfigError(f"For the configuration, train.batch = {cfg.train.batch} cannot be shared out over "
                          f"dp = {cfg.parallel.dp}" + (f" and {cfg.train.micro_batches} micro-batches."
                                                       if cfg.train.micro_batches > 1 else "."),
                          f"train.batch = {cfg.train.batch}, parallel.dp = {cfg.parallel.dp}, "
                          f"train.micro_batches = {cfg.train.micro_batches}",
                          "Every data-parallel rank takes the same number of sequences, in each micro-batch.",
                          f"--train.batch {-(-cfg.train.batch // shares) * shares}")


def check_ranges(cfg: Config) -> None:
    """Raises `ConfigError` for the first number that is out of its range, or text that cannot be a path."""
    for key, (least, most) in RANGES.items():
        node: Any = cfg
        for name in key.split("."):
            node = getattr(node, name, None)  # rope_scaling and experts may be left out
        for value in node if isinstance(node, tuple) else () if node is None else (node,):
            if not least <= value <= most:
                raise ConfigError(f"For the configuration, {key} = {value} is out of range.", f"{key} = {node}",
                                  f"{key} is at least {least} and at most {most}.", f"--{key} with a number in this range")
    for key, path in (("data.path", cfg.data.path or ""), ("data.tokenizer", cfg.data.tokenizer or ""),
                      ("train.log_dir", cfg.train.log_dir),
                      ("train.init_hf", cfg.train.init_hf or ""), ("checkpoint.dir", cfg.checkpoint.dir or ""),
                      ("checkpoint.resume", cfg.checkpoint.resume or "")):
        if "\0" in path or len(path.encode(errors="replace")) > 4000 or \
                max(len(part.encode(errors="replace")) for part in path.split("/")) > 255:
            raise ConfigError(f"For the configuration, {key} cannot be a path.", f"{key} = {path[:60]!r}...",
                              "A path has at most 4000 bytes, 255 between two slashes, and no zero byte.",
                              f"--{key} with a path")


def _check_degrees(cfg: Config, world: int) -> None:
    p, m = cfg.parallel, cfg.model
    tp_ok = [t for t in divisors(m.n_kv_heads) if m.n_heads % t == 0]
    made = p.dp * p.cp * p.tp * p.pp
    if made != world:
        pp = p.pp if world % p.pp == 0 else 1
        cp = p.cp if world // pp % p.cp == 0 else 1
        fits = [f"dp={world // (t * pp * cp)} tp={t}" + f" cp={cp}" * (p.cp > 1) + f" pp={pp}" * (p.pp > 1)
                for t in tp_ok if world % (t * pp * cp) == 0]
        raise ConfigError(
            f"For the configuration, the parallel degrees make {made} ranks but {world} "
            f"{'workers run' if world != 1 else 'worker runs'}.",
            f"parallel.dp = {p.dp} x parallel.tp = {p.tp}" + f" x parallel.cp = {p.cp}" * (p.cp > 1) +
            f" x parallel.pp = {p.pp}" * (p.pp > 1) +
            f" = {made}, world size = {world}",
            "The degrees of the mesh axes multiply to the number of workers.",
            [f"with {world} {'workers' if world != 1 else 'worker'}: " + ", ".join(fits),
             f"start {made} workers: launch.py --workers {made}, or "
             f"msrun --worker_num={made} --local_worker_num={made}"])
    if p.dp % p.hsdp or (p.hsdp > 1 and not p.fsdp) or (p.fsdp and p.zero1):
        raise ConfigError("For the configuration, the ways of cutting parameters over dp do not fit each other.",
                          f"parallel.dp = {p.dp}, fsdp = {p.fsdp}, hsdp = {p.hsdp}, zero1 = {p.zero1}",
                          "hsdp divides dp and goes with fsdp; fsdp and zero1 exclude each other.",
                          ["--parallel.fsdp true", f"--parallel.hsdp with one of {divisors(p.dp)}", "--parallel.hsdp 1"])
    count = m.experts.count if m.experts is not None else 0
    fits = [n for n in sorted({*divisors(p.dp), *(n * p.cp for n in divisors(p.dp))}) if n <= max(count, 1)]
    if p.ep > 1 and (p.ep not in fits or p.hsdp > 1):
        raise ConfigError("For the configuration, experts cannot be cut like this.",
                          f"parallel.ep = {p.ep}, dp = {p.dp}, hsdp = {p.hsdp}, cp = {p.cp}, {count} experts",
                          "ep divides dp, or is cp times such a number; each of its ranks has an expert; hsdp does not go "
                          "with it yet.", [f"--parallel.ep with one of {fits}", "--parallel.hsdp 1"])
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


def _check_pipeline(cfg: Config) -> None:
    p, m, t = cfg.parallel, cfg.model, cfg.train
    several, degree = p.pp_stages_per_rank > 1, f"parallel.pp = {p.pp}, parallel.pp_schedule = {p.pp_schedule}"
    if p.pp == 1:
        if several or p.pp_split is not None:
            raise ConfigError("For the configuration, stages of a pipeline are described, and there is none.",
                              f"{degree}, pp_stages_per_rank = {p.pp_stages_per_rank}, pp_split = {p.pp_split}",
                              "parallel.pp is the number of ranks that a pipeline goes through.", "--parallel.pp 2")
        return
    needed = {"interleaved": max(2, p.pp_stages_per_rank), **dict.fromkeys(VEE, 2)}.get(p.pp_schedule, 1)
    if p.pp_stages_per_rank != needed:
        raise ConfigError("For the configuration, the schedule is not for so many stages a rank.",
                          f"{degree}, parallel.pp_stages_per_rank = {p.pp_stages_per_rank}",
                          "zbv and dualpipev are for two, interleaved is for two or more; the others are for one.",
                          [f"--parallel.pp_stages_per_rank {needed}",
                           "--parallel.pp_schedule " + ("interleaved" if several else "1f1b")])
    if p.pp_schedule == "interleaved" and t.micro_batches % p.pp:
        more = -(-t.micro_batches // p.pp) * p.pp
        raise ConfigError(f"For the configuration, {t.micro_batches} micro-batches do not go through {p.pp} ranks in turn.",
                          f"{degree}, train.micro_batches = {t.micro_batches}",
                          "interleaved takes micro-batches in rounds of parallel.pp.",
                          [f"--train.micro_batches {more}", "--parallel.pp_schedule 1f1b --parallel.pp_stages_per_rank 1"])
    if p.stages > m.n_layers + 2:
        raise ConfigError(f"For the configuration, {p.stages} stages are more than the model can be cut into.",
                          f"{degree}, parallel.pp_stages_per_rank = {p.pp_stages_per_rank}, model.n_layers = {m.n_layers}",
                          "A stage has a layer at least, but for the embedding and the head.",
                          f"--parallel.pp with at most {(m.n_layers + 2) // p.pp_stages_per_rank}")
    cells = m.cells
    at = [cells.index(path) if path in cells else -1 for path in p.pp_split or ()]
    if p.pp_split is not None and (len(at) != p.stages - 1 or sorted({0, *at}) != [0, *at]):
        raise ConfigError("For the configuration, parallel.pp_split does not say where stages begin.",
                          f"{list(p.pp_split)} for {p.stages} stages",
                          f"It names {p.stages - 1} different cells in their order: {', '.join(cells[1:3])} ... output.",
                          "leave it out: the stages are balanced then")


def _check_context(cfg: Config) -> None:
    p, m = cfg.parallel, cfg.model
    degree = f"parallel.cp = {p.cp}, parallel.ulysses = {p.ulysses}, parallel.tp = {p.tp}"
    fits = [u for u in divisors(p.cp) if m.n_kv_heads % (u * p.tp) == 0]
    if p.ulysses not in fits:
        raise ConfigError(f"For the configuration, parallel.ulysses = {p.ulysses} cannot take heads for tokens.",
                          f"{degree}, model.n_kv_heads = {m.n_kv_heads}",
                          "It divides cp, and each of its ranks has whole key heads of those of a tp rank.",
                          f"--parallel.ulysses with one of {fits}; over the rest of cp keys are fetched")
    if p.cp == 1:
        return
    for is_set, key, rule, fix in (
            (p.hsdp > 1, "parallel.hsdp", "Parameters are whole, or cut, over dp and cp together.", "--parallel.hsdp 1"),
            (cfg.train.compile, "train.compile", "What is compiled is attention of whole rows.", "--train.compile false")):
        if is_set:
            raise ConfigError(f"For the configuration, {key} does not go with context parallelism.", degree, rule, fix)


def _check_logits(cfg: Config) -> None:
    if not cfg.optim.qk_clip:
        return
    m, rule = cfg.model, "Logits are products of what wq and wk make of whole rows, and of nothing else."
    for is_set, key, fix in (
            (m.qk_norm, "model.qk_norm", "--optim.qk_clip 0: norms bound the logits"),
            (m.qkv_bias, "model.qkv_bias", "--optim.qk_clip 0"), (m.latent is not None, "model.latent", "--optim.qk_clip 0"),
            (m.sliding_window is not None, "model.sliding_window", "--optim.qk_clip 0"),
            (cfg.lora is not None, "lora", "without the section lora"),
            (cfg.data.documents, "data.documents", "--data.documents false"),
            (cfg.parallel.cp > 1, "parallel.cp", "--parallel.cp 1"),
            (cfg.parallel.pp > 1, "parallel.pp", "--parallel.pp 1")):
        if is_set:
            raise ConfigError(f"For the configuration, {key} does not go with optim.qk_clip.",
                              f"optim.qk_clip = {cfg.optim.qk_clip}", rule, fix)


def _check_latent(cfg: Config) -> None:
    if cfg.model.latent is None:
        return
    for is_set, key, rule, fix in (
            (cfg.parallel.cp > 1, "parallel.cp", "Keys that all heads share are not fetched yet.", "--parallel.cp 1"),
            (cfg.lora is not None, "lora", "Its matrices are not those that adapters go to.", "without the section lora"),
            (cfg.train.compile, "train.compile", "What is compiled is attention of grouped queries.",
             "--train.compile false")):
        if is_set:
            raise ConfigError(f"For the configuration, {key} does not go with latent attention.",
                              f"model.latent = {cfg.model.latent}", rule, fix)
