"""`assistant_model`: another model guesses tokens, and answers stay what they are."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_drafts import Clock, always_pay, take_guesses
from support_families import FAMILIES, build, random_prompts
from support_letter_tokenizers import letter_tokenizer
from transformers import TextStreamer

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.drafts import assistant as assistant_module
from hf_batchllm.engine.drafts.assistant import Assistant
from hf_batchllm.engine.drafts.assisted import Assisted, AssistedAhead, AssistedDrafts
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Step

PROMPTS = random_prompts(random.Random(5), 97, "mixed", 8)[:8]
NEW_TOKENS = 40
SAMPLED = {"do_sample": True, "temperature": 1.3, "seed": 3, "num_return_sequences": 2}
PAGES = {"page_size": 16, "steps_per_sync": 3}  # on a GPU as on a CPU, so that guesses begin as early


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are guessed as may be, up to four."""
    always_pay(monkeypatch)

    def count(self: Assisted, requests: Sequence[Request]) -> int:
        return max(0, min(4, *map(self._most_of, requests))) if len(requests) == 1 else 4

    monkeypatch.setattr(Assisted, "_may_read", lambda *_: True)
    monkeypatch.setattr(AssistedDrafts, "_count", count)
    monkeypatch.setattr(AssistedAhead, "_count", count)


def twin_of(model: Any, noise: float = 0.0) -> Any:
    """A copy, with weights that are a little different."""
    twin, made = copy.deepcopy(model), torch.Generator(device=model.device).manual_seed(1)
    with torch.no_grad():
        for weight in twin.parameters():
            if noise and weight.is_floating_point():
                weight += noise * weight.std() * torch.randn(weight.shape, generator=made, device=weight.device)
    return twin


def told(result: BatchResult) -> list[Any]:
    return [(each.token_ids, each.finish_reason) for each in result]


def both(model: Any, assistant: Any, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": NEW_TOKENS, "progress": False, **options}
    with BatchGenerator(model, **PAGES | (config or {})) as generator:
        plain = generator.generate(PROMPTS, **options)
        drafted = generator.generate(PROMPTS, assistant_model=assistant, **options)
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
    plain, drafted = both(model, twin_of(model), config, **options)
    assert told(plain) == told(drafted)
    report = drafted.report
    ended = any(each.finish_reason == "stop" for each in plain)  # what was guessed behind an end is wrong
    assert report.accepted_tokens >= (0.5 if ended else 0.97) * report.drafted_tokens > 0
    assert report.steps < 0.75 * plain.report.steps
    assert report.new_tokens == plain.report.new_tokens and report.computed_tokens == plain.report.computed_tokens


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"repetition_penalty": 1.3}], ids=str)
def test_where_a_cpu_steps_at_once(options: dict[str, Any]) -> None:
    model = build("llama")
    plain, drafted = both(model, twin_of(model), **options)
    assert told(plain) == told(drafted)
    if "repetition_penalty" not in options:
        assert drafted.report.accepted_tokens >= 0.97 * drafted.report.drafted_tokens > 0
    plain, drafted = both(model, twin_of(model, 0.05), **options)
    assert told(plain) == told(drafted)
    assert 0 < drafted.report.accepted_tokens < drafted.report.drafted_tokens


@pytest.mark.some_cases
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("assistant", ["llama", "gemma3", "gpt2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_families(device: str, family: str, assistant: str, options: dict[str, Any]) -> None:
    model = model_on(device, family)
    plain, drafted = both(model, twin_of(model_on(device, assistant), 0.05), **options)
    assert told(plain) == told(drafted)
    assert drafted.report.drafted_tokens > 0
    if family == assistant:
        assert 0 < drafted.report.accepted_tokens < drafted.report.drafted_tokens


@pytest.mark.usefixtures("always")
def test_to_the_last_bit() -> None:
    model = build("llama")
    for options in ({"logprobs": 1}, SAMPLED | {"logprobs": 1}):
        plain, drafted = both(model, twin_of(model, 0.05), {"invariant": True}, **options)
        assert [repr(each.logprobs) for each in plain] == [repr(each.logprobs) for each in drafted]
        assert told(plain) == told(drafted) and drafted.report.accepted_tokens > 0


def test_answers_are_those_of_generate() -> None:
    model: Any = build("llama")
    assistant: Any = twin_of(model, 0.05)
    with BatchGenerator(model) as generator:
        for prompt in PROMPTS[:3]:
            ids = torch.tensor([prompt])
            call = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "assistant_model": assistant}
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **call)
            assert torch.equal(generator.generate(ids, attention_mask=torch.ones_like(ids), **call), expected)


@pytest.mark.usefixtures("always")
def test_call_after_call_and_the_assistant_as_it_was(device: str) -> None:
    model = model_on(device, "llama")
    first, second = twin_of(model, 0.05), twin_of(model_on(device, "qwen3"))
    ids = torch.tensor([PROMPTS[0]], device=model.device)
    before = [each(ids).logits for each in (first, second)]
    asked: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "progress": False}
    with BatchGenerator(model, **PAGES) as generator:
        plain = told(generator.generate(PROMPTS, **asked))
        for assistant in (first, first, second, None, first):
            result = generator.generate(PROMPTS, assistant_model=assistant, **asked)
            assert told(result) == plain
            assert result.report is not None and (result.report.drafted_tokens > 0) == (assistant is not None)
        streamed = list(generator.stream(PROMPTS, assistant_model=first, **asked))
        assert sorted((each.index, each.token_ids) for each in streamed) == [
            (i, ids) for i, (ids, _) in enumerate(plain)
        ]
        with torch.no_grad():
            for weight in first.parameters():  # it may change from call to call
                weight.mul_(1.01)
        assert told(generator.generate(PROMPTS, assistant_model=first, **asked)) == plain
        with torch.no_grad():
            for weight in first.parameters():
                weight.div_(1.01)
    for assistant, logits in zip((first, second), before, strict=True):
        torch.testing.assert_close(assistant(ids).logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("always")
def test_little_room(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers for which its cache has none get no guess."""
    monkeypatch.setattr(assistant_module, "MOST_ANSWERS", 2)  # room for these
    model = model_on(device, "llama")
    plain, drafted = both(model, twin_of(model))
    assert told(plain) == told(drafted)
    assert drafted.report.accepted_tokens == drafted.report.drafted_tokens > 0


@pytest.mark.usefixtures("always")
def test_an_assistant_with_few_positions(device: str) -> None:
    """An answer beyond these gets no guess."""
    model, short = model_on(device, "llama"), twin_of(model_on(device, "gpt2"))
    most = 48
    short.transformer.wpe = torch.nn.Embedding.from_pretrained(short.transformer.wpe.weight[:most])
    short.config.n_positions = most
    plain, drafted = both(model, short)
    assert told(plain) == told(drafted)
    assert drafted.report.drafted_tokens > 0
    assert max(len(each.prompt_token_ids) + len(each.token_ids) for each in plain) > most


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers(device: str, options: dict[str, Any]) -> None:
    model = model_on(device, "llama")
    assistant = twin_of(model)
    with torch.no_grad():
        assistant.model.norm.weight.mul_(float("inf"))
    plain, drafted = both(model, assistant, **options)
    assert told(plain) == told(drafted) and drafted.report.drafted_tokens > 0


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
    plain, drafted = both(model, twin_of(model), **SAMPLED)
    assert told(plain) == told(drafted)
    assert drafted.report.accepted_tokens >= 0.9 * drafted.report.drafted_tokens > 0


def test_long_prompts_are_not_read_for_short_answers() -> None:
    """Where reading them would take longer than guesses save."""
    model = build("llama")
    assistant = twin_of(model)
    shared = random_prompts(random.Random(3), 97, "distinct", 300)[0]
    prompts = [[*shared * 20, place] for place in range(8)]
    read = [0]
    handle = assistant.model.embed_tokens.register_forward_hook(lambda _, ids, out: read.append(ids[0].numel()))
    with BatchGenerator(model) as generator, pytest.warns(UserWarning, match="`assistant_model`: there are hooks"):
        generator.generate(prompts, max_new_tokens=8, progress=False, assistant_model=assistant)
    handle.remove()
    assert sum(read) < len(prompts[0])


@pytest.mark.usefixtures("always")
def test_out_of_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = Assistant._run, []

    def run(self: Assistant, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("no room")
        return own(self, *given)

    monkeypatch.setattr(Assistant, "_run", run)
    model = model_on(device, "llama")
    with pytest.warns(UserWarning, match="`assistant_model`: it ran out of memory on .*: for the rest of the call"):
        plain, drafted = both(model, twin_of(model))
    assert told(plain) == told(drafted)
    assert len(calls) == 6 and drafted.report.accepted_tokens > 0

    def make(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Assistant, "__init__", make)
    with pytest.warns(UserWarning, match="`assistant_model` has no effect here: .* has no memory for it"):
        plain, drafted = both(model, twin_of(model))
    assert told(plain) == told(drafted) and not drafted.report.drafted_tokens


@pytest.mark.usefixtures("always")
def test_an_error_in_the_assistant_is_an_error() -> None:
    model = build("llama")
    assistant = twin_of(model)
    steps: list[int] = []

    def fails(*_: Any) -> None:
        steps.append(1)
        if len(steps) > 5:
            raise RuntimeError("of the user's own")

    with BatchGenerator(model) as generator:
        plain = told(generator.generate(PROMPTS, max_new_tokens=9, progress=False))
        handle = assistant.model.layers[0].register_forward_pre_hook(fails)
        with (
            pytest.raises(RuntimeError, match="of the user's own"),
            pytest.warns(UserWarning, match="`assistant_model`"),
        ):
            generator.generate(PROMPTS, max_new_tokens=9, progress=False, assistant_model=assistant)
        handle.remove()
        again = generator.generate(PROMPTS, max_new_tokens=9, progress=False, assistant_model=assistant)
        assert told(again) == plain and again.report is not None and again.report.drafted_tokens


# -- where there are none --------------------------------------------------------------------------------------------


def _without_room(model: Any) -> Any:
    return model


@pytest.mark.parametrize(
    ("why", "assistant", "options"),
    [
        ("it shares layers with the model", _without_room, {}),
        ("carry a state", lambda _: FAMILIES["mamba"](), {}),
        ("meta", lambda model: copy.deepcopy(model).to("meta"), {}),
        ("beam search", twin_of, {"num_beams": 2}),
        ("101 tokens|vocab|tokens and the model", lambda _: _of_vocabulary(50), {"assistant_tokenizer": object()}),
    ],
)
@pytest.mark.filterwarnings("ignore:`assistant_tokenizer`")
def test_a_warning_says_why_it_guesses_nothing(
    why: str, assistant: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    model = build("llama")
    with BatchGenerator(model) as generator:
        plain = generator.generate(PROMPTS, max_new_tokens=3, progress=False, num_beams=options.get("num_beams", 1))
        with pytest.warns(UserWarning, match=f"`assistant_model` has no effect here: .*({why})"):
            result = generator.generate(
                PROMPTS, max_new_tokens=3, progress=False, assistant_model=assistant(model), **options
            )
    assert told(plain) == told(result)


def _linear() -> Any:
    module: Any = torch.nn.Linear(2, 2)
    module.config = build("llama").config
    return module


def _of_vocabulary(size: int) -> Any:
    model = copy.deepcopy(build("llama"))
    model.resize_token_embeddings(size)
    return model


def test_each_assistant_has_a_warning_of_its_own() -> None:
    model = build("llama")
    trained, other = twin_of(model).train(), FAMILIES["mamba"]()
    with BatchGenerator(model) as generator:
        for assistant, why in ((trained, "is in training mode, .* call its eval"), (other, "carry a state")):
            with pytest.warns(UserWarning, match=f"`assistant_model` has no effect here: .*{why}"):
                generator.generate(PROMPTS, max_new_tokens=2, progress=False, assistant_model=assistant)


@pytest.mark.usefixtures("always")
def test_an_assistant_with_other_layers_than_before_and_one_that_is_gone() -> None:
    model = build("llama")
    assistant = twin_of(model)
    with BatchGenerator(model) as generator:
        asked: dict[str, Any] = {"max_new_tokens": 20, "progress": False}
        plain = told(generator.generate(PROMPTS, **asked))
        for layers in (len(assistant.model.layers), 1):
            del assistant.model.layers[layers:]
            assistant.config.num_hidden_layers = layers
            result = generator.generate(PROMPTS, assistant_model=assistant, **asked)
            assert told(result) == plain and result.report is not None and result.report.drafted_tokens > 0
        generator.generate(PROMPTS, **asked)
        there = weakref.ref(assistant)
        del assistant
        gc.collect()
        assert there() is None


def test_errors_that_name_it() -> None:
    with BatchGenerator(build("llama")) as generator:
        for wrong, message in (
            (object(), "`assistant_model` must be a model, not an? .*a smaller one of transformers"),
            (_linear(), "`assistant_model` must be a language model of transformers, not a Linear"),
            ("gpt2", "`assistant_model` must be a model, not .*: load it first, by `from_pretrained`"),
            (
                _of_vocabulary(50),
                "`assistant_model` has 50 tokens and the model 101: pass a model with the same tokenizer",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                generator.generate(PROMPTS, assistant_model=wrong)
        with pytest.raises(ValueError, match="`num_assistant_tokens` must be at least 1, but is 0"):
            generator.generate(PROMPTS, num_assistant_tokens=0)


def test_what_has_no_effect_without_it_or_beside_it() -> None:
    model = build("llama")
    with BatchGenerator(model) as generator:
        with pytest.warns(UserWarning, match="`num_assistant_tokens` has no effect without `assistant_model`"):
            generator.generate(PROMPTS[:1], max_new_tokens=2, num_assistant_tokens=3)
        with pytest.warns(UserWarning, match="`assistant_model` has no effect beside `prompt_lookup_num_tokens`"):
            generator.generate(
                PROMPTS[:1], max_new_tokens=2, assistant_model=twin_of(model), prompt_lookup_num_tokens=3
            )


@pytest.mark.usefixtures("always")
def test_a_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("llama")
    with BatchGenerator(model, letter_tokenizer(97)) as generator:
        for asked in ({}, {"assistant_model": twin_of(model, 0.05)}):
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


def seconds_of(
    kind: type[Assisted], right: float, rows: int, assistant: float, monkeypatch: pytest.MonkeyPatch, each: float
) -> float:
    """How many times as long it takes, where guesses are right with this chance, a step takes 1 second and each of its
    tokens so many beside, and the assistant so many for a token."""
    with monkeypatch.context() as patch:
        clock, dice, ahead = Clock(patch), random.Random(3), kind is AssistedAhead
        requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 10**6) for place in range(rows)]
        given: Any = lambda _: 8, lambda _: 3, requests, lambda _, end: end, None, 10**6
        drafts = kind(*given, assistant=Stub(clock, assistant), ratio=assistant)
        for request in requests:
            request.generated, request.computed = [1], 4

        def token() -> int:
            return 1 if dice.random() < right else 2

        while sum(len(request.generated) for request in requests) < 800 * rows:
            step, waited = Step(requests), drafts.must_know
            step.times = drafts.most_times(step, 16 if ahead else 1)
            step = drafts.added(step)
            clock.now += 0.1 if waited else 0.0
            began = launched = clock.now
            drafts.launched(step)
            clock.now += step.times * (1 + each * (step.tokens if step.room is None else step.room.size))
            chunks = step.drafts or step.chunks
            for request in requests:
                request.generated += [token() for _ in range(1 if chunks else step.times)]
            gained = take_guesses(drafts, chunks, token)
            drafts.ran(step, began, launched, len(step.rows) + gained, True)
        without = sum(len(request.generated) for request in requests) / rows * (1 + each * rows)
        assert drafts.saved_seconds == pytest.approx(without - clock.now, abs=0.03 * without)
        return clock.now / without


@pytest.mark.parametrize("kind", [AssistedDrafts, AssistedAhead])
@pytest.mark.parametrize("rows", [1, 8, 40, 100])
def test_it_costs_little_where_it_is_wrong(kind: type[Assisted], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for right, most in ((0.0, 1.04), (0.3, 1.04), (0.9, 0.5 if rows == 1 else 0.6 if rows < 20 else 1.01)):
        assert seconds_of(kind, right, rows, 0.1, monkeypatch, 1 / 320) < most
        assert seconds_of(kind, right, rows, 0.9, monkeypatch, 1 / 320) < 1.04, "an assistant as slow as the model"
