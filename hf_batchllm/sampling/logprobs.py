"""Scores and log-probabilities taken down step by step: ``output_scores``, ``logprobs``, ``prompt_logprobs``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..inputs.prompts import Prompt
from ..planning.step import Chunk
from ..planning.units import Request, Unit

LogProbs = dict[int, float]  # token id -> log-probability, the likeliest first
Sample = Callable[[torch.Tensor, Sequence[Request]], list[int]]


_AT_ONCE = 1 << 25  # numbers that are looked at at a time


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
