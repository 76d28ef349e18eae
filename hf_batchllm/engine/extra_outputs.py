"""What a call gives back beside tokens: scores and logits as ``generate`` shapes them, and log-probabilities.

All of it is worked out by the host, step by step. Log-probabilities are those of the model's raw logits in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..inputs.options import Options
from ..inputs.prompts import Prompt
from ..planning.units import Chunk, Request
from ..sampling.logprobs import LOGITS_AT_ONCE, LogProbs, NewTokenLogProbs, PickTokens, PromptLogProbs
from ..sampling.step_tensors import StepTensors

if TYPE_CHECKING:
    from ..model.runner import ModelRunner
    from ..results.run_report import RunReport
    from ..results.sharing_plan import SharingPlan
    from .loop import Launcher
    from .timekeeper import Timekeeper


MOST_LOGITS_PER_STEP = 1 << 28  # numbers, where the logits of prompts are asked for


class Watched(Protocol):
    """Looks at logits of prompts."""

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """Of each prompt of the call, the tokens at its beginning at which no logits are needed."""

    def start(self, requests: Sequence[Request]) -> None:
        """The call's requests, attached to their prefixes."""

    def wanted(self, chunk: Chunk) -> Sequence[Chunk]:
        """The parts of a chunk, which is about to be run, whose logits are asked for."""


@dataclass(frozen=True)
class ScoreCounts:
    """Scores that are to be read from a call's sequences."""

    scores: int
    prompt_tokens: int  # that each of them would have to run by itself, added up
    scored_tokens: int


class ExtraOutputs:
    """``options``: of each prompt of the call; what is asked for here is the same for all of them."""

    def __init__(self, options: Sequence[Options]) -> None:
        self.tensors: StepTensors | None = None
        self.new_tokens: NewTokenLogProbs | None = None
        self.prompts: PromptLogProbs | None = None
        self.scores: ScoreCounts | None = None  # where tokens are not what is wanted
        if not options:
            return
        config, given = options[0].config, options[0].given
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):  # as ``generate`` has it
            beams = options[0].num_beams  # each has its row, however many of them are answers in the end
            samples = beams if beams > 1 else options[0].num_return_sequences
            self.tensors = StepTensors(len(options), samples, bool(config.output_scores), bool(config.output_logits))
        if given.logprobs is not None:
            self.new_tokens = NewTokenLogProbs(int(given.logprobs))
        if given.prompt_logprobs is not None:
            self.prompts = PromptLogProbs(int(given.prompt_logprobs))

    @property
    def watched(self) -> Watched | None:
        """What wants to see the logits of prompts."""
        return self.prompts

    def in_report(self, report: RunReport, requests: Sequence[Request]) -> RunReport:
        """In the terms of whoever reads it. ``requests``: of the call."""
        return report

    def launcher(self, runner: ModelRunner, timekeeper: Timekeeper) -> Launcher | None:
        """What runs the steps, where tokens are not what is wanted of them."""
        return None

    @property
    def why_by_host(self) -> str | None:
        """Why tokens have to be picked by the host; None where nothing is asked for."""
        names = [] if self.tensors is None else list(self.tensors.names)
        names += ["logprobs"] * (self.new_tokens is not None) + ["prompt_logprobs"] * (self.prompts is not None)
        if not names:
            return None
        quoted = " and ".join(f"`{name}`" for name in names)
        return f"{quoted} {'is' if len(names) == 1 else 'are'} put together on the host, which waits for each step"

    def most_rows(self, vocabulary: int) -> int | None:
        """How many rows of logits a step gives at most; None where that is as many as there are sequences."""
        return None

    def most_tokens(self, budget: int, vocabulary: int, plan: SharingPlan | None) -> int:
        """How many tokens a step may have, of the ``budget`` that there is.

        ``plan``: in whose order prompts run, if they do, and from their beginning.
        """
        return budget if self.prompts is None else max(1, min(budget, MOST_LOGITS_PER_STEP // vocabulary))

    def results_bytes(self, steps: int, vocabulary: int) -> int:
        """What is kept on the device to be handed out, at most. ``steps``: the new tokens of the longest row."""
        return 0 if self.tensors is None else self.tensors.bytes(steps, vocabulary)

    def step_bytes(self, tokens: int, vocabulary: int) -> int:
        """What looking at a step of so many tokens takes on the device."""
        logits = 0 if self.prompts is None else tokens * vocabulary
        return 4 * (logits + 3 * min(logits, LOGITS_AT_ONCE))

    def around(self, sample: PickTokens) -> PickTokens:
        """``sample``, with the log-probabilities of what it picks taken down."""
        return sample if self.new_tokens is None else self.new_tokens.around(sample)

    def logprobs(self, request: Request) -> list[LogProbs] | None:
        """To be asked for once, when the request has ended; so is the next one."""
        return None if self.new_tokens is None else self.new_tokens.take(request)

    def prompt_logprobs(self, request: Request) -> list[LogProbs | None] | None:
        return None if self.prompts is None else self.prompts.take(request)
