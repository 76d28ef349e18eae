"""States that a process may be in around a call, and calls whose results must not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support_families import random_prompts
from support_letter_tokenizers import letter_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_batchllm import BatchGenerator, Generation

State = Callable[[], AbstractContextManager[Any]]

PROMPTS = random_prompts(random.Random(3), 97, "mixed", 4)[:4]
_WIDTH = max(map(len, PROMPTS))
_LEFT = [_WIDTH - len(prompt) for prompt in PROMPTS]
IDS = torch.tensor([[0] * left + prompt for left, prompt in zip(_LEFT, PROMPTS, strict=True)])
MASK = torch.tensor([[0] * left + [1] * len(prompt) for left, prompt in zip(_LEFT, PROMPTS, strict=True)])


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def _set(put: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


def default_device(device: str) -> AbstractContextManager[None]:
    return _set(torch.set_default_device, device, None)


def matmul_precision(name: str) -> AbstractContextManager[None]:
    return _set(torch.set_float32_matmul_precision, name, torch.get_float32_matmul_precision())


def threads(count: int) -> AbstractContextManager[None]:
    return _set(torch.set_num_threads, count, torch.get_num_threads())


def deterministic(warn_only: bool = False) -> AbstractContextManager[None]:
    """With memory that nobody wrote full of NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    return _set(partial(torch.use_deterministic_algorithms, warn_only=warn_only), True, False)


@contextmanager
def newer_switches() -> Iterator[None]:
    """torch's own switch of each device. Once one is set, ``torch.get_float32_matmul_precision`` raises an error."""
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        for each in products:
            each.fp32_precision = "tf32"
        yield
    finally:
        for each in products:
            each.fp32_precision = "none"


STATES: dict[str, State] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
    "with meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "deterministic, warn only": lambda: deterministic(warn_only=True),
    "inference mode": torch.inference_mode,
    "grad mode": torch.enable_grad,
    "no grad": torch.no_grad,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "numpy raises": lambda: np.errstate(all="raise"),
    # Not "medium": processors with instructions for bfloat16 then multiply in it, and round as far as answers change.
    "matmul precision": lambda: matmul_precision("high"),
    "matmul precision, newer": newer_switches,
    "function mode": _Functions,
    "dispatch mode": _Dispatched,
    "flop counter": lambda: FlopCounterMode(display=False),
    "one sdpa kernel": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}


def made(model: Any, **fields: Any) -> BatchGenerator:
    return BatchGenerator(model, letter_tokenizer(), min_shared_tokens=4, page_size=8, **fields)


def facts(row: Generation) -> list[Any]:
    """Everything about a row, in numbers that can be compared."""
    prompt = [each for each in row.prompt_logprobs or () if each is not None]
    likely = [list(each.items()) for each in (*(row.logprobs or ()), *prompt)]
    return [row.index, row.sample, row.token_ids, row.text, row.finish_reason, likely, row.score]


def _rows(model: Any, **options: Any) -> list[Any]:
    return [facts(row) for row in made(model).generate(PROMPTS, max_new_tokens=4, **options)]


def _tensors(model: Any, **options: Any) -> list[Any]:
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = made(model).generate(
        input_ids=IDS, attention_mask=MASK, pad_token_id=0, max_new_tokens=4, eos_token_id=[5, 17, 40], **options
    )
    told = {name: value for name, value in out.items() if name not in ("past_key_values", "cache")}
    return [list(item) if isinstance(item[1], torch.Tensor) else [item[0], *item[1]] for item in told.items()]


def _scores(model: Any) -> list[Any]:
    result = made(model).score(PROMPTS, choices=[[3, 4], [5]])
    return [[score.index, score.choice, score.logprobs, score.is_greedy] for score in result]


def _kept(model: Any) -> list[Any]:
    with made(model, keep_prefixes=4) as generator:
        results = [generator.generate(PROMPTS, max_new_tokens=3) for _ in range(2)]
    return [facts(row) for result in results for row in result]


CALLS: dict[str, Callable[[Any], list[Any]]] = {
    "greedy": lambda model: _rows(model, logprobs=2, prompt_logprobs=1),
    "sampled": lambda model: _rows(model, do_sample=True, seed=5, top_p=0.9, num_return_sequences=2),
    "penalties": lambda model: _rows(
        model, repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=3, eos_token_id=[5, 17, 40]
    ),
    "from the prompt": lambda model: _rows(model, encoder_repetition_penalty=1.3),
    "stop strings": lambda model: _rows(model, stop_strings=["e", "bc"]),
    "beams": lambda model: _rows(model, num_beams=3, num_return_sequences=2, eos_token_id=[5, 17, 40]),
    "drawn beams": lambda model: _rows(model, num_beams=2, do_sample=True, seed=3),
    "tensors": _tensors,
    "tensors of beams": lambda model: _tensors(model, num_beams=3),
    "scores": _scores,
    "kept prefixes": _kept,
}


def assert_same(ours: Any, expected: Any) -> None:
    """Numbers may differ by rounding; types, shapes and devices may not."""
    assert type(ours) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4, check_device=True, check_dtype=True)
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected)
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other)
    else:
        assert ours == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)
