"""Ends of all kinds together. ``generate``, one prompt at a time, is the oracle; on the device's loop rows run on after
the host has seen an end, and nobody may notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_device_loop import assert_adds_up
from support_device_loop import device as device  # a fixture
from support_families import build
from support_kernels import plain
from support_letter_tokenizers import EOS
from support_parity import mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture
from support_stopping import FAMILY, NEW_TOKENS, PROMPTS, TOKENIZER, Below, assert_as_alone, make
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.errors import OptionValueError

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]


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
    result = make(page_size=8).generate(PROMPTS, configs, progress=False)
    assert_as_alone(result, PROMPTS, lambda index: each[index % len(each)])
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize("steps", [1, 7, 32])
def test_ends_that_only_the_host_sees(steps: int, device: str, watched: list[Any]) -> None:
    """Rows run on for up to two bursts, beyond pages that are others' by then."""
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    prompts = mixed_prompts(3)
    options = {"stop_strings": ["abc", "dd"], "eos_token_id": [*range(3, 97, 31)], "pad_token_id": 0}
    options |= {"stopping_criteria": [Below(5)]}
    generator = BatchGenerator(model, TOKENIZER, steps_per_sync=steps, page_size=4, max_batch_tokens=64)
    result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False, **options)
    assert_as_alone(result, prompts, options)
    assert_adds_up(generator, prompts, result, steps)
    assert result.report.idle_tokens > 0 or steps == 1
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize(("steps", "scheduler"), [(2, "groups"), (8, "fifo")])
def test_pages_of_an_ended_row_are_written_by_it_only_before_their_next_owner_comes(
    steps: int, scheduler: str, device: str, watched: list[Any]
) -> None:
    """So little memory that a page freed is a page taken, and prefixes are kept for calls to come."""
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    prompts = PROMPTS
    options = {"stop_strings": ["abc", "dd"], "stopping_criteria": [Below(2)]}
    memory = pages_of_memory(build(FAMILY), 28, 4)
    generator = BatchGenerator(
        model, TOKENIZER, steps_per_sync=steps, page_size=4, kv_memory=memory, min_shared_tokens=4,
        keep_prefixes=3, scheduler=scheduler,
    )  # fmt: skip
    results = [generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False, **options) for _ in range(2)]
    for result in results:
        assert_as_alone(result, prompts, options)
        assert result.report.idle_tokens > 0
    assert results[1].report.cached_tokens > 0
    if scheduler == "groups":
        assert results[0].report.preemptions > 0
    generator.close()


def test_answers_that_strings_may_end_are_looked_at_in_time(device: str) -> None:
    """Without an EOS token, too, nobody runs for long before somebody looks."""
    model = build(FAMILY) if device == "cpu" else copy.deepcopy(build(FAMILY)).to(device)
    generator = BatchGenerator(model, TOKENIZER, steps_per_sync=64)
    result = generator.generate([PROMPTS[0]], max_new_tokens=400, stopping_criteria=[lambda ids, scores: True])
    assert len(result[0].token_ids) == 1 and result.report.idle_tokens <= 8


def test_rows_of_a_tensor_are_padded_once_they_have_ended() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [30, 31, 32, 33]])
    options = {"max_new_tokens": NEW_TOKENS, "stop_strings": ["dd", "ab"], "tokenizer": TOKENIZER}
    with_eos = options | {"eos_token_id": EOS, "pad_token_id": 1}
    expected = build(FAMILY).generate(ids, **with_eos)
    with make() as generator:
        assert generator.generate(input_ids=ids, **with_eos).tolist() == expected.tolist()
        with pytest.raises(OptionValueError, match="`pad_token_id` is None, and rows may end at different lengths"):
            generator.generate(input_ids=ids, **options)
        # Without an EOS token ``generate`` runs all rows on until all have ended; here they are padded.
        padded = generator.generate(input_ids=ids, pad_token_id=1, **options)
        assert padded.tolist() == expected.tolist()
        one = generator.generate(input_ids=ids[:1], **options)
        assert one.tolist() == build(FAMILY).generate(ids[:1], **options).tolist()
