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


def page_of(*sources: Any, decode: Any = None, repeats: int = 300) -> Page:
    content = [{"type": "image", "image": source} for source in sources]
    chat = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    ids = [1, *[7] * repeats, 2, 3]
    return view_of(BatchResult([Generation(0, 0, "red", [5], ids, "stop", prompt=chat)], None, decode))


def size_of(written: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(written)).size


def test_pictures_are_small() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 300, 3), dtype=np.uint8)
    page = page_of(RED, noise)
    assert [size_of(each) for each in page.images] == [(56, 28), (19, 56)]
    assert RED.size == (800, 400), "the owner's picture is as it was"
    assert all(len(each) < 4000 for each in page.images)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "1", "I;16", "CMYK"])
def test_every_kind_of_picture(mode: str) -> None:
    picture = Image.new(mode, (60, 60)) if mode == "I;16" else RED.convert(mode)
    assert len(page_of(picture).images) == 1


def test_files_that_are_there_and_names_of_all_else(tmp_path: Path) -> None:
    RED.save(tmp_path / "page 1.jpg")
    (tmp_path / "cut.png").write_bytes(b"PNG, and no more")
    page = page_of(str(tmp_path / "page 1.jpg"), str(tmp_path / "cut.png"), "https://example.org/a/cat.png?x=<b>")
    assert [size_of(each) for each in page.images] == [(56, 28)]
    assert "cut.png" in page.text
    assert "cat.png?x=<b>" in page.text
    written = io.BytesIO()
    RED.save(written, "PNG")
    of_a_dataset = {"bytes": written.getvalue(), "path": "page 1.png"}
    assert [size_of(each) for each in page_of(written.getvalue(), of_a_dataset).images] == [(56, 28)] * 2
    for other in (object(), b"bytes", None, 3, "x" * 5000):
        assert "image" in page_of(other).text


def test_names_are_escaped() -> None:
    page = page_of(NASTY, f"https://example.org/{NASTY}")
    assert "<script>" not in page.html.replace("&lt;script&gt;", "")


def test_of_many_a_few() -> None:
    page = page_of(*[RED] * 9)
    assert len(page.images) == 4
    assert "+ 5" in page.text


def test_an_image_is_one_token_in_the_text() -> None:
    seen: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        seen.append(ids)
        return " ".join(map(str, ids))

    assert "1 7 2 3" in page_of(RED, decode=decode).text
    assert seen == [[1, 7, 2, 3]]


def test_a_chat_of_text_is_shown_as_before() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]
    ids = [1, *[7] * 20]
    page = view_of(BatchResult([Generation(0, 0, "red", [5], ids, "stop", prompt=chat)], None, lambda ids: str(ids)))
    assert page.text.count("7") >= 20
    assert not page.images
