"""An ordinary error in the middle of a call: what had finished goes with it, and nothing else stays behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_calls import failing
from support_device_loop import run_over_references
from support_families import build
from support_live_tensors import Storages
from support_untouched import FAMILY, fingerprint
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, BatchResult, ScoreResult, accelerated, run_file
from hf_batchllm.engine.device_loop.run_ahead import RunAhead
from hf_batchllm.errors import OptionValueError, PromptError
from hf_batchllm.model.device_memory import CudaMemory, is_device_error, is_out_of_memory
from hf_batchllm.model.runner import ModelRunner

GIVEN = [[5 + index, 7, 9 + index] for index in range(8)]
# They end one after the other.
LENGTHS = [GenerationConfig(max_new_tokens=2 + index) for index in range(8)]


class OfMine(Exception):
    pass


def failing_at(call: int, error: BaseException) -> Callable[..., Any]:
    calls = [0]

    def fails(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return given[1] if len(given) == 2 and isinstance(given[1], torch.Tensor) else None

    return fails


def hooked(model: Any, hook: Callable[..., Any]) -> Any:
    return model.model.layers[-1].register_forward_pre_hook(hook)


def test_what_had_finished_is_in_the_error_and_in_the_generator() -> None:
    model = build(FAMILY)
    before = fingerprint(model)
    whole = BatchGenerator(model).generate(GIVEN, LENGTHS)
    generator, error = BatchGenerator(model), OfMine("of mine")
    with pytest.raises(OfMine) as caught:
        generator.generate(GIVEN, LENGTHS, logits_processor=[failing_at(30, error)])
    assert caught.value is error
    part = error.result  # type: ignore[attr-defined]
    assert isinstance(part, BatchResult) and part is generator.interrupted
    assert part.token_ids == whole.token_ids[:3] and part.report.finished == 3
    said = "3 of 8 results had finished: they are in error.result and in gen.interrupted"
    assert error.__notes__[-1] == f"{said}, not aligned with the prompts: use `.index`"
    assert generator.generate(GIVEN, LENGTHS).token_ids == whole.token_ids and generator.interrupted is None
    assert fingerprint(model) == before


def test_scores_too() -> None:
    model = build(FAMILY)
    whole = BatchGenerator(model, max_batch_tokens=4).score(GIVEN, GIVEN)
    generator, error = BatchGenerator(model, max_batch_tokens=4), OfMine()
    with hooked(model, failing_at(5, error)), pytest.raises(OfMine):
        generator.score(GIVEN, GIVEN)
    part = generator.interrupted
    assert isinstance(part, ScoreResult) and error.result is part and not part.complete  # type: ignore[attr-defined]
    assert 0 < len(part) < len(GIVEN) and f"{len(part)} of 8 results had finished" in error.__notes__[0]
    for score in part:
        assert score.logprobs == pytest.approx(whole[score.index].logprobs, abs=1e-4)


def test_errors_before_the_first_step_say_nothing_of_results() -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.raises(PromptError) as caught:
        generator.generate([[5], []], max_new_tokens=2)
    assert not hasattr(caught.value, "result") and not hasattr(caught.value, "__notes__")
    assert generator.interrupted is None


class WithAResult(Exception):
    result = "its own"


class ReadOnly(Exception):
    @property
    def result(self) -> str:
        return "its own"


@pytest.mark.parametrize("error", [WithAResult(), ReadOnly()])
def test_an_error_with_a_result_of_its_own_keeps_that(error: Any) -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.raises(type(error)) as caught:
        generator.generate(GIVEN, LENGTHS, logits_processor=[failing_at(30, error)])
    assert caught.value is error and error.result == "its own"
    assert generator.interrupted is not None and len(generator.interrupted) == 3
    assert error.__notes__[-1].startswith("3 of 8 results had finished: they are in gen.interrupted, ")


def test_the_same_error_again_tells_of_the_latest_call() -> None:
    generator, error = BatchGenerator(build(FAMILY)), OfMine()
    for call, finished in ((30, 3), (17, 1)):
        with pytest.raises(OfMine):
            generator.generate(GIVEN, LENGTHS, logits_processor=[failing_at(call, error)])
        assert len(error.result) == finished  # type: ignore[attr-defined]
        assert len(error.__notes__) == 2 and error.__notes__[1].startswith(f"{finished} of 8 results had finished")


def only_at(prompt: int, error: Exception) -> Callable[..., Any]:
    """A factory of one callable, which fails for this prompt."""

    def mine(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        raise error

    return lambda index, ids: [mine] if index == prompt else []


@pytest.mark.parametrize("beams", [1, 2])
def test_a_note_says_where_in_the_users_code_it_was_raised(beams: int) -> None:
    def fails(*given: Any) -> Any:
        raise OfMine

    cases: dict[str, dict[str, Any]] = {
        "the logits processor mine, at prompt 5": {"logits_processor": only_at(5, OfMine())},
        "a stopping criterion (mine), at prompt 5": {"stopping_criteria": only_at(5, OfMine())},
        "the factory of `logits_processor` (fails), at prompt 0": {"logits_processor": fails},
        "the factory of `stopping_criteria` (fails), at prompt 0": {"stopping_criteria": fails},
        "`prefix_allowed_tokens_fn`, at prompt 0": {"prefix_allowed_tokens_fn": fails},
    }
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=6, scheduler="fifo")
    for where, options in cases.items():
        with pytest.raises(OfMine) as caught:
            generator.generate(GIVEN, max_new_tokens=2, num_beams=beams, **options)
        assert caught.value.__notes__[0] == f"raised in your code, in {where}"
    with pytest.raises(OptionValueError) as refused:
        generator.generate(GIVEN, max_new_tokens=2, num_beams=beams, logits_processor=[lambda ids, scores: None])
    assert not any("your code" in note for note in getattr(refused.value, "__notes__", []))


def test_a_stream_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = build(FAMILY)
    before, generator, error = fingerprint(model), BatchGenerator(model), OfMine()
    stream = generator.stream(GIVEN, LENGTHS, logits_processor=[failing_at(30, error)])
    got = []
    with pytest.raises(OfMine):
        got += list(iter(lambda: next(stream), None))
    assert not hasattr(error, "result") and generator.interrupted is None  # they were handed out
    assert fingerprint(model) == before
    assert len(generator.generate(GIVEN, LENGTHS)) == 8


@pytest.mark.parametrize("way", ["generate", "beams", "score"])
def test_the_results_in_an_error_hold_no_memory_of_the_cache(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = Storages()
    storages.watch(monkeypatch.setattr)
    model, error = build(FAMILY), OfMine()
    generator = BatchGenerator(model, max_batch_tokens=6)
    options: dict[str, Any] = {"max_new_tokens": 3, "num_beams": 2 if way == "beams" else 1}
    call = partial(generator.score, GIVEN, GIVEN) if way == "score" else partial(generator.generate, GIVEN, **options)
    with hooked(model, failing_at(5, error)), pytest.raises(OfMine) as caught:
        call()
    assert caught.value.__traceback__ is not None and generator.interrupted is not None
    assert storages.seen and storages.alive() == 0


def test_behind_accelerated_the_error_alone_has_them() -> None:
    model, error = build(FAMILY), OfMine()
    ids = torch.tensor([row[:2] for row in GIVEN])
    with hooked(model, failing_at(6, error)), accelerated(model, max_batch_tokens=4), pytest.raises(OfMine) as caught:
        model.generate(ids, max_new_tokens=2)
    assert caught.value is error and len(error.result) > 0  # type: ignore[attr-defined]
    assert "gen.interrupted" not in error.__notes__[0]


def test_an_error_in_a_run_over_files_says_how_to_go_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records = [{"prompt": row, "max_new_tokens": 2 + place} for place, row in enumerate(GIVEN)]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    model, error = build(FAMILY), OfMine()
    generator = BatchGenerator(model)
    with hooked(model, failing_at(5, error)), pytest.raises(OfMine):
        run_file(generator, source, target, token_ids=True)
    assert any("of 8 results are in" in note and "run the same again" in note for note in error.__notes__)
    assert run_file(generator, source, target, token_ids=True).left == 0


# -- errors of a device ----------------------------------------------------------------------------------------

LOST = "CUDA error: an illegal memory access was encountered"


def test_which_errors_are_a_devices() -> None:
    kinds = [RuntimeError(LOST), *(kind(LOST) for kind in [getattr(torch, "AcceleratorError", None)] if kind)]
    assert all(is_device_error(each) and not is_out_of_memory(each) for each in kinds)
    memory = [RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()]
    assert all(is_out_of_memory(each) and not is_device_error(each) for each in memory)
    assert not any(is_device_error(each) or is_out_of_memory(each) for each in [ValueError(LOST), RuntimeError("no")])


def test_an_error_of_the_device_names_what_was_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """And cleaning up, which fails as well, does not hide it."""
    run_over_references(monkeypatch)
    failing(monkeypatch, ModelRunner, "rows", {4}, RuntimeError(LOST))
    generator = BatchGenerator(build("llama"), steps_per_sync=4)
    with monkeypatch.context() as patch:
        failing(patch, RunAhead, "close", range(99), RuntimeError(f"{LOST} (again)"))
        with pytest.raises(RuntimeError, match="access was encountered") as caught:
            generator.generate(GIVEN, max_new_tokens=6)
    assert "again" not in str(caught.value)
    note = next(note for note in caught.value.__notes__ if "CUDA_LAUNCH_BLOCKING=1" in note)
    assert "8 decode rows" in note and "of prompts 0, 1, 2, 3, 4 and 3 more" in note
    assert "a replayed CUDA graph" in note or "run eagerly" in note


@pytest.mark.parametrize("beams", [1, 2])
def test_steps_with_prompts_are_named_too(beams: int) -> None:
    model, error = build(FAMILY), RuntimeError(LOST)
    with hooked(model, failing_at(1, error)), pytest.raises(RuntimeError) as caught:
        BatchGenerator(model).generate(GIVEN, max_new_tokens=2, num_beams=beams)
    assert caught.value is error
    assert "a step of 24 tokens of prompts, run eagerly; of prompts 0, 1" in error.__notes__[0]


def test_giving_memory_back_to_a_lost_device_is_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaMemory(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", failing_at(1, RuntimeError(LOST)))
    memory.trim()
    monkeypatch.setattr(torch.cuda, "empty_cache", failing_at(1, RuntimeError("of another kind")))
    with pytest.raises(RuntimeError, match="another kind"):
        memory.trim()
