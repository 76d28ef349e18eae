"""docs/api.md says what the docstrings say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import hf_batchllm

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def make_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make_api: ModuleType) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert page == make_api.page(), f"docs/api.md is older than the docstrings: run {make_api.COMMAND}"


def test_every_public_name_has_its_place(make_api: ModuleType) -> None:
    headings = [line for line in make_api.page().splitlines() if line.startswith("### ")]
    assert sorted(headings) == sorted(f"### `{name}`" for name in hf_batchllm.__all__)


def test_a_new_public_name_asks_for_a_chapter(make_api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_batchllm, "__all__", [*hf_batchllm.__all__, "newcomer"])
    with pytest.raises(SystemExit, match="once: newcomer"):
        make_api.page()
