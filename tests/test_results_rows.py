"""A result says which rows it has: they are not always numbered as the prompts are."""

from __future__ import annotations

import numpy as np
import pytest
from support_html import plan_of, report_of, result_of, view_of

from hf_batchllm import BatchResult, Generation, Score, ScoreResult
from hf_batchllm.errors import GenerationInterrupted, OptionValueError


def interrupted() -> BatchResult:
    rows = [Generation(index, 0, f"answer {index}", [1], [index], "stop") for index in (2, 5, 8)]
    return BatchResult(rows, report_of(plan_of([[at] for at in range(60)]), finished=3))


def lines(result: object) -> list[str]:
    return repr(result).splitlines()


def test_an_interrupted_result_looks_like_none_of_all_prompts() -> None:
    first, *rows = lines(interrupted())
    assert first == "BatchResult, interrupted: 3 of 60 generations, not aligned with the prompts (see .index)"
    assert rows[0] == "  [0] prompt 2: stop: 'answer 2'" and rows[2].startswith("  [2] prompt 8: ")
    assert lines(interrupted()[1:])[0] == (
        "BatchResult of 2 generations, a slice; interrupted, 3 of 60 generations had finished"
    )
    page = view_of(interrupted()).text
    assert "3 of 60 sequences had finished. Rows are not aligned with the list that was passed: use .index" in page
    where = GenerationInterrupted(interrupted(), 3, 60)._render_traceback_()[1]
    assert where.endswith("They are not aligned with the prompts: use `.index`.")


def test_interrupted_scores() -> None:
    scores = [Score(4, 0, "a", [1], [-1.0], True), Score(4, 1, "b", [1], [-2.0], True)]
    report = report_of(plan_of([[at] for at in range(60)]), finished=2, scored_tokens=2)
    part = ScoreResult(scores, report, complete=False)
    assert lines(part)[0] == "ScoreResult, interrupted: 2 of 60 scores, not aligned with the contexts (see .index)"
    assert "The whole call: in 1.50 s" in view_of(part).text
    assert lines(ScoreResult(scores, report))[0] == "ScoreResult of 2 scores"


def test_a_row_names_its_prompt_where_the_numbers_differ() -> None:
    assert lines(result_of(["a", "b"]))[1:] == ["  [0] stop: 'a'", "  [1] stop: 'b'"]
    assert lines(result_of(list("abcd"), samples=2))[2:4] == [
        "  [1] prompt 0, sample 1: stop: 'b'",
        "  [2] prompt 1, sample 0: stop: 'c'",
    ]
    assert lines(result_of(list("abcd"))[2:])[1] == "  [0] prompt 2: stop: 'c'"
    assert max(map(len, lines(result_of(["x" * 500] * 9, samples=3)))) <= 80


def test_the_picture_numbers_prompts_and_says_so() -> None:
    assert '<th colspan="2">prompt</th>' in view_of(result_of(["a"])).html


def test_what_is_told_of_the_whole_call_under_a_part_of_it() -> None:
    whole = result_of(list("abcd"), report=report_of(plan_of([[at] for at in range(4)])))
    for result, is_part in ((whole, False), (whole[:], False), (whole[1:], True), (whole[1:][:], True)):
        assert ("The whole call: 40 new tokens" in view_of(result).text) == is_part
    assert "The whole call: " in view_of(interrupted()).text


@pytest.mark.parametrize("of", [list("abc"), []], ids=["three", "none"])
def test_a_row_that_is_not_there(of: list[str]) -> None:
    scores = [Score(0, at, text, [1], [-1.0], True) for at, text in enumerate(of)]
    for result in (result_of(of), ScoreResult(scores, None)):
        with pytest.raises(IndexError, match=r"no row 9: the result has (3 rows, 0 to 2|0 rows)$"):
            result[9]
        with pytest.raises(TypeError, match="asked for by its number, not by 'text': first the row, then the field"):
            result["text"]  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="by its number or a slice, not by None"):
            result[None]  # type: ignore[call-overload]
    if of:
        assert result_of(of)[np.int64(1)].text == "b" and result_of(of)[-1].text == "c"


def test_a_measure_that_is_nearly_one() -> None:
    with pytest.raises(OptionValueError, match=r"not 'tokens'; did you mean 'token'[?]$"):
        ScoreResult([Score(0, 0, "a", [1], [-1.0], True)], None).best(per="tokens")
