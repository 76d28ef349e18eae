"""docs/make_pictures.py, which draws the README's picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from support_families import build
from support_real_model import examples_module

from hf_batchllm import BatchGenerator

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def make_pictures() -> Any:
    return examples_module("make_pictures", "docs")


def test_the_picture_shows_a_plan_and_its_run(make_pictures: Any) -> None:
    prompts = [[*range(5, 45), *range(50 + 8 * (index // 2), 58 + 8 * (index // 2)), index + 5] for index in range(6)]
    gen = BatchGenerator(build("llama"), min_shared_tokens=1)
    plan = gen.plan(prompts)
    drawn = ElementTree.fromstring(make_pictures.picture(plan, gen.generate(prompts, max_new_tokens=4).report))

    said = " ".join(text.text or "" for text in drawn.iter(f"{SVG}text"))
    assert f"{plan.total_tokens:,} tokens in 6 prompts, {plan.computed_tokens:,} to compute" in said
    assert "40 tokens," in said and "once for 6" in said
    assert "24 new tokens" in said
    boxes = [box for box in drawn.iter(f"{SVG}rect") if "gap" in (box.get("class") or "")]
    for box in boxes:
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= make_pictures.WIDTH
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= make_pictures.HEIGHT
    kinds = {(box.get("class") or "").split()[0] for box in boxes}
    assert kinds == {"all", "some", "own", "prompts", "answers"}


def test_it_is_readable_on_light_and_on_dark_ground(make_pictures: Any) -> None:
    assert make_pictures._LIGHT.keys() == make_pictures._DARK.keys()
    for palette in (make_pictures._LIGHT, make_pictures._DARK):
        assert contrast(palette["ink"], palette["ground"]) > 7
        assert contrast(palette["dim"], palette["ground"]) > 4.5
        assert contrast(palette["on"], palette["some"]) > 4.5


def test_the_stored_picture_is_of_this_script(make_pictures: Any) -> None:
    stored = make_pictures.PICTURE.read_text(encoding="utf-8")
    assert re.findall(r"<style>(.*)</style>", stored) == [make_pictures._style()], "run `make pictures`"


def contrast(one: str, other: str) -> float:
    """As WCAG has it, from 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
