"""What ``model.generate`` says of a row that this library has made, whichever options made it.

A greedy row must be what ``generate`` gives for its prompt alone. For a sampled one ``generate`` is run along the row's
own tokens, and each of them must be the token that the noise of that row and position picks from the distribution that
``generate`` would draw from.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_families import gaps
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_batchllm import Generation
from hf_batchllm.inputs.seeds import as_int64
from hf_batchllm.kernels.reference.sample_torch import SAMPLE_BLOCK, block_noise, block_sums, exponential
from hf_batchllm.sampling.processor_chains import BLIND_TO_HISTORY
from hf_batchllm.sampling.rows_together import apply_blind

NEAR_TIE = 1e-3  # of scores
NEAR_EDGE = 1e-4  # of scores after noise: which of two so near is drawn says nothing
ROUNDING = 1e-5  # of scores: a warper may keep a token, or cut it off, by less than this
TRIES = 64  # with scores rounded otherwise


class Noise:
    """Makes the token the best of its block, and the block the best of all."""

    def __init__(self, seed: int, asked: Any, vocabulary: int) -> None:
        key = [torch.tensor([each]) for each in (as_int64(seed), asked.index, asked.sample, len(asked.generated))]
        self._tokens, self._blocks = exponential(torch.arange(vocabulary), *key).log(), block_noise(vocabulary, key)

    def inside(self, shares: torch.Tensor, token: int) -> torch.Tensor:  # [tries, vocabulary] -> [tries]
        """How far it is from giving another token; negative where it gives another."""
        block = token // SAMPLE_BLOCK
        scores = (shares.log() - self._tokens)[:, block * SAMPLE_BLOCK : (block + 1) * SAMPLE_BLOCK]
        of_blocks = block_sums(shares).log() - self._blocks
        return torch.minimum(_ahead(of_blocks, block), _ahead(scores, token % SAMPLE_BLOCK))


def _ahead(scores: torch.Tensor, place: int) -> torch.Tensor:
    """How far the score at ``place`` is above all others."""
    others = scores.clone()
    others[:, place] = -torch.inf
    return scores[:, place] - others.max(dim=-1).values


class Stray(AssertionError):
    """The row left what ``generate`` would do."""


def check_row(model: PreTrainedModel, row: Generation, options: dict[str, Any], seed: int | None = None) -> bool:
    """False if rounding decides somewhere in the row, so that it was looked at up to there only."""
    options = {name: value for name, value in options.items() if name != "num_return_sequences"}
    if options.get("do_sample", model.generation_config.do_sample):
        assert seed is not None
        return _check_sampled(model, row, options, seed)
    return _check_greedy(model, row, options)


def reference(model: PreTrainedModel, prompt_ids: list[int], options: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """The new tokens of ``generate`` for one prompt, and the scores [steps, vocabulary] that they were chosen by."""
    prompt = torch.tensor([prompt_ids], device=model.device)
    wanted = {"pad_token_id": 0, **options, "return_dict_in_generate": True, "output_scores": True}
    out: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), **wanted)
    return out.sequences[0, len(prompt_ids) :].tolist(), torch.cat(out.scores)


def _check_greedy(model: PreTrainedModel, row: Generation, options: dict[str, Any]) -> bool:
    expected, scores = reference(model, row.prompt_token_ids, options)
    close = (gaps(scores) < NEAR_TIE).nonzero()
    sure = int(close[0]) if len(close) else len(expected)
    assert row.token_ids[:sure] == expected[:sure], f"prompt {row.index}: {row.token_ids} is not {expected}"
    if sure == len(expected):
        assert row.token_ids == expected
    return sure == len(expected)


class _Warpers(LogitsProcessor):
    """Stands before the last processors that read scores alone, and notes the scores that they are given."""

    def __init__(self, every: LogitsProcessorList) -> None:
        first = len(every)
        while first and type(every[first - 1]) in BLIND_TO_HISTORY:
            first -= 1
        self.warpers = every[first:]
        self.scores = torch.empty(0)
        every.insert(first, self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores = scores.clone()
        return scores

    def may_give(self, token: int, noise: Noise) -> bool:
        """Whether the noise draws the token once the scores are rounded otherwise, as in a model that runs in batches.

        Two tokens may be at the same distance from a warper's edge: rounding decides then which of them is left.
        """
        generator = torch.Generator().manual_seed(0)
        moved = torch.randn(TRIES, self.scores.shape[-1], generator=generator) * ROUNDING
        scores = self.scores + moved.to(self.scores)
        left = apply_blind(self.warpers, scores).double().softmax(dim=-1).cpu()  # [tries, vocabulary]
        return bool(((left[:, token] > 0) & (noise.inside(left, token) >= -NEAR_EDGE)).any())


def _check_sampled(model: PreTrainedModel, row: Generation, options: dict[str, Any], seed: int) -> bool:
    whole, step = True, 0
    noted: list[_Warpers] = []
    make_processors = model._get_logits_processor

    def noting(*args: Any, **kwargs: Any) -> LogitsProcessorList:
        made = make_processors(*args, **kwargs)
        noted.append(_Warpers(made))
        return made

    def along_the_row(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal whole, step
        if step == len(row.token_ids):
            raise Stray(f"prompt {row.index} ended after {step} tokens, and generate goes on: {row.token_ids}")
        asked = SimpleNamespace(generated=row.token_ids[:step], sample=row.sample, index=row.index)
        shares, token = probabilities[:1].double().cpu(), row.token_ids[step]
        noise = Noise(seed, asked, shares.shape[-1])
        could_come, inside = bool(shares[0, token] > 0), float(noise.inside(shares, token))
        drawn = could_come and inside >= -NEAR_EDGE
        if not drawn and not noted[-1].may_give(token, noise):
            why = "is not what the noise draws" if could_come else "could not come"
            raise AssertionError(f"prompt {row.index}, token {step}: {token} {why}")
        whole &= drawn and inside > NEAR_EDGE
        step += 1
        return torch.tensor([[token]], device=probabilities.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", along_the_row)
        patch.setattr(model, "_get_logits_processor", noting)
        tokens, _ = reference(model, row.prompt_token_ids, options)
    assert tokens == row.token_ids
    return whole
