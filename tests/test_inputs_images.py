"""Chats with images are read: good ones and bad ones, by a processor's settings, by one thread and by several."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_image_prompts import generated, model_of, picture, processor_of, shows, user, words
from support_kernels import plain

from hf_batchllm import BatchGenerator, PromptError
from hf_batchllm.inputs.images import ready_images

pytestmark = plain
OPTIONS: dict[str, Any] = {"eos_token_id": None, "do_sample": False, "progress": False}


@pytest.mark.parametrize("family", ["llava", "gemma4"])
def test_chats_without_images_are_not_padded(family: str, device: str) -> None:
    """Some processors pad the texts of a list to one length, unless they are told not to."""
    chats = [user(words(5)), user(words(*range(6, 20))), user(shows(picture(1)), words(4))]
    model, processor = model_of(family, device), processor_of(family)
    with BatchGenerator(model, processor, page_size=16) as generator:
        for given in ({}, {"chat_template_kwargs": {"processor_kwargs": {"padding": True}}}):
            result = generator.generate(chats, max_new_tokens=6, **OPTIONS, **given)
            assert [each.prompt_token_ids for each in result[:2]] == [[1, 5, 2], [1, *range(6, 20), 2]]
            assert result.token_ids == generated(family, chats, 6, device)


def test_bad_images_are_errors_of_their_prompts(tmp_path: Any) -> None:
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    good = tmp_path / "good.png"
    picture(1).save(good)
    sources = [str(tmp_path / "cut.png"), str(tmp_path / "missing.png"), None, 3, torch.rand(3, 8, 8), str(good)]
    chats = [user(shows(source), words(3)) for source in sources]
    generator = BatchGenerator(model_of("llava"), processor_of("llava"))
    result = generator.generate(chats, max_new_tokens=4, on_error="record", **OPTIONS)
    errors = [each.error for each in result]
    assert errors[-1] is None
    assert all(error and "image" in error for error in errors[:-1])
    assert "255" in str(errors[4])
    assert result.token_ids[-1] == generated("llava", [user(shows(picture(1)), words(3))], 4)[0]
    with pytest.raises(PromptError, match="image"):
        generator.generate(chats, max_new_tokens=4, **OPTIONS)


@pytest.mark.parametrize("threads", [1, 4])
def test_images_are_made_ready_by_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Objects, equal objects and a file that is cut off among them; each is made ready once."""
    monkeypatch.setattr(ready_images, "threads_here", lambda: threads)
    family, made = "qwen2_5_vl", []
    processor = copy.copy(processor_of(family))
    own = type(processor.image_processor).preprocess

    def preprocess(self: Any, images: Any, *given: Any, **named: Any) -> Any:
        made.append(threading.get_ident())
        return own(self, images, *given, **named)

    monkeypatch.setattr(type(processor.image_processor), "preprocess", preprocess)
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    sources = [str(tmp_path / "cut.png") if seed == 5 else picture(seed) for seed in range(8)]
    chats = [user(words(number), shows(one)) for number, one in enumerate(sources)]
    chats += [user(words(number), shows(picture(number))) for number in range(4)]
    with BatchGenerator(model_of(family), processor, min_shared_tokens=2) as generator:
        result = generator.generate(chats, max_new_tokens=4, on_error="record", **OPTIONS)
    assert [each.index for each in result if each.error] == [5]
    good = [chat for place, chat in enumerate(chats) if place != 5]
    ran, seen = [each.token_ids for each in result if not each.error], len(made)
    assert ran == generated(family, good, 4)
    assert seen == 7 + 1, "seven pictures, and the first once more to compare tokens"
    assert len(set(made[:seen])) > 1 or threads == 1


def test_who_takes_no_images() -> None:
    from support_families import build

    chat = user(shows(picture(1)), words(3))
    with pytest.raises(PromptError, match="takes text only"):
        BatchGenerator(build("llama"), processor_of("llava")).generate([chat], **OPTIONS)
    with pytest.raises(PromptError, match="AutoProcessor"):
        BatchGenerator(model_of("llava"), processor_of("llava").tokenizer).generate([chat], **OPTIONS)
    with pytest.raises(PromptError, match="audio"):
        BatchGenerator(model_of("llava"), processor_of("llava")).generate([user({"type": "audio"})], **OPTIONS)


@pytest.mark.some_cases
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "idefics3"])
def test_pictures_of_other_modes_go_to_the_processor_as_they_are(family: str, mode: str) -> None:
    colours = picture(1, 64, 64).convert("RGBA")
    colours.putalpha(picture(2, 64, 64).convert("L"))
    chats = [user(shows(colours.convert(mode)), words(3))]
    with BatchGenerator(model_of(family), processor_of(family)) as generator:
        assert generator.generate(chats, max_new_tokens=6, **OPTIONS).token_ids == generated(family, chats, 6)


@pytest.mark.parametrize(
    "changed", [{"size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 96}}, {"image_mean": 0.1}]
)
def test_what_the_processor_makes_of_an_image_may_change(changed: dict[str, Any]) -> None:
    """Between two calls: neither its features nor a kept prefix of it are those of before."""
    family, processor = "qwen2_5_vl", copy.deepcopy(processor_of("qwen2_5_vl"))
    chats = [user(shows(picture(seed, 40, 40)), words(3, 4, 5, number)) for seed in (1, 2) for number in (6, 7)]
    with BatchGenerator(model_of(family), processor, min_shared_tokens=2, keep_prefixes=4) as generator:
        for name, value in changed.items():
            generator.generate(chats, max_new_tokens=4, **OPTIONS)
            setattr(processor.image_processor, name, [value] * 3 if name == "image_mean" else value)
        result = generator.generate(chats, max_new_tokens=4, **OPTIONS)
    fresh = BatchGenerator(model_of(family), processor, min_shared_tokens=2)
    assert result.token_ids == fresh.generate(chats, max_new_tokens=4, **OPTIONS).token_ids
    assert result.report.cached_tokens <= 2 * len(chats), "no more than the words before an image"
