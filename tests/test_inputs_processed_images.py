"""What a processor makes of prompts with images is taken as it is, for each prompt or for a batch of rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_image_prompts import PICTURED, generated, model_of, picture, processor_of, shows, user, words
from support_kernels import plain

from hf_batchllm import BatchGenerator, PromptError, UnsupportedOptionError, accelerated
from hf_batchllm.inputs.images import image_models, image_shares

pytestmark = plain
NEW = 5
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
PAGE, OTHER = picture(1, 64, 96), picture(2, 96, 64)
CHATS = [
    user(shows(PAGE), words(3, 4, 5)),
    user(words(5), shows(OTHER), words(6), shows(PAGE), words(7)),
    user(shows(PAGE), words(9)),
    user(words(8, 9)),
]


def made(family: str, chats: Any, side: str | None = None) -> Any:
    given: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    if side is not None:
        given["processor_kwargs"] = {"padding": True, "padding_side": side}
    tokenizer = processor_of(family).tokenizer
    before, tokenizer.pad_token = tokenizer.pad_token, "w0"
    try:
        return processor_of(family).apply_chat_template(chats, return_tensors="pt", **given)
    finally:
        tokenizer.pad_token = before


def generator_of(family: str, **config: Any) -> BatchGenerator:
    return BatchGenerator(model_of(family), **{"min_shared_tokens": 2, **config})


@pytest.mark.some_cases
@pytest.mark.parametrize("family", PICTURED)
def test_each_prompt_by_itself_and_rows_of_a_batch(family: str) -> None:
    """Without a processor: nothing is read but the tensors. And the batch is what the model's own generate gives."""
    expected = generated(family, CHATS, NEW)
    with generator_of(family) as generator:
        result = generator.generate([made(family, chat) for chat in CHATS], **OPTIONS)
        assert result.token_ids == expected
        assert result.report.plan.computed_tokens < result.report.plan.total_tokens
        assert "1 run" in result.report.images or family == "mistral3", "pictures of two sizes"
        for side in ("left", "right"):
            batch = made(family, CHATS, side)
            rows = generator.generate(**batch, **OPTIONS)
            assert torch.equal(rows[:, : batch["input_ids"].shape[1]], batch["input_ids"])
            assert rows[:, batch["input_ids"].shape[1] :].tolist() == expected
    batch = made(family, CHATS[:3], "left")
    before = model_of(family).generate(**batch, **OPTIONS)
    with accelerated(model_of(family)) as model:
        assert torch.equal(model.generate(**batch, **OPTIONS), before)
        assert model.last_report.images


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_conversation_does_not_go_on_from_a_cache_that_was_not_returned(family: str) -> None:
    model, first = model_of(family), made(family, CHATS[:1])
    given = {**OPTIONS, "return_dict_in_generate": True}
    cached = model.generate(**first, **given)
    with accelerated(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        turn = model.generate(**first, **given)
        assert turn.keys() == cached.keys() and torch.equal(turn.sequences, cached.sequences)
        ids, (*_, none) = torch.cat([turn.sequences, torch.tensor([[5, 6]])], dim=1), turn.to_tuple()
        with pytest.raises(UnsupportedOptionError, match=r"`past_key_values` .* anew, with its images"):
            model.generate(input_ids=ids, past_key_values=none, **OPTIONS)
        assert model.last_report is None
    with pytest.raises(AttributeError, match="anew, with its images"):
        model.generate(input_ids=ids, past_key_values=none, **OPTIONS)
    with generator_of(family) as generator, pytest.raises(UnsupportedOptionError, match="whole prompts, with their"):
        generator.generate(input_ids=ids, past_key_values=none, **OPTIONS)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_equal_pixels_are_equal_tokens_and_different_ones_are_not(family: str) -> None:
    page = user(shows(PAGE), words(*range(3, 12)))
    with generator_of(family, keep_prefixes=4) as generator:
        first = generator.generate(**made(family, [page] * 3 + [user(shows(OTHER), words(3))], "left"), **OPTIONS)
        assert generator.last_report is not None and "2 images" in generator.last_report.images
        assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[3])
        once = len(made(family, page)["input_ids"][0])
        assert generator.last_report.plan.computed_tokens < 2 * once + 6
        assert generator.generate([made(family, page)], **OPTIONS).report.cached_tokens == once - 1
        other = user(shows(picture(3, 64, 96)), words(*range(3, 12)))
        assert generator.generate([made(family, other)], **OPTIONS).report.cached_tokens < 3


def test_forms_that_one_prompt_may_have() -> None:
    family = "qwen3_vl"
    (plain_one,) = generated(family, CHATS[:1], NEW)
    inputs = made(family, CHATS[0])
    bare = {name: value for name, value in inputs.items() if name in ("input_ids", "pixel_values", "image_grid_thw")}
    forms = [
        dict(inputs),
        bare,
        {**bare, "input_ids": inputs["input_ids"][0], "attention_mask": None},
        {**bare, "input_ids": inputs["input_ids"].tolist(), "pixel_values": inputs["pixel_values"].numpy()},
        {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()},
    ]
    padded = made(family, [CHATS[0], CHATS[1]], "left")
    patches = len(inputs["pixel_values"])
    cut = {name: value[:1] for name, value in padded.items()} | {"pixel_values": padded["pixel_values"][:patches]}
    with generator_of(family) as generator:
        result = generator.generate([*forms, cut, CHATS[3] and made(family, CHATS[3]), [3, 4]], **OPTIONS)
        assert result.token_ids[:6] == [plain_one] * 6
        assert result.token_ids[6] == generated(family, CHATS[3:], NEW)[0]
        assert [each.index for each in generator.stream(forms[:2], **OPTIONS)] == [0, 1]
        assert generator.plan(forms[:2]).computed_tokens < 2 * inputs["input_ids"].shape[1]


def test_chats_and_what_was_made_of_others_go_together() -> None:
    family = "llava"
    with BatchGenerator(model_of(family), processor_of(family), min_shared_tokens=2) as generator:
        result = generator.generate([CHATS[0], made(family, CHATS[1]), CHATS[2]], **OPTIONS)
    assert result.token_ids == generated(family, CHATS[:3], NEW)


@contextmanager
def refused(name: str, says: str) -> Iterator[None]:
    with pytest.raises(UnsupportedOptionError, match=says) as caught:
        yield
    assert caught.value.option == name


@pytest.mark.parametrize(
    ("family", "changed", "name", "says"),
    [
        ("llava", {"pixel_values": lambda t: t[:3]}, "pixel_values", "holds 3 images of one size, and in the rows"),
        ("llava", {"pixel_values": lambda t: t[:2]}, "pixel_values", "has an image that begins in a row"),
        ("llava", {"pixel_values": lambda t: t[:0]}, "pixel_values", "holds 0 images"),
        ("llava", {"pixel_values": lambda t: t[0]}, "pixel_values", "has shape"),
        ("llava", {"pixel_values": lambda t: [t]}, "pixel_values", "is a list: give the processor `return_tensors"),
        ("llava", {"image_grid_thw": lambda t: torch.ones(4, 3)}, "image_grid_thw", "is not an input of llava"),
        ("llava", {"pixel_values": lambda t: None, "image_sizes": lambda t: torch.ones(4, 2)}, "image_sizes", "goes w"),
        ("qwen3_vl", {"image_grid_thw": lambda t: None}, "pixel_values", "goes with `image_grid_thw`: pass"),
        ("qwen3_vl", {"image_grid_thw": lambda t: t[:2]}, "pixel_values", "by `image_grid_thw` it has"),
        ("qwen3_vl", {"image_grid_thw": lambda t: t[0]}, "image_grid_thw", "and not .images, 3."),
        ("qwen3_vl", {"mm_token_type_ids": lambda t: 2 * t}, "mm_token_type_ids", "videos and audio are not supported"),
        ("qwen3_vl", {"mm_token_type_ids": lambda t: t[:1]}, "mm_token_type_ids", "is no tensor of the shape"),
        ("mistral3", {"image_sizes": lambda t: t // 2}, "pixel_values", "take 4 tokens, and in the rows"),
        ("idefics3", {"pixel_values": lambda t: t[0]}, "pixel_values", "five dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, changed: dict[str, Any], name: str, says: str) -> None:
    batch = dict(made(family, CHATS[:3], "left"))
    batch |= {key: change(batch.get(key)) for key, change in changed.items()}
    with refused(name, says):
        generator_of(family).generate(**batch, **OPTIONS)


def test_an_image_belongs_to_one_row() -> None:
    """Here as many tokens as two images take, but the first row has one too few and the second one too many."""
    batch = dict(made("qwen3_vl", CHATS[:3:2], "left"))
    placeholder = model_of("qwen3_vl").config.image_token_id
    batch["input_ids"][0, (batch["input_ids"][0] == placeholder).nonzero()[0, 0]] = 7
    batch["input_ids"][1, -1] = placeholder
    del batch["mm_token_type_ids"]
    with refused("pixel_values", "begins in a row and ends in the next: pass chats with images, or a list"):
        generator_of("qwen3_vl").generate(**batch, **OPTIONS)


def test_of_a_kind_of_which_it_is_not_known_a_single_row_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_shares, "_OF_KINDS", {})
    for family in ("llava", "qwen2_vl", "idefics3"):
        dicts = [made(family, chat) for chat in CHATS]
        assert generator_of(family).generate(dicts, **OPTIONS).token_ids == generated(family, CHATS, NEW)
    with refused("pixel_values", "is of several rows, and it is not known which images are of which: pass chats"):
        generator_of("llava").generate(**made("llava", CHATS[:2], "left"), **OPTIONS)


def test_where_images_are_told_apart_by_where_their_tokens_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_shares, "_OF_KINDS", {"llava": (("pixel_values",), image_shares._by_runs)})
    apart = [CHATS[0], CHATS[1], CHATS[3]]
    together = user(shows(PAGE), shows(OTHER), words(4))
    with generator_of("llava") as generator:
        batch = made("llava", apart, "left")
        rows = generator.generate(**batch, **OPTIONS)[:, batch["input_ids"].shape[1] :].tolist()
        assert rows == generated("llava", apart, NEW)
        assert "2 images" in generator.last_report.images
        alone = generator.generate([made("llava", together)], **OPTIONS)
        assert alone.token_ids == generated("llava", [together], NEW)
        with refused("pixel_values", "holds 3 images, and in the rows tokens stand for images in 2 places"):
            generator.generate(**made("llava", [together, CHATS[0]], "left"), **OPTIONS)


def test_bad_prompts_are_named_by_their_places() -> None:
    family = "llava"
    good = dict(made(family, CHATS[0]))
    bad = [
        (dict(made(family, CHATS[:2], "left")), "holds 2 rows: pass what the processor makes of each prompt by itself"),
        ({**good, "pixel_values_videos": torch.ones(1)}, "holds `pixel_values_videos`, which is not supported"),
        ({**good, "input_ids": [[]]}, "holds no token ids"),
        ({**good, "input_ids": "w1"}, "holds no token ids"),
        ({**good, "attention_mask": torch.ones(1, 2)}, "holds an `attention_mask` of another shape"),
        ({**good, "attention_mask": good["attention_mask"] * 0}, "is all padding"),
        ({**good, "pixel_values": good["pixel_values"].tolist()}, "holds `pixel_values`, which is a list"),
        ({**good, "pixel_values": good["pixel_values"].to("meta")}, "which is on the meta device"),
        ({**good, "input_ids": np.array([[5, 6]]), "attention_mask": None}, "no token of the rows stands for an image"),
        ({**good, "token_type_ids": good["input_ids"]}, "`token_type_ids`, which has no meaning to Llava"),
    ]
    generator = generator_of(family)
    result = generator.generate([good, *(prompt for prompt, _ in bad)], on_error="record", **OPTIONS)
    assert result.token_ids[0] == generated(family, CHATS[:1], NEW)[0]
    for each, (_, says) in zip(result[1:], bad, strict=True):
        assert each.error is not None and says in each.error
    with pytest.raises(PromptError, match="prompt 1 holds 2 rows"):
        generator.generate([good, bad[0][0]], **OPTIONS)
    with pytest.raises(PromptError, match="cannot be cut to `max_prompt_tokens`"):
        generator.generate([good], max_prompt_tokens=4, **OPTIONS)


def test_models_that_are_not_served() -> None:
    batch = dict(made("qwen3_vl", CHATS[:1]))
    ids = batch["input_ids"].clamp(max=90)
    with refused("pixel_values", "cannot be taken: LlamaForCausalLM takes text only"):
        BatchGenerator(build("llama")).generate(input_ids=ids, pixel_values=batch["pixel_values"], **OPTIONS)
    with refused("pixel_values", r"pass all that the processor makes, generate\(\*\*inputs\)"):
        BatchGenerator(build("llama")).generate([[5]], pixel_values=batch["pixel_values"], **OPTIONS)
    with pytest.raises(TypeError, match=r"unpack it, generate\(\*\*inputs, ...\)"):
        generator_of("qwen3_vl").generate(batch, **OPTIONS)


def test_accelerated_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made("llava", CHATS[:3], "left")
    expected = model_of("llava").generate(**batch, **OPTIONS)
    monkeypatch.setattr(image_models, "_SERVED", ())
    with warnings.catch_warnings(record=True) as caught, accelerated(model_of("llava")) as model:
        warnings.simplefilter("always")
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
        assert model.last_report is None
    assert "`pixel_values` cannot be taken: images are not supported for Llava" in str(caught[-1].message)
