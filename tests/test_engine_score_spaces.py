"""A continuation whose space was forgotten: one warning, and none where no space belongs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, OptionValueError
from hf_batchllm.engine.scoring.lost_spaces import warn_of_lost_space
from hf_batchllm.notices import Notices


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("Label:", "positive"), ("Review: good\nLabel:", "Positive"), ("The capital is", "Paris"), ("Ответ:", "да")],
)
def test_a_lost_space_is_warned_of_once(context: str, continuation: str) -> None:
    notices = Notices()
    with pytest.warns(
        UserWarning, match=f"context 3 ends in .*without a space.* pass it with its space: ' {continuation}'"
    ):
        warn_of_lost_space(3, context, continuation, notices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lost_space(4, context, continuation, notices)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("Label:", " positive"),
        ("Label: ", "positive"),
        ("Label:\n", "positive"),
        ("答案:", "A"),
        ("答案是", "Paris"),
        ("The answer is", "巴黎"),
        ("คำตอบ:", "ใช่"),
        ("Answer: (", "A"),
        ('She said "', "Yes"),
        ("x =", "y"),
        ("2 + 2", "= 4"),
        ("The end", "."),
        ("It costs $", "five"),
        ("", "Paris"),
    ],
)
def test_nothing_is_said_where_no_space_is_lost(context: str, continuation: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lost_space(0, context, continuation, Notices())


def test_of_contexts_that_are_text_alone() -> None:
    gen = BatchGenerator(build("llama"), word_tokenizer(97, template=True))
    silent: list[Any] = [[5, 6], [{"role": "user", "content": "w5 w6"}]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gen.score(silent, choices=["w8", "w9"])
    with pytest.warns(UserWarning, match="without a space") as given:
        gen.score(["w5 w", "w7"], ["w8", "w9"], on_error="record")
    assert len(given) == 1 and given[0].filename == __file__


def test_a_dict_of_choices_is_told_what_to_pass() -> None:
    with pytest.raises(OptionValueError, match=r"`choices` is a dict: .*choices=list\(answers\.values\(\)\)"):
        BatchGenerator(build("llama")).score([[5]], choices={"two": [7]})
