"""One pass through layers that carry states: whose tokens are whose, and the functions that run over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.lists.spans import Spans
from ...kernels.reference import convolution_torch, delta_rule_torch, selective_scan_torch, state_space_torch
from ...patches.state_functions import (
    Convolution,
    DeltaRule,
    SelectiveScan,
    StateSpace,
    own_delta_rule,
    own_state_space,
)
from .state_storage import StateShape, StateStorage

Call = Convolution | DeltaRule | StateSpace | SelectiveScan


@dataclass(frozen=True)
class StateKernels:
    """What runs each kind of call: (call, states [slots, ...], spans) -> output."""

    convolve: Callable[[Convolution, torch.Tensor, Spans], torch.Tensor]
    delta_rule: Callable[[DeltaRule, torch.Tensor, Spans], torch.Tensor]
    state_space: Callable[[StateSpace, torch.Tensor, Spans], torch.Tensor]
    selective_scan: Callable[[SelectiveScan, torch.Tensor, Spans], torch.Tensor]

    @classmethod
    def of(
        cls,
        convolve: Callable[..., Any],
        delta_rule: Callable[..., Any],
        space: Callable[..., Any],
        scan: Callable[..., Any],
    ) -> StateKernels:
        """From kernels, or their references, that take the fields of a call as their arguments."""
        return cls(_by_fields(convolve), _by_fields(delta_rule), _by_fields(space), _by_fields(scan))


def _by_fields(kernel: Callable[..., torch.Tensor]) -> Callable[[Any, torch.Tensor, Spans], torch.Tensor]:
    names = [name for name in inspect.signature(kernel).parameters if name not in ("states", "spans")]

    def run(call: Any, states: torch.Tensor, spans: Spans) -> torch.Tensor:
        return kernel(**{name: getattr(call, name) for name in names}, states=states, spans=spans)

    return run


class StateStep:
    """A ``StateContext``: hands each call of the pass its states."""

    def __init__(self, spans: Spans, storage: StateStorage, kernels: StateKernels) -> None:
        self.spans = spans
        self.storage = storage
        self.kernels = kernels
        self.calls = 0

    def convolve(self, call: Convolution) -> torch.Tensor:
        return self.kernels.convolve(call, self._states(call), self.spans)

    def delta_rule(self, call: DeltaRule) -> torch.Tensor:
        return self.kernels.delta_rule(call, self._states(call), self.spans)

    def state_space(self, call: StateSpace) -> torch.Tensor:
        return self.kernels.state_space(call, self._states(call), self.spans)

    def selective_scan(self, call: SelectiveScan) -> torch.Tensor:
        return self.kernels.selective_scan(call, self._states(call), self.spans)

    def _states(self, call: Call) -> torch.Tensor:
        each, given = shape_of(call), call.v if isinstance(call, DeltaRule) else call.x
        self.calls += 1
        dtype = torch.float32 if each.exact else given.dtype
        return self.storage.of(self.calls - 1, each.shape, dtype, given.device)


def shape_of(call: Call) -> StateShape:
    if isinstance(call, Convolution):
        return StateShape("convolution", (call.weight.shape[1] - 1, call.weight.shape[0]), exact=False)
    if isinstance(call, DeltaRule):
        return StateShape("delta rule", (call.v.shape[1], call.q.shape[2], call.v.shape[2]), exact=True)
    if isinstance(call, SelectiveScan):
        return StateShape("selective scan", (call.x.shape[1], call.b.shape[1]), exact=True)
    return StateShape("state space", (*call.x.shape[1:], call.b.shape[2]), exact=True)


def in_triton() -> StateKernels:
    from ...kernels.triton import convolution_triton, delta_rule_triton, selective_scan_triton, state_space_triton

    return StateKernels.of(
        convolution_triton.short_convolution,
        delta_rule_triton.delta_rule,
        state_space_triton.state_space,
        selective_scan_triton.selective_scan,
    )


# -- without kernels -------------------------------------------------------------------------------------------------


def references() -> StateKernels:
    return StateKernels.of(
        convolution_torch.short_convolution,
        delta_rule_torch.delta_rule,
        state_space_torch.state_space,
        selective_scan_torch.selective_scan,
    )


def in_torch() -> StateKernels:
    """Rows of one token side by side; longer spans one after the other, through the model's own functions.

    Those of convolutions and of selective scans take no state to begin with: their references run over each span.
    """
    plain = references()

    return StateKernels(
        _rows_then_spans(plain.convolve, plain.convolve),
        _rows_then_spans(plain.delta_rule, _each_by(own_delta_rule)),
        _rows_then_spans(plain.state_space, _each_by(own_state_space)),
        _rows_then_spans(plain.selective_scan, plain.selective_scan),
    )


def _rows_then_spans(
    side_by_side: Callable[..., torch.Tensor], apart: Callable[..., torch.Tensor]
) -> Callable[..., Any]:
    def run(call: Any, states: torch.Tensor, spans: Spans) -> torch.Tensor:
        lengths = spans.begin.diff()
        rows = int((lengths != 1).int().argmax()) if (lengths != 1).any() else len(spans)
        if rows == len(spans):
            return side_by_side(call, states, spans)
        if not rows:
            return apart(call, states, spans)
        few, others = spans.divided(rows)
        made = side_by_side(_part(call, slice(None, rows)), states, few)
        return torch.cat([made, apart(_part(call, slice(rows, None)), states, others)])

    return run


_OF_TOKENS = {
    Convolution: ("x",),
    DeltaRule: ("q", "k", "v", "decay", "beta"),
    StateSpace: ("x", "dt", "b", "c"),
    SelectiveScan: ("x", "dt", "b", "c", "z"),
}


def _part(call: Any, tokens: slice) -> Any:
    given = {name: getattr(call, name) for name in _OF_TOKENS[type(call)]}
    return replace(call, **{name: each[tokens] for name, each in given.items() if each is not None})


def _each_by(own: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
    def run(call: Any, states: torch.Tensor, spans: Spans) -> torch.Tensor:
        begin, made = spans.begin.tolist(), []
        for span, (source, target) in enumerate(zip(spans.source.tolist(), spans.target.tolist(), strict=True)):
            before = states[source].clone() if source >= 0 else None
            out, left = own(call, slice(begin[span], begin[span + 1]), before)
            made.append(out)
            if target >= 0:
                states[target] = left
        return torch.cat(made)

    return run
