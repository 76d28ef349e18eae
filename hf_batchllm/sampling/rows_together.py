"""The scores of many rows through their chains of processors: rows together where a processor may take them so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..inputs.options import Options
from ..inputs.processors_and_criteria import say_where
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request
from .grammar_masks import TokenMasks
from .processor_chains import ProcessorChain, ProcessorKind
from .user_processors import UserProcessor

_ADDED_UP_BY_SEVERAL = 32768  # numbers: threads of a CPU share a sum of so many
_ROOM = 64  # tokens that an array has room for beyond those it begins with


def apply_blind(some: Sequence[LogitsProcessor], scores: torch.Tensor) -> torch.Tensor:
    """The scores [rows, vocabulary] after processors that do not look back."""
    ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    for processor in some:
        scores = _as_among_others(processor, ids, scores)
    return scores


def _as_among_others(processor: LogitsProcessor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores of a processor. Several threads of a CPU add up a single row in another order: it is given twice."""
    done: torch.Tensor
    if len(scores) == 1 and scores.device.type == "cpu" and scores.shape[-1] >= _ADDED_UP_BY_SEVERAL:
        done = processor(ids.expand(2, -1), scores.expand(2, -1).contiguous())
        return done[:1]
    done = processor(ids, scores)
    return done


@dataclass(eq=False, slots=True)
class _Growing:
    tokens: np.ndarray  # int64, with room for more
    count: int


class TokensSoFar:
    """The tokens of requests as arrays, each of which is made once and grows with its request."""

    def __init__(self) -> None:
        self._kept: dict[Request, _Growing] = {}

    def of(self, requests: Sequence[Request]) -> list[np.ndarray]:  # of each request, [seen] int64
        found = []
        for request in requests:  # each row of each step comes by
            kept = self._kept.get(request) or self._begin(request)
            seen = request.prompt_tokens + len(request.generated)
            if seen > len(kept.tokens):
                more = np.empty(max(_ROOM, seen), dtype=np.int64)
                kept.tokens = np.concatenate([kept.tokens, more])
            if seen == kept.count + 1:
                kept.tokens[kept.count] = request.generated[-1]
            elif seen > kept.count:
                kept.tokens[kept.count : seen] = request.ids(kept.count, seen)
            kept.count = seen
            found.append(kept.tokens[:seen])
        return found

    def _begin(self, request: Request) -> _Growing:
        room = np.empty(min(_ROOM, request.max_new_tokens), dtype=np.int64)
        begun = _Growing(np.concatenate([request.prompt_ids, room]), request.prompt_tokens)
        self._kept[request] = begun
        return begun

    def forget_done(self) -> None:
        for request in [request for request in self._kept if request.finish_reason is not None]:
            del self._kept[request]


class Histories:
    """The tokens of some requests, as processors are given them."""

    def __init__(self, requests: Sequence[Request], device: torch.device, tokens: TokensSoFar | None = None) -> None:
        self._requests = requests
        self._device = device
        self._tokens = TokensSoFar() if tokens is None else tokens
        self._rows: tuple[torch.Tensor, ...] = ()

    def send(self) -> None:
        """All of them in one copy to the device."""
        every = self._tokens.of(self._requests)
        flat = to_device(np.concatenate(every)[None], self._device)
        self._rows = flat.split([len(ids) for ids in every], dim=1)

    def of(self, row: int) -> torch.Tensor:  # [1, length], without padding
        if not self._rows:
            self.send()
        return self._rows[row]

    def some(self, rows: Sequence[int]) -> Callable[[int], torch.Tensor]:
        """Those of a few rows, by their places among these."""
        return lambda place: self.of(rows[place])


def apply_looking_back(
    scores: torch.Tensor,
    requests: Sequence[Request],
    chains: Sequence[ProcessorChain],
    history: Callable[[int], torch.Tensor],  # of each row, [1, length]
    together: int = 1,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """The scores [rows, vocabulary] after the processors that look back; the chains have the same layout.

    ``together``: each group of so many neighbouring rows has the same chain and the same length, and is given to a
    processor of its own at once. ``masks``: what the rows' grammars allow, on the device of the scores.
    ``scores`` are not written to: a hook of the model's user may have kept them.
    """
    layout = chains[0].layout
    for place, kind in enumerate(layout.kinds[: layout.blind]):
        processor = chains[0].looking_back[place]
        if kind is ProcessorKind.BLIND:
            scores = apply_blind([processor], scores)
        elif kind is ProcessorKind.PENALTY:
            scores = processor(to_device(_padded(requests), scores.device), scores)
        elif kind is ProcessorKind.MINIMUM:
            own = [chain.looking_back[place] for chain in chains]
            unfinished = [row for row, request in enumerate(requests) if _must_go_on(own[row], request)]
            scores = _without_eos(scores, unfinished, layout.options)
        elif kind is ProcessorKind.GRAMMAR:
            assert masks is not None
            scores = masks.apply(scores)
        elif kind is ProcessorKind.ALLOWED:
            scores = _allowed_alone(scores, [chain.looking_back[place] for chain in chains], history, together)
        elif kind is ProcessorKind.LATEST:
            scores = _all_rows(scores, requests, processor)
        elif kind is ProcessorKind.ALIKE:
            scores = _rows_alike(scores, requests, [chain.looking_back[place] for chain in chains], history)
        else:
            own_scores = scores.clone()  # a processor may write to its own
            of_each = own_scores.split(together)
            processors_of_each = [chain.looking_back[place] for chain in chains[::together]]
            done: list[torch.Tensor] = []
            called = processor
            try:
                for number, (called, given) in enumerate(zip(processors_of_each, of_each, strict=True)):
                    first = number * together
                    more = range(first, first + together)
                    ids = history(first) if together == 1 else torch.cat([history(row) for row in more])
                    done.append(called(ids, given))
            except Exception as error:
                if isinstance(called, UserProcessor):
                    row = len(done) * together
                    say_where(error, f"the logits processor {called.name}", requests[row].index)
                raise
            in_place = all(result is given for result, given in zip(done, of_each, strict=True))
            scores = own_scores if in_place else torch.cat(done)
    return scores


def _allowed_alone(
    scores: torch.Tensor,
    own: Sequence[Any],  # of each row: the processor that holds its function
    history: Callable[[int], torch.Tensor],
    together: int,
) -> torch.Tensor:
    """Transformers' processor for all rows: it masks them at once, and asks each row's function in their order."""
    rows = iter(range(len(scores)))

    def allowed(*_: Any) -> Any:
        row = next(rows)
        return own[row]._prefix_allowed_tokens_fn(row // together, history(row)[0])

    ids = torch.empty(len(scores), 1, dtype=torch.long, device=scores.device)  # tells how many rows: nobody reads it
    processed: torch.Tensor = processors.PrefixConstrainedLogitsProcessor(allowed, together)(ids, scores)
    return processed


def _all_rows(scores: torch.Tensor, requests: Sequence[Request], processor: LogitsProcessor) -> torch.Tensor:
    latest = [request.generated[-1] if request.generated else int(request.prompt_ids[-1]) for request in requests]
    ids = to_device(np.array(latest, dtype=np.int64)[:, None], scores.device)
    try:
        result: torch.Tensor = processor(ids, scores.clone())  # a processor may write to its own
        return result.contiguous()
    except Exception as error:
        if isinstance(processor, UserProcessor):
            say_where(error, f"the logits processor {processor.name}")
        raise


def _rows_alike(
    scores: torch.Tensor,
    requests: Sequence[Request],
    own: Sequence[LogitsProcessor],
    history: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    alike: dict[tuple[int, int], list[int]] = {}
    for row, request in enumerate(requests):
        alike.setdefault((id(own[row]), request.seen), []).append(row)
    if len(alike) == 1:
        return _as_among_others(own[0], torch.cat([history(row) for row in range(len(requests))]), scores)
    result = torch.empty_like(scores)
    for rows in alike.values():
        index = to_device(np.array(rows), scores.device)
        result[index] = _as_among_others(own[rows[0]], torch.cat([history(row) for row in rows]), scores[index])
    return result


def _must_go_on(processor: LogitsProcessor, request: Request) -> bool:
    """Whether a processor of ``MINIMUM_LENGTHS`` forbids EOS."""
    if isinstance(processor, processors.MinLengthLogitsProcessor):
        return request.seen < int(processor.min_length)
    assert isinstance(processor, processors.MinNewTokensLengthLogitsProcessor)
    return request.seen - int(processor.prompt_length_to_skip) < int(processor.min_new_tokens)


def _without_eos(scores: torch.Tensor, rows: list[int], options: Options) -> torch.Tensor:
    eos = [token for token in sorted(options.eos_token_ids) if 0 <= token < scores.shape[-1]]
    if not rows or not eos:
        return scores
    where = np.repeat(rows, len(eos)), np.tile(eos, len(rows))
    nothing = torch.full((), -torch.inf, dtype=scores.dtype, device=scores.device)
    return scores.index_put(tuple(to_device(index, scores.device) for index in where), nothing)


def _padded(requests: Sequence[Request]) -> np.ndarray:  # [requests, longest]
    """The tokens of each request, padded with its first one: that leaves the set of its tokens as it is."""
    ids = np.empty((len(requests), max(request.seen for request in requests)), dtype=np.int64)
    for row, request in zip(ids, requests, strict=True):
        row[: request.seen] = request.ids(0, request.seen)
        row[request.seen :] = row[0]
    return ids
