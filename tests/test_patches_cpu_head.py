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


def states(rows: int = 16) -> torch.Tensor:
    return torch.randn(1, rows, 24)


def assert_near(ours: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 11, 12, 64, 65, 512, 513, (40, 13, 60, 20)], ids=str)
@torch.no_grad()
def test_the_logits_are_those_of_the_plain_head(rows: int | tuple[int, ...]) -> None:
    """Fewer rows after more are not those of before."""
    swap = HeadSwap(head := a_head())
    for count in (rows,) if isinstance(rows, int) else rows:
        plain = head(hidden := states(count))
        with swap.applied():
            assert "forward" in vars(head)
            assert_near(head(hidden), plain)
        assert "forward" not in vars(head)


@torch.no_grad()
def test_hooks_of_the_head_run_as_ever() -> None:
    head, hidden, seen = a_head(), states(), []
    head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    plain = head(hidden)
    with HeadSwap(head).applied():
        assert_near(head(hidden), plain)
    assert seen == [(1, 16, VOCABULARY)] * 2


@torch.no_grad()
def test_what_somebody_keeps_is_never_written_to_again() -> None:
    head, kept = a_head(), []
    swap, hidden = HeadSwap(head), [states() for _ in range(3)]
    for each in hidden:
        with swap.applied():
            kept.append(head(each)[0][:, 5:])
    for each, view in zip(hidden, kept, strict=True):
        assert_near(view, nn.functional.linear(each[0], head.weight)[:, 5:])


@torch.no_grad()
def test_what_nobody_keeps_is_used_again() -> None:
    head, places = a_head(), set()
    swap = HeadSwap(head)
    for inference in (True, False, True, False):
        with swap.applied(), torch.inference_mode(inference):
            places.add(head(states()).data_ptr())
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


def test_a_forward_of_the_users_own_and_an_exception_leave_nothing_behind() -> None:
    head = a_head()
    with pytest.raises(RuntimeError), HeadSwap(head).applied():
        head(torch.zeros(1, 16, 7))
    assert "forward" not in vars(head)
    head.forward = own = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    with HeadSwap(head).applied():
        assert head.forward is own
    assert head.forward is own


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
