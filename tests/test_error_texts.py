# SPDX-License-Identifier: Apache-2.0
"""What errors say, word for word: snapshots in `tests/snapshots/error_*.txt`, rewritten by UPDATE_SNAPSHOTS=1.

One process plays each rank of a world of four in turn. Refusals read alike on every rank and come before anything is
communicated; they name the call that the user made, not an argument of it, nor what it calls in turn.
"""
import os
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    Shard,
    comm,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
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
    """In four parts, before any communication."""
    errors, events = zip(*(raised(name, rank) for rank in range(4)))
    texts = [str(e) for e in errors]
    assert len(set(texts)) == 1, "ranks read different texts:\n" + "\n".join(texts)
    file = FOLDER / f"error_{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(texts[0] + "\n")
    assert file.read_text() == texts[0] + "\n", f"see {file}; UPDATE_SNAPSHOTS=1 rewrites it"
    assert errors[1].attempt.startswith("For ") and errors[1].operands and errors[1].rule and errors[1].fix, errors[1]
    if name not in ("write_through_a_copy", "uneven_local_output"):  # a view gathered; parameters were broadcast
        assert not events[1], events


def test_every_snapshot_has_a_case():
    assert {f.stem for f in FOLDER.glob("error_*.txt")} == {f"error_{name}" for name in CASES}


PLACEMENTS = ([Shard(7)], [Shard(0), Shard(1)], ["x"], ("dp", "None"), {"x": Shard(0)}, 3, "tp")


def ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32))


def rows(mesh, **options) -> DTensor:
    return distribute_tensor(ones(8, 4), mesh, [Shard(0)], src_data_rank=None, **options)


BY_PLACEMENTS = {
    "distribute_tensor": lambda m, p: distribute_tensor(ones(8, 4), m, p),
    "DTensor": lambda m, p: DTensor(ones(2, 4), m, p),
    "from_local": lambda m, p: DTensor.from_local(ones(2, 4), m, p),
    "redistribute": lambda m, p: rows(m).redistribute(m, p),
    "to_local": lambda m, p: rows(m).to_local(grad_placements=p),
    "full_tensor": lambda m, p: rows(m).full_tensor(grad_placements=p),
    **{name: lambda m, p, name=name: getattr(md, name)((8, 4), m, p)
       for name in ("ones", "zeros", "empty", "rand", "randn")},
    "full": lambda m, p: md.full((8, 4), 2.0, device_mesh=m, placements=p),
}
OTHERS = {
    "init_device_mesh": lambda m: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)),
    "distribute_module": lambda m: distribute_module(ones(3), m),
    "distribute_module, partition_fn": lambda m: distribute_module(nn.Dense(2, 2), m, partition_fn=3),
    "distribute_module, output_fn": lambda m: distribute_module(nn.Dense(2, 2), m, output_fn=3),
    "parallelize_module": lambda m: md.parallelize_module(ones(3), m, md.ColwiseParallel()),
    "local_map": lambda m: md.local_map(lambda x: x, [Shard(0)], in_placements=([Shard(7)],))(rows(m)),
    "SequenceParallel": lambda m: md.parallelize_module(
        nn.LayerNorm((4,)), m, md.SequenceParallel(sequence_dim=7), src_data_rank=None)(ones(2, 4)),
}


def refusal(call) -> str:
    with comm.fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with md.CommDebugMode() as counted, pytest.raises(DTensorError) as caught:
            call(mesh)
        assert counted.get_total_counts() == 0
    return caught.value.attempt


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", BY_PLACEMENTS)
def test_placements_are_refused_by_the_call_that_got_them(name, placements):
    assert refusal(lambda mesh: BY_PLACEMENTS[name](mesh, placements)).startswith(f"For '{name}', ")


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert refusal(OTHERS[name]).startswith(f"For '{name.partition(',')[0]}")


def test_a_partial_or_a_whole_gradient_is_no_fault():
    with comm.fake_world(4):
        x = rows(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
        assert x.to_local(grad_placements=[Replicate()]).shape == (2, 4)
        assert x.full_tensor(grad_placements=[Partial()]).shape == (8, 4)
