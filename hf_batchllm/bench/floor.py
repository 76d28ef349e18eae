"""The floor: the least time that a run can take, from what it must compute and read and from two rates of the machine.

Computed at the rate of large matrix products: those of all prompt tokens that differ, of all decode rows and of the LM
head, and the prompts' attention. Read at the rate of a large copy: K and V of each decode step, a shared prefix once
for its group; states, for each decode token and where a prompt ends; and weights, where reading them takes longer than
the products. If nothing is shared, prompts come first, and this is asked of each decode step; otherwise of the whole
run, with one step for the prompts and one for each further token of the longest answer. Norms, rope, activations and
launches are not part of it.

A step of a mixture of experts reads the weights that all tokens meet, and those of each expert that a row chooses. With
a share p of all tokens choosing an expert, r rows all pass it by with probability (1 - p)^r. Shares are counted over
tokens of the run. Answers' tokens resemble each other, so real steps meet somewhat more: the floor is rather too low.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..model.inspection.architecture import inspect_model
from ..model.states.state_layers import ATTENDING, BOTH
from ..patches.fusable_experts import mixtures
from ..patches.state_functions import mixers
from .workload import PromptGroup

T = TypeVar("T")


def free_memory(device: torch.device) -> None:
    """Frees what earlier runs have left in memory, and waits for the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], T], free: bool = True) -> tuple[float, T]:
    """Seconds that ``work`` takes, with memory freed beforehand unless told otherwise, and what it returns."""
    if free:
        free_memory(device)
    began, value = time.perf_counter(), work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, value


@dataclass(frozen=True)
class Rates:
    operations: float  # per second, of large matrix products back to back
    copy: float  # bytes read and written per second, by a large copy

    def __str__(self) -> str:
        tera = (f"{float(f'{rate / 1e12:.3g}'):,g}" for rate in (self.operations, self.copy))
        return "{} TFLOP/s and {} TB/s".format(*tera)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Both rates. A GPU slows down once its power budget is spent: that rate counts, hence the warm-up."""
    on_gpu = device.type == "cuda"
    rows, narrow, wide, seconds, count = (4096, 4096, 14336, 2.0, 50) if on_gpu else (512, 1024, 2816, 0.3, 1)
    inputs = torch.randn(rows, narrow, device=device, dtype=dtype)
    there = torch.randn(narrow, wide, device=device, dtype=dtype) / narrow**0.5
    back = torch.randn(wide, narrow, device=device, dtype=dtype) / wide**0.5

    def some() -> None:
        for _ in range(count):
            (inputs @ there) @ back

    for _ in ("warm-up", "measured"):
        done, taken = 0, 0.0
        while taken < seconds:
            taken += timed(device, some, free=False)[0]
            done += count
    return Rates(done * 4 * rows * narrow * wide / taken, copy_rate(device))


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    size = min(1 << 31, torch.cuda.mem_get_info(device)[0] // 4) if device.type == "cuda" else 1 << 27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = source.clone()
    return 10 * 2 * size / timed(device, lambda: [target.copy_(source) for _ in range(10)])[0]


class NoFloorError(ValueError):
    """The floor's arithmetic does not hold for this model."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer."""

    experts: int
    top: int  # experts that a token meets
    weights: int  # of the matrices of one expert
    shares: tuple[float, ...] = ()  # [experts]  of the tokens that meet each; empty: all alike

    def met(self, rows: np.ndarray) -> np.ndarray:  # [steps] -> [steps]
        """How many experts steps of so many rows meet, on average: all but those that every row passes by."""
        shares = np.minimum(self.shares or (self.top / self.experts,) * self.experts, 1)
        return np.asarray((1 - (1 - shares) ** rows[:, None]).sum(1))


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that the floor needs."""

    heads: int
    head_dim: int
    head_weights: int  # of the LM head
    linear_weights: int  # of all layers, without embedding, LM head and experts
    kv_bytes: int  # of a token, over all layers that read them
    windows: tuple[int | None, ...]  # [layers]  keys that each layer sees; None: all
    value_bytes: int = 2
    mixtures: tuple[Mixture, ...] = ()  # of the layers that have one
    routed_tokens: int = 0  # of the run, over which their shares were counted; 0: all experts are taken to be alike
    state_bytes: int = 0  # that a sequence carries from token to token, in layers that do

    @property
    def met_weights(self) -> int:
        """Weights of all layers by which a token is multiplied."""
        return self.linear_weights + sum(mixture.top * mixture.weights for mixture in self.mixtures)

    def step_bytes(self, rows: np.ndarray) -> np.ndarray:  # [steps] -> [steps]
        """Weights that a step of so many rows reads, on average; without experts the number does not matter."""
        whole = np.full(len(rows), float(self.linear_weights + self.head_weights))
        return (whole + sum(each.weights * each.met(rows) for each in self.mixtures)) * self.value_bytes

    def experts_met(self, rows: np.ndarray) -> float:
        """How many experts of a layer a step meets, on average over layers and steps."""
        return float(np.mean([each.met(rows) for each in self.mixtures])) if self.mixtures and len(rows) else 0.0

    @classmethod
    def of(cls, model: Any) -> Shape:
        config, found = model.config.get_text_config(decoder=True), inspect_model(model)
        always, experts = _matrices(model)
        if not found.attention:
            raise NoFloorError("it has no layer that attends")
        heads = found.attention[0].heads  # queries and values may differ in width, and layers as well
        widths = sum(each.heads * (each.qk_dim + each.v_dim) for each in found.attention)
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        windows = [window if getattr(config, "use_sliding_window", True) else None] * found.layers
        if kinds:
            attend = [kind for kind in kinds if kind in ATTENDING | BOTH]
            windows = [window if kind == "sliding_attention" else None for kind in attend]
        return cls(
            heads=heads,
            head_dim=widths // (2 * heads * found.layers),
            head_weights=config.hidden_size * model.get_output_embeddings().weight.shape[0],
            linear_weights=always,
            kv_bytes=sum(each.kv_values for each in found.attention) * model.dtype.itemsize,
            windows=tuple(windows),
            value_bytes=model.dtype.itemsize,
            mixtures=tuple(experts.values()),
            state_bytes=found.slot_bytes,
        )


def _matrices(model: Any) -> tuple[int, dict[nn.Module, Mixture]]:
    """Weights that every token is multiplied by, without the LM head; and experts, by the module that is called."""
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    apart: set[nn.Module] = {head}  # and experts as modules of their own
    for name, each in modules.items():
        if isinstance(each, nn.ModuleList) and "expert" in name.rpartition(".")[2]:
            apart.update(each.modules())
    kinds = nn.Linear | Conv1D
    linear = [each.weight for each in modules.values() if isinstance(each, kinds) and each not in apart]
    # Short convolutions and the rates of a scan multiply each value a few times: next to nothing beside products.
    small: list[Any] = [each.weight for each in modules.values() if isinstance(each, nn.Embedding | nn.Conv1d)]
    small += [each.A_log for _, each, _ in mixers(model) if hasattr(each, "A_log")]
    always, found, known = sum(weight.numel() for weight in linear), {}, {head.weight, *small, *linear}
    config = model.config.get_text_config(decoder=True)
    tops = [getattr(config, name, None) for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")]
    for each in mixtures(model):
        matrices = [weight for weight in each.module.parameters() if weight.ndim == 3]
        routers = [int(router.rule(module).top) for _, module, router in each.routers]
        top = next((top for top in [*routers, *tops] if isinstance(top, int)), None)
        if not matrices or top is None:
            continue
        experts = len(matrices[0])
        found[each.module] = Mixture(experts, top, sum(weight.numel() for weight in matrices) // experts)
        known.update(each.module.parameters())
        for weight in [weight for child in each.parent.children() for weight in child.parameters()]:
            # A router's own matrix; or its biases as a matrix of one row.
            if weight.ndim == 2 and weight not in known and len(weight) in (experts, 1):
                known.add(weight)
                always += weight.numel() if len(weight) == experts else 0
    if any(weight not in known for weight in model.parameters() if weight.ndim > 1):
        raise NoFloorError(
            "not every token meets all of its matrices, and which ones it meets cannot be told: a mixture of experts "
            "that is not held as transformers holds it, or matrices that are no linear layers"
        )
    return always, found


@torch.no_grad()
def with_shares(shape: Shape, model: Any, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Shape:
    """``shape`` with the share of all tokens that each expert gets, counted over some of the prompts and answers.

    The model's own code runs, one sequence at a time. Tokens of answers count, as it is decode steps in which few rows
    meet few experts; those of prompts where no answer has a second token.
    """
    counts = [np.zeros(each.experts) for each in shape.mixtures]
    seen, first = [0] * len(counts), 0

    def count(nth: int, module: nn.Module, given: tuple[Any, ...]) -> None:
        chosen = given[1][first:].cpu()  # [tokens, top]
        counts[nth] += np.bincount(chosen.flatten(), minlength=len(counts[nth]))[: len(counts[nth])]
        seen[nth] += len(chosen)

    hooks = [each.register_forward_pre_hook(partial(count, nth)) for nth, each in enumerate(_matrices(model)[1])]
    left = 1 << 17 if model.device.type == "cuda" else 1 << 13  # tokens; and 128 sequences, from all over the list
    places = np.linspace(0, len(prompts) - 1, min(len(prompts), 128)).astype(int)
    try:
        for nth, place in enumerate(np.random.default_rng(0).permutation(places)):
            prompt, read = prompts[place], answers[place][:-1]  # the last token is never read
            left -= len(prompt) + len(answers[place])
            if nth and left < 0:
                break
            first = len(prompt) if read else 0
            model.get_decoder()(input_ids=torch.tensor([[*prompt, *read]], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(seen):
        return shape
    each = zip(shape.mixtures, counts, seen, strict=True)
    known = (replace(mixture, shares=tuple((met / tokens).tolist())) for mixture, met, tokens in each)
    return replace(shape, mixtures=tuple(known), routed_tokens=min(seen, default=0))


@dataclass(frozen=True)
class Floor:
    """The least time that a run can take, and what it must compute and read."""

    seconds: float
    products_seconds: float
    kv_seconds: float
    weights_seconds: float  # by which reading the weights exceeds the products
    prompt_tokens: int  # that differ
    decode_tokens: int
    operations: float  # of products and of the prompts' attention
    kv_bytes: float  # that decode steps read, each shared prefix once for its group; and states, read and written
    experts_met: float  # of a layer by a decode step, on average
    experts: int  # of a layer
    routed_tokens: int  # over which the share of each was counted
    rates: Rates


def floor_of(shape: Shape, groups: Sequence[PromptGroup], rates: Rates) -> Floor:
    linear, head = 2 * shape.met_weights, 2 * shape.head_weights  # operations of a token
    attention = kv = 0.0
    for group in groups:
        own, steps = np.asarray(group.own, dtype=float), np.asarray(group.new, dtype=float) - 1
        for window, count in Counter(shape.windows).items():
            pairs = _seen(group.shared, 0, window) + sum(_seen(each, group.shared, window) for each in own)
            attention += count * (4 * shape.heads * shape.head_dim) * pairs
            # The first token comes with the prompt.
            keys = sum(_seen(s, o, window) + s / 2 for s, o in zip(steps, own, strict=True))
            # The prefix is read while any member runs, as far back as the member with the fewest own tokens sees.
            longest, least = steps.max(), own.min()
            keys += _seen(longest, group.shared + least, window) - _seen(longest, least, window)
            kv += count * (shape.kv_bytes / len(shape.windows)) * keys
    prompt_tokens = sum(group.shared + sum(group.own) for group in groups)
    counts = np.concatenate([np.asarray(group.new) for group in groups]) - 1
    rows = np.array([(counts > step).sum() for step in range(counts.max(initial=0))])  # [steps]
    decode_tokens = int(counts.sum())
    # A state is read and written for each token by itself; and left where a prompt ends, and read where one goes on.
    left_and_read = sum(2 * len(group.new) + 1 if group.shared else len(group.new) for group in groups)
    kv += shape.state_bytes * (2 * decode_tokens + left_and_read)
    of_prompts = linear * prompt_tokens + attention + head * len(counts)
    # The fewest steps: all prompts in one, then one for each further token of the longest answer.
    reads = shape.step_bytes(np.array([prompt_tokens, *rows])) / rates.copy
    computes = np.array([of_prompts, *rows * (linear + head)]) / rates.operations
    alone = not any(group.shared for group in groups)
    short = reads - computes if alone else (reads.sum() - computes.sum())[None]
    operations, waiting = of_prompts + (linear + head) * decode_tokens, float(np.maximum(short, 0).sum())
    products, reading = operations / rates.operations, kv / rates.copy
    return Floor(
        seconds=products + reading + waiting,
        products_seconds=products,
        kv_seconds=reading,
        weights_seconds=waiting,
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        operations=operations,
        kv_bytes=kv,
        experts_met=shape.experts_met(rows),
        experts=max((mixture.experts for mixture in shape.mixtures), default=0),
        routed_tokens=shape.routed_tokens,
        rates=rates,
    )


def _seen(queries: float, before: float, window: int | None) -> float:
    """Keys seen by all of ``queries`` consecutive queries together, after ``before`` older tokens."""
    if window is None or before + queries <= window:
        return queries * before + queries * queries / 2
    growing = max(window - before, 0)
    return growing * before + growing * growing / 2 + (queries - growing) * window
