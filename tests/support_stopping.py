"""What the tests of ends of sequences share. ``generate``, one prompt at a time, is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_parity import mixed_prompts, reference
from transformers import StoppingCriteria

from hf_batchllm import BatchGenerator, BatchResult

FAMILY = "llama"
NEW_TOKENS = 24
TOKENIZER = letter_tokenizer()
PROMPTS = mixed_prompts(2)


def make(**fields: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), TOKENIZER, **fields)


_ALONE: dict[str, list[int]] = {}


def alone(prompt: Sequence[int], **options: Any) -> list[int]:
    """What ``generate`` makes of one prompt."""
    key = str((list(prompt), options))
    if key not in _ALONE:
        _ALONE[key] = generated(prompt, **options)
    return _ALONE[key]


def generated(prompt: Sequence[int], **options: Any) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": NEW_TOKENS, **options}
    if "stop_strings" in options:
        options.setdefault("tokenizer", TOKENIZER)
    return build(FAMILY).generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def assert_as_alone(
    result: Any, prompts: Sequence[Sequence[int]], options: Callable[[int], dict[str, Any]] | dict[str, Any]
) -> None:
    """Up to the first token that rounding decides."""
    whole = 0
    for index, prompt in enumerate(prompts):
        chosen = options(index) if callable(options) else options
        expected, got = alone(prompt, **chosen), result[index].token_ids
        _, sure = reference(FAMILY, tuple(prompt), NEW_TOKENS)
        assert got[:sure] == expected[:sure]
        if sure >= len(expected):
            whole += 1
            assert got == expected
            reason = "length" if len(expected) == chosen.get("max_new_tokens", NEW_TOKENS) else "stop"
            assert result[index].finish_reason == reason or (reason == "length" and len(got) == len(expected))
    assert whole >= 0.8 * len(prompts)


def ends_as_alone(
    options: dict[str, Any] | Callable[[int], dict[str, Any]],
    given: dict[str, Any] | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    generator: BatchGenerator | None = None,
    **config: Any,
) -> BatchResult:
    """A call's result, of which each row ends as in ``generate``. ``given``: to the call, if not ``options``."""
    asked: Any = options if given is None else given
    length = {} if "generation_config" in asked else {"max_new_tokens": NEW_TOKENS}
    result: BatchResult = (generator or make(**config)).generate(prompts, progress=False, **length, **asked)
    assert_as_alone(result, prompts, options)
    return result


def text_of(prompt: Sequence[int], begin: int = 0, end: int | None = None) -> str:
    return TOKENIZER.decode(reference(FAMILY, tuple(prompt), NEW_TOKENS)[0])[begin:end]


class Below(StoppingCriteria):
    """Ends where the last token's id is below a number; it remembers what it was asked."""

    def __init__(self, bound: int, makes: Callable[[bool], Any] = bool) -> None:
        self.bound, self.makes = bound, makes
        self.asked: list[tuple[list[int], Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        assert input_ids.dtype == torch.long and not kwargs and not torch.is_grad_enabled()
        self.asked.append((input_ids[0].tolist(), scores))
        return self.makes(int(input_ids[0, -1]) < self.bound)

    def __repr__(self) -> str:
        return f"Below({self.bound})"
