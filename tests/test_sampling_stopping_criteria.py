"""Stopping criteria of the user's own: they are asked, and end sequences, as in ``generate``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_families import build
from support_kernels import plain
from support_parity import reference
from support_parity import watched as watched  # a fixture
from support_stopping import FAMILY, NEW_TOKENS, PROMPTS, TOKENIZER, Below, alone, assert_as_alone, generated, make
from transformers import MaxLengthCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import EosTokenCriteria

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.errors import OptionValueError

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
    assert_as_alone(result, prompts, options)
    for prompt, expected in zip(prompts, asked, strict=True):
        # A prompt that is in the list twice is asked about twice.
        times = sum(other == prompt for other in prompts)
        mine = [ids for ids, scores in criterion.asked if ids[: len(prompt)] == prompt and scores is None]
        assert all(mine.count(ids) >= times for ids, _ in expected)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_plain_functions_and_several_criteria() -> None:
    options = {
        "stopping_criteria": [
            lambda ids, scores, **rest: ids.shape[1] >= 30,
            Below(4),
            StopStringCriteria(TOKENIZER, ["abc"]),
        ],
        "stop_strings": ["dd"],  # whose place is taken
    }
    result = make().generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options)
    assert_as_alone(result, PROMPTS, options)


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


def test_min_new_tokens_hold_back_the_options_eos_and_no_other() -> None:
    options = {"stopping_criteria": [EosTokenCriteria(85)], "eos_token_id": [45], "min_new_tokens": 12}
    assert_as_alone(
        make().generate(PROMPTS, max_new_tokens=NEW_TOKENS, **options), PROMPTS, options | {"pad_token_id": 0}
    )


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Below(3), r"`stopping_criteria` is a single criterion \(Below\): put it into a list"),
        (5, "must be a list of criteria, or a function that gives a list for each sequence, not an int"),
        ([Below(3), "stop"], "holds a string at place 1, which is not a criterion"),
        (lambda ids, scores: False, r"is a single criterion \(<lambda>\): put it into a list"),
    ],
)
def test_what_is_no_list_of_criteria(given: Any, message: str) -> None:
    with make() as generator, pytest.raises(OptionValueError, match=message):
        generator.generate([[5, 6]], max_new_tokens=3, stopping_criteria=given)


@pytest.mark.some_cases
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_what_a_criterion_raises_comes_out(error: BaseException, device: str, watched: list[Any]) -> None:
    def raises(ids: torch.Tensor, scores: Any, **rest: Any) -> bool:
        if ids.shape[1] > 40:
            raise error
        return ids.shape[1] == 12

    prompts = [[5, 6, 7, 8], list(range(30)), [5, 6, 7], list(range(34))]
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    generator = BatchGenerator(model, steps_per_sync=8, page_size=4)
    with pytest.raises(GenerationInterrupted if isinstance(error, KeyboardInterrupt) else type(error)) as caught:
        generator.generate(prompts, max_new_tokens=NEW_TOKENS, stopping_criteria=[raises])
    if isinstance(error, KeyboardInterrupt):
        assert [generation.index for generation in caught.value.result] in ([0, 2], [2], [])
    report = generator.last_report
    assert report is not None and report.computed_tokens == generator.plan(prompts).computed_tokens
    assert all(cache.free_pages == cache.num_pages for cache in watched)
    assert_as_alone(generator.generate(prompts, max_new_tokens=NEW_TOKENS), prompts, {})
