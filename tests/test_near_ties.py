"""In bfloat16 answers part from those of ``generate`` only where two logits nearly tie.

How near is what two of transformers' own runs, over SDPA and in eager mode, differ by. How many answers part, and at
what gaps, is printed by ``python tests/test_near_ties.py``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import PROMPT_KINDS, build, family_params, random_prompts, reference_generate

from hf_batchllm import BatchGenerator

FAMILIES = ["llama", "qwen3", "mistral"]
PROMPTS, NEW_TOKENS = 200, 24


@dataclass
class Parting:
    """The first token at which an answer is not that of ``generate``."""

    index: int
    at: int
    gap: float  # between the two tokens, in the logits of the reference run
    own_error: float  # most that the two reference runs differ by, anywhere in this answer


@dataclass
class Comparison:
    family: str
    prompts: int
    error: float  # most that the two reference runs differ by, anywhere
    partings: list[Parting]

    def __str__(self) -> str:
        share = len(self.partings) / self.prompts
        widest = max((parting.gap for parting in self.partings), default=0.0)
        over = sum(parting.gap > 2 * parting.own_error for parting in self.partings)
        return (
            f"{self.family:8}  {len(self.partings):3} of {self.prompts} answers part ({share:.1%}); widest gap "
            f"{widest:.4f}, the reference runs differ by up to {self.error:.4f}; {over} wider than twice their own"
        )


def compare(family: str, device: str, count: int = PROMPTS, new_tokens: int = NEW_TOKENS, **config: Any) -> Comparison:
    model = copy.deepcopy(build(family)).to(device, torch.bfloat16)
    rng = random.Random(12)
    prompts = [prompt for kind in PROMPT_KINDS for prompt in random_prompts(rng, 97, kind, -(-count // 7))]
    rng.shuffle(prompts)
    prompts = prompts[:count]
    with BatchGenerator(model, **config) as generator:
        ours = generator.generate(prompts, max_new_tokens=new_tokens, progress=False).token_ids
    model.set_attn_implementation("sdpa")
    theirs = [reference_generate(model, prompt, max_new_tokens=new_tokens) for prompt in prompts]
    logits = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        logits[implementation] = [
            logits_of(model, prompt, answer) for prompt, answer in zip(prompts, theirs, strict=True)
        ]
    partings, errors = [], []
    for index, (sdpa, eager) in enumerate(zip(logits["sdpa"], logits["eager"], strict=True)):
        errors.append(float((sdpa - eager).abs().max()))
        parted = [at for at, (a, b) in enumerate(zip(ours[index], theirs[index], strict=True)) if a != b]
        if parted:
            at = parted[0]
            gap = float((sdpa[at, theirs[index][at]] - sdpa[at, ours[index][at]]).abs())
            partings.append(Parting(index, at, gap, errors[-1]))
    return Comparison(family, len(prompts), max(errors), partings)


@torch.no_grad()
def logits_of(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:  # [answer, vocabulary]
    """What each token of the answer was chosen from."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("family", family_params(["llama"]))
def test_few_answers_part_over_plain_attention(family: str) -> None:
    check(compare(family, "cpu", 40, 12))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"fuse": False}, {"share_prefixes": False, "steps_per_sync": 8}], ids=str)
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_answers_part_at_near_ties_alone(family: str, config: dict[str, Any]) -> None:
    check(compare(family, "cuda", **config))


def check(comparison: Comparison) -> None:
    assert comparison.error > 0, "the reference runs are the same: nothing to hold a gap against"
    for parting in comparison.partings:
        assert parting.gap <= 2 * comparison.error, f"{parting}\n{comparison}"
    assert len(comparison.partings) < 0.5 * comparison.prompts, str(comparison)


if __name__ == "__main__":
    for each in FAMILIES:
        print(compare(each, "cuda" if torch.cuda.is_available() else "cpu"), flush=True)
