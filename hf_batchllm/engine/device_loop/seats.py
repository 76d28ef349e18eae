"""Seats: the last token of every request, kept on the device.

Each request has a seat of its own for the whole call, so that its next step can be launched before the host has seen
its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...model.batch import TokenBatch, sent
from ...planning.requests_and_prefixes import Request

_PAD = -2  # fills up short sets of tokens; -1 would not do: it stands where no token was picked


@dataclass(frozen=True)
class Seats:
    """One seat for each request, and a last one that belongs to none: padding rows take it."""

    last: torch.Tensor  # [seats] int64  the request's last token
    ended: torch.Tensor  # [seats] bool  whether that token ends the answer
    eos: torch.Tensor  # [any] int64  the tokens that end answers; [sets, any], padded, where requests differ
    which: torch.Tensor | None = None  # [seats] int32  the request's row of `eos`, where requests differ
    keep_tokens: bool = True  # otherwise nothing is in `last`, and batches have the tokens

    @classmethod
    def of(cls, stop_tokens: Sequence[frozenset[int]], device: torch.device, keep_tokens: bool = True) -> Seats:
        """``stop_tokens``: of each request, the tokens that end it."""
        sets = {tokens: number for number, tokens in enumerate(dict.fromkeys(stop_tokens))} or {frozenset(): 0}
        most = max(map(len, sets))
        eos = [[*sorted(tokens), *[_PAD] * (most - len(tokens))] for tokens in sets]
        which = [*(sets[tokens] for tokens in stop_tokens), 0]
        with torch.inference_mode(False):  # written in steps that may run outside of it
            return cls(
                torch.zeros(len(which), dtype=torch.long, device=device),
                torch.zeros(len(which), dtype=torch.bool, device=device),
                torch.tensor(eos if len(sets) > 1 else eos[0], dtype=torch.long, device="cpu").to(device),
                torch.tensor(which, dtype=torch.int32, device="cpu").to(device) if len(sets) > 1 else None,
                keep_tokens,
            )

    @property
    def any_eos(self) -> bool:
        return self.eos.numel() > 0

    def put(self, requests: Sequence[Request]) -> None:
        """Set the seats of requests that go on, whose tokens the host has all seen."""
        numbers = [(request.seat, request.generated[-1]) for request in requests if request.generated]
        if numbers:
            self.set(numbers)

    def set(self, numbers: Sequence[tuple[int, int]]) -> None:
        """``numbers``: seats, and the token of each."""
        seats, tokens = torch.tensor(numbers, device=self.last.device).T
        self.last[seats] = tokens
        self.ended[seats] = False

    def fill_in(self, tokens: TokenBatch) -> None:
        """Decode rows of a batch on the device go on from the tokens at their seats."""
        rows = len(tokens.row_seats)
        if rows and self.keep_tokens:
            tokens.input_ids[:rows] = self.last[tokens.row_seats]

    def store(self, seats: torch.Tensor, picked: torch.Tensor) -> None:
        """Keep the tokens that a step has picked for the requests at ``seats``, a host's tensor; -1 for no token."""
        seats = sent(seats, self.last.device)
        self.last[seats] = picked.clamp(min=0)  # the next step may be launched already, and looks it up
        if self.any_eos:
            eos = self.eos if self.which is None else self.eos[self.which[seats]]
            self.ended[seats] = (picked[:, None] == eos).any(dim=1)
