"""The copy of a model's architecture, made from its config as it is now, against the layers as they really are.

Layers note some of the config when they are made, and hold a config of their own: most often the model's, yet a user
may put another one there. What a user changes later, in a config or in a layer, is in one of them alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ...errors import UnsupportedModelError
from ...patches.attention_interface import AttentionCall
from ...patches.uncompiled import every_module, own_forward
from .code_in_use import plain_attributes

_MOST_NAMED = 3
_NAMED = (int, float, str, list, tuple, type(None))  # of a config's values, those that a message shows
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
        self._seen: set[int] = set()  # configs
        configs: dict[int, Any] = {}  # what `deepcopy` has copied: modules that share a config go on sharing it
        for path, module in copy.named_modules():
            real = self._real.get(path)
            if real is None or type(real) is not type(module):
                continue
            made, noted = plain_attributes(module), plain_attributes(real)
            for key in made.keys() & noted.keys():
                if type(made[key]) is not type(noted[key]) or made[key] != noted[key]:
                    self.given[f"{path}.{key}".removeprefix(".")] = made[key], noted[key]
                    module.__dict__[key] = noted[key]
            own = real.__dict__.get("config")
            if isinstance(own, PreTrainedConfig):
                self._note_config(f"{path}.config".removeprefix("."), module.__dict__.get("config"), own)
                module.__dict__["config"] = deepcopy(own, configs)

    def _note_config(self, place: str, made: Any, own: PreTrainedConfig) -> None:
        """Where the config of a module differs from the model's: at the first module that has it."""
        if id(own) in self._seen:
            return
        self._seen.add(id(own))
        by_config = vars(made) if isinstance(made, PreTrainedConfig) else {}
        for key, value in vars(own).items():
            if isinstance(value, _NAMED) and key in by_config and by_config[key] != value:
                self.given[f"{place}.{key}"] = by_config[key], value

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
            f"`{place}` is {reprlib.repr(noted)}, and the config makes it {reprlib.repr(made)}"
            for place, (made, noted) in list(likeness.given.items())[:_MOST_NAMED]
        ]
        more = len(likeness.given) - len(shown)
        raise UnsupportedModelError(
            f"{error}. Its layers and its config differ: {'; '.join(shown)}{f'; and {more:,} more' if more else ''}. "
            "Was the config changed after the model was made? Masks follow the config, and layers what they noted: "
            "change both, or load the model with the config that you mean"
        ) from error
