# SPDX-License-Identifier: Apache-2.0
"""Continues a text: sampling with a cache of keys and values, on one process, with heads cut over tp, or in stages.

    python model_zoo/llama/generate.py --from runs/quickstart --prompt "def " --tokens 200 --temperature 0.8
    msrun --worker_num=2 --local_worker_num=2 --join=True model_zoo/llama/generate.py --from Qwen3-0.6B --prompt "Once"

`--from` is train.log_dir of a run that saved, one of its checkpoints, or a Hugging Face folder. All ranks draw the same
tokens: logits are gathered bit by bit alike, and a draw is a function of (seed, position).

Text becomes tokens by --tokenizer, else by that of the run's data (data.tokenizer, or what lies beside its token files),
else by the tokenizer.json beside the weights, else as bytes: in generate.py, evaluate.py and export.py alike.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import script
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import rank, start_device, world_size


def chosen(logits: np.ndarray, draw: np.random.Generator, temperature: float = 0.0, top_k: int = 0,
           top_p: float = 1.0) -> np.ndarray:
    """i32[b] of logits [b, vocab]: the largest at temperature 0, else drawn from softmax(logits / temperature).

    Args:
        logits: any floats.
        draw: the stream of random numbers.
        temperature: below 1 likely tokens are likelier yet.
        top_k: of the so many likeliest only; 0: of all.
        top_p: of the fewest that together have this probability, after `top_k`.

    Example:
        >>> import numpy as np
        >>> from model_zoo.llama.generate import chosen
        >>> chosen(np.array([[0.0, 3.0, 1.0]]), np.random.default_rng(0)).tolist()
        [1]
    """
    if temperature == 0.0:
        return logits.argmax(-1).astype(np.int32)
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, -1, kind="stable")
    p = np.exp(np.take_along_axis(scaled, order, -1) - scaled.max(-1, keepdims=True))
    if top_k:
        p[:, top_k:] = 0.0
    p /= p.sum(-1, keepdims=True)
    p[p.cumsum(-1) - p >= top_p] = 0.0  # those before it have enough
    p[:, 0] = np.maximum(p[:, 0], np.finfo(np.float64).tiny)
    cumulative = p.cumsum(-1)
    at = (cumulative <= draw.random((len(p), 1)) * cumulative[:, -1:]).sum(-1)
    return np.take_along_axis(order, np.minimum(at, p.shape[1] - 1)[:, None], -1)[:, 0].astype(np.int32)


class CachedAttention:
    """Attention of new tokens over all that there were; plain tensors, of this rank's heads.

    Args:
        cfg: the model's sizes.
    """

    def __init__(self, cfg):
        self.cfg, self.keys, self.values = cfg, None, None

    def __call__(self, q, key, value):
        """q [b, t, h, e], key and value [b, t, k, e] of the next t positions -> [b, t, h, e]."""
        import mindspore as ms
        from mindspore import Tensor, mint, ops

        from model_zoo.llama.rope import angles, score_scale, turn

        (b, t, h, e), k, kind, width = q.shape, key.shape[2], q.dtype, value.shape[3]
        before = 0 if self.keys is None else self.keys.shape[1]
        angle = angles(self.cfg, before + t)[before:, None]
        cos, sin = (Tensor(table.astype(np.float32)) for table in (np.cos(angle), np.sin(angle)))
        pairs = Tensor(turn(self.cfg))

        def turned(x):
            x = x.astype(ms.float32)
            return x * cos + ops.matmul(x, pairs) * sin
        key, value = turned(key), value.astype(ms.float32)
        if before:
            key, value = ops.cat((self.keys, key), 1), ops.cat((self.values, value), 1)
        self.keys, self.values = key, value
        seen = np.arange(before + t) <= np.arange(before, before + t)[:, None]
        if self.cfg.sliding_window is not None:
            seen &= np.arange(before + t) > np.arange(before, before + t)[:, None] - self.cfg.sliding_window
        q = turned(q).transpose(0, 2, 1, 3).reshape(b, k, h // k * t, e)
        scores = ops.matmul(q, key.transpose(0, 2, 3, 1)) * score_scale(self.cfg)
        hidden = Tensor(np.where(np.tile(seen, (h // k, 1)), 0.0, -1e9).astype(np.float32))
        out = ops.matmul(mint.softmax(scores + hidden, -1), value.transpose(0, 2, 1, 3))
        return out.reshape(b, h, t, width).transpose(0, 2, 1, 3).astype(kind)


def with_cache(model, cfg, mesh) -> None:
    """Every attention of a model, or of a pipeline's stages, remembers from here on; call it again for another text."""
    from model_zoo.llama.latent import Latent
    from model_zoo.llama.parallelize import attention_mapped, here

    for layer in here(layer for part in parts(model) for layer in part.layers):
        core = CachedAttention(cfg)
        core = core if cfg.latent is None else Latent(cfg, core)
        layer.attention.core = core if mesh is None else attention_mapped(core, mesh)


def generate(model, cfg, mesh, prompt: np.ndarray, tokens: int, *, temperature: float = 0.0, top_k: int = 0,
             top_p: float = 1.0, seed: int = 0, end: int | None = None) -> np.ndarray:
    """i32[b, t + n]: prompts i32[b, t] of one length and up to `tokens` more; fewer once all rows have had `end`.

    Args:
        model: a Llama, laid out by `parallelize` without sequence parallelism, or plain; or a `Schedule` of one micro-batch
            without a loss, of stages of one. Its attentions become caching ones.
        cfg: its sizes.
        mesh: its mesh, of a pipeline that of this rank's stage, whose rank count along the batch divides b; or None.
        prompt: at least one token a row; every rank gives the same.
        tokens: how many more.
        temperature, top_k, top_p: as for `chosen`.
        seed: of the draws.
        end: the token that ends a text.
    """
    with_cache(model, cfg, mesh)
    ids, new = prompt, prompt
    done = np.zeros(len(prompt), bool)
    for _ in range(tokens):
        logits = last_logits(model, mesh, new)
        draw = np.random.Generator(np.random.Philox(key=[seed, ids.shape[1]]))
        new = chosen(logits, draw, temperature, top_k, top_p)[:, None]
        ids = np.concatenate((ids, new), 1)
        done |= new[:, 0] == (-1 if end is None else end)
        if done.all():
            break
    return ids


def last_logits(model, mesh, ids: np.ndarray) -> np.ndarray:
    """f32[b, vocab] of each row's last token, the same on all ranks."""
    from model_zoo.llama.parallelize import own_rows
    from ms_dtensor import Replicate
    from ms_dtensor.pipeline import Schedule

    def last(out):
        out = (out[0] if isinstance(out, tuple) else out).reshape(*ids.shape, -1)[:, -1]
        return (out if mesh is None else out.redistribute(placements=[Replicate()] * mesh.ndim).to_local()).asnumpy()
    own = own_rows(ids.astype(np.int32), mesh)
    if not isinstance(model, Schedule):
        return last(model(own))
    outs = model.eval(own, length=ids.shape[1])  # None but on the last stage
    group, end = model.group, model.actions.owner[-1]
    return np.asarray(group.broadcast_object(None if outs is None else last(outs[0]), group.ranks[end]))


def parts(model) -> list:
    """The cells of a model that are on this rank: it itself, or its stages."""
    from ms_dtensor.pipeline import Schedule

    return [stage.module for stage in model.stages.values()] if isinstance(model, Schedule) else [model]


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, help="a run's folder, a checkpoint, or Hugging Face's")
    parser.add_argument("--prompt", default="\n", help="what the text begins with")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder; default: see above")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1, help="so many texts")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, help="ranks to a stage of the model; default: as many as divide its heads")
    parser.add_argument("--pp", type=int, default=1, help="stages, one after the other: for what fits no other way")
    o = parser.parse_args(argv)
    if not (o.temperature >= 0 and 0 < o.top_p <= 1 and o.top_k >= 0 and o.tokens >= 1 and o.samples >= 1 and o.prompt):
        raise ConfigError("For 'generate.py', an option is out of range.", " ".join(argv),
                          "temperature >= 0, 0 < top_p <= 1, top_k >= 0, tokens and samples >= 1, a prompt.",
                          "python model_zoo/llama/generate.py --help")
    from model_zoo.llama.data import end_of, find_tokenizer
    from model_zoo.llama.restore import restore, source_config
    from model_zoo.llama.tokens import load_tokens

    tokens = load_tokens(find_tokenizer(o.source, source_config(o.source)[0].data, o.tokenizer))
    cfg, model, mesh, where = restore(o.source, start_device(), world_size(), tp=o.tp, pp=o.pp)
    rows = -(-o.samples // cfg.parallel.dp) * cfg.parallel.dp
    prompt = np.tile(np.array(tokens.encode(o.prompt), np.int32), (rows, 1))
    if prompt.max() >= cfg.model.vocab_size:
        raise ConfigError("For 'generate.py', the tokenizer is not this model's.", f"token {prompt.max()}",
                          f"Ids are below model.vocab_size = {cfg.model.vocab_size}.", "--tokenizer with the model's own")
    if rank() == 0 and prompt.shape[1] + o.tokens > cfg.train.seq and cfg.train.init_hf is None:
        print(f"note: beyond {cfg.train.seq} tokens this model was not trained (train.seq)", file=sys.stderr)
    ids = generate(model, cfg.model, mesh, prompt, o.tokens, temperature=o.temperature, top_k=o.top_k, top_p=o.top_p,
                   seed=o.seed, end=end_of(cfg.data, tokens))
    if rank() == 0:
        print(f"[{where}]", file=sys.stderr)
        print("\n--\n".join(tokens.decode(row.tolist()) for row in ids[:o.samples]))


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
