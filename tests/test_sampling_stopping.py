"""Ends of sequences: criteria of the user's own, and ends of all kinds together.

``generate``, one prompt at a time, is the oracle. On the device's loop rows run on after the host has seen an end, and
nobody may notice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_device_loop import assert_adds_up, model_on
from support_device_loop import device as device  # a fixture
from support_families import build
from support_kernels import plain
from support_letter_tokenizers import EOS
from support_parity import mixed_prompts, pages_of_memory, reference
from support_parity import watched as watched  # a fixture
from support_stopping import (
    FAMILY,
    NEW_TOKENS,
    PROMPTS,
    TOKENIZER,
    Below,
    alone,
    assert_as_alone,
    ends_as_alone,
    generated,
    make,
)
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import EosTokenCriteria

from hf_batchllm import BatchGenerator, GenerationInterrupted

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "makes",
    [bool, lambda ends: torch.tensor([ends]), lambda ends: torch.tensor(ends)],
    ids=["bool", "tensor", "scalar"],
)
def test_a_criterion_is_asked_what_generate_asks_it(makes: Any, watched: list[Any]) -> None:
    asked, prompts = [], PROMPTS if makes is bool else PROMPTS[:4]
    for prompt in prompts:
        criterion = Below(8, makes)
        generated(prompt, stopping_criteria=[criterion], eos_token_id=[60, 61], pad_token_id=0)
        asked.append(criterion.asked)
    criterion = Below(8, makes)
    options = {"stopping_criteria": [criterion], "eos_token_id": [60, 61], "pad_token_id": 0}
    result = make(page_size=8).generate(prompts, max_new_tokens=NEW_TOKENS, **options)
    ours = criterion.asked[:]  # before ``generate`` asks it, too
    assert_as_alone(result, prompts, options)
    for prompt, expected in zip(prompts, asked, strict=True):
        # A prompt that is in the list twice is asked about twice.
        times = sum(other == prompt for other in prompts)
        mine = [ids for ids, scores in ours if ids[: len(prompt)] == prompt and scores is None]
        assert all(mine.count(ids) >= times for ids, _ in expected)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize(
    "options",
    [
        {
            "stopping_criteria": [
                lambda ids, scores, **rest: ids.shape[1] >= 30,
                Below(4),
                StopStringCriteria(TOKENIZER, ["abc"]),
            ],
            "stop_strings": ["dd"],  # whose place is taken
        },
        {"stopping_criteria": [EosTokenCriteria(85)], "eos_token_id": [45], "min_new_tokens": 12, "pad_token_id": 0},
    ],
    ids=["functions and several", "a minimum holds back the options' EOS and no other"],
)
def test_they_end_sequences_as_in_generate(options: dict[str, Any]) -> None:
    ends_as_alone(options)


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "given",
    [
        [MaxLengthCriteria(40)],
        [MaxLengthCriteria(5)],  # there is one token at least
        [MaxLengthCriteria(60), MaxLengthCriteria(44)],
        [EosTokenCriteria(7)],
        [EosTokenCriteria([9, 10]), EosTokenCriteria(torch.tensor([11, 85]))],
    ],
)
def test_the_users_take_the_place_of_those_that_the_options_ask_for(given: list[Any]) -> None:
    options = {"stopping_criteria": given, "eos_token_id": list(range(20, 40)), "pad_token_id": 0}
    result = make().generate(PROMPTS, max_new_tokens=NEW_TOKENS, progress=False, **options)
    for prompt, generation in zip(PROMPTS, result, strict=True):
        expected = alone(prompt, **options)
        _, sure = reference(FAMILY, tuple(prompt), NEW_TOKENS)
        if sure >= NEW_TOKENS and len(expected) <= NEW_TOKENS:
            assert generation.token_ids == expected


def test_a_longer_max_length_than_the_options_is_the_one_that_counts() -> None:
    result = make().generate([PROMPTS[0]], max_new_tokens=3, stopping_criteria=[MaxLengthCriteria(len(PROMPTS[0]) + 9)])
    assert len(result[0].token_ids) == 9 and result[0].finish_reason == "length"


@pytest.mark.parametrize("further", [2, 9])
def test_the_options_length_is_still_where_they_force_an_eos(further: int) -> None:
    """A MaxLengthCriteria takes the place of a criterion, and no processor knows of it."""
    prompt = PROMPTS[0]
    options = {"forced_eos_token_id": 99, "max_new_tokens": 5, "pad_token_id": 0}
    options |= {"stopping_criteria": [MaxLengthCriteria(len(prompt) + further)]}
    result = make().generate([prompt], **options)
    assert result.token_ids[0] == generated(prompt, **options) and (99 in result.token_ids[0]) == (further == 9)


def test_with_tensors_a_max_length_counts_the_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "pad_token_id": 0, "stopping_criteria": [MaxLengthCriteria(9)]}
    expected = build(FAMILY).generate(ids, **options)
    assert make().generate(input_ids=ids, **options).tolist() == expected.tolist() and expected.shape == (2, 9)


class Counts(StoppingCriteria):
    """Ends after so many calls: one of it cannot serve two sequences."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_factory_gives_each_sequence_criteria_of_its_own() -> None:
    made: list[tuple[int, list[int]]] = []

    def factory(index: int, prompt_token_ids: list[int]) -> list[Any]:
        made.append((index, prompt_token_ids))
        return [Counts(index + 2)]

    prompts = PROMPTS[:5]
    result = make().generate(prompts, max_new_tokens=NEW_TOKENS, stopping_criteria=factory)
    assert [len(tokens) for tokens in result.token_ids] == [2, 3, 4, 5, 6]
    assert sorted(made) == [(index, list(prompt)) for index, prompt in enumerate(prompts)]
    options = {"do_sample": True, "num_return_sequences": 3, "seed": 1, "stopping_criteria": factory}
    result = make().generate(prompts[:2], max_new_tokens=NEW_TOKENS, **options)
    assert [len(tokens) for tokens in result.token_ids] == [2, 2, 2, 3, 3, 3]
    assert [index for index, _ in made[5:]].count(0) == 3


@pytest.mark.some_cases
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_what_a_criterion_raises_comes_out(error: BaseException, device: str, watched: list[Any]) -> None:
    def raises(ids: torch.Tensor, scores: Any, **rest: Any) -> bool:
        if ids.shape[1] > 40:
            raise error
        return ids.shape[1] == 12

    prompts = [[5, 6, 7, 8], list(range(30)), [5, 6, 7], list(range(34))]
    generator = BatchGenerator(model_on(device, FAMILY), steps_per_sync=8, page_size=4)
    with pytest.raises(GenerationInterrupted if isinstance(error, KeyboardInterrupt) else type(error)) as caught:
        generator.generate(prompts, max_new_tokens=NEW_TOKENS, stopping_criteria=[raises])
    if isinstance(error, KeyboardInterrupt):
        assert [generation.index for generation in caught.value.result] in ([0, 2], [2], [])
    report = generator.last_report
    assert report is not None and report.computed_tokens == generator.plan(prompts).computed_tokens
    assert all(cache.free_pages == cache.num_pages for cache in watched)
    ends_as_alone({}, prompts=prompts, generator=generator)


# -- ends of all kinds together --------------------------------------------------------------------------------


def test_every_prompt_has_its_own_eos_and_strings(watched: list[Any]) -> None:
    each: list[dict[str, Any]] = [
        {"eos_token_id": [*range(10)], "pad_token_id": 0},
        {"eos_token_id": [*range(50, 58)], "pad_token_id": 0},
        {"stop_strings": ["ab"]},
        {"stop_strings": ["dd", "eeb"], "eos_token_id": 85, "pad_token_id": 0},
        {},
    ]
    made = [GenerationConfig(max_new_tokens=NEW_TOKENS, **options) for options in each]
    configs = [made[index % len(made)] for index in range(len(PROMPTS))]
    given = {"generation_config": configs}
    ends_as_alone(lambda index: each[index % len(each)], given, page_size=8)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize("steps", [1, 7, 32])
def test_ends_that_only_the_host_sees(steps: int, device: str, watched: list[Any]) -> None:
    """Rows run on for up to two bursts, beyond pages that are others' by then."""
    prompts = mixed_prompts(3)
    options = {"stop_strings": ["abc", "dd"], "eos_token_id": [*range(3, 97, 31)], "pad_token_id": 0}
    options |= {"stopping_criteria": [Below(5)]}
    config = {"steps_per_sync": steps, "page_size": 4, "max_batch_tokens": 64}
    generator = BatchGenerator(model_on(device, FAMILY), TOKENIZER, **config)
    result = ends_as_alone(options, prompts=prompts, generator=generator)
    assert_adds_up(generator, prompts, result, steps)
    assert result.report.idle_tokens > 0 or steps == 1
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize(("steps", "scheduler"), [(2, "groups"), (8, "fifo")])
def test_pages_of_an_ended_row_are_written_by_it_only_before_their_next_user_comes(
    steps: int, scheduler: str, device: str, watched: list[Any]
) -> None:
    """So little memory that a page freed is a page taken, and prefixes are kept for calls to come."""
    options = {"stop_strings": ["abc", "dd"], "stopping_criteria": [Below(2)]}
    memory = pages_of_memory(build(FAMILY), 28, 4)
    generator = BatchGenerator(
        model_on(device, FAMILY), TOKENIZER, steps_per_sync=steps, page_size=4, kv_memory=memory, min_shared_tokens=4,
        keep_prefixes=3, scheduler=scheduler,
    )  # fmt: skip
    results = [ends_as_alone(options, generator=generator) for _ in range(2)]
    assert all(result.report.idle_tokens > 0 for result in results)
    assert results[1].report.cached_tokens > 0
    if scheduler == "groups":
        assert results[0].report.preemptions > 0
    generator.close()


def test_answers_that_strings_may_end_are_looked_at_in_time(device: str) -> None:
    """Without an EOS token, too, nobody runs for long before somebody looks."""
    generator = BatchGenerator(model_on(device, FAMILY), TOKENIZER, steps_per_sync=64)
    result = generator.generate([PROMPTS[0]], max_new_tokens=400, stopping_criteria=[lambda ids, scores: True])
    assert len(result[0].token_ids) == 1 and result.report.idle_tokens <= 8


def test_rows_of_a_tensor_are_padded_once_they_have_ended() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [30, 31, 32, 33]])
    options = {"max_new_tokens": NEW_TOKENS, "stop_strings": ["dd", "ab"], "tokenizer": TOKENIZER}
    with_eos = options | {"eos_token_id": EOS, "pad_token_id": 1}
    expected = build(FAMILY).generate(ids, **with_eos)
    with make() as generator:
        assert generator.generate(input_ids=ids, **with_eos).tolist() == expected.tolist()
        # Without an EOS token ``generate`` runs all rows on until all have ended; here they are padded.
        padded = generator.generate(input_ids=ids, pad_token_id=1, **options)
        assert padded.tolist() == expected.tolist()
        one = generator.generate(input_ids=ids[:1], **options)
        assert one.tolist() == build(FAMILY).generate(ids[:1], **options).tolist()
