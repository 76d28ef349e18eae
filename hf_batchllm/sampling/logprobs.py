"""Log-probabilities: of new tokens (``logprobs``), of prompts (``prompt_logprobs``), and of scored tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..inputs.prompts import Prompt
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request, Unit
from ..planning.step import Chunk

LogProbs = dict[int, float]  # token id -> log-probability, the likeliest first
PickTokens = Callable[[torch.Tensor, Sequence[Request]], list[int]]  # as HostSampler

LOGITS_AT_ONCE = 1 << 25  # numbers that are copied to float32 at a time
_LOGITS_PER_CPU_THREAD = 1 << 20  # so many stay in a core's cache


class NewTokenLogProbs:
    """The log-probabilities of new tokens: of each chosen one, and of the ``k`` likeliest beside it."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._entries: defaultdict[Request, list[LogProbs]] = defaultdict(list)  # one for each new token

    def around(self, sample: PickTokens) -> PickTokens:
        """``sample``, which also records the log-probabilities of the tokens that it picks."""

        def recorded(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
            tokens = sample(logits, requests)
            for request, entry in zip(requests, log_probs(logits, np.arange(len(tokens)), tokens, self.k), strict=True):
                self._entries[request].append(entry)
            return tokens

        return recorded

    def take(self, request: Request) -> list[LogProbs]:
        """Hand out, and forget, those of a request that has ended."""
        return self._entries.pop(request, [])[: len(request.generated)]


class SampledLogProbs(NewTokenLogProbs):
    """The same of the scores, which is what tokens are drawn from: after processors, temperature and the like."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self._scores: list[tuple[Sequence[Request], torch.Tensor]] = []  # of the step that is being picked

    def record(self, requests: Sequence[Request], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Called before tokens are picked. Both are [requests, vocabulary]; logits are as the model gave them."""
        self._scores.append((requests, scores))  # nothing writes to them

    def around(self, sample: PickTokens) -> PickTokens:
        def recorded(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
            self._scores.clear()
            tokens = sample(logits, requests)
            picked = dict(zip(requests, tokens, strict=True))
            for some, scores in self._scores:
                chosen = [picked[request] for request in some]
                for request, entry in zip(some, log_probs(scores, np.arange(len(some)), chosen, self.k), strict=True):
                    self._entries[request].append(entry)
            self._scores.clear()
            return tokens

        return recorded


class _UnitLogProbs:
    """The log-probabilities of the tokens that one unit holds."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.entries: list[LogProbs | None] = []  # of each token; None until it is known, and for a prompt's first one
        self.seen = start  # logits at the positions before this one have been recorded
        self.last = start  # logits from this position on are not needed
        self.branches: dict[int, dict[int, list[_UnitLogProbs]]] = {}  # position -> next token -> units that begin so


class PromptLogProbs:
    """The log-probabilities of prompts' tokens, and of the ``k`` likeliest at their positions.

    Each position is looked at once, however many prompts share it. The logits at a prefix's position give the
    log-probabilities of its own next token, and of the first tokens of the units that branch off there.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        # Requests that have not been handed out keep the entries of their units alive.
        self._chains: dict[Request, list[tuple[_UnitLogProbs, int]]] = {}
        self._known: WeakValueDictionary[Unit, _UnitLogProbs] = WeakValueDictionary()

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """No prompt begins with tokens at which logits are not needed."""
        return [0] * len(prompts)

    def start(self, requests: Sequence[Request]) -> None:
        """Take note of the call's requests, which are attached to their prefixes."""
        for request in requests:
            prompt = request.prompt_tokens
            chain: list[tuple[_UnitLogProbs, int]] = []
            for unit, cut in [*request.ancestors(), (request, prompt)]:
                if cut == unit.start:
                    continue  # nothing of it is read
                known = self._known.get(unit)
                if known is None:
                    known = self._known[unit] = _UnitLogProbs(unit.start)
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
        """Read the log-probabilities from ``logits`` [tokens, vocabulary], a row for each token of the parts."""
        row = 0
        for part in parts:
            count = part.end - part.begin
            self._record(part, logits[row : row + count])
            row += count
        assert row == len(logits)

    def _record(self, part: Chunk, logits: torch.Tensor) -> None:
        known = self._known[part.unit]
        # Rows whose next token the unit has itself.
        own = max(min(part.end, known.start + len(known.entries) - 1) - part.begin, 0)
        rows = [*range(own)]
        tokens = part.unit.tokens(part.begin + 1, part.begin + 1 + own).tolist() if own else []
        others: list[list[_UnitLogProbs]] = []
        positions = sorted(at for at in known.branches if part.begin <= at < part.end)
        for position in positions:
            for token, branches in known.branches[position].items():
                rows.append(position - part.begin)
                tokens.append(token)
                others.append(branches)
        entries = log_probs(logits, np.array(rows, dtype=np.int64), tokens, self.k)
        for position in positions:  # only now: if memory runs out before, the part is run again
            del known.branches[position]
        first = part.begin + 1 - known.start
        known.entries[first : first + own] = entries[:own]
        for branches, entry in zip(others, entries[own:], strict=True):
            for branch in branches:
                branch.entries[0] = entry
        known.seen = part.end

    def take(self, request: Request) -> list[LogProbs | None]:
        """Hand out, and forget, those of a request that has ended."""
        entries: list[LogProbs | None] = []
        for known, cut in self._chains.pop(request):
            entries += known.entries[: cut - known.start]
        return entries


@torch.no_grad()
def log_probs(logits: torch.Tensor, rows: np.ndarray, tokens: Sequence[int], k: int) -> list[LogProbs]:
    """For each pair of a row of ``logits`` [n, vocabulary] and a token: the ``k`` likeliest tokens, and that one."""
    order = np.argsort(rows, kind="stable")
    chosen = np.asarray(tokens, dtype=np.int64)[order]
    entries: list[LogProbs] = [{}] * len(order)
    for block in _blocks(logits, rows[order], chosen, LOGITS_AT_ONCE):
        best, ids = block.logits.topk(min(k, logits.shape[-1]), dim=-1)  # [block, k]
        likely = (best - block.lse[:, None])[block.rows].tolist()
        pairs = zip(
            ids[block.rows].tolist(), likely, chosen[block.pairs].tolist(), block.of_tokens().tolist(), strict=True
        )
        for place, (others, values, token, value) in zip(order[block.pairs].tolist(), pairs, strict=True):
            entries[place] = entry = dict(zip(others, values, strict=True))
            entry.setdefault(token, value)  # no likelier than those before it
        del block  # before the next one is made
    return entries


@torch.no_grad()
def log_probs_of_tokens(
    logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:  # [pairs] float32, [pairs] bool
    """For each pair of a row of ``logits`` [n, vocabulary] (in order) and a token: its log-probability, and whether it
    is the likeliest, the first one among equals. Both stay on the device.
    """
    on_a_cpu = logits.device.type == "cpu"
    at_once = _LOGITS_PER_CPU_THREAD * torch.get_num_threads() if on_a_cpu else LOGITS_AT_ONCE
    found: list[torch.Tensor] = []
    likeliest: list[torch.Tensor] = []
    for block in _blocks(logits, rows, tokens, at_once):
        found.append(block.of_tokens())
        likeliest.append(block.logits.argmax(dim=-1)[block.rows] == block.tokens)
        del block  # before the next one is made
    return torch.cat(found), torch.cat(likeliest)


@dataclass(frozen=True)
class _Block:
    """Some rows of logits in float32, and the pairs of a row and a token that concern them."""

    logits: torch.Tensor  # [block, vocabulary]
    lse: torch.Tensor  # [block]  log of the sum of their exponentials
    pairs: slice
    rows: torch.Tensor  # [pairs]  within the block
    tokens: torch.Tensor  # [pairs]

    def of_tokens(self) -> torch.Tensor:  # [pairs]
        """The log-probabilities of the pairs' tokens."""
        return self.logits[self.rows, self.tokens] - self.lse[self.rows]


def _blocks(logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, at_once: int) -> Iterator[_Block]:
    """The rows of ``logits`` [n, vocabulary] that pairs concern, so many numbers at once; ``rows`` are in order."""
    size = max(1, at_once // logits.shape[-1])
    begins = range(0, len(logits), size)
    edges = np.searchsorted(rows, [*begins, len(logits)]).tolist()
    every_row, every_token = (to_device(values, logits.device) for values in (rows, tokens))
    for begin, first, last in zip(begins, edges, edges[1:], strict=False):
        if first < last:
            some, pairs = logits[begin : begin + size].float(), slice(first, last)
            yield _Block(some, some.logsumexp(dim=-1), pairs, every_row[pairs] - begin, every_token[pairs])
