"""Architectures whose attention can be put under the engine, yet whose answers would differ from ``generate``'s.

Each rule here catches a way to be wrong that no error would show.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...errors import UnsupportedModelError
from ...patches.attention_interface import AttentionCall


def refuse_own_positions(model: PreTrainedModel, name: str) -> None:
    """A model that takes no positions counts them along its row, and the engine's row holds many prompts."""
    inside = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    if not any("position_ids" in inspect.signature(type(module).forward).parameters for module in inside):
        raise UnsupportedModelError(
            f"{name} takes no `position_ids`: it counts positions by itself, from the start of its row, where several "
            "prompts stand side by side; that is not supported"
        )


def refuse_own_temperature(layers: Sequence[nn.Module], name: str) -> None:
    """Llama 4 scales the queries of layers without RoPE by their place in the row, whatever the positions say."""
    for layer in layers:
        if getattr(layer, "attn_temperature_tuning", False) and not getattr(layer, "use_rope", True):
            raise UnsupportedModelError(
                f"{name} scales attention by a token's place in its row (`attn_temperature_tuning`), where several "
                "prompts stand side by side; that is not supported"
            )


def refuse_dropped_layers(modules: Sequence[nn.Module], name: str) -> None:
    """OPT and BioGPT pass over layers at random while they train."""
    for module in modules:
        held = module.__dict__
        if held.get("layerdrop") and held.get("training"):
            raise UnsupportedModelError(
                f"{name} drops layers at random in train mode (`layerdrop` is {held['layerdrop']}): call model.eval()"
            )


def refuse_equal_numbers(model: PreTrainedModel, name: str) -> None:
    """A layer that was copied keeps its number, and ``generate``'s cache would mix up the K and V of both."""
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        taken: dict[tuple[type, int], int] = {}
        for place, layer in enumerate(layers):
            for part in layer.modules():
                number = part.__dict__.get("layer_idx")
                if isinstance(number, int) and "layer_idx" in inspect.signature(type(part).forward).parameters:
                    continue  # it is told its number in each call (Zamba2's shared blocks)
                if isinstance(number, int) and taken.setdefault((type(part), number), place) != place:
                    raise UnsupportedModelError(
                        f"layers {taken[type(part), number]} and {place} of {name} have the same `layer_idx` "
                        f"({number}): generate()'s cache would mix up what they keep. Give each "
                        f"{type(part).__name__} a number of its own"
                    )


def refuse_windows_of_the_cache(model: PreTrainedModel, name: str, calls: Sequence[AttentionCall]) -> None:
    """A window that the config states and the attention ignores: ``generate``'s cache drops what is out of it.

    What a token sees then depends on whether it belongs to the prompt: no mask says so.
    """
    config = model.config.get_text_config(decoder=True)
    cached: list[Any] = list(DynamicCache(config=config).layers)
    for place, call in enumerate(calls):
        layer = getattr(call.layer, "layer_idx", None)
        layer = place if not isinstance(layer, int) else layer
        if layer >= len(cached) or not getattr(cached[layer], "is_sliding", False):
            continue
        window = cached[layer].sliding_window
        if window == 1:
            raise UnsupportedModelError(
                f"{name} has a window of one token, with which generate()'s cache forgets nothing: a generated token "
                "then sees all tokens, and one of the prompt only itself; that is not supported"
            )
        if call.window is not None and call.window > window:
            raise UnsupportedModelError(
                f"{name} has a window of {window:,} tokens in `model.config`, from which generate()'s cache is made, "
                f"and its layers attend to {call.window:,}; that is not supported. Was `model.config` changed or "
                "replaced after the model was made? The configs inside the model count as well: change all of them, or "
                "load the model with the config that you mean"
            )
        if call.window is None:
            fields = ("sliding_window", "attention_chunk_size", "layer_types")
            stated = " and ".join(f"`{each}`" for each in fields if getattr(config, each, None) is not None)
            raise UnsupportedModelError(
                f"{name} has {stated} in its config, which its attention ignores and which makes generate()'s cache "
                f"forget all but the last {window:,} tokens; that is not supported. If the model was trained without "
                f"a window, take it out: set {stated} of `model.config` to None"
            )
