"""The models that cases are drawn for: the tiny families, and tiny models with adapters, on the device of the run."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any

import torch
from support_accelerated import word_tokenizer
from support_families import FAMILIES
from support_letter_tokenizers import letter_tokenizer

from hf_batchllm import BatchGenerator, UnsupportedModelError

# One of each kind of structure; half of all cases are drawn for them.
DIFFERENT = [
    *("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "opt", "cohere2", "mixtral", "qwen3"),
    *("phi3", "gemma4", "mimo_v2_flash", "laguna", "smollm3_window", "modernbert_decoder", "granite_swa", "gpt_neox"),
]
WITH_ADAPTERS = ["lora", "everywhere", "saved", "transformers", "gemma2"]
# A CPU computes some functions by other instructions for the last few numbers of a tensor. In the loop of a GPU, which
# pads no rows, these families have no such numbers: the rows of their tensors are multiples of 16.
ALIGNED = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss")
# On a GPU float32 is refused with ``invariant=True``; in half precision ``generate`` has other tokens.
HALVED = False
PEFT = "peft:"  # begins the names of models with adapters
ADAPTERS = ("a", "b", None)


def draw_family(dice: Random) -> str:
    if dice.random() < 0.08:
        return PEFT + dice.choice(WITH_ADAPTERS)
    return dice.choice(DIFFERENT if dice.random() < 0.5 else sorted(FAMILIES))


def missing(family: str, device_loop: bool, invariant: bool = False, device: str = "cpu") -> str | None:
    """Why a case cannot be run here."""
    if family.startswith(PEFT):
        lacking = None if _installed("peft") else "peft is not installed, which models with adapters need"
    else:
        lacking = FAMILIES[family].missing()
    if lacking is None and device_loop and not _installed("hypothesis"):
        lacking = "hypothesis is not installed, which the loop of a GPU on a CPU needs"
    return _varies(family, device) if invariant and lacking is None else lacking


@cache
def _varies(family: str, device: str) -> str | None:
    try:
        with BatchGenerator(model_of(family, device), invariant=True) as generator:
            if device != "cpu":  # there a first call tries the model
                generator.generate([[5, 6]], max_new_tokens=1, progress=False)
    except UnsupportedModelError as error:
        return str(error)
    return None


@cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@cache
def model_of(family: str, device: str) -> Any:
    """The same object at every call: leave it as you found it."""
    if device == "cpu":
        return _built(family)
    return copy.deepcopy(_built(family)).to(device, torch.bfloat16 if HALVED else torch.float32)


@cache
def changeable(family: str, device: str) -> Any:
    """A copy for cases that change weights between calls, and change them back."""
    return copy.deepcopy(model_of(family, device))


@cache
def _for_reference(family: str, device: str) -> Any:
    return copy.deepcopy(model_of(family, device))


@cache
def assistant_of(family: str, device: str, noise: float) -> Any:
    """A copy of the family's model with weights that are a little different, which guesses what the model says."""
    assistant = copy.deepcopy(model_of(family, device))
    made = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for weight in assistant.parameters():
            if noise and weight.is_floating_point():
                weight += noise * weight.std() * torch.randn(weight.shape, generator=made, device=device).to(weight)
    return assistant


def _built(family: str) -> Any:
    if not family.startswith(PEFT):
        # Not the one that other tests share: a generator of theirs may have merged its weights.
        return FAMILIES[family]()
    import support_adapters

    return support_adapters.build(family.removeprefix(PEFT))


@contextmanager
def as_its_user_runs_it(family: str, device: str, adapter: str | None, model: Any = None) -> Iterator[Any]:
    """The model whose ``generate`` is the reference; with an adapter, or without any, where it has some."""
    if not family.startswith(PEFT):
        yield model_of(family, device) if model is None else model
        return
    from support_adapters import having

    copied = _for_reference(family, device)
    with having(copied, adapter):
        yield copied


@cache
def letters() -> Any:
    """For stop strings."""
    return letter_tokenizer()


def words() -> Any:
    """For prompts that are text: a word for each token."""
    return word_tokenizer()


def as_text(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)
