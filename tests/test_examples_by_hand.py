"""examples/by_hand.py: the tokens of ``BatchGenerator`` and of ``model.generate``, by public names alone."""

from __future__ import annotations

import ast
import random
import re
import sys
from typing import Any

import pytest
from support_families import build, family_params, random_prompts
from support_fingerprint import fingerprint
from support_real_model import ROOT, examples_module, small_model
from support_reference import reference_generate

from hf_batchllm import BatchGenerator

STOPS = list(range(0, 97, 9))
NEW_TOKENS = 8


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    return examples_module("by_hand")


@pytest.mark.parametrize("kind", ["nested", "mixed"])
@pytest.mark.parametrize("family", family_params(["llama", "gemma3"]))
def test_it_gives_the_tokens_of_generate(
    family: str, kind: str, by_hand: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, before = build(family), fingerprint(build(family))
    prompts = random_prompts(random.Random(5), 97, kind, 12)
    answers = by_hand.generate(model, prompts, NEW_TOKENS, STOPS)
    computed, asked = map(int, re.findall(r"^(\d+) of (\d+) prompt tokens", capsys.readouterr().out)[0])
    assert asked == sum(map(len, prompts)) > computed

    limits: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": STOPS}
    assert answers == BatchGenerator(model).generate(prompts, **limits).token_ids
    assert answers == [reference_generate(model, prompt, **limits) for prompt in prompts]
    assert any(len(answer) < NEW_TOKENS for answer in answers)
    assert fingerprint(model) == before


def test_a_step_has_decode_rows_beside_chunks_of_a_prompt(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the random model, as where the extra `demo` is not installed."""
    monkeypatch.setattr(small_model, "is_available", lambda: False)
    by_hand.main()
    printed = capsys.readouterr().out
    assert re.search(r"^step: [1-9]\d* decode rows, [1-9]\d* prompt tokens$", printed, re.MULTILINE)
    answers = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("[")]
    prompts = [list(text.encode()) for text in by_hand.TEXTS]
    expected = BatchGenerator(by_hand.tiny_model()).generate(prompts, max_new_tokens=by_hand.MAX_NEW_TOKENS)
    assert answers == expected.token_ids


def test_it_is_short_and_takes_public_names_alone() -> None:
    source = (ROOT / "examples" / "by_hand.py").read_text("utf-8")
    assert len(source.splitlines()) < 100
    nodes = list(ast.walk(ast.parse(source)))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    assert not [name for name in used if name.startswith("_")]
