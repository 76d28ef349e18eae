"""Results in hand: what they print, their rows and slices, what they keep of prompts, and names from elsewhere."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from support_families import build
from support_html import CHAT, GIVEN, plan_of, report_of, result_of, that_chats, view_of
from support_word_tokenizer import word_tokenizer

import hf_batchllm
from hf_batchllm import BatchGenerator, BatchResult, Generation, GenerationInterrupted, Score, ScoreResult
from hf_batchllm.errors import OptionValueError


@pytest.fixture(scope="module")
def result() -> BatchResult:
    return that_chats().generate(GIVEN, max_new_tokens=2)


@pytest.fixture(scope="module")
def scores() -> ScoreResult:
    return that_chats().score(["w3 w4", "w7"], choices=[" w5", " w6", " w8"])


def interrupted() -> BatchResult:
    rows = [Generation(index, 0, f"answer {index}", [1], [index], "stop") for index in (2, 5, 8)]
    return BatchResult(rows, report_of(plan_of([[at] for at in range(60)]), finished=3))


def lines(result: object) -> list[str]:
    return repr(result).splitlines()


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_a_row_is_a_line_with_its_text_first() -> None:
    ids = list(range(4000))
    shown = repr(Generation(3, 1, "yes " * 500, ids, ids, "stop", logprobs=[{5: -1.0}] * 4000, prompt="why " * 900))
    assert shown.startswith("Generation(text='yes yes") and len(shown) < 450 and "\n" not in shown
    assert "token_ids=[0, 1, 2, 3, 4, 5, ... 4,000 in all]" in shown and "logprobs=<of 4,000 tokens>" in shown
    assert "index=3" in shown and "sample=1" in shown
    shown = repr(Generation(0, 0, None, [], [], "error", error="is empty"))
    assert shown.startswith("Generation(error='is empty'") and "sample" not in shown
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    assert "prompt=<chat: 1 before, user 'Why?'>" in repr(Generation(0, 0, "So.", [1], [2], "stop", prompt=chat))
    shown = repr(Score(0, 1, " yes", [5] * 50, [-0.5] * 50, True, context="Is it? " * 50))
    assert shown.startswith("Score(text=' yes', logprob=-25.0000, is_greedy=True") and len(shown) < 250


def test_a_row_names_its_prompt_where_the_numbers_differ() -> None:
    assert lines(result_of(["a", "b"]))[1:] == ["  [0] stop: 'a'", "  [1] stop: 'b'"]
    sampled = ["  [1] prompt 0, sample 1: stop: 'b'", "  [2] prompt 1, sample 0: stop: 'c'"]
    assert lines(result_of(list("abcd"), samples=2))[2:4] == sampled
    assert lines(result_of(list("abcd"))[2:])[1] == "  [0] prompt 2: stop: 'c'"
    assert max(map(len, lines(result_of(["x" * 500] * 9, samples=3)))) <= 80


def test_an_interrupted_result_looks_like_none_of_all_prompts() -> None:
    first, *rows = lines(interrupted())
    assert first == "BatchResult, interrupted: 3 of 60 generations, not aligned with the prompts (see .index)"
    assert rows[0] == "  [0] prompt 2: stop: 'answer 2'" and rows[2].startswith("  [2] prompt 8: ")
    part = "BatchResult of 2 generations, a slice; interrupted, 3 of 60 generations had finished"
    assert lines(interrupted()[1:])[0] == part
    page = view_of(interrupted()).text
    assert "3 of 60 sequences had finished. Rows are not aligned with the list that was passed: use .index" in page
    where = GenerationInterrupted(interrupted(), 3, 60)._render_traceback_()[1]
    assert where.endswith("They are not aligned with the prompts: use `.index`.")
    rows_of_scores = [Score(4, 0, "a", [1], [-1.0], True), Score(4, 1, "b", [1], [-2.0], True)]
    report = report_of(plan_of([[at] for at in range(60)]), finished=2, scored_tokens=2)
    scores = ScoreResult(rows_of_scores, report, complete=False)
    first = "ScoreResult, interrupted: 2 of 60 scores, not aligned with the contexts (see .index)"
    assert lines(scores)[0] == first and "The whole call: in 1.50 s" in view_of(scores).text
    assert lines(ScoreResult(rows_of_scores, report))[0] == "ScoreResult of 2 scores"


def test_what_is_told_of_the_whole_call_under_a_part_of_it() -> None:
    whole = result_of(list("abcd"), report=report_of(plan_of([[at] for at in range(4)])))
    for result, is_part in ((whole, False), (whole[:], False), (whole[1:], True), (whole[1:][:], True)):
        assert ("The whole call: 40 new tokens" in view_of(result).text) == is_part
    assert "The whole call: " in view_of(interrupted()).text


# -- rows, slices, equality, pickles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [list("abc"), []], ids=["three", "none"])
def test_a_row_that_is_not_there(of: list[str]) -> None:
    scores = [Score(0, at, text, [1], [-1.0], True) for at, text in enumerate(of)]
    for result in (result_of(of), ScoreResult(scores, None)):
        with pytest.raises(IndexError, match=r"no row 9: the result has (3 rows, 0 to 2|0 rows)$"):
            result[9]
        with pytest.raises(TypeError, match="by its number or a slice, not by 'text': first the row, then the field"):
            result["text"]  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="by its number or a slice, not by None"):
            result[None]  # type: ignore[call-overload]
    assert not of or (result_of(of)[np.int64(1)].text, result_of(of)[-1].text) == ("b", "c")


def test_a_slice_is_a_result_with_the_same_report(result: BatchResult) -> None:
    part = result[1:3]
    assert isinstance(part, BatchResult) and list(part) == [result[1], result[2]] and part.report is result.report
    assert part.texts == result.texts[1:3] and len(result[::-1]) == 4 and result[::-1][0] == result[3]
    assert "<table" in part._repr_html_() and len(result[10:]) == 0


def test_a_slice_of_scores_is_a_result(scores: ScoreResult) -> None:
    part = scores[3:]
    assert isinstance(part, ScoreResult) and part.report is scores.report and len(part) == 3
    assert part.best() == scores.best()[1:] and part.probabilities == scores.probabilities[1:]
    assert part == list(scores)[3:] and part != scores and scores == scores[:] == pickle.loads(pickle.dumps(scores))
    assert [score.choice for score in scores[::-1]] == [2, 1, 0] * 2
    assert scores[::-1].best() == scores.best()[::-1] and scores[9:].best() == [] and scores[9:]._repr_html_()
    assert "The whole call: in" in part._repr_html_() and "The whole call: in" not in scores[:]._repr_html_()


def test_results_are_compared_by_what_was_generated(result: BatchResult, scores: ScoreResult) -> None:
    again = that_chats().generate(GIVEN, max_new_tokens=2)
    assert again == result and again is not result and again != result[:2]
    assert result[:2] == [result[0], result[1]] and result != "text" and result[9:] != scores[9:]
    # The same tokens, passed as ids: the same results.
    assert that_chats().generate([each.prompt_token_ids for each in result], max_new_tokens=2) == result


def test_copies_and_pickles_hold_everything_but_the_tokenizer(result: BatchResult) -> None:
    for one in (result[0], result):
        assert copy.copy(one) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    back = pickle.loads(pickle.dumps(result))
    assert [each.prompt for each in back] == [each.prompt for each in result]
    assert back[:1].texts == result.texts[:1] and "w3 w4 w5" in back._repr_html_().split("</pre>")[1]
    failed = BatchResult([Generation(0, 0, None, [], [], "error", error="is too long", prompt="Once <b>")], None)
    assert "Once &lt;b&gt;" in failed._repr_html_()


# -- prompts and contexts ----------------------------------------------------------------------------------------------


def test_each_result_has_its_prompt_as_it_was_passed() -> None:
    prompts: list[Any] = ["w7 " * 50 + "w3", [*CHAT], [5, 6]]
    chat = prompts[1]
    result = that_chats().generate(iter(prompts), max_new_tokens=2, num_return_sequences=2, do_sample=True, seed=1)
    assert result[0].prompt is prompts[0] and result[1].prompt is prompts[0]  # no copy
    assert result[2].prompt == CHAT and result[2].prompt is result[3].prompt
    assert result[4].prompt is None and result[4].prompt_token_ids == [5, 6]
    chat.append({"role": "assistant", "content": result[2].text})  # as people go on with a chat
    assert result[2].prompt == CHAT
    assert [each.prompt for each in that_chats().stream("w3 w4", max_new_tokens=1)] == ["w3 w4"]
    (failed,) = BatchGenerator(build("llama"), word_tokenizer(97)).generate([CHAT], on_error="record", max_new_tokens=1)
    assert failed.error is not None and failed.prompt == CHAT
    scores = that_chats().score(["w3 w4", CHAT, [5]], choices=[" w5", " w6"])
    assert [each.context for each in scores] == ["w3 w4", "w3 w4", CHAT, CHAT, None, None]
    assert that_chats().score(None, ["w3 w4"])[0].context is None


# -- probabilities and the best of scores ------------------------------------------------------------------------------


def test_probabilities_among_the_choices() -> None:
    scores = that_chats().score(["w3 w4", "w4"], choices=[" w5", " w6 w7", " w8"])
    for among, of_context in zip(scores.probabilities, scores.by_context, strict=True):
        weights = [math.exp(each.logprob) for each in of_context]
        assert among == pytest.approx([weight / sum(weights) for weight in weights]) and sum(among) == pytest.approx(1)
    values = [(0, 0, -math.inf), (0, 1, -math.inf), (1, 0, -5000.0), (1, 1, -math.inf)]
    rows = [Score(index, choice, None, [5], [value], False) for index, choice, value in values]
    odd = ScoreResult([*rows, Score(2, 0, None, [], [], False, "is empty")], None)
    assert odd.probabilities[:2] == [[0.5, 0.5], [1.0, 0.0]] and math.isnan(odd.probabilities[2][0])
    with pytest.raises(OptionValueError, match=r"not 'tokens'; did you mean 'token'[?]$"):
        odd.best(per="tokens")


def test_a_context_that_a_slice_cuts_has_no_best(scores: ScoreResult) -> None:
    part = scores[1:]
    assert part.best() == [None, scores.best()[1]]
    assert all(map(math.isnan, part.probabilities[0])) and part[1:][1:].probabilities == scores.probabilities[1:]
    assert part._repr_html_().count("<b>") == 2  # the best one's text and its share


def test_after_an_interrupt_contexts_that_were_scored_whole_have_a_best() -> None:
    rows = [Score(at, choice, "x", [5], [-1.0 - choice], True) for at in (0, 4) for choice in (0, 1)][:3]
    part = ScoreResult(rows, None, complete=False, cut_short=[2, 4])
    assert part.best() == [0, None] and part.probabilities[0][0] > 0.7 and math.isnan(part.probabilities[1][0])
    assert "among these" in part._repr_html_() and part._repr_html_().count("<b>") == 2
    assert part[:2].best() == [0] and part[2:].best() == [None]


def test_an_interrupted_call_knows_which_were_scored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gen = BatchGenerator(build("llama"), max_batch_tokens=8)
    contexts, choices = [[at, 3, 4] for at in range(5, 15)], [[7, 8], [9, 10]]
    whole = gen.score(contexts, choices=choices)
    made: list[object] = []

    def decode(*args: object) -> None:
        made.append(args)
        if len(made) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(gen._tokenizer, "decode", decode)
    with pytest.raises(GenerationInterrupted):
        gen.score(contexts, choices=choices)
    part = gen.interrupted
    assert isinstance(part, ScoreResult) and 0 < len(part) < len(whole)
    for row, best in zip(part.by_context, part.best(), strict=True):
        assert best == (whole.best()[row[0].index] if len(row) == 2 else None)
    assert any(best is not None for best in part.best())


# -- names from elsewhere ----------------------------------------------------------------------------------------------


def test_attributes_that_other_libraries_have_get_a_hint(result: BatchResult) -> None:
    generator: object = BatchGenerator(build("llama"))
    for owner, name, hint in (
        (result[0], "outputs", "result.by_prompt"),
        (result[0], "cumulative_logprob", "logprobs=0"),
        (result[0], "stop_reason", "`.finish_reason`"),
        (result, "outputs", "result.by_prompt"),
        (result, "text", r"`\.texts`"),
        (generator, "chat", r"gen\.generate\(chats\)"),
        (generator, "get_tokenizer", r"`\.tokenizer`"),
        (generator, "beam_search", "num_beams"),
        (hf_batchllm, "LLM", "BatchGenerator"),
        (hf_batchllm, "SamplingParams", "keyword arguments"),
        (generator, "nonsense", "no attribute 'nonsense'$"),
    ):
        with pytest.raises(AttributeError, match=hint):
            getattr(owner, name)
        assert not hasattr(owner, name)


def test_an_error_within_a_property_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(build("llama"))

    def fails() -> None:
        raise AttributeError("of the tokenizer's own")

    monkeypatch.setattr(generator._tokenizer, "found", fails)
    with pytest.raises(AttributeError, match="of the tokenizer's own"):
        _ = generator.tokenizer
