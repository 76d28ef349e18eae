"""The pictures of scores and of their report; which shade stands for how many prompts."""

from __future__ import annotations

import re

import pytest
from support_families import build
from support_html import plan_of, view_of
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchResult, Generation, Score, ScoreResult
from hf_batchllm.results.views.shades import Shades
from hf_batchllm.results.views.theme import SHADES


def scored() -> ScoreResult:
    generator = BatchGenerator(build("llama"), word_tokenizer(97, template=True))
    contexts = ["w3 w4", "w7 " * 90 + "w8", [{"role": "user", "content": "w9 w10"}]]
    return generator.score(contexts, choices=[" w5", " w6"])


def test_contexts_and_probabilities_among_choices() -> None:
    result = scored()
    html = result._repr_html_()
    view_of(result)  # well-formed
    assert "w3 w4" in html and "w9 w10" in html and "… w7 w7" in html and html.count("<td") < 60
    for among in result.probabilities:
        assert all(f"{probability:.1%}" in html for probability in among)
    assert html.count("among these") == 1 and html.count('rowspan="2"') == 6


def test_nothing_is_compared_where_there_is_one_continuation_each() -> None:
    html = ScoreResult([Score(at, 0, "yes", [5], [-1.0], True) for at in range(3)], None)._repr_html_()
    assert "among these" not in html and "<th>context" not in html and "-1.000" in html


def test_errors_and_interrupted_calls_have_pictures() -> None:
    rows = [Score(0, 0, "yes", [5], [-1.0], True), Score(0, 1, "no", [], [], False, "is <empty>", "what?")]
    html = ScoreResult(rows, None)._repr_html_()
    assert "is &lt;empty&gt;" in html
    assert "nan" not in html.split("hfb-view")[-1]
    assert "<b>" not in ScoreResult(rows[:1], None, complete=False)._repr_html_()
    many = ScoreResult([Score(0, at, "x", [5], [-1.0], True) for at in range(500)], None)
    assert "… 460 more of this context" in many._repr_html_()


def test_of_many_contexts_the_first_and_the_last_are_shown() -> None:
    rows = [
        Score(at, choice, text, [5], [-1.0], True, context=f"question {at}?")
        for at in range(40)
        for choice, text in enumerate(("yes", "no", "perhaps"))
    ]
    shown = view_of(ScoreResult(rows, None)).text
    assert "question 0?" in shown and "question 9?" in shown and "question 10?" not in shown
    assert "… 27 more contexts, 81 scores" in shown
    assert "question 36?" not in shown and "question 37?" in shown and "question 39?" in shown
    few = view_of(ScoreResult(rows[:39], None)).text
    assert "more context" not in few and "question 12?" in few


def test_long_prompts_and_contexts_are_cut_between_words() -> None:
    words = " ".join(f"remarkable{at:03}" for at in range(60))
    scores = ScoreResult([Score(0, 0, "yes", [5], [-1.0], True, context=words)], None)
    generations = BatchResult([Generation(0, 0, "yes", [5], [6], "stop", prompt=words)], None)
    for result in (scores, generations):
        shown = re.findall(r">([^<>]*remarkable[^<>]*)<", view_of(result).html.split("hfb-view")[-1])
        pieces = " ".join(shown).replace("…", " ").split()
        assert len(pieces) > 6 and all(re.fullmatch(r"remarkable\d{3}", piece) for piece in pieces)


def test_the_space_of_a_choice_is_seen() -> None:
    rows = [Score(0, at, word, [5], [-1.0], True, context="Label:") for at, word in enumerate((" yes", "no"))]
    shown = view_of(ScoreResult(rows, None)).text
    assert "␣yes" in shown and "␣no" not in shown and "no" in shown


def test_a_tooltip_holds_a_context_once() -> None:
    words = " ".join(f"word{at:03}" for at in range(60))  # too long for the table, not for a tooltip
    rows = [Score(0, 0, "yes", [5], [-1.0], True, context=words)]
    assert f'title="{words}"' in ScoreResult(rows, None)._repr_html_()
    lines = "\n".join(f"remarkable{at:03}" for at in range(60))
    rows = [Score(0, 0, "yes", [5], [-1.0], True, context=lines)]
    shown = ScoreResult(rows, None)._repr_html_().split("hfb-start")[-1]
    assert all(len(word) == 13 for word in re.findall("remarkable[0-9]*", shown)) and "……" not in shown


def test_the_report_of_scores_does_not_contradict_itself() -> None:
    """Two choices of a token are read from one sequence: half is saved, though the sequences share nothing."""
    report = BatchGenerator(build("llama")).score([[5, 6], [8, 9]], choices=[[5], [6]]).report
    assert report.saving == 0.5 and report.plan.saving == 0
    html = report._repr_html_()
    assert "50.0%" in html and "0%</b>" not in html.replace("50.0%</b>", "") and "0% of their tokens" not in html
    assert "The scores were read from 2 sequences" in html
    assert "4 scores" in str(report) and "read from 2 sequences that were run" in str(report)


def test_numbers_that_differ_have_shades_that_differ() -> None:
    shades = Shades([24, 8])
    assert shades.of(24) > shades.of(8) and [name for _, name in shades.names()] == ["8", "24"]
    plan = plan_of([[1, 2, 3, 4, at] for at in range(10, 34)] + [[5, 6, 7, 8, at] for at in range(40, 48)])
    html = plan._repr_html_()
    used = {f"hfb-s{shades.of(24)}", f"hfb-s{shades.of(8)}"}
    assert all(f'rect class="{kind}' in html for kind in used) and len(used) == 2


@pytest.mark.parametrize("numbers", [range(2, 40), [2] * 5, [2, 3, 8, 24, 25, 200, 10_000], [], range(2, 900)])
def test_more_prompts_never_have_a_lower_shade(numbers: range) -> None:
    shades = Shades(numbers)
    given = [shades.of(number) for number in sorted(numbers)]
    assert given == sorted(given) and all(1 <= shade <= SHADES for shade in given)
    assert len({name for _, name in shades.names()}) == len(shades.names()) == len(set(given))
    if list(numbers) == [2, 3, 8, 24, 25, 200, 10_000]:
        assert [name for _, name in shades.names()] == ["2 – 3", "8", "24 – 25", "200", "10,000"]
