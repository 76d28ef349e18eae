"""A quick look at a model notices whatever is done to it; what it notices is then looked at in earnest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from torch import nn

from hf_batchllm.model.glance import Glance
from hf_batchllm.model.owners_state import OwnersState

CPU = torch.device("cpu")


class OtherLinear(nn.Linear):
    pass


def a_model() -> Any:
    model: Any = FAMILIES["llama"]()
    model.model.notes = {"a": [1, {2}], "b": {}}
    return model


def rename(model: Any) -> None:
    """The same value, at the same place, under another name."""
    model.last = True
    held = model.__dict__
    held["latest"] = held.pop("last")


def other_memory(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def other_strides(model: Any) -> None:
    """Over the same memory."""
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()


# What matters to a forward pass, and what does not.
DONE: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "an attribute": (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0), True),
    "a new attribute": (lambda model: setattr(model, "more", 1), True),
    "an attribute less": (lambda model: delattr(model.model, "notes"), True),
    "mode": (lambda model: model.train(), True),
    "a parameter": (lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.ones(101, 48))), True),
    "its memory": (other_memory, True),
    "its strides": (other_strides, True),
    "no parameter": (lambda model: model.model.norm.register_parameter("weight", None), True),
    "a buffer": (lambda model: model.model.register_buffer("mask", torch.ones(3)), True),
    "a module": (lambda model: setattr(model, "lm_head", nn.Linear(48, 101, bias=False)), True),
    "a layer less": (lambda model: model.model.layers.pop(-1), True),
    "a class": (lambda model: setattr(model.lm_head, "__class__", OtherLinear), True),
    "a hook": (lambda model: model.lm_head.register_forward_hook(lambda *given: None), True),
    "a hook before": (lambda model: model.lm_head.register_forward_pre_hook(lambda *given: None), True),
    "a forward": (lambda model: setattr(model.lm_head, "forward", lambda rows: rows), True),
    "an item": (lambda model: model.model.notes["a"].append(2), True),
    "an item of an item": (lambda model: model.model.notes["a"][1].add(3), True),
    "what was empty": (lambda model: model.model.notes["b"].update(c=1), True),
    "the config": (lambda model: setattr(model.config, "rope_theta", 3.0), True),
    "an equal value": (lambda model: setattr(model.model, "notes", {"a": [1, {2}], "b": {}}), False),
    "a report": (lambda model: setattr(model, "last_report", object()), False),
    "a training hook": (lambda model: model.lm_head.register_full_backward_hook(lambda *given: None), False),
}


@pytest.mark.parametrize("what", DONE)
def test_what_is_done_to_a_model_is_noticed(what: str) -> None:
    do, matters = DONE[what]
    model = a_model()
    glance = Glance(model.modules())
    states = [OwnersState(model, CPU, at_a_glance) for at_a_glance in (False, True)]
    for _ in range(2):
        assert glance.untouched() and all(state.change(model) is None for state in states)
    do(model)
    assert not glance.untouched() or what == "the config"
    for _ in range(2):
        first, second = (state.change(model) for state in states)
        assert first == second and (first is not None) == matters


def test_a_name_is_noticed_where_all_objects_are_the_same() -> None:
    model = a_model()
    model.last = True
    glance = Glance(model.modules())
    rename(model)
    assert not glance.untouched()


def test_what_runs_and_trains_leaves_a_model_untouched() -> None:
    model = a_model()
    glance, ids = Glance(model.modules()), torch.tensor([[5, 6, 7]])
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # in place: graphs read it where it is
    model.generate(ids, max_new_tokens=2)
    assert glance.untouched()


def test_what_was_done_once_is_not_looked_at_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    state = OwnersState(model, CPU, at_a_glance=True)
    model.last_report = object()
    assert state.change(model) is None
    monkeypatch.setattr(
        "hf_batchllm.model.owners_state._ModuleState.is_another", lambda *given: pytest.fail("looked at in earnest")
    )
    assert state.change(model) is None
