"""Passes the tokens of a sequence on to a streamer of transformers, as ``generate`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import OptionValueError
from ..inputs.options import Options
from ..inputs.padded_batch import PaddedBatch
from ..inputs.prompts import Prompt
from ..planning.requests_and_prefixes import Request
from ..planning.step import Step
from .loop import Watch


class Feed:
    """``prompt``: [1, tokens]; None if it cannot run: the streamer is then only told of the end."""

    def __init__(self, streamer: Any, prompt: torch.Tensor | None) -> None:
        self._streamer = streamer
        self._prompt = prompt
        self._told = 0  # new tokens that were passed on
        self._begun = self._ended = False

    def begin(self) -> None:
        """Pass the prompt on, after the first step: where that fails, ``generate`` may run instead, and begins anew."""
        if self._begun:
            return
        self._begun = True
        if self._prompt is not None:
            self._streamer.put(self._prompt.cpu())

    def tell(self, request: Request) -> None:
        """Pass new tokens on."""
        self.begin()
        for token in request.generated[self._told :]:
            self._told += 1
            self._streamer.put(torch.tensor([token], device="cpu"))

    def end(self) -> None:
        self.begin()
        if not self._ended:
            self._ended = True
            self._streamer.end()

    def along(
        self,
        run: Callable[[Watch], Iterator[Request]],
        requests: Sequence[Request],
        users_turn: Callable[[], AbstractContextManager[None]],
        watch: Watch | None,
    ) -> Iterator[Request]:
        """What ``run`` gives, with new tokens passed on after each step. ``requests``: of the call, one at most."""

        def told(step: Step, new_tokens: int) -> None:
            with users_turn():
                for request in requests:
                    self.tell(request)
            if watch is not None:
                watch(step, new_tokens)

        for request in run(told):
            with users_turn():
                self.end()
            yield request
        with users_turn():
            self.end()


def feed_for(options: Sequence[Options], prompts: Sequence[Prompt | None], padded: PaddedBatch | None) -> Feed | None:
    """The feed of a call; None where it has no streamer."""
    streamer = options[0].arguments.streamer if options else None
    if streamer is None:
        return None
    sequences = sum(each.num_return_sequences for each in options)
    if sequences != 1:
        why = f"goes with one prompt, and here are {sequences:,} sequences: gen.stream() gives each as it finishes"
        raise OptionValueError("streamer", why)
    if padded is not None:
        return Feed(streamer, padded.ids)
    (prompt,) = prompts
    return Feed(streamer, None if prompt is None else torch.tensor([prompt.ids.tolist()], device="cpu"))
