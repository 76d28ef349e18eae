"""Passes of a model over made-up tokens, in an attention in which tokens do not see each other.

So whatever else brings tokens together shows in the logits. The model is left as it was: its attention, its mode, its
small buffers, the random numbers of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...kernels.lists.spans import Spans
from ...patches.attention_interface import (
    ATTENTION_NAME,
    CACHE_NAME,
    AttentionCall,
    AttentionContext,
    attention_context,
)
from ...patches.attention_swap import AttentionSwap
from ...patches.mask_probe import MASK_PROBE_NAME
from ...patches.state_functions import (
    Convolution,
    DeltaRule,
    SelectiveScan,
    StateContext,
    StateFunctions,
    StateSpace,
    state_context,
)
from ...patches.uncompiled import Uncompiled
from ...planning.requests_and_prefixes import NO_SLOT
from ..states.state_step import Call, references, shape_of

Row = Sequence[tuple[int, int]]  # tokens, each with its position
_SMALL = 1 << 16  # numbers in a buffer: ranges that were observed, statistics; not quantised weights


@contextmanager
def each_by_itself(
    model: PreTrainedModel, modules: Sequence[nn.Module], attention: str = ATTENTION_NAME
) -> Iterator[None]:
    """While the block runs, the model runs with an attention in which tokens do not see each other."""
    takes_masks = attention == MASK_PROBE_NAME  # then it runs with a cache, which carries states
    states = None if takes_masks else _StatesEachByItself()
    with (
        random_numbers_kept(model),
        attended_by(model, modules, attention, _EachByItself(takes_masks), states),
        _buffers_kept(modules),
    ):
        yield


@contextmanager
def attended_by(
    model: nn.Module,
    modules: Sequence[nn.Module],
    attention: str,
    context: AttentionContext,
    states: StateContext | None,
) -> Iterator[None]:
    """While the block runs, ``context`` attends in the model, ``states`` carries its states. Nothing is compiled."""
    with (
        torch.no_grad(),
        AttentionSwap(model).applied(attention),
        Uncompiled(modules).applied(),
        StateFunctions(model).applied(),
        attention_context(context),
        state_context(states),
    ):
        yield


def random_numbers_kept(model: PreTrainedModel) -> AbstractContextManager[None]:
    """While the block runs, torch's random numbers go on from where they are; then they are there again."""
    return torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else [])


@contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.__dict__["training"] = False
        yield
    finally:
        for module in training:
            module.__dict__["training"] = True


@contextmanager
def _buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Code that observes its input notes nothing of made-up tokens."""
    held = [(module._buffers, name, each) for module in modules for name, each in module._buffers.items()]
    small = [entry for entry in held if entry[2] is not None and entry[2].numel() <= _SMALL and not entry[2].is_meta]
    before = [(buffers, name, each, each.clone()) for buffers, name, each in small if each is not None]
    try:
        yield
    finally:
        for buffers, name, buffer, values in before:
            # One that was put in its place may belong with what else the code has noted: how far its table goes.
            same = buffers.get(name) is buffer and buffer.shape == values.shape
            if same and not torch.equal(buffer, values):
                with torch.inference_mode() if buffer.is_inference() else nullcontext():
                    buffer.copy_(values)


class _EachByItself:
    """Attention in which a token sees itself alone, at its position."""

    def __init__(self, takes_masks: bool) -> None:
        self.takes_masks = takes_masks
        self.calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:  # [tokens, heads, v_dim]
        self.calls += 1
        # A product of q and k would not show the position: both are rotated alike.
        shares, tokens = call.q.shape[1] // call.k.shape[1], call.q.shape[0]
        # With a cache, keys and values of earlier tokens stand before those of these tokens.
        keys, values = (each[-tokens:].repeat_interleave(shares, dim=1) for each in (call.k, call.v))
        of_q, of_k = (each.float().cumsum(-1).mean(-1, keepdim=True).tanh() for each in (call.q, keys))
        return values * (1 + (of_q + of_k) * _of_settings(call)).to(values.dtype)


class _StatesEachByItself:
    """Each token begins with no state, and leaves none."""

    def __init__(self) -> None:
        self._kernels = references()

    def convolve(self, call: Convolution) -> torch.Tensor:
        return self._kernels.convolve(call, *_nothing_kept(call, call.x))

    def delta_rule(self, call: DeltaRule) -> torch.Tensor:
        return self._kernels.delta_rule(call, *_nothing_kept(call, call.v))

    def state_space(self, call: StateSpace) -> torch.Tensor:
        return self._kernels.state_space(call, *_nothing_kept(call, call.x))

    def selective_scan(self, call: SelectiveScan) -> torch.Tensor:
        return self._kernels.selective_scan(call, *_nothing_kept(call, call.x))


def _nothing_kept(call: Call, given: torch.Tensor) -> tuple[torch.Tensor, Spans]:
    each, nowhere = shape_of(call), [NO_SLOT] * len(given)
    dtype = torch.float32 if each.exact else given.dtype
    states = torch.zeros((0, *each.shape), dtype=dtype, device=given.device)
    return states, Spans.of([1] * len(given), nowhere, nowhere, given.device)


def _of_settings(call: AttentionCall) -> float:
    """So that another scale or window shows. One for those that are usual."""
    of_scale: float = call.scale * call.q.shape[-1] ** 0.5
    return min(max(of_scale, 0.1), 10.0) * (1 + float(call.window or 0) % 97 / 97)


class MadeUp:
    """Tokens that a model knows, drawn at random, in the same order each time."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        stated: int = model.config.get_text_config(decoder=True).vocab_size
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
        self._vocabulary = min(stated, rows) if isinstance(rows, int) else stated

    def tokens(self, count: int) -> list[int]:
        return self._below(self._vocabulary, count)

    def places(self, below: int, count: int) -> list[int]:
        return torch.randperm(below, generator=self._generator, device="cpu")[:count].tolist()

    def row(self, count: int, below: int) -> list[tuple[int, int]]:
        """Tokens at positions below that number."""
        return list(zip(self.tokens(count), self._below(below, count), strict=True))

    def _below(self, number: int, count: int) -> list[int]:
        found: list[int] = torch.randint(number, (count,), generator=self._generator, device="cpu").tolist()
        return found


def logits_of(
    model: Any, tokens: Sequence[int], positions: Sequence[int], use_cache: bool = False, **more: Any
) -> torch.Tensor:
    ids, at = (torch.tensor([[*each]], device=model.device) for each in (tokens, positions))
    output = model(input_ids=ids, position_ids=at, use_cache=use_cache, return_dict=True, **more)
    logits: torch.Tensor = output.logits[0]
    return logits  # [tokens, vocabulary]


def logits_after(model: PreTrainedModel, past: int, row: Row, made_up: MadeUp) -> torch.Tensor:  # [tokens, vocabulary]
    """The logits that ``generate`` computes: with a cache, in which ``past`` tokens are."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    given: dict[str, Any] = {"use_cache": True, CACHE_NAME: cache}
    if past:
        logits_of(model, made_up.tokens(past), range(past), **given)
    tokens, positions = zip(*row, strict=True)
    return logits_of(model, tokens, positions, **given)
