"""The candidates for a group's next beams: the best sums of log-probabilities, after transformers' processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import nn

from ...errors import NothingToDrawError
from ...inputs.base_model import base_model
from ...inputs.options import Options
from ...inputs.seeds import Seeds, as_int64, noise_key
from ...kernels.lists.work_lists import sent
from ...kernels.reference.sample_torch import exponential
from ...model.float64 import at_float64, has_float64
from ...model.transfers import start_copy_to_host, to_device
from ...notices import Notices
from ...sampling.host_sampler import rows_at_once
from ...sampling.processor_chains import ChainLayout, ProcessorChain, ProcessorChains
from ...sampling.rows_together import Histories, apply_blind, apply_looking_back
from ...sampling.step_tensors import StepTensors
from .group import BeamGroup
from .search_rules import Searches, SearchRules

# Before, `generate` took drawn candidates in the order in which they were drawn.
_BEST_FIRST = Version(Version(transformers.__version__).base_version) >= Version("5.24")
_NOISE_MEMORY = 16  # drawing takes so many times the memory of the scores


@dataclass(frozen=True)
class Candidates:
    """The candidates of groups whose prompts have the same options, and so the same searches."""

    groups: list[BeamGroup]
    scores: torch.Tensor  # [groups, candidates]
    parents: torch.Tensor  # [groups, candidates]  the number of the beam that each goes on from
    tokens: torch.Tensor  # [groups, candidates]  the token that each adds


class BeamScores:
    """From logits to ``Candidates``, for all groups of a call. ``options``: of each prompt, by its index."""

    def __init__(
        self,
        model: nn.Module,
        options: Sequence[Options],
        groups: Sequence[BeamGroup],
        seed: Seeds | None,
        notices: Notices,
        tensors: StepTensors | None = None,
    ) -> None:
        self._seed = seed
        self._tensors = tensors
        self._chains = ProcessorChains(model, options, notices)
        device = base_model(model).device
        if any(each.do_sample for each in options) and not has_float64(device):
            notices(
                "sampled beams",
                f"{device} has no float64, so the candidates of sampled beams are drawn on the host, from a copy of "
                "all scores: slower than beams without `do_sample`",
            )
        alike: dict[Options, list[int]] = {}
        for number, group in enumerate(groups):
            alike.setdefault(options[group.root.index], []).append(number)
        positions = getattr(base_model(model).config, "max_position_embeddings", None)
        for some, numbers in alike.items():
            # By the options alone: in ``generate`` a user's MaxLengthCriteria does not change the length penalty.
            lengths = [len(groups[number].root.prompt_ids) for number in numbers]
            searches = Searches(search_rules_of(some), [some.max_new_tokens(length, positions) for length in lengths])
            for place, number in enumerate(numbers):
                groups[number].searches, groups[number].place = searches, place

    @property
    def calls_custom_code(self) -> bool:
        """Whether processors of the model's user are called."""
        return self._chains.calls_custom_code

    def may_repeat(self, groups: Sequence[BeamGroup]) -> bool:
        """Whether candidates may be found twice from the same logits."""
        return self._chains.may_repeat([group.root for group in groups])

    @torch.no_grad()
    def __call__(self, groups: Sequence[BeamGroup], logits: torch.Tensor) -> Callable[[], list[Candidates]]:
        """Launch all of it. The function that comes back waits for the candidates.

        ``logits`` [rows, vocabulary] float32: a row for each beam, in the groups' order; one for a group without.
        """
        self._chains.forget_done()
        alike: dict[tuple[ChainLayout, bool], list[int]] = {}
        chains = [self._chains.of(group.root) for group in groups]
        begins, row = [], 0
        for number, (group, chain) in enumerate(zip(groups, chains, strict=True)):
            begins.append(row)
            row += len(group.beams) or 1
            alike.setdefault((chain.layout, bool(group.beams)), []).append(number)
        launched = []
        for (layout, begun), numbers in alike.items():
            width = layout.options.num_beams
            at_once = max(1, rows_at_once(logits) // (width * (_NOISE_MEMORY if layout.options.do_sample else 1)))
            parts = []
            for begin in range(0, len(numbers), at_once):
                some = numbers[begin : begin + at_once]
                rows = [row for each in some for row in range(begins[each], begins[each] + (width if begun else 1))]
                # Mostly they lie side by side, which needs no copy.
                together = rows == list(range(rows[0], rows[0] + len(rows)))
                if together:
                    mine = logits[rows[0] : rows[0] + len(rows)]
                else:
                    mine = logits[to_device(np.array(rows), logits.device)]
                parts.append(self._best([groups[each] for each in some], mine, [chains[each] for each in some]))
            launched.append(([groups[each] for each in numbers], layout, [*map(torch.cat, zip(*parts, strict=True))]))
        found = [(some, layout, [start_copy_to_host(each) for each in columns]) for some, layout, columns in launched]
        vocabulary = logits.shape[-1]
        return lambda: [self._candidates(*each, vocabulary) for each in found]

    def _candidates(
        self,
        groups: list[BeamGroup],
        layout: ChainLayout,
        columns: list[Callable[[], np.ndarray]],  # as from `_best`, on their way to the host
        vocabulary: int,
    ) -> Candidates:
        best, index = (torch.from_numpy(wait()) for wait in columns)
        if layout.options.do_sample and bool(best.isnan().any()):
            raise NothingToDrawError
        return Candidates(groups, best, index // vocabulary, index % vocabulary)

    def _best(
        self, groups: list[BeamGroup], logits: torch.Tensor, of_groups: list[ProcessorChain]
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [groups, candidates]
        """The sums of the best candidates, and where each stands among the tokens of all beams.

        Nothing here waits for the device. Where there was nothing to draw from, the sums are NaN.
        """
        searches, places = groups[0].searches, [group.place for group in groups]
        rules = searches.rules
        width, vocabulary = rules.width, logits.shape[-1]
        if not groups[0].beams:  # at first all beams are the same
            logits = logits.repeat_interleave(width, dim=0)
        log_probs = logits.log_softmax(dim=-1)
        requests = [unit for group in groups for unit in group.beams or [group.root] * width]
        chains = [chain for chain in of_groups for _ in range(width)]
        history = Histories(requests, logits.device).of
        scores = apply_blind(chains[0].blind, apply_looking_back(log_probs, requests, chains, history, together=width))
        made = [group.made for group in groups]
        if self._tensors is not None:
            rows = np.concatenate([group.root.index * width + np.arange(width) for group in groups])
            self._tensors.put(np.repeat(made, width), rows, logits, scores)
        running = sent(searches.running[places], scores.device)  # [groups, width]
        sums = (scores.view(len(groups), width, vocabulary) + running[:, :, None]).flatten(1)
        if chains[0].layout.options.do_sample:
            assert self._seed is not None
            sums = at_float64(sums)
            noise = [noise_key(self._seed, group.root.index) for group in groups]
            index = draw_candidates(sums, rules.candidates, width, noise, made)
            best = sums.gather(1, index)
            if _BEST_FIRST:
                best, order = best.sort(dim=-1, descending=True)
                index = index.gather(1, order)
            drawable = torch.isfinite(sums.amax(dim=-1, keepdim=True))
            return best.masked_fill(~drawable, torch.nan), index
        best, index = sums.topk(rules.candidates)
        return best, index


def draw_candidates(
    sums: torch.Tensor,  # [groups, beams * vocabulary]  on a device with float64
    count: int,
    width: int,
    noise: Sequence[tuple[int, int]],  # [groups]  (seed, the prompt's number)
    made: Sequence[int],  # [groups]  new tokens of each beam
) -> torch.Tensor:  # [groups, count]
    """Draw ``count`` candidates of each group without replacement, each from the softmax of those that are left.

    That gives the candidates whose log-probabilities are the highest after Gumbel noise is added. The noise depends on
    the seed, the prompt, the beam's number, the position and the token: which groups share a step does not matter.
    """
    token = torch.arange(sums.shape[-1] // width, device=sums.device)
    beam = torch.arange(width, device=sums.device)[:, None]
    keys = np.array([[as_int64(seed) for seed, _ in noise], [number for _, number in noise], made], dtype=np.int64)
    key, prompt, position = to_device(keys, sums.device)[:, :, None, None]
    drawn = exponential(token, key, prompt, beam, position)  # [groups, width, tokens]
    return (sums.double().log_softmax(dim=-1) - drawn.flatten(1).log()).topk(count).indices


def search_rules_of(options: Options) -> SearchRules:
    config, eos = options.config, options.config._eos_token_tensor
    return SearchRules.of(
        options.num_beams, 0 if eos is None else eos.shape[0], config.early_stopping, config.length_penalty
    )
