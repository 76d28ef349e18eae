"""What may be passed to ``score``, what becomes of it, and what is said of what may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_word_tokenizer import word_tokenizer
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from hf_batchllm import BatchGenerator, PromptError, PromptsTypeError
from hf_batchllm.errors import OptionValueError
from hf_batchllm.results.scores import ScoreResult

FAMILY = "llama"


def generator(tokenizer: Any = None, **config: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), tokenizer, **config)


def words(bos: bool = False, template: bool = False) -> BatchGenerator:
    return generator(word_tokenizer(bos=bos, template=template))


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


def assert_scored(result: ScoreResult, *expected: tuple[list[int], int]) -> None:
    """Ids, and the first of them that is scored."""
    assert len(result) == len(expected)
    for score, (ids, first) in zip(result, expected, strict=True):
        assert score.error is None and score.token_ids == ids[first:]
        assert score.logprobs == pytest.approx(plain(ids, first), abs=1e-4)


# -- one for each, several for each, the same for all ----------------------------------------------------------


def test_one_for_each_context() -> None:
    result = generator().score([[5, 6], [7]], [[8, 9], [10]])
    assert_scored(result, ([5, 6, 8, 9], 2), ([7, 10], 1))
    assert [(score.index, score.choice) for score in result] == [(0, 0), (1, 0)]


def test_several_for_a_context() -> None:
    result = generator().score([[5, 6], [7]], [[[8], [9, 10]], [11]])
    assert_scored(result, ([5, 6, 8], 2), ([5, 6, 9, 10], 2), ([7, 11], 1))
    assert [(score.index, score.choice) for score in result] == [(0, 0), (0, 1), (1, 0)]
    assert [[score.choice for score in scores] for scores in result.by_context] == [[0, 1], [0]]


def test_several_for_each_context_in_arrays_as_tables_have_them() -> None:
    answers = [np.array([" w8", " w9"], dtype=object), np.array([" w4"])]
    result = words().score(["w5 w6", "w7"], answers)
    assert_scored(result, ([5, 6, 8], 2), ([5, 6, 9], 2), ([7, 4], 1))


def test_the_same_for_all() -> None:
    result = generator().score([[5, 6], [7]], choices=[[8], [9, 10]])
    assert_scored(result, ([5, 6, 8], 2), ([5, 6, 9, 10], 2), ([7, 8], 1), ([7, 9, 10], 1))


@pytest.mark.parametrize(
    "given",
    [
        ([5, 6], [8, 9]),
        ([5, 6], [[8, 9]]),
        ([5, 6], [[[8, 9]]]),
        ([[5, 6]], [8, 9]),
        ([[5, 6]], [[8, 9]]),
        (torch.tensor([5, 6]), torch.tensor([8, 9])),
        (np.array([5, 6]), [np.array([8, 9])]),
        ("w5 w6", " w8 w9"),
        (["w5 w6"], [" w8 w9"]),
        ("w5 w6", [8, 9]),
        ([5, 6], "w8 w9"),
        (["w5 w6"], ([8, 9],)),
        pytest.param((iter([[5, 6]]), iter(["w8 w9"])), id="iterators"),
    ],
    ids=str,
)
def test_ways_to_pass_one(given: tuple[Any, Any]) -> None:
    assert_scored(words().score(*given), ([5, 6, 8, 9], 2))


@pytest.mark.parametrize("given", [([5, 6], [[8], [9]]), ([[5, 6]], [[[8], [9]]]), ("w5 w6", [" w8", " w9"])], ids=str)
def test_several_for_a_context_that_is_in_no_list(given: tuple[Any, Any]) -> None:
    assert_scored(words().score(*given), ([5, 6, 8], 2), ([5, 6, 9], 2))


def test_empty_lists() -> None:
    result = generator().score([], [])
    assert len(result) == 0 and result.by_context == [] and result.best() == []
    assert "0 scores" in repr(result) and result._repr_html_()


# -- whole texts -----------------------------------------------------------------------------------------------


def test_whole_texts() -> None:
    assert_scored(words().score(None, ["w5 w6 w7", [8, 9]]), ([5, 6, 7], 1), ([8, 9], 1))
    assert_scored(words(bos=True).score(None, "w5 w6"), ([1, 5, 6], 1))
    assert_scored(words(bos=True).score(None, "w5"), ([1, 5], 1))
    assert_scored(generator().score(None, [[[5, 6], [5, 7]]]), ([5, 6], 1), ([5, 7], 1))
    result = words().score(None, ["w5 w6 w7"])
    assert result[0].text == "w5 w6 w7"
    assert result[0].perplexity == pytest.approx(np.exp(-np.mean(plain([5, 6, 7], 1))), rel=1e-4)


def test_a_text_of_which_nothing_can_be_scored() -> None:
    with pytest.raises(PromptError, match=r"texts 0-1: each is a single token, and nothing stands before it"):
        words().score(None, ["w5", [5], "w5 w6"])


# -- where a context ends and its continuation begins ----------------------------------------------------------


def test_a_token_that_goes_over_the_end_of_the_context_is_scored() -> None:
    gen = generator(merging_tokenizer())
    assert_scored(gen.score("da", "bd"), ([5, 8, 5], 1))  # d|ab|d
    assert_scored(gen.score("d ", "c"), ([5, 7], 1))  # it takes the space of the context
    assert_scored(gen.score("d", " c"), ([5, 7], 1))
    assert_scored(gen.score("d ", "d"), ([5, 6, 5], 2))
    result = gen.score("d ", ["c", "d"])
    assert [score.text for score in result] == ["c", "d"]


def test_one_token_is_scored_where_the_tokens_are_the_contexts_own() -> None:
    normalizer = merging_tokenizer()
    assert_scored(generator(normalizer).score("ddd", "d"), ([9, 9], 1))  # dd|d and dd|dd


def test_a_continuation_of_which_the_tokenizer_makes_nothing() -> None:
    given = ["w5 w6", "w5 w6", "w7"], [["  ", " w8"], " w6", "\n"]
    result = words().score(*given, on_error="record")
    assert [bool(score.error) for score in result] == [True, False, False, True]
    with pytest.raises(PromptError, match=r"context 0 has a continuation \(0\) that adds no tokens: the tokenizer"):
        words(bos=True).score(*given)


def test_a_token_that_goes_over_the_whole_context() -> None:
    with pytest.raises(PromptError, match=r"context 0 has a continuation that begins inside the first token"):
        generator(merging_tokenizer()).score("a", "bd")
    assert_scored(generator(merging_tokenizer(bos=True)).score("a", "bd"), ([0, 8, 5], 1))


def test_special_tokens_of_the_tokenizer() -> None:
    gen = generator(merging_tokenizer(bos=True))
    assert_scored(gen.score("d", "d a"), ([0, 9, 6, 2], 1))
    assert_scored(gen.score("", "dab"), ([0, 5, 8], 1))  # an empty context is BOS alone, and nothing is said about it
    assert_scored(gen.score([5, 6], "dab"), ([5, 6, 5, 8], 2))  # and no BOS in the middle
    assert_scored(gen.score("d ", [4]), ([0, 5, 6, 4], 3))
    with_eos = generator(merging_tokenizer(eos=True))
    assert_scored(with_eos.score("da", "ca"), ([5, 2, 4, 2, 1], 2))


def test_chats() -> None:
    gen = words(template=True)
    assert_scored(gen.score([[{"role": "user", "content": "w5 w6"}]], ["w7 w8"]), ([1, 5, 6, 7, 8], 3))
    assert_scored(gen.score([{"role": "user", "content": "w5"}], ["w7", "w8"]), ([1, 5, 7], 2), ([1, 5, 8], 2))


def test_continuations_as_text() -> None:
    result = words().score(["w5", [5]], ["w6", [7]], on_error="record")
    assert result[0].error is not None and result[0].text == "w6"
    assert result[1].text == "w7"
    assert generator().score([[5]], [[7]])[0].text is None


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (([[5]],), {}, r"`continuations` .* or `choices` .* must be given: neither"),
        (([[5]],), {}, r"neither was given. To score whole texts pass score\(None, texts\)"),
        (([[5]], [[6]]), {"choices": [[7]]}, "both were given"),
        (
            ([[5]],),
            {"choices": "AB"},
            r"is the string 'AB': pass a list of choices, \['AB'\] for a single one, \['A', 'B'",
        ),
        (([[5], [6]], [[7], [8], [9]]), {}, r"has 3 for 2 contexts: .*`choices=\[\.\.\.\]` takes the same"),
        (([[5], [6]], [7, 8]), {}, "has 1 for 2 contexts"),
        (([[5]], [[7], [8]]), {}, r"has 2 for 1 context: .* several of one context are a list of their own"),
        ((None,), {"choices": [[7]]}, r"`choices` goes with contexts"),
        (([[5]],), {"choices": []}, "`choices` is empty"),
        (
            ([[5]],),
            {"choices": [7, 8]},
            r"`choices` must be a list of choices, not of numbers: \[\[5\], \[6\]\] are two",
        ),
        (
            ([[5], [6]],),
            {"choices": [["a", "b"], ["c", "d"]]},
            "pass continuations that differ between contexts",
        ),
        (([[5], [6]],), {"choices": [[[7], [8]], [[9]]]}, "pass continuations that differ between contexts"),
        (([[5]],), {"choices": np.array([7, 8])}, "`choices` must be a list of choices"),
        (([[5]],), {"choices": torch.tensor([7])}, "`choices` must be a list of choices"),
        (([[5]],), {"choices": range(7, 9)}, "`choices` must be a list of choices"),
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


def test_strings_without_a_tokenizer() -> None:
    with pytest.raises(PromptError, match=r"contexts 0-1: each is a string, and"):
        generator().score(["a", "b"], ["c", "d"])
    with pytest.raises(PromptError, match=r"contexts 0-1: each has a continuation that is a string, and"):
        generator().score([[5], [6]], ["c", "d"])


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
    assert result.report is not None and result.report.sequences == 2
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
