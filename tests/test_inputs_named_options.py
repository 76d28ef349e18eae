"""What editors complete and ``help`` shows: every option by name, and nothing that no user could type."""

from __future__ import annotations

import inspect
import pydoc

import pytest
from support_families import build

import hf_batchllm
from hf_batchllm import BatchGenerator, run_file
from hf_batchllm.inputs.named_options import GenerateOptions
from hf_batchllm.inputs.option_row import Fate
from hf_batchllm.inputs.option_table import ALIASES, TABLE, names

BY_HAND = {"prompts", "generation_config", "input_ids", "attention_mask", "seed", "on_error", "progress"}


def test_every_option_has_a_type() -> None:
    taken = names(fate=Fate.HONOURED) | names(fate=Fate.NO_EFFECT) | set(ALIASES) | {"top_logprobs"}
    assert set(GenerateOptions.__annotations__) == taken - BY_HAND, "give a new option its type in option_chapters.py"


@pytest.mark.parametrize("function", [BatchGenerator.generate, BatchGenerator.stream, run_file])
def test_a_signature_names_what_people_type_most(function: object) -> None:
    assert callable(function)
    parameters = inspect.signature(function).parameters
    for name in ("max_new_tokens", "do_sample", "temperature", "num_return_sequences", "logprobs", "adapter"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert repr(parameters[name].default) == "<left out>"
    assert set(parameters) - {"self", "gen", "source", "target", "settings", "generate_kwargs"} <= {
        *TABLE,
        *inspect.getfullargspec(inspect.unwrap(function)).kwonlyargs,
    }


def test_an_option_that_is_left_out_is_not_passed_on() -> None:
    model = build("llama")
    before = model.generation_config
    model.generation_config = type(before)(max_new_tokens=3, eos_token_id=before.eos_token_id)
    try:
        assert len(BatchGenerator(model).generate([[5, 6]], eos_token_id=None)[0].token_ids) == 3
    finally:
        model.generation_config = before


@pytest.mark.parametrize("name", sorted(set(hf_batchllm.__all__) - {"__version__"}))
def test_help_shows_nothing_that_nobody_could_type(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(hf_batchllm, name)))
    assert "object at 0x" not in text
