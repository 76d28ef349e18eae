"""Token ids of results: right, and each list the user's own, whatever neighbours have in common."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_batchllm.engine.id_lists import IdLists


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=20))
def test_each_list_has_its_ids_and_is_the_users_own(prompts: list[list[int]]) -> None:
    lists = IdLists()
    for prompt in prompts:
        made = lists.of(np.array(prompt, dtype=np.int32))
        assert made == prompt and all(type(token) is int for token in made)
        made.clear()  # the next ones do not notice


def test_a_common_beginning_is_made_once() -> None:
    lists = IdLists()
    first, second = (lists.of(np.array([1000, 2000, 3000, last], dtype=np.int32)) for last in (4000, 5000))
    assert [one is other for one, other in zip(first, second, strict=True)] == [True, True, True, False]
