"""What odd and wrong prompts get: an error in the user's words that names the prompt, or the right result.

``python tests/test_inputs_odd_prompts.py`` prints every message of this table, and of those in
test_inputs_odd_options.py, to be read.
"""

from __future__ import annotations

import collections
import itertools
import math
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from support_families import build
from support_untouched import never_runs as never_runs  # a fixture
from support_word_tokenizer import word_tokenizer

from hf_batchllm import (
    BatchGenerator,
    BatchLLMError,
    GeneratorBusyError,
    PromptError,
    PromptsTypeError,
    UnsupportedOptionError,
)

FAMILY = "llama"  # 101 token ids
IDS = [5, 6, 7]
PLAIN, TEMPLATE, BOS = word_tokenizer(), word_tokenizer(template=True), word_tokenizer(bos=True)
FOREIGN = word_tokenizer(400)  # another model's
CHAT = [{"role": "user", "content": "w5 w6"}]
CALL = {"role": "assistant", "content": None, "tool_calls": []}
IS = "a prompt is a string, a list of token ids, a 1-D tensor or a chat"


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
    """The old protocol of sequences, without an end: nothing may try to walk through it."""

    def __getitem__(self, index: int) -> str:
        return "w5"


class Made:
    """Prompts that can be walked through once, made anew for each test."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


FRAME = pandas.DataFrame({"id": [1, 2], "q": ["w5", "w6"], "length": [1, 1], "answer": ["w7", "w8"]})


def stumbling() -> Iterator[list[int]]:
    yield from [IDS, IDS]
    raise OSError("the disk went away")


def run(prompts: Any, tokenizer: Any = PLAIN, **options: Any) -> Any:
    prompts = prompts.make() if isinstance(prompts, Made) else prompts
    return BatchGenerator(build(FAMILY), tokenizer).generate(prompts, **{"max_new_tokens": 2, **options})


NO_LIST: list[tuple[str, Any, str]] = [
    ("None", None, "prompts is None; pass a list of prompts"),
    ("a number", 7, "prompts is an int; pass a list"),
    ("NaN", math.nan, "prompts is a float; pass a list"),
    ("a set", {"w5"}, "prompts is a set (a set has no order)"),
    ("bytes", b"w5", "prompts is bytes (decode them first)"),
    ("a memoryview", memoryview(b"w5"), "prompts is a memoryview"),
    ("a path", Path("prompts.txt"), "prompts is a PosixPath"),
    ("a class", list, "prompts is the class list"),
    ("endless items", Endless(), "prompts is an Endless; pass a list"),
    ("an endless iterator", Made(lambda: itertools.cycle(["w5"])), "which never ends"),
    ("an endless count", Made(itertools.count), "which never ends"),
    ("an empty dict", {}, "prompts is a dict; " + IS),
    ("a dict of lists", {"text": ["w5"]}, "prompts is a dict; pass its value for 'text'"),
    ("one message", CHAT[0], "a chat is a list of such messages"),
    ("ids by name", {"input_ids": [IDS]}, "the token ids in its 'input_ids'"),
    ("an encoding", PLAIN(["w5"]), "BatchEncoding; pass the texts themselves"),
    ("a data frame", Table(), "prompts is a Table; pass one of its columns, such as prompts['text']"),
    ("numbers and texts", FRAME, "prompts is a DataFrame; pass one of its columns, such as prompts['q']"),
    ("a data frame of numbers", FRAME[["id"]], "prompts is a DataFrame; pass a column of it that holds texts"),
    ("a data set", DataSet(), "such as prompts['prompt']"),
    ("a 0-D tensor", torch.tensor(5), "prompts is a 0-D tensor"),
]

BAD: list[tuple[str, Any, Any, str]] = [
    ("None in the list", [IDS, None], None, "prompt 1 is None; " + IS),
    ("NaN in a column", Column("w5", math.nan), PLAIN, "prompt 1 is NaN, as missing values are"),
    ("no ids", [[]], None, "prompt 0 is empty: it has no token ids"),
    ("a number among prompts", [IDS, 5], None, "prompt 1 is an int; " + IS),
    ("a number before prompts", [5, [1, 2], "w5"], PLAIN, "prompt 0 is an int; " + IS),
    ("a set in the list", [{1, 2}], None, "prompt 0 is a set; " + IS),
    ("a float among bare ids", [1, 1.5, 2], None, "prompt 0 holds 1.5 at position 1"),
    ("None among bare ids", [1, None, 2], None, "prompt 0 holds None at position 1"),
    ("a float among ids", [1, 2.5], None, "prompt 0 holds 2.5 at position 1, a float; token ids are integers"),
    ("whole floats", [[1.0, 2.0]], None, "prompt 0 holds 1.0 at position 0, a float"),
    ("NaN among ids", [[5, math.nan]], None, "prompt 0 holds nan at position 1"),
    ("bools", [[True, False]], None, "prompt 0 holds True at position 0, a bool"),
    ("a bool among ids", [[1, True]], None, "prompt 0 holds True at position 1, a bool"),
    ("None among ids", [[5, None]], None, "prompt 0 holds None at position 1, where a token id should be"),
    ("a string among ids", [[5, "w6"]], PLAIN, "prompt 0 holds a string at position 1; give each string"),
    ("strings one level down", [["w5", "w6"]], PLAIN, "prompt 0 holds a string at position 0"),
    ("pairs of text and label", [("w5", 1)], PLAIN, "prompt 0 holds a string at position 0"),
    ("ids one level down", [[[5, 6]], [[7]]], None, "prompts 0-1: each holds a list at position 0"),
    ("an id too large", [IDS, [101]], None, "prompt 1 has token id 101 at position 0, outside the model's"),
    ("a negative id", [[5, -100]], None, "prompt 0 has token id -100 at position 1; token ids are not negative"),
    ("an id beyond all", [[2**70]], None, "prompt 0 has token id 1180591620717411303424 at position 0"),
    ("a float tensor", [torch.tensor([1.0])], None, "prompt 0 is a tensor of torch.float32; token ids are integers"),
    ("a bool array", [np.array([True])], None, "prompt 0 is a NumPy array of bool; token ids are integers"),
    ("a padded tensor in a list", [torch.tensor([[5, 6]])], None, "prompt 0 is a 2-D tensor"),
    ("a sparse tensor", [torch.tensor([5, 0]).to_sparse()], None, "prompt 0 is a tensor that cannot be read"),
    ("no data", [torch.empty(2, dtype=int, device="meta")], None, "prompt 0 is a tensor that cannot be read"),
    ("bytes in the list", [b"w5"], PLAIN, "prompt 0 is bytes; " + IS),
    ("a range in the list", [range(3)], None, "prompt 0 is a range; " + IS),
    ("an object", [object()], None, "prompt 0 is an object; " + IS),
    ("vLLM's dicts", [{"prompt": "w5"}], PLAIN, "prompt 0 is a dict; pass its value for 'prompt'"),
    ("rows of a data set", [{"label": 1, "text": "w5"}], PLAIN, "prompt 0 is a dict; pass its value for 'text'"),
    ("half a character", ["w5", "w6 \ud83d"], PLAIN, "prompt 1 is a string with half a character"),
    ("a foreign tokenizer", ["w300"], FOREIGN, "vocabulary of 101: is it another model's tokenizer"),
    ("an empty string", ["w5", ""], PLAIN, "prompt 1 is an empty string, of which the tokenizer makes no tokens"),
    ("text without tokenizer", "w5", None, "prompt 0 is a string, and the model's config does not say where"),
    ("a chat without tokenizer", CHAT, None, "prompt 0 is a chat, and the model's config does not say where"),
    ("much without tokenizer", ["w5"] * 30, None, "prompts 0-29: each is a string, and the model"),
    ("a chat without template", [IDS, CHAT], PLAIN, "prompt 1 is a chat, and the tokenizer has no chat template: pass"),
    ("an empty chat", [CHAT, []], TEMPLATE, "prompt 1 is empty"),
    ("no role", [[{"content": "w5"}]], TEMPLATE, "prompt 0 is a chat whose message 0 has no 'role'; a message is"),
    ("no role, bare", [*CHAT, {"content": "w5"}], TEMPLATE, "prompt 0 is a chat whose message 1 has no 'role'"),
    ("no content", [{"role": "user"}], TEMPLATE, "whose message 0 has no 'content'"),
    ("content of None", [{"role": "user", "content": None}], TEMPLATE, "has no 'content'"),
    ("another key", [{"role": "user", "text": "w5"}], TEMPLATE, "has no 'content'"),
    ("ShareGPT's keys", [{"from": "human", "value": "w5"}], TEMPLATE, "rename them to 'role' and 'content'"),
    ("a role that is none", [{"role": 1, "content": "w5"}], TEMPLATE, "has the role 1; a role is a string"),
    ("content that is none", [{"role": "user", "content": 5}], TEMPLATE, "has an int as its 'content'"),
    (
        "an image",
        [{"role": "user", "content": [{"type": "image"}]}],
        TEMPLATE,
        "shows an image, and LlamaForCausalLM takes text only",
    ),
    ("text in a chat", [[*CHAT, "w5"]], TEMPLATE, "prompt 0 is a chat whose message 1 is a string"),
    ("what a template refuses", [{"role": "alien", "content": "w5"}], TEMPLATE, "the tokenizer refused: no aliens"),
    ("several", [None, IDS, [], [1.5], None], None, "4 prompts cannot be run:\n  prompts 0, 4: each is None"),
]

GOOD: list[tuple[str, Any, Any, list[list[int]]]] = [
    ("a bare string", "w5 w6", PLAIN, [[5, 6]]),
    ("no prompts", [], None, []),
    ("no prompts in an array", np.array([], dtype=object), None, []),
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
    ("a call of a tool", [*CHAT, CALL], TEMPLATE, [[1, 5, 6, 1]]),
]


def named(rows: list[Any]) -> list[Any]:
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(("prompts", "says"), named(NO_LIST))
def test_what_is_no_list_of_prompts(prompts: Any, says: str) -> None:
    with pytest.raises(PromptsTypeError) as caught:
        run(prompts)
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, BatchLLMError)


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(("prompts", "tokenizer", "says"), named(BAD))
def test_a_prompt_that_cannot_be_run_is_named_before_any_work(prompts: Any, tokenizer: Any, says: str) -> None:
    with pytest.raises(PromptError) as caught:
        run(prompts, tokenizer)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.filterwarnings("ignore:prompt 0 is an empty string")
@pytest.mark.parametrize(("prompts", "tokenizer", "ids"), named(GOOD))
def test_odd_prompts_that_are_right(prompts: Any, tokenizer: Any, ids: list[list[int]]) -> None:
    result = run(prompts, tokenizer)
    assert [generation.prompt_token_ids for generation in result] == ids
    assert [len(generation.token_ids) for generation in result] == [2] * len(ids)


def test_an_error_of_an_iterator_comes_through_and_says_where() -> None:
    with pytest.raises(OSError, match="disk") as caught:
        run(stumbling())
    assert caught.value.__notes__ == ["raised by the iterator of prompts when it was asked for prompt 2"]


def test_an_iterator_is_walked_through_once_and_not_before_the_options_are_right() -> None:
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
        generator.generate(lazily(), max_token=1)
    assert len(asked) == 9


def test_a_call_of_the_generator_from_its_own_iterator_of_prompts() -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.raises(GeneratorBusyError, match="a call is running already"):
        generator.generate((generator.generate([[index]])[0].token_ids for index in (5, 6)), max_new_tokens=1)
    assert len(generator.generate([IDS], max_new_tokens=1)) == 1


def test_recorded_the_good_ones_run_and_the_bad_carry_the_reason() -> None:
    good = ["w5 w6", IDS, CHAT]
    bad: list[Any] = [None, [], [1.5], [101], "", {"text": "w5"}, [{"role": "user"}], math.nan]
    mixed = [prompt for pair in itertools.zip_longest(good, bad) for prompt in pair]
    generator = BatchGenerator(build(FAMILY), TEMPLATE)
    result = generator.generate(mixed, max_new_tokens=3, on_error="record")
    with pytest.raises(PromptError) as caught:
        generator.generate(mixed, max_new_tokens=3)
    assert [generation.index for generation in result] == list(range(len(mixed)))
    assert {generation.index: generation.error for generation in result if generation.error} == caught.value.problems
    ran = [generation for generation in result if generation.error is None]
    assert [generation.token_ids for generation in ran] == generator.generate(good, max_new_tokens=3).token_ids
    assert {generation.finish_reason for generation in result} == {"length", "error"}
    ids, text = BatchGenerator(build(FAMILY)).generate([IDS, "w5"], max_new_tokens=1, on_error="record")
    assert ids.error is None and "pass BatchGenerator(model, tokenizer)" in text.error


def test_a_hundred_thousand_times_the_same_prompt() -> None:
    plan = BatchGenerator(build(FAMILY)).plan([list(range(60))] * 100_000)
    assert plan.total_tokens == 6_000_000
    assert plan.computed_tokens < 200_000


def test_a_processor_for_several_media_is_asked_for_its_tokenizer() -> None:
    class Processor:
        tokenizer = PLAIN

        def __call__(self, images: Any = None, text: Any = None) -> Any:
            raise AssertionError("text is not an image")

        def decode(self, ids: list[int], **options: Any) -> Any:
            return self.tokenizer.decode(ids, **options)

    (generation,) = run("w5 w6", Processor())
    assert generation.prompt_token_ids == [5, 6]
    assert generation.text is not None


if __name__ == "__main__":
    from test_inputs_odd_options import CONFIGS, MODELS, OPTIONS, TOKENIZERS, VALUES, make

    listing: list[tuple[str, Callable[[], Any]]] = [
        (name, lambda given=given: run(given)) for name, given, _ in NO_LIST
    ]
    listing += [(name, lambda given=given, words=words: run(given, words)) for name, given, words, _ in BAD]
    listing += [(str(options), lambda options=options: run([IDS], **options)) for options, _ in [*OPTIONS, *VALUES]]
    listing += [(str(fields), lambda fields=fields: make(**fields)) for fields, _ in CONFIGS]
    listing += [(name, lambda given=given: make(tokenizer=given)) for name, given, _ in TOKENIZERS]
    listing += [(name, lambda model=model: make(model())) for name, model, _ in MODELS]
    for name, call in listing:
        try:
            call()
        except Exception as error:
            print(f"{name[:100]}\n    {type(error).__name__}: {error}")
