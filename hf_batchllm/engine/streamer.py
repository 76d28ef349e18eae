"""A streamer of transformers, told of one sequence what ``generate`` would tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OptionValueError
from ..inputs.options import Options
from ..inputs.padded_batch import PaddedBatch
from ..inputs.prompts import Prompt
from ..planning.units import Request


class Feed:
    """``prompt``: [1, tokens]; None if it cannot be run, and then the streamer is only told that nothing comes."""

    def __init__(self, streamer: Any, prompt: torch.Tensor | None) -> None:
        self._streamer = streamer
        self._prompt = prompt
        self._told = 0  # new tokens
        self._begun = self._ended = False

    def begin(self) -> None:
        """Once a step has run: a model whose first one fails may be left to ``generate``, which begins anew."""
        if self._begun:
            return
        self._begun = True
        if self._prompt is not None:
            self._streamer.put(self._prompt.cpu())

    def tell(self, request: Request) -> None:
        """Whatever there is of it by now."""
        self.begin()
        for token in request.generated[self._told :]:
            self._told += 1
            self._streamer.put(torch.tensor([token]))

    def end(self) -> None:
        self.begin()
        if not self._ended:
            self._ended = True
            self._streamer.end()


def feed_for(options: Sequence[Options], prompts: Sequence[Prompt | None], padded: PaddedBatch | None) -> Feed | None:
    """Of a call for those prompts; None if it has no streamer."""
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
    return Feed(streamer, None if prompt is None else torch.tensor([prompt.ids.tolist()]))
