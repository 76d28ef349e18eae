"""Whether a model and a generator are what they were: for the tests of how calls end."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import torch
from support_families import build, random_prompts
from support_parity import assert_parity
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.attention_interface import context_in_use

FAMILY = "gemma2"  # windows, caps, two kinds of layers
NEW_TOKENS = 8


def prompts(kind: str = "mixed", count: int = 14, seed: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, kind, count)


def fingerprint(model: Any) -> Any:
    """Everything about a model, and about the process around it, that a call might have changed."""
    modules = {}
    for name, module in model.named_modules():
        plain = {key: repr(value) for key, value in vars(module).items() if not isinstance(value, dict | nn.Module)}
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        modules[name] = (type(module), plain, hooks, sorted(vars(module)), id(getattr(module, "config", None)))
    tensors = {
        name: (id(tensor), *_identity(tensor)) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    configs = {key: repr(value) for key, value in vars(model.config).items()}
    process = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    process += (torch.get_default_device(), torch.is_autocast_enabled("cpu"), context_in_use())
    return modules, tensors, configs, repr(vars(model.generation_config)), sorted(vars(model.config)), process


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    content = hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return tensor.data_ptr(), tensor._version, tensor.requires_grad, tensor.is_inference(), content


def assert_untouched(generator: BatchGenerator, before: Any, caches: list[Any]) -> None:
    assert fingerprint(build(FAMILY)) == before
    for cache in caches:
        cache.check_integrity()
        assert cache.free_pages == cache.num_pages
    assert_parity(FAMILY, prompts(), generator.generate(prompts(), max_new_tokens=NEW_TOKENS), NEW_TOKENS)


@pytest.fixture
def never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache is made and no step is run."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("work began before everything was checked")

    monkeypatch.setattr("hf_batchllm.engine.kv_memory.KVMemory.open", refuse)
    monkeypatch.setattr("hf_batchllm.model.runner.ModelRunner.step", refuse)
