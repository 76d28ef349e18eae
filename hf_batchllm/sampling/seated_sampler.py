"""Picks tokens on the device and keeps each request's last one at the request's seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..inputs.options import Options
from ..inputs.seeds import Seeds, as_int64, noise_key
from ..kernels.lists.token_edits import History
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request
from .device_options import minimum_of, penalised_by
from .device_sampler import DeviceSampler, RowsState
from .logit_edits import LogitEdits
from .sampling_kernels import SamplingKernels
from .step_tensors import StepTensors


class SeatedSampler:
    """A DeviceSampler that knows which request has which seat. The last seat belongs to no request.

    ``options``: of each prompt; a request's ``index`` is its prompt's place among them. ``edits``: of each of the
    options, what is done to single logits. ``positions``: as many as the model has, if it says so.
    ``keeps_scores``: whether ``take_scores`` gives what the latest tokens were drawn from. ``tensors``: get them, step
    by step, and have room for them.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        options: Sequence[Options],
        seed: Seeds | None,
        device: torch.device,
        kernels: SamplingKernels,
        edits: Mapping[Options, LogitEdits],
        positions: int | None,
        keeps_scores: bool = False,
        tensors: StepTensors | None = None,
    ) -> None:
        self._keeps_scores = keeps_scores
        self._tensors = tensors
        self._rows: torch.Tensor | None = None  # [seats] int32  each request's row there
        self._edits = edits
        self._positions = positions
        self._requests = requests
        self._options = [options[request.index] for request in requests]
        self._seeds = seed
        self._device = device
        self._kernels = kernels
        self._sampler: DeviceSampler | None = None  # made once the width of logits is known
        self._numbers: torch.Tensor | None = None  # [numbers, seats] int32, as ``_Numbers``
        self._own_seed: torch.Tensor | None = None  # [seats] int64, if prompts have seeds of their own
        self._seen: torch.Tensor | None = None  # [lines, words]  tokens that a request has had, prompt included
        self._lines: list[int] = []  # of each seat: its line in `_seen`, -1 for none
        self._prompt_seen: torch.Tensor | None = None  # [lines, words]  tokens of a request's prompt
        self._history: torch.Tensor | None = None  # [any] int32  the tokens that requests look back at
        self._most_known = 0  # of a request there

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if self._sampler is None:
            self._sampler = self._make_sampler(logits.shape[1])
        assert self._numbers is not None
        of = _Numbers(*self._numbers.index_select(1, seats))
        seed = None if self._own_seed is None else self._own_seed.index_select(0, seats)
        history = None
        if self._history is not None:
            history = History(self._history, of.begin, of.of_prompt, made, self._most_known)
        rows = RowsState(
            of.prompt, of.sample, made, of.kind, of.minimum, of.line, self._seen, seed, history,
            of.prompt_line, self._prompt_seen, of.first_at, of.last_at,
        )  # fmt: skip
        tokens = self._sampler(logits, rows)
        if self._tensors is not None:
            assert self._rows is not None
            self._tensors.note(self._rows[seats], made, logits, self.take_scores() if self._keeps_scores else None)
        return tokens

    def looks_back(self, request: Request) -> bool:
        """Whether the device keeps which tokens its answer has, or which of them came last."""
        options = self._options[request.seat]
        return penalised_by(options) or self._edits.get(options, LogitEdits()).reach() != 0

    def take_scores(self) -> torch.Tensor:  # [rows, vocabulary] float32
        """What the latest tokens were drawn from. Can be asked for once: they take much memory."""
        assert self._sampler is not None and self._sampler.scores is not None
        scores, self._sampler.scores = self._sampler.scores, None
        return scores

    def put_back(self, requests: Sequence[Request]) -> None:
        """Forget tokens picked in a step that failed. The host has seen all tokens of these requests."""
        if self._sampler is not None:
            self._sampler.scores = None
        if self._sampler is None or self._seen is None:
            return
        for request in requests:
            if self._lines[request.seat] >= 0:
                bits = self._sampler.seen(request.ids(0, request.length))
                self._seen[self._lines[request.seat]] = torch.from_numpy(bits).to(self._device)

    def _make_sampler(self, vocabulary: int) -> DeviceSampler:
        requests, options = self._requests, self._options
        common = self._seeds if isinstance(self._seeds, int) else None
        longest = max((request.max_new_tokens for request in requests), default=1)
        sampler = DeviceSampler(
            dict.fromkeys(options), common, vocabulary, self._device, self._kernels, self._edits, longest,
            self._keeps_scores,
        )  # fmt: skip
        lines, bits = self._bits(
            [each for each, penalised in zip(requests, map(penalised_by, options), strict=True) if penalised], sampler
        )
        penalties = [self._edits.get(each, LogitEdits()).prompt_penalty != 1 for each in options]
        prompt_lines, prompt_bits = self._bits(
            [each for each, some in zip(requests, penalties, strict=True) if some], sampler
        )
        begins, known = self._make_history()
        noise = [noise_key(self._seeds or 0, request.index) for request in requests]
        numbers = [
            _Numbers(
                prompt=number,
                sample=request.sample,
                kind=sampler.kinds[each],
                minimum=minimum_of(each, request.prompt_tokens),
                line=lines.get(request, -1),
                prompt_line=prompt_lines.get(request, -1),
                begin=begins.get(request, -1),
                of_prompt=known.get(request, 0),
                first_at=0 if request.prompt_tokens == 1 else -1,
                last_at=each.max_new_tokens(request.prompt_tokens, self._positions) - 1,
            )
            for request, (_, number), each in zip(requests, noise, options, strict=True)
        ]
        of_no_request = _Numbers(0, 0, 0, 0, -1, -1, -1, 0, -1, -1)
        with torch.inference_mode(False):  # a later step may run outside it
            self._numbers = to_device(np.array([*numbers, of_no_request], dtype=np.int32).T.copy(), self._device)
            if self._seeds is not None and common is None:
                own = np.array([*(as_int64(seed) for seed, _ in noise), 0], dtype=np.int64)
                self._own_seed = to_device(own, self._device)
            if bits:
                self._seen = to_device(np.stack(bits), self._device)
            if prompt_bits:
                self._prompt_seen = to_device(np.stack(prompt_bits), self._device)
            if self._tensors is not None:
                own_rows = [*map(self._tensors.row_of, requests), self._tensors.nobodys_row]
                self._rows = to_device(np.array(own_rows, dtype=np.int32), self._device)
        self._lines = [lines.get(request, -1) for request in requests]
        return sampler

    @staticmethod
    def _bits(requests: Sequence[Request], sampler: DeviceSampler) -> tuple[dict[Request, int], list[np.ndarray]]:
        """A line of bits for each of these requests, for the tokens of its prompt."""
        bits = [sampler.seen(request.prompt_ids) for request in requests]
        return {request: line for line, request in enumerate(requests)}, bits

    def _make_history(self) -> tuple[dict[Request, int], dict[Request, int]]:
        """Where the tokens of each request begin that are looked back at, and how many of them are its prompt's."""
        begins: dict[Request, int] = {}
        known: dict[Request, int] = {}
        end = 0
        for request, options in zip(self._requests, self._options, strict=True):
            reach = self._edits.get(options, LogitEdits()).reach()
            if reach == 0:
                continue
            known[request] = request.prompt_tokens if reach is None else min(reach, request.prompt_tokens)
            begins[request] = end
            room = room_to_look_back(reach, request.prompt_tokens, request.max_new_tokens)
            self._most_known = max(self._most_known, room)
            end += room
        if begins:
            tokens = np.full(end, -1, dtype=np.int32)
            for request, begin in begins.items():
                last = request.prompt_ids[request.prompt_tokens - known[request] : request.prompt_tokens]
                tokens[begin : begin + len(last)] = last
            with torch.inference_mode(False):  # a later step may run outside it
                self._history = to_device(tokens, self._device)
        return begins, known


def room_to_look_back(reach: int | None, prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens that a request may have on the device, where so many of its prompt's are looked back at (None: all)."""
    if reach == 0:
        return 0
    return (prompt_tokens if reach is None else min(reach, prompt_tokens)) + max_new_tokens + 1


class _Numbers(NamedTuple):
    """Numbers of a seat, or of several."""

    prompt: Any
    sample: Any
    kind: Any
    minimum: Any
    line: Any
    prompt_line: Any
    begin: Any  # in the tokens to look back at
    of_prompt: Any  # how many of them are its prompt's
    first_at: Any
    last_at: Any
