"""Faults that public bug reports tell of trainers, and the tests that would meet each here: the case, and more of its kind.

B01  experts or a precision that are not what was asked
     test_recipes.py::test_the_120b_recipe_is_fsdp2_and_trains_every_expert
     trainer/test_model.py::TestAdapter::test_all_linear_alone_leaves_the_experts_out
     trainer/test_model.py::TestAdapter::test_reaches_the_experts_of_every_layer_with_their_own_rank
     trainer/test_model.py::TestAdapter::test_a_target_that_is_not_there_is_named
     trainer/test_verify.py::test_experts_that_learned_nothing_are_named
     trainer/test_distributed.py::TestRecipes::test_ddp_lora_on_mxfp4_gives_a_proven_adapter
     trainer/test_runs.py::TestWhatRunsIsWhatWasAsked::test_another_strategy_is_refused
     trainer/test_memory.py::test_an_mxfp4_base_counts_as_what_it_becomes
B03  a file with one rank's part only
     trainer/test_distributed.py::test_the_shards_of_every_rank_are_in_the_adapter
     test_publish.py::test_an_adapter_that_lacks_a_ranks_part_ends_the_job_and_is_not_offered
     trainer/test_verify.py::test_half_a_tensor_at_its_start_value_is_found
     trainer/test_verify.py::TestMergedExport::test_a_missing_tensor_of_the_merge_is_named
     trainer/test_distributed.py::TestRecipes::test_fsdp2_in_bfloat16_with_recomputed_activations_gives_a_proven_artifact
B05  a newest checkpoint that is not whole
     trainer/test_runs.py::TestCheckpoints::test_an_incomplete_checkpoint_is_passed_over
     trainer/test_runs.py::TestCheckpoints::test_a_checkpoint_of_other_data_is_refused
     trainer/test_distributed.py::TestResume::test_on_another_number_of_ranks_is_refused
     trainer/test_space.py::TestARealVolume::test_one_that_is_crowded_out_leaves_its_last_whole_checkpoint_and_goes_on_from_it
B07  healthy to look at, and learning wrongly
     trainer/test_runs.py::TestNotANumber::test_fails_the_job_at_its_step_and_nothing_later_is_saved
     trainer/test_data.py::TestLabels::test_the_end_token_is_trained_once_per_turn_though_it_is_the_pad_token_too
     trainer/test_chat.py::TestSpans::test_a_template_without_end_token_is_refused
     trainer/test_data.py::TestForms::test_a_text_completion_is_trained_with_an_end_token
     trainer/test_runs.py::TestLearning::test_the_routers_balancing_loss_is_off_though_the_models_config_has_it
B09  a loss that depends on how a batch is cut
     trainer/test_runs.py::TestLearning::test_accumulation_changes_nothing
     trainer/test_preferences.py::test_accumulation_does_not_change_the_loss_of_pairs
     trainer/test_distributed.py::TestSameNumbers::test_two_ranks_of_two_rows_learn_as_one_rank_of_four_and_as_two_again
     trainer/test_runs.py::TestLearning::test_packing_changes_nothing
     trainer/test_evaluation.py::test_eval_loss_is_the_mean_over_trained_tokens
     trainer/test_distributed.py::test_evaluation_on_two_ranks_gives_the_loss_of_one
B11  a result that cannot talk as it was trained
     test_artifact.py::test_the_artifact_talks_as_it_was_trained
     trainer/test_runs.py::TestArtifact::test_renders_chats_as_they_were_trained
     trainer/test_verify.py::test_another_chat_template_is_found
     trainer/test_verify.py::test_a_missing_companion_of_the_weights_is_named
B13  checkpoints that fill the disk
     trainer/test_runs.py::TestCheckpoints::test_no_more_than_asked_are_kept
     trainer/test_space.py::TestARealVolume::test_a_run_that_does_not_fit_is_refused_before_its_first_step
     trainer/test_space.py::TestARealVolume::test_one_that_is_crowded_out_leaves_its_last_whole_checkpoint_and_goes_on_from_it
     trainer/test_evaluation.py::test_the_best_checkpoint_is_kept_and_exported
     trainer/test_space.py::test_a_result_that_does_not_fit_is_said_before_it_is_made
B15  ranks that wait for one another longer than they may
     trainer/test_distributed.py::TestSlowPreparation::test_does_not_meet_the_collective_timeout
     trainer/test_data.py::TestOncePerHost::test_other_ranks_take_what_the_first_wrote
     trainer/test_data.py::TestOncePerHost::test_a_rank_that_waits_stops_when_the_first_one_failed
     test_stalls.py::test_a_rank_that_stands_still_costs_an_attempt
     worker/test_failures.py::test_what_happened_first_decides
"""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LISTED = re.findall(r"^B\d\d  |\S+\.py::\S+", __doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("name", sorted({entry for entry in LISTED if "::" in entry}))
def test_every_test_of_the_list_is_there(name: str) -> None:
    file, *path = name.split("::")
    scope: list[ast.stmt] = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    for part in path:
        found = [one for one in scope if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and one.name == part]
        assert found, f"{file} has no {part}"
        scope = found[0].body


def test_every_case_has_more_than_one_test() -> None:
    tests: dict[str, int] = {}
    case = ""
    for entry in LISTED:
        case = entry if "::" not in entry else case
        tests[case] = tests.get(case, -1) + 1
    assert len(tests) == 8
    assert min(tests.values()) > 1
