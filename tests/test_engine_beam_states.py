"""Beam search where layers carry a state from token to token: each beam goes on from its own, however steps are cut.

The scheduler is tried without a model: a dictionary plays the states, slot -> the tokens that led up to it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_beam_cases import (
    CARRYING,
    FAMILY,
    OPTIONS,
    PREFIX,
    PROMPTS,
    STOPS,
    Case,
    assert_as_generate,
    check,
    proved,
    run,
)
from support_families import build
from support_scheduler_runs import BUDGETS, PAGE_SIZES

from hf_batchllm import BatchGenerator
from hf_batchllm.config import BatchConfig
from hf_batchllm.engine.beams import scheduler
from hf_batchllm.engine.beams.group import BeamGroup
from hf_batchllm.engine.beams.scheduler import BeamScheduler
from hf_batchllm.engine.smaller_steps import apart, parts_of
from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.model.states.state_batch import StateBatch
from hf_batchllm.model.states.state_storage import StateStorage
from hf_batchllm.planning.call_plan import CallPlan
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import Branch, FinishReason, Prefix, Unit, units_below
from hf_batchllm.planning.state_slots import StateSlots
from hf_batchllm.planning.step import Chunk, Step

# -- as generate -----------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("budget", [1, 64])
@pytest.mark.parametrize("family", CARRYING)
def test_steps_cut_anywhere_give_the_answers_of_generate(family: str, budget: int, size: int) -> None:
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[0]]  # two are equal
    check(prompts, family, {"page_size": size, "max_batch_tokens": budget}, eos_token_id=STOPS, pad_token_id=0)


@pytest.mark.some_cases
@pytest.mark.parametrize(("slots", "size"), [(0, 8), (6, 1)])
@pytest.mark.parametrize("family", CARRYING)
def test_with_little_memory_prompts_wait_and_begin_anew(family: str, slots: int, size: int) -> None:
    options = OPTIONS | {"max_new_tokens": 16, "eos_token_id": [100], "pad_token_id": 0}
    pages = -(-max(map(len, PROMPTS)) // size) + OPTIONS["num_beams"] * -(-15 // size)
    result, near = run(Case(family, PROMPTS, options, {"page_size": size}, pages, slots))
    assert near <= 1
    assert result.report.finished == len(result)


@pytest.mark.parametrize("family", [FAMILY, *CARRYING])
@pytest.mark.some_cases
def test_prefixes_are_kept_and_found(family: str) -> None:
    model = build(family)
    with proved(), BatchGenerator(model, page_size=4, keep_prefixes=4) as generator:
        first, result = (generator.generate(PROMPTS, **OPTIONS) for _ in range(2))
        for each in (first, result):
            assert assert_as_generate(Case(family, PROMPTS, OPTIONS), model, each) <= 1
        assert family != FAMILY or result.token_ids == first.token_ids
        assert result.report.cached_tokens == len(PREFIX) - 1
        generator._resources.kv.cache.check_integrity([])


# -- the scheduler alone ---------------------------------------------------------------------------------------


def ids_of(unit: Unit, begin: int, end: int) -> list[int]:
    ids: np.ndarray = unit.ids[begin:end] if isinstance(unit, Prefix) else unit.tokens(begin, end)
    return ids.tolist()


Job = tuple[list[int], int, int]  # the ids of a prompt, how many beams it has, how many new tokens


@dataclass
class Search:
    """Calls without their model: beams part at random, and each span finds the state of the tokens before it."""

    rng: random.Random
    budget: int = 64
    page_size: int = 4
    more_pages: int = 9  # than the largest of the prompts needs
    more_slots: int = 9
    most: int | None = None  # tokens of the parts that steps are cut into
    keep: int = 0  # prefixes, for later calls
    turns: bool = False  # whether groups take turns
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copied: int = 0
    beside: int = 0  # steps made while another one was on its way

    def run(self, *calls: Sequence[Job]) -> Search:
        config = BatchConfig(page_size=self.page_size, min_shared_tokens=0)
        plans = []
        for jobs in calls:
            ids, widths, new = zip(*jobs, strict=True)
            prompts = [Prompt(np.array(each, np.int32)) for each in ids]
            plans.append(CallPlan(prompts, [1] * len(prompts), new, widths, config))
        slots = StateSlots(max(plan.slots_needed for plan in plans) + self.more_slots)
        pages = max(plan.pages_needed for plan in plans) + self.more_pages
        self.cache = PagedCache(pages, self.page_size, self.keep, slots)
        for plan in plans:
            self.call(plan)
        return self

    def call(self, plan: CallPlan) -> None:
        self.cache.start_counting()
        lineup = plan.line_up(self.cache, [True] * len(plan.prompts), None)
        assert not lineup.too_long
        roots = lineup.requests
        self.groups = {root: BeamGroup(root, self.cache, []) for root in roots if isinstance(root, Branch)}
        self.scheduler = BeamScheduler(self.groups, gather_rows=self.rng.choice([0, 3]))
        self.scheduler.start(roots, self.cache, self.budget)
        self.scheduler.depth = 2 if self.turns else 1
        queue: deque[list[BeamGroup]] = deque()  # those whose beams have then all run
        for _ in range(20_000):
            step = None if queue and self.scheduler.must_know() else self.scheduler.next()
            self.check_cache()
            if step is None and not queue:
                break
            if step is not None:
                for part in [step] if self.most is None else parts_of(step, self.most):
                    self.play(part)
                self.beside += bool(queue)
                queue.append(self.complete(step))
            if step is None or len(queue) == self.scheduler.depth:
                self.choose(queue.popleft(), may_be_late=not queue)
            self.check_cache()
        assert all(root.done for root in roots)
        assert self.cache.kept_prefixes or self.cache.free_pages == self.cache.num_pages

    def check_cache(self) -> None:
        groups = [group for group in self.groups.values() if not group.root.done]
        self.cache.check_integrity([unit for group in groups for unit in (group.root, *group.beams) if unit.in_use])
        for group in groups:
            read: dict[Unit, int] = {}
            for unit in units_below(group.beams):
                if unit.base is not None:
                    read[unit.base] = max(read.get(unit.base, 0), unit.start)
            for below, upto in read.items():
                unread = isinstance(below, Branch) and not below.in_use and below.read_end != upto
                assert not unread, f"{below} is out of use, and read up to {upto} only"
        slots = self.cache.slots
        assert slots is not None
        for free in slots._free:
            self.states.pop(free, None)

    def play(self, step: Step) -> None:
        batch = StateBatch.of(step, step.chunks, np.ones(len(step.rows) + len(step.chunks)))
        read = {target: self.states[source] for source, target in batch.copies}
        self.states |= read
        self.copied += len(read)
        source, target = batch.source.tolist(), batch.target.tolist()
        assert len(set(target)) == len(target) and -1 not in target
        places = zip([*step], source, target, strict=True)
        left = {}
        for chunk, begins, leaves in places:
            assert begins == leaves or begins not in target, f"{chunk} begins with a state that moves on meanwhile"
            before = () if begins < 0 else self.states[begins]
            assert before == tuple(ids_of(chunk.unit, 0, chunk.begin)), f"{chunk} begins with a wrong state"
            left[leaves] = (*before, *ids_of(chunk.unit, chunk.begin, chunk.end))
        self.states |= left

    def complete(self, step: Step) -> list[BeamGroup]:
        units = [unit for unit in step.sampling() if isinstance(unit, Branch)]
        groups = dict.fromkeys(self.groups[unit.root] for unit in units)
        assert not any(group.complete for group in groups), "one goes on before its beams were chosen"
        for unit in units:
            group = self.groups[unit.root]
            if unit is not group.root or not group.made:
                group.logits[unit] = None
        return [group for group in groups if group.complete]

    def choose(self, groups: Sequence[BeamGroup], may_be_late: bool) -> None:
        for group in groups:
            if group.made + 1 >= group.root.max_new_tokens or self.rng.random() < 0.03:
                group.root.end(FinishReason.LENGTH)
                self.scheduler.finish(group.root)
                continue
            parents = [self.rng.randrange(max(1, len(group.beams))) for _ in range(group.width)]
            group.fork(parents, [self.rng.randrange(3) for _ in parents])
        if may_be_late and self.rng.random() < 0.03:  # time is over for one, which may wait or have beams half run
            late = [group for group in self.groups.values() if not group.root.done]
            for group in late[-1:]:
                group.root.end(FinishReason.TIME)
                self.scheduler.finish(group.root)


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=9)


JOBS = st.lists(st.tuples(PROMPT, st.integers(1, 4), st.integers(1, 14)), min_size=1, max_size=7)


@given(
    st.integers(0, 10**6),
    st.lists(JOBS, min_size=1, max_size=3),
    BUDGETS,
    PAGE_SIZES,
    st.sampled_from([0, 0, 1, 5, 40]),
    st.sampled_from([0, 0, 1, 4, 40]),
    st.sampled_from([None, None, 1, 2, 5]),
    st.sampled_from([0, 1, 5]),
    st.booleans(),
)
def test_every_span_begins_with_the_state_before_it(
    seed: int,
    calls: list[list[Job]],
    budget: int,
    page_size: int,
    more_pages: int,
    more_slots: int,
    most: int | None,
    keep: int,
    turns: bool,
) -> None:
    with patch.object(scheduler, "TURNS_FROM", 1):
        Search(random.Random(seed), budget, page_size, more_pages, more_slots, most, keep, turns).run(*calls)


def test_groups_take_turns() -> None:
    with patch.object(scheduler, "TURNS_FROM", 1):
        search = Search(random.Random(3), turns=True).run([([5, 6, number], 3, 9) for number in range(4)])
    assert search.beside > 8 and search.copied > 0


def test_a_copy_is_made_for_each_beam_that_parts() -> None:
    search = Search(random.Random(3)).run([([5, 6, 7], 3, 9)])
    assert 0 < search.copied <= 7 * 2


# -- copies ----------------------------------------------------------------------------------------------------


def beams_of(cache: PagedCache, width: int = 3) -> BeamGroup:
    root = Branch(0, np.arange(5, dtype=np.int32), 9)
    root.width = width
    cache.attach(root, None)
    cache.reserve(root, 5)
    root.computed = 5
    return BeamGroup(root, cache, [])


def step_on(group: BeamGroup, parents: Sequence[int]) -> None:
    group.fork(parents, [7] * len(parents))
    for beam in group.beams:
        group._cache.reserve(beam, beam.length)
        beam.computed = beam.length


def test_a_beam_that_parts_gets_a_copy_of_the_state_of_the_other_one() -> None:
    slots = StateSlots(6)
    cache = PagedCache(40, 2, slots=slots)
    group = beams_of(cache)
    step_on(group, [0, 0, 0])
    assert slots.copies() == [], "the prompt's state stays as it is"
    first, second, _ = (beam.slot for beam in group.beams)
    step_on(group, [1, 1, 0])
    before = [beam.slot for beam in group.beams]
    assert before[0] == second and before[2] == first
    assert slots.copies() == [(second, before[1])] and slots.copies() == []
    cache.check_integrity([group.root, *group.beams])


def test_a_beam_without_successors_gives_its_slot_back_and_keeps_what_others_read() -> None:
    slots = StateSlots(4)
    cache = PagedCache(40, 2, slots=slots)
    group = beams_of(cache)
    step_on(group, [0, 0, 0])
    step_on(group, [0, 0, 0])  # the first beam is read by the two others
    gone = group.beams[0]
    group.fork([1, 1, 2], [8, 8, 8])
    assert gone.pages and gone.slot < 0 and slots.free == 1
    cache.check_integrity([group.root, *group.beams])
    group.end()
    cache.check_integrity([])
    assert slots.free == 4


def test_no_copy_is_left_for_a_beam_that_is_gone() -> None:
    slots = StateSlots(6)
    cache = PagedCache(40, 2, slots=slots)
    group = beams_of(cache)
    step_on(group, [0, 0, 0])
    step_on(group, [0, 0, 1])
    group.dissolve()
    assert slots.copies() == []
    group.restore()
    assert slots.copies() == [], "they stand on the prompt again"
    cache.check_integrity([group.root, *group.beams])


def test_a_beam_that_parts_has_all_that_a_beam_has() -> None:
    group = beams_of(PagedCache(40, 2))
    step_on(group, [0, 0, 0])
    step_on(group, [0, 0, 0])
    made, parted = Branch(0, np.arange(5, dtype=np.int32), 9), group.beams[1]
    names = [name for kind in Branch.__mro__ for name in getattr(kind, "__slots__", ())]
    own = {"base", "computed", "generated", "lost_end", "pages", "read_end", "root", "start"}
    of_prompt = {"prompt_ids", "prompt_keys"}
    assert all(getattr(parted, name) is getattr(made, name) for name in set(names) - own - of_prompt)
    assert all(hasattr(parted, name) for name in names)
    assert all(getattr(parted, name) is getattr(group.root, name) for name in of_prompt)
    assert (parted.root, parted.base, parted.start, parted.generated) == (group.root, group.beams[0], 6, [7, 7])


def test_slots_are_counted_with_the_beams() -> None:
    prompts = [Prompt(np.array(ids, np.int32)) for ids in ([1] * 8 + [2], [1] * 8 + [3], [4])]
    plan = CallPlan(prompts, [1] * 3, [5] * 3, [2, 4, 3], BatchConfig(min_shared_tokens=0))
    assert (plan.sharing.depth, len(plan.sharing.segments)) == (1, 1)
    assert (plan.slots_at_once, plan.slots_needed) == (3 + 9 + 1, 1 + 4)
    for count, fits in ((4, False), (5, True)):
        root = Branch(0, np.arange(5, dtype=np.int32), 9)
        root.width = 4
        assert PagedCache(99, 2, slots=StateSlots(count)).fits_alone(root) == fits


def storage(rows: int, dtype: torch.dtype) -> tuple[StateStorage, list[torch.Tensor]]:
    made = StateStorage(rows)
    states = [made.of(call, (2, 3), dtype, torch.device("cpu")) for call in range(2)]
    for call, each in enumerate(states):
        each.copy_(torch.arange(rows)[:, None, None] + 100 * call)
    return made, states


@pytest.mark.parametrize(
    ("pairs", "after"),
    [([], [0, 1, 2, 3]), ([(0, 1), (0, 3)], [0, 0, 2, 0]), ([(0, 1), (1, 2), (2, 0)], [2, 0, 1, 3])],
    ids=str,
)
@pytest.mark.parametrize("at_once", [1, 10**6])
def test_states_are_copied_as_if_at_the_same_time(
    pairs: list[tuple[int, int]], after: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_batchllm.model.states.state_storage.COPIED_AT_ONCE", at_once)
    made, states = storage(4, torch.bfloat16)
    made.copy(pairs)
    for call, each in enumerate(states):
        assert each[:, 1, 2].tolist() == [100 * call + slot for slot in after]


def test_copies_go_with_the_first_part_of_a_step() -> None:
    slots = StateSlots(6)
    group = beams_of(PagedCache(40, 2, slots=slots))
    step_on(group, [0, 0, 0])
    step_on(group, [0, 0, 0])
    step = Step(rows=[*group.beams], copies=slots.copies())
    assert len(step.copies) == 2
    assert [part.copies for part in parts_of(step, 1)] == [step.copies, [], []]
    other, beams = beams_of(PagedCache(40, 2, slots=slots)), group.beams
    on_it = other.root.fork([7], 5)
    on_it.base = other.root
    step.chunks += [Chunk(other.root, 0, 5), Chunk(on_it, 5, 6)]
    assert [(part.rows, part.copies) for part in apart(step)] == [(beams, step.copies), ([], [])]
