"""Where a call's tokens are picked, on the device or by the host, and what picks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..inputs.options import Options
from ..inputs.seeds import Seeds
from ..notices import Notices
from ..planning.requests_and_prefixes import Request
from .call_grammars import CallGrammars
from .device_sampler import may_pick_on, penalised_by, why_picked_by_host
from .grammar_masks import GrammarMasks
from .host_sampler import HostSampler, RecordScores
from .sampling_kernels import sampling_kernels
from .seated_sampler import SeatedSampler


@dataclass(frozen=True)
class TokenPicking:
    """options: of each prompt of the list, by a request's ``index``. places: the prompts that run. samples: of each.

    grammars: of each prompt of the list, if any has one.
    """

    model: nn.Module
    device: torch.device
    vocabulary: int
    options: Sequence[Options]
    places: Sequence[int]
    samples: Sequence[int]
    seed: Seeds | None
    amd: bool = False  # whether kernels were asked for by name, without which none run on AMD's cards
    grammars: CallGrammars | None = None

    @property
    def different_options(self) -> list[Options]:
        return list(dict.fromkeys(self.options[place] for place in self.places))

    @property
    def penalised(self) -> int:
        """How many sequences have a repetition penalty."""
        penalised = {options for options in self.different_options if penalised_by(options)}
        return sum(
            count for place, count in zip(self.places, self.samples, strict=True) if self.options[place] in penalised
        )

    @property
    def changes_logits(self) -> bool:
        """Whether something is changed in the logits before a token is picked on the device."""
        different = self.different_options
        return self.penalised > 0 or any(each.config.min_new_tokens or each.config.min_length for each in different)

    def why_by_host(self, steps_on_their_way: int) -> str | None:
        """Why the host picks the tokens; None if the device does."""
        if self.grammars is not None:
            name = self.grammars.option
            return f"`{name}` is worked out by the host, which waits for each step: steps are not queued ahead"
        different = self.different_options
        return why_picked_by_host(
            different, self.model, self.device, steps_on_their_way, self.penalised, self.vocabulary, amd=self.amd
        )

    def by_host(self, record: RecordScores | None, notices: Notices) -> HostSampler:
        kernels = sampling_kernels(self.device, self.amd) if may_pick_on(self.device, self.amd) else None
        masks = None if self.grammars is None else self._masks(self.grammars)
        return HostSampler(
            self.model, self.options, self.seed, record=record, notices=notices, kernels=kernels, grammars=masks
        )

    def _masks(self, grammars: CallGrammars) -> GrammarMasks:
        ends = [each.eos_token_ids for each in self.options]
        return grammars.masks(ends, pinned=self.device.type == "cuda")

    def on_device(self, requests: Sequence[Request]) -> tuple[SeatedSampler, Callable[..., None]]:
        """What picks the tokens, and the kernel ``advance``, which takes them to the next step of a burst."""
        kernels = sampling_kernels(self.device, self.amd)
        return SeatedSampler(requests, self.options, self.seed, self.device, kernels), kernels.advance
