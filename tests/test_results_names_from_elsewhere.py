"""Attributes that results of other libraries have get a hint; hasattr, copy and pickle work as ever."""

from __future__ import annotations

import copy
import pickle

import pytest
from support_families import build

import hf_batchllm
from hf_batchllm import BatchGenerator, BatchResult


@pytest.fixture(scope="module")
def result() -> BatchResult:
    return BatchGenerator(build("llama")).generate([[5, 6], [7]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("outputs", "result.by_prompt"), ("cumulative_logprob", "logprobs=0"), ("stop_reason", "`.finish_reason`")],
)
def test_an_attribute_of_a_row(name: str, hint: str, result: BatchResult) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(result[0], name)
    assert not hasattr(result[0], name)


def test_attributes_of_the_rest(result: BatchResult) -> None:
    generator: object = BatchGenerator(build("llama"))
    for owner, name, hint in (
        (result, "outputs", "result.by_prompt"),
        (result, "text", r"`\.texts`"),
        (generator, "chat", r"gen\.generate\(chats\)"),
        (generator, "get_tokenizer", r"`\.tokenizer`"),
        (generator, "beam_search", "num_beams"),
        (hf_batchllm, "LLM", "BatchGenerator"),
        (hf_batchllm, "SamplingParams", "keyword arguments"),
        (generator, "nonsense", "no attribute 'nonsense'$"),
    ):
        with pytest.raises(AttributeError, match=hint):
            getattr(owner, name)
        assert not hasattr(owner, name)


def test_copies_and_pickles_are_as_before(result: BatchResult) -> None:
    for one in (result[0], result):
        assert copy.copy(one) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


def test_an_error_within_a_property_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(build("llama"))

    def fails() -> None:
        raise AttributeError("of the tokenizer's own")

    monkeypatch.setattr(generator._tokenizer, "found", fails)
    with pytest.raises(AttributeError, match="of the tokenizer's own"):
        _ = generator.tokenizer
