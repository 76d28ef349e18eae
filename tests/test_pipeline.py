"""``pipeline("batch-text-generation")`` gives what ``pipeline("text-generation")`` gives, from one run."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from families import REFUSED, build
from letters import letter_tokenizer
from stand_in import TEXTS, word_tokenizer
from torch.utils.data import Dataset, IterableDataset
from transformers import GenerationConfig, TextStreamer, pipeline, set_seed
from transformers.pipelines.pt_utils import KeyDataset

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    ConfigError,
    GenerationInterrupted,
    GeneratorBusyError,
    PromptError,
    PromptsTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
    accelerated,
)
from hf_batchllm.pipeline import BatchTextGenerationPipeline
from hf_batchllm.runner import ModelRunner

CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
PREFILLED = [*CHATS[0], {"role": "assistant", "content": "w33 w34"}]
GREEDY = {"max_new_tokens": 4, "do_sample": False}


class Texts(Dataset):
    """Has a length, and no end that a ``for`` would find."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place % len(self.items)]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[str]:
        return iter(TEXTS)


def made(task: str, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        defaults = {"model": build("gemma3"), "tokenizer": word_tokenizer(), "device": "cpu"}
        return pipeline(task, **{**defaults, **given})


@pytest.fixture(scope="module")
def stock() -> Any:
    return made("text-generation")


@pytest.fixture
def pipe() -> Iterator[Any]:
    with made("batch-text-generation") as pipe:
        yield pipe


# -- the same, in every structure ------------------------------------------------------------------------------


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


# -- what is wrong, in the user's words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "prompts is an int"),
        (None, "prompts is None"),
        (b"w5", "decode them first"),
        ({"text": TEXTS}, "pass what it holds as 'text'"),
        (torch.tensor([1, 2]), "BatchGenerator"),
        ([5, 6], "BatchGenerator"),
        (datasets.Dataset.from_dict({"text": TEXTS}), r"prompts\['text'\]"),
        (pd.DataFrame({"text": TEXTS}), r"prompts\['text'\]"),
    ],
)
def test_what_is_no_list_of_prompts(pipe: Any, given: Any, says: str) -> None:
    with pytest.raises(PromptsTypeError, match=says):
        pipe(given)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (3, "is an int; a prompt is a string or a chat"),
        (None, "is None"),
        (float("nan"), "is NaN"),
        ({"text": "w5"}, "pass what it holds as 'text'"),
        ([5, 6], "BatchGenerator"),
        ([], "is a list"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ("", "no BOS token to begin from"),
        ("w5 \ud800", "half a character"),
        ([{"role": "assistant", "tool_calls": []}], "transformers' pipelines do not take"),
    ],
)
def test_bad_prompts_are_named_by_their_places(stock: Any, pipe: Any, bad: Any, says: str) -> None:
    given = ["w5", "w6", bad, "w7"]
    for inputs in (given, iter(given)):
        with pytest.raises(PromptError, match=says) as caught:
            list(pipe(inputs, **GREEDY))
        assert list(caught.value.problems) == [2]
    good = [stock(text, **GREEDY) for text in ("w5", "w6", "w7")]
    for inputs in (given, iter(given)):
        got = list(pipe(inputs, on_error="record", **GREEDY))
        assert got[:2] + got[3:] == good
        assert [set(record) for record in got[2]] == [{"generated_text", "error"}]
        assert got[2][0]["generated_text"] is None
    call = {"num_return_sequences": 2, "return_tensors": True, "seed": 1, "max_new_tokens": 2}
    records = pipe(given, on_error="record", **call)[2]
    assert [record["generated_token_ids"] for record in records] == [None, None]


def test_rows_of_a_dataset_are_looked_at_too(stock: Any, pipe: Any) -> None:
    with pytest.raises(PromptError, match="prompt 1 is a dict; pass what it holds as 'text'"):
        list(pipe(Texts(["w5", {"text": "w6"}])))
    assert list(pipe(Texts(CHATS), **GREEDY)) == stock(CHATS, **GREEDY)
    assert pipe(KeyDataset([], "text")) == []
    assert pipe([3, None], on_error="record", **GREEDY)[1][0]["error"].startswith("is None")


def test_an_iterator_that_fails_says_at_which_prompt(pipe: Any) -> None:
    def failing() -> Iterator[str]:
        yield from TEXTS
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        list(pipe(failing()))
    assert "prompt 3" in caught.value.__notes__[0]


def test_several_bad_prompts_come_together(pipe: Any) -> None:
    pipe.tokenizer = letter_tokenizer()
    with pytest.raises(PromptError) as caught:
        pipe([CHATS[0], "ab", 3], **GREEDY)
    assert list(caught.value.problems) == [0, 2]
    assert "the tokenizer has no chat template" in caught.value.problems[0]
    assert isinstance(caught.value.__cause__, ValueError)  # what the tokenizer said


def test_misspelt_and_misplaced_options(pipe: Any) -> None:
    with pytest.raises(ConfigError, match="`kv_memroy` is not a field of BatchConfig; did you mean `kv_memory`"):
        made("batch-text-generation", kv_memroy="2GiB")
    with pytest.raises(ConfigError, match="`kv_memory` must be a size"):
        made("batch-text-generation", kv_memory="2 potatoes")
    with pytest.raises(ConfigError, match="`batch_config` must be a BatchConfig, not a dict"):
        made("batch-text-generation", batch_config={"page_size": 8})
    with pytest.raises(UnsupportedOptionError, match="did you mean `max_new_tokens`"):
        made("batch-text-generation", max_new_tokenz=3)
    with pytest.raises(UnsupportedOptionError, match="did you mean `max_new_tokens`"):
        pipe(TEXTS, max_new_tokenz=3)
    with pytest.raises(ConfigError, match="`page_size` is set when the pipeline is made"):
        pipe(TEXTS, page_size=8)
    with pytest.raises(UnsupportedOptionError, match="`num_beams`"):
        pipe(TEXTS, num_beams=2)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UnsupportedOptionError, match=f"`{name}` has no place"):
            pipe(TEXTS, **{name: 1})
    with pytest.raises(UnsupportedOptionError, match="`output_scores`"):
        pipe(TEXTS, return_dict_in_generate=True, output_scores=True)


def test_a_model_that_is_not_supported_is_refused_when_the_pipeline_is_made() -> None:
    with pytest.raises(UnsupportedModelError):
        made("batch-text-generation", model=REFUSED["falcon"]())


# -- its life --------------------------------------------------------------------------------------------------


def test_settings_are_those_of_a_batch_generator() -> None:
    pipe = made("batch-text-generation", batch_config=BatchConfig(page_size=8), kv_memory="2MiB", seed=3)
    assert pipe.task == "batch-text-generation"
    pipe(TEXTS, max_new_tokens=2)
    assert pipe.last_report.kv_memory <= 2 << 20
    assert pipe.last_report.seed == 3
    assert BatchTextGenerationPipeline(pipe.model, pipe.tokenizer, device="cpu").task == "batch-text-generation"


def test_closed_it_says_so() -> None:
    pipe = made("batch-text-generation", keep_prefixes=1)
    with pipe:
        pipe(TEXTS, **GREEDY)
    for call in (lambda: pipe(TEXTS), lambda: pipe.plan(TEXTS)):
        with pytest.raises(GeneratorBusyError, match="this pipeline is closed"):
            call()


def test_a_broken_off_iterator_leaves_everything_usable(stock: Any, pipe: Any) -> None:
    expected = stock(TEXTS, **GREEDY)
    for _ in pipe(iter(TEXTS), **GREEDY):
        break
    assert pipe(TEXTS, **GREEDY) == expected
    results = pipe(iter(TEXTS), **GREEDY)
    assert next(results) == expected[0]
    with pytest.raises(GeneratorBusyError, match="a stream is still open"):
        pipe(TEXTS, **GREEDY)
    assert stock(TEXTS[0], **GREEDY) == expected[0]  # between two steps the model is its owner's
    results.close()
    assert list(results) == []
    assert pipe(TEXTS, **GREEDY) == expected
    dataset = pipe(Texts(TEXTS), **GREEDY)
    for _ in dataset:
        break
    assert list(dataset) == expected


def test_an_interrupt_hands_out_what_had_finished(stock: Any, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = ModelRunner.step, itertools.count()

    def interrupted(self: ModelRunner, *args: Any) -> Any:
        if next(steps) == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(ModelRunner, "step", interrupted)
    configs = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=list(range(20)), pad_token_id=0)
    with pytest.raises(GenerationInterrupted) as caught:
        pipe(TEXTS, generation_config=configs)
    monkeypatch.undo()
    result = caught.value.result
    assert 0 < len(result) < 3
    assert pipe(TEXTS, generation_config=configs) == stock(TEXTS, generation_config=configs)
    whole = BatchGenerator(pipe.model, pipe.tokenizer).generate(TEXTS, configs)
    assert all(row == whole[row.index] for row in result)  # with its text


def test_an_interrupt_while_texts_are_made(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipe, "postprocess", interrupted)
    with pytest.raises(GenerationInterrupted) as caught:
        pipe(TEXTS, **GREEDY)
    assert len(caught.value.result.texts) == 3 and all(caught.value.result.texts)


def test_what_is_saved_is_what_the_stock_pipeline_saves(stock: Any, pipe: Any, tmp_path: Path) -> None:
    pipe(TEXTS, **GREEDY)
    for name, each in (("stock", stock), ("ours", pipe)):
        each.save_pretrained(tmp_path / name)
    files = {name: {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("stock", "ours")}
    assert files["ours"] == files["stock"]
    assert "custom_pipelines" not in json.loads(files["ours"]["config.json"])
    assert not hasattr(pipe.model.config, "custom_pipelines")
    saved = pipeline("batch-text-generation", model=str(tmp_path / "ours"), device="cpu")
    assert saved(TEXTS, **GREEDY) == stock(TEXTS, **GREEDY)


def test_copies_and_another_model(stock: Any, pipe: Any) -> None:
    expected = stock(TEXTS, **GREEDY)
    for each in (copy.copy(pipe), copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert each(TEXTS, **GREEDY) == expected
    pipe.model = build("llama")
    assert pipe(TEXTS, **GREEDY) == made("text-generation", model=build("llama"))(TEXTS, **GREEDY) != expected
    assert sorted(vars(pipe.model)) == sorted(vars(build("llama")))


def test_postprocess_and_preprocess_may_be_ones_own(stock: Any) -> None:
    class Counted(BatchTextGenerationPipeline):
        def preprocess(self, prompt_text: Any, **options: Any) -> Any:
            return super().preprocess(f"w9 {prompt_text}", **options)

        def postprocess(self, *args: Any, **options: Any) -> Any:
            return len(super().postprocess(*args, **options))

    pipe = Counted(model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    assert pipe(TEXTS, **GREEDY) == [1, 1, 1]
    assert pipe.last_report.prompt_tokens == 12 + 3


# -- a real model ----------------------------------------------------------------------------------------------


def _small_model() -> Any:
    path = Path(__file__).parents[1] / "examples" / "small_model.py"
    spec = importlib.util.spec_from_file_location("small_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


small_model = _small_model()
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.mark.skipif(not small_model.is_available(), reason=small_model.why_not_available())
@pytest.mark.xdist_group("real_model")
@pytest.mark.timeout(900)  # the first run unpacks the model
def test_a_real_model() -> None:
    model, tokenizer = small_model.load()
    tokenizer.chat_template = TEMPLATE
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
    rows = KeyDataset(datasets.Dataset.from_dict({"text": texts}), "text")
    assert list(pipe(rows, **call)) == list(pipe((text for text in texts), **call)) == expected
    assert pipe(chats, **call) == stock(chats, batch_size=2, **call)
    with accelerated(stock):
        assert stock(texts, **call) == expected
        assert stock.last_report.sequences == 2
    (samples,) = pipe(texts[:1], num_return_sequences=3, max_new_tokens=2, seed=5)
    assert len(samples) == 3
    assert all(record["generated_text"].startswith(texts[0]) for record in samples)
