"""Methods that transformers' ``generate`` calls on a model and this library does not: is one an owner's own?

``prepare_inputs_for_generation`` and ``_update_model_kwargs_for_generation`` are tried on made-up tokens: code that
comes with a checkpoint often defines them, and mostly they do what transformers' own would. Others are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import UnsupportedModelError
from .code_in_use import REPLACEABLE

TRIED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_LENGTHS = (1, 3, 130, 5000)  # of prompts; the model's longest comes on top
_LONGEST = 100_000
_STEPS = 3
# Arguments of a forward pass that say nothing about tokens, or that each pass may choose.
_HARMLESS = frozenset(["use_cache", "return_dict", "logits_to_keep", "num_logits_to_keep"])


def own_methods(model: PreTrainedModel, is_theirs: Callable[[Any], bool]) -> list[str]:
    """The names of those that are neither transformers' nor a known library's.

    A ``generate`` set on the model itself is mostly a wrapper that logs, and is passed over; but transformers sets one
    there that comes with a checkpoint (``custom_generate``), as a partial.
    """
    own = [name for name in REPLACEABLE if hasattr(model, name) and not is_theirs(getattr(model, name))]
    wrapped = "generate" in model.__dict__ and not isinstance(model.__dict__["generate"], partial)
    return [name for name in own if name != "generate" or not wrapped]


def refuse_methods(model: PreTrainedModel, name: str, is_theirs: Callable[[Any], bool]) -> None:
    own = own_methods(model, is_theirs)
    for method in own:
        if method not in TRIED:
            raise UnsupportedModelError(
                f"{name} has a `{method}` of its own. `model.generate` goes through it, and this library does not: its "
                "own loop takes that place, and what the method does would be lost. Remove it, or use model.generate"
            )
    if own and (difference := _difference(model)) is not None:
        which = " and ".join(f"`{method}`" for method in own)
        raise UnsupportedModelError(
            f"{name} has its own {which}, which `model.generate` calls and this library does not. Tried on made-up "
            f"tokens, {difference}. That would be lost. Remove the method, or use model.generate"
        )


def _difference(model: PreTrainedModel) -> str | None:
    """What a forward pass would be given that is not each token of the sequence at its place; None if nothing is."""
    config = model.config.get_text_config(decoder=True)
    longest = min(getattr(config, "max_position_embeddings", None) or _LONGEST, _LONGEST) - _STEPS
    for length in sorted({*(each for each in _LENGTHS if each <= longest), max(longest, 1)}):
        for masked in (True, False):  # ``generate`` may leave out a mask that hides nothing
            try:
                difference = _tried(model, length, masked)
            except Exception as error:
                difference = f"it failed ({type(error).__name__}: {error})" if masked else None
            if difference is not None:
                return f"with a prompt of {length:,} token{'s' * (length != 1)}, {difference}"
    return None


@torch.no_grad()
def _tried(model: Any, length: int, masked: bool) -> str | None:
    """Goes through the steps of ``generate`` with made-up tokens, without running the model."""
    text = model.config.get_text_config(decoder=True)
    device, vocabulary = model.device, max(2, text.vocab_size)
    ids = (torch.arange(length + _STEPS, device=device) * 7 + 1)[None] % vocabulary  # [1, tokens]
    cache = DynamicCache()
    given: dict[str, Any] = {
        "attention_mask": torch.ones(1, length, dtype=torch.long, device=device) if masked else None,
        "use_cache": True,
        "past_key_values": cache,
        "logits_to_keep": 1,
    }
    if hasattr(GenerationMixin, "_prepare_position_ids_for_generation"):
        given["position_ids"] = torch.arange(length, device=device)[None]
    takes = inspect.signature(model.forward).parameters
    if "logits_to_keep" not in takes:
        del given["logits_to_keep"]
    seen = 0
    for step in range(_STEPS):
        so_far = ids[:, : length + step]
        inputs = model.prepare_inputs_for_generation(
            so_far.clone(),
            next_sequence_length=so_far.shape[1] - seen,
            is_first_iteration=step == 0,
            **given,
        )
        difference = _unlike(inputs, so_far, seen if inputs.get("past_key_values") is not None else 0, cache)
        if difference is not None:
            return f"in {'the first pass' if step == 0 else 'a later pass'} {difference}"
        new = so_far.shape[1] - seen
        states = torch.zeros(2, 1, 1, new, 1, dtype=torch.float32, device=device)
        cache.update(*states, 0)  # of one layer: only its length is asked for
        seen = so_far.shape[1]
        logits = torch.zeros(1, 1, vocabulary, dtype=torch.float32, device=device)
        outputs = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        given = model._update_model_kwargs_for_generation(outputs, given, is_encoder_decoder=False)
    return None


def _unlike(inputs: dict[str, Any], so_far: torch.Tensor, seen: int, cache: DynamicCache) -> str | None:
    """How the arguments of a pass differ from "the tokens after ``seen``, each at its place, all seen by the last"."""
    tokens = so_far.shape[1]
    places = torch.arange(seen, tokens, device=so_far.device)
    for name, value in inputs.items():
        if value is None or name in _HARMLESS or value is cache:
            continue
        if name == "input_ids":
            alike = _same(value, so_far[:, seen:])
        elif name == "position_ids":
            alike = _same(value, places[None])
        elif name == "cache_position":
            alike = _same(value, places)
        elif name == "attention_mask":
            alike = isinstance(value, torch.Tensor) and value.shape == so_far.shape and bool(value.bool().all())
        else:
            alike = name in ("output_attentions", "output_hidden_states") and value is False
        if not alike:
            return f"the model is given {'other' if name in _EXPECTED else 'a further argument,'} `{name}`"
    return None if inputs.get("input_ids") is not None else "the model is given no `input_ids`"


_EXPECTED = ("input_ids", "position_ids", "cache_position", "attention_mask")


def _same(value: Any, expected: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == expected.shape and bool((value == expected).all())
