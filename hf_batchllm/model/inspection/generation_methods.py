"""Methods that transformers' ``generate`` calls on a model and this library does not: is one a user's own?

``prepare_inputs_for_generation`` and ``_update_model_kwargs_for_generation`` are tried on made-up tokens: code that
comes with a checkpoint often defines them, and mostly they do what transformers' own would. Others are refused.
Some of transformers' models define the two as well: of these, where tokens are placed is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...errors import UnsupportedModelError
from ...patches.attention_interface import CACHE_NAME
from ...patches.uncompiled import every_module
from .code_in_use import REPLACEABLE
from .custom_code import is_theirs

TRIED = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_LENGTHS = (1, 3, 130, 5000)  # of prompts; the model's longest comes on top
_LONGEST = 100_000
_STEPS = 3
_SHORT = 3  # length of the prompt where only places are tried
# Arguments of a forward pass that say nothing about tokens, or that each pass may choose.
_HARMLESS = frozenset(["use_cache", "return_dict", "logits_to_keep", "num_logits_to_keep"])


def own_methods(model: PreTrainedModel) -> list[str]:
    """The names of those that are neither transformers' nor a known library's.

    A ``generate`` set on the model itself is mostly a wrapper that logs, and is passed over; but transformers sets one
    there that comes with a checkpoint (``custom_generate``), as a partial.
    """
    own = [name for name in REPLACEABLE if hasattr(model, name) and not is_theirs(getattr(model, name))]
    wrapped = "generate" in model.__dict__ and not isinstance(model.__dict__["generate"], partial)
    return [name for name in own if name != "generate" or not wrapped]


def refuse_methods(model: PreTrainedModel, name: str) -> None:
    own = own_methods(model)
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


def refuse_positions_from_elsewhere(model: PreTrainedModel, name: str) -> None:
    """A method of transformers' own may take away the positions that the engine passes (Kosmos-2.5), or pass others."""
    prepare = getattr(type(model), TRIED[0])
    as_usual = prepare is GenerationMixin.prepare_inputs_for_generation
    if as_usual or any(method in TRIED for method in own_methods(model)):  # those were tried before
        return
    try:
        elsewhere = any(_is_elsewhere(model, each) for each in _passes(model, _SHORT, masked=True))
    except Exception as error:  # whatever it asks for beside text, ``generate`` cannot do without it either
        raise UnsupportedModelError(
            f"{name} does not generate from text alone: `prepare_inputs_for_generation`, or another method "
            f"that generate() calls between passes, failed on made-up tokens ({type(error).__name__}: {error})"
        ) from error
    if elsewhere:
        raise UnsupportedModelError(
            f"{name} has generate() count positions in a way of its own (in `prepare_inputs_for_generation`); that is "
            "not supported"
        )


def _difference(model: PreTrainedModel) -> str | None:
    """What a forward pass would be given that is not each token of the sequence at its place; None if nothing is."""
    config = model.config.get_text_config(decoder=True)
    longest = min(getattr(config, "max_position_embeddings", None) or _LONGEST, _LONGEST) - _STEPS
    for length in sorted({*(each for each in _LENGTHS if each <= longest), max(longest, 1)}):
        for masked in (True, False):  # ``generate`` may leave out a mask that hides nothing
            try:
                difference = _tried(model, length, masked)
            except Exception as error:  # what fails for want of a mask fails in ``generate`` too, and changes no answer
                difference = f"it failed ({type(error).__name__}: {error})" if masked else None
            if difference is not None:
                return f"with a prompt of {length:,} token{'s' * (length != 1)}, {difference}"
    return None


def _tried(model: PreTrainedModel, length: int, masked: bool) -> str | None:
    for each in _passes(model, length, masked):
        if (difference := _unlike(each)) is None and _is_elsewhere(model, each):
            difference = "the model is given no `position_ids`, and counts positions in a way of its own"
        if difference is not None:
            return f"in {'the first pass' if each.step == 0 else 'a later pass'} {difference}"
    return None


class _Pass(NamedTuple):
    step: int
    inputs: dict[str, Any]  # what the forward pass is given
    so_far: torch.Tensor  # [1, tokens]  the whole sequence
    seen: int  # tokens that are in the cache
    cache: DynamicCache


@torch.no_grad()
def _passes(model: Any, length: int, masked: bool) -> Iterator[_Pass]:
    """Goes through the steps of ``generate`` with made-up tokens, without running the model."""
    text = model.config.get_text_config(decoder=True)
    device, vocabulary = model.device, max(2, text.vocab_size)
    ids = (torch.arange(length + _STEPS, device=device) * 7 + 1)[None] % vocabulary  # [1, tokens]
    cache = DynamicCache()
    given: dict[str, Any] = {
        "attention_mask": torch.ones(1, length, dtype=torch.long, device=device) if masked else None,
        "use_cache": True,
        CACHE_NAME: cache,
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
        yield _Pass(step, inputs, so_far, seen if inputs.get(CACHE_NAME) is not None else 0, cache)
        new = so_far.shape[1] - seen
        states = torch.zeros(2, 1, 1, new, 1, dtype=torch.float32, device=device)
        cache.update(*states, 0)  # of one layer: only its length is asked for
        seen = so_far.shape[1]
        logits = torch.zeros(1, 1, vocabulary, dtype=torch.float32, device=device)
        outputs = CausalLMOutputWithPast(logits=logits)
        outputs[CACHE_NAME] = cache
        given = model._update_model_kwargs_for_generation(outputs, given, is_encoder_decoder=False)


def _is_elsewhere(model: nn.Module, tried: _Pass) -> bool:
    """Whether tokens are at other places than those that the engine passes. Places of several axes are not compared."""
    places, passed = _places(tried)[None], tried.inputs.get("position_ids")
    if isinstance(passed, torch.Tensor):
        return passed.shape == places.shape and not _same(passed, places)
    return any(hasattr(type(module), "create_position_ids_from_input_ids") for module in every_module(model))


def _places(tried: _Pass) -> torch.Tensor:  # [tokens of the pass]
    return torch.arange(tried.seen, tried.so_far.shape[1], device=tried.so_far.device)


def _unlike(tried: _Pass) -> str | None:
    """How the arguments of a pass differ from "the tokens after ``seen``, each at its place, all seen by the last"."""
    so_far, places = tried.so_far, _places(tried)
    for name, value in tried.inputs.items():
        if value is None or name in _HARMLESS or value is tried.cache:
            continue
        if name == "input_ids":
            alike = _same(value, so_far[:, tried.seen :])
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
    return None if tried.inputs.get("input_ids") is not None else "the model is given no `input_ids`"


_EXPECTED = ("input_ids", "position_ids", "cache_position", "attention_mask")


def _same(value: Any, expected: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == expected.shape and bool((value == expected).all())
