"""How ``score`` is run: few sequences from which all items are read, and logits nowhere but where one of them needs it.

The logits at a position tell of the next token, so the last token of an item is looked up and never run. Items that
differ in that one alone (answers of a single token) are read from one sequence: their context.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from transformers import GenerationConfig

from .batch import ModelBatch
from .endings import Rules
from .errors import PromptError
from .options import Options
from .prompts import Prompt
from .recorder import Recorder
from .recording import Recording, Wanted
from .request import Chunk, Request, Unit
from .results import RunReport
from .runner import ModelRunner, current_device
from .score_inputs import Item, ScoreInputs
from .scores import Score
from .work import Work

_MOST_LOGITS = 1 << 28  # numbers that a step gives where each of its tokens is asked for
_AT_ONCE = 1 << 25  # numbers that are looked at at a time
_AT_ONCE_ON_A_CPU = 1 << 20  # for each thread: they stay in its cache


def options_of_scores() -> Options:
    """Each sequence gets one token, which nobody looks at: the logits that it is picked from are what is wanted."""
    return Options(
        config=GenerationConfig(max_new_tokens=1, do_sample=False),
        eos_token_ids=frozenset(),
        pad_token_id=None,
        do_sample=False,
        num_return_sequences=1,
        has_default_length=False,
    )


@dataclass
class ScoreWork:
    """What a call of ``score`` is asked for: ``work`` is what the engine runs, and each item is read from a part."""

    inputs: ScoreInputs
    work: Work
    sources: np.ndarray  # [items]  from which of the work's prompts each one is read

    @classmethod
    def of(cls, inputs: ScoreInputs) -> ScoreWork:
        prompts, sources = sequences_to_run(inputs.items)
        count = len(prompts)
        work = Work(
            prompts,
            list(range(count)),
            {},
            [options_of_scores()] * count,
            [1] * count,
            None,
            [Rules()] * count,
        )
        return cls(inputs, work, sources)

    @cached_property
    def readers(self) -> list[list[int]]:
        """Of each prompt of the work, the items that are read from it."""
        order = np.argsort(self.sources, kind="stable")
        ends = np.cumsum(np.bincount(self.sources, minlength=len(self.work.prompts)))
        return [some.tolist() for some in np.split(order, ends[:-1])] if len(ends) else []

    def _move_problems(self, problems: Mapping[int, str]) -> None:
        """From sequences to the items that are read from them."""
        for prompt, why in problems.items():
            for number in self.readers[prompt]:
                item = self.inputs.items[number]
                place = item.index, item.choice
                self.inputs.problems[place] = why
                if item.text is not None:
                    self.inputs.texts[place] = item.text

    @contextmanager
    def problems_named(self) -> Iterator[None]:
        """While the sequences are lined up: what does not fit is said of contexts, which people know."""
        try:
            yield
        except PromptError as error:
            self._move_problems(error.problems)
            raise self.inputs.error() from None
        self._move_problems(self.work.problems)

    def failures(self) -> Iterator[Score]:
        for (index, choice), why in self.inputs.problems.items():
            yield Score(index, choice, self.inputs.texts.get((index, choice)), [], [], False, why)


def sequences_to_run(items: Sequence[Item]) -> tuple[list[Prompt], np.ndarray]:
    """The sequences that have to be run, none of which is the beginning of another; and which of them each item is in.

    Sorted, a sequence stands right before those that begin with it.
    """
    by_key: dict[Hashable, list[int]] = {}
    for number, item in enumerate(items):
        by_key.setdefault(item.key, []).append(number)
    packed = [np.ascontiguousarray(item.ids[:-1], np.int32).tobytes() for item in items]
    longest = np.arange(len(items))  # the item with the longest sequence that an item's own is the beginning of
    for numbers in by_key.values():
        numbers.sort(key=packed.__getitem__)
        for number, following in zip(numbers[-2::-1], numbers[:0:-1], strict=True):
            if packed[following].startswith(packed[number]):
                longest[number] = longest[following]
    # In the order of the list, as far as there is one.
    kept, first = np.unique(longest, return_index=True)
    order = np.argsort(first)
    place = np.empty(len(items), np.int64)
    place[kept[order]] = np.arange(len(kept))
    prompts = [Prompt(np.frombuffer(packed[number], np.int32), items[number].key) for number in kept[order].tolist()]
    return prompts, place[longest]


class Lookups:
    """Which tokens are looked up at which positions of which units, and what was found."""

    def __init__(self, items: Sequence[Item], readers: Sequence[Sequence[int]]) -> None:
        self._items = items
        self._readers = readers
        counts = np.array([len(item.ids) - item.first for item in items], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        nothing = [np.zeros(0, np.int32)]
        self._targets = np.concatenate([item.ids[item.first :] for item in items] or nothing).astype(np.int64)
        self._logprobs = np.full(len(self._targets), np.nan, np.float32)
        self._greedy = np.zeros(len(self._targets), bool)
        self._of: dict[Unit, tuple[int, int]] = {}  # where its lookups stand in the following two
        self._positions = self._places = np.zeros(0, np.int64)  # a unit's in order; the places are those of targets
        self._seen: dict[Unit, int] = {}  # logits at all positions before have been asked for

    def reach(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        return [min(self._items[number].first - 1 for number in numbers) for numbers in self._readers]

    def start(self, requests: Sequence[Request]) -> None:
        """The call's requests, attached to their prefixes. Their ``index`` says who reads them."""
        units: dict[Unit, int] = {}
        parts: list[tuple[int, int, int, int]] = []  # of a unit [begin, end), for the targets from there on
        for request in requests:
            chain = [*request.ancestors(), (request, len(request.prompt_ids))]
            chain.reverse()
            for number in self._readers[request.index]:
                item = self._items[number]
                first, end = item.first - 1, len(item.ids) - 1
                target = int(self._offsets[number]) - first
                for unit, cut in chain:
                    begin, stop = max(unit.start, first), min(cut, end)
                    if begin < stop:
                        parts.append((units.setdefault(unit, len(units)), begin, stop, target + begin))
                    if unit.start <= first:
                        break
        which, begins, ends, targets = np.array(parts, np.int64).reshape(-1, 4).T
        counts = ends - begins
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owners, positions = np.repeat(which, counts), np.repeat(begins, counts) + steps
        order = np.lexsort((positions, owners))
        self._positions, self._places = positions[order], (np.repeat(targets, counts) + steps)[order]
        edges = np.searchsorted(owners[order], np.arange(len(units) + 1)).tolist()
        self._of = {unit: (edges[number], edges[number + 1]) for unit, number in units.items()}

    def wanted(self, chunk: Chunk) -> list[Chunk]:
        """The parts of a chunk whose logits are asked for; a request's last token is sampled anyway."""
        unit, end = chunk.unit, chunk.end
        begin = max(chunk.begin, self._seen.get(unit, 0))
        self._seen[unit] = max(begin, end)
        if isinstance(unit, Request):
            end = min(end, unit.length - 1)
        positions = np.unique(self._positions[self._lookups(unit, begin, end)])
        if not len(positions):
            return []
        stretches = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
        return [Chunk(unit, int(stretch[0]), int(stretch[-1]) + 1) for stretch in stretches]

    def pairs(self, sampling: Sequence[Request], asked: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
        """For each lookup in a step's logits, its row and its place among the targets. Rows come in order."""
        rows: list[np.ndarray] = [np.zeros(0, np.int64)]
        places: list[np.ndarray] = [np.zeros(0, np.int64)]
        row = 0
        for part in [*(Chunk(each, each.length - 1, each.length) for each in sampling), *asked]:
            here = self._lookups(part.unit, part.begin, part.end)
            rows.append(self._positions[here] - part.begin + row)
            places.append(self._places[here])
            row += part.end - part.begin
        return np.concatenate(rows), np.concatenate(places)

    def targets(self, places: np.ndarray) -> np.ndarray:
        return self._targets[places]

    def put(self, places: np.ndarray, logprobs: np.ndarray, greedy: np.ndarray) -> None:
        self._logprobs[places], self._greedy[places] = logprobs, greedy

    def scores(self, request: Request, decode: Callable[[list[int]], str | None]) -> Iterator[Score]:
        """Of the items that are read from a request that has ended."""
        for number in self._readers[request.index]:
            item = self._items[number]
            mine = slice(self._offsets[number], self._offsets[number + 1])
            ids = self._targets[mine].tolist()
            text = decode(ids) if item.text is None else item.text
            logprobs, greedy = self._logprobs[mine].tolist(), bool(self._greedy[mine].all())
            yield Score(item.index, item.choice, text, ids, logprobs, greedy)

    def _lookups(self, unit: Unit, begin: int, end: int) -> slice:
        """Those at positions ``[begin, end)``."""
        first, last = self._of.get(unit, (0, 0))
        low, high = np.searchsorted(self._positions[first:last], (begin, end)).tolist()
        return slice(first + low, first + max(low, high))


class Scoring(Recording):
    """What a call of ``score`` takes down."""

    def __init__(self, work: ScoreWork) -> None:
        super().__init__([])
        self._work = work
        self.lookups = Lookups(work.inputs.items, work.readers)
        self.scores = self._wanted(range(len(work.work.prompts)))

    @property
    def watched(self) -> Lookups:
        return self.lookups

    def in_report(self, report: RunReport, requests: Sequence[Request]) -> RunReport:
        every = self._wanted(request.index for request in requests)
        ended = self._wanted(request.index for request in requests if request.done)
        tokens = every.prompt_tokens
        needed = round((1 - report.saving) * report.prompt_tokens)
        return replace(
            report,
            sequences=every.scores,
            finished=ended.scores,
            prompt_tokens=tokens,
            saving=1 - needed / tokens if tokens else 0.0,
            new_tokens=0,
            scored_tokens=ended.scored_tokens,
        )

    def _wanted(self, prompts: Iterable[int]) -> Wanted:
        """Of what is read from these prompts of the work."""
        work = self._work
        items = [work.inputs.items[number] for prompt in prompts for number in work.readers[prompt]]
        return Wanted(
            len(items),
            sum(len(item.ids) - 1 for item in items),
            sum(len(item.ids) - item.first for item in items),
        )

    def most_tokens(self, budget: int, vocabulary: int) -> int:
        return max(1, min(budget, _MOST_LOGITS // vocabulary))

    def step_bytes(self, tokens: int, vocabulary: int) -> int:
        logits = tokens * vocabulary
        return 4 * (logits + 2 * min(logits, _AT_ONCE))

    def launcher(self, runner: ModelRunner, recorder: Recorder) -> ScoreLauncher:
        return ScoreLauncher(runner, self.lookups, recorder)


class ScoreLauncher:
    """Looks tokens up on the device. What was found comes back later, behind an event: the next step need not wait."""

    most_times = 1

    def __init__(self, runner: ModelRunner, lookups: Lookups, recorder: Recorder) -> None:
        self._runner = runner
        self._lookups = lookups
        self._recorder = recorder
        self._device = runner.architecture.device

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        nobody_looks = np.zeros((len(sampling), 1), np.int64)
        rows, places = self._lookups.pairs(sampling, batch.asked)
        with current_device(self._device):
            logits = self._runner.every_row(batch)
            if not len(rows):
                return lambda: nobody_looks
            self._recorder.switch("tokens")
            found = self._on_its_way(*looked_up(logits, rows, self._lookups.targets(places)))

        def wait() -> np.ndarray:
            self._lookups.put(places, *found())
            return nobody_looks

        return wait

    def back(self) -> None:
        """Every step looks at everything anew."""

    def _on_its_way(self, *tensors: torch.Tensor) -> Callable[[], list[np.ndarray]]:
        if self._device.type != "cuda":
            return lambda: [tensor.cpu().numpy() for tensor in tensors]
        landed = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for there, here in zip(landed, tensors, strict=True):
            there.copy_(here, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> list[np.ndarray]:
            event.synchronize()
            return [tensor.numpy() for tensor in landed]

        return wait


@torch.no_grad()
def looked_up(
    logits: torch.Tensor, rows: np.ndarray, tokens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:  # [pairs] float32, [pairs] bool
    """For each pair of a row of ``logits`` [n, vocabulary] (in order) and a token: its log-probability, and whether it
    is the likeliest, the first one among equals.
    """
    device, vocabulary = logits.device, logits.shape[-1]
    few = _AT_ONCE_ON_A_CPU * torch.get_num_threads() if device.type == "cpu" else _AT_ONCE
    few = max(1, few // vocabulary)
    begins = list(range(0, len(logits), few))
    edges = np.searchsorted(rows, [*begins, len(logits)]).tolist()
    here, chosen = (_sent(values, device) for values in (rows, tokens))
    logprobs: list[torch.Tensor] = []
    greedy: list[torch.Tensor] = []
    for begin, first, last in zip(begins, edges, edges[1:], strict=False):
        if first == last:
            continue
        some = logits[begin : begin + few].float()
        at, own = here[first:last] - begin, chosen[first:last]
        whole, best = some.logsumexp(dim=-1), some.argmax(dim=-1)  # [few]
        logprobs.append(some[at, own] - whole[at])
        greedy.append(best[at] == own)
    return torch.cat(logprobs), torch.cat(greedy)


def _sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
