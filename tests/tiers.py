# SPDX-License-Identifier: Apache-2.0
"""Which tests wait for a merge or for the night, and why: `LATER`, the one list of them.

A test that no row matches runs at every push. A row leaves out all that its pattern matches, or all but a slice: one of
`every`, chosen by a checksum of the name, so that the slice is the same everywhere and a new test does not move it; and
whatever has a word of `keep` in its name, which a past fault has earned. `python -m tests.tiers` writes docs/tests.md.
"""
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TIERS = ("push", "merge", "night")
CHOSEN = "TESTS_TIER"  # in the environment, so that ranks see it too
PAGE = Path(__file__).resolve().parent.parent / "docs" / "tests.md"


@dataclass(frozen=True)
class Later:
    """Tests that wait.

    Attributes:
        tests: names as pytest writes them, `*` for anything; brackets stand for themselves.
        tier: until when.
        why: what is slow about them, and what asks the same at every push.
        every: one of so many stays; 0: none does.
        keep: those with one of these words stay.
    """

    tests: str
    tier: str
    why: str
    every: int = 0
    keep: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.tests.replace("[", "[[]"))

    def leaves(self, name: str) -> bool:
        """Whether the test stays at push all the same."""
        return any(word in name for word in self.keep) or (
            self.every > 0 and zlib.crc32(name.encode()) % self.every == 0)


LATER = (
    # -- jobs of their own: each starts msrun or a script, tens of seconds of processes
    Later("tests/zoo/test_llama_launch.py::test_signals_end_the_whole_job*", "merge",
          "eight jobs that wait two minutes; Ctrl-C and ends before the first step stay"),
    Later("tests/zoo/test_llama_launch.py::test_what_ends_a_run*", "merge",
          "four jobs; what is refused before any starts stays"),
    Later("tests/zoo/test_llama_launch.py::test_two_nodes_train*", "merge", "two jobs; words and addresses of nodes stay"),
    Later("tests/zoo/test_llama_launch.py::test_an_end_before_the_first_step*", "merge",
          "a job each; a killed rank and an end before any rank is there stay", keep=("[rank-rank", "[no_rank_yet")),
    Later("tests/zoo/test_llama_training.py::test_a_batch_that_grows*", "merge", "a mesh stays", keep=("[mesh]",)),
    Later("tests/zoo/test_llama_elastic.py::test_a_machine_is_lost_and_one_comes_back*", "merge",
          "six jobs of launchers, a minute and more; who meets and who is lost stays, asked in one process"),
    Later("tests/zoo/test_llama_memory.py::test_the_formula_is_a_dry_runs_peak*", "merge", "15 steps; three stay",
          keep=("[fsdp]", "[dp]", "[tp]")),
    Later("tests/zoo/test_llama_memory.py::test_the_librarys_command_has_the_same*", "merge",
          "searches for each file's layouts; two files stay", keep=("[llama3_8b]", "[mixtral_8x7b]")),
    Later("tests/zoo/test_llama_elastic.py::test_only_those_begin*", "merge", "waits for seconds; the others stay"),
    Later("tests/zoo/test_llama_elastic.py::test_a_machine_*", "merge", "waits for limits of time; `failed` stays",
          keep=("[failed]",)),
    Later("tests/comm/test_launch.py::test_workers_of_an_msrun_that_does_not_wait*", "merge",
          "a job; `workers_end_with_a_killed_msrun` stays"),
    Later("tests/zoo/test_llama_twins.py::test_the_model_is_the_same_on_either_kind_of_device[bfloat16]", "merge",
          "15 s; `[float32]` and each option's stay"),
    Later("tests/zoo/test_ascend_first.py::test_every_part_runs*", "merge",
          "the whole script of a first hour on Ascend; `comm/cases_rehearsal` takes the same branch"),
    Later("tests/zoo/test_llama_resume.py::test_a_killed_rank*", "merge", "three jobs; SIGTERM and going on stays"),
    Later("tests/zoo/test_llama_resume.py::test_a_run_in_stages*", "merge", "two jobs; `zoo/cases_pipeline` stays"),
    Later("tests/zoo/test_llama_tuning.py::test_full_and_lora*", "merge",
          "150 steps for a loss that falls; `cases_llama` compares adapters with one device"),
    Later("tests/tools/test_cluster_bench.py::TestToy*", "merge", "a job of benchmarks; its tables and words stay"),
    Later("tests/comm/test_ranks.py::test_contract_on_shm*", "merge",
          "seven backends on four ranks; `test_engine` asks the contract of shared memory, `test_group` the others' calls"),
    Later("tests/comm/test_failures.py::*stuck]", "merge", "waits for time limits; killed ranks and lost step stay"),
    Later("tests/comm/test_launch.py::test_an_absent_device_is_refused[npu]", "merge", "as `[gpu]`, which stays"),
    Later("tests/comm/test_launch.py::test_an_absent_device_ends_the_job*", "merge", "a job; that a rank refuses it stays"),
    Later("tests/comm/test_engine.py::test_contract[4]", "merge", "two meet otherwise than three, who stay too"),
    Later("tests/comm/test_ranks.py::*[1]", "merge", "as `[0]`, which stays"),
    Later("tests/checkpoint/test_jobs.py::*four]", "night", "jobs of one to four ranks, all of them with all"),
    Later("tests/checkpoint/test_jobs.py::*", "merge",
          "jobs and long checks; `what_one_layout_saves_every_other_loads_bit_for_bit`, `test_disk`, `test_damage`, "
          "`checkpoint/cases_hf` and `test_hf` stay"),
    Later("tests/comm/test_rehearsal.py::*", "merge",
          "scripts; `comm/cases_rehearsal` counts kernels and waits, `cases_overlapped` who is late"),
    Later("tests/coverage/test_forms.py::test_every_planted*", "merge", "plants faults in op rules; the others stay"),
    Later("tests/compat/test_interop.py::test_the_pages_command*", "merge", "a launch; `test_a_script_runs_unedited` stays"),
    Later("tests/test_packaging.py::test_readme_example_runs*", "merge", "a launch; `cases_docs` runs the pages"),
    Later("tests/test_docs.py::test_the_site_builds*", "merge", "builds the site; links and blocks stay"),
    Later("tests/internals/test_borders.py::test_plain_calls_are_byte_equal[True]", "merge", "as `[False]`, which stays"),
    # -- tables: a slice of each stays
    Later("tests/coverage/test_infer.py::test_primitives_without*", "merge", "200 primitives; `test_the_llama` stays"),
    Later("tests/coverage/test_decompositions.py::test_*[*", "merge", "every decomposition with all its arguments", 3),
    Later("tests/coverage/test_forms.py::test_cases_are_right*", "merge", "every eighth form of the corpus", 3),
    Later("tests/coverage/test_dtypes.py::test_no_hole*", "merge", "every form with every dtype", 3),
    Later("tests/coverage/test_fft.py::test_equal*", "merge", "every transform in every norm", 3),
    Later("tests/tensor/test_plain_alike.py::test_methods_take_the_form*", "merge", "every method with every dtype",
          keep=("float32", "int64", "bool", "complex64")),
    Later("tests/parallel/test_recompute.py::test_*[*", "merge", "every way to run again with every way to cut up", 2),
    Later("tests/core/test_shard_kinds.py::test_existing_rules*", "merge",
          "a shard of a kind of its own under each rule", 2),
    Later("tests/dispatch/test_dispatch_cost.py::test_a_cached_dispatch_leaves_nothing*", "merge",
          "tens of thousands of calls, traced; their calls and objects are counted for every op", 3),
    Later("tests/debug/test_dry_run.py::test_what_a_forward_keeps*", "merge", "every layout and size", 2),
    Later("tests/debug/test_dry_run.py::test_events_are_those_of_kernels*", "merge", "every layout", 2),
    Later("tests/zoo/test_llama_memory.py::test_what_blocks_save_is_the_count*", "merge",
          "every mesh, with weights that are joined and single", 2),
    Later("tests/zoo/test_llama_layouts.py::test_a_documented_layout*", "merge", "every layout of the pages and README", 6),
    Later("tests/zoo/test_llama_training.py::test_micro_batches_and_recompute_change*", "merge",
          "every pair; `cases_llama` trains with both on ranks", keep=("4, 'recompute': True}-mesh",)),
    Later("tests/pipeline/test_actions.py::test_a_changed_order_of_many*", "merge", "4 and 8 ranks; 2 stay"),
    Later("tests/pipeline/test_actions.py::test_every_schedule_of_eight*", "merge", "every number of microbatches",
          keep=("interleaved", "zbv")),
    Later("tests/pipeline/test_actions.py::test_changed_orders_of_every_size*", "night", "all of them"),
    Later("tests/pure/test_plan_optimal.py::test_every_plan*", "night", "all pairs; a part of each mesh's stays"),
    Later("tests/mutants/test_mutants.py::test_without*", "night", "a pytest each"),
    Later("tests/mutants/test_mutants.py::test_a_planted*", "night", "that each fault has its place stays"),
    Later("tests/third_party/*", "night", "mindcv, which is not a dependency"),
    Later("tests/long/*", "night", "each check with its own sizes takes minutes to hours"),
    Later("tests/zoo/test_llama_kept.py::test_kept_bytes_are_those_of_a_dry_run*", "merge",
          "dry runs beside a real one; what is kept in a budget stays"),
    Later("tests/zoo/test_llama_training.py::test_bfloat16_recomputed_in_parts*", "merge",
          "many steps; `cases_selective` has shorter dtypes"),
    Later("tests/zoo/test_llama_training.py::test_the_quickstart_in_bfloat16*", "merge",
          "forty steps; `a_seed_gives_the_losses_of_single_weights` trains in bfloat16, too"),
    Later("tests/checkpoint/test_hf.py::test_a_load_needs_no_memory*", "merge", "a process that loads a large file"),
    Later("tests/zoo/test_llama_predict.py::test_mfu*", "merge",
          "dry runs of the 8B, 15 s each; `tests/debug/test_dry_run.py` has small ones"),
    # -- cases of real ranks
    Later("tests/surface/cases_rows.py::*[1]", "night", "every row on a mesh of one rank; one process has such meshes, too"),
    Later("tests/surface/cases_rows.py::*[4]", "merge",
          "every row of MindSpore's surface; some by checksum stay, and those that no other case asks", 40,
          ("list_sens_param", "vjp_weights", "DynamicLossScaler_an_overflow", "all_finite", "TrainOneStepCell_nn_With",
           "Cell_recompute_before", "Cell_recompute_after", "nn_SGD_nesterov", "nn_Momentum_loss_scale")),
    Later("tests/models/cases_models.py::*in_any_layout[*", "merge",
          "every input and weight cut in every way; `[*_tensor_parallel]` and one model stay", keep=("qwen2",)),
    Later("tests/context/cases_*.py::*[8]", "merge", "eight ranks; two and four stay"),
    Later("tests/experts/cases_*.py::*[8]", "merge", "eight ranks; two and four stay"),
    Later("*a_run_goes_on_with_other_ranks_sharing_its_tokens*", "merge",
          "runs of the recipe; `two_ranks_share_the_tokens_of_all_rows` stays, and checkpoints have no order in them"),
    Later("*stages_beside_other_axes_train_as_one_device*", "merge",
          "runs of the recipe; `two_stages_train_as_one_device` and `pipelines_beside_other_axes` stay"),
    Later("*packed_documents_and_16_bits_go_through_stages*", "merge",
          "runs of the recipe; `side_inputs_are_cut_by_each_rank` stays"),
    Later("*a_run_goes_on_with_other_stages_and_with_none*", "merge",
          "runs of the recipe; `stages_are_one_checkpoint_that_every_mesh_loads` and `a_resumed_pipeline_goes_on` stay"),
    Later("*four_ranks_beside_data_tensor_and_sequence_parallelism*", "merge",
          "runs of the recipe; `two_ranks_share_the_tokens_of_all_rows` stays"),
    Later("*twenty_steps_are_ten_and_ten*", "merge",
          "runs of the recipe; `every_optimizer_comes_back_bit_for_bit` and going on after SIGTERM stay"),
    Later("*they_are_on_two_axes*", "merge", "second derivatives on one axis stay"),
    Later("*kept_weights_of_equal_sizes_in_several_buckets*", "merge", "as those of unlike sizes, which stay"),
    Later("*as_many_as_ranks_and_more_of_four*", "merge", "as `of_two`, which stays"),
    Later("*pipelines_of_four_on_emulated_devices*", "merge", "`pipelines_on_emulated_devices` of two stays"),
    Later("*momentum_encoder_by_*", "merge", "each way of writing; one by checksum and those between units stay", 8),
    Later("*written_between_two_calls_by_*", "merge", "each way of writing; one by checksum stays", 3),
    Later("*cluster_benchmarks_take_the_branch*", "merge",
          "benchmarks on emulated devices; `test_cluster_bench` has their tables, `cases_rehearsal` the branch"),
    Later("*a_machine_is_measured_alike*", "merge", "every part of `calibrate`; `debug/test_predict` reads its files"),
    Later("*published_weights_in_stages_beside_other_axes*", "merge",
          "runs of the recipe; `published_weights_in_two_stages` stays"),
    Later("*exceptions_of_four*", "merge", "as `exceptions_of_two`, which stays"),
    Later("*an_in_place_write_in_the_step[4]*", "merge", "as of two ranks, which stays"),
    Later("*recordings_of_their_own_reduced_once*", "merge", "as `recordings_of_their_own`, which stays; "
          "`cases_micro_batches` counts reductions"),
    Later("*ranks_that_share_sequences_have_their_balance*", "merge",
          "runs of the recipe; `experts_beside_it_and_over_its_ranks` trains with balance over cp"),
    Later("*stages_of_a_pipeline_each_get_the_order*", "merge",
          "runs of the recipe; `side_inputs_are_cut_by_each_rank` and `two_ranks_share_the_tokens_of_all_rows` stay"),
    Later("*exceptions_beside_data_parallel_ranks*", "merge",
          "18 s of four ranks; `exceptions_of_two` stays"),
    Later("*texts_of_stages_beside_other_axes*", "merge", "runs of the recipe; `texts_of_two_stages` stays"),
    Later("*experts_and_adapters_in_stages_beside_other_axes*", "merge",
          "runs of the recipe; `experts_and_adapters_in_two_stages` stays"),
    Later("*random_programs_by_tensors_methods_have_the_same_bits*", "merge",
          "`random_programs_have_the_same_bits` and `a_loop_by_tensors_methods_is_that_of_value_and_grad` stay"),
    Later("*made_by_a_model_of_which_the_block_and_the_root*", "merge",
          "`made_by_a_model_of_which_the_root_is_wrapped` and `made_by_a_model_whose_cells_are_units` stay"),
    # -- types of local code
    Later("tests/debug/cases_types.py::checked_*", "merge",
          "cases of recipes, attention and experts once more, checked by types; packed documents stay",
          keep=("packed_documents",)),
)


def sampled(items: Iterable[T], every: int, first: int = 0) -> list[T]:
    """Within one test: every so-manieth item at push, beginning with this one; all of them in a later tier.

    Args:
        first: modulo `every`; of two nested loops the inner one begins elsewhere in each turn of the outer.
    """
    return list(items)[first % every::every] if os.environ.get(CHOSEN, "push") == "push" else list(items)


def at_night() -> bool:
    """Whether the tests of the night run, too: then a test that takes a part before takes all."""
    return os.environ.get(CHOSEN) == "night"


def tier(name: str) -> str:
    """Of the test with this name: the tier of the first row that matches."""
    row = next((row for row in LATER if row.matches(name)), None)
    return "push" if row is None or row.leaves(name) else row.tier


def page() -> str:
    """docs/tests.md."""
    rows = []
    for r in LATER:
        stays = f"one of {r.every}" if r.every else "none" if not r.keep else ""
        kept = ", ".join(f"`{word}`" for word in r.keep)
        stays = f"{stays} and {kept}" if stays and kept and r.every else stays if r.every or not kept else kept
        rows.append(f"| `{r.tests.removeprefix('tests/')}` | {r.tier} | {stays} | {r.why} |")
    return HEAD + "\n".join(rows) + "\n"


HEAD = """# What a push is asked, and what waits

`scripts/test.sh` runs lint, types and the tests of the tier **push**. `scripts/test.sh --tier merge` adds those that are
asked before a merge, `--tier night` the rest; `-m merge` and `-m night` run one tier by itself. A test that is named with
`::` runs whatever its tier.

A new test is of the tier push. What waits is in one list, `LATER` in `tests/tiers.py`, of which this page is made
(`python -m tests.tiers`); no other test waits. "One of 3" is chosen by a checksum of the test's name (CRC-32, divisible
by 3): the same tests on every machine. Within a test, a loop over `sampled(cases, 4)` takes every fourth case at push, and
all of them in the other tiers.

| tests | waits for | stays at push | why |
|---|---|---|---|
"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
