"""What notebooks show: figures that are right, every size of list, and nothing of the user's that is taken for HTML."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_families import build
from support_html import IMAGE, NASTY, SCRIPT, Page, plan_of, report_of, result_of, timeline_of, view_of
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchResult, Generation, Score, ScoreResult, SharingPlan
from hf_batchllm.results.sharing_plan import layout_of
from hf_batchllm.results.timeline import PHASES, Timeline, phases_bar, timeline_panels
from hf_batchllm.results.views import icicle
from hf_batchllm.results.views.chart import ticks
from hf_batchllm.results.views.html import clean, percent
from hf_batchllm.results.views.icicle import Icicle, Shades
from hf_batchllm.results.views.style import SHADES

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 300_000
ZEROS = np.zeros(0, np.int64)
NO_STEP = Timeline(0.0, np.zeros(0), ZEROS, ZEROS, ZEROS, ZEROS, ZEROS, {"prompts": 0.0})
LISTS: dict[str, list[list[int]]] = {
    "empty": [],
    "one": [[1, 2, 3]],
    "one token": [[1]],
    "nothing shared": [[at, 1, 2] for at in range(40)],
    "all equal": [[1, 2, 3, 4, 5]] * 9,
    "nested": [[*range(100), *range(1000 * d, 1000 * d + 50), q] for d in range(1, 40) for q in (7, 8)] + [[5, 6]] * 3,
    "one much longer": [[*range(50), at] for at in range(30)] + [list(range(9, 9000))],
    "many groups": [[*range(group * 50, group * 50 + 20), row] for group in range(2000) for row in range(3)],
    "staircase": [[*range(8 + 4 * at), 10**6 + at] for at in range(900)],  # each leaves the prefix of all a bit later
    "many alone": [[at, *range(at % 17)] for at in range(9000)],
}


# -- plans -------------------------------------------------------------------------------------------------------------


def assert_areas(plan: SharingPlan, picture: Icicle) -> None:
    """Areas are tokens, however much is folded."""
    blocks = [plan.segments[index] for index in picture.blocks]
    asked = sum(len(block) * block.members for block in blocks) + (picture.size * (picture.shared + picture.own)).sum()
    saved = sum(block.saved_tokens for block in blocks) + (picture.size * picture.shared * picture.saving).sum()
    assert asked == pytest.approx(plan.total_tokens) and saved == pytest.approx(plan.saved_tokens)
    assert picture.size.sum() == len(plan.order)


@pytest.mark.parametrize("rows", LISTS.values(), ids=LISTS.keys())
def test_every_plan_is_a_small_page(rows: list[list[int]]) -> None:
    plan = plan_of(rows)
    page = view_of(plan)
    assert len(page.html.encode()) < MOST_BYTES * 2 // 3 and page.html.count("<style>") == 1
    assert page.rects <= 2 * (icicle.MOST_BLOCKS + icicle.MOST_COLUMNS)
    for figure in (len(rows), plan.total_tokens, plan.computed_tokens):
        assert f"{figure:,}" in page.text
    assert str(plan) in page.text, "for where styles are taken away"
    assert_areas(plan, layout_of(plan))
    assert len(layout_of(plan).blocks) <= icicle.MOST_BLOCKS


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=40), st.integers(1, 12))
@settings(max_examples=60)
def test_folding_keeps_the_areas_and_what_stands_on_what(rows: list[list[int]], most: int) -> None:
    plan = plan_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(icicle, "MOST_BLOCKS", most)
        patch.setattr(icicle, "MOST_COLUMNS", most)
        picture = layout_of(plan)
    assert_areas(plan, picture)
    blocks = [plan.segments[index] for index in picture.blocks]
    assert len(blocks) <= most and len(picture.size) <= most + 2 * len(blocks)
    assert all(block.parent < 0 or block.parent in picture.blocks for block in blocks)
    for first, size, top in zip(picture.first, picture.size, picture.top, strict=True):
        placed = list(zip(blocks, picture.block_left, strict=True))
        over = [block.end for block, left in placed if left <= first < left + block.members]
        assert top == max(over, default=0), "a column hangs from the lowest block that covers it"
        assert not [left for left in picture.block_left if first < left < first + size], "and from no other one"


def test_what_is_drawn_is_as_large_as_what_was_asked_for() -> None:
    plan = plan_of(LISTS["nested"])
    sizes = [float(value) for name, value in view_of(plan).attributes if name in ("width", "height") and value]
    drawn = sum(width * height for width, height in zip(sizes[::2], sizes[1::2], strict=True))
    longest = max(map(len, LISTS["nested"]))
    assert drawn / (1000 * 280) == pytest.approx(plan.total_tokens / (len(plan.order) * longest), rel=0.01)


def test_prompts_much_longer_than_the_rest_are_cut_off_and_nothing_is_drawn_below() -> None:
    assert "cut off here: the longest prompt has 8,991 tokens" in view_of(plan_of(LISTS["one much longer"])).text
    assert layout_of(plan_of(LISTS["one much longer"])).limit < 80, "the others are not flat"
    assert "cut off" not in view_of(plan_of(LISTS["nested"])).text
    pairs = [(pair, row) for pair in (0, 1) for row in range(5)]
    long = [[5, *range(100, 5000), *range(5000 + 1000 * pair, 5900 + 1000 * pair), row] for pair, row in pairs]
    apart = [[5, *range(100, 5000), 7 * row, row] for row in range(30)]  # what they share lies below the cut
    for rows in ([[at, 1, 2] for at in range(10, 1000)] + long, [[at % 7, at] for at in range(20_000)] + long + apart):
        html = view_of(plan_of(rows)).html
        assert "cut off here" in html
        drawn = re.findall(r'<rect class="[^"]*" x="([^"]*)" y="([^"]*)" width="([^"]*)" height="([^"]*)"', html)
        for left, top, width, height in (map(float, sizes) for sizes in drawn):
            assert width >= 0 and height >= 0 and left + width < 1001 and top + height < 281


def test_what_a_plan_says() -> None:
    plan = plan_of([[*range(20), at] for at in range(5)] + [[99, 98]])
    plan.labels[0] = "You are a helpful"
    titles = view_of(plan).titles
    assert "5 prompts share 20 tokens: 80 saved; the first is prompt 0\n“You are a helpful”" in titles
    assert "prompt 5: 2 tokens of its own" in titles
    # A run's sequences may be several samples of a prompt, so they have no number that a user knows.
    assert "5 sequences share 20 tokens: 80 saved\n“You are a helpful”" in view_of(report_of(plan)).titles
    plan = plan_of(LISTS["nested"])
    plan.labels[plan.largest_savers()[0].index] = "a system prompt"
    text = view_of(plan).text
    assert text.index("a system prompt") < text.index("tokens 100 to 150 of prompt") and "and 33 more" in text  # of 41
    text = view_of(plan_of([[*range(9), at] for at in range(3)], fee=50)).text
    assert "No tokens are computed once for several of them" in text and "in common" not in text


@pytest.mark.parametrize("numbers", [range(2, 40), [2] * 5, [2, 3, 8, 24, 25, 200, 10_000], [], range(2, 900), [24, 8]])
def test_more_prompts_never_have_a_lower_shade(numbers: list[int]) -> None:
    shades = Shades(numbers)
    used = [shades.of(number) for number in sorted(numbers)]
    assert used == sorted(used) and all(1 <= shade <= SHADES for shade in used)
    names = [name for _, name in shades.names()]
    assert len(set(names)) == len(names) == len(set(used))
    if list(numbers) == [2, 3, 8, 24, 25, 200, 10_000]:
        assert names == ["2 – 3", "8", "24 – 25", "200", "10,000"]
    if numbers == [24, 8]:
        html = plan_of([[at // 24, 1, 2, at] for at in range(32)])._repr_html_()
        assert len(set(used)) == 2 and all(f'rect class="hfb-s{shade}' in html for shade in used)


# -- reports -----------------------------------------------------------------------------------------------------------

TIMELINES = {
    "none": None,
    "no step": NO_STEP,
    "one stretch": timeline_of(1),
    "some": timeline_of(40),
    "hundreds": timeline_of(700),
    "no time": timeline_of(3, begin=0.0, names=()),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES.keys())
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
def test_every_report_is_a_small_page(timeline: Timeline | None, finished: bool) -> None:
    plan = plan_of(LISTS["staircase"])
    report = report_of(plan, timeline, finished=900 if finished else 3, seconds=0.0 if timeline is None else 3.5)
    page = view_of(report)
    assert len(page.html.encode()) < MOST_BYTES and page.html.count("<style>") == 1 and str(report) in page.text
    assert ("Interrupted: 3 of 900 sequences had finished" in page.text) == (not finished)
    for what in ("prompts", "model", "KV cache", "seed"):
        assert f'<td class="hfb-fact">{what}</td>' in page.html
    assert ("Tokens in each step" in page.text) == (timeline is not None and len(timeline) > 0)


def test_a_timeline_of_any_length_has_few_columns_and_the_same_tokens() -> None:
    timeline = timeline_of(701)
    for most in (1, 7, 300, 701, 5000):
        folded = timeline.folded(most)
        assert len(folded) <= most and (folded.begin, folded.ends[-1]) == (timeline.begin, timeline.ends[-1])
        for name in ("steps", "prompt_tokens", "decode_tokens"):
            assert getattr(folded, name).sum() == getattr(timeline, name).sum()
        for name in ("running", "cache_bytes"):
            assert getattr(folded, name).max() == getattr(timeline, name).max()


def test_little_use_of_a_large_cache_is_still_a_curve() -> None:
    timeline = timeline_of(40)
    highest = int(timeline.cache_bytes.max())
    little, much = timeline_panels(timeline, 1000 * highest), timeline_panels(timeline, 2 * highest)
    assert "dashed" not in little and "0.1% of" in little and "dashed" in much and "50.0% of" in much
    area = little.split('class="hfb-c2" d="')[1].split('"')[0]
    heights = [float(part.split("H")[0].split("V")[-1].split(" ")[-1].split("L")[0]) for part in area.split("V")[1:]]
    assert min(heights) < 8, "the curve reaches the top of its panel"
    assert timeline_panels(timeline, 0)


def test_phases_add_up_and_short_ones_are_gathered() -> None:
    page = Page(phases_bar({"prompts": 0.001, "planning": 0.002, "model": 9.0, "tokens": 1.0, "outside": 0.0}))
    widths = [float(value[6:-1]) for name, value in page.attributes if name == "style" and value]
    assert sum(widths) == pytest.approx(100, abs=0.1) and len(widths) == 3
    assert "model9.00 s90.0%" in page.text and "the rest3 ms< 0.1%" in page.text and "10.00 s in all" in page.text
    assert any("prompts, planning" in title for title in page.titles)
    colours = re.findall(r'<span class="(hfb-c\d+)"', phases_bar(dict.fromkeys(PHASES, 1.0)))
    assert len(set(colours)) == len(PHASES), "each phase has a colour of its own"


def test_the_report_of_scores_does_not_contradict_itself() -> None:
    """Two choices of a token are read from one sequence: half is saved, though the sequences share nothing."""
    report = BatchGenerator(build("llama")).score([[5, 6], [8, 9]], choices=[[5], [6]]).report
    assert report is not None and report.saving == 0.5 and report.plan.saving == 0
    html = report._repr_html_()
    assert "50.0%" in html and "0%</b>" not in html.replace("50.0%</b>", "") and "0% of their tokens" not in html
    assert "The scores were read from 2 sequences" in html
    assert "4 scores" in str(report) and "read from 2 sequences that were run" in str(report)


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_long_result_shows_its_ends_and_decodes_nothing_else() -> None:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(ids[0])
        return f"prompt number {ids[0]}"

    result = result_of([f"answer {at}" for at in range(10_000)], decode=decode, report=report_of(plan_of([[1, 2]])))
    assert not decoded, "as long as nobody looks"
    page = view_of(result)
    assert decoded == [*range(15), *range(9995, 10_000)]
    for shown in ("… 9,980 more", "prompt number 9999", "answer 14", "10 new tokens in 1.50 s"):
        assert shown in page.text
    assert "answer 15" not in page.text and "answer 9994" not in page.text
    assert 'class="hfb-more"' in page.html and 'class="hfb-more"' not in view_of(result_of(["x"] * 20)).html


def test_samples_stand_under_their_prompt() -> None:
    asked: list[list[int]] = []
    page = view_of(
        result_of([f"answer {at}" for at in range(6)], samples=3, decode=lambda ids: asked.append(ids) or "p")
    )
    assert len(asked) == 2, "once for each prompt"
    assert page.html.count('rowspan="3"') == 4 and "sample</th>" in page.html
    assert '<th colspan="2">prompt</th>' in page.html, "that is whose numbers are beside them"
    assert "sample</th>" not in view_of(result_of(["x"])).html


@pytest.mark.parametrize("decode", [None, lambda ids: None, lambda ids: 1 / 0], ids=["none", "no text", "fails"])
def test_errors_ids_and_empty_answers(decode: Any) -> None:
    rows = [
        Generation(0, 0, None, [], [], "error", error="prompt is too <long>"),
        Generation(1, 0, None, [7, 8], [4, 5], "length"),
        Generation(2, 0, "", [2], [4, 5], "stop"),
    ]
    page = view_of(BatchResult(rows, None, decode))
    assert all(shown in page.text for shown in ("prompt is too <long>", "4 5", "7 8", "(empty)"))
    assert "hfb-error" in page.html and view_of(BatchResult([], None)).text.count("0 generations") == 2


def test_long_prompts_show_both_ends_and_no_more_is_decoded() -> None:
    asked: list[int] = []

    def decode(ids: list[int]) -> str:
        asked.append(len(ids))
        return " ".join(f"w{token}" for token in ids)

    page = view_of(BatchResult([Generation(0, 0, "yes", [1], list(range(50_000)), "stop")], None, decode))
    assert "w0 w1 w2" in page.text and "w49999" in page.text and "w25000" not in page.html
    assert sum(asked) <= 1000 and len(page.html) < 50_000


def test_long_texts_are_cut_and_stand_in_the_tooltip() -> None:
    answer = "word " * 150
    page = view_of(result_of([answer + "end", "x" * 10**6]))
    assert answer + "end" in page.titles and answer not in page.text and "…" in page.text and len(page.html) < 50_000


def test_long_prompts_and_contexts_are_cut_between_words() -> None:
    words = " ".join(f"remarkable{at:03}" for at in range(60))
    lines = words.replace(" ", "\n")
    for text in (words, lines):
        scores = ScoreResult([Score(0, 0, "yes", [5], [-1.0], True, context=text)], None)
        generations = BatchResult([Generation(0, 0, "yes", [5], [6], "stop", prompt=text)], None)
        for result in (scores, generations):
            assert f'title="{text}"' in result._repr_html_(), "it is short enough for a tooltip"
            shown = re.findall(r">([^<>]*remarkable[^<>]*)<", view_of(result).html.split("hfb-view")[-1])
            pieces = " ".join(shown).replace("…", " ").split()
            assert len(pieces) > 6 and all(re.fullmatch(r"remarkable\d{3}", piece) for piece in pieces)


# -- scores ------------------------------------------------------------------------------------------------------------


def scores_of(contexts: int, choices: list[str], context: str | None = "question {}?") -> ScoreResult:
    rows = [(at, choice, text) for at in range(contexts) for choice, text in enumerate(choices)]
    named = [None if context is None else context.format(at) for at, _, _ in rows]
    return ScoreResult(
        [Score(*row, [5], [-1.0], True, context=name) for row, name in zip(rows, named, strict=True)], None
    )


def test_contexts_and_probabilities_among_choices() -> None:
    generator = BatchGenerator(build("llama"), word_tokenizer(97, template=True))
    contexts = ["w3 w4", "w7 " * 90 + "w8", [{"role": "user", "content": "w9 w10"}]]
    result = generator.score(contexts, choices=[" w5", " w6"])
    html = view_of(result).html
    assert "w3 w4" in html and "w9 w10" in html and "… w7 w7" in html and html.count("<td") < 60
    assert all(f"{probability:.1%}" in html for among in result.probabilities for probability in among)
    assert html.count("among these") == 1 and html.count('rowspan="2"') == 6
    alone = scores_of(3, ["yes"], None)._repr_html_()  # nothing to compare
    assert "among these" not in alone and ">context<" not in alone and "-1.000" in alone


def test_errors_and_interrupted_scores_have_pictures() -> None:
    rows = [Score(0, 0, "yes", [5], [-1.0], True), Score(0, 1, "no", [], [], False, "is <empty>", "what?")]
    html = ScoreResult(rows, None)._repr_html_()
    assert "is &lt;empty&gt;" in html and "nan" not in html.split("hfb-view")[-1]
    assert "<b>" not in ScoreResult(rows[:1], None, complete=False)._repr_html_()


def test_of_many_contexts_the_first_and_the_last_are_shown() -> None:
    shown = view_of(scores_of(40, ["yes", "no", "perhaps"])).text
    assert "… 27 more contexts, 81 scores" in shown
    for at, there in ((0, True), (9, True), (10, False), (36, False), (37, True), (39, True)):
        assert (f"question {at}?" in shown) == there
    few = view_of(scores_of(13, ["yes", "no", "perhaps"])).text
    assert "more context" not in few and "question 12?" in few
    assert "… 460 more of this context" in view_of(scores_of(1, ["x"] * 500)).text
    long = view_of(scores_of(3, ["x"] * 35)).text  # one is longer than the room for the last ones
    assert "question 0?" in long and "… 2 more contexts, 70 scores" in long


def test_the_space_of_a_choice_is_seen() -> None:
    shown = view_of(scores_of(1, [" yes", "no"])).text
    assert "␣yes" in shown and "␣no" not in shown and "no" in shown


# -- what users bring along --------------------------------------------------------------------------------------------

VIEWS = ["plan", "report", "result", "interrupted", "scores"]


def every_view_of(text: Any) -> Iterator[tuple[str, Any]]:
    """(what it is, the view), with the text in every place that takes one."""
    plan = plan_of([[*range(60), at] for at in range(9)])
    plan.labels[0] = text
    yield "plan", plan
    yield "report", report_of(plan, timeline_of(5, names=(text, "model")), fused=text, graphs=text)
    rows = [
        Generation(0, 0, text, [1], [3, 4], "stop"),
        Generation(1, 0, text * 400, [1], [3] * 9000, "length"),
        Generation(2, 0, None, [], [], "error", error=text),
        Generation(text, text, text, [text], [3, 4], text),
        Generation(4, 0, None, [text], [text], "stop"),
    ]
    yield "result", BatchResult(rows, report_of(plan), lambda ids: text)
    yield "interrupted", BatchResult(rows[:1], report_of(plan, finished=1), lambda ids: text)
    contexts = [text, text * 400, [{"role": "user", "content": text}]]
    scores = [Score(at, 0, text, [1], [-1.0], True, context=context) for at, context in enumerate(contexts)]
    yield "scores", ScoreResult([*scores, Score(3, 0, text, [], [], False, error=text)], None)


@pytest.mark.parametrize("what", VIEWS)
@pytest.mark.parametrize(
    "text", [NASTY, "", " ", "\n\n", "\ud83d", "\x00", "…" * 5000, IMAGE, "𝕏\u0301" * 300, "\u202e" * 9]
)
def test_text_of_users_is_text(what: str, text: str) -> None:
    page = view_of(dict(every_view_of(text))[what])  # asserts that there are no tags but ours, and no odd characters
    if text == NASTY:
        start = "a & b &amp; \"'` " + SCRIPT
        assert start in page.text.replace("\n", "") and any(start in title for title in page.titles)
    assert page.html.count("<style>") == 1
    assert page.attributes[0] == ("class", "hfb mathjax_ignore tex2jax_ignore"), "dollars around it are no formulas"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_odd_figures(odd: float) -> None:
    timeline, plan = timeline_of(4), plan_of([[1, 2]])
    timeline.phases["model"] = odd
    view_of(report_of(plan, timeline, seconds=odd, saving=odd))
    view_of(report_of(plan, timeline_of(4, begin=odd), kv_memory=0, peak_memory=0, new_tokens=0))


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_control_characters_can_be_seen() -> None:
    assert clean("a\x00b\x1bc\x7fd\x9be\ud800f\ufffe") == "a␀b␛c␡d\ufffde\ufffdf\ufffd"
    assert clean("a\r\nb\tc\rd") == "a\nb\tc␍d"


@pytest.mark.parametrize("limit", [1e-4, 0.7, 1, 3, 8.7, 42.4, 99_999, 10**12])
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_ticks_are_round_and_few(limit: float, most: int, whole: bool) -> None:
    marks = ticks(limit, most, whole)
    assert marks[0] == 0 and len(marks) <= most + 1 and marks[-1] <= limit * (1 + 1e-6)
    assert len(marks) >= 2 or most == 1 or (whole and limit < 1)
    assert not whole or all(mark == int(mark) for mark in marks)


def test_shares_are_never_all_or_nothing_unless_they_are() -> None:
    assert [percent(share) for share in (0, 1e-5, 0.5, 0.99999, 1)] == ["0%", "< 0.1%", "50.0%", "> 99.9%", "100%"]


def test_the_style_sheet_means_nothing_outside() -> None:
    style = plan_of([[1, 2]])._repr_html_().split("<style>")[1].split("</style>")[0]
    assert "@import" not in style and "url(" not in style and "<" not in style
    assert style.count("{") == style.count("}")
    flat = re.sub(r"@(media|container) \([^)]*\)\{", "", style)
    selectors = [rule.split("{")[0].lstrip("}") for rule in flat.split("}") if "{" in rule]
    while any("(" in selector for selector in selectors):  # commas within brackets part nothing
        selectors = [re.sub(r"\([^()]*\)", "", selector) for selector in selectors]
    parts = [part for selector in selectors for part in selector.split(",")]
    assert len(parts) > 60 and all(".hfb" in part for part in parts), [part for part in parts if ".hfb" not in part]


def test_views_need_neither_torch_nor_a_plotting_library() -> None:
    code = """
import sys
from hf_batchllm import BatchResult, Generation, Score, ScoreResult, plan_prompts
plan_prompts([[1, 2, 3, 4], [1, 2, 3, 5]])._repr_html_()
BatchResult([Generation(0, 0, "a", [1], [2], "stop")], None)._repr_html_()
ScoreResult([Score(0, 0, "a", [1], [-1.0], True)], None)._repr_html_()
assert not {"torch", "transformers", "matplotlib", "pandas", "PIL"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
