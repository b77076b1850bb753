# SPDX-License-Identifier: Apache-2.0
"""A 405B Llama on 16,384 ranks: what a rank plans, writes and reads does not grow with the ranks. Bytes, not seconds."""
import json

from tests.msrun import python


def measured(*options: str) -> dict:
    done = python("scripts/bench/checkpoint_index.py", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_index_of_16384_ranks_is_as_small_as_of_64():
    many, few = measured(), measured("--fsdp=8", "--rank=7")
    assert (many["ranks"], few["ranks"]) == (16384, 64) and many["parts"] > 30_000_000 and many["tensors"] == 3411
    assert many["index_bytes"] < 1.02 * few["index_bytes"] < 1_000_000
    assert many["header_bytes"] < 1_000_000 and many["files_opened"] == 1 and not many["mindspore"]
    assert many["peak_mib"] < 200
