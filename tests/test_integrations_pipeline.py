"""``pipeline("batch-text-generation")`` gives what ``pipeline("text-generation")`` gives, from one run."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import datasets
import pandas as pd
import pytest
from support_accelerated import TEXTS, beyond_eight, word_tokenizer
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_pipelines import CHATS, GREEDY, Texts, made
from support_pipelines import pipe as pipe  # fixtures
from support_pipelines import stock as stock
from support_real_model import load_once, needs_real_model
from torch.utils.data import IterableDataset
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TextStreamer,
    pipeline,
    set_seed,
)
from transformers.pipelines.pt_utils import KeyDataset

from hf_batchllm import UnsupportedOptionError, accelerated
from hf_batchllm.integrations.pipeline_task import register_tasks

PREFILLED = [*CHATS[0], {"role": "assistant", "content": "w33 w34"}]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[str]:
        return iter(TEXTS)


# -- the same, in every structure ------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "num_workers": 0},
        {"return_full_text": False},
        {"return_tensors": True},
        {"return_text": True},
        {"prefix": "w7 w8 "},
        {"add_special_tokens": False, "skip_special_tokens": False},
        {"clean_up_tokenization_spaces": False, "return_full_text": False},
        {"continue_final_message": True},
        {"tokenizer_encode_kwargs": {"truncation": True, "max_length": 4}},
        {"truncation": True},
        {"eos_token_id": list(range(40)), "return_tensors": True},
        {"eos_token_id": list(range(40)), "skip_special_tokens": False},
        {"min_new_tokens": 3, "eos_token_id": list(range(40))},
        {"return_dict_in_generate": True},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(40))},
    ],
    ids=str,
)
def test_every_option_gives_what_the_stock_pipeline_gives(stock: Any, pipe: Any, options: dict[str, Any]) -> None:
    for given in (TEXTS, TEXTS[0], CHATS, CHATS[0], [TEXTS[0]], tuple(CHATS), tuple(CHATS[0]), [PREFILLED]):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got = pipe(given, **GREEDY, **options)
        assert got == stock(given, **GREEDY, **options)
        assert type(got) is list


@pytest.mark.parametrize(
    "options",
    [
        {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)},
        {"max_length": 12, "max_new_tokens": None, "do_sample": False, "prefix": "w7 w8 "},
        {"max_length": 20, "do_sample": False, "handle_long_generation": "hole", "max_new_tokens": 6},
        {"do_sample": False, "max_new_tokens": 3, "prefix": "w9 "},
    ],
    ids=str,
)
def test_where_options_come_from(options: dict[str, Any]) -> None:
    for at_first in (options, {}):
        later = {} if at_first else options
        stock, pipe = made("text-generation", **at_first), made("batch-text-generation", **at_first)
        assert pipe(TEXTS, **later) == stock(TEXTS, **later)


def test_no_length_given(stock: Any, pipe: Any) -> None:
    got = pipe(TEXTS[2], do_sample=False, return_tensors=True)
    assert got == stock(TEXTS[2], do_sample=False, return_tensors=True)
    assert len(got[0]["generated_token_ids"]) == 1 + 256


def test_stop_sequences() -> None:
    given = {"model": build("llama"), "tokenizer": letter_tokenizer()}
    given["tokenizer"].pad_token = "</s>"
    stock, pipe = made("text-generation", **given), made("batch-text-generation", **given)
    texts = ["abcdef", "fedcba", "aabbcc", "ff"]
    several = "stop_strings" in stock._sanitize_parameters(stop_sequence="a")[1]  # transformers 5.17 takes one
    for stop in ("a", ["a", "cc"] if several else "cc"):
        call = {"max_new_tokens": 12, "do_sample": False, "stop_sequence": stop, "return_full_text": False}
        got = pipe(texts, **call)
        assert got == stock(texts, **call)
        assert len({len(answer[0]["generated_text"]) for answer in got}) > 1


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "make",
    [
        lambda: (text for text in TEXTS),
        lambda: (chat for chat in CHATS),
        lambda: (message for message in CHATS[0]),
        lambda: (text for text in ()),
        lambda: Texts(TEXTS),
        lambda: Endless(),
        lambda: KeyDataset([{"text": text} for text in TEXTS], "text"),
        lambda: KeyDataset([{"chat": chat} for chat in CHATS], "chat"),
        lambda: KeyDataset(datasets.Dataset.from_dict({"text": TEXTS}), "text"),
    ],
)
def test_an_iterator_comes_back_where_the_stock_pipeline_gives_one(stock: Any, pipe: Any, make: Any) -> None:
    expected, got = stock(make(), **GREEDY), pipe(make(), **GREEDY)
    assert isinstance(got, list) == isinstance(expected, list)
    if not isinstance(expected, list):
        sized = isinstance(make(), Texts | KeyDataset)
        if sized:
            assert len(got) == len(expected) == 3
            assert list(got) == list(got)  # begun anew
        else:
            with pytest.raises(TypeError, match="no length"):
                len(got)
    assert list(got) == list(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tuple(TEXTS),
        lambda: datasets.Dataset.from_dict({"text": TEXTS})["text"],
        lambda: pd.Series(TEXTS),
        lambda: pd.Series(TEXTS).to_numpy(),
        lambda: dict.fromkeys(TEXTS).keys(),
    ],
)
def test_whatever_can_be_walked_through_is_a_list(stock: Any, pipe: Any, make: Any) -> None:
    assert pipe(make(), **GREEDY) == stock(TEXTS, **GREEDY)


@pytest.mark.parametrize("make", [lambda: map(str, TEXTS), lambda: itertools.islice(TEXTS, 3), lambda: iter(TEXTS)])
def test_any_iterator_gives_an_iterator(stock: Any, pipe: Any, make: Any) -> None:
    got = pipe(make(), **GREEDY)
    assert iter(got) is got
    assert next(got) == stock(TEXTS[0], **GREEDY)
    assert list(got) == stock(TEXTS[1:], **GREEDY)
    assert list(got) == []


def test_strings_and_chats_may_be_mixed(stock: Any, pipe: Any) -> None:
    assert pipe([TEXTS[0], CHATS[1]], **GREEDY) == [stock(TEXTS[0], **GREEDY), stock(CHATS[1], **GREEDY)]
    assert pipe([], **GREEDY) == []


def test_samples_have_the_stock_structure_and_repeat(stock: Any, pipe: Any) -> None:
    call = {"max_new_tokens": 6, "num_return_sequences": 3, "eos_token_id": list(range(60)), "pad_token_id": 99}
    expected, got = stock(TEXTS, **call), pipe(TEXTS, seed=1, **call)
    assert [[set(record) for record in records] for records in got] == [
        [set(record) for record in records] for records in expected
    ]
    assert got == pipe(TEXTS, seed=1, **call) == list(pipe((text for text in TEXTS), seed=1, **call))
    assert got != pipe(TEXTS, seed=2, **call)
    set_seed(3)
    first = pipe(TEXTS, **call)
    set_seed(3)
    assert pipe(TEXTS, **call) == first
    filled_up = 0
    for records in pipe(TEXTS, seed=1, return_tensors=True, **call):
        rows = [record["generated_token_ids"] for record in records]
        assert len({len(row) for row in rows}) == 1
        filled_up += sum(row[-1] == 99 for row in rows)
    assert filled_up


def test_samples_that_nothing_can_fill_up() -> None:
    tokenizer = letter_tokenizer()
    pipe = made("batch-text-generation", model=build("llama"), tokenizer=tokenizer)
    call = {
        "max_new_tokens": 12,
        "num_return_sequences": 9,
        "temperature": 5.0,
        "stop_strings": ["a"],
        "tokenizer": tokenizer,
    }
    records = pipe("abcdef", seed=1, return_tensors=True, **call)
    assert len({len(record["generated_token_ids"]) for record in records}) > 1


def test_an_empty_prompt_begins_from_bos(stock: Any, pipe: Any) -> None:
    call = {**GREEDY, "bos_token_id": 5}
    for given in ("", [""], ["", TEXTS[0]]):
        for more in ({}, {"return_tensors": True}):
            assert pipe(given, **call, **more) == stock(given, **call, **more)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_by_the_tokenizer_is_not_computed_and_stays_in_the_sequence(side: str) -> None:
    tokenizer = copy.deepcopy(word_tokenizer())
    stock, pipe = (made(task, tokenizer=tokenizer) for task in ("text-generation", "batch-text-generation"))
    tokenizer.padding_side = side  # a pipeline sets it, too
    padded = {"padding": "max_length", "max_length": 9}
    call = {**GREEDY, "tokenizer_encode_kwargs": padded}
    for more in ({"return_full_text": False}, {"return_tensors": True}):
        got = pipe(TEXTS, **call, **more)
        assert pipe.last_report.prompt_tokens == 6 + 5 + 1
        if side == "left":
            assert got == stock(TEXTS, **call, **more)
    assert [len(records[0]["generated_token_ids"]) for records in got] == [13] * 3
    with pytest.raises(UnsupportedOptionError, match="`max_length` counts the padding"):
        pipe(TEXTS, generation_config=GenerationConfig(max_length=12), tokenizer_encode_kwargs=padded)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("stopping_criteria", [MaxLengthCriteria(11)]),
        ("stopping_criteria", [beyond_eight]),
        ("logits_processor", [MinLengthLogitsProcessor(11, list(range(90)))]),
        ("logits_processor", [lambda ids, scores: scores.roll(ids.shape[1], dims=-1)]),
        ("prefix_allowed_tokens_fn", lambda row, ids: [20 + len(ids)]),
    ],
)
def test_what_would_count_the_padding_is_refused(stock: Any, pipe: Any, name: str, given: Any) -> None:
    padded = {"padding": "max_length", "max_length": 9}
    call = {**GREEDY, "eos_token_id": list(range(90)), name: given, "tokenizer_encode_kwargs": padded}
    with pytest.raises(UnsupportedOptionError, match=f"`{name}` sees the padding"):
        pipe(TEXTS[0], **call)
    expected = stock(TEXTS[0], **call)
    with pytest.warns(UserWarning, match=f"`{name}` sees the padding"), accelerated(stock):
        assert stock(TEXTS[0], **call) == expected
    call["tokenizer_encode_kwargs"] = {}
    assert pipe(TEXTS[0], **call) == stock(TEXTS[0], **call)
    blind = {"stopping_criteria": [MaxTimeCriteria(1e6)], "logits_processor": [TemperatureLogitsWarper(2.0)]}
    call = {**GREEDY, **blind, "tokenizer_encode_kwargs": padded}
    assert pipe(TEXTS[0], **call) == stock(TEXTS[0], **call)


def test_the_whole_list_reaches_the_engine_at_once(pipe: Any) -> None:
    shared = " ".join(f"w{10 + index % 60}" for index in range(80))
    texts = [f"{shared} w{index}" for index in range(5, 25)]
    pipe(texts, batch_size=1, **GREEDY)
    assert pipe.last_report.sequences == 20
    assert pipe.last_report.saving > 0.9
    assert f"{pipe.plan(texts).saving:.4f}" == f"{pipe.last_report.saving:.4f}"
    list(pipe((text for text in texts), **GREEDY))
    assert pipe.last_report.sequences == 20
    assert pipe.plan(iter(CHATS)).total_tokens == pipe.plan(CHATS).total_tokens == 8 + 7 + 3
    assert pipe.plan(TEXTS[0]).total_tokens == 6


def test_a_streamer_is_told_of_a_single_prompt(stock: Any, pipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stock(TEXTS[0], streamer=TextStreamer(stock.tokenizer), **GREEDY)
    expected = capsys.readouterr().out
    pipe(TEXTS[0], streamer=TextStreamer(pipe.tokenizer), **GREEDY)
    assert capsys.readouterr().out == expected
    with pytest.raises(UnsupportedOptionError, match="`streamer` goes with one prompt"):
        pipe(TEXTS, streamer=TextStreamer(pipe.tokenizer), **GREEDY)


def test_lists_show_a_bar(pipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(TEXTS * 20, **GREEDY)
    assert "60 prompts" in capsys.readouterr().err
    pipe(TEXTS * 20, progress=False, **GREEDY)
    pipe(TEXTS, **GREEDY)
    assert capsys.readouterr().err == ""


# -- a real model ----------------------------------------------------------------------------------------------


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@needs_real_model
def test_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_once()
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    register_tasks()
    start = "Answer in one word.\nQ: What is the capital of Italy?\nA: Rome\nQ: What is the capital of "
    texts = [f"{start}{land}?\nA:" for land in ("France", "Germany")]
    chats = [[{"role": "user", "content": f"The capital of {land} is"}] for land in ("France", "Germany")]
    stock, pipe = (
        pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
        for task in ("text-generation", "batch-text-generation")
    )
    call = {"max_new_tokens": 2, "do_sample": False}
    expected = stock(texts, batch_size=2, **call)
    assert pipe(texts, **call) == expected
    assert "Paris" in expected[0][0]["generated_text"] and "Berlin" in expected[1][0]["generated_text"]
    assert pipe(chats, **call) == stock(chats, batch_size=2, **call)
    with accelerated(stock):
        assert stock(texts, **call) == expected
        assert stock.last_report.sequences == 2
