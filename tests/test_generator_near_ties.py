"""In bfloat16 answers part from those of ``generate`` only where two logits nearly tie.

How near is what two of transformers' own runs, over SDPA and in eager mode, differ by. How many answers part, and at
what gaps, is printed by ``python tests/test_generator_near_ties.py``.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support_families import PROMPT_KINDS, build, family_params, random_prompts, reference_generate

from hf_batchllm import BatchGenerator

FAMILIES = ["llama", "qwen3", "mistral"]
PROMPTS, NEW_TOKENS = 200, 24
CONFIGS: list[dict[str, Any]] = [{}, {"fuse": False}, {"share_prefixes": False, "steps_per_sync": 8}]


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
    eager_parts: int  # answers with which a run in eager mode would not go along

    def __str__(self) -> str:
        share = len(self.partings) / self.prompts
        widest = max((parting.gap for parting in self.partings), default=0.0)
        over = sum(parting.gap > 2 * parting.own_error for parting in self.partings)
        return (
            f"{self.family:8} {len(self.partings):3} of {self.prompts} answers part ({share:.1%}; of eager "
            f"mode's {self.eager_parts}); widest gap {widest:.4f}, the references differ by up to {self.error:.4f}; "
            f"{over} gaps are wider than twice what they differ by in that answer"
        )


@dataclass
class Reference:
    """What transformers makes of some prompts, one at a time, and the logits of that over both implementations."""

    model: Any
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: dict[str, list[torch.Tensor]]

    @classmethod
    @functools.cache
    def of(cls, family: str, device: str, count: int, new_tokens: int) -> Reference:
        model = copy.deepcopy(build(family)).to(device, torch.bfloat16)
        rng = random.Random(12)
        prompts = [prompt for kind in PROMPT_KINDS for prompt in random_prompts(rng, 97, kind, -(-count // 7))]
        rng.shuffle(prompts)
        prompts = prompts[:count]
        model.set_attn_implementation("sdpa")
        answers = [reference_generate(model, prompt, max_new_tokens=new_tokens) for prompt in prompts]
        logits = {}
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            logits[implementation] = [logits_of(model, *each) for each in zip(prompts, answers, strict=True)]
        return cls(model, prompts, answers, logits)


def compare(family: str, device: str, count: int = PROMPTS, new_tokens: int = NEW_TOKENS, **config: Any) -> Comparison:
    reference = Reference.of(family, device, count, new_tokens)
    with BatchGenerator(reference.model, **config) as generator:
        result = generator.generate(reference.prompts, max_new_tokens=new_tokens, progress=False)
    partings, errors, eager_parts = [], [], 0
    for index, (ours, theirs) in enumerate(zip(result.token_ids, reference.answers, strict=True)):
        sdpa, eager = reference.logits["sdpa"][index], reference.logits["eager"][index]
        errors.append(float((sdpa - eager).abs().max()))
        eager_parts += eager.argmax(dim=-1).tolist() != theirs
        parted = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if parted:
            at = parted[0]
            gap = float((sdpa[at, theirs[at]] - sdpa[at, ours[at]]).abs())
            partings.append(Parting(index, at, gap, errors[-1]))
    return Comparison(family, len(reference.prompts), max(errors), partings, eager_parts)


@torch.no_grad()
def logits_of(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:  # [answer, vocabulary]
    """What each token of the answer was chosen from."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("family", family_params(["llama"]))
def test_few_answers_part_over_plain_attention(family: str) -> None:
    check(compare(family, "cpu", 40, 12))


@pytest.mark.gpu
@pytest.mark.parametrize("family", family_params(FAMILIES))
def test_answers_part_at_near_ties_alone(family: str) -> None:
    for config in CONFIGS:
        check(compare(family, "cuda", 100, 16, **config))


def check(comparison: Comparison) -> None:
    assert comparison.error > 0, "the reference runs are the same: nothing to hold a gap against"
    for parting in comparison.partings:
        assert parting.gap <= 2 * comparison.error, f"{parting}\n{comparison}"
    assert len(comparison.partings) <= 1.5 * comparison.eager_parts + 0.05 * comparison.prompts, str(comparison)


if __name__ == "__main__":
    on = "cuda" if torch.cuda.is_available() else "cpu"
    for each in FAMILIES:
        for settings in CONFIGS:
            print(compare(each, on, **settings), settings or "", flush=True)
