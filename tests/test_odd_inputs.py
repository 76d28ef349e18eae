"""What odd and wrong prompts and options get: an error in the user's words, or the right result.

``python tests/test_odd_inputs.py`` prints every message, to be read by eye.
"""

from __future__ import annotations

import collections
import copy
import itertools
import math
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import build
from transformers import GenerationConfig
from words import word_tokenizer

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    BatchLLMError,
    GeneratorBusyError,
    PromptError,
    PromptsTypeError,
    UnsupportedOptionError,
)

FAMILY = "llama"  # 101 token ids
IDS = [5, 6, 7]
PLAIN = word_tokenizer()
TEMPLATE = word_tokenizer(template=True)
BOS = word_tokenizer(bos=True)
CHAT = [{"role": "user", "content": "w5 w6"}]


class Table:
    """What walks like a pandas DataFrame: by the names of its columns."""

    columns = ("label", "text")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class DataSet:
    """What walks like a datasets.Dataset: by rows that are dicts."""

    column_names = ("label", "prompt")

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"label": "w1", "prompt": "w5"}])


class Column:
    """What walks like a column of either."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


class Endless:
    """The old protocol of sequences, without an end: nothing here may try to walk through it."""

    def __getitem__(self, index: int) -> str:
        return "w5"


def stumbling() -> Iterator[list[int]]:
    yield from [IDS, IDS]
    raise OSError("the disk went away")


@dataclass
class Case:
    name: str
    prompts: Any = None
    says: str = ""
    error: type[Exception] = PromptError
    tokenizer: Any = PLAIN
    options: dict[str, Any] | None = None

    def run(self) -> Any:
        prompts = self.prompts() if isinstance(self.prompts, Made) else self.prompts
        options = {"max_new_tokens": 2} | (self.options or {})
        return BatchGenerator(build(FAMILY), self.tokenizer).generate(prompts, **options)


class Made:
    """A prompt list that can be walked through once, made anew for each test."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


IS = "a prompt is a string, a list of token ids, a 1-D tensor or a chat"
BAD_PROMPTS = [
    Case("None", None, "prompts is None; pass a list of prompts", PromptsTypeError),
    Case("a number", 7, "prompts is an int; pass a list", PromptsTypeError),
    Case("NaN", math.nan, "prompts is a float; pass a list", PromptsTypeError),
    Case("a set", {"w5"}, "prompts is a set (a set has no order)", PromptsTypeError),
    Case("bytes", b"w5", "prompts is bytes (decode them first)", PromptsTypeError),
    Case("a memoryview", memoryview(b"w5"), "prompts is a memoryview", PromptsTypeError),
    Case("a path", Path("prompts.txt"), "prompts is a PosixPath", PromptsTypeError),
    Case("a class", list, "prompts is the class list", PromptsTypeError),
    Case("endless items", Endless(), "prompts is an Endless; pass a list", PromptsTypeError),
    Case("an endless iterator", Made(lambda: itertools.cycle(["w5"])), "which never ends", PromptsTypeError),
    Case("an endless count", Made(itertools.count), "which never ends", PromptsTypeError),
    Case("an empty dict", {}, "prompts is a dict; " + IS, PromptsTypeError),
    Case("a dict of lists", {"text": ["w5"]}, "prompts is a dict; pass what it holds as 'text'", PromptsTypeError),
    Case("one message", CHAT[0], "a chat is a list of such messages", PromptsTypeError),
    Case("ids by name", {"input_ids": [IDS]}, "the token ids in its 'input_ids'", PromptsTypeError),
    Case("an encoding", PLAIN(["w5"]), "BatchEncoding; pass the texts themselves", PromptsTypeError),
    Case(
        "a data frame",
        Table(),
        "prompts is a Table; pass one of its columns, such as prompts['text']",
        PromptsTypeError,
    ),
    Case("a data set", DataSet(), "such as prompts['prompt']", PromptsTypeError),
    Case("a 0-D tensor", torch.tensor(5), "prompts is a 0-D tensor", PromptsTypeError),
    Case("None in the list", [IDS, None], "prompt 1 is None; " + IS),
    Case("NaN in a column", Column("w5", math.nan), "prompt 1 is NaN, as missing values are"),
    Case("an empty list of ids", [[]], "prompt 0 is empty: it has no token ids"),
    Case("a number among prompts", [IDS, 5], "prompt 1 is an int; " + IS),
    Case("a float among ids", [1, 2.5], "prompt 0 holds 2.5 at position 1, a float; token ids are integers"),
    Case("whole floats", [[1.0, 2.0]], "prompt 0 holds 1.0 at position 0, a float"),
    Case("NaN among ids", [[5, math.nan]], "prompt 0 holds nan at position 1"),
    Case("bools", [[True, False]], "prompt 0 holds True at position 0, a bool"),
    Case("None among ids", [[5, None]], "prompt 0 holds None at position 1, where a token id should be"),
    Case("a string among ids", [[5, "w6"]], "prompt 0 holds a string at position 1; give each string as a prompt"),
    Case("strings one level down", [["w5", "w6"]], "prompt 0 holds a string at position 0"),
    Case("pairs of text and label", [("w5", 1)], "prompt 0 holds a string at position 0"),
    Case("ids one level down", [[[5, 6]], [[7]]], "prompts 0-1: each holds a list at position 0"),
    Case(
        "an id too large",
        [IDS, [5, 101]],
        "prompt 1 has token id 101 at position 1, outside the model's vocabulary of 101",
    ),
    Case("a negative id", [[5, -100]], "prompt 0 has token id -100 at position 1; token ids are not negative"),
    Case("an id beyond all", [[2**70]], "prompt 0 has token id 1180591620717411303424 at position 0"),
    Case("a float tensor", [torch.tensor([1.0])], "prompt 0 is a tensor of torch.float32; token ids are integers"),
    Case("a bool array", [np.array([True])], "prompt 0 is a NumPy array of bool; token ids are integers"),
    Case("a padded tensor in a list", [torch.tensor([[5, 6]])], "prompt 0 is a 2-D tensor"),
    Case("a sparse tensor", [torch.tensor([5, 0]).to_sparse()], "prompt 0 is a tensor that cannot be read"),
    Case(
        "a tensor without data", [torch.empty(2, dtype=int, device="meta")], "prompt 0 is a tensor that cannot be read"
    ),
    Case("bytes in the list", [b"w5"], "prompt 0 is bytes; " + IS),
    Case("a range in the list", [range(3)], "prompt 0 is a range; " + IS),
    Case("an object", [object()], "prompt 0 is an object; " + IS),
    Case("vLLM's dicts", [{"prompt": "w5"}], "prompt 0 is a dict; pass what it holds as 'prompt'"),
    Case("rows of a data set", [{"label": 1, "text": "w5"}], "prompt 0 is a dict; pass what it holds as 'text'"),
    Case("half a character", ["w5", "w6 \ud83d"], "prompt 1 is a string with half a character"),
    Case(
        "another model's tokenizer",
        ["w150"],
        "prompt 0 has token id 150 at position 0, outside",
        tokenizer=word_tokenizer(200),
    ),
    Case("the reason for that", ["w150"], "is the tokenizer another model's", tokenizer=word_tokenizer(200)),
    Case("an empty string", ["w5", ""], "prompt 1 is an empty string, of which the tokenizer makes no tokens"),
    Case("text without tokenizer", "w5", "prompt 0 is a string, and the model does not say where", tokenizer=None),
    Case("a chat without tokenizer", CHAT, "prompt 0 is a chat, and the model does not say where", tokenizer=None),
    Case("much without tokenizer", ["w5"] * 30, "prompts 0-29: each is a string, and the model", tokenizer=None),
    Case(
        "a chat without template",
        [IDS, CHAT],
        "prompt 1 is a chat, and the tokenizer has no chat template: pass strings",
    ),
    Case("an empty chat", [CHAT, []], "prompt 1 is empty", tokenizer=TEMPLATE),
    Case(
        "no role",
        [[{"content": "w5"}]],
        "prompt 0 is a chat whose message 0 has no 'role'; a message is",
        tokenizer=TEMPLATE,
    ),
    Case(
        "no role, bare",
        [*CHAT, {"content": "w5"}],
        "prompt 0 is a chat whose message 1 has no 'role'",
        tokenizer=TEMPLATE,
    ),
    Case("no content", [{"role": "user"}], "whose message 0 has no 'content'", tokenizer=TEMPLATE),
    Case("content of None", [{"role": "user", "content": None}], "has no 'content'", tokenizer=TEMPLATE),
    Case("another key", [{"role": "user", "text": "w5"}], "has no 'content'", tokenizer=TEMPLATE),
    Case(
        "ShareGPT's keys", [{"from": "human", "value": "w5"}], "rename them to 'role' and 'content'", tokenizer=TEMPLATE
    ),
    Case("a role that is none", [{"role": 1, "content": "w5"}], "has the role 1; it is a string", tokenizer=TEMPLATE),
    Case("content that is none", [{"role": "user", "content": 5}], "has an int as its 'content'", tokenizer=TEMPLATE),
    Case("an image", [{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image'", tokenizer=TEMPLATE),
    Case("text in a chat", [[*CHAT, "w5"]], "prompt 0 is a chat whose message 1 is a str", tokenizer=TEMPLATE),
    Case(
        "what a template refuses",
        [{"role": "alien", "content": "w5"}],
        "the tokenizer refused: no aliens",
        tokenizer=TEMPLATE,
    ),
    Case("an iterator that stumbles", Made(stumbling), "the disk went away", OSError),
    Case(
        "longer than `max_length`",
        [IDS],
        "has 3 tokens already and `max_length` is 2",
        options={"max_new_tokens": None, "max_length": 2},
    ),
    Case("several at once", [None, IDS, [], [1.5], None], "4 prompts cannot be run:\n  prompts 0, 4: each is None"),
]

GOOD_PROMPTS: list[tuple[str, Any, Any, list[list[int]]]] = [
    ("a bare string", "w5 w6", PLAIN, [[5, 6]]),
    ("no prompts", [], None, []),
    ("no prompts, lazily", Made(lambda: iter(())), None, []),
    ("an empty string with BOS", ["", "w5"], BOS, [[1], [1, 5]]),
    ("a bare list of ids", IDS, None, [IDS]),
    ("NumPy's integers", [np.int64(5), np.uint8(6)], None, [[5, 6]]),
    ("an array of ids", np.array(IDS, np.uint16), None, [IDS]),
    ("tensors of one id", list(torch.tensor(IDS)), None, [IDS]),
    ("a range of ids", range(5, 8), None, [IDS]),
    ("array.array", array("i", IDS), None, [IDS]),
    ("a tuple of prompts", (IDS, "w5"), PLAIN, [IDS, [5]]),
    ("an array of strings", np.array(["w5", "w6"]), PLAIN, [[5], [6]]),
    ("an array of lists", np.array([[5], [6, 7]], dtype=object), None, [[5], [6, 7]]),
    ("a column of text", Column("w5", "w6 w7"), PLAIN, [[5], [6, 7]]),
    ("keys of a dict", {"w5": 1, "w6": 0}.keys(), PLAIN, [[5], [6]]),
    ("a deque", collections.deque([IDS]), None, [IDS]),
    ("a generator", Made(lambda: ([index] for index in (5, 6))), None, [[5], [6]]),
    ("a map", Made(lambda: map(str, Column("w5", "w6"))), PLAIN, [[5], [6]]),
    ("lines of a file", Made(lambda: iter(["w5\n", "w6\n"])), PLAIN, [[5], [6]]),
    ("all kinds", ["w5", IDS, CHAT, torch.tensor([6]), tuple(CHAT)], TEMPLATE, [[5], IDS, [1, 5, 6], [6], [1, 5, 6]]),
    ("a bare chat", CHAT, TEMPLATE, [[1, 5, 6]]),
    ("a call to a tool", [*CHAT, {"role": "assistant", "content": None, "tool_calls": []}], TEMPLATE, [[1, 5, 6, 1]]),
]


@pytest.mark.parametrize("case", BAD_PROMPTS, ids=lambda case: case.name)
def test_a_prompt_that_cannot_be_run_is_named_before_any_work(case: Case, never_runs: None) -> None:
    with pytest.raises(case.error) as caught:
        case.run()
    assert case.says in str(caught.value)
    assert isinstance(caught.value, BatchLLMError) or case.error is OSError


@pytest.fixture
def never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work began, or memory was taken, before everything was checked")

    monkeypatch.setattr("hf_batchllm.memory.CacheHome.open", refuse)
    monkeypatch.setattr("hf_batchllm.runner.ModelRunner.step", refuse)


@pytest.mark.filterwarnings("ignore:prompt 0 is an empty string")
@pytest.mark.parametrize(
    ("prompts", "tokenizer", "ids"), [row[1:] for row in GOOD_PROMPTS], ids=[row[0] for row in GOOD_PROMPTS]
)
def test_odd_prompts_that_are_right(prompts: Any, tokenizer: Any, ids: list[list[int]]) -> None:
    result = Case("", prompts, tokenizer=tokenizer).run()
    assert [generation.prompt_token_ids for generation in result] == ids
    assert [len(generation.token_ids) for generation in result] == [2] * len(ids)


def test_the_error_of_an_iterator_says_where_it_came_from() -> None:
    with pytest.raises(OSError, match="disk") as caught:
        Case("", stumbling()).run()
    assert caught.value.__notes__ == ["raised by the iterator of prompts, when it was asked for prompt 2"]


def test_an_iterator_is_walked_through_once_and_no_further() -> None:
    asked: list[int] = []

    def lazily() -> Iterator[list[int]]:
        for index in range(5, 8):
            asked.append(index)
            yield [index]

    generator = BatchGenerator(build(FAMILY))
    assert len(generator.generate(lazily(), max_new_tokens=1)) == 3
    assert len(list(generator.stream(lazily(), max_new_tokens=1))) == 3
    assert len(generator.plan(lazily()).order) == 3
    assert asked == [5, 6, 7] * 3
    with pytest.raises(UnsupportedOptionError):
        generator.generate(lazily(), max_token=1)  # options come first: the prompts are still there to be used
    assert len(asked) == 9


def test_a_call_of_the_generator_from_its_own_iterator_of_prompts() -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.raises(GeneratorBusyError, match="a call is running already"):
        generator.generate(generator.generate([[index]], max_new_tokens=1)[0].token_ids for index in (5, 6))
    assert len(generator.generate([IDS], max_new_tokens=1)) == 1


def test_recorded_the_good_ones_run_and_the_bad_carry_the_reason() -> None:
    good = ["w5 w6", IDS, CHAT]
    bad: list[Any] = [None, [], [1.5], [101], "", {"text": "w5"}, [{"role": "user"}], math.nan]
    mixed = [prompt for pair in itertools.zip_longest(good, bad, fillvalue=None) for prompt in pair]
    generator = BatchGenerator(build(FAMILY), TEMPLATE)
    result = generator.generate(mixed, max_new_tokens=3, on_error="record")
    with pytest.raises(PromptError) as caught:
        generator.generate(mixed, max_new_tokens=3)
    assert [generation.index for generation in result] == list(range(len(mixed)))
    assert {generation.index: generation.error for generation in result if generation.error} == caught.value.problems
    ran = [generation for generation in result if generation.error is None]
    assert [generation.token_ids for generation in ran] == generator.generate(good, max_new_tokens=3).token_ids
    assert {generation.finish_reason for generation in result} == {"length", "error"}
    without = BatchGenerator(build(FAMILY)).generate([IDS, "w5"], max_new_tokens=1, on_error="record")
    assert "pass BatchGenerator(model, tokenizer)" in without[1].error
    assert without[0].error is None


def test_a_hundred_thousand_times_the_same_prompt() -> None:
    plan = BatchGenerator(build(FAMILY)).plan([list(range(60))] * 100_000)
    assert plan.total_tokens == 6_000_000
    assert plan.computed_tokens < 200_000


def test_a_processor_for_several_media_is_asked_for_its_tokenizer() -> None:
    processor: Any = SimpleNamespace(tokenizer=PLAIN)

    class Processor:
        tokenizer = PLAIN

        def __call__(self, images: Any = None, text: Any = None) -> Any:
            raise AssertionError("text is not an image")

        def decode(self, ids: list[int], **options: Any) -> str:
            return self.tokenizer.decode(ids, **options)

    del processor
    (generation,) = BatchGenerator(build(FAMILY), Processor()).generate("w5 w6", max_new_tokens=2)
    assert generation.prompt_token_ids == [5, 6]
    assert generation.text is not None


# -- options ---------------------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True}
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 5}, "`max_tokens` is called `max_new_tokens` here"),
    ({"max_new_token": 5}, "`max_new_token` is not an option of generate; did you mean `max_new_tokens`?"),
    ({"temprature": 0.5}, "did you mean `temperature`?"),
    ({"min_tokens": 5}, "is called `min_new_tokens` here"),
    ({"n": 4}, "`n` is called `num_return_sequences` here"),
    ({"best_of": 4}, "is called `num_return_sequences` here"),
    ({"stop": ["."]}, "`stop` is called `stop_strings` here"),
    ({"stop_token_ids": [2]}, "is called `eos_token_id` here"),
    ({"ignore_eos": True}, "pass `eos_token_id=None`"),
    ({"use_tqdm": False}, "`use_tqdm` is called `progress` here"),
    ({"sampling_params": object()}, "pass each option as a keyword argument"),
    ({"presence_penalty": 0.1}, "see `repetition_penalty`"),
    ({"repeat_penalty": 1.1}, "is called `repetition_penalty` here"),
    ({"random_seed": 1}, "is called `seed` here"),
    ({"generator": torch.Generator()}, "is called `seed` here"),
    ({"batch_size": 8}, "the batch is as large as memory allows"),
    ({"prompt": "w5"}, "the prompts are the first argument"),
    ({"messages": CHAT}, "the prompts are the first argument"),
    ({"return_full_text": False}, "each result holds `text`, `token_ids` and `prompt_token_ids`"),
    ({"skip_special_tokens": False}, "use tokenizer.decode on `token_ids`"),
    ({"padding": True}, "prompts are encoded as the tokenizer does by default"),
    ({"tools": []}, "apply the template yourself"),
    ({"lora_request": object()}, "give BatchGenerator the model with its adapter"),
    ({"guided_decoding": object()}, "is not supported (constrained decoding)"),
    ({"device": "cuda"}, "the model runs where, and as, it is"),
    ({"kv_memory": "1GiB"}, "is a field of BatchConfig: BatchGenerator(model, kv_memory=...)"),
    ({"config": BatchConfig()}, "goes into BatchGenerator(model, config=...)"),
    ({"tokenizer": PLAIN}, "goes into BatchGenerator(model, tokenizer=...)"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0, but is 0"),
    ({"max_new_tokens": -1}, "must be greater than 0, but is -1"),
    ({"max_new_tokens": 1.5}, "`max_new_tokens` must be a whole number, not 1.5"),
    ({"max_new_tokens": "20"}, "`max_new_tokens` must be a whole number, not '20'"),
    ({"max_new_tokens": True}, "`max_new_tokens` must be a whole number, not True"),
    ({"max_length": "20"}, "`max_length` must be a whole number, not '20'"),
    ({"do_sample": "yes"}, "`do_sample` must be True or False, not 'yes'"),
    ({**SAMPLED, "temperature": 0}, "`temperature` is 0, and sampling needs more than that"),
    ({**SAMPLED, "temperature": 0.0}, "for greedy decoding set `do_sample=False`"),
    ({**SAMPLED, "temperature": "0.9"}, "`temperature` must be a number, not '0.9'"),
    ({**SAMPLED, "temperature": math.nan}, "`temperature` must be a number, not nan"),
    ({**SAMPLED, "top_p": "0.9"}, "`top_p` must be a number"),
    ({**SAMPLED, "num_return_sequences": 0}, "`num_return_sequences` must be at least 1, but is 0"),
    ({"num_return_sequences": 3}, "`num_return_sequences` is 3, and greedy decoding gives one sequence"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be a float above 0, such as 1.2, not 0"),
    ({"eos_token_id": "</s>"}, "must be a token id, or a list of them, not '</s>': tokenizer.convert_tokens_to_ids"),
    ({"eos_token_id": []}, "for no EOS at all pass None"),
    ({"eos_token_id": [[2]]}, "must be a token id, or a list of them, not [[2]]"),
    ({"eos_token_id": 1.5}, "must be a token id, or a list of them, not 1.5"),
    ({"pad_token_id": "w0"}, "`pad_token_id` must be a token id, not 'w0'"),
    ({"generation_config": {"max_new_tokens": 3}}, "not a dict: pass its items as keyword arguments"),
    ({"generation_config": 20}, "not an int: if it is a length, pass `max_new_tokens=20`"),
    ({"generation_config": "w5"}, "not a str: if it is a prompt, put all prompts into one list"),
    ({"generation_config": BatchConfig()}, "not a BatchConfig: it goes into BatchGenerator(model, config=...)"),
    ({"seed": -1}, "`seed` must be a whole number from 0 to 2**64 - 1, not -1"),
    ({"seed": 1.0}, "`seed` must be a whole number from 0 to 2**64 - 1, not 1.0"),
    ({"seed": True}, "`seed` must be a whole number"),
    ({"seed": "42"}, "`seed` must be a whole number"),
    ({"seed": torch.Generator()}, "`seed` must be a whole number"),
    ({"on_error": "ignore"}, '`on_error` must be "raise" or "record", not \'ignore\''),
    ({"on_error": None}, '`on_error` must be "raise" or "record", not None'),
    ({"progress": "yes"}, "`progress` must be True, False, or None for long lists only, not a str"),
    ({"num_beams": 4}, "`num_beams` is not supported"),
]
GOOD_OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": np.int64(2)},
    {"eos_token_id": None},
    {"eos_token_id": 10**6},
    {"eos_token_id": torch.tensor([2, 3])},
    {"eos_token_id": np.int64(2)},
    {"repetition_penalty": 1},
    {"do_sample": 1, "seed": np.uint64(3)},
    {"generation_config": GenerationConfig(), "progress": False},
]


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(
    ("options", "says"), BAD_OPTIONS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_an_option_that_cannot_be_honoured_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        Case("", [IDS], options=options).run()
    assert says in str(caught.value)
    assert f"`{caught.value.option}`" in str(caught.value)


@pytest.mark.parametrize("options", GOOD_OPTIONS, ids=str)
def test_odd_options_that_are_right(options: dict[str, Any]) -> None:
    assert len(Case("", [IDS], options=options).run()[0].token_ids) == 2


def test_what_python_itself_says() -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.raises(TypeError, match="multiple values for argument 'prompts'"):
        generator.generate([IDS], prompts=[IDS])
    with pytest.raises(TypeError, match="positional"):
        generator.generate([IDS], None, 20)
    with pytest.raises(PromptsTypeError, match="prompts is None"):
        generator.generate()


def test_errors_travel_from_process_to_process() -> None:
    for case in BAD_PROMPTS[:2] + BAD_PROMPTS[-1:]:
        with pytest.raises(BatchLLMError) as caught:
            case.run()
        twin = copy.copy(caught.value)
        assert type(twin) is type(caught.value)
        assert str(twin) == str(caught.value)
        assert vars(twin) == vars(caught.value)


if __name__ == "__main__":
    for case in [*BAD_PROMPTS, *(Case(str(options)[:60], [IDS], options=options) for options, _ in BAD_OPTIONS)]:
        try:
            case.run()
        except Exception as error:
            print(f"{case.name}\n    {type(error).__name__}: {error}", file=sys.stdout)
