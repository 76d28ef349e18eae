"""Models that several processes have together (transformers' tensor parallelism): the same answers as one process.

The cases are in support_tensor_rank_*.py. Each rank runs them, by tensor_rank_script.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_cases import SOME
from support_ranks import run_ranks

pytestmark = pytest.mark.xdist_group("tensor_parallel")  # which share what the ranks found
SCRIPT = "tensor_rank_script.py"
# Biases, norms of heads, soft-caps and windows; projections in one, and such as are gathered; K and V in one latent,
# experts, layers that carry a state.
FAMILIES = ("llama", "qwen2", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe")
FAMILIES += ("qwen3_window", "qwen3_5", "granitemoehybrid", "lfm2")
RUN = FAMILIES[::3] if SOME else FAMILIES
CASES = (
    "options:llama",
    "scores:llama",
    "grammars:llama",
    "drafts:llama",
    "kept_prefixes:llama",
    "lied_to:llama",
    "disagreeing:llama",
    "other_tensors:llama",
    "other_processors:llama",
    "comes_late:llama",
    "elsewhere:llama",
    "runs_the_model:llama",
    "accelerates:llama",
    "one_fails:llama",
    "different_ways:llama",
    "different_calls:llama",
    "interrupted_while_waiting:llama",
    "streams:llama",
    "looked_at_alike:llama",
    "call_within_a_stream:llama",
    "ended_alike:llama",
)
LAST = ("refused:qwen3", "with_adapters:qwen2", "refused:gemma3n", "interrupted:llama", "one_is_gone")
FOUR = ("family:deepseek_v3", "scores:deepseek_v3", "one_fails_in_a_step:deepseek_v3")
ENDED = ("one_fails_before_its_device:llama", "one_fails_behind:llama", "one_loses_a_frame:llama")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [f"family:{family}" for family in RUN]
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("two"), 2, *names, *CASES, *LAST)


@pytest.mark.parametrize("family", RUN)
def test_answers_are_those_of_one_process(family: str, two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "60 new tokens" in found[f"family:{family}"], found[f"family:{family}"]


def test_layers_are_fused_over_the_weights_that_are_here(two: list[dict[str, Any]]) -> None:
    assert "fused      3 of 3 layers" in two[0]["family:llama"]
    assert "fused      3 of 3 layers, with their experts" in two[0]["family:mixtral"]


@pytest.mark.parametrize(
    "case", ["options:llama", "scores:llama", "grammars:llama", "drafts:llama", "kept_prefixes:llama"]
)
def test_options_count_as_in_one_process(case: str, two: list[dict[str, Any]]) -> None:
    assert not [found[case] for found in two if "FAILED" in str(found[case])]


def test_ranks_agree_on_what_each_sees_differently(two: list[dict[str, Any]]) -> None:
    first, second = (found["lied_to:llama"] for found in two)
    assert isinstance(first, dict), first
    assert first["memory"] == second["memory"]
    assert "this model cannot be captured (RuntimeError: cannot be captured)" in first["capture"][0]
    assert not second["capture"], "the first one says what they do"
    assert first["rehearsal"][0] == second["rehearsal"][0]
    assert "the largest step that this call may come to does not fit" in " ".join(first["rehearsal"][1])
    (tokens, seconds), (others, _) = first["time"], second["time"]
    assert tokens == others and seconds < 100
    assert 0 < sum(map(len, tokens)) < 2000 * len(tokens)
    assert first["since"] == second["since"]


def test_other_prompts_or_options_on_a_rank_are_an_error_on_all(two: list[dict[str, Any]]) -> None:
    (errors, drawn), (others, drawn_there) = (found["disagreeing:llama"] for found in two)
    assert errors == others
    assert "different prompts" in errors[0] and all("different options" in each for each in errors[1:-1])
    assert "different settings of their BatchGenerator" in errors[-1]
    assert all(each.startswith("RanksError: the 2 ranks that run this model together") for each in errors)
    assert drawn == drawn_there and len({tuple(each) for each in drawn}) > 1, "the first rank's seed is that of all"


def test_other_weights_buffers_or_processors_on_a_rank_are_an_error_on_all(two: list[dict[str, Any]]) -> None:
    (first, again), (second, again_there) = (found["other_tensors:llama"] for found in two)
    assert first == second and again == again_there and len(again[0]) == 2
    assert "have different weights (rank 1 has others than rank 0)" in first[0], first
    assert "have different buffers (rank 1 has others than rank 0)" in first[1], first
    (first, again), (second, again_there) = (found["other_processors:llama"] for found in two)
    assert first == second and "rank 1 has others" in first, first
    assert "different attributes of logits processors" in first, first
    assert again == again_there and len(again[0]) == 2


def test_a_rank_says_that_it_waits_for_the_others_to_make_a_call(two: list[dict[str, Any]]) -> None:
    first, second = (found["comes_late:llama"] for found in two)
    assert len(first) == 2 and not second, (first, second)
    assert "rank 0 has waited 0 s for the other ranks that run this model together to make the same call" in first[0]


def test_what_fails_on_one_ends_the_call_on_all(two: list[dict[str, Any]]) -> None:
    (first, again), (second, again_there) = (found["one_fails:llama"] for found in two)
    told = "RanksError: rank {} of the 2 that run this model together "
    assert first[0].startswith(told.format(1) + "failed: PromptError: prompt 1 is empty")
    assert second[0].startswith("PromptError")
    assert first[1].startswith("ValueError: no more of this")
    assert second[1].startswith(told.format(0) + "failed: ValueError: no more of this")
    assert first[2].startswith(told.format(1) + "has left its stream")
    assert second[2].startswith("OSError")
    assert first[3] == second[3]
    assert again == again_there and len(again[0]) == 2


def test_a_seed_that_one_draws_and_the_other_does_not_is_an_error_on_all(two: list[dict[str, Any]]) -> None:
    (first, again), (second, again_there) = (found["different_ways:llama"] for found in two)
    assert first == second and "have different options" in first, first
    assert again == again_there and len(again[0]) == 2


def test_different_kinds_of_calls_are_an_error_on_all(two: list[dict[str, Any]]) -> None:
    (first, again), (second, again_there) = (found["different_calls:llama"] for found in two)
    assert first == second and all("have different calls" in each for each in first), first
    assert again == again_there and len(again[0]) == 4


def test_an_interrupt_of_all_comes_while_some_wait(two: list[dict[str, Any]]) -> None:
    for found in two:
        error, again = found["interrupted_while_waiting:llama"]
        assert error.startswith("GenerationInterrupted"), error
        assert len(again[0]) == 2


def test_streams_are_left_at_any_time_and_leave_interrupts_to_their_owner(two: list[dict[str, Any]]) -> None:
    (errors, handlers, again), (others, handlers_there, again_there) = (found["streams:llama"] for found in two)
    assert all("rank 1 of the 2 that run this model together has left its stream" in each for each in errors), errors
    assert others == ["nothing", "nothing"]
    assert handlers == handlers_there == [True, True]
    assert again == again_there and len(again[0]) == 2


def test_an_interrupt_of_one_ends_the_call_on_all(two: list[dict[str, Any]]) -> None:
    for found in two:
        error, again = found["interrupted:llama"]
        assert error.startswith("GenerationInterrupted")
        assert len(again[0]) == 2


def test_a_rank_that_is_killed_ends_the_call_on_the_others(two: list[dict[str, Any]]) -> None:
    error, seconds, _ = two[0]["one_is_gone"]
    assert error.startswith("RanksError: rank 1 of the 2 that run this model together is gone"), error
    assert seconds < 100


def test_ranks_that_are_left_make_no_other_call(tmp_path: Path) -> None:
    found = run_ranks(SCRIPT, tmp_path, 4, "one_is_gone")
    for each in (found[0], *found[2:]):
        error, _, again = each["one_is_gone"]
        assert error.startswith("RanksError") or "gloo" in error, error
        assert again.startswith("RanksError") and "start the processes again" in again, again


def test_a_call_while_a_stream_is_open_leaves_the_stream_as_it_is(two: list[dict[str, Any]]) -> None:
    (errors, read), (others, read_there) = (found["call_within_a_stream:llama"] for found in two)
    assert all(each.startswith("GeneratorBusyError") for each in (*errors, *others)), errors
    assert read == read_there and [len(each) for each in read] == [5, 5]


def test_calls_end_alike_on_all(two: list[dict[str, Any]]) -> None:
    (errors, read), (others, read_there) = (found["ended_alike:llama"] for found in two)
    assert errors[0] == others[0] and errors[0].startswith("PromptError: prompt 0 has 6,000 tokens"), (errors, others)
    assert errors[1] == "TypeError: it cannot be sent" and errors[1] in others[1], (errors, others)
    assert read == read_there == ["end"]


def test_ways_in_that_part_the_work_are_refused(two: list[dict[str, Any]]) -> None:
    for found in two:
        parts, writes = found["elsewhere:llama"]
        assert "spread over 2 ranks" in parts and "use BatchGenerator(model) on each" in parts
        assert "spread over 2 processes, which would all write" in writes


def test_what_would_run_the_model_on_one_of_them_is_refused(two: list[dict[str, Any]]) -> None:
    (first, again), (second, again_there) = (found["runs_the_model:llama"] for found in two)
    assert "code of yours ran it in one of them between two steps" in first[0], first[0]
    assert second[0] == first[0]
    assert first[1] == second[1] and "`guidance_scale` is not supported" in first[1], first[1]
    assert again == again_there and len(again[0]) == 2


def test_generate_of_a_sharded_model_may_be_accelerated(two: list[dict[str, Any]]) -> None:
    assert not [found for found in two if "FAILED" in str(found["accelerates:llama"])], two[0]["accelerates:llama"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("refused:qwen3", "`k_proj` of a layer has 1 heads, which cannot be divided by 2"),
        ("refused:gemma3n", "keeps the largest of its activations alone"),
        ("with_adapters:qwen2", "has adapters, and its weights are spread over several processes"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(case: str, why: str, two: list[dict[str, Any]]) -> None:
    assert all(why in found[case] for found in two)


def test_an_error_of_one_before_a_call_is_one_of_the_call(two: list[dict[str, Any]]) -> None:
    first, second = (found["looked_at_alike:llama"] for found in two)
    told = "RanksError: rank 1 of the 2 that run this model together failed: "
    assert second[0].startswith("ZeroDivisionError") and first[0].startswith(told + "ZeroDivisionError")
    assert first[1].startswith("PromptError: prompt 1 is empty"), first
    told = "RanksError: rank 0 of the 2 that run this model together failed: "
    assert second[1].startswith(told + "PromptError: prompt 1 is empty"), second
    assert all(each.startswith("ValueError") for each in first[2:])
    assert all(each.startswith(told + "ValueError: no more of this") for each in second[2:]), second


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("four"), 4, *FOUR)


def test_four_ranks(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert "60 new tokens" in found[FOUR[0]], found[FOUR[0]]
        assert found[FOUR[1]] is True, found[FOUR[1]]


def test_what_fails_in_a_step_ends_the_call_on_ranks_that_wait_for_their_device(four: list[dict[str, Any]]) -> None:
    errors = [found[FOUR[2]] for found in four]
    first, _, again = errors.pop(1)
    assert first == "MemoryError: no memory in the middle of a step"
    told = "RanksError: rank 1 of the 4 that run this model together failed: MemoryError: no memory in the middle"
    assert "start the processes again" in again
    for error, seconds, after in errors:
        assert error.startswith(told) and seconds < 50
        assert after.startswith(told) and "start the processes again" in after


def test_a_device_that_waits_for_what_one_has_not_launched_ends_the_group(tmp_path: Path) -> None:
    errors = [found[ENDED[0]] for found in run_ranks(SCRIPT, tmp_path, 2, ENDED[0])]
    first, after = errors.pop(1)
    assert first == "MemoryError: no memory in the middle of a step"
    told = "RanksError: rank 1 of the 2 that run this model together failed: MemoryError: no memory in the middle"
    for error, again in errors:
        assert error.startswith(told)
        assert again == after and again.startswith(told) and "start the processes again" in again


def test_a_second_interrupt_leaves_ranks_that_may_never_come(tmp_path: Path) -> None:
    case = "left_while_waiting:llama"
    first, second = (found[case] for found in run_ranks(SCRIPT, tmp_path, 2, case))
    assert first[0].startswith("KeyboardInterrupt") or first[0].startswith("GenerationInterrupted"), first
    assert "rank 0 of the 2 that run this model together was interrupted" in second[0], second
    assert all(each[1].startswith("RanksError") for each in (first, second)), (first, second)


@pytest.mark.parametrize("case", ENDED[1:])
def test_a_failure_of_one_reaches_the_first_that_waits_for_its_device(case: str, tmp_path: Path) -> None:
    first, second = (found[case] for found in run_ranks(SCRIPT, tmp_path, 2, case))
    assert second.startswith("MemoryError: no memory"), second
    assert first.startswith("RanksError: rank 1 of the 2 that run this model together failed: MemoryError"), first


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_families_on_two_gpus(tmp_path: Path) -> None:
    names = [f"family:{family}" for family in FAMILIES]
    for found in run_ranks(SCRIPT, tmp_path, 2, *names, on="cuda"):
        assert all("60 new tokens" in found[name] for name in names), found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cases_on_two_gpus(tmp_path: Path) -> None:
    first, second = run_ranks(SCRIPT, tmp_path, 2, *CASES, *LAST[:-1], on="cuda")
    for found in (first, second):
        assert not [case for case, each in found.items() if str(each).startswith("FAILED")], found
    assert "graphs" in first["options:llama"], "sums are captured with the rest"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_that_is_killed_while_gpus_wait_for_it(tmp_path: Path) -> None:
    first, _ = run_ranks(SCRIPT, tmp_path, 2, "family:llama", "one_is_gone", on="cuda")
    error, seconds, _ = first["one_is_gone"]
    assert error.startswith("RanksError"), error
    assert seconds < 100
