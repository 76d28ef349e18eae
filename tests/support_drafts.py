"""What tests of guessed tokens share: drafts that always pay, guesses at known answers, a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support_device_loop import model_on
from support_families import random_prompts

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.cost import StepSeconds
from hf_batchllm.engine.device_loop.steps_as_graphs import StepsAsGraphs
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.engine.drafts.drafts import Drafts
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Chunk
from hf_batchllm.sampling.text_lookup import TextLookup

PROMPTS = random_prompts(random.Random(5), 97, "mixed", 8)[:8]
NEW_TOKENS = 40
SAMPLED = {"do_sample": True, "temperature": 1.3, "seed": 3, "num_return_sequences": 2}
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


def guess_from(answers: BatchResult, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    """Guesses are what an answer goes on with, but for some tokens."""
    dice = random.Random(7)
    known = {(tuple(PROMPTS[each.index]), each.sample): each.token_ids for each in answers}

    def guess(self: TextLookup, sample: int, generated: Sequence[int], most: int) -> list[int]:
        if dice.random() < 0.2:
            return []
        rest = known[tuple(self._prompt), sample][len(generated) :]
        some = [*rest, *[dice.randrange(97) for _ in range(3)]][: dice.randint(1, most)]
        return [dice.randrange(97) if dice.random() < wrong else token for token in some]

    monkeypatch.setattr(TextLookup, "guess", guess)


def both(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    wrong: float = 0.2,
    family: str = "llama",
    guessed: int = 5,
    **options: Any,
) -> tuple[BatchResult, BatchResult]:
    """Without drafts, and with drafts of which some are wrong."""
    options = {"max_new_tokens": NEW_TOKENS, "progress": False, **options}
    model = model_on(device, family)
    with BatchGenerator(model, **ON_A_GPU | config) as generator:
        plain = generator.generate(PROMPTS, **options)
    with monkeypatch.context() as patch, BatchGenerator(model, **ON_A_GPU | config) as generator:
        guess_from(plain, patch, wrong)
        drafted = generator.generate(PROMPTS, prompt_lookup_num_tokens=guessed, **options)
    return plain, drafted


def assert_same(plain: BatchResult, drafted: BatchResult) -> None:
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert drafted.report is not None and drafted.report.accepted_tokens > 0


def take_guesses(drafts: Drafts, chunks: Sequence[Chunk], token: Callable[[], int]) -> int:
    """In a simulation: of answers with a guess, whose next token is there, as many more as are guessed. Gives how many.

    A guess is of 1s.
    """
    gained = 0
    for chunk in chunks:
        accepted = 0
        assert isinstance(chunk.unit, Request)
        while accepted < len(chunk.draft) and chunk.unit.generated[-1] == 1:
            chunk.unit.generated.append(token())
            accepted += 1
        gained += accepted
        drafts.seen(chunk.unit, len(chunk.draft), accepted)
    return gained
