"""Whether a model and a generator are what they were: for the tests of how calls end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support_families import build, random_prompts
from support_fingerprint import fingerprint as fingerprint
from support_parity import assert_parity

from hf_batchllm import BatchGenerator

FAMILY = "gemma2"  # windows, caps, two kinds of layers
NEW_TOKENS = 8


def prompts(kind: str = "mixed", count: int = 14, seed: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, kind, count)


def assert_untouched(generator: BatchGenerator, before: Any, caches: list[Any]) -> None:
    assert fingerprint(build(FAMILY)) == before
    for cache in caches:
        cache.check_integrity()
        assert cache.free_pages == cache.num_pages
    assert_parity(FAMILY, prompts(), generator.generate(prompts(), max_new_tokens=NEW_TOKENS), NEW_TOKENS)


def forbid_work(patch: pytest.MonkeyPatch) -> None:
    """No cache is made and no step is run."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work began before everything was checked")

    patch.setattr("hf_batchllm.engine.kv_memory.KVMemory.open", refuse)
    patch.setattr("hf_batchllm.model.runner.ModelRunner.step", refuse)


@pytest.fixture
def never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_work(monkeypatch)
