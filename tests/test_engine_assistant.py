"""`assistant_model`: another model guesses tokens, and answers stay what they are."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support_calls import answers, failing, told
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_drafts import (
    GIVEN,
    GREEDY_AND_SAMPLED,
    NEW_TOKENS,
    ON_A_GPU,
    PROMPTS,
    SAMPLED,
    Clock,
    always_pay,
    seconds_of,
)
from support_families import FAMILIES, build, random_prompts
from support_letter_tokenizers import letter_tokenizer
from transformers import TextStreamer

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.drafts import assistant as assistant_module
from hf_batchllm.engine.drafts.assistant import Assistant
from hf_batchllm.engine.drafts.assisted import Assisted, AssistedAhead, AssistedDrafts
from hf_batchllm.planning.requests_and_prefixes import Request

ASKED: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are guessed as may be, up to four."""
    always_pay(monkeypatch)

    def count(self: Assisted, requests: Sequence[Request]) -> int:
        return max(0, min(4, *map(self._most_of, requests))) if len(requests) == 1 else 4

    monkeypatch.setattr(Assisted, "_may_read", lambda *_: True)
    monkeypatch.setattr(AssistedDrafts, "_count", count)
    monkeypatch.setattr(AssistedAhead, "_count", count)


def copy_of(model: Any, noise: float = 0.0) -> Any:
    """A copy, with weights that are a little different."""
    reference, made = copy.deepcopy(model), torch.Generator(device=model.device).manual_seed(1)
    with torch.no_grad():
        for weight in reference.parameters():
            if noise and weight.is_floating_point():
                weight += noise * weight.std() * torch.randn(weight.shape, generator=made, device=weight.device)
    return reference


def both(model: Any, assistant: Any, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Without the assistant and with it: the same answers."""
    with BatchGenerator(model, **ON_A_GPU | (config or {})) as generator:
        plain = generator.generate(PROMPTS, **ASKED | options)
        drafted = generator.generate(PROMPTS, assistant_model=assistant, **ASKED | options)
    assert told(plain) == told(drafted)
    return plain, drafted


OPTIONS: list[dict[str, Any]] = [
    {}, SAMPLED, {"eos_token_id": list(range(0, 97, 13))}, {"logprobs": 2, "prompt_logprobs": 1},
    SAMPLED | {"logprobs": 1, "eos_token_id": [3, 50, 60, 61], "top_p": 0.9}, {"min_new_tokens": 6, "eos_token_id": 5},
]  # fmt: skip


@pytest.mark.some_cases
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("config", [{}, {"steps_per_sync": 6, "min_shared_tokens": 4}, {"cuda_graphs": False}], ids=str)
def test_the_model_itself_is_always_right(device: str, config: dict[str, Any], options: dict[str, Any]) -> None:
    """Its cache holds what it should, and it draws under the same noise: sampled answers are guessed as well."""
    model = model_on(device, "llama")
    plain, drafted = both(model, copy_of(model), config, **options)
    report = drafted.report
    ended = any(each.finish_reason == "stop" for each in plain)  # what was guessed behind an end is wrong
    assert report.accepted_tokens >= (0.5 if ended else 0.97) * report.drafted_tokens > 0
    assert report.steps < 0.75 * plain.report.steps
    assert report.new_tokens == plain.report.new_tokens and report.computed_tokens == plain.report.computed_tokens


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"repetition_penalty": 1.3}], ids=str)
def test_where_a_cpu_steps_at_once(options: dict[str, Any]) -> None:
    model = build("llama")
    _, drafted = both(model, copy_of(model), **options)
    if "repetition_penalty" not in options:
        assert drafted.report.accepted_tokens >= 0.97 * drafted.report.drafted_tokens > 0
    _, drafted = both(model, copy_of(model, 0.05), **options)
    assert 0 < drafted.report.accepted_tokens < drafted.report.drafted_tokens


@pytest.mark.some_cases
@pytest.mark.usefixtures("always")
@GREEDY_AND_SAMPLED
@pytest.mark.parametrize("assistant", ["llama", "gemma3", "gpt2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_families(device: str, family: str, assistant: str, options: dict[str, Any]) -> None:
    model = model_on(device, family)
    _, drafted = both(model, copy_of(model_on(device, assistant), 0.05), **options)
    assert drafted.report.drafted_tokens > 0
    if family == assistant:
        assert 0 < drafted.report.accepted_tokens < drafted.report.drafted_tokens


@pytest.mark.usefixtures("always")
def test_to_the_last_bit() -> None:
    model = build("llama")
    for options in ({"logprobs": 1}, SAMPLED | {"logprobs": 1}):
        plain, drafted = both(model, copy_of(model, 0.05), {"invariant": True}, **options)
        assert [repr(each.logprobs) for each in plain] == [repr(each.logprobs) for each in drafted]
        assert drafted.report.accepted_tokens > 0


def test_answers_are_those_of_generate() -> None:
    model: Any = build("llama")
    assistant: Any = copy_of(model, 0.05)
    with BatchGenerator(model) as generator:
        for prompt in PROMPTS[:3]:
            ids = torch.tensor([prompt])
            call = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "assistant_model": assistant}
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **call)
            assert torch.equal(generator.generate(ids, attention_mask=torch.ones_like(ids), **call), expected)


@pytest.mark.usefixtures("always")
def test_call_after_call_and_the_assistant_as_it_was(device: str) -> None:
    model = model_on(device, "llama")
    first, second = copy_of(model, 0.05), copy_of(model_on(device, "qwen3"))
    ids = torch.tensor([PROMPTS[0]], device=model.device)
    before = [each(ids).logits for each in (first, second)]
    with BatchGenerator(model, **ON_A_GPU) as generator:
        plain = told(generator.generate(PROMPTS, **ASKED))
        for assistant in (first, first, second, None, first):
            result = generator.generate(PROMPTS, assistant_model=assistant, **ASKED)
            assert told(result) == plain
            assert (result.report.drafted_tokens > 0) == (assistant is not None)
        streamed = list(generator.stream(PROMPTS, assistant_model=first, **ASKED))
        assert told(sorted(streamed, key=lambda each: each.index)) == plain
        for factor in (1.01, 1 / 1.01):
            with torch.no_grad():
                for weight in first.parameters():  # it may change from call to call
                    weight.mul_(factor)
            assert told(generator.generate(PROMPTS, assistant_model=first, **ASKED)) == plain
    for assistant, logits in zip((first, second), before, strict=True):
        torch.testing.assert_close(assistant(ids).logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("always")
def test_little_room(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers for which its cache has none get no guess."""
    monkeypatch.setattr(assistant_module, "MOST_ANSWERS", 2)  # room for these
    model = model_on(device, "llama")
    _, drafted = both(model, copy_of(model))
    assert drafted.report.accepted_tokens == drafted.report.drafted_tokens > 0


@pytest.mark.usefixtures("always")
def test_an_assistant_with_few_positions(device: str) -> None:
    """An answer beyond these gets no guess."""
    model, short = model_on(device, "llama"), copy_of(model_on(device, "gpt2"))
    most = 48
    short.transformer.wpe = torch.nn.Embedding.from_pretrained(short.transformer.wpe.weight[:most])
    short.config.n_positions = most
    plain, drafted = both(model, short)
    assert drafted.report.drafted_tokens > 0
    assert max(len(each.prompt_token_ids) + len(each.token_ids) for each in plain) > most


@pytest.mark.usefixtures("always")
@GREEDY_AND_SAMPLED
def test_logits_that_are_no_numbers(device: str, options: dict[str, Any]) -> None:
    model = model_on(device, "llama")
    assistant = copy_of(model)
    with torch.no_grad():
        assistant.model.norm.weight.mul_(float("inf"))
    _, drafted = both(model, assistant, **options)
    assert drafted.report.drafted_tokens > 0


@pytest.mark.usefixtures("always")
def test_much_to_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in several steps; and more tokens of answers than a step of decode rows has."""
    monkeypatch.setattr(assistant_module, "_STEP", 7)
    monkeypatch.setattr(assistant_module, "_FEW", 10**6)
    monkeypatch.setattr(assistant_module, "DRAFT_SIZES", (16,))
    own, calls = Assistant.guess, [0]

    def guess(self: Assistant, requests: Sequence[Request], tokens: int) -> dict[Request, list[int]]:
        calls[0] += 1
        return {} if calls[0] % 4 else own(self, requests, tokens)

    monkeypatch.setattr(Assistant, "guess", guess)
    model = model_on(device, "llama")
    _, drafted = both(model, copy_of(model), **SAMPLED)
    assert drafted.report.accepted_tokens >= 0.9 * drafted.report.drafted_tokens > 0


def test_long_prompts_are_not_read_for_short_answers() -> None:
    """Where reading them would take longer than guesses save."""
    model = build("llama")
    assistant = copy_of(model)
    shared = random_prompts(random.Random(3), 97, "distinct", 300)[0]
    prompts = [[*shared * 20, place] for place in range(8)]
    read = [0]
    with (
        assistant.model.embed_tokens.register_forward_hook(lambda _, ids, out: read.append(ids[0].numel())),
        pytest.warns(UserWarning, match="`assistant_model`: there are hooks"),
    ):
        answers(model, prompts, max_new_tokens=8, assistant_model=assistant)
    assert sum(read) < len(prompts[0])


@pytest.mark.usefixtures("always")
def test_out_of_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(device, "llama")
    calls = failing(monkeypatch, Assistant, "_run", {6}, torch.OutOfMemoryError("no room"))
    with pytest.warns(UserWarning, match="`assistant_model`: it ran out of memory on .*: for the rest of the call"):
        _, drafted = both(model, copy_of(model))
    assert calls == [6] and drafted.report.accepted_tokens > 0
    failing(monkeypatch, Assistant, "__init__", {1}, torch.OutOfMemoryError("no room"))
    with pytest.warns(UserWarning, match="`assistant_model` has no effect here: .* has no memory for it"):
        _, drafted = both(model, copy_of(model))
    assert not drafted.report.drafted_tokens


def test_an_assistant_that_cannot_be_opened_costs_no_kept_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = build("llama"), [[*range(5, 37), last] for last in (40, 41)]
    with BatchGenerator(model, page_size=16, keep_prefixes=4) as generator:
        generator.generate(prompts, max_new_tokens=1)
        with monkeypatch.context() as patch:
            failing(patch, Assistant, "__init__", [1], ValueError("no assistant"))
            with pytest.raises(ValueError, match="no assistant"):
                generator.generate(prompts, max_new_tokens=1, assistant_model=copy_of(model))
        assert generator.generate(prompts, max_new_tokens=1).report.cached_tokens == 32


@pytest.mark.usefixtures("always")
def test_an_error_in_the_assistant_is_an_error() -> None:
    model = build("llama")
    assistant = copy_of(model)
    steps: list[int] = []

    def fails(*_: Any) -> None:
        steps.append(1)
        if len(steps) > 5:
            raise RuntimeError("of the user's own")

    with BatchGenerator(model) as generator:
        asked: dict[str, Any] = {"max_new_tokens": 9}
        plain = told(generator.generate(PROMPTS, **asked))
        with (
            assistant.model.layers[0].register_forward_pre_hook(fails),
            pytest.raises(RuntimeError, match="of the user's own"),
            pytest.warns(UserWarning, match="`assistant_model`"),
        ):
            generator.generate(PROMPTS, assistant_model=assistant, **asked)
        again = generator.generate(PROMPTS, assistant_model=assistant, **asked)
        assert told(again) == plain and again.report.drafted_tokens


# -- where there are none --------------------------------------------------------------------------------------------


def _of_vocabulary(size: int) -> Any:
    model = copy.deepcopy(build("llama"))
    model.resize_token_embeddings(size)
    return model


def _linear() -> Any:
    module: Any = torch.nn.Linear(2, 2)
    module.config = build("llama").config
    return module


NO_EFFECT = "`assistant_model` has no effect"
OF_MODEL: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "layers of the model": (lambda model: {"assistant_model": model}, f"{NO_EFFECT} here: .*it shares layers with"),
    "states": (lambda _: {"assistant_model": FAMILIES["mamba"]()}, f"{NO_EFFECT} here: .*carry a state"),
    "no weights": (lambda model: {"assistant_model": copy_of(model).to("meta")}, f"{NO_EFFECT} here: .*meta"),
    "training": (
        lambda model: {"assistant_model": copy_of(model).train()},
        f"{NO_EFFECT} here: .*is in training mode, .* call its eval",
    ),
    "beams": (
        lambda model: {"assistant_model": copy_of(model), "num_beams": 2},
        f"{NO_EFFECT} here: .*beam search",
    ),
    "another vocabulary": (
        lambda _: {"assistant_model": _of_vocabulary(50), "assistant_tokenizer": object()},
        f"{NO_EFFECT} here: .*(101 tokens|vocab|tokens and the model)",
    ),
    "beside lookup": (
        lambda model: {"assistant_model": copy_of(model), "prompt_lookup_num_tokens": 3},
        f"{NO_EFFECT} beside `prompt_lookup_num_tokens`",
    ),
    "without it": (
        lambda _: {"num_assistant_tokens": 3},
        "`num_assistant_tokens` has no effect without `assistant_model`",
    ),
}


@pytest.mark.parametrize("case", OF_MODEL)
@pytest.mark.filterwarnings("ignore:`assistant_tokenizer`")
def test_a_warning_says_what_has_no_effect_and_why(case: str) -> None:
    model, (given, why) = build("llama"), OF_MODEL[case]
    options = given(model)
    plain = answers(model, PROMPTS, max_new_tokens=3, num_beams=options.get("num_beams", 1))
    with pytest.warns(UserWarning, match=why):
        assert told(answers(model, PROMPTS, max_new_tokens=3, **options)) == told(plain)


def test_each_assistant_has_a_warning_of_its_own() -> None:
    with BatchGenerator(build("llama")) as generator:
        for case in ("training", "states"):
            given, why = OF_MODEL[case]
            with pytest.warns(UserWarning, match=why):
                generator.generate(PROMPTS, max_new_tokens=2, **given(generator.model))


@pytest.mark.usefixtures("always")
def test_an_assistant_with_other_layers_than_before_and_one_that_is_gone() -> None:
    model = build("llama")
    assistant = copy_of(model)
    with BatchGenerator(model) as generator:
        asked: dict[str, Any] = {"max_new_tokens": 20}
        plain = told(generator.generate(PROMPTS, **asked))
        for layers in (len(assistant.model.layers), 1):
            del assistant.model.layers[layers:]
            assistant.config.num_hidden_layers = layers
            result = generator.generate(PROMPTS, assistant_model=assistant, **asked)
            assert told(result) == plain and result.report.drafted_tokens > 0
        generator.generate(PROMPTS, **asked)
        there = weakref.ref(assistant)
        del assistant
        gc.collect()
        assert there() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: {"assistant_model": object()}, "must be a model, not an? .*a smaller one of transformers"),
        (lambda: {"assistant_model": _linear()}, "must be a language model of transformers, not a Linear"),
        (lambda: {"assistant_model": "gpt2"}, "must be a model, not .*: load it first, by `from_pretrained`"),
        (
            lambda: {"assistant_model": _of_vocabulary(50)},
            "has 50 tokens and the model 101: pass a model with the same tokenizer",
        ),
        (lambda: {"num_assistant_tokens": 0}, "must be at least 1, but is 0"),
    ],
    ids=["object", "no language model", "name", "vocabulary", "number"],
)
def test_errors_that_name_it(given: Callable[[], dict[str, Any]], message: str) -> None:
    options = given()
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` {message}"):
        answers("llama", PROMPTS, **options)


@pytest.mark.usefixtures("always")
def test_a_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("llama")
    with BatchGenerator(model, letter_tokenizer(97)) as generator:
        for asked in ({}, {"assistant_model": copy_of(model, 0.05)}):
            generator.generate(["abc"], max_new_tokens=9, streamer=TextStreamer(letter_tokenizer(97)), **asked)
    first, second = capsys.readouterr().out.split("\n")[:2]
    assert first == second


# -- when it pays ----------------------------------------------------------------------------------------------------


class Stub:
    """An assistant that takes so many seconds for each token, and says 1."""

    has_ended, is_steady = False, True

    def __init__(self, clock: Clock, each: float) -> None:
        self.clock, self.each, self.seconds, self.asked = clock, each, 0.0, 0

    def unread(self, request: Request) -> int:
        return 3

    def guess(self, requests: Sequence[Request], tokens: int) -> dict[Request, list[int]]:
        self.seconds = self.each * tokens
        self.clock.now += self.seconds
        self.asked += 1
        return {request: [1] * tokens for request in requests}


@pytest.mark.parametrize("kind", [AssistedDrafts, AssistedAhead])
@pytest.mark.parametrize("rows", [1, 8, 40, 100])
def test_it_costs_little_where_it_is_wrong(kind: type[Assisted], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(right: float, assistant: float) -> float:
        """Where the assistant takes so many for a token."""

        def make(requests: list[Request], clock: Clock, _: random.Random) -> Assisted:
            room: Any = lambda _, end: end, 10**6
            return kind(*GIVEN, requests, *room, assistant=Stub(clock, assistant), ratio=assistant)

        times = 16 if kind is AssistedAhead else 1
        return seconds_of(make, right, rows, 1 / 320, monkeypatch, times=times, host=0.1)

    for right, most in ((0.0, 1.04), (0.3, 1.04), (0.9, 0.5 if rows == 1 else 0.6 if rows < 20 else 1.01)):
        assert seconds(right, 0.1) < most
        assert seconds(right, 0.9) < 1.04, "an assistant as slow as the model"
