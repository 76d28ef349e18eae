"""Parts of scores: slices, and what an interrupt left. What was scored whole has a best continuation."""

from __future__ import annotations

import math
import pickle

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, GenerationInterrupted, Score, ScoreResult


def scored() -> ScoreResult:
    return BatchGenerator(build("llama"), word_tokenizer(97)).score(["w3 w4", "w7"], choices=[" w5", " w6", " w8"])


def test_a_slice_is_a_result() -> None:
    whole = scored()
    part = whole[3:]
    assert isinstance(part, ScoreResult) and part.report is whole.report and len(part) == 3
    assert part.best() == whole.best()[1:] and part.probabilities == whole.probabilities[1:]
    assert part == list(whole)[3:] and part != whole and whole == whole[:] == pickle.loads(pickle.dumps(whole))
    assert [score.choice for score in whole[::-1]] == [2, 1, 0] * 2 and whole[::-1].best() == whole.best()[::-1]
    assert "The whole call: in" in part._repr_html_() and "The whole call: in" not in whole[:]._repr_html_()
    assert whole[9:].best() == [] and whole[9:]._repr_html_()


def test_a_context_that_a_slice_cuts_has_no_best() -> None:
    whole = scored()
    part = whole[1:]
    assert part.best() == [None, whole.best()[1]]
    assert all(map(math.isnan, part.probabilities[0])) and part[1:][1:].probabilities == whole.probabilities[1:]
    assert part._repr_html_().count("<b>") == 2  # the best one's text and its share


def test_after_an_interrupt_contexts_that_were_scored_whole_have_a_best() -> None:
    rows = [Score(at, choice, "x", [5], [-1.0 - choice], True) for at in (0, 4) for choice in (0, 1)][:3]
    part = ScoreResult(rows, None, complete=False, cut_short=[2, 4])
    assert part.best() == [0, None] and part.probabilities[0][0] > 0.7 and math.isnan(part.probabilities[1][0])
    shown = part._repr_html_()
    assert "among these" in shown and shown.count("<b>") == 2
    assert part[:2].best() == [0] and part[2:].best() == [None]


def test_an_interrupted_call_knows_which_were_scored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gen = BatchGenerator(build("llama"), max_batch_tokens=8)
    contexts = [[at, 3, 4] for at in range(5, 15)]
    choices = [[7, 8], [9, 10]]
    whole = gen.score(contexts, choices=choices)
    made = 0

    def interrupted(*args: object) -> str | None:
        nonlocal made
        made += 1
        if made == 8:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(gen._tokenizer, "decode", interrupted)
    with pytest.raises(GenerationInterrupted):
        gen.score(contexts, choices=choices)
    part = gen.interrupted
    assert isinstance(part, ScoreResult) and 0 < len(part) < len(whole)
    best = {row[0].index: choice for row, choice in zip(part.by_context, part.best(), strict=True)}
    counts = {row[0].index: len(row) for row in part.by_context}
    assert {index: choice is not None for index, choice in best.items()} == {at: n == 2 for at, n in counts.items()}
    assert all(choice == whole.best()[index] for index, choice in best.items() if choice is not None)
    assert any(choice is not None for choice in best.values())
