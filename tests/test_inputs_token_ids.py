"""Lists of token ids are looked through many at once: a bad one is found and named wherever it stands."""

import enum
from collections import deque

import numpy as np
import pytest
import torch

from hf_batchllm.inputs import token_ids
from hf_batchllm.inputs.prompts import check_prompts

VOCABULARY = 50
OUTSIDE = "has token id {} at position {}, outside the model's vocabulary of 50"


class Id(int):
    pass


class Special(enum.IntEnum):
    BOS = 0
    EOS = 1


@pytest.fixture(
    params=[4, 40, token_ids._BATCH_BYTES], ids=["each list alone", "a few lists", "all lists"], autouse=True
)
def at_once(request, monkeypatch):
    """How many bytes of ids are looked through at once."""
    monkeypatch.setattr(token_ids, "_BATCH_BYTES", request.param)


@pytest.fixture
def looked_at(monkeypatch):
    """The elements of lists that Python code has looked at."""
    seen = []
    monkeypatch.setattr(token_ids, "is_bool", lambda item: seen.append(item) or isinstance(item, (bool, np.bool_)))
    return seen


def checked(prompts, **options):
    """The ids of each prompt, or why it is bad."""
    prepared, problems = check_prompts(prompts, vocab_size=VOCABULARY, **options)
    assert {index for index, prompt in enumerate(prepared) if prompt is None} == {*problems}
    return [problems[i] if prompt is None else prompt.ids.tolist() for i, prompt in enumerate(prepared)]


def many(rows=30):
    """Lists of different lengths, of ids from 0 on up to the last one of the vocabulary."""
    return [[(row + place) % VOCABULARY for place in range(1 + row % 7)] for row in range(rows)]


@pytest.mark.parametrize("place", [0, 10, 11, 29])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([5, True], "holds True at position 1, a bool; token ids are integers"),
        ([False], "holds False at position 0, a bool; token ids are integers"),
        ([0, 1, torch.tensor(True)], "holds tensor(True) at position 2, a tensor; token ids are integers"),
        ([49, 50, 51], OUTSIDE.format(50, 1)),
        ([2**31], OUTSIDE.format(2**31, 0)),
        ([1, 2**32 - 1], OUTSIDE.format(2**32 - 1, 1)),
        ([1, 2**32], OUTSIDE.format(2**32, 1)),
        ([1, -1], "has token id -1 at position 1; token ids are not negative"),
        ([], "is empty: it has no token ids"),
        ([7, 1.0], "holds 1.0 at position 1, a float; token ids are integers"),
    ],
    ids=lambda value: repr(value)[:20] if isinstance(value, list) else "",
)
def test_one_bad_list_of_many_is_named_and_the_others_are_as_passed(bad, why, place):
    given = many()
    given[place] = bad
    assert checked(given) == [*many()[:place], why, *many()[place + 1 :]]


def test_what_comes_first_in_a_list_is_the_reason():
    assert checked([[50, True], [True, 50], [51, 50, True]]) == [
        OUTSIDE.format(50, 0),
        "holds True at position 0, a bool; token ids are integers",
        OUTSIDE.format(51, 0),
    ]


def test_bad_lists_beside_each_other_have_their_own_reasons():
    given = [[3, True], [0, 1], [50], [], [1, False, 0], [49], [50, 0]]
    bool_at = "holds {} at position 1, a bool; token ids are integers"
    assert checked(given) == [
        bool_at.format(True),
        [0, 1],
        OUTSIDE.format(50, 0),
        "is empty: it has no token ids",
        bool_at.format(False),
        [49],
        OUTSIDE.format(50, 0),
    ]


def test_the_last_id_of_the_vocabulary_is_inside_and_the_next_is_not():
    lists = [[VOCABULARY - 1]] * 25
    assert checked(lists) == lists
    prepared, problems = check_prompts(lists, vocab_size=VOCABULARY - 1)
    assert prepared == [None] * 25 and len(set(problems.values())) == 1
    prepared, _ = check_prompts([[2**31 - 1], [5]])  # of an unknown vocabulary
    assert prepared[0].ids.tolist() == [2**31 - 1]


@pytest.mark.parametrize("vocabulary", [1, 2, 3])
def test_a_tiny_vocabulary(vocabulary):
    prepared, problems = check_prompts([[0], [1], [2], [3], [False]], vocab_size=vocabulary)
    assert [prompt is None for prompt in prepared] == [*(token >= vocabulary for token in range(4)), True]
    assert list(problems) == [*range(vocabulary, 4), 4] and "a bool" in problems[4]


def test_integers_of_all_kinds_are_ids():
    kinds = [Id, np.int64, np.uint8, np.int32, torch.tensor]
    given = [[kind(0), kind(1), kind(49)] for kind in kinds] + [[Special.BOS, Special.EOS, 49]]
    assert checked(given * 3) == [[0, 1, 49]] * 18
    assert checked([[Id(0)], [Id(50)], [np.int64(50)]]) == [[0], OUTSIDE.format(50, 0), OUTSIDE.format(50, 0)]


@pytest.mark.parametrize("bos", [0, 1])
def test_of_many_lists_with_a_low_bos_no_plain_id_is_looked_at(bos, looked_at):
    given = [[bos, *range(2, 40)] for _ in range(30)]
    assert checked(given) == given
    assert looked_at == []
    given[17][0] = bool(bos)
    assert checked(given)[17] == f"holds {bool(bos)} at position 0, a bool; token ids are integers"
    assert {*map(type, looked_at)} == {bool}


def test_only_low_ids_of_other_types_are_looked_at(looked_at):
    ids = [*map(np.int64, range(40))]
    assert checked([ids] * 10) == [[*range(40)]] * 10
    assert looked_at == [0, 1] * 10


def test_lists_arrays_texts_and_chats_stay_in_their_order():
    def tokenizer(texts):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    given, expected = [], []
    for token in range(2, 48):
        kinds = [[token], (token, 0), np.array([token, 1]), torch.tensor([token]), f"0 {token}", [token, True]]
        given.append(kinds[token % 6])
        expected.append([[token], [token, 0], [token, 1], [token], [0, token], "a bool"][token % 6])
    given += ["3 50", [{"content": "no role"}], torch.tensor([50]), [], "", deque([5]), None]
    found = checked(given, tokenizer=lambda: tokenizer)
    assert checked(token_ids.with_arrays(given), tokenizer=lambda: tokenizer) == found
    told = ["a bool" if "a bool" in row else row for row in found]
    assert told[:46] == expected
    assert [row[:30] for row in found[46:]] == [
        "has token id 50 at position 1,",
        "is a chat whose message 0 has ",
        "has token id 50 at position 0,",
        "is empty: it has no token ids",
        "is an empty string, of which t",
        "is a deque; a prompt is a stri",
        "is None; a prompt is a string,",
    ]
    assert found[46].endswith("more tokens than the model's embedding?")


def test_problems_are_in_the_order_of_the_prompts():
    bare = {"content": "no role"}
    given = [[50], [bare], torch.tensor([50]), [True], None, [bare], [2.5], np.array([])] * 5
    _, problems = check_prompts(given, vocab_size=VOCABULARY)
    assert list(problems) == [*range(40)]


def test_prompts_that_are_cut_or_too_long():
    given = [[0, *range(2, 40)] if row % 3 else [row, 1] for row in range(20)]
    expected = [ids[-4:] for ids in given]
    with pytest.warns(UserWarning, match="13 of 20 prompts have more tokens than `max_prompt_tokens` and were cut"):
        assert checked(given, options={"max_prompt_tokens": 4}) == expected
    too_long = "has 39 tokens, more than the 38 that fit"
    assert checked(given, max_length=38) == [too_long if len(ids) == 39 else ids for ids in given]


def test_ids_are_checked_before_they_are_cut_away():
    with pytest.warns(UserWarning, match="was cut"):
        assert checked([[True, 5, 6], [50, 5, 6], [4, 5, 6]], options={"max_prompt_tokens": 1}) == [
            "holds True at position 0, a bool; token ids are integers",
            OUTSIDE.format(50, 0),
            [6],
        ]


def test_what_comes_out_lies_over_bytes_of_its_own():
    """The plan sorts these bytes, and a kept prompt keeps no other prompts alive."""
    prepared, _ = check_prompts([[5, 6], (7,), np.array([8])])
    for prompt in prepared:
        assert isinstance(prompt.ids.base, bytes) and len(prompt.ids.base) == prompt.ids.nbytes


def test_ids_are_read_as_they_are_wanted():
    """Of a long list only some batches are held twice."""
    read = []

    def rows():
        for row in range(1000):
            read.append(row)
            yield [row + 2] * 1000

    found = token_ids.packed_ids(rows(), VOCABULARY * 100)
    assert next(found) == np.full(1000, 2, np.int32).tobytes()
    assert len(read) <= -(-token_ids._BATCH_BYTES // 4000)


def test_arrays_for_another_process_are_good_ids_alone():
    theirs = np.array([1, 2], np.int64)
    good = [[1, 2], (3, 49), theirs, torch.tensor([5]), [Special.EOS, Id(7)], [2**31 - 1]]
    bad = [
        [],
        [True, 3],
        [-1],
        [2**31],
        [1.0],
        None,
        "a text",
        [{"role": "user", "content": "a chat"}],
        np.ones((2, 2)),
    ]
    made = token_ids.with_arrays([*good, *bad])
    assert [ids.tolist() for ids in made[: len(good)]] == [[1, 2], [3, 49], [1, 2], [5], [1, 7], [2**31 - 1]]
    assert all(ids.dtype == np.int32 and not ids.flags.writeable for ids in made[: len(good)])
    assert all(mine is given for mine, given in zip(made[len(good) :], bad, strict=True))
    theirs[0] = 9
    assert made[2].tolist() == [1, 2]
