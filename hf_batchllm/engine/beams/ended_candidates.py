"""Which candidates of a beam search end with their token: the rules of ``sampling.stopping``, for all at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from ...model.runner import current_device
from ...sampling.stopping import Endings
from .group import BeamGroup


class BeamEndings(Endings):
    def of_candidates(
        self, groups: Sequence[BeamGroup], parents: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:  # [groups, candidates] bool
        """Which candidates end with the token that each adds to its parent, limits of length not counted."""
        rules = [self._rules[group.root.index] for group in groups]
        if any(each is not rules[0] for each in rules) or rules[0].looks_back:
            ended = np.stack([self._of_group(*each) for each in zip(groups, parents, tokens, strict=True)])
            return self._ranks.of_first("what criteria say", ended) if self._calls_criteria else ended
        return _among(tokens, rules[0].stop_tokens)

    def _of_group(self, group: BeamGroup, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # [candidates] bool
        rules = self._rules[group.root.index]
        stops = _among(tokens, rules.stop_tokens)
        if not rules.looks_back:
            return stops
        prompt = self._prompt(group.root)
        new = np.array([[*group.tokens(parent), token] for parent, token in zip(parents, tokens, strict=True)])
        ids = np.concatenate([np.broadcast_to(prompt, (len(tokens), len(prompt))), new], axis=1).astype(np.int64)
        for strings in rules.strings:
            stops |= self._strings[strings].complete(ids)
        own = self._criteria(group.root)
        if own:
            with torch.no_grad(), current_device(self._device), torch.cuda.stream(self._stream):
                scores = None if self._scores is None else self._scores(group.root, group.made + 1)
                # Copied within the stream: another one would not wait for the criteria.
                ends = self._asked(own, group.root, torch.from_numpy(ids).to(self._device), scores).cpu().numpy()
            stops |= np.broadcast_to(ends, stops.shape)
        return stops


def _among(tokens: np.ndarray, some: Collection[int]) -> np.ndarray:
    return np.isin(tokens, list(some)) if some else np.zeros(tokens.shape, dtype=bool)
