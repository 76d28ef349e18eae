"""A real language model, Gemma 3 270M, loaded once for all tests that need what only trained weights show; and a tiny
stand-in with its tokenizer and its vocabulary, for tests of what surrounds a model."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support_family_models import Family

ROOT = Path(__file__).parents[1]


def examples_module(name: str, folder: str = "examples") -> Any:
    # By its path: an installed package may be called `examples` too.
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_model = examples_module("small_model")

NEEDS_REAL_MODEL = [
    pytest.mark.skipif(not small_model.is_available(), reason=small_model.why_not_available()),
    pytest.mark.xdist_group("real_model"),  # one worker: the model is loaded once, and in memory once
    pytest.mark.timeout(900),  # the first run unpacks the model
]


def needs_real_model(test: Any) -> Any:
    for mark in NEEDS_REAL_MODEL:
        test = mark(test)
    return test


@functools.cache
def load_once() -> tuple[Any, Any]:
    return small_model.load()  # type: ignore[no-any-return]


# Keys and values of a token take 24 KiB: little memory is little for it, too.
_TINY = {
    "vocab_size": 262_144, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, "sliding_window": 512,
    "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


@functools.cache
def load_stand_in() -> tuple[Any, Any]:
    """As ``small_model.load``. What the model says means nothing."""
    from transformers import AutoTokenizer

    if not small_model.FOLDER.exists():
        load_once()  # unpacks the tokenizer
    model = Family("stand_in", "gemma3_text", _TINY, embed=0.1)()
    return model, AutoTokenizer.from_pretrained(small_model.FOLDER, local_files_only=True)
