"""What tests of guessed tokens share: drafts that always pay, guesses at known answers, a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support_calls import answers, told
from support_device_loop import model_on
from support_families import random_prompts

from hf_batchllm import BatchResult
from hf_batchllm.engine.cost import StepSeconds
from hf_batchllm.engine.device_loop.steps_as_graphs import StepsAsGraphs
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.engine.drafts.drafts import Drafts
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Step
from hf_batchllm.sampling.text_lookup import TextLookup

PROMPTS = random_prompts(random.Random(5), 97, "mixed", 8)[:8]
NEW_TOKENS = 24
SAMPLED = {"do_sample": True, "temperature": 1.3, "seed": 3, "num_return_sequences": 2}
GREEDY_AND_SAMPLED = pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
ON_A_GPU = {"page_size": 16, "steps_per_sync": 3}  # as on a CPU, so that guesses begin as early


def always_pay(patch: pytest.MonkeyPatch) -> None:
    """In the loop of a GPU steps of any size take as long: drafts begin after the first burst, and all guesses pay."""
    patch.setattr(StepSeconds, "of", lambda *_: 1.0)
    for name, value in (("_MARGIN", 0.0), ("_BURSTS", 1), ("_TRIED", 10**9), ("_BURSTS_FOR_GRAPHS", 0)):
        patch.setattr(drafts_ahead, name, value)
    patch.setattr(StepsAsGraphs, "is_steady", True)


class Clock:
    """Stands still but for what a test adds to ``now``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr("time.perf_counter", lambda: self.now)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts begin after the first burst, and all guesses pay."""
    always_pay(monkeypatch)


def guess_from(known_answers: BatchResult, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    """Guesses are what an answer goes on with, but for some tokens."""
    dice = random.Random(7)
    known = {(tuple(PROMPTS[each.index]), each.sample): each.token_ids for each in known_answers}

    def guess(self: TextLookup, sample: int, generated: Sequence[int], most: int) -> list[int]:
        if dice.random() < 0.2:
            return []
        rest = known[tuple(self._prompt), sample][len(generated) :]
        some = [*rest, *[dice.randrange(97) for _ in range(3)]][: dice.randint(1, most)]  # some go beyond the end
        return [dice.randrange(97) if dice.random() < wrong else token for token in some]

    monkeypatch.setattr(TextLookup, "guess", guess)


def both(
    device: str | None,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    wrong: float = 0.2,
    family: str = "llama",
    guessed: int = 5,
    **options: Any,
) -> tuple[Any, Any]:
    """Without drafts, and with drafts of which some are wrong. Without a ``device`` steps run one by one on a CPU."""
    options = {"max_new_tokens": NEW_TOKENS, **options}
    model, config = model_on(device or "cpu", family), (ON_A_GPU if device else {}) | config
    plain = answers(model, PROMPTS, config, **options)
    with monkeypatch.context() as patch:
        guess_from(plain, patch, wrong)
        drafted = answers(model, PROMPTS, config, prompt_lookup_num_tokens=guessed, **options)
    return plain, drafted


def assert_same(plain: Any, drafted: Any) -> None:
    assert told(plain) == told(drafted)
    ours, theirs = drafted.report, plain.report
    assert 0 < ours.accepted_tokens <= ours.drafted_tokens and theirs.drafted_tokens == 0
    assert ours.new_tokens == theirs.new_tokens
    if not ours.preemptions + theirs.preemptions:
        assert ours.computed_tokens == theirs.computed_tokens
    assert f"{ours.accepted_tokens:,} of them right" in str(ours)


def requests_of(rows: int, most: int = 10**6) -> list[Request]:
    return [Request(place, np.array([1, 2, 3], dtype=np.int32), most) for place in range(rows)]


GIVEN: tuple[Any, ...] = (lambda _: 8, lambda _: 3)  # to drafts: how many tokens they guess and look for


def seconds_of(
    make: Callable[[list[Request], Clock, random.Random], Drafts],
    right: float,
    rows: int,
    each: float,
    monkeypatch: pytest.MonkeyPatch,
    *,
    times: int = 1,
    host: float = 0.0,
    size_of: Callable[[int], int] = int,
    paused: float = 0.0,
) -> float:
    """How many times as long calls take with these drafts, which guess 1s: each is right with this chance. A step takes
    1 second and each of its tokens so many beside, and the host so many between two steps that it waits for.
    """
    with monkeypatch.context() as patch:
        clock, dice, requests = Clock(patch), random.Random(3), requests_of(rows)
        for request in requests:
            request.generated, request.computed = [1], 4
        drafts = make(requests, clock, dice)

        def token() -> int:
            return 1 if dice.random() < right else 2

        while sum(len(request.generated) for request in requests) < 700 * rows:
            waited, step = drafts.must_know, drafts.added(Step(requests))
            step.times = 1 if step.is_drafted else times
            began, clock.now = clock.now, clock.now + (host if waited else 0.0)
            launched = clock.now
            drafts.launched(step)
            clock.now += step.times * (1 + each * (size_of(step.tokens) if step.room is None else step.room.size))
            if not step.is_drafted:
                drafts.before(step)
            for request in requests:
                request.generated += [token() for _ in range(step.times)]
            gained = _take_guesses(drafts, step, token) if step.is_drafted else 0
            drafts.ran(step, began, launched, len(step.rows) + gained, True)
        without = sum(len(request.generated) for request in requests) / rows * (1 + each * size_of(rows))
        assert drafts.saved_seconds == pytest.approx(without - (clock.now - paused), abs=0.03 * without)
        return clock.now / without


def _take_guesses(drafts: Drafts, step: Step, token: Callable[[], int]) -> int:
    """Of answers with a guess, whose next token is there, as many more as are guessed right. Gives how many."""
    gained = 0
    for chunk in step.drafts or step.chunks:
        accepted = 0
        while accepted < len(chunk.draft) and chunk.unit.generated[-1] == 1:
            chunk.unit.generated.append(token())
            accepted += 1
        gained += accepted
        drafts.seen(chunk.unit, len(chunk.draft), accepted)
    return gained
