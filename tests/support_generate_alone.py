"""Each row beside ``model.generate`` for that row's prompt alone: the scores of every step, and the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support_families import build, random_prompts
from support_parity import NEAR_TIE
from transformers import SynthIDTextWatermarkingConfig

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling import token_picking
from hf_batchllm.sampling.host_sampler import HostSampler

FAMILY = "llama"
SAMPLED = {"do_sample": True}
PAGE = {"min_shared_tokens": 4, "page_size": 8}
NEW_TOKENS = 10
BIAS = [[[5], -9.0], [[7, 8], 30.0], [[8, 9], -30.0], [[3, 4, 5], 10.0]]
SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3)


def prompts(count: int = 5) -> list[list[int]]:
    shared = random_prompts(random.Random(3), 97, "prefix", 4)
    repeating = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8]
    return [shared[0], [5], repeating, *shared[1:], [5]][:count]


@dataclass
class Trace:
    """What each sequence's tokens were picked from."""

    logits: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    scores: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, requests: Sequence[Request], logits: torch.Tensor, scores: torch.Tensor) -> None:
        assert logits.shape == scores.shape == (len(requests), 101)
        assert logits.dtype == scores.dtype == torch.float32
        for row, request in enumerate(requests):
            key = request.index, request.sample
            assert len(self.scores.setdefault(key, [])) == len(request.generated)
            self.scores[key].append(scores[row].clone())
            self.logits.setdefault(key, []).append(logits[row].clone())

    @property
    def changed(self) -> int:
        """Sequences in which some score is not the logit that it was."""
        return sum(
            any(
                not torch.equal(logits, scores)
                for logits, scores in zip(self.logits[key], self.scores[key], strict=True)
            )
            for key in self.scores
        )


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    trace = Trace()
    monkeypatch.setattr(
        token_picking, "HostSampler", lambda *args, **given: HostSampler(*args, **given | {"record": trace})
    )
    return trace


def alone(prompt: Sequence[int], tokens: Sequence[int], **options: Any) -> tuple[list[int], torch.Tensor]:
    """What ``generate`` does for one prompt: its new tokens, and the scores [steps, vocabulary] of each.

    Where it samples, it draws ``tokens``.
    """
    model: Any = build(FAMILY)
    ids, drawn = torch.tensor([list(prompt)]), iter(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([[next(drawn)]]))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{"pad_token_id": 0, "max_new_tokens": NEW_TOKENS, "do_sample": False}
            | {**options, "num_return_sequences": 1, "return_dict_in_generate": True, "output_scores": True},
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.scores)


def assert_each_as_alone(
    result: BatchResult, trace: Trace, options_of: Callable[[int, int], dict[str, Any]], least: float = 0.8
) -> None:
    """``options_of``: for ``generate``, by the row and the prompt."""
    whole = 0
    for row, generation in enumerate(result):
        options = options_of(row, generation.index)
        tokens, expected = alone(generation.prompt_token_ids, generation.token_ids, **options)
        best = expected.topk(2, dim=-1).values
        ties = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()[:, 0].tolist()
        sure = len(tokens) if options.get("do_sample") or not ties else ties[0] + 1
        found = torch.stack(trace.scores[generation.index, generation.sample])
        torch.testing.assert_close(found[:sure], expected[:sure], rtol=1e-4, atol=2e-4)
        if sure == len(tokens):
            assert generation.token_ids == tokens, f"row {row}"
            whole += 1
    assert whole >= least * len(result), "too many near ties to prove anything"


def as_alone(
    trace: Trace,
    given: dict[str, Any],
    theirs: dict[str, Any] | Callable[[int, int], dict[str, Any]] | None = None,
    asked: list[list[int]] | None = None,
    least: float = 0.8,
    **config: Any,
) -> BatchResult:
    """A call's result, each row of which is what ``generate`` gives for its prompt alone.

    ``theirs``: what ``generate`` is given, for all or by the row and the prompt, where it is not the same.
    """
    generator = BatchGenerator(build(FAMILY), **PAGE, **config)
    length = {} if "generation_config" in given else {"max_new_tokens": NEW_TOKENS}
    options = {"seed": 2, **length, **given}
    result: BatchResult = generator.generate(asked or prompts(), **options)
    chosen = given if theirs is None else theirs
    assert_each_as_alone(result, trace, chosen if callable(chosen) else lambda *_: chosen, least)
    return result
