"""What a call gives back, and what that asks of its steps: one answer for each question that the engine asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..inputs.prompts import Prompt
from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk

if TYPE_CHECKING:
    from ..model.runner import ModelRunner
    from ..results.run_report import RunReport
    from ..results.sharing_plan import SharingPlan
    from ..sampling.device_logprobs import DeviceLogProbs
    from ..sampling.host_sampler import RecordScores
    from ..sampling.logprobs import PickTokens
    from ..sampling.sampling_kernels import SamplingKernels
    from ..sampling.step_tensors import StepTensors
    from .loop import Launcher
    from .timekeeper import Timekeeper

MOST_LOGITS = 1 << 28  # numbers that a step may give where logits of prompts are asked for


class PromptWatcher(Protocol):
    """Looks at logits of prompts."""

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """For each prompt of the call, the tokens at its beginning at which no logits are needed."""

    def start(self, requests: Sequence[Request]) -> None:
        """The call's requests, attached to their prefixes."""

    def wanted(self, chunk: Chunk) -> Sequence[Chunk]:
        """The parts of a chunk, which is about to run, whose logits are asked for."""


@dataclass(frozen=True)
class ScoreCounts:
    """Scores that are read from a call's sequences."""

    scores: int
    prompt_tokens: int  # that each score would have to run by itself, added up
    scored_tokens: int


@dataclass(frozen=True)
class LogProbNotes:
    """What the device notes beside each token that it picks, and what is given that, once the host has it."""

    on_device: DeviceLogProbs
    put: Callable[[Sequence[Request], np.ndarray, np.ndarray, np.ndarray], None]  # with the requests and their tokens


class CallOutputs(ABC):
    """What is asked of a call. ``ExtraOutputs`` answers for ``generate``, ``ScoreOutputs`` for ``score``."""

    tensors: StepTensors | None = None
    """Scores and logits of every step, where a ModelOutput is to hold them."""

    counts: ScoreCounts | None = None
    """What is read from the sequences, where tokens are not what is wanted."""

    # -- logits of prompts ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def watcher(self) -> PromptWatcher | None:
        """Looks at the logits of prompts; None where none are asked for."""

    @property
    def record_prompts(self) -> Callable[[Sequence[Chunk], torch.Tensor], None] | None:
        """Is given those logits, where the launcher does not read them itself."""
        return None

    @property
    def top_logprobs(self) -> int:
        """Tokens whose log-probabilities are wanted at a position, beside the one that stands there."""
        return 0

    # -- the size of steps ---------------------------------------------------------------------------------------

    @abstractmethod
    def most_rows(self, vocabulary: int) -> int | None:
        """The most rows of logits of a step; None where that is one for each sequence."""

    @abstractmethod
    def most_tokens(self, budget: int, vocabulary: int, plan: SharingPlan | None) -> int:
        """The most tokens of a step, of the ``budget`` that there is.

        plan: in whose order prompts run from their beginning, if they do.
        """

    @abstractmethod
    def step_bytes(self, tokens: int, vocabulary: int) -> int:
        """Bytes on the device that looking at a step of so many tokens takes."""

    def fit_into(self, free: int, steps: int, vocabulary: int) -> None:  # noqa: B027 -- most results are small
        """The call begins with so many ``free`` bytes on the device. ``steps``: new tokens of the longest row."""

    def set_aside(self, steps: int, vocabulary: int | None, device: torch.device) -> None:  # noqa: B027 -- likewise
        """Take the memory for what the device puts down itself. ``why_by_host`` tells whether there was enough.

        vocabulary: None where the model does not tell how many logits it gives.
        """

    def results_bytes(self, steps: int, vocabulary: int) -> int:
        """Bytes on the device that are handed out in the end, at most. ``steps``: new tokens of the longest row."""
        return 0

    # -- running steps -------------------------------------------------------------------------------------------

    def launcher(self, runner: ModelRunner, timekeeper: Timekeeper) -> Launcher | None:
        """What runs the steps; None where tokens are picked, as usual."""
        return None

    @property
    def record_scores(self) -> RecordScores | None:
        """Is given the scores of each step before tokens are picked, if somebody wants them."""
        return None if self.tensors is None else self.tensors.record

    def around(self, sample: PickTokens) -> PickTokens:
        """``sample``, which picks the tokens of a step, with whatever is to be taken down of them."""
        return sample

    @property
    def why_by_host(self) -> str | None:
        """Why the host has to pick the tokens; None if it need not."""
        return None

    @property
    def wants_scores(self) -> bool:
        """Whether somebody wants what tokens are drawn from, after processors."""
        return False

    @property
    def copies_of_logits(self) -> int:
        """How many of a step's logits, in float32, putting these down takes on the device."""
        return 0

    def notes(
        self, device: torch.device, kernels: SamplingKernels, scores: Callable[[], torch.Tensor]
    ) -> LogProbNotes | None:
        """What the device is to note where it picks the tokens; None if nothing.

        scores: gives what the latest tokens were drawn from, where ``wants_scores``.
        """
        return None

    # -- afterwards ----------------------------------------------------------------------------------------------

    def in_report(self, report: RunReport, requests: Sequence[Request]) -> RunReport:
        """The report in the reader's terms. ``requests``: of the call."""
        return report

    def release(self) -> None:  # noqa: B027 -- most hold none
        """The call has failed: let go of the tensors of its steps, as a traceback may hold on to this object."""
