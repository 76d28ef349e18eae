"""The copy of a model's architecture, made from its config as it is now, against the layers as they really are.

Layers note some of the config when they are made. What an owner changes there later, in the config or in a layer, is in
one of the two alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from ..patches.attention_interface import AttentionCall
from ..patches.uncompiled import every_module, own_forward
from .code_in_use import plain_attributes

_MOST_NAMED = 3
# RoPE whose angles depend on the longest position in the batch: exact only while all stay below the trained length.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def rope_limit(model: nn.Module, by_config: int | None) -> int | None:
    """The trained length of a RoPE that depends on lengths: the config may have been changed since it was made."""
    limits = [] if by_config is None else [by_config]
    for module in every_module(model):
        kinds = module.__dict__.get("rope_type")
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in LENGTH_DEPENDENT_ROPE and isinstance(
                length := getattr(module, "original_max_seq_len", None), int
            ):
                limits.append(length)
    return min(limits, default=None)


class LayersDiffer(Exception):
    """A layer is not what the class makes of the config, so that its copy says nothing about it."""


class _Likeness:
    def __init__(self, copy: nn.Module, model: nn.Module) -> None:
        self._copy = copy
        self._real = dict(model.named_modules())
        self.given: dict[str, tuple[Any, Any]] = {}  # from an attribute to (by the config, in the layer)
        for path, module in copy.named_modules():
            real = self._real.get(path)
            if real is None or type(real) is not type(module):
                continue
            made, noted = plain_attributes(module), plain_attributes(real)
            for key in made.keys() & noted.keys():
                if made[key] != noted[key] or type(made[key]) is not type(noted[key]):
                    self.given[f"{path}.{key}".removeprefix(".")] = made[key], noted[key]
                    module.__dict__[key] = noted[key]

    def check(self, calls: Sequence[AttentionCall]) -> None:
        """Whether the layers that attend, and all modules around them, are those of the copy."""
        attending = {id(call.layer) for call in calls}
        for path, module in self._copy.named_modules():
            if id(module) not in attending:
                continue
            parts = path.split(".")
            for end in range(len(parts) + 1):
                place = ".".join(parts[:end])
                real = self._real.get(place)
                if type(real) is not type(self._copy.get_submodule(place)) or own_forward(real) is not None:
                    raise LayersDiffer(place)


@contextmanager
def made_like(copy: nn.Module, model: nn.Module, name: str) -> Iterator[_Likeness]:
    """Gives the copy what the model's layers note. A refusal of the copy then says where the config differs."""
    likeness = _Likeness(copy, model)
    try:
        yield likeness
    except UnsupportedModelError as error:
        if not likeness.given:
            raise
        shown = [
            f"`{place}` is {noted!r}, and the config makes it {made!r}"
            for place, (made, noted) in list(likeness.given.items())[:_MOST_NAMED]
        ]
        more = len(likeness.given) - len(shown)
        raise UnsupportedModelError(
            f"{error}. Its layers and its config differ: {'; '.join(shown)}{f'; and {more:,} more' if more else ''}. "
            "Was the config changed after the model was made? Masks follow the config, and layers what they noted: "
            "change both, or load the model with the config that you mean"
        ) from error
