"""What a browser makes of the views: whose theme they follow, that they fit, and that nothing of the user's is run."""

import json
import re
from html import unescape

import pytest
from support_browser import WHY_SKIPPED, dom, find, host_page, screenshot
from support_html import IMAGE, SCRIPT, plan_of, report_of, timeline_of

from hf_batchllm.results.generations import BatchResult, Generation

pytestmark = pytest.mark.skipif(find() is None, reason=WHY_SKIPPED)

TEXT = SCRIPT + IMAGE


def views(text):
    plan = plan_of([[*range(60), at % 3, at] for at in range(9)] + [[7, at] for at in range(900, 930)])
    for segment in plan.segments:
        plan.labels[segment.index] = text
    report = report_of(plan, timeline_of(90, names=(text, "planning", "model")), fused=text)
    rows = [Generation(at, 0, text * 9, [1, 2], [3] * 60, "stop") for at in range(30)]
    rows[1] = Generation(1, 0, None, [], [], "error", error=text)
    return [plan, report, BatchResult(rows, report, lambda ids: text)]


def told(html, script, dark=False):
    """What a script at the end of the page says of it."""
    probe = f"<script>document.body.setAttribute('data-told', JSON.stringify((() => {{{script}}})()))</script>"
    page = dom(html.replace("</body>", f"{probe}</body>"), dark=dark)
    found = re.search(r'data-told="([^"]*)"', page)
    assert found, page[-2000:]
    return json.loads(unescape(found.group(1)))


def test_text_of_users_is_shown_and_not_run():
    output = "".join(view._repr_html_() for view in views(TEXT))
    script = (
        "return [document.title, document.images.length, "
        "document.body.querySelectorAll('.hfb script').length, "
        "[...document.querySelectorAll('.hfb-view')].map(view => view.textContent)]"
    )
    title, images, scripts, texts = told(host_page(output, "plain"), script)
    assert (title, images, scripts) == ("plain", 0, 0)
    assert len(texts) == 3 and all(TEXT in text for text in texts)


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("host", "dark", "dark_desktop", "ground"),
    [
        ("plain", False, False, "rgb(255, 255, 255)"),
        ("plain", False, True, "rgb(17, 20, 24)"),
        ("jupyterlab", False, True, "rgb(255, 255, 255)"),
        ("jupyterlab", True, False, "rgb(17, 17, 17)"),
        ("vscode", False, True, "rgb(255, 255, 255)"),
        ("vscode", True, False, "rgb(31, 31, 31)"),
        ("colab", False, True, "rgb(255, 255, 255)"),
        ("colab", True, False, "rgb(17, 20, 24)"),
    ],
)
def test_the_notebook_says_whether_it_is_dark(host, dark, dark_desktop, ground):
    script = (
        "const style = getComputedStyle(document.querySelector('.hfb-view'));"
        "const shade = getComputedStyle(document.querySelector('.hfb-key .hfb-s1'));"
        "return [style.backgroundColor, style.color, shade.backgroundColor]"
    )
    page = host_page(views("text")[0]._repr_html_(), host, dark)
    shown, ink, shade = told(page, script, dark=dark_desktop)
    is_dark = dark or (host == "plain" and dark_desktop)
    assert shown == ground
    assert (_lightness(ink) > 128) == is_dark
    assert (_lightness(shade) < 128) == is_dark, "what two share is the nearest to the ground"


def _lightness(colour):
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    return (red + green + blue) / 3


def test_without_its_style_a_view_is_plain_text():
    output = views("text")[1]._repr_html_()
    script = "return ['.hfb-plain', '.hfb-view'].map(name => document.querySelector(name).getClientRects().length)"
    assert told(host_page(output), script) == [0, 1]
    assert told(host_page(re.sub("<style>.*?</style>", "", output)), script) == [1, 0]
    assert told(host_page(re.sub('<style>.*?</style>| style="[^"]*"', "", output)), script) == [1, 0]


def test_a_style_sheet_of_another_output_does_not_show_what_is_left_of_a_view():
    """In a notebook that is not trusted, outputs of cells that were run again have their styles and others have not."""
    output = views("text")[0]._repr_html_()
    left = re.sub("<style>.*?</style>|</?(svg|g|title|rect|line|path)[^>]*>", "", output)
    script = "return [...document.querySelectorAll('.hfb-plain, .hfb-view')].map(part => part.getClientRects().length)"
    assert told(host_page(output + left), script) == [0, 1, 1, 0]
    assert told(host_page(left + output), script) == [1, 0, 0, 1]


@pytest.mark.some_cases
@pytest.mark.parametrize("width", [1000, 400, 320])
def test_nothing_sticks_out_or_lies_over_another(width):
    output = "".join(view._repr_html_() for view in views("A document that begins, and goes on for a while. " * 4))
    script = """
        document.querySelectorAll('details').forEach(details => { details.open = true });
        const wrong = [];
        for (const view of document.querySelectorAll('.hfb-view')) {
            const box = view.getBoundingClientRect();
            if (view.scrollWidth > view.clientWidth) wrong.push('scrolls');
            for (const part of view.querySelectorAll('span, td, b, i, em, div')) {
                const at = part.getBoundingClientRect();
                if (at.width && (at.left < box.left - 1 || at.right > box.right + 1)) wrong.push(part.className);
            }
            for (const axis of view.querySelectorAll('.hfb-x, .hfb-plot')) {
                const labels = [...axis.querySelectorAll(':scope > span')].map(span => span.getBoundingClientRect());
                labels.forEach((a, at) => labels.slice(at + 1).forEach(b => {
                    if (a.left < b.right && b.left < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom)
                        wrong.push('labels overlap');
                }));
            }
        }
        return wrong"""
    page = host_page(f"<div style='width:{width}px'>{output}</div>")
    assert told(page, script) == []


def test_a_picture_is_made(tmp_path):
    screenshot(host_page(views("text")[0]._repr_html_()), tmp_path / "plan.png", 400, 300, dark=True)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
