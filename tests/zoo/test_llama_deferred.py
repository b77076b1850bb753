# SPDX-License-Identifier: Apache-2.0
"""The recipe's model made as shards: one device's weights, and no rank ever holds it whole."""
from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from model_zoo.llama.config import Config, ModelConfig, ParallelConfig, TrainConfig
from model_zoo.llama.model import Llama, init_weights
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor.comm import fake_world

pytestmark = pytest.mark.usefixtures("cpu")
LAYOUTS = {"fsdp": ParallelConfig(8, 1, fsdp=True), "hsdp": ParallelConfig(8, 1, fsdp=True, hsdp=2),
           "fsdp x tp": ParallelConfig(4, 2, True, fsdp=True), "zero1": ParallelConfig(8, 1, zero1=True),
           "dp x tp": ParallelConfig(2, 4)}


def trainer(model: ModelConfig, parallel: ParallelConfig, rank: int):
    """As `train.py` makes it, on one rank of eight."""
    return Trainer(Config(model=model, parallel=parallel, train=TrainConfig(seed=5)), None, make_mesh("cpu", parallel))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_those_of_the_eager_model(layout):
    # 37 rows and 40 columns: uneven shards, and empty ones
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=40, vocab_size=37, qkv_bias=True)
    eager = Llama(cfg)
    init_weights(eager, 5)
    want = {p.name: p.asnumpy() for p in eager.get_parameters()}
    for rank in (0, 5, 7):
        with fake_world(8, rank):
            made = trainer(cfg, LAYOUTS[layout], rank)
            for p in made.model.get_parameters():
                box = tuple(slice(at, at + n) for at, n in zip(p.layout.local_offset(), p.layout.local_shape()))
                assert np.array_equal(p.to_local().asnumpy(), want[p.name][box]), (rank, p)
            assert len(made.params) == len(want)


@pytest.mark.parametrize("parallel", [LAYOUTS["fsdp"], ParallelConfig(pp=8)], ids=["fsdp", "pp"])
def test_no_rank_ever_holds_the_model(parallel):
    def most() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    sizes = {"dim": 384, "n_heads": 6, "n_kv_heads": 6, "ffn_dim": 1024, "vocab_size": 256}
    with fake_world(8, 3):
        trainer(ModelConfig(n_layers=1 if parallel.fsdp else 6, **sizes), parallel, 3)  # code and pools
        Path("/proc/self/clear_refs").write_text("5")  # the most is what there is now
        before = most()
        made = trainer(ModelConfig(n_layers=16, **sizes), parallel, 3)
        grown = most() - before
    whole = 4 * made.sizes[0]
    assert whole > 100e6 and grown < whole / 2, f"{grown / 1e6:.0f} MB more for a share of {whole / 8e6:.0f} MB"
