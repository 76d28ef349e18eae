"""docs/constrained.md: what it shows of grammars runs as it stands."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from support_grammars import END_OF_BYTES, of_bytes
from support_real_model import ROOT

from hf_batchllm import BatchGenerator

PAGE = (ROOT / "docs" / "constrained.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def block(word: str) -> str:
    (found,) = [each for each in BLOCKS if word in each]
    return found


@pytest.fixture
def given() -> dict[str, Any]:
    model, tokenizer = copy.deepcopy(of_bytes()[0]), of_bytes()[1]
    model.generation_config.eos_token_id = END_OF_BYTES
    model.generation_config.max_new_tokens = 24
    gen = BatchGenerator(model, tokenizer)
    prompts = ["how old?", "how heavy?", "where?"]
    return {"gen": gen, "generator": gen, "prompts": prompts, "model": model, "tokenizer": tokenizer}


def test_the_forms_of_answers(given: dict[str, Any]) -> None:
    lines = [line for line in block("choice=").splitlines() if line]
    answers = [eval(line.partition("    #")[0], {**given, "Person": SCHEMA, "Trip": True}) for line in lines]
    _, regex, choice, grammar, each = (answer.texts for answer in answers)
    assert all(re.fullmatch("[0-9]{1,3} (kg|lb)", text) for text in regex)
    assert set(choice) <= {"positive", "negative"}
    assert all(text.startswith("SELECT ") for text in grammar)
    assert json.loads(each[0])["a"] in (1, 2) and each[2].startswith("{")


def test_the_processor_with_another_library(given: dict[str, Any]) -> None:
    pytest.importorskip("xgrammar", reason="needs xgrammar, which is no dependency")
    names = {**given, "schemas": [json.dumps(SCHEMA)] * 3}
    code = block("import xgrammar").replace("\ngenerator.generate", "\nresult = generator.generate")
    exec(code, names)
    assert [json.loads(text)["a"] in (1, 2) for text in names["result"].texts] == [True] * 3
