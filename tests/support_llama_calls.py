"""Prompts that share something, and a generator over a tiny Llama for them."""

from __future__ import annotations

import random

import pytest
from support_families import build, random_prompts

from hf_batchllm import BatchGenerator

FAMILY = "llama"


def prompts(kind: str = "mixed", count: int = 14) -> list[list[int]]:
    return random_prompts(random.Random(3), 97, kind, count)


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY), min_shared_tokens=4, page_size=8)
