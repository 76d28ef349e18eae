"""Tokens that are guessed and run together: the same answers in fewer steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_drafts import Clock
from support_families import build, random_prompts
from support_grammars import letters
from support_letter_tokenizers import EOS
from support_parity import each_config_with_some, pages_of_memory
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.cost import Times
from hf_batchllm.engine.drafts.drafts import Drafts
from hf_batchllm.engine.loop import AtOnce
from hf_batchllm.errors import OptionValueError
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import FifoScheduler
from hf_batchllm.planning.step import Step
from hf_batchllm.sampling.earlier_answers import EarlierAnswers
from hf_batchllm.sampling.text_lookup import TextLookup

PROMPTS = random_prompts(random.Random(5), 97, "mixed", 8)[:8]
NEW_TOKENS = 24
SAMPLED = {"do_sample": True, "temperature": 1.3, "seed": 3, "num_return_sequences": 2}


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if steps of any size took as long: all guesses pay."""
    monkeypatch.setattr(Times, "line", lambda _: (1.0, 0.0))


def guess_from(answers: BatchResult, monkeypatch: pytest.MonkeyPatch, wrong: float = 0.2) -> None:
    """Guesses are what an answer goes on with, but for some tokens."""
    dice = random.Random(7)
    known = {(tuple(PROMPTS[each.index]), each.sample): each.token_ids for each in answers}

    def guess(self: TextLookup, sample: int, generated: Sequence[int], most: int) -> list[int]:
        rest = known[tuple(self._prompt), sample][len(generated) :]
        some = [*rest, *[dice.randrange(97) for _ in range(3)]][:most]  # some go beyond the answer's end
        return [dice.randrange(97) if dice.random() < wrong else token for token in some]

    monkeypatch.setattr(TextLookup, "guess", guess)


def both(
    monkeypatch: pytest.MonkeyPatch, family: str, config: dict[str, Any], wrong: float = 0.2, **options: Any
) -> Any:
    """Without drafts, and with drafts of which some are wrong."""
    options = {"max_new_tokens": NEW_TOKENS, "progress": False, **options}
    with BatchGenerator(build(family), **config) as generator:
        plain = generator.generate(PROMPTS, **options)
    with monkeypatch.context() as patch, BatchGenerator(build(family), **config) as generator:
        guess_from(plain, patch, wrong)
        drafted = generator.generate(PROMPTS, prompt_lookup_num_tokens=5, **options)
    return plain, drafted


def told(result: BatchResult) -> list[Any]:
    return [(each.token_ids, each.finish_reason) for each in result]


def assert_same(plain: BatchResult, drafted: BatchResult) -> None:
    assert told(plain) == told(drafted)
    ours, theirs = drafted.report, plain.report
    assert ours is not None and theirs is not None
    assert 0 < ours.accepted_tokens < ours.drafted_tokens and theirs.drafted_tokens == 0
    assert ours.new_tokens == theirs.new_tokens
    if not ours.preemptions + theirs.preemptions:
        assert ours.computed_tokens == theirs.computed_tokens
        assert ours.model_tokens == theirs.model_tokens + ours.drafted_tokens - ours.accepted_tokens
    assert f"{ours.accepted_tokens:,} of them right" in str(ours)


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("family", "config"),
    each_config_with_some(
        [{}, {"page_size": 3}, {"scheduler": "fifo"}, {"share_prefixes": False}, {"invariant": True}], 1,
        ["llama", "gemma3", "gpt_oss", "deepseek_v3", "mixtral", "gpt2"],
    ),
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same(
    family: str, config: dict[str, Any], options: dict[str, Any], watched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = both(monkeypatch, family, config, **options)
    assert_same(plain, drafted)
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
    options = dict(options)
    if "regex" in options:
        pytest.importorskip("llguidance")
    tokenizer = options.pop("tokenizer", None)
    named = {} if tokenizer is None else {"tokenizer": tokenizer}
    plain, drafted = both(monkeypatch, "llama", {}, **options, **named)
    assert told(plain) == told(drafted)
    assert (drafted.report.drafted_tokens > 0) == (options.get("max_new_tokens") not in (1, 2))


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_probabilities_are_those_of_single_steps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, where that is promised."""
    more = {"logprobs": 2, "prompt_logprobs": 1, "eos_token_id": [3, 50], **options}
    plain, drafted = both(monkeypatch, "llama", {"invariant": True}, **more)
    assert_same(plain, drafted)
    assert [each.logprobs for each in plain] == [each.logprobs for each in drafted]
    assert [each.prompt_logprobs for each in plain] == [each.prompt_logprobs for each in drafted]


def test_in_little_memory(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that others may need are not taken for guesses; those that are preempted are computed again."""
    longer = {"max_new_tokens": 60, "eos_token_id": 96}
    for pages in (24, 32, 40):
        config = {"page_size": 4, "kv_memory": pages_of_memory(build("llama"), pages, 4)}
        plain, drafted = both(monkeypatch, "llama", config, **longer)
        assert told(plain) == told(drafted)
        assert drafted.report.accepted_tokens > 0
    assert any(cache.lost_tokens for cache in watched), "some were preempted"
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize("most", [1, 3, 9, 40])
def test_steps_stay_as_small_as_they_may_be(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, own = [], Drafts.ran

    def ran(self: Drafts, step: Step, *others: Any) -> None:
        rows.append(step.tokens)
        own(self, step, *others)

    monkeypatch.setattr(Drafts, "ran", ran)
    plain, drafted = both(monkeypatch, "llama", {"max_batch_tokens": most}, wrong=0.0)
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
        plain, drafted = both(monkeypatch, "llama", {"scheduler": Own()})
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
    asked: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "progress": False, "prompt_lookup_num_tokens": 8}
    for options in ({}, SAMPLED):
        with BatchGenerator(build("llama")) as generator:
            first = generator.generate(PROMPTS, **options, **asked)
            again = generator.generate(PROMPTS[::-1], **options, **asked)
            kept = generator._earlier.tokens
            assert kept > 0
            others = generator.generate([[*each, 5] for each in PROMPTS], **options, **asked)
        if not options:
            assert told(again)[::-1] == told(first)
        assert generator._earlier.tokens == 0, "none is kept by a generator that was closed"
        ours, theirs = again.report, first.report
        assert ours is not None and theirs is not None and others.report is not None
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
    seen, own = [], TextLookup.__init__

    def made(self: TextLookup, prompt: Any, longest: int, earlier: Any) -> None:
        own(self, prompt, longest, earlier)
        seen.append(self.lengths)

    monkeypatch.setattr(TextLookup, "__init__", made)
    given = {} if asked is None else {"max_matching_ngram_size": asked}
    with BatchGenerator(build("llama")) as generator:
        generator.generate(PROMPTS, max_new_tokens=4, prompt_lookup_num_tokens=3, progress=False, **given)
    assert seen and all(each == lengths for each in seen)


def test_only_prompts_that_ask_are_guessed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

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
    with BatchGenerator(build("llama")) as generator:
        plain = generator.generate(PROMPTS, max_new_tokens=30, progress=False)
        assert told(generator.generate(PROMPTS, configs, progress=False)) == told(plain)
    assert asked and asked <= {1, 3, 5, 7}


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [("mamba", {}, "its layers carry a state"), ("llama", {"num_beams": 2}, "no tokens are guessed in a beam search")],
)
def test_where_there_are_none_a_warning_says_so(family: str, options: dict[str, Any], why: str) -> None:
    asked = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 4, "progress": False, **options}
    with BatchGenerator(build(family)) as generator, pytest.warns(UserWarning, match=f"no effect here.*{why}"):
        result = generator.generate([[1, 2, 1, 2]], **asked)
    assert result.report is not None and result.report.drafted_tokens == 0


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_num_tokens", -1), ("max_matching_ngram_size", 0)])
def test_numbers_that_mean_nothing_are_refused(name: str, value: int) -> None:
    with (
        BatchGenerator(build("llama")) as generator,
        pytest.raises(OptionValueError, match=f"{name}.* must be at least"),
    ):
        generator.generate([[1, 2]], max_new_tokens=3, **{name: value})


def of_memory(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[int]:
    """Steps of more rows run out of it. Gives the rows of those that do not."""
    ran, own = [], ModelRunner.step

    def step(self: ModelRunner, batch: Any) -> Any:
        if len(batch.attention.positions) > rows:
            raise torch.OutOfMemoryError("no memory for so many rows")
        ran.append(len(batch.attention.positions))
        return own(self, batch)

    monkeypatch.setattr(ModelRunner, "step", step)
    return ran


def test_drafts_that_memory_has_no_room_for_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1 + place, 2, 3] for place in range(8)]
    with BatchGenerator(build("llama")) as generator:
        plain = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(TextLookup, "guess", lambda self, sample, generated, most: [1, 2, 3, 4, 5][:most])
            ran = of_memory(patch, 30)
            options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "prompt_lookup_num_tokens": 5, "progress": False}
            drafted = generator.generate(prompts, **options)
    assert told(plain) == told(drafted)
    assert min(ran[:-1]) >= 8, "steps without drafts are as large as ever"
    assert drafted.report is not None and drafted.report.drafted_tokens > 8


def test_a_pick_that_memory_has_no_room_for_ends_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    own, count = AtOnce.pick_drafted, []

    def pick(self: AtOnce, rows: Any, requests: Any) -> Any:
        count.append(1)
        if len(count) % 3 == 0:
            raise torch.OutOfMemoryError("no memory for a pick")
        return own(self, rows, requests)

    monkeypatch.setattr(AtOnce, "pick_drafted", pick)
    plain, drafted = both(monkeypatch, "llama", {})
    assert told(plain) == told(drafted) and len(count) > 6


def test_the_report_of_a_call_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    own, count = AtOnce.pick_drafted, []

    def pick(self: AtOnce, rows: Any, requests: Any) -> Any:
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        return own(self, rows, requests)

    with BatchGenerator(build("llama")) as generator:
        plain = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, progress=False)
        with monkeypatch.context() as patch:
            guess_from(plain, patch, 0.0)
            patch.setattr(AtOnce, "pick_drafted", pick)
            with pytest.raises(KeyboardInterrupt):
                generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, prompt_lookup_num_tokens=5, progress=False)
        assert generator.last_report is not None
        assert generator.last_report.computed_tokens == plain.report.computed_tokens
        assert told(generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, progress=False)) == told(plain)


# -- when they pay ---------------------------------------------------------------------------------------------------


def seconds_of(right: float, rows: int, each: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """How many times as long it takes with drafts, where guesses are right with this chance, a step takes 1 second and
    each of its tokens so many beside."""
    monkeypatch.undo()
    dice, clock = random.Random(3), Clock(monkeypatch)
    requests = [Request(place, np.array([1, 2, 3], dtype=np.int32), 1000) for place in range(rows)]
    drafts = Drafts(lambda _: 8, lambda _: 3, requests, lambda _, end: end, lambda *_: np.empty((0, 1)), 64)
    for request in requests:
        request.generated, request.computed = [1], 4
    monkeypatch.setattr(drafts, "_guess", lambda _: [1] * 8)
    made = 0
    while made < 400 * rows:
        step = drafts.added(Step(requests))
        began, clock.now = clock.now, clock.now + 1 + each * step.tokens
        before, made = made, made + rows
        for chunk in step.chunks:
            accepted = 0
            while accepted < len(chunk.draft) and dice.random() < right:
                accepted += 1
            made += accepted
            drafts.seen(chunk.unit, len(chunk.draft), accepted)
        drafts.ran(step, began, began, len(step.rows) + made - before - rows, True)
    without = made / rows * (1 + each * rows)
    assert drafts.saved_seconds == pytest.approx(without - clock.now, abs=0.03 * without)
    return clock.now / without


@pytest.mark.parametrize("rows", [1, 4, 8, 17, 32, 33])
@pytest.mark.parametrize("each", [0.01, 0.05, 0.3])
def test_drafts_cost_little_where_guesses_are_wrong(rows: int, each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(0.0, rows, each, monkeypatch) < 1.03
    assert seconds_of(0.3, rows, each, monkeypatch) < 1.02
    assert seconds_of(0.95, rows, each, monkeypatch) < (0.55 if rows * each < 0.5 and rows < 17 else 1.005)
