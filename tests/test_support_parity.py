"""What other tests trust: that a row which one pass of transformers takes for greedy is what ``generate`` gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support_families import build
from support_parity import _GREEDY, are_greedy, reference

PROMPT = tuple(range(1, 13))


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What was found with one EOS is not what another would give."""
    _GREEDY.clear()
    yield
    _GREEDY.clear()


def is_greedy(family: str, prompt: tuple[int, ...], made: tuple[int, ...], new_tokens: int) -> bool:
    return are_greedy(family, [(prompt, made)], new_tokens)[0]


def test_a_row_with_another_token_is_not_greedy() -> None:
    row = reference("llama", PROMPT, 6)[0]
    assert is_greedy("llama", PROMPT, tuple(row), 6)
    for place, token in enumerate(row):
        other = [*row[:place], (token + 1) % 101, *row[place + 1 :]]
        assert not is_greedy("llama", PROMPT, tuple(other), 6)


def test_a_row_of_another_length_is_not_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tuple(reference("llama", PROMPT, 6)[0])
    assert not is_greedy("llama", PROMPT, row[:5], 6) and not is_greedy("llama", PROMPT, row, 5)
    assert row[5] not in row[:5]
    monkeypatch.setattr(build("llama").generation_config, "eos_token_id", row[5])
    _GREEDY.clear()
    assert is_greedy("llama", PROMPT, row, 6) and is_greedy("llama", PROMPT, row, 9)
    assert not is_greedy("llama", PROMPT, row, 5)  # it ends with EOS, but beyond its limit
