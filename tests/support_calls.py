"""What tests of whole calls share: a call in one line, what is called meanwhile, and calls that fail on purpose."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_families import build
from support_parity import assert_parity

from hf_batchllm import BatchGenerator


def answers(model: Any, prompts: Any, config: dict[str, Any] | None = None, /, **options: Any) -> Any:
    """Of a model, or of a family by its name, what a generator of its own gives."""
    with BatchGenerator(build(model) if isinstance(model, str) else model, **(config or {})) as generator:
        return generator.generate(prompts, **{"progress": False, **options})


def as_generate(
    family: str,
    prompts: Any,
    new_tokens: int,
    config: dict[str, Any] | None = None,
    /,
    *,
    model: Any = None,
    **options: Any,
) -> Any:
    """The answers, which have to be those of ``generate`` for each prompt alone. ``model`` may stand for the family."""
    result = answers(model or family, prompts, config, max_new_tokens=new_tokens, **options)
    assert_parity(family, prompts, result, new_tokens)
    return result


def told(result: Any) -> list[Any]:
    return [(each.token_ids, each.finish_reason) for each in result]


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any], after: bool = False) -> list[Any]:
    """What ``note`` makes of the arguments of each call of a function from now on, in their order.

    It is asked before the call runs, or when it has run.
    """
    seen: list[Any] = []
    own = getattr(owner, name)

    def noting(*given: Any, **named: Any) -> Any:
        if not after:
            seen.append(note(*given))
        result = own(*given, **named)
        if after:
            seen.append(note(*given))
        return result

    patch.setattr(owner, name, noting)
    return seen


def failing(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    at: Container[int],
    error: type[BaseException] | BaseException,
    after: bool = False,
) -> list[int]:
    """The calls with these numbers fail from now on, the first being 1. Gives how many there were, in a list of one.

    They fail in the place of what they do, or when that has been done.
    """
    calls = [0]
    own = getattr(owner, name)

    def fails(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        fail = calls[0] in at
        if fail and not after:
            raise error
        result = own(*given, **named)
        if fail:
            del given, named, result  # this frame is the test's: it must keep nothing alive
            raise error
        return result

    patch.setattr(owner, name, fails)
    return calls


@contextmanager
def flipping_head(model: Any, option: str, length: int) -> Iterator[dict[str, Any]]:
    """Options with code of the user's that turns the model's head round once a sequence is so long."""
    head = model.lm_head.weight

    def flips(ids: torch.Tensor, scores: Any) -> Any:
        if ids.shape[1] == length:
            model.lm_head.weight = torch.nn.Parameter(head.data.flip(0).contiguous(), requires_grad=False)
        return scores if option == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    try:
        yield {option: [flips]}
    finally:
        model.lm_head.weight = head
