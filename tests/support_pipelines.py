"""What the tests of the pipeline share: how one is made, and what it is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from support_accelerated import TEXTS, word_tokenizer
from support_families import build
from torch.utils.data import Dataset
from transformers import pipeline

from hf_batchllm.integrations.pipeline_task import register_tasks

CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY = {"max_new_tokens": 4, "do_sample": False}


class Texts(Dataset):
    """Has a length, and no end that a ``for`` would find."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place % len(self.items)]


def made(task: str, **given: Any) -> Any:
    register_tasks()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        defaults = {"model": build("gemma3"), "tokenizer": word_tokenizer(), "device": "cpu"}
        return pipeline(task, **{**defaults, **given})


@pytest.fixture(scope="module")
def stock() -> Any:
    return made("text-generation")


@pytest.fixture
def pipe() -> Iterator[Any]:
    with made("batch-text-generation") as pipe:
        yield pipe
