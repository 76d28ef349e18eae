"""A model under ``accelerated``: restored, copied, saved, wrapped; and nothing is left behind."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support_accelerated import accelerated_throughout, reasons, same
from support_accelerated import inputs as inputs  # fixtures
from support_accelerated import model as model
from support_accelerated import tokenizer as tokenizer
from support_families import FAMILIES
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedTokenizerFast,
)

from hf_batchllm import BatchConfig, ConfigError, UnsupportedModelError, accelerated

# -- what is left behind ---------------------------------------------------------------------------------------


def test_it_ends_with_the_block_however_the_block_ends(model: Any, inputs: dict[str, Any]) -> None:
    own, expected = model.generate, model.generate(**inputs, max_new_tokens=3)
    with accelerated(model) as same_model:
        assert same_model is model and "generate" in vars(model)
        assert inspect.signature(model.generate) == inspect.signature(own)
        assert model.generate.__doc__ == own.__doc__ and "accelerated" in repr(model.generate)
        kept = model.generate
    with pytest.raises(ZeroDivisionError), accelerated(model):
        model.generate(**inputs, max_new_tokens=1 // 0)
    assert model.generate == own and "generate" not in vars(model)
    assert same(kept(**inputs, max_new_tokens=3), expected)  # a reference that somebody took along


def test_the_report_stays_on_the_model(model: Any, inputs: dict[str, Any]) -> None:
    with accelerated(model) as given:
        assert given.last_report is None
    assert not hasattr(model, "last_report")
    with accelerated(model) as given:
        given.generate(**inputs, max_new_tokens=2)
        report = given.last_report
        assert report is model.generate.last_report and report.new_tokens > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given.generate(**inputs, max_new_tokens=2, trust_remote_code=True)  # not served
        assert given.last_report is None
        given.generate(**inputs, max_new_tokens=1)
    assert given.last_report.new_tokens < report.new_tokens
    model.last_report = "mine"
    with accelerated(model):
        model.generate(**inputs, max_new_tokens=1)
    assert model.last_report == "mine"


def test_a_generate_that_the_user_had_put_there_is_put_back(model: Any, inputs: dict[str, Any]) -> None:
    def logged(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return GenerationMixin.generate(model, *args, **kwargs)

    calls: list[Any] = []
    model.generate = logged
    try:
        with accelerated(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.generate(**inputs, max_new_tokens=3)
            assert not calls
            model.generate(**inputs, max_new_tokens=3, trust_remote_code=True)
            assert len(calls) == 1  # the original is what the user had
            assert copy.deepcopy(model).generate is logged
        assert model.generate is logged
        with accelerated(model):
            model.generate = print  # changed within the block: that is how the user wants it
        assert model.generate is print
    finally:
        del model.generate


def test_blocks_within_blocks(model: Any, inputs: dict[str, Any]) -> None:
    expected = model.generate(**inputs, max_new_tokens=3, trust_remote_code=True)
    with accelerated(model):
        outer = model.generate
        with reasons() as said, accelerated(model, page_size=8):
            assert model.generate is not outer
            assert same(model.generate(**inputs, max_new_tokens=3, trust_remote_code=True), expected)
        assert len(said) == 1
        assert model.generate is outer
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(accelerated(model))
        second.enter_context(accelerated(model))
        inner = model.generate
        first.close()
        assert model.generate is inner
        with accelerated_throughout(model):
            model.generate(**inputs, max_new_tokens=3)
    assert "generate" not in vars(model)


def test_as_a_decorator(model: Any, inputs: dict[str, Any]) -> None:
    @accelerated(model, page_size=8)
    def evaluate() -> Any:
        return model.generate(**inputs, max_new_tokens=3), model.generate.last_report

    for _ in range(2):
        assert evaluate()[1].sequences == 3
    assert "generate" not in vars(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_made_within_the_block_are_models_of_their_own(duplicate: Any) -> None:
    model = FAMILIES["llama"]()
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=5)
    with accelerated(model):
        inner = duplicate(model)
        with accelerated(model):
            twin = duplicate(model)
    for made in (inner, twin):
        assert same(made.generate(ids, max_new_tokens=5), expected)
        with torch.no_grad():
            made.lm_head.weight.copy_(made.lm_head.weight.flip(0))
        assert made.generate(ids, max_new_tokens=1)[0, 3] == 100 - expected[0, 3]
        assert same(copy.deepcopy(made).generate(ids, max_new_tokens=5), made.generate(ids, max_new_tokens=5))
        with accelerated_throughout(made):
            assert made.generate(ids, max_new_tokens=1)[0, 3] == 100 - expected[0, 3]
    assert same(model.generate(ids, max_new_tokens=5), expected)


def test_a_model_saved_within_the_block(inputs: dict[str, Any], tmp_path: Path) -> None:
    model: Any = FAMILIES["llama"]()  # transformers notes in its config what it has saved
    with accelerated_throughout(model):
        expected = model.generate(**inputs, max_new_tokens=4)
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(loaded.generate(**inputs, max_new_tokens=4), expected)


# -- wrappers, settings ----------------------------------------------------------------------------------------


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


def test_a_wrapped_model_is_accelerated_where_it_is_called(model: Any, inputs: dict[str, Any]) -> None:
    wrapper = Adapted(model)
    expected = wrapper.generate(**inputs, max_new_tokens=4)
    hidden = wrapper.generate(**inputs, max_new_tokens=4, trust_remote_code=True)
    with accelerated_throughout(wrapper):
        assert "generate" not in vars(model)
        assert same(wrapper.generate(**inputs, max_new_tokens=4), expected)
    with reasons() as said, accelerated(wrapper):
        assert same(wrapper.generate(**inputs, max_new_tokens=4, trust_remote_code=True), hidden)
        assert pickle.loads(pickle.dumps(wrapper)).generate is not wrapper.generate
    assert "generate" not in vars(wrapper)
    assert len(said) == 1


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


def test_a_wrapper_that_is_not_known_calls_what_it_wraps(model: Any, inputs: dict[str, Any]) -> None:
    wrapper = Foreign(model)
    expected = wrapper.generate(**inputs, max_new_tokens=4)
    with reasons() as said, accelerated(wrapper):
        assert same(wrapper.generate(**inputs, max_new_tokens=4), expected)
        assert same(copy.deepcopy(wrapper).generate(**inputs, max_new_tokens=4), expected)
    assert len(said) == 1 and "not a Foreign" in said[0]
    with accelerated(model):  # where it can be done
        assert same(wrapper.generate(**inputs, max_new_tokens=4), expected)
        assert model.generate.last_report.sequences == 3


def test_settings_are_those_of_a_batch_generator(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = torch.tensor([[5 + index % 60 for index in range(80)] + [last] for last in (7, 8)])
    with accelerated_throughout(model, config=BatchConfig(page_size=8), keep_prefixes=1):
        model.generate(ids, max_new_tokens=2)
        assert model.generate.last_report.cached_tokens == 0
        model.generate(ids, max_new_tokens=2)
        assert model.generate.last_report.cached_tokens == 80
    with pytest.raises(ConfigError, match="did you mean `page_size`"), accelerated(model, tokenizer, page_sise=8):
        pass
    for wrong in ("some/model", tokenizer, None):
        with pytest.raises(UnsupportedModelError, match="takes a model that has a `generate`"), accelerated(wrong):  # type: ignore[type-var]
            pass
    assert "generate" not in vars(model)


def test_no_bar_is_shown(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with accelerated_throughout(model):
        model.generate(torch.full((40, 3), 5), max_new_tokens=1)
    assert capsys.readouterr().err == ""
