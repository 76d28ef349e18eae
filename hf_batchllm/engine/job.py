"""What a call is asked for, checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inputs.as_passed import AsPassed
from ..inputs.options import Options
from ..inputs.prompts import Prompt
from ..inputs.seeds import Seeds
from ..planning.requests_and_prefixes import FinishReason
from ..results.generations import Generation
from ..sampling.call_grammars import CallGrammars
from ..sampling.stop_rules import StopRules
from .streamer import Feed


@dataclass(frozen=True)
class Job:
    """What a call is asked for, checked.

    Some lists have an entry for each *good* prompt, which can run; others for each prompt of the list passed in.
    """

    prompts: list[Prompt]  # the good ones
    places: list[int]  # [good prompts]  index in the list passed in
    problems: dict[int, str]  # index in the list passed in -> why the prompt cannot run
    options: list[Options]  # [all prompts]  prompts with equal settings have the same object
    max_new_tokens: list[int]  # [good prompts]
    can_stop: list[bool]  # [good prompts]  whether an answer may end before it has as many
    seed: Seeds | None  # of the sampling noise; None where nothing is sampled
    rules: list[StopRules]  # [all prompts]  what ends a sequence
    feed: Feed | None = None  # passes tokens on to a streamer
    rows: np.ndarray | None = None  # [prompts, tokens] as passed, padding included; None for a list
    adapters: list[str | None] | None = None  # [all prompts]; None: whatever is active, for all of them
    passed: list[AsPassed] | None = None  # [all prompts]  text and chats, for the results
    grammars: CallGrammars | None = None  # what form answers have
    seed_is_drawn: bool = False  # as none was given

    def prompt_as_passed(self, index: int) -> AsPassed:
        return None if self.passed is None else self.passed[index]

    @property
    def samples(self) -> list[int]:
        """Sequences of each good prompt."""
        return [self.options[place].num_return_sequences for place in self.places]

    @property
    def assistant(self) -> Any:
        """The model that guesses tokens, if the call has one. What a prompt says goes before it, as in ``generate``."""
        if not self.options or any(each.config.prompt_lookup_num_tokens for each in self.options):
            return None
        return self.options[0].arguments.assistant_model

    @property
    def picks_by_model(self) -> bool:
        """Whether picking tokens may run the model: code of the user's may, and guidance does."""
        given = [(each.arguments, each.config.guidance_scale) for each in dict.fromkeys(self.options)]
        return any(
            arguments.logits_processor or arguments.prefix_allowed_tokens_fn or scale not in (None, 1)
            for arguments, scale in given
        )

    @property
    def calls_criteria(self) -> bool:
        """Whether stopping criteria of the model's user are called."""
        every = dict.fromkeys(self.rules[place] for place in self.places)
        return any(each.others or each.factory for each in every)

    @property
    def widths(self) -> list[int] | None:
        """Beams of each good prompt; None where there is no beam search."""
        widths = [self.options[place].num_beams for place in self.places]
        return widths if any(width > 1 for width in widths) else None

    @property
    def runs(self) -> list[int]:
        """Sequences that begin at the end of each good prompt: one for a beam search, which parts later."""
        return self.samples if self.widths is None else [1] * len(self.places)

    @property
    def sequences(self) -> int:
        return sum(self.samples)

    def failures(self) -> Iterator[Generation]:
        """A result for each sequence that cannot run."""
        for index, why in sorted(self.problems.items()):
            passed = self.prompt_as_passed(index)
            for sample in range(self.options[index].num_return_sequences):
                yield Generation(index, sample, None, [], [], FinishReason.ERROR.value, error=why, prompt=passed)
