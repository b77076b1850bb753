# SPDX-License-Identifier: Apache-2.0
"""Real ranks: random local programs that types accept are one device's; moves; our own local code, checked."""
import mindspore as ms
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import DTensor, comm, local_map
from ms_dtensor.custom_ops import local_map as own_local_map
from ms_dtensor.debug import all_gather, all_reduce, all_to_all, checks, convert, reduce_scatter
from tests.cases import call, case
from tests.context import cases_attention, cases_recipe
from tests.custom_ops import cases_edges
from tests.experts import cases_experts
from tests.experts import cases_grid as cases_mixtral
from tests.operands import P, R, S
from tests.spmd.programs import Program
from tests.support import equal
from tests.tiers import sampled
from tests.zoo import cases_llama


def each_program(shape, first: int) -> None:
    """Programs on a mesh, values and gradients of each against one device; `tests/long/check_types.py` has 5,000."""
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[:len(shape)])
    steps = [Program(seed, mesh).compare() for seed in sampled(range(first, first + 2500, 150), 2 * len(shape))]
    assert sum(steps) >= 3 * len(steps), steps  # most have several ops, and some placements fit them


@case(world_size=2)
def programs_that_types_accept_are_one_devices(world):
    each_program((2,), 0)


def programs_on_two_axes_are_one_devices(world):
    each_program((2, 2), 100_000)


MOVES = {  # what a rank does between its shard and its result: placements before and after, calls forward and backward
    "gathered, then alike": (S(0), R, lambda x: all_gather(x, "tp") ** 2, ("all_gather",)),
    "gathered, then each its own": (S(0), S(1), lambda x: convert(all_gather(x, "tp", to="R") ** 2, "tp", "V", 1),
                                    ("all_gather", "reduce_scatter")),
    "summed, then alike": (P, R, lambda x: all_reduce(x, "tp") ** 2, ("all_reduce",)),
    "summed, then each its own": (P, S(0), lambda x: convert(all_reduce(x, "tp", to="R"), "tp", "V") ** 2,
                                  ("all_reduce", "all_reduce")),
    "scattered": (P, S(1), lambda x: reduce_scatter(x, "tp", 1) ** 2, ("reduce_scatter", "all_gather")),
    "another dim": (S(0), S(1), lambda x: all_to_all(x, "tp", 1, 0) ** 2, ("all_to_all", "all_to_all")),
    "to be a summand": (R, P, lambda x: convert(x * 3, "tp", "P"), ("all_reduce",)),
    "there and back": (R, R, lambda x: convert(convert(x, "tp", "R") ** 2, "tp", "I"), ("all_reduce",)),
}


def moves_are_linear_and_each_has_its_transpose(world):
    mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    rng = np.random.default_rng(0)
    summands = rng.normal(size=(4, 8, 4))
    weight = rng.normal(size=(8, 4))
    for name, (before, after, fn, calls) in MOVES.items():
        whole = summands.sum(0) if before.is_partial() else summands[0]
        local = summands[world.rank] if before.is_partial() else whole[2 * world.rank:2 * world.rank + 2] if \
            before.is_shard() else whole
        x = DTensor.from_local(Tensor(local), mesh, [before])
        run = local_map(fn, [after], check=True)
        w = md.distribute_tensor(Tensor(weight), mesh, [after] if not after.is_partial() else None)
        one = (lambda t: t * 3) if "summand" in name else lambda t: t ** 2
        with comm.record() as events:
            got, grad = md.value_and_grad(lambda t, run=run, w=w: (run(t) * w).sum())(x)
        want, wanted = ms.value_and_grad(lambda t, one=one: (one(t) * Tensor(weight)).sum())(Tensor(whole))
        made = tuple(e.op for e in events if e.src in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "convert")
                     or e.phase == "backward")
        assert sorted(made) == sorted(calls), (name, made)
        equal(got, want, name)
        equal(grad, wanted, f"gradient of {name}")


OWN = {2: [(cases_recipe, "two_ranks_share_the_tokens_of_all_rows"), (cases_attention, "gather_and_ring_are_one_device")],
       4: [(cases_attention, "hybrids_are_one_device"), (cases_attention, "beside_data_and_tensor_parallelism"),
           (cases_attention, "the_style_is_the_cell_of_whole_rows"),
           (cases_recipe, "four_ranks_beside_data_tensor_and_sequence_parallelism"),
           (cases_experts, "results_and_gradients_are_those_of_one_device"),
           (cases_experts, "a_block_with_its_losses_trains_as_on_one_device"),
           (cases_mixtral, "the_recipes_mixtral_trains_as_on_one_device"),
           (cases_llama, "options_of_other_families_train_as_on_one_device"),
           (cases_llama, "mixtures_of_experts_train_as_on_one_device"),
           (cases_llama, "packed_documents_know_nothing_of_each_other"),
           (cases_llama, "generation_and_evaluation_are_those_of_one_device"),
           (cases_edges, "tensors_in_lists_are_laid_out_moved_and_wrapped")]}


def _checked(module, name: str, size: int):
    def run(world):
        functions, run_checked = [], own_local_map.checked_run

        def counted(who, *args):
            functions.append(who)
            return run_checked(who, *args)
        own_local_map.checked_run = counted
        try:
            with checks(rules=False, types=True):
                call(getattr(module, name), world)
        finally:
            own_local_map.checked_run = run_checked
        assert functions, "no function of its own was checked"
    run.__name__ = run.__qualname__ = f"checked_{module.__name__.split('.')[1]}_{name}"
    return case(world_size=size, timeout=600)(run)


for _size, _cases in OWN.items():
    for _module, _name in _cases:
        globals()[f"checked_{_module.__name__.split('.')[1]}_{_name}"] = _checked(_module, _name, _size)
