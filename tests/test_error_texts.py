# SPDX-License-Identifier: Apache-2.0
"""What errors say, word for word: snapshots in `tests/snapshots/error_*.txt`, rewritten by UPDATE_SNAPSHOTS=1.

One process plays each rank of a world of four in turn. Refusals read alike on every rank and come before anything is
communicated.
"""
import os
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, Partial, Replicate, Shard, comm, distribute_tensor, init_device_mesh
from ms_dtensor.errors import DTensorError, ImplicitCommError, LayoutError, MixedOperandError, OpRuleError, RedistributeError

FOLDER = Path(__file__).parent / "snapshots"
R, P, S = Replicate(), Partial(), Shard


def plain(*shape: int) -> Tensor:
    return Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def placed(mesh, shape, *placements) -> DTensor:
    return distribute_tensor(plain(*shape), mesh, list(placements), src_data_rank=None)


def softmax_over_shards(mesh):
    with md.redistribution_policy("explicit"):
        mint.softmax(placed(mesh, (8, 4), S(0), S(1)), -1)


def write_through_a_copy(mesh):
    x = placed(mesh, (8, 4), S(0), R)
    y = x[1:3]
    y.zero_()


def boolean_mask(mesh):
    x = placed(mesh, (8, 4), S(0), R)
    x[x > 0]


CASES = {
    "unknown_op": (OpRuleError, lambda m: ops.renorm(placed(m, (4, 4), S(0), R), 2, 0, 1.0)),
    "shape_depends_on_data": (OpRuleError, lambda m: ops.nonzero(placed(m, (8, 4), S(0), R))),
    "rule_refuses": (OpRuleError, lambda m: placed(m, (8, 4), S(0), S(1)).reshape(5, 7)),
    "mixed_tensor": (MixedOperandError, lambda m: placed(m, (8, 4), S(0), R) + plain(8, 4)),
    "mixed_tensor_first": (MixedOperandError, lambda m: plain(8, 4) * placed(m, (8, 4), S(0), R)),
    "mixed_parameter": (MixedOperandError, lambda m: mint.matmul(
        placed(m, (8, 4), S(0), R), Parameter(plain(4, 4), name="layers.0.weight"))),
    "two_meshes": (OpRuleError, lambda m: placed(m, (8, 4), S(0), R) + placed(m["tp"], (8, 4), S(0))),
    "too_few_placements": (LayoutError, lambda m: distribute_tensor(plain(8, 4), m, [S(0)])),
    "no_such_dim": (LayoutError, lambda m: distribute_tensor(plain(8, 4), m, [S(2), R])),
    "no_such_axis": (DTensorError, lambda m: distribute_tensor(plain(8, 4), m, {"pt": S(0)})),
    "distribute_to_partial": (LayoutError, lambda m: distribute_tensor(plain(8, 4), m, [P, R])),
    "not_this_ranks_shard": (LayoutError, lambda m: DTensor.from_local(plain(3, 3), m, [S(0), R], shape=(8, 4))),
    "explicit_policy": (ImplicitCommError, softmax_over_shards),
    "redistribute_to_partial": (RedistributeError, lambda m: placed(m, (8, 4), S(0), R).redistribute(placements=[P, R])),
    "move_between_sub_meshes": (RedistributeError, lambda m: placed(m["dp"], (8, 4), S(0)).redistribute(m["tp"], [S(0)])),
    "asnumpy_of_a_shard": (OpRuleError, lambda m: placed(m, (8, 4), S(0), R).asnumpy()),
    "item_of_many": (OpRuleError, lambda m: placed(m, (8, 4), S(0), R).item()),
    "boolean_mask": (OpRuleError, boolean_mask),
    "write_through_a_copy": (OpRuleError, write_through_a_copy),
    "uneven_local_output": (LayoutError, lambda m: md.parallelize_module(
        mint.nn.Linear(4, 5), m["tp"], ColwiseParallel())(plain(3, 4))),
}


def raised(name: str, rank: int) -> tuple[DTensorError, list]:
    """The error on one rank, and what was communicated before it."""
    kind, wrong = CASES[name]
    with comm.fake_world(4, rank), comm.record() as events:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(kind) as caught:
            wrong(mesh)
    return caught.value, events


@pytest.mark.parametrize("name", CASES)
def test_text(name):
    errors, events = zip(*(raised(name, rank) for rank in range(4)))
    texts = [str(e) for e in errors]
    assert len(set(texts)) == 1, "ranks read different texts:\n" + "\n".join(texts)
    file = FOLDER / f"error_{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(texts[0] + "\n")
    assert file.read_text() == texts[0] + "\n", f"see {file}; UPDATE_SNAPSHOTS=1 rewrites it"


@pytest.mark.parametrize("name", CASES)
def test_four_parts_before_any_communication(name):
    error, events = raised(name, 1)
    assert error.attempt.startswith("For ") and error.operands and error.rule and error.fix, error
    if name not in ("write_through_a_copy", "uneven_local_output"):  # a view gathered; parameters were broadcast
        assert not events, events


def test_every_snapshot_has_a_case():
    assert {f.stem for f in FOLDER.glob("error_*.txt")} == {f"error_{name}" for name in CASES}
