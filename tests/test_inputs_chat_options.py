"""Chats with tools and template options, and chats that are continued: as transformers encodes them, at every door."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support_chats import ASKED, ASSISTANT, BEGUN, END, NO_THINKING, NO_THOUGHT, TOOL, WEATHER, chat_tokenizer, warned
from support_families import build
from transformers import pipeline

from hf_batchllm import BatchGenerator, PromptError, UnsupportedOptionError, accelerated

FAMILY = "llama"
CALLED = [*ASKED, {"role": "assistant", "content": "w7", "tool_calls": [{"function": {"arguments": {"x": "w8"}}}]}]


def add(x: int) -> int:
    """Adds.

    Args:
        x: a number
    """
    return x


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


@pytest.fixture
def generator(tokenizer: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), tokenizer)


def seen(generator: BatchGenerator, prompts: Any, **options: Any) -> list[list[int]]:
    """The prompts as the model saw them."""
    return [each.prompt_token_ids for each in generator.generate(prompts, max_new_tokens=2, **options)]


def encoded(tokenizer: Any, chat: Any, continued: bool = False, **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        chat, add_generation_prompt=not continued, continue_final_message=continued, return_dict=False, **options
    )
    return ids


def test_a_chat_that_ends_with_the_assistant_is_continued(generator: BatchGenerator, tokenizer: Any) -> None:
    before = copy.deepcopy(BEGUN)
    assert seen(generator, [ASKED, BEGUN, "w5", tuple(BEGUN)]) == [
        encoded(tokenizer, ASKED),
        encoded(tokenizer, BEGUN, continued=True),
        [1, 5],
        encoded(tokenizer, BEGUN, continued=True),
    ]
    assert encoded(tokenizer, BEGUN, continued=True)[-2:] == [7, 8] and before == BEGUN
    assert seen(generator, BEGUN, continue_final_message=False) == [encoded(tokenizer, BEGUN)]
    assert seen(generator, [ASKED], continue_final_message=True) == [encoded(tokenizer, ASKED, continued=True)]
    flags = [None, False, True, None]
    assert seen(generator, [BEGUN, BEGUN, ASKED, ASKED], continue_final_message=flags) == [
        encoded(tokenizer, BEGUN, continued=True),
        encoded(tokenizer, BEGUN),
        encoded(tokenizer, ASKED, continued=True),
        encoded(tokenizer, ASKED),
    ]


def test_every_door_continues_the_same_chats(generator: BatchGenerator, tokenizer: Any) -> None:
    chats, options = [ASKED, BEGUN], {"max_new_tokens": 4, "do_sample": False}
    stock = pipeline("text-generation", model=generator.model, tokenizer=tokenizer, device="cpu")
    expected = stock(chats, return_full_text=False, **options)
    with accelerated(stock):
        assert stock(chats, return_full_text=False, **options) == expected
        assert stock.last_report is not None
    ours = generator.generate(chats, **options)
    assert [each.text for each in ours] == [row[0]["generated_text"] for row in expected]
    assert [each.prompt_token_ids for each in generator.stream(chats, **options)] == seen(generator, chats)
    # A new message has other words after it.
    assert generator.generate([BEGUN], continue_final_message=False, **options)[0].token_ids != ours[1].token_ids


def test_scores_and_plans_read_chats_in_the_same_way(generator: BatchGenerator, tokenizer: Any) -> None:
    def alone(ids: list[int]) -> list[float]:
        return [score.logprob for score in generator.score([ids], choices=[[5], [6]])]

    def of_chat(chat: Any, **options: Any) -> list[float]:
        return [score.logprob for score in generator.score([chat], choices=["w5", "w6"], **options)]

    assert of_chat(BEGUN) == alone(encoded(tokenizer, BEGUN, continued=True))
    assert of_chat(BEGUN, continue_final_message=False) == alone(encoded(tokenizer, BEGUN))
    assert of_chat(ASKED, chat_template_kwargs=NO_THOUGHT) == alone(encoded(tokenizer, ASKED, **NO_THOUGHT))
    assert generator.plan([ASKED], tools=[WEATHER] * 3).total_tokens == len(encoded(tokenizer, ASKED)) + 6
    with pytest.raises(UnsupportedOptionError, match=r"`max_prompt_tokens` is not an option of score\(\)"):
        generator.score(["w5"], ["w6"], max_prompt_tokens=3)
    with pytest.raises(UnsupportedOptionError, match=r"not an option of plan\(\); did you mean `chat_template_kwargs`"):
        generator.plan([ASKED], chat_template_kwarg={})


def test_tools_and_what_else_templates_are_given(generator: BatchGenerator, tokenizer: Any) -> None:
    both = {"tools": [WEATHER], "chat_template_kwargs": NO_THOUGHT}
    (ids,) = seen(generator, [ASKED], **both)
    assert ids == encoded(tokenizer, ASKED, tools=[WEATHER], **NO_THOUGHT)
    assert ids[:2] == [TOOL, 9] and ids[-1] == NO_THINKING
    assert (
        seen(generator, [ASKED], tools=[])
        == seen(generator, [ASKED], chat_template_kwargs={})
        == seen(generator, [ASKED])
    )
    mixed = [ASKED, ASKED, BEGUN, "w5", [6]]
    kwargs, tools = [NO_THOUGHT, None, dict(NO_THOUGHT), None, None], [None, [WEATHER], [dict(WEATHER)], None, None]
    assert seen(generator, mixed, chat_template_kwargs=kwargs, tools=tools) == [
        encoded(tokenizer, ASKED, **NO_THOUGHT),
        encoded(tokenizer, ASKED, tools=[WEATHER]),
        encoded(tokenizer, BEGUN, continued=True, tools=[WEATHER], **NO_THOUGHT),
        [1, 5],
        [6],
    ]
    assert seen(generator, [ASKED], tools=[add]) == [encoded(tokenizer, ASKED, tools=[add])]
    other = "{{ 'w50 w51' }}"
    assert seen(generator, [ASKED], chat_template_kwargs={"chat_template": other}) == [[50, 51]]


def test_a_pipeline_takes_them_too(generator: BatchGenerator, tokenizer: Any) -> None:
    given = {"return_tensors": True, "max_new_tokens": 2, "do_sample": False}

    def tokens(rows: Any) -> list[list[int]]:
        return [row[0]["generated_token_ids"] for row in rows]

    stock = pipeline("text-generation", model=generator.model, tokenizer=tokenizer, device="cpu")
    expected = tokens(stock([ASKED], tools=[WEATHER], tokenizer_encode_kwargs=NO_THOUGHT, **given))
    assert NO_THINKING in expected[0] and TOOL in expected[0]
    with accelerated(stock):
        assert tokens(stock([ASKED], tools=[WEATHER], tokenizer_encode_kwargs=NO_THOUGHT, **given)) == expected
        assert stock.last_report is not None


def test_a_chat_that_cannot_be_continued_is_named(generator: BatchGenerator) -> None:
    bad = [CALLED, [*ASKED, {"role": "assistant", "reasoning": "w5"}]]
    with pytest.raises(PromptError) as caught:
        generator.generate([ASKED, *bad], max_new_tokens=2, continue_final_message=[None, None, True])
    assert caught.value.problems.keys() == {1, 2}
    assert "ends with a call of a tool, which cannot be continued: add the tool's answer" in caught.value.problems[1]
    assert "has no 'content' to continue" in caught.value.problems[2]
    # Without a content there is nothing to continue: a new message begins.
    assert seen(generator, bad, continue_final_message=[False, None])[0][-3:-1] == [8, END]


def test_options_that_change_nothing_are_warned_of_once(generator: BatchGenerator, tokenizer: Any) -> None:
    def warnings(prompts: Any, **options: Any) -> list[str]:
        return warned(generator.generate, prompts, max_new_tokens=2, **options)[1]

    misspelt = {"enable_thinkng": False}
    assert warnings([ASKED], chat_template_kwargs=misspelt) == [
        "`enable_thinkng` in `chat_template_kwargs` has no effect: the tokenizer's chat template does not name it; did "
        "you mean `enable_thinking`?"
    ]
    assert warnings([ASKED], chat_template_kwargs=misspelt) == []
    assert warnings(["w5", [6], ASKED], tools=[None, [WEATHER], [WEATHER]]) == []  # one of them is a chat
    # What a chat has, too, may have been meant for all prompts.
    assert warnings(["w5", ASKED], tools=[[WEATHER], [dict(WEATHER)]], chat_template_kwargs=[NO_THOUGHT, None]) == [
        "`chat_template_kwargs` is for chats, and prompt 0 is no chat: no effect there"
    ]
    generator = BatchGenerator(generator.model, tokenizer)
    assert warnings(["w5", [6]], tools=[WEATHER]) == [
        "`tools` is for chats, and prompts 0-1 are no chats: no effect there"
    ]
    plain = chat_tokenizer()
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    without = BatchGenerator(generator.model, plain)
    assert warned(without.generate, [ASKED], max_new_tokens=2, tools=[WEATHER])[1] == [
        "`tools` has no effect: the tokenizer's chat template does not name them"
    ]
    assert ASSISTANT in seen(generator, [ASKED])[0]
