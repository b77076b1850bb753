# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's weights in and out, on two real ranks: logits and tensors against `transformers`; prints JSON.

    python model_zoo/llama/tools/check_hf.py [--kinds llama2,qwen3] [--by hand]

Small models with random weights are saved in many files by `transformers` (`--by hand`: by the `safetensors` package alone,
with our own logits of one process), loaded as on one device, with tp=2, with fsdp=2 and, of experts, with ep=2, run, saved
from there, and loaded again by `transformers`. Exits non-zero if anything differs by more than it may.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama import hf  # noqa: E402
from model_zoo.llama.config import ParallelConfig  # noqa: E402
from model_zoo.llama.launch import Run, first_failure  # noqa: E402
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile  # noqa: E402
from ms_dtensor.tools.ranks import guarded, rank, start_device, world_size  # noqa: E402

TOLERANCE = 1e-5  # absolute, of logits of order 5 in float32
VOCAB, LENGTH = 259, 18  # a vocabulary that two does not divide
SHARD = 40_000  # bytes of a file: fifteen or more of them
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
KINDS = {
    "llama2": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama_linear": {"model_type": "llama", "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 24, "num_experts": 5, "num_experts_per_tok": 3,
                  "norm_topk_prob": True, "moe_intermediate_size": 40, "mlp_only_layers": [0]},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", "num_key_value_heads": 8, "num_hidden_layers": 2,
                    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                    "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 40, "kv_lora_rank": 20,
                    "q_lora_rank": 28, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 12,
                    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 16}},
}
KINDS["deepseek_v3_40"] = KINDS["deepseek_v3"] | {"rope_scaling": KINDS["deepseek_v3"]["rope_scaling"] | {
    "factor": 40.0, "original_max_position_embeddings": 4096}}
"""As published: scores times 1.87. Weights of the size of the others' would make them so large that `transformers` itself is
1.3e-5 from its own float64, and we are 1.0e-5; so q's are smaller, and scores those of the other kinds."""
LAYOUTS = {"one device": None, "tp=2": ParallelConfig(tp=2), "fsdp=2": ParallelConfig(dp=2, fsdp=True)}
OF_EXPERTS = {"ep=2": ParallelConfig(dp=2, ep=2)}
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "deepseek_v3_40")


def layouts_of(kind: str) -> dict[str, ParallelConfig | None]:
    return LAYOUTS | OF_EXPERTS if kind in MIXTURES else LAYOUTS


def config_of(kind: str) -> dict:
    return {**SIZES, **KINDS[kind]}


def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)


def drawn(name: str, shape, kind: str) -> np.ndarray:
    """Asymmetric random values, far from those of an initialisation."""
    draw = np.random.default_rng(sum(map(ord, name)) * 7919 + len(name))
    values = draw.standard_normal(shape) * 0.15 + (1.0 if "norm" in name else 0.03)
    return (values / 1.87 if kind == "deepseek_v3_40" and "q_b_proj" in name else values).astype(np.float32)


# -- the folders to begin with -----------------------------------------------------------------------------------------
def save_by_transformers(kind: str, folder: Path) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**config_of(kind))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        biases = ((name, b) for name, b in model.named_buffers() if name.endswith("correction_bias"))
        for name, p in (*model.named_parameters(), *biases):
            p.copy_(torch.from_numpy(drawn(name, tuple(p.shape), kind)))
        logits = model(torch.from_numpy(ids()).long()).logits
    model.save_pretrained(folder, max_shard_size=SHARD)
    np.save(folder / "logits.npy", logits.numpy().reshape(-1, VOCAB))


def save_by_hand(kind: str, folder: Path) -> None:
    """As `transformers` would, by the `safetensors` package; logits are our own, of plain tensors in one process."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(kind)))
    tensors = {name: drawn(name, shape, kind) for name, shape in their_shapes(kind).items()}
    names = sorted(tensors)
    files = {f"model-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
             "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    from mindspore import Tensor

    start_device()
    model = module_of(kind, folder)
    hf.load(model, folder)
    np.save(folder / "logits.npy", logits_of(model, Tensor(ids())).asnumpy())


def their_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    from ms_dtensor.checkpoint.key_map import translate

    def row(shape, stacked):
        return shape[1:] if stacked else shape
    module, shapes = module_of(kind), {}
    key_map = hf.names_of(module)
    for name, p in module.parameters_and_names():  # of what is tied, the first name
        there = translate(name, key_map, p.shape)
        shapes |= dict.fromkeys(there.names, row(tuple(p.shape), there.stacked))
    return shapes


def module_of(kind: str, folder: Path | None = None):
    """The model, of a folder's config."""
    from model_zoo.llama.model import Llama

    return Llama(hf.from_hf(config_of(kind)) if folder is None else hf.read_config(folder))


def logits_of(model, tokens):
    out = model(tokens)
    return out[0] if isinstance(out, tuple) else out


# -- on ranks ----------------------------------------------------------------------------------------------------------
def on_ranks(folder: Path) -> None:
    device = start_device()
    from mindspore import Tensor

    from model_zoo.llama.parallelize import make_mesh, parallelize
    from ms_dtensor import DTensor, Shard

    read = SafetensorsFile.read
    count = [0]

    def counting(self, *args):
        part = read(self, *args)
        count[0] += part.size * 4
        return part
    SafetensorsFile.read = counting
    results: dict = {}
    for kind in sorted(p.name for p in folder.iterdir() if (p / "config.json").exists()):
        for layout, cfg in layouts_of(kind).items():
            out, source = {}, folder / kind
            module, count[0] = module_of(kind, source), 0
            rows = Tensor(ids())
            if cfg is not None:
                mesh = make_mesh(device, cfg)
                parallelize(module, mesh, cfg)
                own = slice(None) if layout == "tp=2" else slice(rank(), rank() + 1)
                placed = {"tp=2": {}, "fsdp=2": {"dp": Shard(0)}, "ep=2": {"ep": Shard(0)}}[layout]
                rows = DTensor.from_local(Tensor(ids()[own]), mesh, placed)
            hf.load(module, source)
            logits = logits_of(module, rows)
            logits = (logits if cfg is None else logits.full_tensor()).asnumpy()
            out["logits_off"] = float(np.abs(logits - np.load(source / "logits.npy")).max())
            out["read_over_shards"] = count[0] / sum(
                4 * int(np.prod(getattr(p, "local_shape", p.shape))) for p in module.get_parameters())
            target = source / f"saved {layout}"
            hf.save(module, hf.read_config(source), target, max_positions=128, max_shard_size=SHARD)
            results[f"{kind} {layout}"] = out
    (folder / f"rank{rank()}.json").write_text(json.dumps(results))


# -- and back ----------------------------------------------------------------------------------------------------------
def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's files, by the `safetensors` package."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def same_for_transformers(folder: Path, saved: Path) -> bool:
    """Whether `transformers` loads from `saved` what it saved itself: every entry of its state, bit for bit."""
    import torch
    import transformers

    one, other = (transformers.AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, saved))
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def check(folder: Path, kinds: list[str], by: str) -> dict:
    """The results by kind and layout; what `bad` has is why it is not right."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        (save_by_hand if by == "hand" else save_by_transformers)(kind, folder / kind)
    logs = folder / "logs"
    logs.mkdir()
    if Run(Path(__file__).resolve(), 2, logs, ["--folder", str(folder)], show=False).wait():
        raise RuntimeError(first_failure(logs))
    ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]
    results = {}
    for name, first in ranks[0].items():
        kind, layout = name.split(" ", 1)
        saved = folder / kind / f"saved {layout}"
        want, got = tensors_of(folder / kind), tensors_of(saved)
        out = {key: max(r[name][key] for r in ranks) for key in first}
        out["files"] = len(list(saved.glob("*.safetensors")))
        out["same_tensors"] = set(want) == set(got) and all(want[n].tobytes() == got[n].tobytes() for n in want)
        if by == "transformers":
            out["same_for_transformers"] = same_for_transformers(folder / kind, saved)
        bad = [key for key, value in out.items() if value is False]
        bad += ["logits_off"] * (not out.get("logits_off", 0) <= TOLERANCE) + ["read"] * (out["read_over_shards"] > 1)
        results[name] = out | {"bad": bad}
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--by", choices=["transformers", "hand"], default="transformers")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    if world_size() > 1:
        return guarded(lambda: on_ranks(options.folder))
    results = check(Path(options.folder or tempfile.mkdtemp(prefix="ms_dtensor_hf_")), options.kinds.split(","), options.by)
    print(json.dumps(results, indent=1))
    return int(any(r["bad"] for r in results.values()))


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.exit(main())
