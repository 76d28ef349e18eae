"""Images are made ready ahead by several threads: what comes of them is the same, and no more than needed is begun."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hf_batchllm.inputs.images.ready_images import ReadAhead


def test_results_are_those_of_their_names_whoever_was_first() -> None:
    def slow(source: int) -> int:
        time.sleep(0.02 if source % 3 == 0 else 0)
        return 10 * source

    ahead = ReadAhead(slow, 4)
    for number in range(40):
        ahead.expect(f"name {number}", number)
        ahead.expect(f"name {number}", -1)  # a second time it says nothing new
    assert [ahead.take(f"name {number}", number) for number in range(40)] == [10 * number for number in range(40)]
    ahead.close()


def test_several_run_at_a_time() -> None:
    both = threading.Barrier(2, timeout=30)

    def together(source: int) -> int:
        both.wait()
        return source

    ahead = ReadAhead(together, 2)
    for number in range(2):
        ahead.expect(number, number)
    assert [ahead.take(number, number) for number in range(2)] == [0, 1]
    ahead.close()


def test_an_error_is_raised_where_the_result_is_taken() -> None:
    def fails(source: int) -> int:
        if source == 1:
            raise ValueError("one")
        return source

    ahead = ReadAhead(fails, 2)
    for number in range(3):
        ahead.expect(number, number)
    assert ahead.take(0, 0) == 0
    with pytest.raises(ValueError, match="one"):
        ahead.take(1, 1)
    assert ahead.take(2, 2) == 2
    assert ahead.take("of which nothing was known", 7) == 7
    ahead.close()


def test_no_more_is_begun_than_may_be_waited_for() -> None:
    begun: list[Any] = []
    ahead = ReadAhead(begun.append, 2)
    for number in range(100):
        ahead.expect(number, number)
    ahead.take(0, 0)
    ahead.close()
    assert len(begun) <= 8
