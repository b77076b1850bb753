# SPDX-License-Identifier: Apache-2.0
"""What recomputed blocks keep: chosen by worth within a budget, counted in dry runs to the byte, and gone after the step."""
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

from model_zoo.llama import kept
from model_zoo.llama.config import Config, ModelConfig, ParallelConfig, TrainConfig, check
from model_zoo.llama.configio import load
from model_zoo.llama.dry import dry_step
from model_zoo.llama.trainer import Trainer
from ms_dtensor.errors import ConfigError

pytestmark = pytest.mark.usefixtures("cpu")
FSDP8 = ["--config", "model_zoo/llama/configs/llama3_8b.yaml", "--parallel.dp", "8", "--parallel.tp", "1",
         "--parallel.sequence_parallel", "false", "--parallel.fsdp", "true", "--train.micro_batches", "1",
         "--train.recompute", "true", "--train.recompute_gib"]
SMALL = ModelConfig(dim=128, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=96, vocab_size=72)


def small(gib: float, **how) -> Config:
    train = TrainConfig(batch=8, seq=16, dtype="bfloat16", recompute=True, recompute_gib=gib)
    return Config(model=SMALL, parallel=ParallelConfig(8, fsdp=True), train=replace(train, **how))


def test_worth_is_operations_by_bytes_and_a_budget_is_never_exceeded():
    cfg = load([*FSDP8, "0", "--train.seq", "8192"], 8)[0]
    worth = {name: one.flops / one.bytes for name, one in kept.results(cfg).items()}
    assert worth.pop("attention") == pytest.approx(4 * 4096.5 * 4096 / (2 * 4096 + 2 * 32 * 8 * 4))
    assert set(worth.values()) == {4096.0}, "of a product the length of its rows"
    before, again = 0, 1.0
    for gib in (0, 0.01, 0.5, 1, 3, 7.9, 12, 21.5, 30, 1000):
        choice = kept.choose(replace(cfg, train=replace(cfg.train, recompute_gib=gib)))
        size = sum(choice.bytes.values())
        assert before <= size <= gib * 2**30 and choice.again <= again
        before, again = size, choice.again
        assert all(0 < count <= 32 for count in choice.layers.values())
    assert again == pytest.approx(0, abs=1e-12) and len(choice.layers) == 4


def test_stages_of_a_pipeline_keep_a_result_in_all_layers_or_in_none():
    cfg = load([*FSDP8, "6", "--parallel.pp", "2", "--parallel.dp", "4", "--train.micro_batches", "2"], 8)[0]
    assert set(kept.choose(cfg).layers.values()) == {32}


@pytest.mark.parametrize("options", [["--train.recompute", "false"], ["--parallel.tp", "2", "--parallel.dp", "4",
                         "--parallel.sequence_parallel", "true", "--parallel.tp_overlap", "4"]])
def test_a_budget_that_keeps_nothing_is_refused(options):
    with pytest.raises(ConfigError, match="recompute_gib keeps nothing"):
        load([*FSDP8, "4", *options], 8)
    check(load([*FSDP8, "0"], 8)[0], 8)


def test_kept_bytes_are_those_of_a_dry_run_and_what_is_kept_does_not_run_again():
    """Of its second step: nothing of the first one's is left, whether Python has looked for cycles or not."""
    peaks, ran, said = [], [], []
    for gib in ("0", "0.33", "10"):
        cfg = load([*FSDP8, gib, "--train.seq", "8192"], 8)[0]
        cfg = replace(cfg, model=replace(cfg.model, n_layers=3))
        with redirect_stdout(StringIO()):
            run = dry_step(cfg, 8, device="Ascend")
        said.append(kept.choose(cfg))
        peaks.append(max(kinds["activations"] for _, kinds in run.memory().over_time()))
        ran.append(Counter(e.op for e in run.events))
    assert said[0].layers == {} and said[1].layers == {"attention": 3, "attention.wqkv": 1}
    more = [p - peaks[0] - sum(one.bytes.values()) for p, one in zip(peaks, said, strict=True)]
    assert more == [0, 6, 6], "of each kernel of attention one more number of two bytes, which nobody reads"
    assert [ran[0]["matmul"] - one["matmul"] for one in ran] == [0, 1, 3 * 3], "in the end all but the last of each block"
    assert [ran[0]["flash_attention"] - one["flash_attention"] for one in ran] == [0, 3, 3]


@pytest.mark.parametrize("gib", [0.0, 1e-4, 1.0])
def test_gradients_are_bit_for_bit_those_without_recomputation(gib):
    ids, results = np.random.default_rng(0).integers(0, 72, (2, 8, 16)).astype(np.int32), []
    for how in ({"recompute": False, "recompute_gib": 0.0}, {}):
        trainer = Trainer(replace(small(gib, dtype="float32", **how), parallel=ParallelConfig()), None, None)
        results.append([g.asnumpy() for g in trainer.gradients(*ids)[1]])
    for got, want in zip(*results, strict=True):
        assert np.array_equal(got, want) and want.any()
