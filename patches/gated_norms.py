"""The norms with a gate in mixers that carry a state: which of a model may run as one kernel, and how they do.

Their classes differ in a few ways, which a table names. Where a mixer runs fused as a whole, its norm is part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels.reference.gated_ops_torch import NormForm
from .merged_weights import why_not_used
from .unmodified import is_class, is_compiled, why_not_plain

_GATE_FIRST = NormForm(gate_first=True)
_STRICT = NormForm(rounds=False)
# Each class by its module's folder. Some say more of their form in attributes: see ``GatedNorm.form``.
_CLASSES = (
    ("mamba2", "MambaRMSNormGated", _GATE_FIRST),
    ("bamba", "BambaRMSNormGated", _GATE_FIRST),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", _GATE_FIRST),
    ("nemotron_h", "NemotronHRMSNormGated", _GATE_FIRST),
    ("zamba2", "Zamba2RMSNormGated", _GATE_FIRST),
    ("falcon_h1", "FalconH1RMSNormGated", _STRICT),
    ("kimi_linear", "KimiLinearRMSNormGated", _STRICT),
    ("bailing_hybrid", "BailingHybridRMSNormGated", _STRICT),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", NormForm()),
    ("qwen3_next", "Qwen3NextRMSNormGated", NormForm()),
    ("qwen3_5", "Qwen3_5RMSNormGated", NormForm()),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", NormForm()),
)
_ACTIVATIONS = ("silu", "sigmoid")


@dataclass
class GatedNorm:
    parent: nn.Module
    name: str  # in the parent
    module: Any
    usual: NormForm  # of its class
    why_not: str | None

    @property
    def form(self) -> NormForm:
        """With what the module says of itself, read in each step: a user may change it."""
        own = vars(self.module)
        return NormForm(
            gate_first=not own["norm_before_gate"] if "norm_before_gate" in own else self.usual.gate_first,
            rounds=self.usual.rounds,
            activation=own.get("activation", self.usual.activation),
        )

    def part_of(self, width: int) -> int:
        """How many numbers are normed together, of a row of ``width``."""
        own = vars(self.module)
        return int(own.get("group_size", width // own.get("n_groups", 1)))


def gated_norms(model: nn.Module) -> Iterator[GatedNorm]:
    """All norms with a gate of a model. Changes nothing."""
    compiled = [set(module.modules()) for module in model.modules() if is_compiled(module)]
    for parent in model.modules():
        for name, module in parent.named_children():
            for folder, cls, form in _CLASSES:
                home = f"transformers.models.{folder}.modeling_{folder}"
                if any(is_class(base, home, cls) for base in type(module).__mro__):
                    found = GatedNorm(parent, name, module, form, _why_not(module, home, cls))
                    if any(module in each for each in compiled):
                        found.why_not = "the layer, or the model around it, is compiled"
                    yield found


def _why_not(norm: nn.Module, home: str, cls: str) -> str | None:
    why = why_not_plain(norm, home, cls)
    if why is None and set(norm._parameters) != {"weight"}:
        why = "computes its weight from others"
    if why is None:
        why = why_not_used(norm.get_parameter("weight"))
        why = None if why is None else f"has a weight that {why}"
    return None if why is None else f"`norm` {why}"


def gated_norm_forward(found: GatedNorm, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    norm, own = found.module, type(found.module).forward

    def forward(
        hidden_states: torch.Tensor,  # [..., width]
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        form, part = found.form, found.part_of(hidden_states.shape[-1])
        if gate is None or gate.shape != hidden_states.shape or form.activation not in _ACTIVATIONS:
            alone: torch.Tensor = own(norm, hidden_states, gate)
            return alone
        x, opens = (each.unflatten(-1, (-1, part)).flatten(0, -3) for each in (hidden_states, gate))
        return kernel(x, opens, norm.weight, norm.variance_epsilon, form).view(hidden_states.shape)

    return forward
