"""Fused layers: put into a model while steps run, and taken out again.

    fusion = Fusion(model)             # changes nothing
    fused = fusion.merge(kernels)      # once for a call: lays the weights end to end
    fused.apply()                      # before the first step, and after code of the user's has run
    with fused.step(): model(...)
    fused.restore()
    fusion.unmerge()                   # at the end of all calls

Where nothing is applied the model is as its user left it, except that merged weights lie elsewhere in memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .all_reduced_rows import all_reduced_forward
from .attention_interface import autocast_dtype
from .autocast_around import dtype_within
from .fusable_experts import Experts, mixtures
from .fusable_parts import ATTENTION, MIXER, MLP, NORMS, PARTS, Layer, Stack, activation_of, stacks
from .fused_experts import ExpertKernels, Handed, experts_forward, router_forward
from .fused_forwards import (
    Forward,
    FusedKernels,
    Merged,
    Residual,
    attention_forward,
    final_norm_forward,
    layer_forward,
    mlp_forward,
)
from .fused_gemma4 import gemma4_layer_forward
from .fused_mixers import MixerKernels, mixer_forward
from .gated_norms import GatedNorm, gated_norm_forward, gated_norms
from .merged_weights import merge, merged, unmerge
from .sharded_modules import adds_up_rows, local
from .swap import Place, Swap
from .unmodified import hook_dicts

# The ``__dict__`` of a module, its fused forward, and what stood there before: one that transformers has put there.
_Placed = tuple[dict[str, Any], Forward, Forward | None]
_LAYER_FORWARDS = {"usual": layer_forward, "gemma4": gemma4_layer_forward}


def triton_fused_kernels() -> FusedKernels:
    from ..kernels.triton import experts_triton, gated_ops_triton, layer_ops_triton, routing_triton

    experts = ExpertKernels(
        routing_triton.choose,
        routing_triton.rows_of_experts,
        experts_triton.up_products,
        experts_triton.down_products,
        experts_triton.sum_of_shares,
        experts_triton.rows_of_a_tile,
    )
    mixers = MixerKernels(gated_ops_triton.decay_and_beta, gated_ops_triton.gated_norm)
    return FusedKernels(layer_ops_triton.add_rms_norm, layer_ops_triton.act_and_mul, experts, mixers)


class Fusion:
    """The parts of a model that can be fused.

    ``reasons`` has a line for each kind of obstacle in the rest; ``summary`` says all of it in one line.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paused: str | None = None  # why nothing was fused in the last step, if nothing was
        self.experts_refused: str | None = None  # why the kernels of experts cannot be used on this device
        self._note([], [], [])

    def look(self) -> None:
        """Update ``reasons`` and ``summary``; the model stays as it is. Each ``merge`` does so, too."""
        self._note(list(stacks(self.model)), self._experts(), list(gated_norms(self.model)))

    @property
    def has_experts(self) -> bool:
        return any(True for _ in mixtures(self.model))

    @property
    def has_mixers(self) -> bool:
        """Whether there are layers that carry a state, parts of which can be fused."""
        return any(layer.has(MIXER) for stack in stacks(self.model) for layer in stack.layers) or any(
            True for _ in gated_norms(self.model)
        )

    def _experts(self) -> list[Experts]:
        found = list(mixtures(self.model))
        for each in found:
            each.why_not = each.why_not or self.experts_refused
        return found

    def merge(self, kernels: FusedKernels) -> FusedLayers:
        """Prepare steps. Weights that an earlier call has laid end to end stay where they are."""
        self.paused = None
        return FusedLayers(self, kernels)

    def lay_out(self) -> tuple[list[tuple[Stack, dict[tuple[int, str], Merged]]], list[Experts], list[GatedNorm]]:
        """Merge the weights that are not merged yet.

        Returns each stack with its merged weights by (layer, part), the mixtures of experts, and the norms with a gate.
        """
        found, experts, norms = list(stacks(self.model)), self._experts(), list(gated_norms(self.model))
        self._moved = full = False
        result = []
        for stack in found:
            weights: dict[tuple[int, str], Merged] = {}
            for index, layer in enumerate(stack.layers):
                for part in (ATTENTION, MIXER, MLP):
                    if not layer.fuses(part) or not layer.weights(part):
                        continue
                    try:
                        weights[index, part] = self._merged(layer, part, full)
                    except torch.OutOfMemoryError:
                        full = True
                        layer.why_not[part] = "there is no memory to lay its weights end to end"
            result.append((stack, weights))
        if self._moved:
            self._give_back_memory()
        self._note(found, experts, norms)
        return result, experts, norms

    def _merged(self, layer: Layer, part: str, full: bool) -> Merged:
        """Merge one group of weights after the other, so that only the largest needs room beside the model."""
        wholes = []
        for group in layer.weights(part):
            whole = merged(group)
            if whole is None and full:
                raise torch.OutOfMemoryError
            if whole is None:
                whole, self._moved = merge(group), True
            wholes.append(whole)
        return [(wholes[0], wholes[1] if len(wholes) > 1 else None)]

    def unmerge(self) -> None:
        """Give each parameter memory of its own again. May be called again and again."""
        moved = [unmerge(parameter) for parameter in self.model.parameters()]
        if any(moved):
            self._give_back_memory()

    @property
    def summary(self) -> str:
        """The layers that are fused, and what keeps the rest from it, for a report."""
        if self.paused is not None:
            return f"nothing: {self.paused}"
        whole = self._fused_mixtures == self._mixtures
        which = "their experts" if whole else f"the experts of {self._fused_mixtures} of {self._mixtures}"
        but = " but for their attention" if self._own_attention else ""
        layers = f"{self._whole} of {self._layers} layers{but}" + (f", with {which}" if self._mixtures else "")
        if not self._layers:
            parts = [f"the experts of {self._fused_mixtures} of {self._mixtures} layers"] if self._mixtures else []
            parts += [f"the norms of {self._fused_norms} of {self._norms} mixers"] if self._norms else []
            layers = " and ".join(parts)
        if self._whole == self._layers and not self.reasons:
            return layers
        more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
        if not (self._fused or self._fused_mixtures or self._fused_norms):
            return f"nothing: {self.reasons[0]}{more}"
        return f"{layers}; left as they are: {self.reasons[0]}{more}"

    def _note(self, found: list[Stack], experts: list[Experts], norms: list[GatedNorm]) -> None:
        layers = [layer for stack in found for layer in stack.layers]
        self._layers = len(layers)
        self._whole = sum(not layer.why_not for layer in layers)
        self._fused = sum(any(layer.fuses(part) for part in PARTS) for layer in layers)
        self._own_attention = any(layer.family is not None and not layer.family.attention for layer in layers)
        self._mixtures = len(experts)
        self._fused_mixtures = sum(each.why_not is None for each in experts)
        self._norms = len(norms)
        self._fused_norms = sum(each.why_not is None for each in norms)
        counts = Counter((part, why) for layer in layers for part, why in layer.why_not.items())
        self.reasons = [f"{part} of {count} of {len(layers)} layers: {why}" for (part, why), count in counts.items()]
        for stack in found:
            if stack.chain_why_not is not None:
                self.reasons.append(f"the residual between layers: the model {stack.chain_why_not}")
            if stack.norm_why_not is not None:
                self.reasons.append(f"the last norm: it {stack.norm_why_not}")
        if not found:
            inner = getattr(self.model, "get_base_model", lambda: self.model)()  # without PEFT's wrapper
            self.reasons = [f"there are no fused layers for {type(inner).__name__}"]
        for why, count in Counter(each.why_not for each in experts if each.why_not is not None).items():
            self.reasons.append(f"experts of {count} of {len(experts)} layers: {why}")
        for why, count in Counter(each.why_not for each in norms if each.why_not is not None).items():
            self.reasons.append(f"norms of {count} of {len(norms)} mixers: {why}")

    def _give_back_memory(self) -> None:
        """Free the weights' old places: the allocator would keep them, in pieces too small for anything else."""
        if any(parameter.device.type == "cuda" for parameter in self.model.parameters()):
            torch.cuda.empty_cache()


class FusedLayers(Swap):
    """A call's forwards for a model: layers run fused, and the model returns nothing but its logits."""

    def __init__(self, fusion: Fusion, kernels: FusedKernels) -> None:
        super().__init__()
        self._fusion = fusion
        self._kernels = kernels
        self._residual = Residual()
        self._make()

    def places(self) -> Iterator[Place]:
        if self._is_out_of_date():
            self._make()
        self._fusion.paused = self._pause()
        if self._fusion.paused is None:
            for own, forward, _ in self._forwards:
                yield own, "forward", forward

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a pass through the model."""
        if self._fusion.paused is None and self._kernels.all_reduce is not None:
            self._kernels.all_reduce.begin()
        try:
            yield
        finally:
            self._residual.forget()

    @contextmanager
    def applied(self) -> Iterator[None]:
        with super().applied(), self.step():
            yield

    def release(self) -> None:
        """After the last step: references to this object or to its forwards then keep no merged weights alive."""
        self.restore()
        for weights in self._weights:
            weights.clear()

    def _pause(self) -> str | None:
        if nn.modules.module._has_any_global_hook():
            return "there are hooks on all modules"
        model = self._fusion.model
        if any(autocast_dtype(device) or dtype_within(model, device) for device in self._devices):
            return "autocast is on"
        return None

    # -- while nothing is applied ------------------------------------------------------------------------------

    def _make(self) -> None:
        """Merge the weights that are not merged yet, and make the forwards."""
        self._forwards: list[_Placed] = []
        self._weights: list[Merged] = []
        self._devices = {parameter.device for parameter in self._fusion.model.parameters()}
        # The forwards are right as long as these stay: modules in their places, no hooks on them, weights' addresses.
        self._places: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._bypassed: list[nn.Module] = []
        self._addresses: list[tuple[dict[str, Any], str, int | None]] = []
        laid_out, experts, norms = self._fusion.lay_out()
        for stack, weights in laid_out:
            self._make_stack(stack, weights)
        for found in experts:
            if found.why_not is None:
                self._make_experts(found)
        replaced = set(self._bypassed)
        for norm in norms:
            if norm.why_not is None and norm.module not in replaced:  # otherwise its mixer's forward is not its own
                self._make_gated_norm(norm)
        if self._kernels.all_reduce is not None:
            for module in filter(adds_up_rows, self._fusion.model.modules()):
                self._put(module, all_reduced_forward(module, self._kernels.all_reduce))
        # A forward that is there already is one of transformers' that a sharded module has.
        self._own = [(module.__dict__, module.__dict__.get("forward")) for module in self._bypassed]
        self._hooks = [dicts for module in self._bypassed for dicts in hook_dicts(module)]
        self._hooks_seen = sum(map(len, self._hooks))

    def _make_stack(self, stack: Stack, weights: dict[tuple[int, str], Merged]) -> None:
        kernels = self._kernels
        adds = [layer.fuses(NORMS) for layer in stack.layers] + [stack.norm_why_not is None]
        leaves = [stack.chain_why_not is None and this and after for this, after in pairwise(adds)]
        # Gemma 4 may go on with some of the tokens alone where layers begin that share keys and values.
        cut = getattr(stack.owner, "first_kv_shared_layer_idx", None)
        if isinstance(cut, int) and 0 < cut <= len(leaves):
            leaves[cut - 1] = leaves[cut - 1] and cut == len(leaves)
        self._weights += weights.values()
        for index, layer in enumerate(stack.layers):
            module, family = layer.module, layer.family
            self._places.append((stack.owner.layers._modules, str(index), module))
            if family is None:
                continue
            if adds[index]:
                takes = index > 0 and leaves[index - 1]
                make = _LAYER_FORWARDS[family.layer]
                self._put(module, make(module, family, kernels, self._residual, takes, leaves[index]))
                self._bypassed.append(module)
            if layer.fuses(ATTENTION):
                qkv = weights.get((index, ATTENTION))
                self._put(module.self_attn, attention_forward(module.self_attn, family, qkv, kernels))
                self._places.append((module._modules, "self_attn", module.self_attn))
            if layer.fuses(MIXER):
                merged, home = weights[index, MIXER], vars(sys.modules[family.home])
                self._put(layer.mixer, mixer_forward(layer.mixer, home, merged, kernels.mixers))
                self._places.append((module._modules, family.mixer, layer.mixer))
            if layer.fuses(MLP):
                activation = activation_of(layer.mlp, family)
                assert activation is not None and layer.mlp_place is not None
                gate_up = weights.get((index, MLP))
                self._put(layer.mlp, mlp_forward(layer.mlp, family, gate_up, kernels, activation))
                owner, name = layer.mlp_place
                self._places.append((owner._modules, name, layer.mlp))
                if owner is not module:
                    self._places.append((module._modules, family.mlp, owner))
            for part in PARTS:
                if layer.fuses(part):
                    self._watch(layer, part)
        if leaves[-1]:
            norm = stack.owner.norm
            self._put(norm, final_norm_forward(norm, stack.family, kernels, self._residual))
            self._places.append((stack.owner._modules, "norm", norm))
            self._bypassed.append(norm)

    def _make_experts(self, found: Experts) -> None:
        kernels, handed = self._kernels.experts, Handed()
        if found.is_handed_on:
            self._bypassed.append(found.parent)  # nothing may come between the router and its experts
        self._put(found.module, experts_forward(found, kernels, handed, self._kernels.all_reduce))
        self._places.append((found.parent._modules, found.name, found.module))
        for name, router, known in found.routers:
            self._put(router, router_forward(router, known, kernels, handed))
            self._places.append((found.parent._modules, name, router))
            self._bypassed.append(router)
        for owner, name in found.bypassed():
            self._places.append((owner._modules, name, getattr(owner, name)))
            self._bypassed.append(getattr(owner, name))
        self._addresses += [(parameters, name, _address(parameters[name])) for parameters, name in found.weights()]

    def _make_gated_norm(self, found: GatedNorm) -> None:
        self._put(found.module, gated_norm_forward(found, self._kernels.mixers.gated_norm))
        self._places.append((found.parent._modules, found.name, found.module))
        self._bypassed.append(found.module)
        parameters = found.module._parameters
        self._addresses.append((parameters, "weight", _address(parameters["weight"])))

    def _put(self, module: nn.Module, forward: Forward) -> None:
        self._forwards.append((module.__dict__, forward, module.__dict__.get("forward")))

    def _watch(self, layer: Layer, part: str) -> None:
        for owner, name in layer.bypassed(part):
            self._places.append((owner._modules, name, getattr(owner, name)))
            self._bypassed.append(getattr(owner, name))
        for linear in layer.linears(part):
            for name, parameter in linear._parameters.items():
                self._addresses.append((linear._parameters, name, _address(parameter)))

    def _is_out_of_date(self) -> bool:
        """Whether the user has changed the model since: that may happen while a stream is open."""
        return (
            any(children.get(name) is not child for children, name, child in self._places)
            or any(own.get("forward") is not before for own, _, before in self._forwards)
            or any(own.get("forward") is not was for own, was in self._own)
            or any(own.get("_compiled_call_impl") is not None for own, _ in self._own)
            or any(_address(parameters.get(name)) != at for parameters, name, at in self._addresses)
            or sum(map(len, self._hooks)) != self._hooks_seen
        )


def _address(parameter: torch.Tensor | None) -> int | None:
    return None if parameter is None else local(parameter).data_ptr()
