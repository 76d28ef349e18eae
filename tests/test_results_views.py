"""What notebooks show: figures that are right, every size of list, and nothing of the user's that is taken for HTML."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_html import IMAGE, NASTY, SCRIPT, Page, plan_of, report_of, result_of, timeline_of, view_of

from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.planning.sharing import plan_sharing
from hf_batchllm.results.generations import BatchResult, Generation
from hf_batchllm.results.timeline import Timeline
from hf_batchllm.results.views import icicle
from hf_batchllm.results.views.axes import ticks
from hf_batchllm.results.views.markup import clean, percent
from hf_batchllm.results.views.plan import plan_html
from hf_batchllm.results.views.timeline import columns, phases_bar, timeline_panels

ROOT = Path(__file__).resolve().parents[1]
VIEWS = ROOT / "hf_batchllm" / "results" / "views"
MOST_BYTES = 300_000


def groups(count: int, size: int = 3, shared: int = 20) -> list[list[int]]:
    return [[*range(group * 50, group * 50 + shared), row] for group in range(count) for row in range(size)]


def staircase(count: int, step: int = 4) -> list[list[int]]:
    """Each prompt leaves the one prefix of all a little later."""
    base = list(range(step * count + 8))
    return [[*base[: 8 + step * at], 10**6 + at] for at in range(count)]


def nothing() -> Timeline:
    none = np.zeros(0, np.int64)
    return Timeline(0.0, np.zeros(0), none, none, none, none, none, {"prompts": 0.0})


LISTS = {
    "empty": [],
    "one": [[1, 2, 3]],
    "one token": [[1]],
    "nothing shared": [[at, 1, 2] for at in range(40)],
    "all equal": [[1, 2, 3, 4, 5]] * 9,
    "nested": [[*range(100), *range(1000 * d, 1000 * d + 50), q] for d in range(1, 40) for q in (7, 8)] + [[5, 6]] * 3,
    "one much longer": [[*range(50), at] for at in range(30)] + [list(range(9, 9000))],
    "many groups": groups(2000),
    "staircase": staircase(900),
    "many alone": [[at, *range(at % 17)] for at in range(9000)],
}


# -- a page that holds together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", LISTS.values(), ids=LISTS.keys())
def test_every_plan_is_a_small_page(rows):
    plan = plan_of(rows)
    page = view_of(plan)
    assert len(page.html.encode()) < MOST_BYTES * 2 // 3
    assert page.rects <= 2 * (icicle.MOST_BLOCKS + icicle.MOST_COLUMNS)
    assert page.html.count("<style>") == 1
    for figure in (len(rows), plan.total_tokens, plan.computed_tokens):
        assert f"{figure:,}" in page.text
    assert str(plan) in page.text, "for where styles are taken away"


@pytest.mark.parametrize("rows", LISTS.values(), ids=LISTS.keys())
def test_areas_are_tokens(rows):
    plan = plan_of(rows)
    picture = icicle.icicle(plan)
    blocks = [plan.segments[index] for index in picture.blocks]
    asked = sum(len(block) * block.members for block in blocks) + (picture.size * (picture.shared + picture.own)).sum()
    saved = sum(len(block) * (block.members - 1) for block in blocks)
    saved += (picture.size * picture.shared * picture.saving).sum()
    assert asked == pytest.approx(plan.total_tokens)
    assert saved == pytest.approx(plan.saved_tokens)
    assert len(picture.blocks) <= icicle.MOST_BLOCKS
    assert picture.size.sum() == len(rows)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=40), st.integers(1, 12))
@settings(max_examples=60)
def test_folding_keeps_the_areas_and_what_stands_on_what(rows, most):
    plan = plan_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(icicle, "MOST_BLOCKS", most)
        patch.setattr(icicle, "MOST_COLUMNS", most)
        picture = icicle.icicle(plan)
    blocks = [plan.segments[index] for index in picture.blocks]
    assert len(blocks) <= most and len(picture.size) <= most + 2 * len(blocks)
    assert all(block.parent < 0 or block.parent in picture.blocks for block in blocks)
    asked = sum(len(block) * block.members for block in blocks) + (picture.size * (picture.shared + picture.own)).sum()
    assert asked == pytest.approx(plan.total_tokens)
    # A column hangs from the lowest block that covers it.
    for first, size, top in zip(picture.first, picture.size, picture.top, strict=True):
        over = [
            block.end
            for block, left in zip(blocks, picture.block_left, strict=True)
            if left <= first < left + block.members
        ]
        assert top == max(over, default=0)
        inside = [left for left in picture.block_left if first < left < first + size]
        assert not inside, "no column goes on below a block that it does not stand under"


def test_what_is_drawn_is_as_large_as_what_was_asked_for():
    plan = plan_of(LISTS["nested"])
    page = view_of(plan)
    sizes = [float(value) for name, value in page.attributes if name in ("width", "height") and value]
    drawn = sum(width * height for width, height in zip(sizes[::2], sizes[1::2], strict=True))
    longest = max(map(len, LISTS["nested"]))
    assert drawn / (1000 * 280) == pytest.approx(plan.total_tokens / (len(plan.order) * longest), rel=0.01)


def test_one_prompt_much_longer_than_the_rest_does_not_make_them_flat():
    page = view_of(plan_of(LISTS["one much longer"]))
    assert "cut off here: the longest prompt has 8,991 tokens" in page.text
    assert icicle.icicle(plan_of(LISTS["one much longer"])).limit < 80
    assert "cut off" not in view_of(plan_of(LISTS["nested"])).text


def test_nothing_is_drawn_below_the_cut():
    """Few prompts are much longer than all others, and share what lies below the end of the picture."""
    long = [
        [5, *range(100, 5000), *range(5000 + 1000 * pair, 5900 + 1000 * pair), row]
        for pair in (0, 1)
        for row in range(5)
    ]
    apart = [[5, *range(100, 5000), 7 * row, row] for row in range(30)]
    for rows in ([[at, 1, 2] for at in range(10, 1000)] + long, [[at % 7, at] for at in range(20_000)] + long + apart):
        page = view_of(plan_of(rows))
        assert "cut off here" in page.text
        drawn = re.findall(r'<rect class="[^"]*" x="([^"]*)" y="([^"]*)" width="([^"]*)" height="([^"]*)"', page.html)
        for left, top, width, height in (map(float, sizes) for sizes in drawn):
            assert width >= 0 and height >= 0 and left + width < 1001 and top + height < 281


def test_what_a_block_says():
    plan = plan_of([[*range(20), at] for at in range(5)] + [[99, 98]])
    plan.labels[0] = "You are a helpful"
    titles = view_of(plan).titles
    assert "5 prompts share 20 tokens: 80 saved; the first is prompt 0\n“You are a helpful”" in titles
    assert "prompt 5: 2 tokens of its own" in titles
    # A run's sequences may be several samples of a prompt, so they have no number that a user knows.
    titles = view_of(report_of(plan)).titles
    assert "5 sequences share 20 tokens: 80 saved\n“You are a helpful”" in titles


def test_what_is_not_shared_is_not_said_to_have_nothing_in_common():
    rows = [Prompt(np.arange(50, dtype=np.int32))] * 3
    page = view_of(plan_sharing(rows, share=False))
    assert "No tokens are computed once for several of them" in page.text and "in common" not in page.text


def test_the_table_names_what_saves_most():
    plan = plan_of(LISTS["nested"])
    plan.labels[plan.largest_savers()[0].index] = "a system prompt"
    text = view_of(plan).text
    assert text.index("a system prompt") < text.index("tokens 100 to 150 of prompt")
    assert "and 33 more" in text  # of 41


# -- reports -----------------------------------------------------------------------------------------------------------

TIMELINES = {
    "none": None,
    "no step": nothing(),
    "one stretch": timeline_of(1),
    "some": timeline_of(40),
    "hundreds": timeline_of(700),
    "no time": timeline_of(3, begin=0.0, names=()),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES.keys())
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "interrupted"])
def test_every_report_is_a_small_page(timeline, finished):
    plan = plan_of(LISTS["staircase"])
    report = report_of(plan, timeline, finished=900 if finished else 3, seconds=0.0 if timeline is None else 3.5)
    page = view_of(report)
    assert len(page.html.encode()) < MOST_BYTES
    assert ("Interrupted: 3 of 900 sequences had finished" in page.text) == (not finished)
    assert str(report) in page.text
    for what in ("prompts", "model", "KV cache", "seed"):
        assert f">{what}</span></td>" in page.html
    drawn = timeline is not None and len(timeline) > 0
    assert ("Tokens in each step" in page.text) == drawn
    assert page.html.count("<style>") == 1


def test_a_timeline_of_any_length_has_few_columns_and_the_same_tokens():
    timeline = timeline_of(701)
    for most in (1, 7, 300, 701, 5000):
        folded = columns(timeline, most)
        assert len(folded) <= most and len(folded.edges) == len(folded) + 1
        assert folded.edges[0] == timeline.begin and folded.edges[-1] == timeline.ends[-1]
        assert folded.steps.sum() == timeline.steps.sum()
        assert (folded.steps * folded.prompt_tokens).sum() == pytest.approx(timeline.prompt_tokens.sum())
        assert (folded.steps * folded.decode_tokens).sum() == pytest.approx(timeline.decode_tokens.sum())
        assert folded.running.max() == timeline.running.max()
        assert folded.cache_bytes.max() == timeline.cache_bytes.max()


def test_little_use_of_a_large_cache_is_still_a_curve():
    timeline = timeline_of(40)
    highest = int(timeline.cache_bytes.max())
    little, much = timeline_panels(timeline, 1000 * highest), timeline_panels(timeline, 2 * highest)
    assert "dashed" not in little and "0.1% of" in little
    assert "dashed" in much and "50.0% of" in much
    area = little.split('class="hfb-c2" d="')[1].split('"')[0]
    heights = [float(part.split("H")[0].split("V")[-1].split(" ")[-1].split("L")[0]) for part in area.split("V")[1:]]
    assert min(heights) < 8, "the curve reaches the top of its panel"
    assert timeline_panels(timeline, 0)


def test_phases_add_up_and_short_ones_are_gathered():
    spent = {"prompts": 0.001, "planning": 0.002, "model": 9.0, "tokens": 1.0, "outside": 0.0}
    timeline = nothing()
    timeline.phases.clear()
    timeline.phases.update(spent)
    page = Page(phases_bar(timeline))
    widths = [float(value[6:-1]) for name, value in page.attributes if name == "style" and value]
    assert sum(widths) == pytest.approx(100, abs=0.1) and len(widths) == 3
    assert "model9.00 s90.0%" in page.text and "the rest3 ms< 0.1%" in page.text and "10.00 s in all" in page.text
    assert any("prompts, planning" in title for title in page.titles)


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_long_result_shows_its_ends_and_decodes_nothing_else():
    decoded = []

    def decode(ids):
        decoded.append(ids[0])
        return f"prompt number {ids[0]}"

    result = result_of([f"answer {at}" for at in range(10_000)], decode=decode, report=report_of(plan_of([[1, 2]])))
    assert not decoded, "as long as nobody looks"
    page = view_of(result)
    assert decoded == [*range(15), *range(9995, 10_000)]
    assert "… 9,980 more" in page.text and "prompt number 9999" in page.text and "answer 14" in page.text
    assert "answer 15" not in page.text and "answer 9994" not in page.text
    assert "10 new tokens in 1.50 s" in page.text
    assert 'class="hfb-more"' in page.html and 'class="hfb-more"' not in view_of(result_of(["x"] * 20)).html


def test_samples_stand_under_their_prompt():
    asked = []
    page = view_of(
        result_of([f"answer {at}" for at in range(6)], samples=3, decode=lambda ids: asked.append(ids) or "p")
    )
    assert len(asked) == 2, "once for each prompt"
    assert page.html.count('rowspan="3"') == 4 and '<th class="hfb-num">sample</th>' in page.html
    assert "sample</th>" not in view_of(result_of(["x"])).html


def test_errors_ids_and_empty_answers():
    rows = [
        Generation(0, 0, None, [], [], "error", error="prompt is too <long>"),
        Generation(1, 0, None, [7, 8], [4, 5], "length"),
        Generation(2, 0, "", [2], [4, 5], "stop"),
    ]
    for decode in (None, lambda ids: None, lambda ids: 1 / 0):
        page = view_of(BatchResult(rows, None, decode))
        assert "prompt is too <long>" in page.text and "hfb-error" in page.html
        assert "4 5" in page.text and "7 8" in page.text and "(empty)" in page.text
    assert view_of(BatchResult([], None)).text.count("0 generations") == 2


def test_a_long_prompt_shows_both_ends_and_no_more_is_decoded():
    asked = []

    def decode(ids):
        asked.append(len(ids))
        return " ".join(f"w{token}" for token in ids)

    rows = [Generation(0, 0, "yes", [1], list(range(50_000)), "stop")]
    page = view_of(BatchResult(rows, None, decode))
    assert "w0 w1 w2" in page.text and "w49999" in page.text and "w25000" not in page.html
    assert sum(asked) <= 1000 and len(page.html) < 50_000


def test_long_texts_are_cut_and_stand_in_the_tooltip():
    answer = "word " * 150
    page = view_of(result_of([answer + "end", "x" * 10**6]))
    assert answer + "end" in page.titles
    assert answer not in page.text and "…" in page.text
    assert len(page.html) < 50_000


def test_results_can_be_pickled_whatever_decodes_them():
    result = pickle.loads(pickle.dumps(result_of(["a"], decode=lambda ids: "prompt text")))
    assert result.texts == ["a"] and "0 5 6" in view_of(result).text


# -- what users bring along --------------------------------------------------------------------------------------------


def every_view_of(text):
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


@pytest.mark.parametrize("what", ["plan", "report", "result", "interrupted"])
def test_text_of_users_is_text(what):
    page = view_of(
        dict(every_view_of(NASTY))[what]
    )  # it asserts that there are no tags but ours, and no odd characters
    start = "a & b &amp; \"'` " + SCRIPT
    assert start in page.text.replace("\n", "")
    assert any(start in title for title in page.titles)
    assert page.html.count("<style>") == 1


@pytest.mark.parametrize("what", ["plan", "report", "result", "interrupted"])
@pytest.mark.parametrize("text", ["", " ", "\n\n", "\ud83d", "\x00", "…" * 5000, IMAGE, "𝕏\u0301" * 300, "\u202e" * 9])
def test_odd_texts(what, text):
    view_of(dict(every_view_of(text))[what])


@pytest.mark.parametrize("what", ["plan", "report", "result", "interrupted"])
def test_dollars_are_no_formulas(what):
    page = view_of(dict(every_view_of("from $5 to $10"))[what])
    assert page.attributes[0] == ("class", "hfb mathjax_ignore tex2jax_ignore"), "of the element around everything"


def test_control_characters_can_be_seen():
    assert clean("a\x00b\x1bc\x7fd\x9be\ud800f\ufffe") == "a␀b␛c␡d\ufffde\ufffdf\ufffd"
    assert clean("a\r\nb\tc\rd") == "a\nb\tc␍d"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_odd_figures(odd):
    timeline = timeline_of(4)
    timeline.phases["model"] = odd
    plan = plan_of([[1, 2]])
    view_of(report_of(plan, timeline, seconds=odd, saving=odd))
    timeline = timeline_of(4, begin=odd)
    view_of(report_of(plan, timeline, kv_memory=0, peak_memory=0, new_tokens=0))


# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1e-4, 0.7, 1, 3, 8.7, 42.4, 99_999, 10**12])
@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_ticks_are_round_and_few(limit, most, whole):
    marks = ticks(limit, most, whole)
    assert marks[0] == 0 and len(marks) <= most + 1 and marks[-1] <= limit * (1 + 1e-6)
    if limit >= 1 or not whole:
        assert len(marks) >= 2 or most == 1
    if whole:
        assert all(mark == int(mark) for mark in marks)


def test_shares_are_never_all_or_nothing_unless_they_are():
    assert [percent(share) for share in (0, 1e-5, 0.5, 0.99999, 1)] == ["0%", "< 0.1%", "50.0%", "> 99.9%", "100%"]


def test_the_style_sheet_means_nothing_outside():
    style = plan_html(plan_of([[1, 2]])).split("<style>")[1].split("</style>")[0]
    assert "@import" not in style and "url(" not in style and "<" not in style
    assert style.count("{") == style.count("}")
    flat = style.replace("@media (prefers-color-scheme:dark){", "").replace("@container (max-width:560px){", "")
    selectors = [rule.split("{")[0].lstrip("}") for rule in flat.split("}") if "{" in rule]
    parts = [part for selector in selectors for part in _outside_brackets(selector)]
    assert len(parts) > 60
    assert all(".hfb" in part for part in parts), [part for part in parts if ".hfb" not in part]


def _outside_brackets(selector):
    depth, part = 0, ""
    for letter in selector:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            yield part
            part = ""
        else:
            part += letter
    yield part


def test_views_need_neither_torch_nor_a_plotting_library():
    code = """
import sys
from hf_batchllm import BatchResult, plan_prompts
from hf_batchllm.results.generations import Generation
plan = plan_prompts([[1, 2, 3, 4], [1, 2, 3, 5]])
assert "hf_batchllm.results.views" not in sys.modules, "nobody has looked yet"
plan._repr_html_()
BatchResult([Generation(0, 0, "a", [1], [2], "stop")], None)._repr_html_()
import hf_batchllm.results.views.report
assert not {"torch", "transformers", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.some_cases
@pytest.mark.parametrize("module", [path.stem for path in VIEWS.glob("[a-z]*.py")])
def test_each_view_can_be_imported_first(module):
    code = f"import hf_batchllm.results.views.{module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
