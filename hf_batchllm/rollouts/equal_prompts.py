"""A trainer's list of prompts, in which each prompt stands once for each of its samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import GenerationConfig

from ..results.generations import BatchResult, Generation


@dataclass(frozen=True)
class EqualPrompts:
    """Each different prompt once, and where it stands in the trainer's list."""

    prompts: list[list[int]]
    places: list[list[int]]  # [prompts]

    @classmethod
    def of(cls, prompt_ids: Sequence[Sequence[int]]) -> EqualPrompts:
        places: dict[tuple[int, ...], list[int]] = {}
        for place, ids in enumerate(prompt_ids):
            places.setdefault(tuple(ids), []).append(place)
        return cls([list(ids) for ids in places], list(places.values()))

    def configs(self, config: GenerationConfig) -> list[GenerationConfig]:
        """As many samples of each prompt as it has places; one where samples would be equal."""
        made: dict[int, GenerationConfig] = {}
        for count in {len(places) if config.do_sample else 1 for places in self.places}:
            made[count] = copy.copy(config)
            made[count].num_return_sequences = count
        return [made[len(places) if config.do_sample else 1] for places in self.places]

    def in_order(self, result: BatchResult) -> list[Generation]:
        """A generation for each place of the trainer's list."""
        found: list[Generation | None] = [None] * sum(map(len, self.places))
        samples: dict[int, list[Generation]] = {}
        for generation in result:
            samples.setdefault(generation.index, []).append(generation)
        for index, places in enumerate(self.places):
            for number, place in enumerate(places):
                found[place] = samples[index][number % len(samples[index])]
        return [generation for generation in found if generation is not None]
