"""A case with its results, and whether other results are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from support_fuzz_calls import Calls, Mismatch, expect
from support_fuzz_cases import Ask, Case
from support_fuzz_oracle import CLOSE, Oracle, roughness

from hf_batchllm import Generation

Rows = list[list[Generation]]


@dataclass
class Bench:
    """A case, and its results when it was run as it stands."""

    case: Case
    calls: Calls
    oracle: Oracle
    dice: Random
    base: Rows
    ties: int = 0  # rows that came out otherwise, where rounding decides

    @property
    def rough(self) -> float:
        return roughness(self.case.family)

    def same(self, asks: Sequence[Ask], rows: Rows, of: Sequence[int], what: str) -> None:
        """``rows[i]`` are those of prompt ``of[i]`` of the case."""
        for ask, row, index in zip(asks, rows, of, strict=True):
            self._same_prompt(ask, row, index, what)

    def _same_prompt(self, ask: Ask, row: list[Generation], index: int, what: str) -> None:
        base = self.base[index]
        where = f"{what}: prompt {index}"
        expect(len(row) == len(base), f"{where} has {len(row)} rows, and had {len(base)}")
        exact = self.case.exact
        if [each.token_ids for each in row] != [each.token_ids for each in base]:
            try:
                expect(not exact, f"{[each.token_ids for each in row]}, and not {[each.token_ids for each in base]}")
                if self.oracle.check(index, ask, row) and self.oracle.check(index, ask, base):
                    self.ties += 1
                    return
            except Mismatch as error:
                raise Mismatch(f"{where}: {error}") from error
            raise Mismatch(
                f"{where} gave {[each.token_ids for each in row]} and before {[each.token_ids for each in base]}"
            )
        for one, other in zip(row, base, strict=True):
            same = one.finish_reason == other.finish_reason
            expect(same, f"{where}: it ended by {one.finish_reason}, and before by {other.finish_reason}")
            expect(one.text == other.text, f"{where}: its text is {one.text!r}, and was {other.text!r}")
            near = _equal if exact else partial(close, rough=self.rough)
            expect(near([one.score], [other.score]), f"{where}: its score is {one.score}, and was {other.score}")
            for name in ("logprobs", "prompt_logprobs"):
                _same_logprobs(getattr(one, name), getattr(other, name), f"{where}: {name}", exact, self.rough)


def _equal(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    return repr(one) == repr(other)  # NaN is not NaN


def close(one: Sequence[float | None], other: Sequence[float | None], rough: float) -> bool:
    near = rough * CLOSE
    return len(one) == len(other) and all(
        a == b or (a is not None and b is not None and (math.isclose(a, b, rel_tol=near, abs_tol=near) or a != a))
        for a, b in zip(one, other, strict=True)
    )


def _same_logprobs(one: Any, other: Any, what: str, exact: bool, rough: float) -> None:
    expect(not exact or repr(one) == repr(other), f"{what} are {one}, and were {other}")
    expect((one is None) == (other is None), f"{what} are there in one of the two alone")
    for at, (a, b) in enumerate(zip(one or [], other or [], strict=True)):
        values = [sorted((each or {}).values()) for each in (a, b)]
        expect(close(values[0], values[1], rough), f"{what} of token {at} are {a}, and were {b}")
