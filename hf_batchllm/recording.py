"""What a call gives back beside tokens: scores and logits as ``generate`` shapes them, and log-probabilities.

All of it is worked out by the host, step by step. Log-probabilities are those of the model's raw logits in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

from .options import Options
from .prompts import Prompt
from .request import Chunk, Request, Unit

if TYPE_CHECKING:
    from .engine import Launcher
    from .recorder import Recorder
    from .results import RunReport
    from .runner import ModelRunner
    from .sharing import SharingPlan

LogProbs = dict[int, float]  # token id -> log-probability, the likeliest first
Sample = Callable[[torch.Tensor, Sequence[Request]], list[int]]

_MOST_LOGITS = 1 << 28  # numbers that a step gives where each of its tokens is asked for
_AT_ONCE = 1 << 25  # numbers that are looked at at a time


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


class Recording:
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

    def launcher(self, runner: ModelRunner, recorder: Recorder) -> Launcher | None:
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
        return budget if self.prompts is None else max(1, min(budget, _MOST_LOGITS // vocabulary))

    def results_bytes(self, steps: int, vocabulary: int) -> int:
        """What is kept on the device to be handed out, at most. ``steps``: the new tokens of the longest row."""
        return 0 if self.tensors is None else self.tensors.bytes(steps, vocabulary)

    def step_bytes(self, tokens: int, vocabulary: int) -> int:
        """What looking at a step of so many tokens takes on the device."""
        logits = 0 if self.prompts is None else tokens * vocabulary
        return 4 * (logits + 3 * min(logits, _AT_ONCE))

    def around(self, sample: Sample) -> Sample:
        """``sample``, with the log-probabilities of what it picks taken down."""
        return sample if self.new_tokens is None else self.new_tokens.around(sample)

    def logprobs(self, request: Request) -> list[LogProbs] | None:
        """To be asked for once, when the request has ended; so is the next one."""
        return None if self.new_tokens is None else self.new_tokens.take(request)

    def prompt_logprobs(self, request: Request) -> list[LogProbs | None] | None:
        return None if self.prompts is None else self.prompts.take(request)


class StepTensors:
    """``output_scores`` and ``output_logits``: a tensor [rows, vocabulary] of each step, 0 in rows that had ended."""

    def __init__(self, prompts: int, samples: int, scores: bool, logits: bool) -> None:
        self._rows, self._samples = prompts * samples, samples
        self._steps: dict[str, list[torch.Tensor]] = {}
        if scores:
            self._steps["scores"] = []
        if logits:
            self._steps["logits"] = []

    @property
    def names(self) -> list[str]:
        return [f"output_{name}" for name in self._steps]

    def bytes(self, steps: int, vocabulary: int) -> int:
        return len(self._steps) * 4 * self._rows * steps * vocabulary

    def release(self) -> None:
        """Nobody will be handed them: the traceback of an error would hold on to them."""
        for steps in self._steps.values():
            steps.clear()

    @torch.no_grad()
    def record(self, requests: Sequence[Request], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Before tokens are picked; both are [requests, vocabulary], logits as the model gave them."""
        made = np.array([len(request.generated) for request in requests])
        rows = np.array([request.index * self._samples + request.sample for request in requests])
        self.put(made, rows, logits, scores)

    def put(self, made: np.ndarray, rows: np.ndarray, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """``made`` and ``rows`` [requests]: how many new tokens there were before, and where the results have them."""
        for step in np.unique(made).tolist():
            which = np.flatnonzero(made == step)
            there, here = (torch.from_numpy(index).to(logits.device) for index in (rows[which], which))
            for name, values in (("scores", scores), ("logits", logits)):
                if name in self._steps:
                    self._of(name, step, values)[there] = values[here].float()

    def _of(self, name: str, step: int, like: torch.Tensor) -> torch.Tensor:
        steps = self._steps[name]
        while len(steps) <= step:
            steps.append(torch.zeros(self._rows, like.shape[-1], device=like.device))
        return steps[step]

    def scores_of(self, request: Request, made: int, rows: int = 1) -> tuple[torch.Tensor, ...] | None:
        """Of its first new tokens, [rows, vocabulary] each, as criteria are given them; None if they are not kept."""
        row = request.index * self._samples + request.sample
        steps = self._steps.get("scores")
        return None if steps is None else tuple(step[row : row + rows] for step in steps[:made])

    def outputs(self, longest: int | None, device: torch.device) -> dict[str, tuple[torch.Tensor, ...]]:
        """By their names in a ModelOutput. ``longest``: new tokens of the longest row, each from a step; None: all."""
        return {name: tuple(step.to(device) for step in steps[:longest]) for name, steps in self._steps.items()}


class NewTokenLogProbs:
    """``k``: how many of the likeliest tokens are given beside the chosen one."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._of: defaultdict[Request, list[LogProbs]] = defaultdict(list)

    def around(self, sample: Sample) -> Sample:
        def recorded(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
            tokens = sample(logits, requests)
            for request, entry in zip(requests, log_probs(logits, np.arange(len(tokens)), tokens, self.k), strict=True):
                self._of[request].append(entry)
            return tokens

        return recorded

    def take(self, request: Request) -> list[LogProbs]:
        return self._of.pop(request, [])[: len(request.generated)]


class _Known:
    """What is known of the tokens that a unit holds."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.entries: list[LogProbs | None] = []  # of each token; None until it is known, and for a prompt's first one
        self.seen = start  # the logits at all positions before have been seen, and are not asked for again
        self.last = start  # nor are those from here on
        self.branches: dict[int, dict[int, list[_Known]]] = {}  # position -> the next token -> who begins with it


class PromptLogProbs:
    """Each position is looked at once, however many prompts share it.

    The logits at a prefix's position tell of its own next token, and of the first tokens of those that stand on it.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        # Whoever has not been handed out yet keeps what it needs.
        self._chains: dict[Request, list[tuple[_Known, int]]] = {}
        self._known: WeakValueDictionary[Unit, _Known] = WeakValueDictionary()

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        return [0] * len(prompts)

    def start(self, requests: Sequence[Request]) -> None:
        """The call's requests, attached to their prefixes."""
        for request in requests:
            prompt = len(request.prompt_ids)
            chain: list[tuple[_Known, int]] = []
            for unit, cut in [*request.ancestors(), (request, prompt)]:
                if cut == unit.start:
                    continue  # nothing of it is read
                known = self._known.get(unit)
                if known is None:
                    known = self._known[unit] = _Known(unit.start)
                    if chain:
                        below = chain[-1][0]
                        token = int(unit.tokens(unit.start, unit.start + 1)[0])
                        below.branches.setdefault(unit.start - 1, {}).setdefault(token, []).append(known)
                known.entries += [None] * (cut - known.start - len(known.entries))
                known.last = max(known.last, cut - 1 if unit is request else cut)
                chain.append((known, cut))
            self._chains[request] = chain

    def wanted(self, chunk: Chunk) -> list[Chunk]:
        """The part of a chunk whose logits are asked for, if there is one."""
        known = self._known.get(chunk.unit)
        if known is None:
            return []
        begin, end = max(chunk.begin, known.seen), min(chunk.end, known.last)
        return [Chunk(chunk.unit, begin, end)] if begin < end else []

    def record(self, parts: Sequence[Chunk], logits: torch.Tensor) -> None:
        """``logits`` [tokens, vocabulary] of the tokens of all parts."""
        row = 0
        for part in parts:
            count = part.end - part.begin
            self._record(part, logits[row : row + count])
            row += count
        assert row == len(logits)

    def _record(self, part: Chunk, logits: torch.Tensor) -> None:
        known = self._known[part.unit]
        # Positions whose next token the unit has itself.
        own = max(min(part.end, known.start + len(known.entries) - 1) - part.begin, 0)
        rows = [*range(own)]
        tokens = part.unit.tokens(part.begin + 1, part.begin + 1 + own).tolist() if own else []
        others: list[list[_Known]] = []
        for position in sorted(at for at in known.branches if part.begin <= at < part.end):
            for token, branches in known.branches.pop(position).items():
                rows.append(position - part.begin)
                tokens.append(token)
                others.append(branches)
        entries = log_probs(logits, np.array(rows, dtype=np.int64), tokens, self.k)
        first = part.begin + 1 - known.start
        known.entries[first : first + own] = entries[:own]
        for branches, entry in zip(others, entries[own:], strict=True):
            for branch in branches:
                branch.entries[0] = entry
        known.seen = part.end

    def take(self, request: Request) -> list[LogProbs | None]:
        entries: list[LogProbs | None] = []
        for known, cut in self._chains.pop(request):
            entries += known.entries[: cut - known.start]
        return entries


@torch.no_grad()
def log_probs(logits: torch.Tensor, rows: np.ndarray, tokens: Sequence[int], k: int) -> list[LogProbs]:
    """For each pair of a row of ``logits`` [n, vocabulary] and a token: the ``k`` likeliest tokens, and that one."""
    order = np.argsort(rows, kind="stable")
    ordered, chosen = rows[order], np.asarray(tokens, dtype=np.int64)[order]
    vocabulary = logits.shape[-1]
    entries: list[LogProbs] = [{}] * len(order)
    few = max(1, _AT_ONCE // vocabulary)
    for begin in range(0, len(logits), few):
        some = logits[begin : begin + few].float()
        first, last = np.searchsorted(ordered, (begin, begin + len(some))).tolist()
        here, own = (
            torch.from_numpy(values).to(logits.device) for values in (ordered[first:last] - begin, chosen[first:last])
        )  # [pairs]
        whole = some.logsumexp(dim=-1)  # [few]
        best, ids = some.topk(min(k, vocabulary), dim=-1)  # [few, k]
        likely = (best - whole[:, None])[here].tolist()
        of_own = (some[here, own] - whole[here]).tolist()
        pairs = zip(ids[here].tolist(), likely, chosen[first:last].tolist(), of_own, strict=True)
        for place, (others, values, token, value) in zip(order[first:last].tolist(), pairs, strict=True):
            entries[place] = entry = dict(zip(others, values, strict=True))
            entry.setdefault(token, value)  # no likelier than those before it
    return entries
