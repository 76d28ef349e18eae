"""Chats with images get the tokens of ``generate``, and each image is read by the vision tower once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_image_prompts import PICTURED, generated, inputs_of, model_of, picture, processor_of, shows, user, words
from support_kernels import plain

from hf_batchllm import BatchGenerator
from hf_batchllm.model import image_features
from hf_batchllm.planning.scheduler import FifoScheduler

pytestmark = plain
OPTIONS: dict[str, Any] = {"eos_token_id": None, "do_sample": False}


def chats_of(first: Any, second: Any) -> list[Any]:
    """Several sizes, several images, one in the middle, one twice, none; and a page with two questions."""
    return [
        user(shows(first), words(*range(3, 9))),
        user(shows(first), words(*range(3, 7), 50)),
        user(words(5, 6), shows(second), words(9), shows(first), words(4)),
        user(words(20, 21, 22)),
        user(shows(second), shows(second), words(3)),
    ]


CHATS = chats_of(picture(1, 64, 96), picture(2, 96, 64))
_KNOWN: dict[tuple[str, str], list[list[int]]] = {}


def expected(family: str, device: str) -> list[list[int]]:
    if (family, device) not in _KNOWN:
        _KNOWN[family, device] = generated(family, CHATS, 10, device)
    return _KNOWN[family, device]


def generator_of(family: str, device: str = "cpu", model: Any = None, **config: Any) -> BatchGenerator:
    return BatchGenerator(model or model_of(family, device), processor_of(family), **{"min_shared_tokens": 2} | config)


def answered(family: str, chats: list[Any], new: int, device: str = "cpu", /, model: Any = None, **config: Any) -> Any:
    with generator_of(family, device, model, **config) as generator:
        return generator.generate(chats, max_new_tokens=new, **OPTIONS)


@contextmanager
def images_read() -> Iterator[list[int]]:
    """How many images each run of the vision tower reads."""
    own, runs = image_features.ImageFeatures._run_at_once, list[int]()

    def noted(self: Any, images: Any) -> None:
        runs.append(len(images))
        own(self, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_features.ImageFeatures, "_run_at_once", noted)
        yield runs


@pytest.mark.parametrize("family", PICTURED)
def test_tokens_are_those_of_generate(family: str, device: str) -> None:
    result = answered(family, CHATS, 10, device, page_size=16)
    assert result.token_ids == expected(family, device)
    assert len({tuple(row) for row in result.token_ids}) == len(CHATS), "the images make no difference"
    assert "get_image_features" not in vars(model_of(family, device).model)


NOT_CUT = {"gemma3": 16, "gemma4": 64}  # tokens of an image, which see each other both ways
BUDGETS = [
    *itertools.product(["qwen3_vl", "llava", "idefics3"], [1, 3, 7]),
    *itertools.product(NOT_CUT, [1, 17, 24]),
]


@pytest.mark.some_cases("family")
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("family", "tokens"), BUDGETS)
def test_where_steps_are_smaller_than_an_image(family: str, tokens: int, steps: int, device: str) -> None:
    """Images are cut, or else computed in one step, however small steps are to be. Decode rows run several times in a
    row, over pages that begin within an answer."""
    config = {"page_size": 16 if device == "cuda" else 2, "max_batch_tokens": tokens, "steps_per_sync": steps}
    told = pytest.warns(UserWarning, match="both ways") if tokens < NOT_CUT.get(family, 0) else nullcontext()
    with told:
        assert answered(family, CHATS, 10, device, **config).token_ids == expected(family, device)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl"])
def test_in_plain_pytorch(family: str) -> None:
    result = answered(family, CHATS, 10, page_size=4, max_batch_tokens=19, backend="torch")
    assert result.token_ids == expected(family, "cpu")


@pytest.mark.parametrize(("family", "tokens"), [("gemma3", 17), ("gemma4", 71)])
def test_a_scheduler_that_cuts_an_image(family: str, tokens: int) -> None:
    class Cuts(FifoScheduler):
        _whole_images = staticmethod(lambda unit, count, step: count)

    with pytest.raises(RuntimeError, match=r"chunk_end\(begin, end\)"):
        answered(family, CHATS * 4, 2, max_batch_tokens=tokens, scheduler=Cuts())


@pytest.mark.some_cases
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "gemma3"])
def test_where_memory_is_short(family: str, scheduler: str, device: str) -> None:
    """Preempted prompts are computed again, with images that have been dropped by then."""
    config = {"page_size": 4 if device == "cpu" else 16, "scheduler": scheduler}
    room = 100 * generator_of(family, device, **config).architecture.kv_bytes_per_token
    with generator_of(family, device, kv_memory=room, **config) as generator:
        # A token that is never drawn might end an answer, so more are begun than there is room for.
        result = generator.generate(CHATS[:3] * 4, max_new_tokens=24, **OPTIONS | {"eos_token_id": 1000})
    assert result.token_ids == generated(family, CHATS[:3], 24, device) * 4
    if device == "cpu" and scheduler == "groups":
        assert result.report.preemptions


@pytest.mark.parametrize("family", ["qwen2_vl", "mistral3", "gemma3"])
def test_each_image_and_each_shared_token_is_computed_once(family: str, device: str) -> None:
    """However many prompts show it: as one object, as equal objects, in this place or in that."""
    model, embedded = model_of(family, device), []
    counting = model.get_input_embeddings().register_forward_hook(lambda *given: embedded.append(given[1][0].numel()))
    first, second = picture(1, 64, 64), picture(2, 64, 64)
    chats = [user(words(3), shows(first if number % 2 else picture(1, 64, 64)), words(number)) for number in range(20)]
    chats += [user(shows(second), words(number), shows(first)) for number in range(20, 40)]
    with images_read() as runs:
        result = answered(family, chats, 4, device)
    counting.remove()
    assert len(runs) == 1, "both have one size, so they are read in one run"
    shared = result.report.plan
    assert shared.computed_tokens < shared.total_tokens / 2
    assert result.report.computed_tokens == shared.computed_tokens
    # One step of all prompts; those that follow have a row for each, or some more as graphs do.
    assert [count for count in embedded if count > 2 * len(chats)] == [shared.computed_tokens]


def test_equal_ids_with_different_images_share_nothing(device: str) -> None:
    family = "qwen2_5_vl"
    chats = [user(shows(picture(seed, 64, 64)), words(5)) for seed in range(4)]
    result = answered(family, chats, 6, device, min_shared_tokens=1)
    assert {each.prompt_token_ids == result[0].prompt_token_ids for each in result} == {True}
    beside = 2  # the words in front of the image
    assert max(segment.end for segment in result.report.plan.segments) == beside
    assert result.token_ids == generated(family, chats, 6, device)


@pytest.mark.parametrize("family", ["mistral3", "qwen2_5_vl"])
def test_an_image_of_one_token(family: str) -> None:
    """``generate`` fails where Mistral 3's tower reads no other beside it; here it is as if there were others."""
    chats = [user(words(5), shows(picture(1, 32, 32)), words(4)), user(shows(picture(2, 64, 96)), words(3))]
    with generator_of(family) as generator:
        alone, together = (generator.generate(some, max_new_tokens=6, **OPTIONS) for some in (chats[:1], chats))
    assert alone[0].prompt_token_ids.count(model_of(family).config.image_token_id) == 1
    assert alone[0].token_ids == together[0].token_ids
    assert together[1].token_ids == generated(family, chats[1:], 6)[0]
    assert "1 image, read by the vision tower in 1 run" in alone.report.images


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "gemma3"])
def test_kept_prefixes(family: str, device: str) -> None:
    """An image of an earlier call is found again, and another one is not taken for it."""
    pages = picture(1, 64, 96), picture(7, 64, 96)
    calls = [
        [user(shows(pages[page].copy()), words(*range(3, 12)), words(number + end)) for end in (20, 30, 40)]
        for number, page in enumerate((0, 0, 1, 0))
    ]
    with images_read() as runs, generator_of(family, device, keep_prefixes=4) as generator:
        results = [generator.generate(chats, max_new_tokens=6, **OPTIONS) for chats in calls]
    before_the_image = 3
    assert [result.report.cached_tokens > before_the_image for result in results] == [False, True, False, True]
    assert len(runs) == 2
    for chats, result in zip(calls, results, strict=True):
        assert result.token_ids == generated(family, chats, 6, device)


@pytest.mark.parametrize("family", ["qwen3_vl", "llava", "gemma4"])
def test_samples_beams_and_penalties(family: str, device: str) -> None:
    with generator_of(family, device, page_size=16) as generator:
        for options in ({"num_beams": 3}, {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}):
            # With beams, generate of older versions mixes several images of a prompt up.
            chats = [CHATS[0], CHATS[1], CHATS[3]] if "num_beams" in options else CHATS
            result = generator.generate(chats, max_new_tokens=6, **OPTIONS | options)
            assert result.token_ids == generated(family, chats, 6, device, **options)
        sampled = {"do_sample": True, "seed": 3, "num_return_sequences": 3}
        result = generator.generate(CHATS, max_new_tokens=6, **OPTIONS | sampled)
        alone = generator.generate(CHATS[:1], max_new_tokens=6, **OPTIONS | sampled)
    assert result.token_ids[:3] == alone.token_ids


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4"])
def test_a_token_of_images_that_stands_for_none(family: str, device: str) -> None:
    """In a text it is a token like any other, also beside a chat with an image in one step."""
    model = model_of(family, device)
    bare = [3, model.config.image_token_id, model.config.image_token_id, 7]
    chat = user(shows(picture(1)), words(4))
    result = answered(family, [bare, chat], 6, device, page_size=16)
    ids = torch.tensor([bare], device=device)
    alone = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert result.token_ids == [alone[0, 4:].tolist(), *generated(family, [chat], 6, device)]


@pytest.mark.some_cases
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "idefics3"])
def test_answers_of_tokens_of_images(family: str, steps: int, device: str) -> None:
    """A row goes on from such a token in the very step that computes another prompt's image."""
    model = model_of(family, device)
    liked = {"sequence_bias": [[[model.config.image_token_id], 100.0]]}
    with generator_of(family, device, page_size=16, max_batch_tokens=6, steps_per_sync=steps) as generator:
        result = generator.generate(CHATS, max_new_tokens=10, **OPTIONS, **liked)
    assert result.token_ids == [[model.config.image_token_id] * 10] * len(CHATS)


@pytest.mark.parametrize("family", ["llava", "mistral3", "internvl", "qwen3_vl"])
def test_after_generate_has_run_the_same_model(family: str) -> None:
    """It leaves transformers' own hooks in the tower, and works afterwards as it did before."""
    model = copy.deepcopy(model_of(family))
    inputs = inputs_of(family, CHATS[0])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    before = model.generate(**inputs, **options)
    result = answered(family, CHATS[:1], 6, model=model, keep_prefixes=2)
    assert result.token_ids == before[:, inputs["input_ids"].shape[1] :].tolist()
    assert torch.equal(model.generate(**inputs, **options), before)


def test_each_prompt_has_the_tower_of_its_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    family = "llava"
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: Any = get_peft_model(copy.deepcopy(model_of(family)), config, adapter_name="a")
        model.add_adapter("b", config)
    model.eval()
    chats, names = CHATS[:2] * 3, ["a", "a", "b", "b", None, None]
    with generator_of(family, model=model) as generator:
        together = generator.generate(chats, adapter=names, max_new_tokens=6, **OPTIONS)
    alone = []
    for name in ("a", "b", None):
        if name is not None:
            model.set_adapter(name)
        with model.disable_adapter() if name is None else nullcontext():
            alone += answered(family, CHATS[:2], 6, model=model).token_ids
    assert together.token_ids == alone
    assert len({tuple(row) for row in alone}) > 3, "adapters make no difference"


def test_features_of_few_images_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many are shown again much later, they are read again: the device has no room for all of them."""
    monkeypatch.setattr(image_features, "_MOST_TOKENS_KEPT", 12)
    monkeypatch.setattr(image_features, "_VALUES_AT_ONCE", 1)
    pictures = [picture(seed) for seed in range(6)]
    chats = [user(words(begin), shows(one), words(4)) for begin in (3, 5) for one in pictures]
    family = "llava"
    result = answered(family, chats, 4, max_batch_tokens=8)
    assert "were read again" in result.report.images
    assert result.token_ids == generated(family, chats, 4)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_scores_of_answers_to_images(family: str, device: str) -> None:
    """Against transformers' own forward pass; the tower reads each image once."""
    answers = ["w7", "w8 w9", "w8 w11 w12"]
    with images_read() as runs, generator_of(family, device) as generator:
        scores = generator.score(CHATS, choices=answers)
    assert len(runs) <= 2, "two images of different sizes"
    ids = [[int(word[1:]) for word in answer.split()] for answer in answers]
    assert len(scores) == len(CHATS) * len(ids)
    for score in scores:
        tokens = ids[score.choice]
        assert score.token_ids == tokens
        want = log_probs_of(family, CHATS[score.index], tokens, device)
        assert score.logprobs == pytest.approx(want[-len(tokens) :].tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_log_probs_of_prompts_with_images(family: str, device: str) -> None:
    with generator_of(family, device, page_size=16) as generator:
        result = generator.generate(CHATS, max_new_tokens=2, prompt_logprobs=1, **OPTIONS)
    for chat, each in zip(CHATS, result, strict=True):
        found = [
            entry[token] for token, entry in zip(each.prompt_token_ids, each.prompt_logprobs, strict=True) if entry
        ]
        assert found == pytest.approx(log_probs_of(family, chat, [], device).tolist(), abs=1e-4)


def log_probs_of(family: str, chat: Any, answer: list[int], device: str) -> torch.Tensor:
    """Of each token of a chat and an answer to it, but for the first, by transformers' own forward pass."""
    model = model_of(family, device)
    inputs = {name: value.to(device) for name, value in inputs_of(family, chat).items()}
    chat_tokens = inputs["input_ids"].shape[1]
    for name, value in inputs.items():  # ids, and beside them masks and kinds of tokens
        if value.shape == (1, chat_tokens):
            more = torch.tensor([answer], dtype=value.dtype, device=device)
            inputs[name] = torch.cat([value, more if name == "input_ids" else more * 0 + (name == "attention_mask")], 1)
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, inputs["input_ids"][0, 1:, None])[:, 0].cpu()
