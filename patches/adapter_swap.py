"""Have PEFT's layers run with another adapter for a while, and leave no trace.

A layer that PEFT has put into a model notes which of its adapters are active, and whether all of them are switched off.
PEFT itself activates each adapter once, and the notes that this leaves are kept; from then on notes are exchanged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .attention_swap import AttentionSwap
from .swap import ABSENT, Place, Swap
from .uncompiled import every_module

# The attributes in which PEFT keeps the notes; its public properties read them.
_NOTES = ("_active_adapter", "_disable_adapters")


class AdaptedLayer(nn.Module):
    """The parts of PEFT's layers that are used here, for the type checker: PEFT need not be installed."""

    disable_adapters: bool
    active_adapters: str | list[str]

    def enable_adapters(self, enabled: bool) -> None: ...


def adapted_layers(model: nn.Module) -> list[AdaptedLayer]:
    """PEFT's layers: wrappers of the model's own, and layers of which it trains copies."""
    # A property or an attribute of the instance: transformers' models have a method of that name.
    classes: dict[type, bool] = {}
    found: dict[nn.Module, None] = {}
    for module in every_module(model):
        cls = type(module)
        if cls not in classes:
            classes[cls] = isinstance(getattr(cls, "disable_adapters", None), property)
        if classes[cls] or "disable_adapters" in module.__dict__:
            found[module] = None  # once, though it may stand in two places
    return [cast(AdaptedLayer, module) for module in found]


def active_in(layers: Iterable[AdaptedLayer]) -> Hashable:
    """The active adapters of each layer, as a key; None without layers.

    The key is a string because many prompts have it: a string computes its hash only once.
    """
    states = [active_of(layer) for layer in layers]
    if not states:
        return None
    return repr(states[0]) if len(set(states)) == 1 else repr(states)


def active_of(layer: AdaptedLayer) -> tuple[str, ...]:
    """The names of the adapters that the layer runs with."""
    active = () if layer.disable_adapters else layer.active_adapters
    return (active,) if isinstance(active, str) else tuple(active)


class AdapterSwap(Swap):
    """Has one model run with the adapter ``name``. Whoever applies it keeps other threads waiting."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Any]) -> None:
        super().__init__()
        self._model = model
        self._adapters = adapters  # the model's own mapping of names to configs: shows what the user changes
        self._layers = adapted_layers(model)
        self._needed: dict[str | None, Any] = {}  # configs of the call's adapters at its start
        self._known: dict[str, Any] = {}  # all configs when the notes were learned
        self._places: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []  # where the layers are
        self._attention = AttentionSwap(model)
        self._notes: dict[str | None, list[Place]] = {}
        self._trained: list[tuple[torch.Tensor, bool]] = []  # parameters, and whether the user trains each
        self.name: str | None = None  # of the adapter for the next steps

    def learn(self, names: Iterable[str | None]) -> dict[str | None, Hashable]:
        """Learn each adapter's notes (None: without adapters). Returns the key that ``active_in`` gives for each."""
        found: dict[str | None, Hashable] = {}
        with self._attention.others_wait():
            self._layers, self._known = adapted_layers(self._model), dict(self._adapters)
            layers = set(self._layers)
            self._places = [
                (module._modules, name, child)
                for module in self._model.modules()
                for name, child in module._modules.items()
                if child in layers
            ]
            try:
                self._trained = [(each, each.requires_grad) for each in self._model.parameters()]
                self._before = self._current_notes()
                for name in names:
                    self._needed.setdefault(name, None if name is None else self._adapters.get(name))
                    self._activate(name)
                    self._notes[name], found[name] = self._current_notes(), active_in(self._layers)
            finally:
                self.restore()
        return found

    def _current_notes(self) -> list[Place]:
        return [(vars(layer), note, vars(layer).get(note, ABSENT)) for layer in self._layers for note in _NOTES]

    def _activate(self, name: str | None) -> None:
        for layer in self._layers:
            layer.enable_adapters(name is not None)
        if name is not None:
            from peft.functional import set_adapter  # the model has layers of PEFT, so PEFT is installed
            from peft.tuners.tuners_utils import BaseTunerLayer

            tuner = getattr(self._model, "base_model", None)  # knows which of its layers contain others
            set_adapter(self._model, name, layer_cls=getattr(tuner, "tuner_layer_cls", BaseTunerLayer))

    def places(self) -> list[Place]:
        self._follow_user()
        return self._notes[self.name]

    def _follow_user(self) -> None:
        """Notice what the user has changed meanwhile: refuse it, or learn the notes again."""
        there, known = self._adapters, self._known
        if self.name is not None and there.get(self.name) is not self._needed[self.name]:
            raise RuntimeError(f"the adapter {self.name!r} is not there any more: it was deleted while a call needs it")
        if any(children.get(name) is not layer for children, name, layer in self._places):
            raise RuntimeError("the adapters are not there any more: they were unloaded while a call needs them")
        if any(vars(layer).get("merged_adapters") for layer in self._layers):  # PEFT would unmerge them
            raise RuntimeError("adapters were merged into the weights while a call needs each of them by itself")
        if len(there) != len(known) or any(there.get(name) is not config for name, config in known.items()):
            # New adapters may have brought new layers, in which they are active.
            self.learn([name for name, config in self._needed.items() if name is None or there.get(name) is config])

    @contextmanager
    def applied_alone(self) -> Iterator[None]:
        """Applied outside a step: other threads wait."""
        with self._attention.others_wait(), self.applied():
            yield

    def restore(self) -> None:
        """Put back the notes and training flags of before, if that has not been done."""
        super().restore()
        for parameter, was_trained in self._trained:
            if parameter.requires_grad != was_trained:
                parameter.requires_grad_(was_trained)
        self._trained = []
