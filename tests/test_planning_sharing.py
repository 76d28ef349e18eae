"""Plans are exact: cheapest over all choices of segments, true to the tokens, and the same for every input order."""

import itertools
import random
from html import escape

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_html import report_of, view_of

from hf_batchllm.errors import PromptError
from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.planning.sharing import plan_prompts, plan_sharing
from hf_batchllm.planning.worthwhile_prefixes import build_tree, nearest_kept, shared_lengths
from hf_batchllm.results.sharing_plan import Segment

# Few tokens and short prompts, so that prefixes, duplicates and ties abound; negative and wide ids as bytes sort oddly.
TOKENS = st.sampled_from([0, 1, 256, 2**31 - 1])
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=1, max_size=12)
KEYS = st.sampled_from([None, "a", ("b", 1)])


def as_prompts(rows, keys=None):
    return [Prompt(np.array(row, np.int32), key) for row, key in zip(rows, keys or [None] * len(rows), strict=True)]


# --- the cheapest plan, worked out in other ways -----------------------------------------------------------------


def shareable_prefixes(rows):
    """Every prefix that at least two rows can share without giving away their last token: a trie, spelled out."""
    counts = {}
    for row in rows:
        for end in range(1, len(row)):
            counts[tuple(row[:end])] = counts.get(tuple(row[:end]), 0) + 1
    return [prefix for prefix, count in counts.items() if count > 1]


def branching(prefixes, rows):
    """Those of them where rows part: no longer prefix is shared by as many."""

    def below(prefix):
        return sum(tuple(row[: len(prefix)]) == prefix and len(row) > len(prefix) for row in rows)

    return [p for p in prefixes if not any(below(p) == below(q) for q in prefixes if q[: len(p)] == p and q != p)]


def cost_of(chosen, rows, fee):
    """Tokens computed, and fees, when exactly the ``chosen`` prefixes are segments."""
    chosen = set(chosen)

    def own(row):
        return len(row) - max((end for end in range(1, len(row)) if tuple(row[:end]) in chosen), default=0)

    return sum(own(row) for row in rows) + sum(own(prefix) + fee for prefix in chosen)


def segment_prefixes(plan, rows):
    return [tuple(rows[segment.prompt][: segment.end]) for segment in plan.segments]


@settings(max_examples=up_to(400), deadline=None)
@given(rows=PROMPTS, fee=st.integers(0, 5))
def test_plan_is_the_cheapest_of_all_subsets_of_the_tree(rows, fee):
    plan = plan_sharing(as_prompts(rows), min_shared_tokens=fee)
    chosen = segment_prefixes(plan, rows)
    assert len(set(chosen)) == len(chosen)
    cost = plan.computed_tokens + fee * len(chosen)
    assert cost == cost_of(chosen, rows, fee)

    prefixes = shareable_prefixes(rows)
    nodes = branching(prefixes, rows)
    assert set(chosen) <= set(nodes)
    # All prefixes where they are few, also those where no rows part; else the nodes of the tree.
    candidates = prefixes if len(prefixes) <= 9 else nodes
    assert len(candidates) <= 12
    subsets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(len(candidates) + 1))
    assert cost == min(cost_of(subset, rows, fee) for subset in subsets)
    # On a tie a node is kept, so one more node always costs more.
    for node in set(nodes) - set(chosen):
        assert cost_of([*chosen, node], rows, fee) > cost


def plain_choice(tree, lengths, fee):
    """The rule of ``nearest_kept`` as it is stated: recursive, one state for each node and each end above it."""
    below = [[] for _ in tree.depth]
    for node, parent in enumerate(tree.parent):
        if parent >= 0:
            below[parent].append(node)
    rows = [[] for _ in tree.depth]
    for place, parent in enumerate(tree.leaf_parent):
        if parent >= 0:
            rows[parent].append(lengths[place])
    memo = {}

    def units(node, end):
        return sum(length - end for length in rows[node]) + sum(best(child, end)[0] for child in below[node])

    def best(node, end):
        if (node, end) not in memo:
            keep = tree.depth[node] - end + fee + units(node, tree.depth[node])
            memo[node, end] = min((keep, False), (units(node, end), True))
        return memo[node, end]

    nearest = [-1] * len(tree.depth)

    def descend(node, kept):
        dissolved = best(node, tree.depth[kept] if kept >= 0 else 0)[1]
        nearest[node] = kept if dissolved else node
        for child in below[node]:
            descend(child, nearest[node])

    for node, parent in enumerate(tree.parent):
        if parent < 0:
            descend(node, -1)
    return nearest


@pytest.mark.parametrize("seed", range(8))
def test_choice_equals_the_plain_recursion_on_deep_bushy_trees(seed):
    rng = random.Random(seed)
    for _ in range(150):
        count, deepest = rng.randint(2, 40), rng.choice([3, 12, 60, 400])
        shared = [0]
        for _ in range(count - 1):
            wander = shared[-1] + rng.randint(-deepest // 4 - 1, deepest // 4 + 1)
            shared.append(max(0, min(deepest, rng.choice([wander, rng.randint(0, deepest)]))))
        lengths = [max(above, below) + rng.randint(1, 5) for above, below in itertools.pairwise([*shared, 0])]
        tree = build_tree(shared)
        fee = rng.choice([0, 1, 2, 3, 7, 32, 100])
        assert nearest_kept(tree, lengths, fee) == plain_choice(tree, lengths, fee)


# --- a plan is true to the tokens --------------------------------------------------------------------------------


def check_plan(plan, rows, keys):
    """Everything that whoever runs a plan relies on."""
    assert sorted(plan.order.tolist()) == list(range(len(rows)))
    assert plan.total_tokens == plan.prompt_tokens == sum(map(len, rows))
    assert plan.saved_tokens == plan.total_tokens - plan.computed_tokens
    assert plan.saving == plan.saved_tokens / plan.total_tokens

    members = [[] for _ in plan.segments]
    computed = 0
    for index, parent in enumerate(plan.parents.tolist()):
        end = plan.segments[parent].end if parent >= 0 else 0
        assert end < len(rows[index]), "every prompt owns its last token"
        computed += len(rows[index]) - end
        while parent >= 0:
            members[parent].append(index)
            parent = plan.segments[parent].parent
    place = {index: at for at, index in enumerate(plan.order.tolist())}
    for at, segment in enumerate(plan.segments):
        assert segment.index == at and segment.parent < at
        assert segment.start == (plan.segments[segment.parent].end if segment.parent >= 0 else 0)
        assert len(segment) == segment.end - segment.start > 0
        assert segment.members == len(members[at]) >= 2
        computed += len(segment)
        prefixes = {(keys[index], tuple(rows[index][: segment.end])) for index in members[at]}
        assert prefixes == {(keys[segment.prompt], tuple(rows[segment.prompt][: segment.end]))}
        places = sorted(place[index] for index in members[at])
        assert places == list(range(places[0], places[0] + len(places))), "sharers are neighbours"
        assert plan.order[places[0]] == segment.prompt
    assert plan.computed_tokens == computed
    starts = [place[segment.prompt] for segment in plan.segments]
    assert starts == sorted(starts), "segments are listed as they are run"

    tops = [segment for segment in plan.segments if segment.parent < 0]
    assert [(group.shared_tokens, group.size) for group in plan.groups] == [(s.end, s.members) for s in tops]
    assert [sorted(group.prompts.tolist()) for group in plan.groups] == [members[segment.index] for segment in tops]
    assert plan.depth == max((sum(index in below for below in members) for index in range(len(rows))), default=0)


@settings(max_examples=up_to(250), deadline=None)
@given(data=st.data(), rows=PROMPTS, fee=st.integers(0, 3), share=st.booleans())
def test_plan_is_consistent(data, rows, fee, share):
    keys = data.draw(st.lists(KEYS, min_size=len(rows), max_size=len(rows)))
    new_tokens = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    prompts = as_prompts(rows, keys)
    plan = plan_sharing(prompts, min_shared_tokens=fee, share=share, new_tokens=new_tokens)
    check_plan(plan, rows, keys)
    if not share:
        assert plan.segments == () and plan.computed_tokens == plan.total_tokens

    # Groups, with lone prompts among them, by decode for each token to compute; then by the first of their prompts.
    alone = [[index] for index in range(len(rows)) if plan.parents[index] < 0]
    groups = sorted([*alone, *(group.prompts.tolist() for group in plan.groups)], key=lambda g: g[0])
    cost = {index: len(rows[index]) - (plan.segments[p].end if p >= 0 else 0) for index, p in enumerate(plan.parents)}
    for segment in plan.segments:
        cost[segment.prompt] += len(segment)

    def rank(group):
        return (-sum(new_tokens[i] for i in group) / sum(cost[i] for i in group), min(group))

    assert plan.order.tolist() == [index for group in sorted(groups, key=rank) for index in group]


@settings(max_examples=up_to(200), deadline=None)
@given(rows=PROMPTS, fee=st.integers(0, 3), shuffle=st.randoms(use_true_random=False))
def test_input_order_does_not_matter(rows, fee, shuffle):
    def shape(plan, given_rows):
        return (
            plan.computed_tokens,
            sorted((tuple(given_rows[s.prompt][: s.end]), s.start, s.members) for s in plan.segments),
            sorted(
                zip(map(tuple, given_rows), (plan.segments[p].end if p >= 0 else 0 for p in plan.parents), strict=True)
            ),
        )

    shuffled = list(rows)
    shuffle.shuffle(shuffled)
    plans = [plan_sharing(as_prompts(r), min_shared_tokens=fee) for r in (rows, shuffled)]
    assert shape(plans[0], rows) == shape(plans[1], shuffled)
    again = plan_sharing(as_prompts(rows), min_shared_tokens=fee)
    assert again.order.tolist() == plans[0].order.tolist() and again.segments == plans[0].segments


# --- the rules, one by one -----------------------------------------------------------------------------------------


def plan_rows(rows, **options):
    return plan_sharing(as_prompts(rows), **options)


def test_equal_prompts_share_all_but_their_last_token():
    plan = plan_rows([[1, 2, 3]] * 3, min_shared_tokens=0)
    assert plan.segments == (Segment(index=0, parent=-1, prompt=0, start=0, end=2, members=3),)
    assert plan.computed_tokens == 2 + 3
    assert plan.order.tolist() == [0, 1, 2]


def test_prefix_of_another_owns_its_last_token():
    plan = plan_rows([[1, 2, 3, 4, 5], [1, 2, 3]], min_shared_tokens=0)
    assert [segment.end for segment in plan.segments] == [2]
    assert plan.computed_tokens == 2 + 3 + 1


def test_prompts_of_one_token_share_nothing():
    plan = plan_rows([[1], [1], [1, 2]], min_shared_tokens=0)
    assert plan.segments == () and plan.computed_tokens == 4 and plan.parents.tolist() == [-1] * 3


@pytest.mark.parametrize(("fee", "kept"), [(29, 1), (30, 1), (31, 0)])
def test_segment_is_kept_when_it_saves_the_minimum(fee, kept):
    rows = [[*range(15), 100 + index] for index in range(3)]  # 15 tokens shared by 3: 30 saved
    assert len(plan_rows(rows, min_shared_tokens=fee).segments) == kept


def test_node_that_does_not_pay_dissolves_into_what_is_below():
    system, few, document = [1], list(range(100, 140)), list(range(200, 260))
    rows = [[*system, *middle, end] for middle in (few, document) for end in (7, 8, 9)]
    plan = plan_rows(rows, min_shared_tokens=32)
    assert sorted((s.start, s.end, s.members) for s in plan.segments) == [(0, 41, 3), (0, 61, 3)]
    assert plan.depth == 1


def test_beginnings_too_short_to_be_shared_are_named():
    alike = [[1, *range(10, 22), 50 + at] for at in range(3)]
    plan = plan_prompts(alike)
    said = "Prompts begin alike for up to 13 tokens: too few to share (`min_shared_tokens` is 32)."
    assert plan.saving == 0 and said in " ".join(str(plan).split()) and max(map(len, str(plan).splitlines())) < 80
    assert said in str(report_of(plan)) and said in view_of(plan).text
    assert view_of(report_of(plan)).text.count(said) >= 1
    for rows in (alike * 3, [[1, 5], [1, 6]], [[4, 5], [7, 8]], [], [[5]]):  # shared, BOS alone, nothing
        assert plan_prompts(rows).why_nothing == ""
    assert plan_sharing(as_prompts(alike), share=False).why_nothing == "", "not for that reason"


def test_levels_nest_as_deep_as_they_pay():
    system = list(range(100))
    rows = [[*system, *range(1000 * d, 1000 * d + 50), q] for d in (1, 2, 3) for q in (7, 8)]
    plan = plan_rows(rows)
    assert [(s.parent, s.start, s.end, s.members) for s in plan.segments] == [
        (-1, 0, 100, 6), (0, 100, 150, 2), (0, 100, 150, 2), (0, 100, 150, 2),
    ]  # fmt: skip
    assert plan.depth == 2
    assert plan.computed_tokens == 100 + 3 * 50 + 6


def test_prompts_with_different_keys_never_share():
    rows = [list(range(100))] * 4
    plan = plan_sharing(as_prompts(rows, ["a", "b", "a", None]))
    assert [group.prompts.tolist() for group in plan.groups] == [[0, 2]]
    assert plan.computed_tokens == 99 + 2 + 200


def test_more_decode_for_each_prefill_token_goes_first():
    rows = [[1, 2, 3, 4], [5], [6, 7], [8]]
    assert plan_rows(rows).order.tolist() == [1, 3, 2, 0]
    assert plan_rows(rows, share=False).order.tolist() == [1, 3, 2, 0]
    assert plan_rows(rows, new_tokens=[100, 1, 10, 1]).order.tolist() == [0, 2, 1, 3]
    with pytest.raises(ValueError, match="shape"):
        plan_rows(rows, new_tokens=[1, 2])


def test_ids_over_any_memory_give_the_same_plan():
    wide = np.arange(2000, dtype=np.int64).reshape(2, 1000) % 700
    rows = [
        wide[0, ::2],
        wide[0, ::2].astype(np.int32),
        np.frombuffer(wide[0, ::2].astype(np.int32).tobytes(), np.int32),
    ]
    slices = [row[:400] for row in rows]
    assert plan_sharing([Prompt(row) for row in slices]).computed_tokens == 399 + 3


def test_arguments_are_checked():
    for bad in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="min_shared_tokens"):
            plan_rows([[1]], min_shared_tokens=bad)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        plan_rows([[1], []])
    with pytest.raises(PromptError, match="pass `tokenizer=`"):
        plan_prompts(["text"])


def test_plan_prompts_takes_what_generate_takes():
    def tokenizer(texts):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    plan = plan_prompts(["a" * 50 + "b", "a" * 50 + "c", [7, 8]], tokenizer)
    assert plan.computed_tokens == 50 + 2 + 2
    assert [group.prompts.tolist() for group in plan.groups] == [[0, 1]]
    assert plan_prompts(["aab", "aac"], tokenizer, min_shared_tokens=0).computed_tokens == 4
    assert plan_prompts([[1, 2, 3]]).computed_tokens == 3


# --- large and deep --------------------------------------------------------------------------------------------------


def test_chain_of_ever_longer_prompts():
    tokens = np.arange(3000, dtype=np.int32)
    prompts = [Prompt(tokens[:end]) for end in range(1, 3001)]
    plan = plan_sharing(prompts, min_shared_tokens=0)
    assert plan.computed_tokens == 2998 + 3001 and plan.depth == 2998
    costly = plan_sharing(prompts, min_shared_tokens=500)
    assert 2 < costly.depth < 2998
    assert costly.computed_tokens > plan.computed_tokens


@pytest.mark.some_cases
@pytest.mark.parametrize("fee", [0, 32, 5000, 10**6])
@pytest.mark.parametrize("shape", ["chain", "comb of pairs", "all at one node", "random"])
def test_large_trees_take_no_recursion_and_no_quadratic_time(shape, fee):
    count = 20_000
    steps = np.arange(count)
    shared = {
        "chain": steps,
        "comb of pairs": np.where(steps % 2, steps + 40, steps),
        "all at one node": np.where(steps, 1800, 0),
        "random": np.random.default_rng(0).integers(0, 4000, count),
    }[shape]
    shared[0] = 0
    lengths = np.maximum(shared, np.append(shared[1:], 0)) + 10
    tree = build_tree(shared.tolist())
    nearest = nearest_kept(tree, lengths, fee)
    assert len(nearest) == len(tree.depth)
    if fee == 0:
        assert nearest == list(range(len(tree.depth)))


# --- what people see -------------------------------------------------------------------------------------------------

NESTED = [[*range(100), *range(1000 * d, 1000 * d + 50), q] for d in range(1, 40) for q in (7, 8)] + [[5, 6]] * 3


@pytest.mark.parametrize("rows", [[], [[1, 2], [3]], NESTED], ids=["empty", "nothing shared", "nested"])
def test_summary_fits_a_terminal(rows):
    plan = plan_rows(rows)
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())
    for word in ("prompts", "tokens asked for", "tokens to compute", "tokens saved", "levels of sharing"):
        assert word in text
    assert ("group size" in text) == bool(plan.segments)
    html = plan._repr_html_()
    assert escape(text) in html, "where styles are taken away"
    assert ("<th>group size</th>" in html) == bool(plan.segments)
    assert len(repr(plan)) < 140 and repr(plan).startswith("SharingPlan(prompts=")


def test_summary_of_an_empty_plan_has_no_shares():
    plan = plan_rows([])
    assert (plan.total_tokens, plan.computed_tokens, plan.saving, plan.depth, plan.groups) == (0, 0, 0.0, 0, ())
    assert len(plan.order) == len(plan.parents) == 0
    assert "%" not in str(plan)


def test_summary_figures():
    text = str(plan_rows(NESTED))
    assert [line.split() for line in text.splitlines()] == [
        ["What", "the", "prompts", "share"],
        ["prompts", "81"],
        ["tokens", "asked", "for", "11,784"],
        ["tokens", "to", "compute", "2,134", "18.1%"],
        ["tokens", "saved", "9,650", "81.9%"],
        ["levels", "of", "sharing", "2"],
        [],
        ["group", "size", "groups", "prompts", "shared", "tokens", "(each)"],
        ["1", "(alone)", "3", "3", "-"],
        ["78", "1", "78", "100"],
        ["level", "2:", "2", "39", "78", "+", "50"],
    ]


def test_summary_gathers_deep_levels():
    text = str(plan_rows([[*range(60 * length)] for length in range(1, 40)]))
    assert "level 5+: 2 - 35" in text
    assert len(text.splitlines()) < 20 and max(map(len, text.splitlines())) <= 80


def test_summary_of_huge_figures_fits_too():
    plan = plan_rows([[1, 2]])
    object.__setattr__(plan, "total_tokens", 10**13)
    assert max(map(len, str(plan).splitlines())) <= 80


@given(st.lists(st.lists(st.sampled_from([0, 1, 256, 1 << 24]), min_size=1, max_size=9), max_size=12))
def test_what_neighbours_share(rows: list[list[int]]) -> None:
    """All but the last token of either at most; ids that begin or end with equal bytes are not alike."""
    packed = sorted(np.array(row, np.int32).tobytes() for row in rows)
    listed = [np.frombuffer(row, np.int32).tolist() for row in packed]
    for place, found in enumerate(shared_lengths(packed)):
        above, below = (listed[place - 1] if place else []), listed[place]
        agree = [one == two for one, two in zip(above, below, strict=False)]
        assert found == max(0, min([*(index for index, same in enumerate(agree) if not same), len(agree) - 1]))
        assert place or not found
