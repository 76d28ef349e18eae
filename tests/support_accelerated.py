"""What the tests of ``accelerated`` share: a model, a tokenizer, inputs, and calls compared with those of the user."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.utils import ModelOutput
from transformers.utils.chat_template_utils import Chat

from hf_batchllm import accelerated

FAMILY = "gemma3"  # windows, two kinds of layers
TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
TEXTS = ["w5 w6 w7 w8 w9 w10", "w5 w6 w7 w8 w11", "w20"]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def model() -> Iterator[Any]:
    model = build(FAMILY)
    vars(model).pop("last_report", None)  # which stays after accelerated()
    before = sorted(vars(model)), repr(vars(model.config)), repr(vars(model.generation_config))
    yield model
    vars(model).pop("last_report", None)
    assert (sorted(vars(model)), repr(vars(model.config)), repr(vars(model.generation_config))) == before


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id of the tiny models: leave it as it is."""
    inner = Tokenizer(models.WordLevel({f"w{index}": index for index in range(101)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ["input_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w100", pad_token="w0", model_input_names=names)
    made.padding_side, made.chat_template = "left", TEMPLATE
    return made


@pytest.fixture
def inputs(tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    return dict(tokenizer(TEXTS, return_tensors="pt", padding=True))


class Rows(Dataset):
    """Has a length, and no end that a ``for`` would find."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place % len(self.items)]


def beyond_eight(ids: torch.Tensor, scores: Any) -> bool:
    """A criterion."""
    return ids.shape[1] > 8


def made(task: str = "text-generation", **given: Any) -> Any:
    """A pipeline of a tiny model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        defaults = {"model": build(FAMILY), "tokenizer": word_tokenizer(), "device": "cpu"}
        return pipeline(task, **{**defaults, **given})


INPUTS = dict(word_tokenizer()(TEXTS, return_tensors="pt", padding=True))


def by_generate(model: Any, **options: Any) -> Any:
    return model.generate(**INPUTS, **{**GREEDY, **options}).tolist()


@contextmanager
def accelerated_throughout(owner: Any, **fields: Any) -> Iterator[Any]:
    """``user``: a model, or a pipeline. Nothing may go to its own methods."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="not accelerated")
        with accelerated(owner, **fields) as same_owner:
            assert same_owner is owner
            yield owner
            assert owner.last_report is not None


@contextmanager
def reasons() -> Iterator[list[str]]:
    """Why calls were not accelerated; filled when the block ends."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    for warning in caught:
        beginning, _, reason = str(warning.message).partition(": ")
        if beginning.startswith("not accelerated, "):
            # It points at the line that called, not into the library.
            caller = Path(warning.filename).name.startswith("test_")
            assert caller or warning.filename in (__file__, threading.__file__)
            said.append(reason)


def plain_form(results: Any) -> Any:
    """Tensors, chats and iterators as lists, so that results can be compared."""
    if isinstance(results, torch.Tensor):
        return [str(results.dtype), results.tolist()]
    if isinstance(results, ModelOutput):
        return [type(results), plain_form(results.sequences)]
    if isinstance(results, Chat):
        return results.messages
    if isinstance(results, dict):
        return {name: plain_form(each) for name, each in results.items()}
    return [plain_form(each) for each in results] if isinstance(results, list | tuple | Iterator) else results


def asks(*given: Any, **options: Any) -> Callable[[Any], Any]:
    """A call of a pipeline."""
    return lambda pipe: pipe(*given, **options)


def alike(owner: Any, *calls: Callable[[Any], Any], **fields: Any) -> list[Any]:
    """What calls give: the same in a block that serves all of them."""
    expected = [plain_form(call(owner)) for call in calls]
    with accelerated_throughout(owner, **fields):
        for call, wanted in zip(calls, expected, strict=True):
            assert plain_form(call(owner)) == wanted
            assert owner.last_report is not None
    return expected


def falls_back(owner: Any, why: str, *calls: Callable[[Any], Any], then: Callable[[Any], Any] | None = None) -> Any:
    """What calls give: the same in a block that serves none of them, and says ``why`` once; ``then`` it serves one."""
    expected = [plain_form(call(owner)) for call in calls]
    with reasons() as said, accelerated(owner):
        for call, wanted in zip(calls * 2, expected * 2, strict=True):
            assert plain_form(call(owner)) == wanted
            assert owner.last_report is None
        if then is not None:
            then(owner)
            assert owner.last_report is not None
    assert len(said) == 1 and said[0].startswith(why), said
    return expected


def fails_alike(owner: Any, call: Callable[[Any], Any]) -> list[str]:
    """The user's own error comes out of a block. Why the call was not served, if that was said."""
    with pytest.raises(Exception) as expected:  # noqa: PT011
        call(owner)
    with reasons() as said, accelerated(owner), pytest.raises(type(expected.value)) as got:
        call(owner)
    assert (type(got.value), str(got.value)) == (type(expected.value), str(expected.value))
    return said


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and torch.equal(one.sequences, other.sequences)
