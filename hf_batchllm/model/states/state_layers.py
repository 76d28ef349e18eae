"""Layers that carry a state from token to token: what a pass calls of them, and whether all of it is understood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ...kernels.reference.convolution_torch import ACTIVATIONS
from ...patches.state_functions import Convolution, DeltaRule, SelectiveScan, StateSpace, is_known_mixer, mixers
from .state_step import shape_of
from .state_storage import StateShape

ATTENDING = frozenset(["full_attention", "sliding_attention"])
CARRYING = frozenset(["linear_attention", "conv"])
BOTH = frozenset(["hybrid", "hybrid_sliding"])
NEITHER = frozenset(["moe", "mlp"])
KNOWN_LAYERS = ATTENDING | CARRYING | BOTH | NEITHER


class StateNotes:
    """A ``StateContext`` that notes each call and answers with a tensor of the right shape."""

    def __init__(self) -> None:
        self.noted: list[StateShape] = []

    def convolve(self, call: Convolution) -> torch.Tensor:
        if call.activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"the config's activation {call.activation!r} stands behind a short convolution, where silu alone is "
                "supported"
            )
        self.noted.append(shape_of(call))
        return torch.zeros_like(call.x)

    def delta_rule(self, call: DeltaRule) -> torch.Tensor:
        self.noted.append(shape_of(call))
        return torch.zeros_like(call.v)

    def state_space(self, call: StateSpace) -> torch.Tensor:
        self.noted.append(shape_of(call))
        return torch.zeros_like(call.x, dtype=torch.float32)

    def selective_scan(self, call: SelectiveScan) -> torch.Tensor:
        self.noted.append(shape_of(call))
        return torch.zeros_like(call.x, dtype=torch.float32)


def layer_kinds(model: PreTrainedModel) -> Sequence[str]:
    """The kind of each layer, as the config names it; empty where it does not."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "layer_types", None) or ()


def refuse_unknown_kinds(model: PreTrainedModel, name: str) -> None:
    unknown = sorted(set(layer_kinds(model)) - KNOWN_LAYERS)
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of a kind that is not supported: {', '.join(unknown)} "
            "(full and sliding-window attention are, and several kinds of linear attention and of state spaces)"
        )


def attention_expected(model: PreTrainedModel) -> int | None:
    """How many layers should attend; None where the config does not tell."""
    kinds = layer_kinds(model)
    if any(kind not in ATTENDING for kind in kinds):
        return sum(kind in ATTENDING | BOTH for kind in kinds)
    layers: int | None = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    return layers


def refuse_by_states(model: nn.Module, kinds: Sequence[str], noted: Sequence[StateShape], name: str) -> None:
    """A layer whose state passes by the stand-ins would mix up the prompts of a step: nothing would show it."""
    found = [(type(module).__name__, functions) for _, module, functions in mixers(model)]
    expected = sum(kind in CARRYING | BOTH for kind in kinds)
    strangers = sorted({type(module).__name__ for _, module, _ in mixers(model) if not is_known_mixer(module)})
    if strangers:
        raise UnsupportedModelError(
            f"{name} has layers that carry a state from token to token in a way that is not supported: "
            f"{', '.join(strangers)}"
        )
    if len(found) != expected:
        of_kinds = ", ".join(f"{count} of {kind}" for kind, count in Counter(kinds).items()) or "its config names none"
        raise UnsupportedModelError(
            f"{name} should carry a state through {expected} layers ({of_kinds}), and {len(found)} were found whose "
            "state can be kept for each prompt by itself; that is not supported"
        )
    each, left = divmod(len(noted), max(len(found), 1))
    alike = [*noted[:each]] * len(found) == [*noted]
    if found and (left or not alike or any(len(functions) > each for _, functions in found)):
        raise UnsupportedModelError(
            f"{name} has {len(found)} layers that carry a state, which do not all call the functions that are known to "
            "carry it; that is not supported"
        )
