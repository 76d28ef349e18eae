"""Log-probabilities: of new tokens (``logprobs``), of prompts (``prompt_logprobs``), and of scored tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..inputs.images.prompt_images import FIRST_KEY
from ..inputs.prompts import Prompt
from ..kernels.reference.top_logprobs_torch import note_top_logprobs
from ..model.transfers import start_copy_to_host, to_device
from ..planning.requests_and_prefixes import Request, Unit
from ..planning.step import Chunk
from .device_logprobs import MOST_LIKELY
from .device_options import may_pick_on
from .sampling_kernels import sampling_kernels

LogProbs = dict[int, float]  # token id -> log-probability, the most likely first
PickTokens = Callable[[torch.Tensor, Sequence[Request]], list[int]]  # as HostSampler

LOGITS_AT_ONCE = 1 << 25  # numbers that are copied to float32 at a time
_LOGITS_PER_CPU_THREAD = 1 << 20  # so many stay in a core's cache


class NewTokenLogProbs:
    """The log-probabilities of new tokens: of each chosen one, and of the ``k`` most likely beside it."""

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

    def put(self, requests: Sequence[Request], tokens: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
        """Take down what the device has noted: of each of ``tokens`` [requests, times], where it is not negative.

        ids: [requests, times, k], the most likely first. values: [requests, times, k + 1], that of the token last.
        """
        for request, its, others, found in zip(requests, tokens.tolist(), ids.tolist(), values.tolist(), strict=True):
            if request.finish_reason is not None:
                continue  # it had ended before these, unknown when they were launched
            entries = self._entries[request]
            for token, likely, known in zip(its, others, found, strict=True):
                if token < 0:
                    break
                entry = dict(zip(likely, known, strict=False))
                entry.setdefault(token, known[-1])
                entries.append(entry)

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

    def is_complete(self, cut: int) -> bool:
        """Whether all tokens before ``cut`` are known. At a prompt's very first one nothing can be."""
        first = 1 if self.start == 0 else 0
        return None not in self.entries[first : cut - self.start]


@dataclass(frozen=True)
class _Asker:
    """A part whose logits are there, and the tokens that it asks for."""

    known: _UnitLogProbs
    part: Chunk
    own: int  # tokens of the unit itself, from the one behind the part's first
    positions: list[int]  # at which other units begin
    others: list[list[_UnitLogProbs]]  # for each of their first tokens, the units that begin so


class PromptLogProbs:
    """The log-probabilities of prompts' tokens, and of the ``k`` most likely at their positions.

    Each position is looked at once, however many prompts share it. The logits at a prefix's position give the
    log-probabilities of its own next token, and of the first tokens of the units that branch off there.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        # Requests that have not been handed out keep the entries of their units alive.
        self._chains: dict[Request, list[tuple[_UnitLogProbs, int]]] = {}
        self._known: WeakValueDictionary[Unit, _UnitLogProbs] = WeakValueDictionary()
        self._to_come: deque[Callable[[], None]] = deque()  # what steps have found, and the host has not seen
        self._placeholder = 0  # the id of tokens of images, if prompts show any

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """No prompt begins with tokens at which logits are not needed."""
        return [0] * len(prompts)

    def start(self, requests: Sequence[Request]) -> None:
        """Take note of the call's requests, which are attached to their prefixes."""
        for request in requests:
            if request.prompt_keys is not request.prompt_ids:
                self._placeholder = int(request.prompt_ids[request.prompt_keys >= FIRST_KEY][0])
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
        """Read the log-probabilities from ``logits`` [tokens, vocabulary], a row for each token of the parts.

        The device is not waited for: they are taken down once a request that they belong to has ended.
        """
        rows: list[int] = []
        tokens: list[int] = []
        askers: list[_Asker] = []
        begin = 0
        for part in parts:
            askers.append(self._ask(part, begin, rows, tokens))
            begin += part.end - part.begin
        assert begin == len(logits)
        tokens = [token if token < FIRST_KEY else self._placeholder for token in tokens]
        found = start_log_probs(logits, np.array(rows, dtype=np.int64), tokens, self.k)
        for asker in askers:  # only now: if memory runs out before, the parts are run again
            asker.known.seen = asker.part.end
            for position in asker.positions:
                del asker.known.branches[position]

        def take_down() -> None:
            entries = iter(found())
            for asker in askers:
                first = asker.part.begin + 1 - asker.known.start
                asker.known.entries[first : first + asker.own] = itertools.islice(entries, asker.own)
                for branches in asker.others:
                    entry = next(entries)
                    for branch in branches:
                        branch.entries[0] = entry

        self._to_come.append(take_down)

    def _ask(self, part: Chunk, begin: int, rows: list[int], tokens: list[int]) -> _Asker:
        """Add the rows and tokens (in images, keys) that a part asks for; its logits begin at row ``begin``."""
        known = self._known[part.unit]
        # Rows whose next token the unit has itself.
        own = max(min(part.end, known.start + len(known.entries) - 1) - part.begin, 0)
        rows += range(begin, begin + own)
        tokens += part.unit.tokens(part.begin + 1, part.begin + 1 + own).tolist() if own else []
        others: list[list[_UnitLogProbs]] = []
        positions = sorted(at for at in known.branches if part.begin <= at < part.end)
        for position in positions:
            for token, branches in known.branches[position].items():
                rows.append(begin + position - part.begin)
                tokens.append(token)
                others.append(branches)
        return _Asker(known, part, own, positions, others)

    def take(self, request: Request) -> list[LogProbs | None]:
        """Hand out, and forget, those of a request that has ended."""
        chain = self._chains.pop(request)
        while self._to_come and not all(known.is_complete(cut) for known, cut in chain):
            self._to_come.popleft()()  # in the order of the steps, of which none is later than the request's last one
        return [entry for known, cut in chain for entry in known.entries[: cut - known.start]]


def log_probs(logits: torch.Tensor, rows: np.ndarray, tokens: Sequence[int], k: int) -> list[LogProbs]:
    """For each pair of a row of ``logits`` [n, vocabulary] and a token: the ``k`` most likely tokens, and that one."""
    return start_log_probs(logits, rows, tokens, k)()


@torch.no_grad()
def start_log_probs(
    logits: torch.Tensor, rows: np.ndarray, tokens: Sequence[int], k: int
) -> Callable[[], list[LogProbs]]:
    """Start ``log_probs``. What comes back waits for the device; the logits are not needed any more."""
    order = np.argsort(rows, kind="stable")
    chosen = np.asarray(tokens, dtype=np.int64)[order]
    k = min(k, logits.shape[-1])
    if not len(order):
        return lambda: []
    found = list(_noted(logits, rows[order], chosen, k))
    # One copy of each kind: the host's memory for it takes long to get.
    copies = [start_copy_to_host(torch.cat(each)) for each in zip(*found, strict=True)]

    def read() -> list[LogProbs]:
        entries: list[LogProbs] = [{}] * len(order)
        others, values, of_tokens = (copied().tolist() for copied in copies)
        every = zip(order.tolist(), others, values, chosen.tolist(), of_tokens, strict=True)
        for place, best, likely, token, value in every:
            entries[place] = entry = dict(zip(best, likely, strict=True))
            entry.setdefault(token, value)  # no likelier than those before it
        return entries

    return read


def _noted(
    logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, k: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:  # [pairs, k], [pairs, k], [pairs]
    """The most likely tokens of some pairs, in their order, the log-probabilities of these, and those of their own."""
    device, at_once = logits.device, LOGITS_AT_ONCE
    if device.type == "cpu":
        at_once = _LOGITS_PER_CPU_THREAD * torch.get_num_threads()
    note = note_top_logprobs
    if k <= MOST_LIKELY and may_pick_on(device):  # as for tokens that are picked there: to the last bit
        note = sampling_kernels(device).note_top_logprobs
    every = to_device(tokens, device)
    size = max(1, at_once // logits.shape[-1])
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        in_a_row = int(some[-1] - some[0]) == len(some) - 1 and bool((np.diff(some) == 1).all())
        read = logits[int(some[0]) : int(some[-1]) + 1] if in_a_row else logits[to_device(some, device)]
        ids = torch.empty(len(some), 1, k, dtype=torch.int32, device=device)
        values = torch.empty(len(some), 1, k + 1, dtype=torch.float32, device=device)
        note(read, every[begin : begin + size], ids, values)
        del read  # before the next rows are copied
        yield ids[:, 0], values[:, 0, :k], values[:, 0, k]


@torch.no_grad()
def log_probs_of_tokens(
    logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:  # [pairs] float32, [pairs] bool
    """For each pair of a row of ``logits`` [n, vocabulary] (in order) and a token: its log-probability, and whether it
    is the most likely, the first one among equals. Both stay on the device.
    """
    best, _, own = map(torch.cat, zip(*_noted(logits, rows, tokens, 1), strict=True))
    return own, best[:, 0] == to_device(tokens, logits.device)
