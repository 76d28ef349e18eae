"""Whether a kernel gives what its reference in PyTorch gives, up to what rounding may do."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

# Parts of the whole that rounding may move: a wrong kernel is wrong by far more.
NEAR = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-4}
Cases = dict[str, Callable[[], None]]


class Wrong(Exception):
    """A kernel's result is not its reference's. The message says by how much."""


@dataclass(frozen=True)
class Where:
    """Where kernels run, with random numbers that are the same each time."""

    device: torch.device

    @property
    def half(self) -> torch.dtype:
        """The type of most cases; Triton's interpreter does not multiply bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float16

    def generator(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(0)

    def random(self, generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return made.to(self.device, self.half if dtype is None else dtype)

    def drawn(self, exact: Collection[str] = (), **shapes: tuple[int, ...]) -> dict[str, Any]:
        """Random tensors of these shapes, drawn in this order; those of ``exact`` are in float32."""
        generator = self.generator()
        types = {name: torch.float32 if name in exact else self.half for name in shapes}
        return {name: self.random(generator, *shape, dtype=types[name]) for name, shape in shapes.items()}


def card_of(device: torch.device) -> str:
    """What verdicts are kept by: the name of a card, and its compute capability."""
    card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return "CPU" if card is None else f"{card.name}, {card.major}.{card.minor}"


@cache
def both(home: str) -> tuple[Any, Any]:
    """The module with these kernels, and the one with their references."""
    kernels, references = (
        import_module(f"..kernels.{kind}", __package__) for kind in (f"triton.{home}_triton", f"reference.{home}_torch")
    )
    return kernels, references


def held(
    home: str,
    run: str | Callable[..., Any],
    *given: Any,
    like: torch.dtype | None = None,
    exact: bool = False,
    but: int = 0,
    **named: Any,
) -> Any:
    """Hold kernels of a module against their references. Gives the kernels' result, if it is as it should be.

    ``run``: a function of both modules, or one that is given the module first. Each way has a copy of what is given.
    Afterwards all tensors are compared: those of the result, and those that were given and may have been written to.
    Whole numbers are to be the same; with ``exact``, all are. ``like`` is ``near``'s, and ``but`` is ``same``'s.
    """
    ways = []
    for module in both(home):
        mine, options = deepcopy((given, named))
        call = getattr(module, run) if isinstance(run, str) else partial(run, module)
        ways.append({"the result": call(*mine, **options), "given": mine} | options)
    ours, references = (dict(_tensors_in(way)) for way in ways)
    for name, reference in references.items():
        if exact or not reference.is_floating_point():
            same(ours[name], reference, name, but)
        else:
            near(ours[name], reference, name, like)
    return ways[0]["the result"]


def _tensors_in(given: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(given, torch.Tensor):
        yield name, given
    elif isinstance(given, dict | list | tuple) or is_dataclass(given):
        fields = given if isinstance(given, dict) else vars(given) if is_dataclass(given) else dict(enumerate(given))
        for field, each in fields.items():
            yield from _tensors_in(each, f"{name} {field}".strip())


def near(ours: torch.Tensor, wanted: torch.Tensor, what: str = "the result", like: torch.dtype | None = None) -> None:
    """``like``: the type whose rounding went into the results, by default their own."""
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        raise Wrong(f"{what} is {ours.dtype} {list(ours.shape)}, the reference's {wanted.dtype} {list(wanted.shape)}")
    found, right = ours.double().cpu(), wanted.double().cpu()
    finite = right.isfinite()
    alike = torch.where(finite, found.isfinite(), (found == right) | (found.isnan() & right.isnan()))
    if not bool(alike.all()):
        odd, also_odd = (int((~each.isfinite()).sum()) for each in (found, right))
        raise Wrong(f"{odd} values of {what} are no numbers, and {also_odd} of the reference's")
    error = float((found - right)[finite].norm() / right[finite].norm().clamp_min(1e-30))
    allowed = NEAR[like or ours.dtype]
    if not error <= allowed:
        raise Wrong(f"{what} is off by {error:.1e} of the reference's; {allowed:.0e} is allowed")


def same(ours: torch.Tensor, wanted: torch.Tensor, what: str = "the result", but: int = 0) -> None:
    """``but``: so many values may differ, where two candidates may be equally good."""
    if ours.shape != wanted.shape:
        raise Wrong(f"{what} is {list(ours.shape)}, the reference's {list(wanted.shape)}")
    different = int((ours.cpu() != wanted.cpu()).sum())
    if different > but:
        raise Wrong(f"{different} of {ours.numel()} values of {what} are not the reference's")


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels. The environment variable is read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
