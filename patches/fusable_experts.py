"""Which mixtures of experts in a model are as transformers wrote them, so that kernels may run instead.

All of transformers' families that hold their experts as whole tensors share one way to run them: a decorator that says
how the tensors lie. What the decorator says is read here; what it leaves to a class, a table names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..kernels.reference.experts_torch import Gating
from .fusable_parts import activation_kernel
from .merged_weights import why_not_used
from .routers import Router, router_of
from .sharded_modules import adds_up_experts, is_part_of_each
from .uncompiled import every_module
from .unmodified import code_home, is_compiled, is_function, why_not_own, why_not_plain

_DECORATOR = "transformers.integrations.moe"
_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")  # that differ in speed alone
# What gate and up become, where a class has code of its own for that.
_OWN_GATES: dict[tuple[str, str], Callable[[Any], Gating]] = {
    ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"): lambda experts: Gating(
        "gpt_oss", experts.limit, experts.alpha, interleaved=True
    ),
}


@dataclass
class Experts:
    parent: nn.Module
    name: str  # in the parent
    module: Any
    gating: Callable[[Any], Gating]  # of the module, read in each step
    why_not: str | None = None
    # Whether the module gets a router's choice as the router left it: transformers' own code stands between the two.
    is_handed_on: bool = False
    routers: list[tuple[str, nn.Module, Router]] = field(default_factory=list)  # beside it, that can be fused as well

    def bypassed(self) -> list[tuple[nn.Module, str]]:
        """The modules that fused code replaces or reads, each as (its parent, its name)."""
        inner = [(router, name) for _, router, known in self.routers for name in known.inner]
        return [(self.module, name) for name in self.module._modules] + inner

    def weights(self) -> list[tuple[dict[str, torch.Tensor | None], str]]:
        """Where weights stand that a CUDA graph of a step reads."""
        owners = [self.module, *(router for _, router, _ in self.routers)]
        return [(each._parameters, name) for owner in owners for each in owner.modules() for name in each._parameters]


def mixtures(model: nn.Module) -> Iterator[Experts]:
    """All mixtures of experts in a model. Changes nothing."""
    children = (child for module in every_module(model) for child in module._modules.items())
    if not any(module is not None and _may_be_experts(name, module) for name, module in children):
        return  # most models have none, and each call asks
    compiled = [set(module.modules()) for module in model.modules() if is_compiled(module)]
    for parent in model.modules():
        for name, module in parent.named_children():
            if not _may_be_experts(name, module):
                continue
            gating = _OWN_GATES.get(_class_of(module), _usual_gating)  # PEFT changes a module's class for a call
            found = Experts(parent, name, module, gating, _why_not(module))
            found.is_handed_on = why_not_own(parent, *_class_of(parent)) is None and _is_of_transformers(parent)
            if any(module in each for each in compiled):
                found.why_not = "the layer, or the model around it, is compiled"
            if found.why_not is None:
                found.routers = [
                    (beside, router, known)
                    for beside, router in parent.named_children()
                    if (known := router_of(router)) is not None and _can_be_read(router, known)
                ]
            yield found


def _may_be_experts(name: str, module: nn.Module) -> bool:
    return name == "experts" or code_home(type(module).forward) == _DECORATOR


def _why_not(experts: Any) -> str | None:
    """In words that say what stands in the way."""
    cls = type(experts)
    if code_home(cls.forward) != _DECORATOR or not _is_of_transformers(experts):
        return f"the experts are a {cls.__name__} of {cls.__module__.partition('.')[0]}"
    in_parts = adds_up_experts(experts)
    why = None if in_parts else why_not_own(experts, *_class_of(experts))
    if why is not None:
        return f"`experts` {why}"
    if in_parts and experts.has_bias:
        return "the experts have biases, which each process would add"
    if getattr(experts, "_is_expert_parallel", False):
        return "the experts are spread over devices"
    implementation = experts.config._experts_implementation
    if implementation not in _IMPLEMENTATIONS:
        return f"the model's `experts_implementation` is {implementation!r}"
    registered = ALL_EXPERTS_FUNCTIONS.get(implementation, None)
    if registered is not None and not is_function(registered, _DECORATOR, f"{implementation}_experts_forward"):
        return f"the `experts_implementation` {implementation!r} has been replaced"
    names = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if experts.has_bias else set())
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False) or set(experts._parameters) != names:
        return f"there is no kernel for a {cls.__name__}"
    for name, parameter in experts._parameters.items():
        why = None if in_parts and is_part_of_each(parameter) else why_not_used(parameter)
        if why is not None:
            return f"`{name}` {why}"
    if len({parameter.dtype for parameter in experts._parameters.values()}) > 1:
        return "the experts' weights are of different types"
    return _why_not_gate(experts)


def _why_not_gate(experts: Any) -> str | None:
    cls = type(experts)
    if "_apply_gate" in experts.__dict__:
        return "its gate has been replaced"
    if _class_of(experts) in _OWN_GATES:
        own = is_function(cls._apply_gate, cls.__module__, f"{cls.__name__}._apply_gate")
        return None if own and not experts._modules else "its gate has been replaced"
    usual = is_function(cls._apply_gate, _DECORATOR, "_default_apply_gate") and experts.is_concatenated
    if not usual or set(experts._modules) != {"act_fn"}:
        return f"there is no kernel for the gate of a {cls.__name__}"
    activation = type(experts.act_fn)
    if activation_kernel(experts.act_fn) is None:
        return f"there is no kernel for the activation {activation.__name__}"
    why = why_not_plain(experts.act_fn, activation.__module__, activation.__name__)
    return None if why is None else f"`act_fn` {why}"


def _usual_gating(experts: Any) -> Gating:
    activation = activation_kernel(experts.act_fn)
    assert activation is not None
    return Gating(activation)


def _class_of(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _can_be_read(router: nn.Module, known: Router) -> bool:
    """Otherwise its own code runs, and the experts' kernels take what it chose."""
    inner = [router._modules.get(name) for name in known.inner]
    plain = all(
        module is not None and why_not_plain(module, known.home, type(module).__name__) is None for module in inner
    )
    weights = all(why_not_used(parameter) is None for parameter in router.parameters())
    return plain and weights and why_not_plain(router, known.home, known.name) is None
