"""The tokenizer beside a model is loaded once, and never shared with somebody who may change it."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer
from torch import nn
from transformers import AutoTokenizer

from hf_batchllm import BatchGenerator

TEXTS = ["w5 w6", "w7"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    real = AutoTokenizer.from_pretrained

    def counted(name: str, **options: Any) -> Any:
        names.append(name)
        return real(name, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    return names


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    tokenizer = copy.deepcopy(word_tokenizer())
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    made = copy.deepcopy(build("llama"))
    made.config._name_or_path = str(tmp_path)
    return made


def texts(generator: BatchGenerator) -> list[str | None]:
    return [each.text for each in generator.generate(TEXTS, max_new_tokens=2)]


def test_the_next_generators_of_a_model_do_not_load_it_again(model: nn.Module, loads: list[str]) -> None:
    with BatchGenerator(model) as first:
        expected = texts(first)
    assert texts(BatchGenerator(model)) == texts(BatchGenerator(model)) == expected
    assert len(loads) == 1


def test_changed_files_are_loaded(model: nn.Module, loads: list[str], tmp_path: Path) -> None:
    assert BatchGenerator(model).generate(TEXTS, max_new_tokens=1)[0].text
    os.utime(tmp_path / "tokenizer.json", ns=(1, 1))
    texts(BatchGenerator(model))
    assert len(loads) == 2
    model.config._name_or_path = f"{tmp_path}/."
    texts(BatchGenerator(model))
    (tmp_path / "chat_template.jinja").write_text("mine {{ messages[0].content }}")
    assert BatchGenerator(model).tokenizer.chat_template.startswith("mine")


@pytest.mark.parametrize("when", ["before", "after", "first gone"])
def test_what_a_user_does_to_a_tokenizer_reaches_no_other_generator(
    model: nn.Module, loads: list[str], when: str
) -> None:
    chat = [[{"role": "user", "content": "w5 w6"}]]
    first, second = BatchGenerator(model), BatchGenerator(model)
    texts(first)
    if when == "before":
        texts(second)
    mine = first.tokenizer
    assert mine is first.tokenizer
    mine.chat_template = "{{ 'w9 w9 w9' }}"
    assert len(first.generate(chat, max_new_tokens=1)[0].prompt_token_ids) == 3
    if when == "first gone":
        del first, mine
        gc.collect()
    assert len(second.generate(chat, max_new_tokens=1)[0].prompt_token_ids) != 3
    third = BatchGenerator(model)
    assert len(third.generate(chat, max_new_tokens=1)[0].prompt_token_ids) != 3
    assert third.tokenizer is not second.tokenizer
    assert len(loads) == 1


def test_it_goes_with_its_model(model: nn.Module, loads: list[str]) -> None:
    other = copy.deepcopy(model)
    generator = BatchGenerator(other)
    texts(generator)
    kept = weakref.ref(generator._tokenizer.found())
    generator.close()
    del generator
    gc.collect()
    assert kept() is not None
    texts(BatchGenerator(model))
    assert len(loads) == 2
    del other
    gc.collect()
    assert kept() is None
