"""``model.generate_batch`` under ``accelerated(model)``: its requests are prompts of a BatchGenerator.

TRL's trainers call it. What it returns has the form that transformers gives it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..errors import UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.base_model import base_model
from ..inputs.config_names import without_foreign_names
from ..notices import Notices, warn_user
from ..results.generations import Generation

_READ = (  # arguments of generate_batch; all others go into its ``**kwargs``
    *("inputs", "generation_config", "continuous_batching_config", "record_timestamps", "progress_bar"),
    *("persistent_manager", "warmup", "workload_hints", "max_new_tokens"),
)


def generate_batch(
    generator: BatchGenerator, named: dict[str, Any], notices: Notices, work_had_begun: Callable[[Exception], bool]
) -> dict[str, GenerationOutput]:
    """What ``generate_batch`` gives for the arguments ``named``; an error if they cannot be served.

    An error of the work goes into the outputs that it leaves open, as in transformers.
    """
    if "inputs" not in named:
        raise TypeError("there are no `inputs`")
    prompts = [] if named["inputs"] is None else list(named["inputs"])
    if not prompts:
        return {}
    if named.get("record_timestamps"):
        raise UnsupportedOptionError("record_timestamps", "is not supported: tokens come in bursts here")
    for name in [name for name in named if name not in _READ]:
        notices(
            name,
            f"`{name}` has no effect: of its keyword arguments, generate_batch reads `max_new_tokens` alone. Put "
            "others into the generation_config",
        )
    model, given = generator.model, named.get("generation_config")
    given = base_model(model).generation_config if given is None else given
    batching = named.get("continuous_batching_config") or getattr(given, "continuous_batching_config", None)
    config = _config(model, given, named.get("max_new_tokens"))
    if given.eos_token_id is None:
        notices(
            "eos",
            "the generation_config has no `eos_token_id`, so no token ends an answer, as in transformers' "
            "generate_batch, which does not look for one in the model's own",
        )
    began, why = time.perf_counter(), ""
    try:
        with _in_eval_mode(model):
            made: Any = generator.generate(
                prompts,
                [config] * len(prompts),
                seed=getattr(batching, "seed", None) if config.do_sample else None,
                on_error="record",
                progress=bool(named.get("progress_bar")),
                logprobs=0 if getattr(batching, "return_logprobs", False) else None,
            )
    except Exception as error:
        if not work_had_begun(error):
            raise
        made, why = generator.interrupted or (), str(error) or type(error).__name__
    rows = {(row.index, row.sample): row for row in made}
    samples, computed = given.num_return_sequences or 1, config.num_return_sequences or 1
    outputs = {}
    for index, prompt in enumerate(prompts):
        for sample in range(samples):  # greedy ones are equal, and computed once
            name = f"req_{index}" + (f"__child#{sample}" if sample < samples - 1 else "")
            row = rows.get((index, min(sample, computed - 1)))
            outputs[name] = _output(name, prompt, row, why, began)
    _warn_of_failed([output for output in outputs.values() if output.error is not None])
    return outputs


def without_own_defaults(model: nn.Module, config: GenerationConfig) -> nn.Module:
    """A shallow copy of the model, for checks alone, whose own GenerationConfig adds nothing to ``config``.

    ``generate_batch`` reads the config that it is given by itself. What that repeats of the model's own is no wish of
    the caller.
    """
    inner = base_model(model)
    alike = copy.copy(inner)
    alike.generation_config = GenerationConfig()
    for name, value in vars(inner.generation_config).items():
        if value is not None and getattr(config, name, None) == value:
            setattr(alike.generation_config, name, value)
    return alike


def _config(model: nn.Module, given: Any, max_new_tokens: int | None) -> GenerationConfig:
    """What the requests are generated with."""
    if not isinstance(given, GenerationConfig):
        raise TypeError(f"generation_config must be a GenerationConfig, not {type(given).__name__}")
    config: GenerationConfig = copy.copy(without_foreign_names(given))
    config.continuous_batching_config = None  # is about transformers' own engine
    if max_new_tokens is not None:
        config.max_new_tokens = max_new_tokens
    if config.max_new_tokens is None and config.max_length is None:
        text: Any = base_model(model).config.get_text_config(decoder=True)
        config.max_length = getattr(text, "max_position_embeddings", None)
        if config.max_length is None:
            why = "is not set, and the model's config says nothing of its positions, so no answer would have to end"
            raise UnsupportedOptionError("max_new_tokens", why)
    ends = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id, device="cpu").flatten().tolist()
    config.eos_token_id = [token for token in ends if token >= 0] or None  # -1 stands for none
    if config.do_sample and config.top_k is None:
        config.top_k = 0  # generate's default would be 50
    if not config.do_sample and (config.num_beams or 1) == 1:
        config.num_return_sequences = 1
    return config


def _output(name: str, prompt: Any, row: Generation | None, why: str, began: float) -> GenerationOutput:
    """``row``: None where an error, ``why``, has left it open."""
    error = why if row is None else row.error
    tokens = [] if row is None else list(row.token_ids)
    logprobs = [] if row is None else row.logprobs or []
    ids = [] if row is None else list(row.prompt_token_ids)
    return GenerationOutput(
        request_id=name,
        prompt_ids=ids or (list(prompt) if isinstance(prompt, list | tuple) else []),
        generated_tokens=tokens,
        logprobs=[each[token] for each, token in zip(logprobs, tokens, strict=bool(logprobs))],
        error=error,
        status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
        created_time=began,
        lifespan=(began, time.perf_counter()),
    )


def _warn_of_failed(failed: Sequence[GenerationOutput]) -> None:
    if failed:
        first, more = failed[0], f" (and {len(failed) - 1:,} more, each in its `error`)" if len(failed) > 1 else ""
        warn_user(f"generate_batch: {first.request_id} failed: {first.error}{more}")


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, as the original method has it. Here each module is put back."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
