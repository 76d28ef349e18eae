"""Tokens that are guessed and run together: the same answers in fewer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_calls import answers, failing, noted, told
from support_drafts import GIVEN, GREEDY_AND_SAMPLED, PROMPTS, SAMPLED, assert_same, guess_from, seconds_of
from support_drafts import both as both_of
from support_families import build
from support_grammars import letters
from support_letter_tokenizers import EOS
from support_parity import each_config_with_some, pages_of_memory
from support_parity import watched as watched  # a fixture
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.at_once import AtOnce
from hf_batchllm.engine.cost import Times
from hf_batchllm.engine.drafts.drafts import Drafts
from hf_batchllm.errors import OptionValueError
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import FifoScheduler
from hf_batchllm.sampling.text_lookup import EarlierAnswers, TextLookup

NEW_TOKENS = 24
ASKED: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if steps of any size took as long: all guesses pay."""
    monkeypatch.setattr(Times, "line", lambda _: (1.0, 0.0))


def both(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], family: str = "llama", wrong: float = 0.2, **options: Any
) -> Any:
    """Without drafts, and with drafts of which some are wrong."""
    return both_of(None, monkeypatch, config, wrong, family, **ASKED | options)


def assert_counted(plain: Any, drafted: Any) -> None:
    """No step runs rows that nobody asked for, so that wrong guesses alone are run beside."""
    assert_same(plain, drafted)
    ours, theirs = drafted.report, plain.report
    assert ours.accepted_tokens < ours.drafted_tokens
    if not ours.preemptions + theirs.preemptions:
        assert ours.model_tokens == theirs.model_tokens + ours.drafted_tokens - ours.accepted_tokens


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("family", "config"),
    each_config_with_some(
        [{}, {"page_size": 3}, {"scheduler": "fifo"}, {"share_prefixes": False}, {"invariant": True}], 1,
        ["llama", "gemma3", "gpt_oss", "deepseek_v3", "mixtral", "gpt2"],
    ),
)  # fmt: skip
@GREEDY_AND_SAMPLED
def test_answers_are_the_same(
    family: str, config: dict[str, Any], options: dict[str, Any], watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = both(monkeypatch, config, family, **options)
    assert_counted(plain, drafted)
    assert drafted.report.steps < plain.report.steps
    assert all(cache.free_pages == cache.num_pages for cache in watched)


OPTIONS: list[dict[str, Any]] = [
    {"eos_token_id": list(range(0, 97, 9))},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "eos_token_id": list(range(0, 97, 3))},
    {"stop_strings": ["ab", "c", "de"], "tokenizer": letters()[1]},
    {"prefix_allowed_tokens_fn": lambda index, ids: list(range(len(ids) % 2, 97, 2))},
    {"max_new_tokens": 1},
    {"max_new_tokens": 2},
    {"guidance_scale": 1.5},
    {"regex": "[a-f]{3,20}", "eos_token_id": EOS, "tokenizer": letters()[1]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options_keep_their_meaning(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "regex" in options:
        pytest.importorskip("llguidance")
    plain, drafted = both(monkeypatch, {}, **options)
    assert told(plain) == told(drafted)
    assert (drafted.report.drafted_tokens > 0) == (options.get("max_new_tokens") not in (1, 2))


@GREEDY_AND_SAMPLED
def test_probabilities_are_those_of_single_steps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, where that is promised."""
    more = {"logprobs": 2, "prompt_logprobs": 1, "eos_token_id": [3, 50], **options}
    plain, drafted = both(monkeypatch, {"invariant": True}, **more)
    assert_counted(plain, drafted)
    assert [each.logprobs for each in plain] == [each.logprobs for each in drafted]
    assert [each.prompt_logprobs for each in plain] == [each.prompt_logprobs for each in drafted]


def test_in_little_memory(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that others may need are not taken for guesses; those that are preempted are computed again."""
    longer = {"max_new_tokens": 60, "eos_token_id": 96}
    for pages in (24, 32, 40):
        config = {"page_size": 4, "kv_memory": pages_of_memory(build("llama"), pages, 4)}
        plain, drafted = both(monkeypatch, config, **longer)
        assert told(plain) == told(drafted)
        assert drafted.report.accepted_tokens > 0
    assert any(cache.lost_tokens for cache in watched), "some were preempted"
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize("most", [1, 3, 9, 40])
def test_steps_stay_as_small_as_they_may_be(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = noted(monkeypatch, Drafts, "ran", lambda self, step, *others: step.tokens)
    plain, drafted = both(monkeypatch, {"max_batch_tokens": most}, wrong=0.0)
    assert told(plain) == told(drafted)
    assert max(rows) <= most


def test_a_scheduler_of_the_users_own_need_not_know_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lengthens nothing, so there are none, which a warning says."""

    class Own:
        def __init__(self) -> None:
            self._inner = FifoScheduler()
            for name in ("start", "next", "finish"):
                setattr(self, name, getattr(self._inner, name))

    with pytest.warns(UserWarning, match="no effect here: Own has no room for guesses"):
        plain, drafted = both(monkeypatch, {"scheduler": Own()})
    assert told(plain) == told(drafted)
    assert drafted.report.drafted_tokens == 0


def test_what_a_text_goes_on_with() -> None:
    def guess(lookup: TextLookup, sample: int, generated: list[int], most: int) -> list[int]:
        lookup.learn(sample, generated)
        return lookup.guess(sample, generated, most)

    lookup = TextLookup([1, 2, 3, 4, 5, 6, 2, 3], 3)
    assert guess(lookup, 0, [], 3) == [4, 5, 6]
    assert guess(lookup, 0, [4, 5], 8) == [6, 2, 3, 4, 5, 6, 2, 3]  # it repeats itself
    assert guess(lookup, 0, [4, 5, 9], 8) == []
    assert guess(lookup, 0, [4, 5, 9, 7, 8], 8) == []
    assert guess(lookup, 1, [4, 5, 9], 2) == [7, 8], "as another answer to the same prompt did"
    assert guess(lookup, 1, [4, 5, 9, 7, 8], 2) == []
    lookup = TextLookup([1, 2, 3], 3, [[4, 5, 6], [4, 5, 7, 8]])
    assert guess(lookup, 0, [], 4) == [4, 5, 7, 8], "the latest one"
    assert guess(lookup, 0, [4, 5], 4) == [7, 8]
    assert guess(lookup, 0, [4, 5, 6], 4) == []


def test_a_text_that_has_been_learned_in_part() -> None:
    """What is new of it is looked for, and is part of what a guess says."""
    lookup = TextLookup([1, 2, 3], 3)
    lookup.learn(0, [4, 5, 1, 2, 3])
    assert lookup.guess(0, [4, 5, 1, 2, 3], 6) == [4, 5, 1, 2, 3, 4]
    assert lookup.guess(0, [4, 5, 1, 2, 3, 4, 5], 6) == [1, 2, 3, 4, 5, 1]
    assert lookup.guess(0, [4, 5, 1, 2, 3, 4, 5, 7, 7, 7], 6) == []
    assert lookup.guess(0, [4, 5, 1, 2, 3, 4, 5, 7, 7, 7, 5, 1], 6) == [2, 3, 4, 5, 7, 7]
    lookup.learn(0, [4, 5, 1, 2, 3, 4, 5, 7, 7, 7, 5, 1])
    assert lookup.guess(0, [4, 5, 1, 2, 3, 4, 5, 7, 7, 7, 5, 1, 4, 5, 7], 3) == [7, 7, 5]


def test_answers_of_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same once more, sampled and greedy; and of another adapter none."""
    asked = ASKED | {"prompt_lookup_num_tokens": 8}
    for options in ({}, SAMPLED):
        with BatchGenerator(build("llama")) as generator:
            first = generator.generate(PROMPTS, **options, **asked)
            again = generator.generate(PROMPTS[::-1], **options, **asked)
            kept = generator._resources.earlier.tokens
            assert kept > 0
            others = generator.generate([[*each, 5] for each in PROMPTS], **options, **asked)
        if not options:
            assert told(again)[::-1] == told(first)
        assert generator._resources.earlier.tokens == 0, "none is kept by a generator that was closed"
        ours, theirs = again.report, first.report
        assert ours.accepted_tokens > 1.5 * max(theirs.accepted_tokens, others.report.accepted_tokens) or options
        assert ours.steps < 0.6 * theirs.steps or options


def test_how_many_answers_are_kept() -> None:
    kept = EarlierAnswers(most_tokens=100)
    requests = [Request(place, np.array([1, 2, place], dtype=np.int32), 50) for place in range(12)]
    for request in requests:
        request.generated = [request.index] * 10
        kept.take(request)
    assert kept.tokens == 100 and not kept.of(requests[0]) and not kept.of(requests[1])
    assert [answer.tolist() for answer in kept.of(requests[2])] == [[2] * 10]
    for _ in range(20):
        kept.take(requests[11])
    assert len(kept.of(requests[11])) <= 16 and kept.tokens <= 100
    other = Request(0, np.array([1, 2, 11], dtype=np.int32), 50, key="an adapter")
    assert not kept.of(other)
    kept.forget()
    assert kept.tokens == 0 and not kept.of(requests[11])


@pytest.mark.parametrize(("asked", "lengths"), [(None, [3, 2]), (1, [1]), (2, [2]), (5, [5, 3, 2]), (99, [16, 3, 2])])
def test_how_many_tokens_are_looked_for(asked: int | None, lengths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(monkeypatch, TextLookup, "__init__", lambda self, *_: self.lengths, after=True)
    given = {} if asked is None else {"max_matching_ngram_size": asked}
    answers("llama", PROMPTS, max_new_tokens=4, prompt_lookup_num_tokens=3, **given)
    assert seen and all(each == lengths for each in seen)


def test_only_prompts_that_ask_are_guessed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    own = Drafts._guess

    def guess(self: Drafts, request: Any) -> list[int]:
        found = own(self, request)
        if found:
            asked.add(request.index)
        return found

    monkeypatch.setattr(Drafts, "_guess", guess)
    configs = [
        GenerationConfig(max_new_tokens=30, prompt_lookup_num_tokens=4 if place % 2 else None) for place in range(8)
    ]
    plain = answers("llama", PROMPTS, max_new_tokens=30)
    assert told(answers("llama", PROMPTS, generation_config=configs)) == told(plain)
    assert asked and asked <= {1, 3, 5, 7}


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [("mamba", {}, "its layers carry a state"), ("llama", {"num_beams": 2}, "no tokens are guessed in a beam search")],
)
def test_where_there_are_none_a_warning_says_so(family: str, options: dict[str, Any], why: str) -> None:
    with pytest.warns(UserWarning, match=f"no effect here.*{why}"):
        result = answers(family, [[1, 2, 1, 2]], max_new_tokens=3, prompt_lookup_num_tokens=4, **options)
    assert result.report.drafted_tokens == 0


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_num_tokens", -1), ("max_matching_ngram_size", 0)])
def test_numbers_that_mean_nothing_are_refused(name: str, value: int) -> None:
    with pytest.raises(OptionValueError, match=f"{name}.* must be at least"):
        answers("llama", [[1, 2]], max_new_tokens=3, **{name: value})


def of_memory(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[int]:
    """Steps of more rows run out of it. Gives the rows of those that do not."""
    ran, own = [], ModelRunner.step

    def step(self: ModelRunner, batch: Any, *latest: Any) -> Any:
        if len(batch.attention.positions) > rows:
            raise torch.OutOfMemoryError("no memory for so many rows")
        ran.append(len(batch.attention.positions))
        return own(self, batch, *latest)

    monkeypatch.setattr(ModelRunner, "step", step)
    return ran


def test_drafts_that_memory_has_no_room_for_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1 + place, 2, 3] for place in range(8)]
    with BatchGenerator(build("llama")) as generator:
        plain = generator.generate(prompts, **ASKED)
        with monkeypatch.context() as patch:
            patch.setattr(TextLookup, "guess", lambda self, sample, generated, most: [1, 2, 3, 4, 5][:most])
            ran = of_memory(patch, 30)
            drafted = generator.generate(prompts, prompt_lookup_num_tokens=5, **ASKED)
    assert told(plain) == told(drafted)
    assert min(ran[:-1]) >= 8, "steps without drafts are as large as ever"
    assert drafted.report.drafted_tokens > 8


def test_a_pick_that_memory_has_no_room_for_ends_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    count = failing(monkeypatch, AtOnce, "pick_drafted", range(3, 999, 3), torch.OutOfMemoryError)
    plain, drafted = both(monkeypatch, {})
    assert told(plain) == told(drafted) and count[0] > 6


def test_the_report_of_a_call_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    with BatchGenerator(build("llama")) as generator:
        plain = generator.generate(PROMPTS, **ASKED)
        with monkeypatch.context() as patch:
            guess_from(plain, patch, 0.0)
            failing(patch, AtOnce, "pick_drafted", {4}, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                generator.generate(PROMPTS, prompt_lookup_num_tokens=5, **ASKED)
        assert generator.last_report.computed_tokens == plain.report.computed_tokens
        assert told(generator.generate(PROMPTS, **ASKED)) == told(plain)


# -- when they pay ---------------------------------------------------------------------------------------------------


@pytest.mark.some_cases("rows")
@pytest.mark.parametrize("rows", [1, 4, 8, 17, 32, 33])
@pytest.mark.parametrize("each", [0.01, 0.05, 0.3])
def test_drafts_cost_little_where_guesses_are_wrong(rows: int, each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def make(requests: list[Request], *_: Any) -> Drafts:
        drafts = Drafts(*GIVEN, requests, lambda _, end: end, 64)
        drafts._guess = lambda _: [1] * 8  # type: ignore[method-assign]
        return drafts

    most_of = {0.0: 1.03, 0.3: 1.02, 0.95: 0.55 if rows * each < 0.5 and rows < 17 else 1.005}
    for right, most in most_of.items():
        assert seconds_of(make, right, rows, each, monkeypatch) < most
