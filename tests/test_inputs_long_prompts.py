"""Prompts that are too long: warned of beyond the model's context, cut where that is asked for, refused in GiB."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support_chats import ASKED, chat_tokenizer, warned
from support_families import build
from transformers.generation import stopping_criteria

from hf_batchllm import BatchGenerator, PromptError

FAMILY, CONTEXT = "llama", 40
LONG = [5, 6, 7, 8, 9, 30, 31, 32, 33, 34]
TEXT = "w5 w6 w7 w8 w9"


@cache
def model(context: int | None = CONTEXT) -> Any:
    made = copy.deepcopy(build(FAMILY))
    vars(made.config)["max_position_embeddings"] = context
    return made


@pytest.fixture
def generator() -> BatchGenerator:
    return BatchGenerator(model(), chat_tokenizer())


def seen(generator: BatchGenerator, prompts: Any, **options: Any) -> list[list[int]]:
    return [each.prompt_token_ids for each in generator.generate(prompts, max_new_tokens=2, **options)]


def warnings(generator: BatchGenerator, prompts: Any, **options: Any) -> list[str]:
    return warned(generator.generate, prompts, **{"max_new_tokens": 1, **options})[1]


@pytest.mark.parametrize(("tokens", "new"), [(CONTEXT - 3, 4), (CONTEXT - 3, 5), (CONTEXT, 2), (CONTEXT + 1, 1)])
def test_the_warning_comes_where_generate_warns(
    generator: BatchGenerator, tokens: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, said = [5] * tokens, list[str]()
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)
    generator.model.generate(
        torch.tensor([ids]), max_new_tokens=new, eos_token_id=None, do_sample=False, pad_token_id=0
    )
    theirs = any("predefined maximum length" in text for text in said)
    # A prompt that is too long itself is known before its only new token.
    assert bool(warnings(generator, [ids], max_new_tokens=new, eos_token_id=None)) is (theirs or tokens > CONTEXT)


def test_a_prompt_beyond_the_context_is_named_once(generator: BatchGenerator) -> None:
    made_for = "the 40 tokens that LlamaForCausalLM was made for (`max_position_embeddings`)"
    long = [5] * 60
    assert warnings(generator, [[5], long], max_new_tokens=10) == [
        f"prompt 1 has 60 tokens, more than {made_for}. Results may be poor there: set `max_prompt_tokens` (to 31, "
        "say) or shorten what is too long"
    ]
    assert warnings(generator, [[5], long], max_new_tokens=10) == []
    # Another list has other prompts, also after a call that was refused.
    with pytest.raises(PromptError):
        generator.generate([long], max_new_tokens=10**9)
    assert len(warnings(generator, [long], max_new_tokens=10)) == 1

    def others(prompts: Any, **options: Any) -> str:
        (text,) = warnings(BatchGenerator(generator.model), prompts, **options)
        return text

    assert others([[5], [5] * 38], max_new_tokens=10) == (
        f"prompt 1 has 38 tokens and may grow by 10, beyond {made_for}. Results may be poor there: lower "
        "`max_new_tokens`, or set `max_prompt_tokens` (to 31, say) or shorten what is too long"
    )
    assert others([long, [5], long, long, [5] * 38, [5] * 37], max_new_tokens=10) == (
        f"3 of 6 prompts are longer than {made_for}: prompts 0, 2-3; the longest has 60 tokens. 2 of 6 prompts may "
        "grow beyond them: prompts 4-5; the longest may have 48 tokens. Results may be poor there: set "
        "`max_prompt_tokens` (to 31, say) or shorten what is too long"
    )
    assert others([[5]], max_new_tokens=60).endswith("Results may be poor there: lower `max_new_tokens`")
    assert others(torch.tensor([long]), pad_token_id=0).startswith("prompt 0 has 60 tokens, more than")
    score = BatchGenerator(generator.model).score
    assert warned(score, [[5], long], choices=[[5], [6]])[1] == [
        f"context 1 has 61 tokens, more than {made_for}. Results may be poor there: shorten what is too long"
    ]


def test_within_the_context_and_without_one_nothing_is_said(generator: BatchGenerator) -> None:
    assert warnings(generator, [[5] * 38, [6]], max_new_tokens=3) == []
    assert warnings(generator, [[5] * 60], max_new_tokens=10, max_prompt_tokens=31)[0].endswith("and was cut")
    assert warnings(BatchGenerator(model(None)), [[5] * 60]) == []
    with pytest.raises(PromptError, match=r"has learned [\d,]+ positions"):
        BatchGenerator(build("gpt2")).generate([[5] * 2000], max_new_tokens=1)


def test_long_prompts_are_cut_where_that_is_asked_for(generator: BatchGenerator) -> None:
    assert seen(generator, [LONG, [5], torch.tensor(LONG)], max_prompt_tokens=3) == [LONG[-3:], [5], LONG[-3:]]
    assert seen(generator, [LONG], max_prompt_tokens=3, truncation_side="right") == [LONG[:3]]
    assert seen(generator, [LONG] * 4, max_prompt_tokens=[3, None, 2, 10], truncation_side=["right", *[None] * 3]) == [
        LONG[:3],
        LONG,
        LONG[-2:],
        LONG,
    ]
    # What the tokenizer puts around a text stays: w1 is its BOS.
    assert seen(generator, [TEXT], max_prompt_tokens=3) == [[1, 8, 9]]
    assert seen(generator, [TEXT], max_prompt_tokens=3, truncation_side="right") == [[1, 5, 6]]
    assert seen(generator, [TEXT], max_prompt_tokens=1) == [[9]]
    whole = seen(generator, [ASKED])[0]
    assert seen(generator, [ASKED], max_prompt_tokens=4) == [whole[-4:]]
    # The answer is that to what is left, and a plan counts what is left.
    cut, left = (
        generator.generate([ids], max_new_tokens=4, **options)[0]
        for ids, options in [(LONG, {"max_prompt_tokens": 3}), (LONG[-3:], {})]
    )
    assert cut.token_ids == left.token_ids
    assert generator.plan([LONG, TEXT], max_prompt_tokens=3).total_tokens == 6


def test_a_tokenizer_that_ends_texts_cuts_as_the_tokenizer_does() -> None:
    from tokenizers import processors

    tokenizer = chat_tokenizer()
    ends = [("w1", 1), ("w2", 2)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="w1 $A w2", special_tokens=ends)
    generator = BatchGenerator(build(FAMILY), tokenizer)
    for side in ("left", "right"):
        tokenizer.truncation_side = side
        for most in (3, 4, 7):
            expected = tokenizer(TEXT, truncation=True, max_length=most)["input_ids"]
            tokenizer.backend_tokenizer.no_truncation()
            assert seen(generator, [TEXT], max_prompt_tokens=most, truncation_side=side) == [expected]


def test_what_was_cut_is_said_once(generator: BatchGenerator) -> None:
    assert warnings(generator, [LONG, [5], TEXT], max_prompt_tokens=3) == [
        "2 of 3 prompts have more tokens than `max_prompt_tokens` and were cut (prompts 0, 2; the longest has 10)"
    ]
    assert warnings(generator, [LONG, [5], TEXT], max_prompt_tokens=3) == []
    one = warnings(generator, [LONG], max_prompt_tokens=3)
    assert one == ["prompt 0 has 10 tokens, more than `max_prompt_tokens`, and was cut"]
    assert warnings(generator, [LONG], truncation_side="left") == [
        "`truncation_side` has no effect without `max_prompt_tokens`: set it, too"
    ]


def test_a_length_without_end_is_what_is_blamed(generator: BatchGenerator) -> None:
    with pytest.raises(PromptError) as caught:
        generator.generate([[5, 6, 7]], max_new_tokens=10**9)
    why = str(caught.value)
    assert "prompt 0 has 3 tokens and may grow by 1,000,000,000, which takes " in why and "GiB of KV cache" in why
    positions = generator.model.config.max_position_embeddings  # far fewer than the KV cache has room for
    assert f"lower `max_new_tokens` (to {positions - 2:,} at most: LlamaForCausalLM was made for" in why
    assert "bytes" not in why and "kv_memory" not in why


@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_advised_fits(beams: int) -> None:
    """The most new tokens, and the size of the cache: with either of them the call runs."""
    ids = [5] * 21
    small = BatchGenerator(model(), kv_memory="30KiB", page_size=4)
    search = {"num_beams": beams, "eos_token_id": None, "pad_token_id": 0}
    with pytest.raises(PromptError) as caught:
        small.generate([ids], max_new_tokens=60, **search)
    why = str(caught.value)
    most = int(why.split("(to ")[1].split(" at most")[0])
    size = why.split('raise `kv_memory` (to "')[1].split('"')[0]
    assert len(small.generate([ids], max_new_tokens=most, **search)[0].token_ids) == most
    with pytest.raises(PromptError):
        small.generate([ids], max_new_tokens=most + 1, **search)
    large = BatchGenerator(model(), kv_memory=size, page_size=4)
    assert len(large.generate([ids], max_new_tokens=60, **search)[0].token_ids) == 60
