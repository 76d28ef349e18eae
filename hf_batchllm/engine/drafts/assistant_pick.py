"""How an assistant picks its guesses: as the answer's own token is picked, under the noise of the same position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...model.transfers import to_device
from ...notices import Notices
from ...planning.requests_and_prefixes import Request
from ...sampling.token_picking import TokenPicking
from ..device_loop.decode_rows import Pick


class AssistantPick:
    """in_graphs: from logits, seats, and how many new tokens there are. of_requests: the next token of each request,
    from its logits."""

    def __init__(
        self, in_graphs: Pick, of_requests: Callable[[torch.Tensor, Sequence[Request]], torch.Tensor] | None = None
    ) -> None:
        self.in_graphs = in_graphs
        self.of_requests = self._seated if of_requests is None else of_requests

    @staticmethod
    def of(picking: TokenPicking, requests: Sequence[Request], on_device: bool, notices: Notices) -> AssistantPick:
        """on_device: whether the answers' tokens are picked there."""
        plain = picking.grammars is None and all(each in picking.edits for each in picking.different_options)
        seated = picking.on_device(requests)[0] if plain else None
        if seated is None or any(map(seated.looks_back, requests)):
            return AssistantPick(_most_likely)  # more than logits and noise tells what the answer's token is
        if on_device:
            return AssistantPick(seated)
        sampler = picking.by_host(None, notices, requests)

        def by_host(logits: torch.Tensor, shadows: Sequence[Request]) -> torch.Tensor:
            return sampler.without_waiting(logits.float(), shadows)

        return AssistantPick(_most_likely, by_host)

    def _seated(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        seats = to_device(np.array([request.seat for request in requests], dtype=np.int64), logits.device)
        made = to_device(np.array([request.made for request in requests], dtype=np.int32), logits.device)
        return self.in_graphs(logits, seats, made)


def _most_likely(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.argmax(dim=-1)
