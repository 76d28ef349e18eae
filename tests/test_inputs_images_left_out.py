"""Texts of images are left out while a chat is made into tokens: these are what they were, as are places for RoPE."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support_image_prompts import PICTURED, inputs_of, model_of, picture, processor_of, shows, user, words
from support_kernels import plain
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_batchllm.inputs.images.image_reader import ImageReader
from hf_batchllm.inputs.images.image_texts import ImageTexts
from hf_batchllm.inputs.prompts import check_prompts

pytestmark = plain

# Gemma 3's texts begin with a break of the line, which what is before them could be one token with.
WHOLE = ("gemma3",)
CHATS = [
    user(words(3), shows(picture(1)), words(5, 6)),
    user(shows(picture(1)), words(*range(4, 30))),
    user(words(*range(4, 30)), shows(picture(2, 96, 64)), words(7)),
    user(shows(picture(2, 96, 64)), words(8), shows(picture(1)), words(3, 4), shows(picture(1)), words(9)),
    user(words(9, 9, 9), shows(picture(3, 64, 128)), words(9), shows(picture(4, 64, 128)), words(*range(11, 22))),
]


@pytest.mark.parametrize("family", PICTURED)
def test_tokens_and_places_are_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = model_of(family), copy.copy(processor_of(family))
    tokens: list[int] = []
    own = type(processor.tokenizer).__call__

    def call(self: Any, text: Any, **given: Any) -> Any:
        made = own(self, text, **given)
        tokens.append(sum(map(len, made["input_ids"])) if isinstance(text, list) else 0)
        return made

    monkeypatch.setattr(type(processor.tokenizer), "__call__", call)
    prompts, problems = check_prompts(CHATS, tokenizer=lambda: processor, images=ImageReader(model))
    monkeypatch.undo()
    assert not problems
    for chat, prompt in zip(CHATS, prompts, strict=True):
        assert prompt is not None and prompt.images is not None
        inputs = inputs_of(family, chat)
        assert prompt.ids.tolist() == inputs["input_ids"][0].tolist()
        if hasattr(model.model, "get_rope_index"):
            types = (inputs["input_ids"] == model.config.image_token_id).int()
            places, behind = model.model.get_rope_index(
                input_ids=inputs["input_ids"],
                mm_token_type_ids=types,
                image_grid_thw=inputs["image_grid_thw"],
                attention_mask=torch.ones_like(types),
            )
            assert prompt.images.places is not None
            assert np.array_equal(prompt.images.places.of_prompt, places[:, 0].numpy())
            assert prompt.images.places.behind == behind.item()
    long = [len(prompt.ids) for prompt in prompts if prompt]
    assert (tokens[-1] == long[-1]) == (family in WHOLE)


def test_a_placeholder_in_a_text_is_an_error_of_its_prompt() -> None:
    processor, token = processor_of("llava"), processor_of("llava").image_token
    chats = [*CHATS[:2], user(words(3), shows(picture(1)), {"type": "text", "text": f"w4 {token} w5"})]
    checked, problems = check_prompts(chats, tokenizer=lambda: processor, images=ImageReader(model_of("llava")))
    assert checked[:2].count(None) == 0
    assert list(problems) == [2]


@pytest.mark.parametrize(("given", "bad"), [({"truncation": True, "max_length": 5}, [0]), ({"max_length": 500}, [])])
def test_tokens_that_are_cut_off_are_counted_with_those_of_images(given: dict[str, Any], bad: list[int]) -> None:
    """A processor that would cut in the middle of an image says so."""
    model, processor = model_of("llava"), processor_of("llava")
    options = {"chat_template_kwargs": {"processor_kwargs": given}}
    _, problems = check_prompts(CHATS[:1], tokenizer=lambda: processor, images=ImageReader(model), options=options)
    assert list(problems) == bad


@pytest.mark.parametrize("where", ["text_kwargs", "of the processor", "of the tokenizer"])
def test_a_cut_that_is_asked_for_elsewhere_counts_tokens_of_images(where: str) -> None:
    """Wherever a processor takes its options from: a tokenizer's file may hold the length that it was trained with."""
    model, processor = model_of("llava"), copy.deepcopy(processor_of("llava"))
    cut = {"truncation": True, "max_length": 20}
    if where == "of the processor":
        processor.text_kwargs = cut
    elif where == "of the tokenizer":
        processor.tokenizer.init_kwargs["max_length"] = 20
    given = {"text_kwargs": cut} if where == "text_kwargs" else {}
    options = {"chat_template_kwargs": {"processor_kwargs": given}}
    chats = [CHATS[0], user(words(3), shows(picture(1)), words(*range(4, 30)))]
    checked, problems = check_prompts(chats, tokenizer=lambda: processor, images=ImageReader(model), options=options)
    assert not problems
    for chat, prompt in zip(chats, checked, strict=True):
        made = processor.apply_chat_template(
            [chat], add_generation_prompt=True, tokenize=True, return_dict=True, processor_kwargs=given
        )
        assert prompt is not None and prompt.ids.tolist() == list(made["input_ids"][0])
    if where != "of the processor":  # older versions of transformers do not look there
        assert checked[1] is not None and len(checked[1].ids) == 20


def test_breaks_of_lines_that_are_added_tokens_are_one_token_with_those_of_an_image() -> None:
    """As Gemma 3's tokenizer has them: its texts of images begin and end with two."""
    processor = copy.deepcopy(processor_of("gemma3"))
    processor.tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (1, 2, 3, 4)])
    processor.chat_template = processor.chat_template.replace("' ' + part['text'] + ' '", "part['text']")
    before, behind = {"type": "text", "text": "w3\n"}, {"type": "text", "text": "\n\nw5"}
    chats = [CHATS[0], user(before, shows(picture(1)), behind)]
    checked, problems = check_prompts(chats, tokenizer=lambda: processor, images=ImageReader(model_of("gemma3")))
    assert not problems
    for chat, prompt in zip(chats, checked, strict=True):
        made = processor.apply_chat_template([chat], add_generation_prompt=True, tokenize=True, return_dict=True)
        assert prompt is not None and prompt.ids.tolist() == list(made["input_ids"][0])
    at_once = processor.tokenizer.convert_tokens_to_ids(["\n" * 3, "\n" * 4])
    assert checked[1] is not None and {*at_once} < {*checked[1].ids.tolist()}


@pytest.mark.parametrize(
    "other", ["a<i>", "<i>a", "a<", "<i><i>", "x<i>x", AddedToken("w", normalized=False, single_word=True)]
)
def test_a_token_that_may_reach_over_a_border_keeps_texts_in(other: str | AddedToken) -> None:
    tokenizer = Tokenizer(models.WordLevel({"w0": 0, "a": 1}, unk_token="w0"))
    tokenizer.add_special_tokens([AddedToken("<i>", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    place = fast.convert_tokens_to_ids("<i>")
    harmless = [AddedToken(token, normalized=False) for token in ("<", "i>a", "<i", "<ix>", ">")]
    fast.add_tokens([*harmless, AddedToken("a<i>a", normalized=True)])
    assert ImageTexts(fast, place).may_be_left_out("<i>", [place])
    fast.add_tokens([AddedToken(other, normalized=False) if isinstance(other, str) else other])
    assert not ImageTexts(fast, place).may_be_left_out("<i>", [place])


def test_images_that_touch_are_an_error_of_their_prompt_where_the_model_takes_them_for_one() -> None:
    processor = copy.copy(processor_of("qwen2_vl"))
    processor.chat_template = processor.chat_template.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    chats = [user(words(3), shows(picture(1)), shows(picture(1)), words(4)), CHATS[0]]
    checked, problems = check_prompts(chats, tokenizer=lambda: processor, images=ImageReader(model_of("qwen2_vl")))
    assert list(problems) == [0] and "nothing between them" in str(problems[0])
    assert checked[1] is not None


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_an_image_without_a_token_of_the_models_is_an_error_of_its_prompt(family: str) -> None:
    """As the processor of another model makes it."""
    model, processor = copy.deepcopy(model_of(family)), processor_of(family)
    model.config.image_token_id = 7
    _, problems = check_prompts(CHATS[:1], tokenizer=lambda: processor, images=ImageReader(model))
    assert list(problems) == [0] and "another model's" in str(problems[0])


def test_which_texts_may_be_left_out() -> None:
    tokenizer = Tokenizer(models.WordLevel({"w0": 0, "a": 1, "b": 2}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    added = [AddedToken("<i>", normalized=False), AddedToken("<e>", normalized=False)]
    added += [AddedToken("<l>", normalized=False, lstrip=True), AddedToken("<n>", normalized=True)]
    tokenizer.add_special_tokens(added[:3])
    tokenizer.add_tokens(added[3:])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = {text: fast(text)["input_ids"] for text in ("<i>", "<i><i>a<e>", "a<i>", "<i>a", " <i>", "<l><i>", "<i><n>")}
    texts = ImageTexts(fast, fast.convert_tokens_to_ids("<i>"))
    assert [text for text, row in ids.items() if texts.may_be_left_out(text, row)] == ["<i>", "<i><i>a<e>"]
    assert not texts.may_be_left_out("", [])
    for token in ("<l>", "<n>", "a"):
        assert not ImageTexts(fast, fast.convert_tokens_to_ids(token)).may_be_left_out("<i>", ids["<i>"])
    place = ids["<i>"][0]
    assert texts.put_back([1, place, 2, place], [[place, place], [place, 2]]) == [1, place, place, 2, place, 2]
    assert texts.put_back([1, place, 2, place], [[place, place]]) is None


def test_the_model_is_asked_again_where_a_prompt_is_longer_or_an_image_of_another_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, processor = model_of("qwen2_vl"), processor_of("qwen2_vl")
    own, asked = type(model.model).get_rope_index, []

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        asked.append(1)
        return own(self, *given, **named)

    monkeypatch.setattr(type(model.model), "get_rope_index", counted)
    chats = [user(shows(picture(number)), words(5, number + 3)) for number in range(6)]
    chats += [user(shows(picture(1)), words(5, 6, 7)), user(shows(picture(1, 64, 128)), words(5, 6))]
    chats += [user(shows(picture(1)), words(5))]
    checked, _ = check_prompts(chats, tokenizer=lambda: processor, images=ImageReader(model))
    assert None not in checked and len(asked) == 3
    for chat, prompt in zip(chats, checked, strict=True):
        inputs = inputs_of("qwen2_vl", chat)
        types = (inputs["input_ids"] == model.config.image_token_id).int()
        grids, mask = inputs["image_grid_thw"], torch.ones_like(types)
        places, behind = own(model.model, inputs["input_ids"], types, image_grid_thw=grids, attention_mask=mask)
        assert prompt is not None and prompt.images is not None and prompt.images.places is not None
        assert np.array_equal(prompt.images.places.of_prompt, places[:, 0].numpy())
        assert prompt.images.places.behind == behind.item()
