"""Configs inside a model that are not the model's own: what really runs decides, and not ``model.config`` alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support_families import FAMILIES, build, reference_generate
from support_family_models import Family

from hf_batchllm import BatchGenerator, UnsupportedModelError

PROMPTS = [list(range(4, 30)), [5, 6, 7]]  # the windows are of 7 and 8 tokens
DIFFER = r"in its attention mask alone .*Its layers and its config differ: `{}` is {}, and the config makes it {}"


def made(name: str, **edits: Any) -> Any:
    family = FAMILIES[name]
    return Family(name, family.model_type, {**family.config, **edits})()


def edited(config: Any, **edits: Any) -> Any:
    config = copy.deepcopy(config)
    for key, value in edits.items():
        setattr(config, key, value)
    return config


def assert_as_generate(model: Any, generator: BatchGenerator | None = None) -> None:
    expected = [reference_generate(model, prompt, max_new_tokens=4) for prompt in PROMPTS]
    results = (generator or BatchGenerator(model)).generate(PROMPTS, max_new_tokens=4, do_sample=False)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize("name", ["mistral", "phi3", "qwen2_window", "gemma3"])
def test_a_config_inside_the_model_with_another_window_is_refused(name: str) -> None:
    model = made(name)
    model.model.config = edited(model.config, sliding_window=5)
    with pytest.raises(UnsupportedModelError, match=DIFFER.format(r"model\.config\.sliding_window", 5, "[78]")):
        BatchGenerator(model)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_smaller_window_in_a_new_model_config_is_refused(name: str) -> None:
    """``generate``'s cache follows this config, and the layers the one that they were made from."""
    model = made(name)
    model.config = edited(model.config, sliding_window=5)
    with pytest.raises(UnsupportedModelError, match=r"a window of 5 tokens in `model\.config`.*attend to 8"):
        BatchGenerator(model)


def test_a_new_model_config_that_lets_the_cache_keep_more_is_served() -> None:
    for window in (20, None):
        model = made("mistral")
        model.config = edited(model.config, sliding_window=window)
        assert_as_generate(model)


def test_equal_configs_inside_the_model_are_served() -> None:
    model = made("mistral")
    model.model.config = edited(model.config)
    model.model.layers[1].self_attn.config = edited(model.config, pad_token_id=3)
    assert_as_generate(model)


@pytest.mark.parametrize("window", [None, 4, 20])
def test_a_layer_of_a_model_with_another_window_is_refused(window: int | None) -> None:
    model = made("mistral")
    model.model.layers[1] = made("mistral", sliding_window=window).model.layers[1]
    where = r"model\.layers\.1\.self_attn\.config\.sliding_window"
    with pytest.raises(UnsupportedModelError, match=DIFFER.format(where, window, 8)):
        BatchGenerator(model)


def test_a_config_inside_the_model_that_turns_attention_around_is_refused() -> None:
    model = made("gemma3")
    model.model.config = edited(model.config, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match=r"`model\.config\.use_bidirectional_attention` is True"):
        BatchGenerator(model)


def test_a_config_that_is_replaced_between_two_calls_is_noticed() -> None:
    model = made("mistral")
    generator = BatchGenerator(model)
    attention = model.model.layers[1].self_attn
    attention.config = edited(attention.config)
    assert_as_generate(model, generator)
    attention.config.sliding_window = 4
    with pytest.raises(UnsupportedModelError, match="Its layers and its config differ"):
        generator.generate(PROMPTS, max_new_tokens=2)


def test_which_layer_has_which_config_is_not_mixed_up() -> None:
    """Two models with the same configs in the same order, in other places."""
    model = made("mistral")
    model.model.layers[1].self_attn.config = own = edited(model.config)
    assert_as_generate(model)
    model = made("mistral", sliding_window=None)
    assert_as_generate(model)
    for place in (0, 2):
        model.model.layers[place].self_attn.config = own
        with pytest.raises(UnsupportedModelError, match=rf"layers\.{place}\.self_attn\.config\.sliding_window` is 8"):
            BatchGenerator(model)
        model.model.layers[place].self_attn.config = model.config


@pytest.mark.parametrize("number", [np.int64, np.array])
def test_windows_of_numpy_count_as_numbers(number: Callable[[int], Any]) -> None:
    model = made("qwen3_window")
    generator = BatchGenerator(model)
    windows = [layer.self_attn for layer in model.model.layers if layer.self_attn.sliding_window]
    for attention in windows:
        attention.sliding_window = number(7)
    assert_as_generate(model, generator)
    for attention in windows:
        attention.sliding_window = number(4)
    for call in (lambda: generator.generate(PROMPTS, max_new_tokens=2), lambda: BatchGenerator(model)):
        with pytest.raises(
            UnsupportedModelError, match=r"self_attn\.sliding_window` is .*4.*, and the config makes it 7"
        ):
            call()


def test_a_window_that_is_a_tensor_is_refused() -> None:
    model = made("qwen3_window")
    for layer in model.model.layers:
        if layer.self_attn.sliding_window:
            layer.self_attn.sliding_window = torch.tensor(7)
    with pytest.raises(UnsupportedModelError, match=r"is tensor\(7\), a Tensor: make it an int"):
        BatchGenerator(model)


def test_a_window_of_one_token_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a window of one token"):
        BatchGenerator(made("mistral", sliding_window=1))


def test_a_plain_number_of_another_type_that_says_the_same_is_served() -> None:
    model = copy.deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.self_attn.scaling = np.float64(layer.self_attn.scaling)
    assert_as_generate(model)
