"""What may be passed to ``score``, what becomes of it, and what is said of what may not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_word_tokenizer import word_tokenizer
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from hf_batchllm import BatchGenerator, PromptError, PromptsTypeError
from hf_batchllm.engine.scoring.lost_spaces import warn_of_lost_space
from hf_batchllm.errors import OptionValueError
from hf_batchllm.notices import Notices
from hf_batchllm.results.scores import ScoreResult

FAMILY = "llama"
Scored = tuple[list[int], int]  # ids, and the first of them that is scored


def generator(tokenizer: Any = None, **config: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), tokenizer, **config)


def words(bos: bool = False, template: bool = False) -> BatchGenerator:
    return generator(word_tokenizer(bos=bos, template=template))


def merging(**ends: bool) -> BatchGenerator:
    return generator(merging_tokenizer(**ends))


def merging_tokenizer(bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """Letters and spaces; " c", "ab" and "dd" are tokens of their own."""
    tokens = ["<s>", "</s>", "a", "b", "c", "d", " ", " c", "ab", "dd"]
    merges = [(" ", "c"), ("a", "b"), ("d", "d")]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    inner.decoder = decoders.Fuse()
    if bos or eos:
        single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def plain(ids: list[int], first: int) -> list[float]:
    with torch.no_grad():
        logprobs = build(FAMILY)(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    return [logprobs[place - 1, ids[place]].item() for place in range(first, len(ids))]


def assert_scored(result: ScoreResult, *expected: Scored) -> None:
    assert len(result) == len(expected)
    for score, (ids, first) in zip(result, expected, strict=True):
        assert score.error is None and score.token_ids == ids[first:]
        assert score.logprobs == pytest.approx(plain(ids, first), abs=1e-4)


# -- one for each, several for each, the same for all ----------------------------------------------------------

ONE, TWO = [([5, 6, 8, 9], 2)], [([5, 6, 8], 2), ([5, 6, 9], 2)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (([[5, 6], [7]], [[8, 9], [10]]), [([5, 6, 8, 9], 2), ([7, 10], 1)]),
        (([[5, 6], [7]], [[[8], [9, 10]], [11]]), [([5, 6, 8], 2), ([5, 6, 9, 10], 2), ([7, 11], 1)]),
        # in arrays, as tables have them
        ((["w5 w6", "w7"], [np.array([" w8", " w9"], dtype=object), np.array([" w4"])]), [*TWO, ([7, 4], 1)]),
        (([5, 6], [8, 9]), ONE),
        (([5, 6], [[8, 9]]), ONE),
        (([5, 6], [[[8, 9]]]), ONE),
        (([[5, 6]], [8, 9]), ONE),
        (([[5, 6]], [[8, 9]]), ONE),
        ((torch.tensor([5, 6]), torch.tensor([8, 9])), ONE),
        ((np.array([5, 6]), [np.array([8, 9])]), ONE),
        (("w5 w6", " w8 w9"), ONE),
        ((["w5 w6"], [" w8 w9"]), ONE),
        (("w5 w6", [8, 9]), ONE),
        (([5, 6], "w8 w9"), ONE),
        ((["w5 w6"], ([8, 9],)), ONE),
        pytest.param((iter([[5, 6]]), iter(["w8 w9"])), ONE, id="iterators"),
        (([5, 6], [[8], [9]]), TWO),
        (([[5, 6]], [[[8], [9]]]), TWO),
        (("w5 w6", [" w8", " w9"]), TWO),
        # whole texts
        ((None, ["w5 w6 w7", [8, 9]]), [([5, 6, 7], 1), ([8, 9], 1)]),
        ((None, [[[5, 6], [5, 7]]]), [([5, 6], 1), ([5, 7], 1)]),
    ],
    ids=str,
)
def test_what_may_be_passed(given: tuple[Any, Any], expected: list[Scored]) -> None:
    assert_scored(words().score(*given), *expected)


def test_which_score_is_whose() -> None:
    result = generator().score([[5, 6], [7]], [[[8], [9, 10]], [11]])
    assert [(score.index, score.choice) for score in result] == [(0, 0), (0, 1), (1, 0)]
    assert [[score.choice for score in scores] for scores in result.by_context] == [[0, 1], [0]]
    result = generator().score([[5, 6], [7]], choices=[[8], [9, 10]])
    assert_scored(result, ([5, 6, 8], 2), ([5, 6, 9, 10], 2), ([7, 8], 1), ([7, 9, 10], 1))


def test_empty_lists() -> None:
    result = generator().score([], [])
    assert len(result) == 0 and result.by_context == [] and result.best() == []
    assert "0 scores" in repr(result) and result._repr_html_()


def test_a_text_and_its_perplexity() -> None:
    result = words().score(None, ["w5 w6 w7"])
    assert result[0].text == "w5 w6 w7"
    assert result[0].perplexity == pytest.approx(np.exp(-np.mean(plain([5, 6, 7], 1))), rel=1e-4)


# -- where a context ends and its continuation begins ----------------------------------------------------------


BOS, CHAT = partial(merging, bos=True), partial(words, template=True)


@pytest.mark.parametrize(
    ("make", "given", "expected"),
    [
        (merging, ("da", "bd"), ([5, 8, 5], 1)),  # d|ab|d: what goes over the end of the context is scored
        (merging, ("d ", "c"), ([5, 7], 1)),  # it takes the space of the context
        (merging, ("d", " c"), ([5, 7], 1)),
        (merging, ("d ", "d"), ([5, 6, 5], 2)),
        (merging, ("ddd", "d"), ([9, 9], 1)),  # dd|d and dd|dd: one, as the first is the context's own
        (BOS, ("a", "bd"), ([0, 8, 5], 1)),  # over the whole context
        (BOS, ("d", "d a"), ([0, 9, 6, 2], 1)),
        (BOS, ("", "dab"), ([0, 5, 8], 1)),  # BOS alone, and nothing is said about it
        (BOS, ([5, 6], "dab"), ([5, 6, 5, 8], 2)),  # and no BOS in the middle
        (BOS, ("d ", [4]), ([0, 5, 6, 4], 3)),
        (partial(merging, eos=True), ("da", "ca"), ([5, 2, 4, 2, 1], 2)),
        (partial(words, bos=True), (None, "w5 w6"), ([1, 5, 6], 1)),
        (partial(words, bos=True), (None, "w5"), ([1, 5], 1)),
        (CHAT, ([[{"role": "user", "content": "w5 w6"}]], ["w7 w8"]), ([1, 5, 6, 7, 8], 3)),
    ],
    ids=lambda each: None if callable(each) else str(each),
)
def test_which_tokens_are_scored(make: Callable[[], BatchGenerator], given: tuple[Any, Any], expected: Scored) -> None:
    assert_scored(make().score(*given), expected)


def test_a_chat_with_two_answers() -> None:
    given = [{"role": "user", "content": "w5"}], ["w7", "w8"]
    assert_scored(CHAT().score(*given), ([1, 5, 7], 2), ([1, 5, 8], 2))


def test_a_continuation_of_which_the_tokenizer_makes_nothing() -> None:
    given = ["w5 w6", "w5 w6", "w7"], [["  ", " w8"], " w6", "\n"]
    result = words().score(*given, on_error="record")
    assert [bool(score.error) for score in result] == [True, False, False, True]
    with pytest.raises(PromptError, match=r"context 0 has a continuation \(0\) that adds no tokens: the tokenizer"):
        words(bos=True).score(*given)


def test_continuations_as_text() -> None:
    result = words().score(["w5", [5]], ["w6", [7]], on_error="record")
    assert result[0].error is not None and result[0].text == "w6"
    assert result[1].text == "w7"
    assert generator().score([[5]], [[7]])[0].text is None
    assert [score.text for score in merging().score("d ", ["c", "d"])] == ["c", "d"]


# -- what is refused -------------------------------------------------------------------------------------------

LIST = "`choices` must be a list of choices"


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (([[5]],), {}, r"`continuations` .* or `choices` .* must be given: neither"),
        (([[5]],), {}, r"neither was given. To score whole texts pass score\(None, texts\)"),
        (([[5]], [[6]]), {"choices": [[7]]}, "both were given"),
        (([[5]],), {"choices": "AB"}, r"is the string 'AB': pass a list of choices, \['AB'\] .* one, \['A', 'B'"),
        (([[5], [6]], [[7], [8], [9]]), {}, r"has 3 for 2 contexts: .*`choices=\[\.\.\.\]` takes the same"),
        (([[5], [6]], [7, 8]), {}, "has 1 for 2 contexts"),
        (([[5]], [[7], [8]]), {}, r"has 2 for 1 context: .* several of one context are a list of their own"),
        ((None,), {"choices": [[7]]}, r"`choices` goes with contexts"),
        (([[5]],), {"choices": []}, "`choices` is empty"),
        (([[5]],), {"choices": [7, 8]}, f"{LIST}, not of numbers: " r"\[\[5\], \[6\]\] are two"),
        (([[5], [6]],), {"choices": [["a", "b"], ["c", "d"]]}, "pass continuations that differ between contexts"),
        (([[5], [6]],), {"choices": [[[7], [8]], [[9]]]}, "pass continuations that differ between contexts"),
        (([[5]],), {"choices": np.array([7, 8])}, LIST),
        (([[5]],), {"choices": torch.tensor([7])}, LIST),
        (([[5]],), {"choices": range(7, 9)}, LIST),
        (([[5]], [[6]]), {"on_error": "skip"}, "`on_error` must be"),
        (([[5]], [[6]]), {"progress": 1}, "`progress` must be"),
    ],
)
def test_calls_that_make_no_sense(given: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionValueError, match=message):
        generator().score(*given, **options)


def test_what_is_no_list() -> None:
    with pytest.raises(PromptsTypeError, match=r"^contexts is an int"):
        generator().score(5, [[6]])
    with pytest.raises(PromptsTypeError, match=r"^continuations is a set"):
        generator().score([[5]], {6})
    with pytest.raises(PromptsTypeError, match=r"^choices is a 2-D tensor"):
        generator().score([[5]], choices=torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(OptionValueError, match=r"`choices` is a dict: .*choices=list\(answers\.values\(\)\)"):
        generator().score([[5]], choices={"two": [7]})


def test_what_cannot_be_scored() -> None:
    with pytest.raises(PromptError, match=r"texts 0-1: each is a single token, and nothing stands before it"):
        words().score(None, ["w5", [5], "w5 w6"])
    with pytest.raises(PromptError, match=r"context 0 has a continuation that begins inside the first token"):
        merging().score("a", "bd")
    with pytest.raises(PromptError, match=r"contexts 0-1: each is a string, and"):
        generator().score(["a", "b"], ["c", "d"])
    with pytest.raises(PromptError, match=r"contexts 0-1: each has a continuation that is a string, and"):
        generator().score([[5], [6]], ["c", "d"])


@pytest.mark.parametrize(
    ("continuation", "message"),
    [
        ("", "is an empty string"),
        ([], "is empty"),
        (None, "is None; a continuation is"),
        (5.5, "is a float; a continuation is"),
        ([{"role": "user", "content": "w5"}], "is a chat; a continuation is"),
        ([5, 200], "has token id 200 at position 1, outside the model's vocabulary"),
        ([5, None], "holds None at position 1"),
        ("w5\ud800", "half a character"),
        (np.zeros((2, 2), np.int64), "is a 2-D NumPy array"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("context", ["w5 w6", [5, 6]], ids=str)
def test_bad_continuations(context: Any, continuation: Any, message: str) -> None:
    with pytest.raises(PromptError, match=rf"^context 1 has a continuation that .*{message}"):
        words().score([context, context], ["w7", continuation])
    with pytest.raises(PromptError, match=rf"^context 0 has a continuation \(1\) that .*{message}"):
        words().score([context], [["w7", continuation]])


def test_bad_contexts() -> None:
    with pytest.raises(PromptError) as caught:
        words().score(["w5", "", [], [300], "w6 w7"], choices=["w7 w8", " w8"])
    assert caught.value.problems.keys() == {0, 1, 2, 3}
    text = str(caught.value)
    assert "4 contexts cannot be run" in text and "context 3 has token id 300" in text
    assert "an empty string, of which the tokenizer makes no tokens: to score whole texts pass `None`" in text


def test_recorded_errors_keep_their_place() -> None:
    result = words().score(["w5 w6", [300], "w8 w9"], [[" w7", ""], ["w7"], "w10 w3"], on_error="record")
    assert [(score.index, score.choice, score.error is None) for score in result] == [
        (0, 0, True),
        (0, 1, False),
        (1, 0, False),
        (2, 0, True),
    ]
    assert_scored(ScoreResult([result[0]], None), ([5, 6, 7], 2))
    assert result[1].token_ids == [] and result[1].logprob != result[1].logprob
    assert result.best() == [None, None, 0]
    assert result.report.sequences == 2
    every = words().score(["", ""], ["w5", "w6"], on_error="record")
    assert all(score.error for score in every) and every.best() == [None, None]


def test_longer_than_the_model_has_positions() -> None:
    gen = BatchGenerator(build("opt"))
    limit = gen.architecture.max_positions
    assert limit is not None
    context = [5] * (limit - 1)
    assert len(gen.score([context], [[6, 7]])[0].token_ids) == 2  # the last one is not run
    with pytest.raises(PromptError, match=rf"context 0 has {limit + 1:,} tokens to run, continuation included"):
        gen.score([context], [[6, 7, 8]])


# -- a space that was forgotten ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("Label:", "positive"), ("Review: good\nLabel:", "Positive"), ("The capital is", "Paris"), ("Ответ:", "да")],
)
def test_a_lost_space_is_warned_of_once(context: str, continuation: str) -> None:
    notices, why = Notices(), f"context 3 ends in .*without a space.* pass it with its space: ' {continuation}'"
    with pytest.warns(UserWarning, match=why):
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
