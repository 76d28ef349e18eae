"""The split of a plan: every prompt once, prefixes together where that pays, and nobody waits for long."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.planning.pieces import Piece, Split, TokenCosts, split_plan
from hf_batchllm.planning.sharing import plan_sharing
from hf_batchllm.results.sharing_plan import SharingPlan

RNG = np.random.default_rng(0)


def planned(prompts: list[list[int]], new_tokens: list[int], fee: int = 0) -> SharingPlan:
    return plan_sharing(
        [Prompt(np.array(ids, np.int32)) for ids in prompts], min_shared_tokens=fee, new_tokens=new_tokens
    )


def groups(count: int, members: int, shared: int, own: int) -> list[list[int]]:
    """Shuffled prompts, ``members`` of which share so many tokens."""
    made = []
    for _ in range(count):
        prefix = RNG.integers(0, 30_000, shared).tolist()
        made += [prefix + RNG.integers(0, 30_000, own).tolist() for _ in range(members)]
    return [made[place] for place in RNG.permutation(len(made))]


def split_of(prompts: list[list[int]], new: int, processes: int, costs: TokenCosts | None = None) -> Split:
    limits = [new] * len(prompts)
    return split_plan(planned(prompts, limits), limits, processes, costs)


def cost_of_share(split: Split, share: list[int]) -> float:
    above = {segment for number in share for segment in split.pieces[number].above}
    return sum(split.pieces[number].own for number in share) + sum(split.segment_costs[each] for each in above)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=30),
    new=st.integers(1, 9),
    processes=st.integers(1, 5),
    fee=st.integers(0, 3),
)
def test_every_prompt_is_in_one_piece_and_every_piece_in_one_share(
    prompts: list[list[int]], new: int, processes: int, fee: int
) -> None:
    limits = [new] * len(prompts)
    plan = planned(prompts, limits, fee)
    split = split_plan(plan, limits, processes)
    assert sorted(itertools.chain(*(piece.prompts for piece in split.pieces))) == list(range(len(prompts)))
    assert sorted(itertools.chain(*split.shares)) == list(range(len(split.pieces)))
    assert len(split.shares) == processes
    for share, cost in zip(split.shares, split.costs, strict=True):
        assert share == sorted(share), "pieces that share something run one after the other"
        assert cost >= cost_of_share(split, share) - 1e-6
    # In the order of the plan, so that neighbours share.
    assert list(itertools.chain(*(piece.prompts for piece in split.pieces))) == plan.order.tolist()


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=20),
    processes=st.integers(1, 4),
)
def test_what_a_piece_computes_besides_is_what_stands_above_its_prompts(
    prompts: list[list[int]], processes: int
) -> None:
    """With reading for nothing, costs are tokens: of all pieces by themselves as of plans of their own prompts."""
    limits = [1] * len(prompts)
    plan = planned(prompts, limits)
    split = split_plan(plan, limits, processes, TokenCosts(key=0.0))
    own = plan.lengths.copy()
    for prompt, parent in enumerate(plan.parents.tolist()):
        own[prompt] -= plan.segments[parent].end if parent >= 0 else 0
    for number, piece in enumerate(split.pieces):
        below = set()
        for prompt in piece.prompts:
            at = int(plan.parents[prompt])
            while at >= 0:
                below.add(at)
                at = plan.segments[at].parent
        assert set(piece.above) <= below
        tokens = sum(int(own[prompt]) + 1 for prompt in piece.prompts) + sum(len(plan.segments[each]) for each in below)
        assert split.cost(number) == pytest.approx(tokens)


def computed_twice(split: Split) -> set[int]:
    """Segments above pieces of several processes."""
    above = [{each for number in share for each in split.pieces[number].above} for share in split.shares]
    return {each for one, other in itertools.combinations(above, 2) for each in one & other}


def test_many_groups_are_not_parted() -> None:
    split = split_of(groups(100, 16, 2000, 200), 100, 2)
    assert max(split.costs) < 1.02 * min(split.costs)
    assert not computed_twice(split)


@pytest.mark.parametrize("processes", [2, 8])
def test_a_single_group_is_parted_among_all(processes: int) -> None:
    split = split_of(groups(1, 400, 2000, 200), 100, processes)
    assert all(split.shares) and max(split.costs) < 1.1 * sum(split.costs) / processes
    for share in split.shares:
        assert all(split.pieces[number].above for number in share)


def test_nobody_waits_longer_than_for_a_prefix() -> None:
    split = split_of(groups(1, 4, 2000, 20), 10, 2, TokenCosts(key=0.0))
    assert max(split.costs) <= 2000 + 4 * 30  # as long as one process would take
    split = split_of([*groups(1, 2, 3000, 1), *groups(1, 1, 0, 3000)], 1, 2, TokenCosts(key=0.0))
    assert not computed_twice(split) and max(split.costs) <= 3004


def test_three_groups_for_two() -> None:
    """One of them is parted: two whole ones would take a third longer."""
    split = split_of(groups(3, 16, 2000, 200), 100, 2)
    assert max(split.costs) < 1.01 * min(split.costs)
    assert len(computed_twice(split)) == 1


def test_long_answers_count() -> None:
    """A few prompts with long answers take as long as many with short ones."""
    prompts = groups(200, 1, 0, 50)
    limits = [500] * 20 + [10] * 180
    split = split_plan(planned(prompts, limits), limits, 2)
    long = [sum(prompt < 20 for number in share for prompt in split.pieces[number].prompts) for share in split.shares]
    assert max(split.costs) < 1.05 * min(split.costs) and abs(long[0] - long[1]) <= 4


def test_samples_share_their_prompt() -> None:
    prompts = groups(8, 1, 0, 1000)
    limits = [16 * 10] * 8
    plan = planned(prompts, limits)
    split = split_plan(plan, limits, 2, TokenCosts(key=0.0), samples=[16] * 8)
    assert sum(split.costs) == pytest.approx(8 * (1000 + 160))


def test_a_deep_chain_needs_no_recursion() -> None:
    prompts = [[*range(length), 99_999] for length in range(1, 1500)]
    split = split_of(prompts, 2, 3)
    assert sorted(itertools.chain(*(piece.prompts for piece in split.pieces))) == list(range(len(prompts)))


def test_no_prompts() -> None:
    split = split_of([], 1, 3)
    assert split.pieces == [] and split.shares == [[], [], []] and split.longest == 0.0


def test_more_processes_than_prompts() -> None:
    split = split_of([[1, 2], [3, 4]], 1, 5)
    assert sorted(map(len, split.shares)) == [0, 0, 0, 1, 1]


def test_the_same_each_time() -> None:
    prompts = groups(30, 5, 100, 20)
    assert split_of(prompts, 9, 4) == split_of(prompts, 9, 4)


def test_pieces_are_small_enough_to_be_handed_on() -> None:
    split = split_of(groups(4, 200, 500, 50), 20, 4)
    longest = max(split.cost(number) for number in range(len(split.pieces)))
    assert longest < split.longest / 4
    assert all(isinstance(piece, Piece) for piece in split.pieces)
