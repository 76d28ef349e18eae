"""Reading the HTML of a view, and samples to make views of."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator
from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.planning.sharing import plan_sharing
from hf_batchllm.results.generations import BatchResult, Generation
from hf_batchllm.results.run_report import RunReport
from hf_batchllm.results.sharing_plan import SharingPlan
from hf_batchllm.results.timeline import Timeline

SCRIPT = '<script>document.title="x"</script>'
IMAGE = "<img src=x onerror=\"document.title='x'\">"
NASTY = (
    f"a & b &amp; \"'` {SCRIPT}{IMAGE}</pre></style></svg></title> "
    "\x00\x1b[31m\x85\ufffe\ud800 עברית \u202e \N{OCTOPUS}\u200d\r\n\ttail"
)
_ILLEGAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_TAGS = set(
    "div style pre span b i em details summary table thead tbody tr th td svg g rect line path title".split()
)  # a view needs no other


class Page(HTMLParser):
    """Asserts that every tag is closed where it should be, and that nothing is run, fetched or named by an id."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.titles: list[str] = []
        self.rects = 0
        self.images: list[bytes] = []
        self._open: list[str] = []
        assert not _ILLEGAL.search(html)
        html.encode("utf-8")
        self.feed(html)
        self.close()
        assert not self._open, f"left open: {self._open}"
        for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            ElementTree.fromstring(svg)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":  # of what is in the page itself, and never closed
            (source,) = [value or "" for name, value in attrs if name == "src"]
            assert source.startswith("data:image/jpeg;base64,"), source[:40]
            self.images.append(base64.b64decode(source.partition(",")[2], validate=True))
            self._seen("span", [each for each in attrs if each[0] != "src"])
            return
        self._seen(tag, attrs)
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "line", "path"), f"<{tag}/> is closed in SVG alone"
        self._seen(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "title":
            self.titles.append(data)
        elif "style" not in self._open:
            self.text += data

    def _seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS, f"<{tag}> in a view"
        self.rects += tag == "rect"
        self.attributes += attrs
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("id", "href", "src", "name"), name
            if name == "title":
                self.titles.append(value or "")


def view_of(value: Any) -> Page:
    return Page(value._repr_html_())


def plan_of(rows: Sequence[Sequence[int]], fee: int = 0) -> SharingPlan:
    return plan_sharing([Prompt(np.asarray(row, np.int32)) for row in rows], min_shared_tokens=fee)


def timeline_of(stretches: int, begin: float = 0.5, names: Sequence[str] = ("prompts", "model", "results")) -> Timeline:
    """A list that fills the cache, then ends."""
    at = np.arange(stretches)
    running = np.minimum(at, stretches - at) + 1
    return Timeline(
        begin=begin,
        ends=begin + (at + 1) * 0.01,
        steps=1 + at % 3,
        prompt_tokens=np.where(at < stretches // 2, 512, 0) * (1 + at % 3),
        decode_tokens=running * (1 + at % 3),
        running=running,
        cache_bytes=running * 1000,
        phases={name: (begin + stretches * 0.01) / len(names) for name in names},
    )


def report_of(plan: SharingPlan, timeline: Timeline | None = None, **changes: Any) -> RunReport:
    count = len(plan.order)
    fields: dict[str, Any] = {
        "sequences": count,
        "finished": count,
        "prompt_tokens": plan.total_tokens,
        "computed_tokens": plan.computed_tokens,
        "saving": plan.saving,
        "recomputed_tokens": 0,
        "cached_tokens": 0,
        "new_tokens": 10 * count,
        "model_tokens": plan.computed_tokens + 9 * count,
        "steps": 20,
        "preemptions": 0,
        "seconds": 1.5,
        "planning_seconds": 0.01,
        "peak_memory": 1000 * count,
        "kv_memory": 10**9,
        "seed": 7,
        "plan": plan,
        "timeline": timeline,
    }
    return RunReport(**fields | changes)


def result_of(texts: Sequence[str | None], samples: int = 1, **options: Any) -> BatchResult:
    """The prompt of each begins with its index, as a token id."""
    rows = [
        Generation(place // samples, place % samples, text, [1, 2, 3], [place // samples, 5, 6], "stop")
        for place, text in enumerate(texts)
    ]
    return BatchResult(rows, options.pop("report", None), **options)


CHAT = [{"role": "user", "content": "w5 w6"}]
GIVEN: list[Any] = ["w3 w4 w5", CHAT, [5, 6], "w8"]


def that_chats() -> BatchGenerator:
    return BatchGenerator(build("llama"), word_tokenizer(97, template=True))
