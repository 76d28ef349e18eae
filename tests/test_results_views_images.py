"""A table of results shows the images of chats: small, escaped, and nothing that is not at hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support_html import NASTY, Page, view_of

from hf_batchllm.results.generations import BatchResult, Generation

RED = Image.new("RGB", (800, 400), "red")
NOISE = np.random.default_rng(0).integers(0, 255, (900, 300, 3), dtype=np.uint8)
SMALL_RED, SMALL_NOISE = (56, 28), (19, 56)


def page_of(*sources: Any, decode: Any = None, repeats: int = 300) -> Page:
    content = [{"type": "image", "image": source} for source in sources]
    chat = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    ids = [1, *[7] * repeats, 2, 3]
    return view_of(BatchResult([Generation(0, 0, "red", [5], ids, "stop", prompt=chat)], None, decode))


def sizes_in(page: Page) -> list[tuple[int, int]]:
    return [Image.open(io.BytesIO(each)).size for each in page.images]


def png() -> bytes:
    written = io.BytesIO()
    RED.save(written, "PNG")
    return written.getvalue()


SOURCES: dict[str, tuple[list[Any], list[tuple[int, int]], str]] = {  # with the pictures' sizes, and what is said
    "objects": ([RED, NOISE], [SMALL_RED, SMALL_NOISE], ""),
    "I;16": ([Image.new("I;16", (60, 60))], [(56, 56)], ""),
    **{mode: ([RED.convert(mode)], [SMALL_RED], "") for mode in ("RGBA", "P", "L", "1", "CMYK")},
    "many": ([RED] * 9, [SMALL_RED] * 4, "+ 5"),
    "bytes": ([png(), {"bytes": png(), "path": "page 1.png"}], [SMALL_RED] * 2, ""),
    "an address": (["https://example.org/a/cat.png?x=<b>"], [], "cat.png?x=<b>"),
    "names that would be run": ([NASTY, f"https://example.org/{NASTY}"], [], ""),  # of which a page asserts all else
    **{f"{odd!r:.9}": ([odd], [], "image") for odd in (object(), b"bytes", None, 3, "x" * 5000)},
}


@pytest.mark.parametrize("name", SOURCES)
def test_pictures_are_small_and_the_rest_is_named(name: str) -> None:
    sources, sizes, said = SOURCES[name]
    page = page_of(*sources)
    assert sizes_in(page) == sizes and said in page.text and all(len(each) < 4000 for each in page.images)
    assert "<script>" not in page.html.replace("&lt;script&gt;", "")
    assert RED.size == (800, 400), "the user's picture is as it was"


def test_files_that_are_there_and_names_of_all_else(tmp_path: Path) -> None:
    RED.save(tmp_path / "page 1.jpg")
    (tmp_path / "cut.png").write_bytes(b"PNG, and no more")
    page = page_of(str(tmp_path / "page 1.jpg"), str(tmp_path / "cut.png"))
    assert sizes_in(page) == [SMALL_RED] and "cut.png" in page.text


def test_an_image_is_one_token_in_the_text() -> None:
    seen: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        seen.append(ids)
        return " ".join(map(str, ids))

    assert "1 7 2 3" in page_of(RED, decode=decode).text
    assert seen == [[1, 7, 2, 3]]


def test_a_chat_of_text_is_shown_as_before() -> None:
    page = page_of(decode=str, repeats=20)
    assert page.text.count("7") >= 20
    assert not page.images
