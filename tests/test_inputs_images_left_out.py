"""Texts of images are left out while a chat is made into tokens, and places for RoPE are counted: all as it was."""

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


def test_a_model_that_counts_places_otherwise_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind an image a token of text stands two places on."""
    model, processor = model_of("qwen2_vl"), processor_of("qwen2_vl")
    own = type(model.model).get_rope_index

    def every_second(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        places, behind = own(self, input_ids=input_ids, **given)
        return 2 * places, behind + input_ids.shape[1]

    monkeypatch.setattr(type(model.model), "get_rope_index", every_second)
    checked, _ = check_prompts(CHATS, tokenizer=lambda: processor, images=ImageReader(model))
    for prompt in checked:
        assert prompt is not None and prompt.images is not None and prompt.images.places is not None
        assert (prompt.images.places.of_prompt % 2 == 0).all()
