"""From logits to tokens: greedy or sampled, through transformers' own processors.

Noise depends on (seed, prompt index, sample index, position) alone, so it does not matter which requests share a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as processors

from .architecture import base_model
from .options import Options, make_processors
from .request import Request

# These look at the scores alone, never at the tokens before: they can be given all rows at once.
_BLIND_TO_HISTORY = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
)


_MINIMA = (processors.MinLengthLogitsProcessor, processors.MinNewTokensLengthLogitsProcessor)
_SCORES = 1 << 23  # drawn from at once, at most


class Sampler:
    def __init__(self, model: nn.Module, options: Options, seed: int | None) -> None:
        self._model = base_model(model)
        self._options = options
        self._seed = seed
        self._lists: dict[tuple[int, int], tuple[LogitsProcessorList, LogitsProcessorList]] = {}

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; ``logits`` is [requests, vocabulary] float32 and may be overwritten."""
        if not self._options.do_sample:
            return self._processed(logits, requests).argmax(dim=-1).tolist()  # the lowest index among equals
        tokens: list[int] = []
        block = max(1, _SCORES // logits.shape[-1])  # the distributions are in float64: not all of them at once
        for begin in range(0, len(requests), block):
            some = requests[begin : begin + block]
            scores = self._processed(logits[begin : begin + block], some)
            uniform = torch.tensor([self._uniform(request) for request in some], dtype=torch.float64)
            tokens += _draw(scores, uniform.to(scores.device)).tolist()
        return tokens

    # -- processors --------------------------------------------------------------------------------------------

    def _processed(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        for row, request in enumerate(requests):
            own, together = self._processors(request)  # the latter are the same for all: they depend on options alone
            if all(self._has_passed(processor, request) for processor in own):
                continue
            # Each row by itself: a processor that looks back sees the row's own tokens, without padding.
            ids = torch.from_numpy(request.tokens(0, request.length).astype(np.int64)).to(logits.device)
            logits[row] = own(ids[None], logits[row : row + 1])[0]
        return together(torch.empty(len(requests), 0, dtype=torch.long, device=logits.device), logits)

    def _has_passed(self, processor: LogitsProcessor, request: Request) -> bool:
        """Whether it only asks for a length that the request has reached."""
        minimum = max(
            self._options.config.min_new_tokens or 0, (self._options.config.min_length or 0) - len(request.prompt_ids)
        )
        return isinstance(processor, _MINIMA) and len(request.generated) >= minimum

    def _processors(self, request: Request) -> tuple[LogitsProcessorList, LogitsProcessorList]:
        """Those that must see each row by itself, then those that need not; in transformers' order."""
        key = (len(request.prompt_ids), request.max_new_tokens)
        if key not in self._lists:
            every = make_processors(self._model, self._options, *key)
            blind = 0
            while blind < len(every) and _is_blind(every[len(every) - 1 - blind]):
                blind += 1
            split = len(every) - blind
            self._lists[key] = LogitsProcessorList(every[:split]), LogitsProcessorList(every[split:])
        return self._lists[key]

    # -- noise -------------------------------------------------------------------------------------------------

    def _uniform(self, request: Request) -> float:
        """A number in (0, 1) that belongs to this request and position."""
        assert self._seed is not None
        counter = [0, len(request.generated), request.sample, request.index]
        bits = int(np.random.Philox(key=self._seed, counter=counter).random_raw())
        return ((bits >> 11) + 0.5) * 2.0**-53


def _is_blind(processor: LogitsProcessor) -> bool:
    return type(processor) in _BLIND_TO_HISTORY


def _draw(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row from softmax(scores), by inverting its distribution function at ``uniform``.

    In float64 and with 53 random bits: the far tail of a large vocabulary keeps its exact share.
    """
    probabilities = torch.softmax(scores.double(), dim=-1)  # [rows, vocabulary]
    cumulative = probabilities.cumsum(dim=-1)
    if not bool(torch.isfinite(cumulative[:, -1]).all()):
        raise RuntimeError(
            "the model gave logits that are not numbers (NaN or infinite): there is nothing to draw from"
        )
    target = (uniform * cumulative[:, -1]).unsqueeze(-1)
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # The last token with any probability: rounding may not push the draw beyond it.
    last = scores.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(tokens, last)
