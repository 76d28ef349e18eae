"""Beam search: the answers of ``generate`` for each prompt alone, whatever else shares the steps and the memory."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support_beam_cases import (
    CARRYING,
    FAMILIES,
    FAMILY,
    OPTIONS,
    PREFIX,
    PROMPTS,
    STOPS,
    Case,
    assert_as_generate,
    check,
    clock_of,
    groups_of,
    proved,
    random_case,
    run,
)
from support_calls import answers, failing
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_distributions import SIDES, assert_drawn_from, critical_value
from support_families import build
from support_parity import counted_tokens, pages_of_memory
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, GenerationInterrupted, PromptError, accelerated
from hf_batchllm.engine.beams.candidates import draw_candidates
from hf_batchllm.engine.loop import Engine
from hf_batchllm.wording import shown_size

# -- as generate -----------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("family", FAMILIES)
def test_random_searches_are_those_of_generate(family: str) -> None:
    rng = random.Random(family)
    for _ in range(3):
        run(random_case(rng, [family]))


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "gpt2", *CARRYING])
def test_over_the_kernels(family: str, device: str) -> None:
    rng = random.Random(family)
    for _ in range(2 if device == "cpu" else 8):
        case = random_case(rng, [family])
        if device == "cuda":
            case.config["page_size"], case.pages = 64, 0
        run(case, model_on(device, family))


def test_prompts_are_computed_once_and_beams_share_their_past() -> None:
    prompts, width, new = PROMPTS[:4], 5, 6
    model = build(FAMILY)
    with counted_tokens(model) as sizes, BatchGenerator(model, min_shared_tokens=0) as generator:
        result = generator.generate(prompts, num_beams=width, max_new_tokens=new)
    own = len(PREFIX) + sum(len(prompt) - len(PREFIX) for prompt in prompts)
    assert sum(sizes) == own + len(prompts) * width * (new - 1)
    report = result.report
    assert (report.computed_tokens, report.recomputed_tokens) == (own, 0)
    assert report.model_tokens == sum(sizes) and report.new_tokens == len(prompts) * new
    assert (report.sequences, report.finished) == (4, 4)


def test_answers_are_in_order_and_say_how_they_ended() -> None:
    result = check(num_return_sequences=4, eos_token_id=STOPS, pad_token_id=0, max_new_tokens=5)
    assert [(each.index, each.sample) for each in result] == [(i, j) for i in range(len(PROMPTS)) for j in range(4)]
    assert {each.finish_reason for each in result} == {"stop", "length"}
    for each in result:
        assert (each.finish_reason == "stop") == (each.token_ids[-1] in STOPS)
    for index in range(len(PROMPTS)):
        scores = [each.score for each in result[4 * index : 4 * index + 4]]
        assert scores == sorted(scores, reverse=True)
    streamed = list(BatchGenerator(build(FAMILY)).stream(PROMPTS, **OPTIONS))
    whole = answers(FAMILY, PROMPTS, **OPTIONS)
    assert sorted((each.index, each.sample, each.token_ids) for each in streamed) == [
        (each.index, each.sample, each.token_ids) for each in whole
    ]


def test_prompts_with_settings_of_their_own() -> None:
    kinds = [
        {"num_beams": 2, "max_new_tokens": 3},
        {"num_beams": 5, "num_return_sequences": 3, "max_new_tokens": 9, "length_penalty": -1.0},
        {"num_beams": 3, "early_stopping": True, "eos_token_id": STOPS, "pad_token_id": 0, "max_new_tokens": 7},
    ]
    configs = [GenerationConfig(**kinds[index % 3]) for index in range(len(PROMPTS))]
    result = answers(FAMILY, PROMPTS, {"page_size": 2}, generation_config=configs)
    for index, prompt in enumerate(PROMPTS):
        moved = [replace(each, index=0) for each in result if each.index == index]
        assert_as_generate(Case(FAMILY, [prompt], kinds[index % 3]), build(FAMILY), moved)


# -- tensors ---------------------------------------------------------------------------------------------------


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": STOPS, "pad_token_id": 0},  # 0 is false: generate fills up with the first EOS
        {"eos_token_id": STOPS, "pad_token_id": 9, "num_return_sequences": 4, "early_stopping": True},
        {"max_new_tokens": None, "max_length": 38, "min_length": 34, "eos_token_id": STOPS, "pad_token_id": 9},
    ],
    ids=str,
)
def test_tensors_come_back_as_from_generate(options: dict[str, Any]) -> None:
    model, options = build(FAMILY), OPTIONS | options
    with BatchGenerator(model) as generator:
        for prompts in (PROMPTS[:1], PROMPTS):
            given = padded(prompts) | options
            assert torch.equal(generator.generate(**given), model.generate(**given))
            asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
            mine, theirs = generator.generate(**given, **asked), model.generate(**given, **asked)
            assert type(mine) is type(theirs)
            assert theirs.keys() == mine.keys()
            for name in ("sequences", "beam_indices"):
                assert torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype
            torch.testing.assert_close(mine.sequences_scores, theirs.sequences_scores)
            for name in ("scores", "logits"):
                assert len(mine[name]) == len(theirs[name])
                if len(prompts) == 1:  # of several, those that end sooner have zeros in the end
                    torch.testing.assert_close(mine[name], theirs[name], atol=1e-4, rtol=1e-4)
            plain = generator.generate(**given, return_dict_in_generate=True)
            assert plain.sequences_scores is None and plain.beam_indices is not None


def test_a_model_that_is_accelerated_searches_as_well() -> None:
    model = build(FAMILY)
    given = padded(PROMPTS) | OPTIONS
    expected_rows = model.generate(**given)
    with warnings.catch_warnings(), accelerated(model):
        warnings.simplefilter("error")
        assert torch.equal(model.generate(**given), expected_rows)
        assert model.generate.last_report.sequences == 2 * len(PROMPTS)


# -- memory ----------------------------------------------------------------------------------------------------


def least(prompts: list[list[int]], size: int) -> int:
    """Pages that the longest prompt needs, each beam in pages of its own."""
    own = max(-(-len(prompt) // size) for prompt in prompts)
    return own + OPTIONS["num_beams"] * -(-(OPTIONS["max_new_tokens"] - 1) // size)


@pytest.mark.some_cases
@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("more", [0, 2, 9])
def test_with_little_memory_prompts_wait_and_begin_anew(size: int, more: int) -> None:
    model, options = build(FAMILY), OPTIONS | {"max_new_tokens": 8, "eos_token_id": [101 - 1], "pad_token_id": 0}
    pages = least(PROMPTS, size) + more
    memory = pages_of_memory(model, pages, size)
    with proved() as held, BatchGenerator(model, page_size=size, kv_memory=memory, share_prefixes=False) as generator:
        result = generator.generate(PROMPTS, **options)
    assert assert_as_generate(Case(FAMILY, PROMPTS, options), model, result) == 0
    assert max(held) <= pages
    report = result.report
    decoded = len(PROMPTS) * OPTIONS["num_beams"] * 7
    assert report.model_tokens == report.computed_tokens + report.recomputed_tokens + decoded
    assert report.computed_tokens == sum(map(len, PROMPTS))


def test_a_prompt_alone_goes_on_when_its_pages_are_spent() -> None:
    """Beams that part again and again leave pages half empty: then each gets pages of its own."""
    model, prompt, options = build(FAMILY), PROMPTS[4], {"num_beams": 3, "max_new_tokens": 60}
    memory = pages_of_memory(model, 1 + 3, 64)
    whole = BatchGenerator(model).generate([prompt], **options)
    with proved(), BatchGenerator(model, kv_memory=memory) as generator:
        result = generator.generate([prompt], **options)
    assert result.token_ids == whole.token_ids
    report = result.report
    assert report.preemptions > 0 and report.recomputed_tokens > 0
    assert report.computed_tokens == len(prompt)


def test_beams_that_part_again_and_again_take_few_pages() -> None:
    """Each parting begins a page; what nobody reads any more goes at once."""
    width, new, size = 4, 60, 16
    with proved() as held, BatchGenerator(build("gpt2"), page_size=size) as generator:
        generator.generate(PROMPTS[4:5], num_beams=width, max_new_tokens=new)
    assert max(held) <= 1 + -(-new // size) + 2 * width


def test_what_does_not_fit_is_named_with_its_beams() -> None:
    model = build(FAMILY)
    pages = least(PROMPTS, 4)
    memory = pages_of_memory(model, pages - 1, 4)
    generator = BatchGenerator(model, page_size=4, kv_memory=memory)
    with pytest.raises(PromptError, match=r"may grow by 8 in each of 4 beams, which takes .* of KV cache") as caught:
        generator.generate(PROMPTS, **OPTIONS)
    size = shown_size(pages_of_memory(model, pages, 4), at_least=True)
    assert f'raise `kv_memory` (to "{size}")' in str(caught.value)
    recorded = generator.generate(PROMPTS, on_error="record", **OPTIONS)
    assert {each.finish_reason for each in recorded} == {"length", "error"}
    assert len(recorded) == 2 * len(PROMPTS)


# -- ends of calls ---------------------------------------------------------------------------------------------


def test_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_of(monkeypatch, each_step=1.0)
    result = answers(FAMILY, PROMPTS, {"max_batch_tokens": 8}, max_time=3.5, **OPTIONS | {"max_new_tokens": 50})
    assert {each.finish_reason for each in result} == {"time"}
    some, none = [[each for each in result if bool(each.token_ids) is has] for has in (True, False)]
    assert some and none
    assert all(each.score is not None for each in some) and all(each.score is None for each in none)
    assert result[0].token_ids  # the first in line


def test_after_an_interrupt_all_pages_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(FAMILY)
    generator = BatchGenerator(model, page_size=4)
    with monkeypatch.context() as patch:
        failing(patch, Engine, "_launch", {6}, KeyboardInterrupt)
        lengths = [GenerationConfig(num_beams=3, max_new_tokens=2 + 8 * (index > 1)) for index in range(len(PROMPTS))]
        with pytest.raises(GenerationInterrupted) as caught:
            generator.generate(PROMPTS, lengths)
    assert [each.index for each in caught.value.result] == [0, 1]
    assert generator._resources.kv.cache is None
    assert generator.generate(PROMPTS[:1], **OPTIONS).token_ids
    stream = generator.stream(PROMPTS, lengths)
    next(stream)
    stream.close()
    assert generator._resources.kv.cache is None


def test_nothing_was_computed_again_where_a_call_ends_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt some beams have been run, and the others have not."""
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=2)
    now, done = clock_of(monkeypatch), 0

    def late(self: Engine, given: Any) -> Any:
        nonlocal done
        result = step(self, given)
        if any(0 < len(group.logits) < len(group.beams) for group in groups_of(self)):
            done += 1
            if done == 2:
                if error is None:
                    now[0] = 10.0
                else:
                    raise error
        return result

    step = Engine._launch
    monkeypatch.setattr(Engine, "_launch", late)
    for error in (None, ValueError("a hook of the user's")):
        now[0], done = 0.0, 0
        try:
            generator.generate(PROMPTS[:1], max_time=3.5, **OPTIONS)
        except ValueError:
            assert error is not None
        report = generator.last_report
        assert report.model_tokens > report.computed_tokens > 0
        assert (report.preemptions, report.recomputed_tokens) == (0, 0)


# -- sampling --------------------------------------------------------------------------------------------------

DRAWN = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "do_sample": True, "top_k": 20}


def test_what_is_drawn_hangs_on_seed_and_place_alone() -> None:
    results = [
        answers(FAMILY, PROMPTS, config, seed=4, **DRAWN).token_ids
        for config in ({}, {"max_batch_tokens": 3}, {"page_size": 1, "share_prefixes": False})
    ]
    assert results[0] == results[1] == results[2]
    other = answers(FAMILY, PROMPTS, seed=5, **DRAWN)
    assert other.token_ids != results[0] and other.report.seed == 5
    seeds = list(range(len(PROMPTS)))
    own = answers(FAMILY, PROMPTS, seed=seeds, **DRAWN).token_ids
    turned = answers(FAMILY, PROMPTS[::-1], seed=seeds[::-1], **DRAWN).token_ids
    assert [turned[2 * index : 2 * index + 2] for index in seeds[::-1]] == [own[2 * i : 2 * i + 2] for i in seeds]
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(answers(FAMILY, PROMPTS, **DRAWN).token_ids)
    assert drawn[0] == drawn[1]


def test_candidates_are_drawn_one_after_the_other() -> None:
    """Each from what those before it have left, whichever prompts share the step."""
    count, width = 20_000, 2
    sums = torch.tensor([[0.3, -1.0, 1.2, 0.0, -2.5, 0.9]])  # of two beams and three tokens
    drawn = draw_candidates(
        sums.expand(count, -1), 3, width, [(2**64 - 7, number) for number in range(count)], [5] * count
    )
    share = sums[0].double().softmax(dim=-1).tolist()
    ways = list(itertools.permutations(range(6), 3))
    chances = [share[a] * share[b] / (1 - share[a]) * share[c] / (1 - share[a] - share[b]) for a, b, c in ways]
    number = {way: place for place, way in enumerate(ways)}
    assert_drawn_from(np.array(chances), [number[tuple(row)] for row in drawn.tolist()])
    some = draw_candidates(sums.expand(3, -1), 3, width, [(2**64 - 7, number) for number in (7, 100, 3)], [5] * 3)
    assert torch.equal(some, drawn[[7, 100, 3]])
    other = draw_candidates(sums.expand(count, -1), 3, width, [(1, number) for number in range(count)], [5] * count)
    assert not torch.equal(other, drawn)


def test_answers_come_as_often_as_from_generate() -> None:
    count, model, prompt = 800, build(FAMILY), PROMPTS[4]
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 2, "do_sample": True, "top_k": 12}
    options |= {"temperature": 2.0, "eos_token_id": STOPS, "pad_token_id": 1}
    torch.manual_seed(1)
    theirs = model.generate(torch.tensor([prompt] * count), **options)[:, len(prompt) :].view(count, 2, -1)
    mine = BatchGenerator(model).generate([prompt] * count, seed=2, **options).token_ids
    filled = [tuple(row + [1] * (2 - len(row))) for row in mine]
    found = Counter(zip(filled[::2], filled[1::2], strict=True))
    wanted = Counter(tuple(map(tuple, pair)) for pair in theirs.tolist())
    often = [pair for pair in found | wanted if found[pair] + wanted[pair] >= 16]
    pairs = [(found[pair], wanted[pair]) for pair in often]
    pairs.append((count - sum(a for a, _ in pairs), count - sum(b for _, b in pairs)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in pairs if a + b)
    assert len(often) > 5 and statistic < critical_value(len(often), SIDES)
