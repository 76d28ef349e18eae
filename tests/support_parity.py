"""What several test files use: comparing with ``model.generate``, and watching the engine while it works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from support_families import build, gaps, reference_steps
from transformers import PreTrainedModel

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.loop import Engine
from hf_batchllm.model.kv_storage import KVStorage

NEAR_TIE = 1e-3  # where the two best logits are closer, rounding decides and nothing can be said


@cache
def reference(family: str, prompt: tuple[int, ...], new_tokens: int) -> tuple[list[int], int]:
    """What ``generate`` gives for one prompt, and how many of its tokens are not decided by rounding."""
    tokens, logits = reference_steps(build(family), prompt, max_new_tokens=new_tokens)
    close = (gaps(logits) < NEAR_TIE).nonzero()
    return tokens, int(close[0]) if len(close) else len(tokens)


@cache
def is_greedy(family: str, prompt: tuple[int, ...], made: tuple[int, ...], new_tokens: int) -> bool:
    """Whether one pass of transformers over a row says that ``generate`` gives it: each token is the best after those
    before it, by more than rounding, and the row ends where it should. False: ask ``generate``."""
    model = build(family)
    eos = model.generation_config.eos_token_id
    stops = {eos} if isinstance(eos, int) else set(eos or [])
    ended = len(made) == new_tokens or (0 < len(made) < new_tokens and made[-1] in stops)
    if not ended or stops & set(made[:-1]):
        return False
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(dim=-1).tolist() == list(made) and bool((gaps(logits) >= NEAR_TIE).all())


def assert_parity(family: str, prompts: Sequence[Sequence[int]], result: BatchResult, new_tokens: int) -> None:
    """Every row is what ``generate`` gives for its prompt alone.

    Of every fourth row ``generate`` itself is asked, and of each that one pass over it leaves in doubt.
    """
    assert len(result) == len(prompts)
    whole = 0
    for index, (prompt, generation) in enumerate(zip(prompts, result, strict=True)):
        assert generation.index == index
        assert generation.prompt_token_ids == list(prompt)
        if index % 4 and is_greedy(family, tuple(prompt), tuple(generation.token_ids), new_tokens):
            whole += 1
            continue
        expected, sure = reference(family, tuple(prompt), new_tokens)
        assert generation.token_ids[:sure] == expected[:sure], f"{family}: prompt {index} of {len(prompt)} tokens"
        if sure == len(expected):
            assert generation.token_ids == expected
            whole += 1
    assert whole >= 0.8 * len(prompts), f"{family}: too many near ties to prove anything"


def pages_of_memory(model: PreTrainedModel, pages: int, page_size: int) -> int:
    """``kv_memory`` that holds exactly so many pages."""
    return BatchGenerator(model).architecture.kv_bytes_per_token * page_size * pages


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cache is proved whole after every step, and memory that nobody wrote holds NaN. Gives the caches seen."""
    caches: list[Any] = []
    collect, of = Engine.collect, KVStorage.of

    def checked_collect(self: Engine, flight: Any, tokens: list[int]) -> Any:
        finished = collect(self, flight, tokens)
        cache = self.scheduler.cache  # type: ignore[attr-defined]
        cache.check_integrity()
        if cache not in caches:
            caches.append(cache)
        return finished

    def poisoned_of(self: KVStorage, layer: Any, k: torch.Tensor, v: torch.Tensor) -> Any:
        new = layer not in self._layers
        pair = of(self, layer, k, v)
        if new:
            for tensor in pair:
                tensor.fill_(float("nan"))
        return pair

    monkeypatch.setattr(Engine, "collect", checked_collect)
    monkeypatch.setattr(KVStorage, "of", poisoned_of)
    return caches


@contextmanager
def counted_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """The number of tokens of each pass through the model, counted where ids become vectors."""
    sizes: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    try:
        yield sizes
    finally:
        handle.remove()
