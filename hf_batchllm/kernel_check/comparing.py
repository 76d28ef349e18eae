"""Whether two results are the same, up to what rounding may do."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

# Parts of the whole that rounding may move: a wrong kernel is wrong by far more.
NEAR = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-4}


class Wrong(Exception):
    """A kernel's result is not its twin's. The message says by how much."""


@dataclass(frozen=True)
class Where:
    """Where kernels run, with random numbers that are the same each time."""

    device: torch.device
    seed: int = 0

    @property
    def half(self) -> torch.dtype:
        """The type of most cases; Triton's interpreter does not multiply bfloat16."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float16

    def generator(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self.seed)

    def random(self, generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return made.to(self.device, self.half if dtype is None else dtype)


def near(ours: torch.Tensor, twins: torch.Tensor, what: str = "the result", like: torch.dtype | None = None) -> None:
    """``like``: the type whose rounding went into the results, by default their own."""
    if ours.shape != twins.shape or ours.dtype != twins.dtype:
        raise Wrong(f"{what} is {ours.dtype} {list(ours.shape)}, the twin's {twins.dtype} {list(twins.shape)}")
    wide, wanted = ours.double().cpu(), twins.double().cpu()
    if bool((wide.isnan() != wanted.isnan()).any()):
        odd, twins_odd = int(wide.isnan().sum()), int(wanted.isnan().sum())
        raise Wrong(f"{odd} values of {what} are no numbers, and {twins_odd} of the twin's")
    wide, wanted = wide.nan_to_num(), wanted.nan_to_num()
    error = float((wide - wanted).norm() / wanted.norm().clamp_min(1e-30))
    allowed = NEAR[like or ours.dtype]
    if not error <= allowed:
        raise Wrong(f"{what} is off by {error:.1e} of the twin's; {allowed:.0e} is allowed")


def same(ours: torch.Tensor, twins: torch.Tensor, what: str = "the result", but: int = 0) -> None:
    """``but``: so many values may differ, where two candidates may be equally good."""
    if ours.shape != twins.shape:
        raise Wrong(f"{what} is {list(ours.shape)}, the twin's {list(twins.shape)}")
    different = int((ours.cpu() != twins.cpu()).sum())
    if different > but:
        raise Wrong(f"{different} of {ours.numel()} values of {what} are not the twin's")


def is_interpreted() -> bool:
    """As Triton reads its environment variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
