"""docs/api.md says what the docstrings say."""

from __future__ import annotations

from typing import Any

import pytest
from support_real_model import ROOT, examples_module

import hf_batchllm


@pytest.fixture(scope="module")
def make_api() -> Any:
    return examples_module("make_api", "docs")


def test_the_page_is_up_to_date(make_api: Any) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == make_api.page(), f"docs/api.md is older than the docstrings: run {make_api.COMMAND}"


def test_every_public_name_has_its_place(make_api: Any) -> None:
    headings = [line for line in make_api.page().splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### `{name}`" for name in hf_batchllm.__all__)


def test_a_new_public_name_asks_for_a_chapter(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_batchllm, "__all__", [*hf_batchllm.__all__, "newcomer"])
    with pytest.raises(SystemExit, match="once: newcomer"):
        make_api.page()
