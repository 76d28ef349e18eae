"""What the tests of ``accelerated`` share: a model, a tokenizer, inputs, and how to see what was not accelerated."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

from hf_batchllm import accelerated

FAMILY = "gemma3"  # windows, two kinds of layers
TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
TEXTS = ["w5 w6 w7 w8 w9 w10", "w5 w6 w7 w8 w11", "w20"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def model() -> Iterator[Any]:
    model = build(FAMILY)
    vars(model).pop("last_report", None)  # which stays after accelerated()
    before = sorted(vars(model)), repr(vars(model.config)), repr(vars(model.generation_config))
    yield model
    vars(model).pop("last_report", None)
    assert (sorted(vars(model)), repr(vars(model.config)), repr(vars(model.generation_config))) == before


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id of the tiny models: leave it as it is."""
    inner = Tokenizer(models.WordLevel({f"w{index}": index for index in range(101)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w100", pad_token="w0", model_input_names=names)
    made.padding_side, made.chat_template = "left", TEMPLATE
    return made


@pytest.fixture
def inputs(tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    return dict(tokenizer(TEXTS, return_tensors="pt", padding=True))


def beyond_eight(ids: torch.Tensor, scores: Any) -> bool:
    """A criterion."""
    return ids.shape[1] > 8


def made(task: str = "text-generation", **given: Any) -> Any:
    """A pipeline of a tiny model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        defaults = {"model": build(FAMILY), "tokenizer": word_tokenizer(), "device": "cpu"}
        return pipeline(task, **{**defaults, **given})


@contextmanager
def accelerated_throughout(owner: Any, **fields: Any) -> Iterator[Any]:
    """``owner``: a model, or a pipeline. Nothing may go to its own methods."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="not accelerated")
        with accelerated(owner, **fields) as same_owner:
            assert same_owner is owner
            yield owner
            assert owner.last_report is not None


@contextmanager
def reasons() -> Iterator[list[str]]:
    """Why calls were not accelerated; filled when the block ends."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    for warning in caught:
        beginning, _, reason = str(warning.message).partition(": ")
        if beginning.startswith("not accelerated, "):
            # It points at the line that called, not into the library.
            assert Path(warning.filename).name.startswith("test_") or warning.filename == threading.__file__
            said.append(reason)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and torch.equal(one.sequences, other.sequences)
