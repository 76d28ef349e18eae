"""``accelerated(model)``: ``model.generate`` gives what it gave, or its original does, and says why."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from support_accelerated import (
    CHATS,
    GREEDY,
    TEXTS,
    accelerated_throughout,
    alike,
    beyond_eight,
    by_generate,
    falls_back,
    made,
    reasons,
    same,
)
from support_accelerated import inputs as inputs  # fixtures
from support_accelerated import model as model
from support_accelerated import tokenizer as tokenizer
from support_families import FAMILIES
from support_letter_tokenizers import letter_tokenizer
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import BaseStreamer, EosTokenCriteria

from hf_batchllm import accelerated


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6},
        {"max_new_tokens": 6, "return_dict_in_generate": True},
        {"max_length": 12},
        {"generation_config": GenerationConfig(max_new_tokens=5, eos_token_id=[7, 8, 9], pad_token_id=1)},
        {"max_new_tokens": 5, "use_cache": False, "num_beams": 1, "logits_processor": LogitsProcessorList()},
        {"max_new_tokens": 5, "do_sample": False, "streamer": None, "synced_gpus": False, "stopping_criteria": []},
        {"max_new_tokens": 8, "eos_token_id": list(range(30)), "pad_token_id": 99, "min_new_tokens": 2},
        {"max_new_tokens": 4, "cache_implementation": "dynamic", "foo": None},
    ],
    ids=str,
)
def test_batches_come_out_the_same(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    alike(model, lambda model: model.generate(**inputs, **options))
    assert model.last_report.sequences == 3


def test_positional_arguments_stand_where_they_stand_in_generate(model: Any, inputs: dict[str, Any]) -> None:
    ids, config = inputs["input_ids"], GenerationConfig(max_new_tokens=4, pad_token_id=0)
    _, one, named = alike(
        model,
        lambda model: model.generate(ids, config, None, None),
        lambda model: model.generate(ids[:1], generation_config=config),
        lambda model: model.generate(inputs=ids[:1], max_new_tokens=4),
    )
    assert one == named
    assert config == GenerationConfig(max_new_tokens=4, pad_token_id=0)


def test_a_chat(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "w30 w31"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert inputs["input_ids"].tolist() == [[3, 30, 31, 4]]
    alike(model, lambda model: model.generate(**inputs, max_new_tokens=5))


def test_samples_of_a_row_stand_beside_each_other(model: Any, inputs: dict[str, Any]) -> None:
    with accelerated_throughout(model):
        drawn = model.generate(**inputs, do_sample=True, max_new_tokens=6, top_k=0, num_return_sequences=2)
    assert drawn[:, :6].tolist() == inputs["input_ids"].repeat_interleave(2, dim=0).tolist()


@pytest.mark.parametrize("options", [{"return_full_text": False}, {"return_tensors": True}])
def test_a_pipeline_on_an_accelerated_model(model: Any, options: dict[str, Any]) -> None:
    pipe = made()
    for given in (TEXTS, CHATS, TEXTS[0]):
        expected = pipe(given, batch_size=3, **GREEDY, **options)
        with accelerated_throughout(model):
            assert pipe(given, batch_size=3, **GREEDY, **options) == expected


def test_streamers(model: Any, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=5)
    with accelerated_throughout(model):
        got = model.generate(**inputs, max_new_tokens=5, streamer=TextStreamer(tokenizer))
        assert same(got, expected)
        assert capsys.readouterr().out.split() == tokenizer.decode(expected[0]).split()
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        thread = threading.Thread(target=model.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 5})
        thread.start()
        assert "".join(streamer).split() == tokenizer.decode(expected[0, 6:]).split()
        thread.join()


def test_streamers_of_several_rows_are_fed_by_the_original(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    class Several(BaseStreamer):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.told.append(value.tolist())

        def end(self) -> None:
            self.told.append("end")

    ids, expected, got = torch.tensor([[5, 6, 7], [9, 5, 6]]), Several(), Several()
    model.generate(ids, max_new_tokens=3, streamer=expected)
    with reasons() as said, accelerated(model):
        model.generate(ids, max_new_tokens=3, streamer=got)
        with pytest.raises(ValueError, match="TextStreamer only supports batch size 1"):
            model.generate(ids, max_new_tokens=3, streamer=TextStreamer(tokenizer))
    assert got.told == expected.told
    assert len(said) == 1 and said[0].startswith("`streamer` goes with one prompt")


@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [beyond_eight]},
        {"stopping_criteria": [MaxLengthCriteria(9)], "max_new_tokens": 30},
        {"stop_strings": ["dd", "ab"], "eos_token_id": 99, "pad_token_id": 0},
        {"stop_strings": ["dd", "ab"]},
    ],
    ids=" ".join,
)
def test_ends_of_one_row(model: Any, options: dict[str, Any]) -> None:
    options = {"tokenizer": letter_tokenizer(), "max_new_tokens": 20, **options}
    for ids in ([[5, 6, 7, 8]], [[0, 0, 5, 6]]):
        given = {"inputs": torch.tensor(ids), "attention_mask": torch.tensor(ids).ne(0).long(), **options}
        alike(model, lambda model, given=given: model.generate(**given))


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["dd", "ab"]},
        {"stopping_criteria": [MaxLengthCriteria(9)]},
        {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(list(range(30)))]), "max_time": 1000.0},
    ],
    ids=" ".join,
)
def test_ends_of_several_rows(model: Any, options: dict[str, Any]) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [30, 31, 32, 33]])
    options = {"tokenizer": letter_tokenizer(), "eos_token_id": 99, "pad_token_id": 0, "max_new_tokens": 20, **options}
    alike(model, lambda model: model.generate(ids, **options))


# -- models that are wrapped, or have a `generate` of their own ------------------------------------------------------


class Adapted(nn.Module):
    """As PEFT wraps a model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def get_base_model(self) -> Any:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.generate(*args, **kwargs)


class Foreign(nn.Module):
    """A wrapper that nothing is known of."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_a_wrapped_model_is_accelerated_where_it_is_called(model: Any) -> None:
    wrapper = Adapted(model)
    alike(wrapper, by_generate)
    falls_back(wrapper, "`trust_remote_code`", lambda wrapper: by_generate(wrapper, trust_remote_code=True))
    with accelerated(wrapper):
        assert "generate" not in vars(model)
        assert pickle.loads(pickle.dumps(wrapper)).generate is not wrapper.generate
    assert "generate" not in vars(wrapper)


def test_a_wrapper_that_is_not_known_calls_what_it_wraps(model: Any) -> None:
    wrapper = Foreign(model)
    expected = by_generate(wrapper)
    with reasons() as said, accelerated(wrapper):
        assert by_generate(wrapper) == by_generate(copy.deepcopy(wrapper)) == expected
    assert len(said) == 1 and "not a Foreign" in said[0]
    with accelerated_throughout(model):  # where it can be done
        assert by_generate(wrapper) == expected


def test_a_generate_of_the_models_own_is_not_replaced_by_another() -> None:
    family = FAMILIES["llama"]()

    class Own(type(family)):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> str:
            return "own"

    family.__class__ = Own
    with accelerated(family), pytest.warns(UserWarning, match="Own has a `generate` of its own"):
        assert family.generate(torch.tensor([[5]]), max_new_tokens=1) == "own"
