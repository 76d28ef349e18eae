"""Shared by the random decode and prefill cases: kinds of kernels, tensors, and the computation by hand.

Whatever no row may see is NaN in the caches, and all outputs are NaN before a kernel runs: a key that should not have
been read shows, and so does an element that was left out, or written though nothing belongs there. A kernel is held
against its reference in float64, and both against a computation that knows nothing of work lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

NAN = float("nan")
# The error's norm by the result's, over all rows; of a single row it may be twice that.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
GUARD = 16  # rows before and behind each output that nobody may touch
Entries = list[tuple[int, int, int]]  # page, tokens, position of the first


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return 1.3 * self.qk_dim**-0.5

    def __str__(self) -> str:
        said = f"{self.heads}/{self.kv_heads}x{self.qk_dim}"
        said += f"/{self.v_dim}" if self.v_dim != self.qk_dim else ""
        said += f" page {self.page} {str(self.dtype).removeprefix('torch.')}"
        said += f" window {self.window}" if self.window else ""
        return said + (" softcap" if self.softcap else "") + (" sinks" if self.sinks else "")


@dataclass
class Tensors:
    q: torch.Tensor  # [rows, heads, qk_dim]
    k: torch.Tensor  # [pages, page, kv_heads, qk_dim]
    v: torch.Tensor  # [pages, page, kv_heads, v_dim]
    sinks: torch.Tensor | None  # [heads] float32

    def to(self, to: str | torch.dtype) -> Tensors:
        """On another device, or in another dtype (which sinks have of their own)."""
        sinks = self.sinks.to(to) if self.sinks is not None and isinstance(to, str) else self.sinks
        return Tensors(self.q.to(to), self.k.to(to), self.v.to(to), sinks)


class PageList:
    """Hands out page numbers, each once."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0

    def take(self, start: int, tokens: int, *, whole: bool = False) -> Entries:
        """Pages for so many positions from ``start`` on; ``whole``: the last one may still be grown into."""
        taken = []
        for at in range(0, tokens, self.size):
            taken.append((self.count, self.size if whole else min(self.size, tokens - at), start + at))
            self.count += 1
        return taken


def columns(entries: Entries) -> np.ndarray:  # [entries, 3]
    return np.array(entries, dtype=np.int64).reshape(-1, 3)


def tokens_of(entries: np.ndarray, page: int) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of each token of some entries."""
    nth = np.arange(page)[None] + np.zeros_like(entries[:, :1])
    inside = nth < entries[:, 1:2]
    return (entries[:, 0:1] * page + nth)[inside], (entries[:, 2:3] + nth)[inside]


def random_tensors(
    rng: np.random.Generator, variant: Variant, rows: int, written: np.ndarray, device: str
) -> Tensors:  # written: [slots] bool
    generator = torch.Generator(device).manual_seed(int(rng.integers(1 << 30)))
    unwritten = torch.from_numpy(~written).to(device)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(variant.dtype)

    def cache(dim: int) -> torch.Tensor:
        values = draw(len(written), variant.kv_heads, dim)
        values[unwritten] = NAN
        return values.view(-1, variant.page, variant.kv_heads, dim)

    sinks = torch.linspace(-1, 2, variant.heads, device=device) if variant.sinks else None
    return Tensors(draw(rows, variant.heads, variant.qk_dim), cache(variant.qk_dim), cache(variant.v_dim), sinks)


def reference(
    q: torch.Tensor,  # [rows, heads, qk_dim] float64, as are k and v
    k: torch.Tensor,  # [keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [keys, kv_heads, v_dim]
    seen: torch.Tensor,  # [rows, keys]
    variant: Variant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # [rows, heads, v_dim]
    """Softmax attention, spelled out. Each row sees something, or there are no keys at all."""
    if len(k) == 0:
        return q.new_zeros(len(q), variant.heads, variant.v_dim)
    grouped = q.unflatten(1, (variant.kv_heads, variant.group))
    scores = torch.einsum("rhgd,khd->rhgk", grouped, k) * variant.scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(variant.kv_heads, variant.group, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("rhgk,khd->rhgd", weights, v).flatten(1, 2)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> float:
    """The norm of the error by that of ``want``, for what is not NaN."""
    assert (got.isnan() == want.isnan()).all(), f"{what}: an element was left out, or another one written"
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    error = got - want
    whole = float(error.norm() / want.norm().clamp(min=1e-300))
    assert whole <= TOLERANCE[dtype], f"{what}: off by {whole}"
    rows = error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp(min=1e-300)
    assert not rows.numel() or rows.max() <= 2 * TOLERANCE[dtype], f"{what}: row {int(rows.argmax())} by {rows.max()}"
    return whole
