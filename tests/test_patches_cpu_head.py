"""The LM head multiplied the other way round: the same logits, its hooks run, nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support_families import build, random_prompts
from support_parity import assert_parity
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.patches import cpu_lm_head
from hf_batchllm.patches.cpu_lm_head import HeadSwap

VOCABULARY = 20_011  # no multiple of a block


def a_head(**options: Any) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(24, VOCABULARY, **{"bias": False, **options})


@pytest.mark.parametrize("rows", [1, 11, 12, 64, 65, 512, 513])
def test_the_logits_are_those_of_the_plain_head(rows: int) -> None:
    head = a_head()
    hidden = torch.randn(1, rows, 24)
    with torch.no_grad():
        plain = head(hidden)
        with HeadSwap(head).applied():
            assert "forward" in vars(head)
            ours = head(hidden)
    assert ours.shape == plain.shape
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    assert "forward" not in vars(head)


def test_fewer_rows_after_more_are_not_those_of_before() -> None:
    head = a_head()
    swap = HeadSwap(head)
    for rows in (40, 13, 60, 20):
        hidden = torch.randn(1, rows, 24)
        with torch.no_grad(), swap.applied():
            torch.testing.assert_close(head(hidden), nn.functional.linear(hidden, head.weight), rtol=1e-5, atol=1e-6)


def test_hooks_of_the_head_run_as_ever() -> None:
    head = a_head()
    hidden, seen = torch.randn(1, 16, 24), []
    head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with torch.no_grad():
        plain = head(hidden)
        with HeadSwap(head).applied():
            torch.testing.assert_close(head(hidden), plain, rtol=1e-5, atol=1e-6)
    assert seen == [(1, 16, VOCABULARY)] * 2


def test_what_somebody_keeps_is_never_written_to_again() -> None:
    head = a_head()
    kept: list[torch.Tensor] = []
    hidden = [torch.randn(1, 16, 24) for _ in range(3)]
    swap = HeadSwap(head)
    with torch.no_grad():
        for states in hidden:
            with swap.applied():
                kept.append(head(states)[0][:, 5:])
        kept = [
            torch.cat([states[0] @ head.weight[:5].t(), view], -1)[None]
            for states, view in zip(hidden, kept, strict=True)
        ]
        for states, output in zip(hidden, kept, strict=True):
            torch.testing.assert_close(output, nn.functional.linear(states, head.weight), rtol=1e-5, atol=1e-6)


def test_what_nobody_keeps_is_used_again() -> None:
    head = a_head()
    swap = HeadSwap(head)
    places = set()
    with torch.no_grad():
        for inference in (True, False, True, False):
            with swap.applied(), torch.inference_mode(inference):
                places.add(head(torch.randn(1, 16, 24)).data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize(
    "head",
    [
        a_head(bias=True),
        a_head(dtype=torch.bfloat16),
        nn.Linear(24, 100, bias=False),
        nn.utils.parametrizations.weight_norm(a_head()),
        type("Other", (nn.Linear,), {})(24, VOCABULARY, bias=False),
        None,
    ],
    ids=["bias", "bfloat16", "narrow", "parametrized", "subclass", "none"],
)
def test_other_heads_are_left_alone(head: nn.Module | None) -> None:
    with HeadSwap(head).applied():
        assert head is None or "forward" not in vars(head)


def test_a_forward_of_the_users_own_is_left_alone() -> None:
    head = a_head()
    head.forward = own = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    with HeadSwap(head).applied():
        assert head.forward is own
    assert head.forward is own


def test_an_exception_leaves_nothing_behind() -> None:
    head = a_head()
    with pytest.raises(RuntimeError), HeadSwap(head).applied():
        head(torch.zeros(1, 16, 7))
    assert "forward" not in vars(head)


def test_the_engine_uses_it_and_the_tokens_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_lm_head, "_SMALLEST_VOCABULARY", 1)
    monkeypatch.setattr(cpu_lm_head, "_FEWEST_ROWS", 1)
    used = []
    forward = HeadSwap._forward
    monkeypatch.setattr(HeadSwap, "_forward", lambda self, hidden: used.append(1) or forward(self, hidden))
    prompts = random_prompts(random.Random(4), 97, "mixed", 10)
    result = BatchGenerator(build("llama")).generate(prompts, max_new_tokens=6)
    assert_parity("llama", prompts, result, 6)
    assert used
