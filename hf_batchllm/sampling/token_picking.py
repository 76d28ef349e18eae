"""Where a call's tokens are picked, on the device or by the host, and what picks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..inputs.base_model import base_model
from ..inputs.options import Options
from ..inputs.seeds import Seeds
from ..notices import Notices
from ..planning.requests_and_prefixes import Request
from .call_grammars import CallGrammars
from .device_options import edits_or_why_not, may_keep, may_pick_on, penalised_by, why_picked_by_host
from .grammar_masks import GrammarMasks
from .host_sampler import HostSampler, RecordScores
from .logit_edits import LogitEdits
from .sampling_kernels import SamplingKernels, sampling_kernels
from .seated_sampler import SeatedSampler, room_to_look_back
from .step_tensors import StepTensors


@dataclass(frozen=True)
class TokenPicking:
    """options: of each prompt of the list, by a request's ``index``. places: the prompts that run. samples,
    prompt_tokens, new_tokens: of each, the last as the most that it may get.

    grammars: of each prompt of the list, if any has one.
    """

    model: nn.Module
    device: torch.device
    vocabulary: int
    options: Sequence[Options]
    places: Sequence[int]
    samples: Sequence[int]
    prompt_tokens: Sequence[int]
    new_tokens: Sequence[int]
    seed: Seeds | None
    amd: bool = False  # whether kernels were asked for by name, without which none run on AMD's cards
    grammars: CallGrammars | None = None

    @property
    def different_options(self) -> list[Options]:
        return list(dict.fromkeys(self.options[place] for place in self.places))

    @cached_property
    def edits(self) -> dict[Options, LogitEdits]:
        """What is done to single logits by each of the options that the device can serve."""
        found = {each: edits_or_why_not(each, self.model, self.vocabulary) for each in self.different_options}
        return {each: edits for each, edits in found.items() if isinstance(edits, LogitEdits)}

    @cached_property
    def kept_bytes(self) -> int:
        """What the device keeps of the tokens that sequences have had."""
        found = 0
        for place, count, prompt, new in zip(
            self.places, self.samples, self.prompt_tokens, self.new_tokens, strict=True
        ):
            options = self.options[place]
            edits = self.edits.get(options, LogitEdits())
            bits = penalised_by(options) + (edits.prompt_penalty != 1)
            found += count * (bits * self.vocabulary // 8 + 4 * room_to_look_back(edits.reach(), prompt, new))
        return found

    @property
    def changes_logits(self) -> bool:
        """Whether something is changed in the logits before a token is picked on the device."""
        different = self.different_options
        return any(each.any for each in self.edits.values()) or any(
            penalised_by(each) or each.config.min_new_tokens or each.config.min_length for each in different
        )

    def why_by_host(self, steps_on_their_way: int) -> str | None:
        """Why the host picks the tokens; None if the device does."""
        if self.grammars is not None:
            name = self.grammars.option
            return f"`{name}` is worked out by the host, which waits for each step: steps are not queued ahead"
        different = self.different_options
        return why_picked_by_host(
            different, self.model, self.device, steps_on_their_way, self.kept_bytes, self.vocabulary, amd=self.amd
        )

    @property
    def in_graphs(self) -> bool:
        """Whether the model may run in graphs, also where the host picks the tokens."""
        return may_pick_on(self.device, self.amd)

    def by_host(
        self, record: RecordScores | None, notices: Notices, requests: Sequence[Request] = (), alone: bool = True
    ) -> HostSampler:
        """``alone``: whether it is to pick for all ``requests``, also for those that the device could pick for."""
        kernels = self.kernels if may_pick_on(self.device, self.amd) else None
        masks = None if self.grammars is None else self._masks(self.grammars)
        plain: list[bool] = []
        if not alone and kernels is not None and record is None and may_keep(self.kept_bytes):
            bound = [False] * len(self.options) if self.grammars is None else [*map(bool, self.grammars.each)]
            plain = [each in self.edits and not own for each, own in zip(self.options, bound, strict=True)]
        seated = self.on_device(requests)[0] if any(plain) else None
        return HostSampler(
            self.model, self.options, self.seed, record=record, notices=notices, kernels=kernels, grammars=masks,
            seated=seated, plain=plain,
        )  # fmt: skip

    def _masks(self, grammars: CallGrammars) -> GrammarMasks:
        ends = [each.eos_token_ids for each in self.options]
        return grammars.masks(ends, pinned=self.device.type == "cuda")

    @cached_property
    def kernels(self) -> SamplingKernels:
        """What picks tokens on the device."""
        return sampling_kernels(self.device, self.amd)

    def on_device(
        self,
        requests: Sequence[Request],
        keeps_scores: bool = False,
        tensors: StepTensors | None = None,
    ) -> tuple[SeatedSampler, Callable[..., None]]:
        """What picks the tokens, and the kernel ``advance``, which takes them to the next step of a burst."""
        positions = getattr(base_model(self.model).config, "max_position_embeddings", None)
        sampler = SeatedSampler(
            requests, self.options, self.seed, self.device, self.kernels, self.edits, positions, keeps_scores, tensors,
        )  # fmt: skip
        return sampler, self.kernels.advance
