"""Samplers on the host and requests for them, without a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

from hf_batchllm.inputs.resolve_options import resolve_options
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.sampling.host_sampler import HostSampler
from hf_batchllm.sampling.noise import Noise
from hf_batchllm.sampling.sampling_kernels import SamplingKernels

LARGE = 262_144
HISTORIES = ((1, 0), (7, 1), (30, 2), (4, 9), (30, 0), (12, 20))
# Options whose processors look at what came before.
LOOKING_BACK: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.5, "min_new_tokens": 2, "eos_token_id": [3, 1, 500, 101]},
    {"min_new_tokens": 10, "eos_token_id": 5},
    {"min_length": 31, "eos_token_id": [5, 6], "repetition_penalty": 2.0},
    {"min_length": 31, "min_new_tokens": 1, "eos_token_id": [5, 6]},
    {"min_new_tokens": 10, "eos_token_id": 1000},
    {"min_new_tokens": 10, "eos_token_id": None},
]


@cache
def large_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=LARGE, **sizes))


def sampler(
    seed: int | None, model: Any = None, kernels: SamplingKernels | None = None, record: Any = None, **options: Any
) -> HostSampler:
    model = model or large_model()
    options = {"do_sample": seed is not None, "max_new_tokens": 50, **options}
    every = [resolve_options(model, None, options)] * 10_000
    return HostSampler(model, every, seed, record=record, kernels=kernels)


def noise_for(requests: Sequence[Request], vocabulary: int, seed: int = 5, device: Any = "cpu") -> Noise:
    return Noise.for_requests(seed, requests, vocabulary, torch.device(device))


def requests_of(count: int, lengths: Sequence[tuple[int, int]] = ((3, 0),), vocabulary: int = 97) -> list[Request]:
    """Requests with so many tokens in the prompt and so many new ones, in turn."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        prompt, new = lengths[index % len(lengths)]
        request = Request(index, rng.integers(0, vocabulary, prompt).astype(np.int32), 50)
        request.generated = rng.integers(0, vocabulary, new).tolist()
        made.append(request)
    return made


class Discouraging(LogitsProcessor):
    """Of a kind that ``HostSampler`` does not know: it looks at the last token, and works in place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.arange(len(scores)), input_ids[:, -1]] -= 5
        return scores
