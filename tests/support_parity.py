"""What several test files use: comparing with ``model.generate``, and watching the engine while it works."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support_families import PROMPT_KINDS, build, family_params, gaps, logits_of_rows, random_prompts, reference_steps
from transformers import PreTrainedModel

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.collector import TokenCollector
from hf_batchllm.inputs.base_model import base_model
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner

Row = tuple[int, ...]
NEAR_TIE = 1e-3  # where the two best logits are closer, rounding decides and nothing can be said

# One of each kind of attention: plain, window on every layer, window and soft-cap, window and sinks, unequal dims,
# learned positions, no positions on some layers, layers that read the K and V of others; and layers that carry a state.
KINDS_OF_ATTENTION = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "cohere2", "gemma4_shared"]
KINDS_OF_ATTENTION += ["qwen3_next", "falcon_h1"]

# Steps cut in different places, and nothing shared: none of it changes what a model says.
CUTS: list[dict[str, Any]] = [
    {}, {"share_prefixes": False}, {"page_size": 3, "max_batch_tokens": 1}, {"max_batch_tokens": 7},
    {"scheduler": "fifo", "max_batch_tokens": 16},
]  # fmt: skip


def each_config_with_some(configs: Sequence[Any], others: int, families: Sequence[str] = ()) -> list[Any]:
    """Pairs for ``pytest.mark.parametrize``: each config with a Llama and with so many other kinds of attention, by
    turns. What a config changes and what a kind of attention changes is in different places."""
    kinds, pairs = list(families or KINDS_OF_ATTENTION)[1:], []
    for number, config in enumerate(configs):
        chosen = [kinds[(number * others + more) % len(kinds)] for more in range(others)]
        for family in family_params(["llama", *chosen]):
            pairs.append(
                pytest.param(*family.values, config, marks=family.marks, id=f"{family.values[0]}-{_brief(config)}")
            )
    return pairs


def _brief(config: Any) -> str:
    each = [config] if not isinstance(config, (dict, tuple)) else config.items() if isinstance(config, dict) else config
    return ",".join("=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in each)


def mixed_prompts(count: int = 4, seed: int = 1) -> list[list[int]]:
    """Every kind of list in one: no sharing, one prefix, nested, equal, prefix of another, one token, the window."""
    rng = random.Random(seed)
    prompts = [prompt for kind in PROMPT_KINDS for prompt in random_prompts(rng, 97, kind, count)]
    rng.shuffle(prompts)
    return prompts


@st.composite
def tries(draw: st.DrawFn) -> list[list[int]]:
    """Prompts grown on one another: each continues a part of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 9))):
        start: list[int] = []
        if prompts and draw(st.booleans()):
            earlier = draw(st.sampled_from(prompts))
            start = earlier[: draw(st.integers(0, len(earlier)))]
        more = draw(st.lists(st.integers(3, 90), max_size=24))
        prompts.append((start + more)[:70] or [draw(st.integers(3, 90))])
    return prompts


@cache
def reference(family: str, prompt: tuple[int, ...], new_tokens: int) -> tuple[list[int], int]:
    """What ``generate`` gives for one prompt, and how many of its tokens are not decided by rounding."""
    tokens, logits = reference_steps(build(family), prompt, max_new_tokens=new_tokens)
    close = (gaps(logits) < NEAR_TIE).nonzero()
    return tokens, int(close[0]) if len(close) else len(tokens)


_GREEDY: dict[tuple[str, Row, Row, int], bool] = {}


def are_greedy(family: str, rows: Sequence[tuple[Row, Row]], new_tokens: int) -> list[bool]:
    """For each (prompt, new tokens): whether a pass of transformers over it says that ``generate`` gives it.

    Each token is the best after those before it, by more than rounding, and the row ends where it should. False: ask
    ``generate``.
    """
    model = build(family)
    eos = model.generation_config.eos_token_id
    stops = {eos} if isinstance(eos, int) else set(eos or [])

    def ends_right(made: Row) -> bool:
        ended = len(made) == new_tokens or (0 < len(made) < new_tokens and made[-1] in stops)
        return ended and not stops & set(made[:-1])

    new = sorted({row for row in rows if (family, *row, new_tokens) not in _GREEDY and ends_right(row[1])})
    for (prompt, made), every in zip(new, logits_of_rows(model, [prompt + made for prompt, made in new]), strict=True):
        logits = every[len(prompt) - 1 : -1]
        best = logits.argmax(dim=-1).tolist() == list(made) and bool((gaps(logits) >= NEAR_TIE).all())
        _GREEDY[family, prompt, made, new_tokens] = best
    return [_GREEDY.get((family, *row, new_tokens), False) for row in rows]


_STATES = 8
_ASKED = 12  # every so many rows ``generate`` itself is asked, whatever a pass over the row says


def assert_parity(family: str, prompts: Sequence[Sequence[int]], result: BatchResult, new_tokens: int) -> None:
    """Every row is what ``generate`` gives for its prompt alone.

    Of some rows ``generate`` itself is asked, and of each that one pass over it leaves in doubt.
    """
    assert len(result) == len(prompts)
    whole = 0
    rows = [(tuple(prompt), tuple(generation.token_ids)) for prompt, generation in zip(prompts, result, strict=True)]
    greedy = are_greedy(family, rows, new_tokens)
    for index, (prompt, generation) in enumerate(zip(prompts, result, strict=True)):
        assert generation.index == index
        assert generation.prompt_token_ids == list(prompt)
        if index % _ASKED and greedy[index]:
            whole += 1
            continue
        expected, sure = reference(family, tuple(prompt), new_tokens)
        assert generation.token_ids[:sure] == expected[:sure], f"{family}: prompt {index} of {len(prompt)} tokens"
        if sure == len(expected):
            assert generation.token_ids == expected
            whole += 1
    assert whole >= 0.8 * len(prompts), f"{family}: too many near ties to prove anything"


def pages_of_memory(model: PreTrainedModel, pages: int, page_size: int) -> int:
    """``kv_memory`` that holds exactly so many pages, and beside them some states where layers carry one."""
    architecture = BatchGenerator(model).architecture
    return architecture.kv_bytes_per_token * page_size * pages + _STATES * architecture.slot_bytes


def cache_of(scheduler: Any) -> Any:
    """The page cache of an engine's scheduler, which may be within another one."""
    return getattr(scheduler, "inner", scheduler).cache


def prove_caches(patch: pytest.MonkeyPatch) -> list[Any]:
    """From here on the cache is proved whole after every step, and memory that nobody wrote holds NaN.

    Gives the caches seen.
    """
    caches: list[Any] = []
    collect, of = TokenCollector.collect, KVStorage.of

    def checked(self: TokenCollector, *given: Any) -> Any:
        found = collect(self, *given)
        cache = cache_of(self.scheduler)
        cache.check_integrity()
        if cache not in caches:
            caches.append(cache)
        return found

    def poisoned(self: KVStorage, layer: Any, *given: Any) -> Any:
        new = layer not in self._layers
        pair = of(self, layer, *given)
        for tensor in pair if new else ():
            tensor.fill_(float("nan"))
        return pair

    patch.setattr(TokenCollector, "collect", checked)
    patch.setattr(KVStorage, "of", poisoned)
    return caches


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return prove_caches(monkeypatch)


@contextmanager
def counted_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """The number of tokens of each of the engine's passes through the model.

    Nothing is put on the model or on PyTorch: kept prefixes go when a model gets a hook, or when a mode is on.
    """
    sizes: list[int] = []
    forward = ModelRunner.forward

    def counted(self: ModelRunner, input_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if base_model(self.model) is base_model(model):
            sizes.append(input_ids.numel())
        return forward(self, input_ids, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward", counted)
        yield sizes
