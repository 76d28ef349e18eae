"""The options that a pipeline passes to ``generate``, found out by calling its ``_forward``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig, ImageTextToTextPipeline, Pipeline

from ..inputs.base_model import base_model
from ..inputs.option_table import TABLE

Parameters = dict[str, Any]
IN_ONE = "generate_kwargs"  # in which a pipeline for images has the options for ``generate``


class _Called(BaseException):
    """``generate`` was called with these options."""

    def __init__(self, options: Parameters) -> None:
        self.options = options


class _ModelThatReports:
    """Takes the model's place: its ``generate`` raises the options that it is called with, and computes nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *, input_ids: Any, attention_mask: Any = None, **options: Any) -> None:
        raise _Called(options)


def options_for_generate(pipe: Pipeline, forward: Parameters) -> Parameters:
    """All that the pipeline's ``_forward`` passes to ``generate`` besides the prompt; the same for every prompt."""
    text, ours, asked = "prompt_text", {}, forward
    if isinstance(pipe, ImageTextToTextPipeline):
        text, asked = "text", forward.get(IN_ONE) or {}
        ours = {name: value for name, value in forward.items() if name != IN_ONE}
        forward = {IN_ONE: dict(asked)}
    reporting: Any = copy.copy(pipe)
    reporting.model = _ModelThatReports(pipe.model)
    prompt = torch.ones(1, 1, dtype=torch.long, device="cpu")
    try:
        reporting._forward({"input_ids": prompt, text: ""}, **forward)
    except _Called as called:
        return {**_without_defaults(called.options, pipe, asked), **ours}
    raise TypeError(f"{type(pipe).__name__}._forward does not call the model's `generate`")


def _without_defaults(options: Parameters, pipe: Pipeline, forward: Parameters) -> Parameters:
    """Without options that the user did not set: some versions of transformers pass a config with every option set.

    The results are the same. Otherwise, options without effect would be warned of.
    """
    config: GenerationConfig | None = options.get("generation_config")
    if config is None or config is not getattr(pipe, "generation_config", None):
        return options
    own = base_model(pipe.model).generation_config
    trimmed: Any = copy.copy(config)
    defaults: Parameters = trimmed._get_default_generation_params()
    sampled = pipe._default_generation_config
    sampling = options.get("do_sample", trimmed.do_sample)
    if trimmed.max_new_tokens is not None and "max_length" not in forward:
        options.pop("max_length", None)
    for name, value in vars(config).items():
        default = defaults.get(name)
        idle = not sampling and name in TABLE and TABLE[name].sampling_only and value == getattr(sampled, name)
        if value is not None and getattr(own, name, None) is None and (value == default or idle):
            setattr(trimmed, name, None)
    return {**options, "generation_config": trimmed}
