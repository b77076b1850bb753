# SPDX-License-Identifier: Apache-2.0
"""What is measured, in the order in which it is: pieces, each of which is done or not.

Pieces of one launch (same number of hosts and of slots, same environment, same name) share one msrun. Layouts of the
Llama have a launch each, since one that runs out of memory ends its job. Sizes are the published models'.
"""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError

BENCHMARKS = ("startup", "collectives", "compute", "dispatch", "llama", "scaling", "checkpoint")
RECIPE = "model_zoo.llama.tools.bench_step"  # no part of the wheel
OF_RECIPE = {"llama", "scaling"}
PRODUCTS = ("float32", "bfloat16", "float16")  # dtypes whose products are measured


def recipe() -> list[str]:
    """The folder that has the recipe, if Python finds it."""
    try:
        found = importlib.util.find_spec(RECIPE)
    except ModuleNotFoundError:  # of what it is in
        found = None
    return [str(Path(found.origin).resolve().parents[3])] if found and found.origin else []


def home(benchmark: str) -> str:
    """The module whose `run` measures."""
    return RECIPE if benchmark in OF_RECIPE else f"{__package__}.{benchmark}"


def chosen(only: set[str] | None) -> set[str]:
    """What is measured: all that can be here, if nothing was asked for by name.

    Raises:
        ConfigError: what was asked for needs the recipe, which is not here.
    """
    without = set() if recipe() else OF_RECIPE
    if missing := sorted((only or set()) & without):
        rest = ",".join(x for x in BENCHMARKS if x not in without and (x in (only or ()) or not set(only or ()) - without))
        raise ConfigError(f"For 'bench', {' and '.join(missing)} cannot be measured.",
                          f"--only {','.join(missing)}; there is no module {RECIPE}",
                          "A step of a Llama is the recipe's, which a checkout of ms_dtensor has and a wheel has not.",
                          ["say the command in a checkout, or with it on PYTHONPATH", f"--only {rest}"])
    return only or set(BENCHMARKS) - without


@dataclass(frozen=True)
class Piece:
    """`name` is its file's; `limit` its seconds."""

    name: str
    benchmark: str
    hosts: int
    slots: int
    launch: str
    limit: float
    options: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)

    def key(self) -> tuple:
        return self.launch, self.hosts, self.slots, tuple(sorted(self.env.items()))


_LLAMA3 = {"rope_theta": 500000.0, "vocab_size": 128256, "n_kv_heads": 8,
           "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}}
MODELS: dict[str, dict[str, Any]] = {
    "toy": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 256},
    "LLaMA2-7B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "ffn_dim": 11008, "vocab_size": 32000,
                  "rope_theta": 10000.0},
    "LLaMA3.1-8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 14336, **_LLAMA3},
    "LLaMA3.1-70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim": 28672, **_LLAMA3},
}
LEAST_RANKS = {"LLaMA2-7B": 8, "LLaMA3.1-8B": 8, "LLaMA3.1-70B": 64}  # on fewer the states alone fill 64 GB each


def layouts(ranks: int, slots: int, kv_heads: int) -> list[tuple[dict, int, bool]]:
    """(layout, micro-batches, recomputation): tensor parallel within a node, the rest data parallel and cut over it."""
    found = []
    for tp in (1, 2, 4, 8):
        if ranks % tp or slots % tp or kv_heads % tp:
            continue
        dp = ranks // tp
        one = {"dp": dp, "tp": tp, "fsdp": dp > 1, "sequence_parallel": tp > 1}
        found += [(one, 1, False), (one, 4, True)]
        if dp > slots // tp > 1:
            found.append(({**one, "hsdp": dp // (slots // tp)}, 4, True))
    return found


def label(layout: dict, micro: int, recompute: bool) -> str:
    words = [f"dp{layout.get('dp', 1)}", f"tp{layout.get('tp', 1)}", *(short for key, short in (
        ("fsdp", "fsdp"), ("sequence_parallel", "sp"), ("zero1", "zero1")) if layout.get(key))]
    words += [f"hsdp{layout['hsdp']}"] if layout.get("hsdp", 1) > 1 else []
    return "-".join([*words, *([f"acc{micro}"] if micro > 1 else []), *(["recompute"] if recompute else [])])


def llama(name: str, hosts: int, slots: int, layout: dict, train: dict, steps: int, limit: float, launch: str = "",
          scaling: str | None = None) -> Piece:
    way = label(layout, train.get("micro_batches", 1), train.get("recompute", False))
    piece = f"{scaling or 'llama'}_{name}_{hosts * slots}_{way}"
    return Piece(piece, "llama", hosts, slots, launch or piece, limit,
                 {"name": name, "model": MODELS[name], "layout": layout, "train": train, "steps": steps, "scaling": scaling})


def full(hosts: int, slots: int, out: str, algorithms: list[str]) -> list[Piece]:
    """For devices. How long it takes nobody knows yet: the budget cuts it, and what is quick or wanted most comes first."""
    ranks, sizes = hosts * slots, {"least": 2**10, "most": 2**30, "factor": 4, "times": 20, "dtypes": ["float", "bfloat16"]}
    pieces = [Piece(f"startup_alone_{ranks}", "startup", hosts, slots, "alone", 600, {}),
              Piece("collectives", "collectives", hosts, slots, "first", 900, sizes)]
    for tp in (1, 8):
        pieces.append(Piece(f"compute_tp{tp}", "compute", hosts, slots, "first", 600, {
            "model": {k: v for k, v in MODELS["LLaMA3.1-8B"].items() if k != "rope_scaling"}, "tokens": 8192,
            "seqs": [4096, 8192], "tp": tp, "dtypes": ["bfloat16", "float32"], "times": 20}))
    pieces.append(Piece("dispatch", "dispatch", hosts, slots, "first", 300, {"rounds": 40, "calls": 100}))
    pieces += with_algorithms(pieces[1], algorithms)
    for name, seq in (("LLaMA2-7B", 4096), ("LLaMA3.1-8B", 8192), ("LLaMA3.1-70B", 8192)):
        if ranks < LEAST_RANKS[name]:
            continue
        for layout, micro, recompute in layouts(ranks, slots, MODELS[name]["n_kv_heads"]):
            train = {"batch": layout["dp"] * micro, "seq": seq, "dtype": "bfloat16", "micro_batches": micro,
                     "recompute": recompute}
            pieces.append(llama(name, hosts, slots, layout, train, 10, 600))
    pieces += scaling("LLaMA3.1-8B", hosts, slots, 8192, "bfloat16", 8, 10, 600)
    folder = f"{out}/checkpoint_files"
    files = {"mib": 2048, "folder": folder, "rounds": 3}
    return [*pieces, Piece("checkpoint", "checkpoint", hosts, slots, "checkpoint", 900, files)]


def with_algorithms(collectives: Piece, algorithms: list[str]) -> list[Piece]:
    """The same with each HCCL_ALGO, which HCCL reads when it starts."""
    return [replace(collectives, name=f"{collectives.name}_algorithm_{i}", launch=f"algorithm_{i}", env={"HCCL_ALGO": a})
            for i, a in enumerate(algorithms)]


def scaling(name: str, hosts: int, slots: int, seq: int, dtype: str, least: int, steps: int, limit: float) -> list[Piece]:
    """Weak (a sequence a rank) and strong (as many as there are ranks), on a quarter of the ranks, half, all."""
    worlds: list[tuple[int, int]] = []
    most = hosts * slots
    for part in (4, 2, 1):
        ranks = most // part
        if ranks >= least and most % part == 0 and (ranks <= slots or ranks % slots == 0):
            worlds.append((max(1, ranks // slots), min(ranks, slots)))
    pieces = []
    for h, s in worlds if len(worlds) > 1 else ():
        for kind in ("weak", "strong"):
            layout = {"dp": h * s, "fsdp": h * s > 1}
            train = {"batch": h * s if kind == "weak" else most, "seq": seq, "dtype": dtype, "recompute": True}
            pieces.append(llama(name, h, s, layout, train, steps, limit, f"scaling_{h * s}", kind))
    return pieces


def toy(hosts: int, slots: int, out: str, algorithms: list[str]) -> list[Piece]:
    """The same on CPUs, in a minute; the figures say that the scripts work, and nothing of a cluster."""
    ranks = hosts * slots
    train = {"batch": 2 * ranks, "seq": 16}
    ways = [({"dp": ranks}, {}), ({"tp": ranks, "sequence_parallel": True}, {}), ({"dp": ranks, "fsdp": True}, {}),
            ({"dp": ranks, "fsdp": True}, {"micro_batches": 2, "recompute": True})] if ranks > 1 else [({}, {})]
    sizes = {"least": 2**10, "most": 2**14, "factor": 16, "times": 3, "dtypes": ["float"]}
    pieces = [
        Piece(f"startup_first_{ranks}", "startup", hosts, slots, "first", 120, {}),
        Piece("collectives", "collectives", hosts, slots, "first", 120, sizes),
        Piece("compute_tp1", "compute", hosts, slots, "first", 120, {
            "model": MODELS["toy"], "tokens": 32, "seqs": [32], "tp": 1, "dtypes": ["float32"], "times": 2}),
        Piece("dispatch", "dispatch", hosts, slots, "first", 120,
              {"rounds": 2, "calls": 4, "rows": ["add", "matmul", "to_local"]}),
        *(llama("toy", hosts, slots, layout, {**train, **more}, 2, 120, "first") for layout, more in ways),
        Piece("checkpoint", "checkpoint", hosts, slots, "first", 120,
              {"mib": 1, "folder": f"{out}/checkpoint_files", "rounds": 1}),
    ]
    grown = scaling("toy", hosts, slots, 16, "float32", 1, 2, 120)
    return [*pieces, *with_algorithms(pieces[1], algorithms), *(replace(p, launch="first") for p in grown)]


SUITES = {"full": full, "toy": toy}
DEVICES = "/dev/davinci_manager", "/dev/nvidiactl"  # files of their drivers


def default() -> str:
    """The suite of this machine: what devices measure in an hour would take a CPU days, and more memory than it has."""
    return "full" if any(Path(driver).exists() for driver in DEVICES) else "toy"


def plan(suite: str, hosts: int, slots: int, out: str, only: set[str], algorithms: list[str]) -> list[Piece]:
    """The pieces of the benchmarks asked for."""
    def kind(piece: Piece) -> str:
        return "scaling" if piece.options.get("scaling") else piece.benchmark
    return [p for p in SUITES[suite](hosts, slots, out, algorithms) if kind(p) in only]
