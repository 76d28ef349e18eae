"""Have PEFT's layers run with another adapter for a while, and leave no trace.

A layer that PEFT has put into a model notes which of its adapters are active, and whether all of them are switched off.
What these notes are for an adapter is found out once, by PEFT's own means; then a step only exchanges the notes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .attention_swap import AttentionSwap

# Where PEFT keeps the notes; the public properties are made of them.
_NOTES = ("_active_adapter", "_disable_adapters")
_ABSENT = object()  # then the class says what holds

Note = tuple[dict[str, Any], str, Any]  # where it is, its name, its value


def adapted_layers(model: nn.Module) -> list[nn.Module]:
    """PEFT's: those that it has wrapped, and those that it trains copies of."""
    # transformers' models have a method of that name.
    return [
        module
        for module in model.modules()
        if isinstance(getattr(type(module), "disable_adapters", None), property) or "disable_adapters" in vars(module)
    ]


def active_in(layers: Iterable[nn.Module]) -> Hashable:
    """Which adapters each of the layers runs with; None where there are no such layers.

    Text, because it is the key of many prompts: its hash is worked out once.
    """
    states = [active_of(layer) for layer in layers]
    if not states:
        return None
    return repr(states[0]) if len(set(states)) == 1 else repr(states)


def active_of(layer: nn.Module) -> tuple[str, ...]:
    """The names of the adapters that the layer runs with."""
    active = () if layer.disable_adapters else layer.active_adapters
    return (active,) if isinstance(active, str) else tuple(active)


class AdapterSwap:
    """The swap for one model. ``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Any]) -> None:
        self._model = model
        self._adapters = adapters  # those that there are, whatever the owner does meanwhile, and their configs
        self._layers = adapted_layers(model)
        self._needed: dict[str | None, Any] = {}  # configs of those that the call needs, as they were at first
        self._known: dict[str, Any] = {}  # configs when the notes were found out
        self._places: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []  # where the layers are
        self._attention = AttentionSwap(model)
        self._notes: dict[str | None, list[Note]] = {}
        self._before: list[Note] = []
        self._trained: list[tuple[torch.Tensor, bool]] = []  # which parameters the owner is training
        self.name: str | None = None  # of the adapter for the next steps

    def learn(self, names: Iterable[str | None]) -> dict[str | None, Hashable]:
        """What the notes are for each of the adapters (None: for the model without any), as ``active_in`` says it."""
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
                self._before = self._as_they_are()
                for name in names:
                    self._needed.setdefault(name, self._adapters.get(name))  # type: ignore[arg-type]
                    self._activate(name)
                    self._notes[name], found[name] = self._as_they_are(), active_in(self._layers)
            finally:
                self.restore()
        return found

    def _as_they_are(self) -> list[Note]:
        return [(vars(layer), note, vars(layer).get(note, _ABSENT)) for layer in self._layers for note in _NOTES]

    def _activate(self, name: str | None) -> None:
        for layer in self._layers:
            layer.enable_adapters(name is not None)
        if name is not None:
            from peft.functional import set_adapter  # PEFT is there where its layers are
            from peft.tuners.tuners_utils import BaseTunerLayer

            tuner = getattr(self._model, "base_model", None)  # which knows those of its layers that hold others
            set_adapter(self._model, name, layer_cls=getattr(tuner, "tuner_layer_cls", BaseTunerLayer))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, the model has the adapter ``name``. The caller sees to it that other threads wait."""
        self._look_again()
        notes = self._notes[self.name]
        self._before = [(own, note, own.get(note, _ABSENT)) for own, note, _ in notes]
        try:
            _take_down(notes)
            yield
        finally:
            self.restore()

    def _look_again(self) -> None:
        """At what the owner may have done since the step before: layers say nothing of it."""
        there, known = self._adapters, self._known
        if self.name is not None and there.get(self.name) is not self._needed[self.name]:
            raise RuntimeError(f"the adapter {self.name!r} is not there any more: it was deleted while a call needs it")
        if any(children.get(name) is not layer for children, name, layer in self._places):
            raise RuntimeError("the adapters are not there any more: they were unloaded while a call needs them")
        if any(vars(layer).get("merged_adapters") for layer in self._layers):  # PEFT undoes it to run without any
            raise RuntimeError("adapters were merged into the weights while a call needs each of them by itself")
        if len(there) != len(known) or any(there.get(name) is not config for name, config in known.items()):
            # New ones may have brought layers with them, in which they are active.
            self.learn([name for name, config in self._needed.items() if name is None or there.get(name) is config])

    @contextmanager
    def applied_alone(self) -> Iterator[None]:
        """The same, outside a step."""
        with self._attention.others_wait(), self.applied():
            yield

    def restore(self) -> None:
        """What was there before, if it is not there yet."""
        _take_down(self._before)
        for parameter, was_trained in self._trained:
            if parameter.requires_grad != was_trained:
                parameter.requires_grad_(was_trained)
        self._before, self._trained = [], []


def _take_down(notes: Iterable[Note]) -> None:
    for own, note, value in notes:
        if value is _ABSENT:
            own.pop(note, None)
        else:
            own[note] = value
