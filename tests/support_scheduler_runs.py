"""The engine without its model: for tests of schedulers and of the cache's bookkeeping.

The cache's tensors are played by a dictionary: slot -> the tokens that lead up to what was written there. A step may
read only slots that hold exactly what it takes them to hold, so a wrong page, a wrong order or a stale prefix shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.planning.base_scheduler import BaseScheduler
from hf_batchllm.planning.lineup import Lineup, line_up
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Prefix, Request, Unit
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler
from hf_batchllm.planning.sharing import plan_sharing
from hf_batchllm.planning.step import Step


@dataclass
class Job:
    """A prompt, how long its answer may become and how long it does become."""

    ids: list[int]
    limit: int
    stops: int

    @property
    def prompt(self) -> Prompt:
        return Prompt(np.array(self.ids, np.int32))

    @property
    def tokens(self) -> int:
        return len(self.ids) + self.limit - 1


@dataclass
class Drive:
    """A call of the engine, without its model, that checks each step before it takes it."""

    cache: PagedCache
    scheduler: BaseScheduler
    budget: int
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> the tokens up to what it holds
    steps: list[Step] = field(default_factory=list)
    lineup: Lineup = field(default_factory=lambda: Lineup([], []))
    most_running: int = 0
    tokens: int = 0
    needed: int = 0
    lost_tokens: int = 0

    def begin(self, jobs: Sequence[Job], fee: int = 0) -> None:
        prompts, limits = [job.prompt for job in jobs], [job.limit for job in jobs]
        plan = plan_sharing(prompts, min_shared_tokens=fee, new_tokens=limits)
        self.cache.start_counting()
        self.lineup = line_up(prompts, plan, limits, self.cache)
        self.stops = {request: job.stops for request, job in zip(self.lineup.requests, jobs, strict=True)}
        self.scheduler.start(self.lineup.requests, self.cache, self.budget)

    def call(self, jobs: Sequence[Job], fee: int = 0) -> Drive:
        """All of one call, to its end."""
        self.steps, self.tokens, self.most_running = [], 0, 0
        self.begin(jobs, fee)
        self.needed = self.count_needed(jobs)
        assert not self.lineup.too_long
        # A step runs a token at least, and most of what is run twice was given up for something that moved.
        most_steps = 100 + 20 * sum(job.tokens for job in jobs)
        while (step := self.next()) is not None:
            self.sample(step)
            assert len(self.steps) <= most_steps, "no end in sight"
        assert all(request.done for request in self.lineup.requests)
        for request, job in zip(self.lineup.requests, jobs, strict=True):
            assert len(request.generated) == min(job.stops, job.limit)
            assert not request.pages and request.base is None
        assert all(prefix.running == 0 for prefix in self.units() if isinstance(prefix, Prefix))
        self.lost_tokens = self.cache.lost_tokens - self.cache.still_lost([])
        return self

    def units(self) -> list[Unit]:
        """Every unit that the call knows of, and what they stand on."""
        found: dict[Unit, None] = dict.fromkeys([*self.lineup.requests, *self.lineup.prefixes])
        for unit in list(found):
            found |= dict.fromkeys(prefix for prefix, _ in unit.ancestors())
        return list(found)

    def unfinished(self) -> list[Request]:
        return [request for request in self.lineup.requests if not request.done]

    def next(self) -> Step | None:
        oldest = min(self.unfinished(), key=lambda request: request.rank, default=None)
        had = oldest.computed if oldest is not None else 0
        step = self.scheduler.next()
        assert (step is None) == (not self.unfinished())
        self.cache.check_integrity(self.unfinished())
        if step is None or oldest is None:
            return None
        if (
            not self.lineup.cached_tokens and not oldest.done
        ):  # a prefix from an earlier call may have to be cut down, once
            assert oldest.computed >= had, "the oldest was preempted"
        self.check(step)
        self.steps.append(step)
        self.tokens += step.tokens
        self.most_running = max(self.most_running, len(getattr(self.scheduler, "running", ())))
        return step

    def check(self, step: Step) -> None:
        assert 0 < step.tokens <= self.budget
        assert len(set(step.rows)) == len(step.rows)
        sampling = step.sampling()
        assert len(set(sampling)) == len(sampling)
        for chunk in step:
            unit, end = chunk.unit, chunk.end
            assert unit.start <= chunk.begin < end <= unit.computed, "a chunk is not counted as computed"
            assert not isinstance(unit, Request) or not unit.done
            # What comes before it was written in an earlier step, or further up in this one.
            ids = tuple(self.tokens_of(unit, end))
            slots = self.slots_of(unit, end)
            for position in range(chunk.begin, end):
                self.contents[slots[position]] = ids[: position + 1]
            for position in range(end):
                assert self.contents.get(slots[position]) == ids[: position + 1], f"{unit} reads a wrong {position}"
        for request in sampling:
            assert request.computed == request.length, "sampled before all of its tokens were run"
        if isinstance(self.scheduler, GroupScheduler):
            ranks = [request.rank for request in step.rows]
            assert ranks == sorted(ranks)
            ranks = [chunk.unit.rank for chunk in step.chunks if isinstance(chunk.unit, Request)]
            assert ranks == sorted(ranks)
        if isinstance(self.scheduler, FifoScheduler):
            assert not (step.rows and step.chunks)
            assert self.scheduler.preemptions == 0

    def tokens_of(self, unit: Unit, end: int) -> list[int]:
        if isinstance(unit, Prefix):
            return unit.ids[:end].tolist()
        assert isinstance(unit, Request)
        return unit.tokens(0, end).tolist()

    def slots_of(self, unit: Unit, end: int) -> list[int]:
        """Where the K and V of positions ``[0, end)`` are found."""
        slots, size = [], self.cache.page_size
        for part, upto in [*unit.ancestors(), (unit, end)]:
            for offset in range(upto - part.start):
                slots.append(part.pages[offset // size] * size + offset % size)
        assert len(slots) == end
        return slots

    def sample(self, step: Step) -> None:
        for request in step.sampling():
            token = len(request.generated) * 1000 + request.index
            stops = len(request.generated) + 1 >= self.stops[request]
            request.take(token, FinishReason.STOP if stops else None)
            if request.done:
                self.scheduler.finish(request)
        self.forget_free_pages()
        self.cache.check_integrity(self.unfinished())

    def forget_free_pages(self) -> None:
        """What nobody holds may be overwritten any time: from here on reading it is a mistake."""
        held = {page for unit in self.units() for page in unit.pages}
        held |= {page for prefix in self.kept for page in prefix.pages}
        for slot in [slot for slot in self.contents if slot // self.cache.page_size not in held]:
            del self.contents[slot]

    @property
    def kept(self) -> list[Prefix]:
        """Prefixes of earlier calls, and what those stand on."""
        leaves = list(self.cache._kept)
        return [*leaves, *(prefix for leaf in leaves for prefix, _ in leaf.ancestors())]

    def count_needed(self, jobs: Sequence[Job]) -> int:
        """Tokens that have to be run when nothing is ever given up."""
        read: dict[Prefix, int] = {}
        for request in self.lineup.requests:
            for prefix, cut in request.ancestors():
                read[prefix] = max(read.get(prefix, 0), cut)
        return sum(max(0, cut - prefix.computed) for prefix, cut in read.items()) + sum(
            len(job.ids) - request.start + min(job.stops, job.limit) - 1
            for request, job in zip(self.lineup.requests, jobs, strict=True)
        )


def bare_minimum(jobs: Sequence[Job], page_size: int) -> int:
    """Pages for the largest request when it is alone."""
    return max(-(-job.tokens // page_size) for job in jobs)


def jobs_strategy(longest: int = 10, most: int = 10) -> st.SearchStrategy[list[Job]]:
    # Two tokens and short prompts: prefixes inside prefixes, and prompts that are in the list twice.
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=longest)
    job = st.builds(Job, ids, st.integers(1, 12), st.integers(1, 12))
    return st.lists(job, min_size=1, max_size=most)


PAGE_SIZES = st.sampled_from([1, 2, 3, 4, 7, 16, 64])
BUDGETS = st.sampled_from([1, 2, 3, 5, 8, 20, 10_000])
