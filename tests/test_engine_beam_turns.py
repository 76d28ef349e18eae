"""Beam searches that take turns: one half of the groups is on its way to the device while the other half is chosen.

And their steps are replays of graphs.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from support_beam_cases import (
    CARRYING,
    FAMILY,
    OPTIONS,
    PROMPTS,
    STOPS,
    Case,
    clock_of,
    expected,
    groups_of,
    random_case,
    run,
    take_turns,
    without_filling,
)
from support_calls import answers, flipping_head, noted
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import build
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.engine.beams.collector import BeamCollector
from hf_batchllm.engine.beams.scheduler import BeamScheduler
from hf_batchllm.engine.loop import Engine


class Watched:
    """Which groups are on their way, and by how many rows each step of rows alone ran."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.alone = self.beside = 0  # steps launched while none was on its way, and while one was
        self.rows: list[int] = []
        step, collect = Engine._launch, BeamCollector.collect
        self._flying: list[set[Any]] = []

        def watched_step(engine: Engine, given: Any) -> Any:
            before = {group for group in groups_of(engine) if group.complete}
            running = step(engine, given)
            units = {unit for group in before for unit in (group.root, *group.beams)}
            assert not units.intersection(given.sampling()), "a group goes on before its beams were chosen"
            complete = {group for group in groups_of(engine) if group.complete} - before
            self.alone += not self._flying
            self.beside += bool(self._flying)
            self._flying.append(complete)
            assert len(self._flying) <= 2
            if not given.chunks:
                self.rows.append(len(given.rows))
            return running

        def watched_collect(collector: BeamCollector, running: Any, found: Any) -> Any:
            complete = self._flying.pop(0)
            assert complete == {group for each in found for group in each.groups}, "the oldest step is collected first"
            return collect(collector, running, found)

        patch.setattr(Engine, "_launch", watched_step)
        patch.setattr(BeamCollector, "collect", watched_collect)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    take_turns(monkeypatch)
    return Watched(monkeypatch)


@pytest.mark.some_cases
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3", *CARRYING])
def test_random_searches_are_those_of_generate(family: str, tight: bool, watched: Watched) -> None:
    rng = random.Random(f"{family} {tight}")
    for _ in range(3):
        run(random_case(rng, [family], tight))
    assert watched.alone > 0


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_as_graphs(family: str, device: str, watched: Watched) -> None:
    case = Case(family, PROMPTS, OPTIONS | {"max_new_tokens": 16}, {"page_size": 16})
    _, near = run(case, model_on(device, family))
    assert near <= 2 and watched.beside > 10


def test_each_turn_has_half_of_the_rows(watched: Watched) -> None:
    run(Case(FAMILY, PROMPTS, {"num_beams": 4, "max_new_tokens": 12}))
    assert watched.beside > 2 * 8
    assert set(watched.rows) == {4 * len(PROMPTS) // 2}


def test_few_rows_run_together(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.engine.beams.scheduler.TURNS_FROM", 4 * len(PROMPTS) + 1)
    run(Case(FAMILY, PROMPTS, {"num_beams": 4, "max_new_tokens": 12}))
    assert watched.beside == 0 and set(watched.rows) == {4 * len(PROMPTS)}


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_nothing_is_on_its_way_while_code_of_the_user_is_called(option: str, watched: Watched) -> None:
    def given(ids: torch.Tensor, scores: Any) -> Any:
        return scores if option == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool)

    run(Case(FAMILY, PROMPTS, OPTIONS | {option: [given]}))
    assert watched.alone > 0 and watched.beside == 0


def test_where_pages_run_short_nobody_gives_up_pages_that_are_in_use(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are taken while there are pages for all; then groups run together, and the youngest is preempted."""
    monkeypatch.setattr(BeamScheduler, "_expected_pages", lambda self, group: 1)  # so more are let in than have room
    case = Case(FAMILY, PROMPTS, {"num_beams": 3, "max_new_tokens": 24}, {"page_size": 4}, pages=8 + 3 * 6)
    flying = noted(monkeypatch, BeamScheduler, "_preempt", lambda *_: len(watched._flying))
    result, _ = run(case)
    assert result.report.preemptions > 0 and not any(flying)
    assert watched.beside > 0


def test_memory_runs_out_beside_another_step(watched: Watched) -> None:
    """The step that is on its way is seen before the failed one runs again, in parts."""
    model, failures = build(FAMILY), 0

    def fails(module: Any, args: Any) -> None:
        nonlocal failures
        if watched._flying and failures < 3:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")

    hooked = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(fails)
    with hooked, pytest.warns(UserWarning, match="ran out of memory"):
        run(Case(FAMILY, PROMPTS, OPTIONS), model)
    assert failures == 3


def test_time_is_over_once_all_has_been_seen(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_of(monkeypatch, each_step=1.0)
    result = answers(FAMILY, PROMPTS, max_time=20.5, **OPTIONS | {"max_new_tokens": 50})
    assert {each.finish_reason for each in result} == {"time"}
    lengths = {len(each.token_ids) for each in result}
    assert len(lengths) <= 2 and max(lengths) > 8 and watched.beside > 10
    assert (result.report.preemptions, result.report.recomputed_tokens) == (0, 0)


def test_after_an_interrupt_nothing_is_left(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(build(FAMILY), page_size=4)
    choose = BeamCollector.choose

    def stops(self: BeamCollector, candidates: Any) -> Any:
        if [*self.groups.values()][-1].made == 5:
            raise KeyboardInterrupt
        return choose(self, candidates)

    with monkeypatch.context() as patch:
        patch.setattr(BeamCollector, "choose", stops)
        lengths = [GenerationConfig(num_beams=3, max_new_tokens=2 + 8 * (index > 1)) for index in range(len(PROMPTS))]
        with pytest.raises(GenerationInterrupted) as caught:
            generator.generate(PROMPTS, lengths)
    assert {each.index for each in caught.value.result} == {0, 1}
    report = generator.last_report
    assert report.recomputed_tokens == 0 and report.timeline.steps.sum() == report.steps
    assert generator._resources.kv.cache is None
    watched._flying.clear()
    assert generator.generate(PROMPTS[:1], **OPTIONS).token_ids


# -- graphs ----------------------------------------------------------------------------------------------------

SEARCH: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 16, "num_return_sequences": 2}


def replayed(result: Any) -> int:
    found = re.match(r"(\d+) steps? replayed", result.report.graphs)
    return int(found[1]) if found else 0


@pytest.mark.some_cases
@pytest.mark.parametrize("options", [{}, {"eos_token_id": STOPS, "early_stopping": True, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_steps_of_beams_are_replays(family: str, options: dict[str, Any], device: str) -> None:
    case = Case(family, PROMPTS, SEARCH | options | {"pad_token_id": 0}, {"page_size": 16})
    result, near = run(case, model_on(device, family))
    assert near <= 2
    assert replayed(result) > 5


def test_with_little_memory(device: str) -> None:
    pages = 4 + 3 * 2
    case = Case("llama", PROMPTS, SEARCH | {"max_new_tokens": 24}, {"page_size": 16}, pages=pages)
    result, near = run(case, model_on(device, "llama"))
    assert near <= 2
    assert replayed(result) > 5


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_code_that_changes_the_model_is_heard(option: str, device: str) -> None:
    model, prompt = model_on(device, "llama"), PROMPTS[0]
    given = SEARCH | {"num_return_sequences": 1, "eos_token_id": None}
    with flipping_head(model, option, len(prompt) + 11) as code:
        out = expected(model, prompt, **given, **code)
    with flipping_head(model, option, len(prompt) + 11) as code:
        result = answers(model, [prompt], {"fuse": False}, **given, **code)
    assert result.token_ids[0] == without_filling(
        out.sequences[0, len(prompt) :].tolist(), out.beam_indices[0].tolist()
    )
    assert 5 < replayed(result) < 11  # too few steps were left for another capture


def test_without_graphs_where_they_are_not_wanted(device: str) -> None:
    case = Case("llama", PROMPTS, SEARCH, {"page_size": 16, "cuda_graphs": False})
    result, near = run(case, model_on(device, "llama"))
    assert near <= 2
    assert not replayed(result)
