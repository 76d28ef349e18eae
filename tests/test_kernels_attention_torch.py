"""Attention in parts against softmax written out in float64: every shape, every option, and merging it all again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_batchllm.kernels.reference import attention_parts_torch
from hf_batchllm.kernels.reference.attention_parts_torch import apply_sinks, attend, attend_each, merge_part, write_kv

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
HEADS = [(1, 1), (2, 2), (4, 2), (6, 2), (8, 1), (5, 5), (12, 3)]  # query heads, KV heads
DIMS = [(16, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 16), (16, 40), (192, 128)]
SIZES = [1, 1, 2, 3, 7, 16, 33, 64, 130]
MANY_KEYS = 1100  # kernels go through keys in blocks, 512 at a time or so: masks that hide whole blocks are special


def reference(
    q: torch.Tensor,  # [rows, heads, qk_dim]
    k: torch.Tensor,  # [keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [keys, kv_heads, v_dim]
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Output [rows, heads, v_dim] and LSE [rows, heads]: one softmax for each row and head, in float64."""
    queries, keys, values = (tensor.double().numpy() for tensor in (q, k, v))
    rows, heads = queries.shape[:2]
    group = heads // keys.shape[1]
    out, lse = np.zeros((rows, heads, values.shape[-1])), np.full((rows, heads), -np.inf)
    sees = np.ones((rows, len(keys)), bool) if mask is None else mask.numpy().copy()
    if causal:
        sees &= np.arange(len(keys)) <= np.arange(rows)[:, None]
    for row in range(rows):
        seen = sees[row]
        if not seen.any():
            continue
        for head in range(heads):
            scores = keys[seen, head // group] @ queries[row, head] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            lse[row, head] = top + math.log(total)
            if sinks is not None:
                total += math.exp(float(sinks[head]) - top)
            out[row, head] = weights @ values[seen, head // group] / total
    return out, lse


def assert_close(got: torch.Tensor, want: np.ndarray, dtype: torch.dtype, what: str) -> None:
    """Within the tolerance as a whole, and nothing far off anywhere."""
    assert got.shape == want.shape
    found = got.double().numpy()
    assert np.array_equal(np.isneginf(found), np.isneginf(want)), f"{what}: other rows see nothing"
    finite = ~np.isneginf(want)
    assert np.isfinite(found[finite]).all(), f"{what}: not finite"
    error = np.linalg.norm(found[finite] - want[finite])
    size = np.linalg.norm(want[finite])
    assert error <= TOLERANCE[dtype] * max(size, 1e-3), f"{what}: relative error {error / max(size, 1e-3):.2e}"


class Case:
    """A random problem: some options of each kind, strided inputs such as views of a fused projection are."""

    def __init__(self, seed: int, *, each: bool = False, causal: bool | None = None) -> None:
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.rng = rng
        self.dtype = torch.bfloat16 if seed % 3 == 2 else torch.float32
        self.heads, self.kv_heads = HEADS[rng.integers(len(HEADS))]
        self.qk_dim, self.v_dim = DIMS[rng.integers(len(DIMS))]
        self.causal = bool(rng.integers(2)) if causal is None else causal
        self.rows = int(SIZES[rng.integers(len(SIZES))])
        self.keys = self.rows if self.causal else int(rng.choice([*SIZES, MANY_KEYS] if self.rows < 20 else SIZES))
        self.scale = float(self.qk_dim**-0.5 * rng.choice([0.5, 1.0, 1.0, 1.7]))
        self.softcap = float(rng.choice([2.0, 30.0])) if rng.random() < 0.3 else None
        self.sinks = torch.randn(self.heads, generator=generator).to(self.dtype) if rng.random() < 0.3 else None
        self.mask = None
        if rng.random() < 0.5:
            self.mask = torch.rand(self.rows, self.keys, generator=generator) < rng.choice([0.2, 0.5, 0.9])
            self.mask[torch.rand(self.rows, generator=generator) < 0.2] = False  # rows that see nothing
            if rng.random() < 0.5:  # as under a sliding window: the first keys are hidden from later rows
                first = torch.from_numpy(np.sort(rng.integers(0, self.keys + 1, self.rows)))
                self.mask = torch.arange(self.keys) >= first[:, None]
        self._generator = generator
        own = (self.rows,) if each else ()
        self.q = self.random(self.rows, self.heads, self.qk_dim)
        self.k = self.random(*own, self.keys, self.kv_heads, self.qk_dim)
        self.v = self.random(*own, self.keys, self.kv_heads, self.v_dim)

    def random(self, *shape: int) -> torch.Tensor:
        """Normal noise, laid out as heads before tokens: what transformers hands over is a transposed view."""
        swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        return torch.randn(swapped, generator=self._generator).to(self.dtype).transpose(-3, -2)

    def expected(self, sinks: bool = False) -> tuple[np.ndarray, np.ndarray]:
        kwargs = {"causal": self.causal, "mask": self.mask, "softcap": self.softcap}
        return reference(self.q, self.k, self.v, self.scale, **kwargs, sinks=self.sinks if sinks else None)


@pytest.mark.some_cases
@pytest.mark.parametrize("dense_scores", [1 << 25, 64])
@pytest.mark.parametrize("block", range(10))
def test_attend(block: int, dense_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_parts_torch, "_DENSE_SCORES", dense_scores)
    for seed in range(15 * block, 15 * block + 15):
        case = Case(seed)
        out, lse = attend(case.q, case.k, case.v, case.scale, causal=case.causal, mask=case.mask, softcap=case.softcap)
        want, want_lse = case.expected()
        assert_close(out, want, case.dtype, f"output of case {seed}")
        assert_close(lse, want_lse, case.dtype, f"LSE of case {seed}")
        assert bool((out[torch.from_numpy(np.isneginf(want_lse))] == 0).all())
        if case.sinks is not None:
            out, lse = out.float(), lse.float()
            apply_sinks(out, lse, case.sinks)
            assert_close(out, case.expected(sinks=True)[0], case.dtype, f"case {seed} with sinks")


@pytest.mark.some_cases
@pytest.mark.parametrize("block", range(5))
def test_attend_each(block: int) -> None:
    for seed in range(1000 + 20 * block, 1000 + 20 * block + 20):
        case = Case(seed, each=True, causal=False)
        out, lse = attend_each(case.q, case.k, case.v, case.scale, mask=case.mask, softcap=case.softcap)
        for row in range(case.rows):
            mask = case.mask[row : row + 1] if case.mask is not None else None
            want, want_lse = reference(
                case.q[row : row + 1], case.k[row], case.v[row], case.scale, mask=mask, softcap=case.softcap
            )
            assert_close(out[row : row + 1], want, case.dtype, f"output of case {seed}, row {row}")
            assert_close(lse[row : row + 1], want_lse, case.dtype, f"LSE of case {seed}, row {row}")
            assert np.isfinite(want_lse).all() or bool((out[row] == 0).all())


@pytest.mark.parametrize("block", range(5))
def test_keys_in_parts_merge_to_one_pass(block: int) -> None:
    """Parts in any order, rows of which see nothing of some parts; the first is one of which all see something."""
    for seed in range(2000 + 20 * block, 2000 + 20 * block + 20):
        case = Case(seed, causal=False)
        if case.mask is not None:
            case.mask[:, case.keys // 2] = True
        cuts = np.sort(case.rng.integers(0, case.keys + 1, case.rng.integers(0, 6)))
        parts = [(a, b) for a, b in zip([0, *cuts], [*cuts, case.keys], strict=True) if a < b]
        case.rng.shuffle(parts)
        parts.sort(key=lambda part: not part[0] <= case.keys // 2 < part[1])  # stable: the rest stays shuffled
        out, lse = torch.zeros(0), torch.zeros(0)
        for begin, end in parts:
            mask = case.mask[:, begin:end] if case.mask is not None else None
            part, part_lse = attend(
                case.q, case.k[begin:end], case.v[begin:end], case.scale, mask=mask, softcap=case.softcap
            )
            if not len(lse):
                out, lse = part.float(), part_lse.float()
            else:
                merge_part(out, lse, part, part_lse)
        want, want_lse = case.expected()
        assert_close(out, want, case.dtype, f"output of case {seed}")
        assert_close(lse, want_lse, case.dtype, f"LSE of case {seed}")
        if case.sinks is not None:
            apply_sinks(out, lse, case.sinks)
            assert_close(out, case.expected(sinks=True)[0], case.dtype, f"case {seed} with sinks")


@pytest.mark.parametrize("seed", range(20))
def test_slots_anywhere_in_the_cache(seed: int) -> None:
    """K and V written to scattered slots are found there; every other slot stays as it was."""
    case = Case(3000 + seed, causal=True)
    slots = torch.from_numpy(case.rng.permutation(3 * case.keys)[: case.keys])
    caches = [torch.full((3 * case.keys, *new.shape[1:]), float("nan"), dtype=case.dtype) for new in (case.k, case.v)]
    write_kv(case.k, case.v, caches[0], caches[1], slots)
    k, v = (cached[slots] for cached in caches)
    assert torch.equal(k, case.k) and torch.equal(v, case.v)
    for cached in caches:
        cached[slots] = float("nan")
        assert bool(cached.isnan().all())
    out, lse = attend(case.q, k, v, case.scale, causal=True, mask=case.mask, softcap=case.softcap)
    want, want_lse = case.expected()
    assert_close(out, want, case.dtype, "output")
    assert_close(lse, want_lse, case.dtype, "LSE")


def test_a_part_that_a_row_sees_nothing_of_changes_nothing() -> None:
    out, lse = torch.randn(3, 2, 8), torch.tensor([[0.0, -80.0], [300.0, 1.0], [-300.0, 5.0]])
    before = out.clone(), lse.clone()
    merge_part(out, lse, torch.zeros(3, 2, 8), torch.full((3, 2), -math.inf))
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])


def test_parts_of_very_different_weight_merge_without_overflow() -> None:
    out, lse = torch.ones(1, 2, 4), torch.tensor([[-500.0, 500.0]])
    merge_part(out, lse, 3 * torch.ones(1, 2, 4), torch.tensor([[500.0, -500.0]]))
    assert torch.equal(out[0, 0], torch.full((4,), 3.0)) and torch.equal(out[0, 1], torch.ones(4))
    assert torch.equal(lse, torch.tensor([[500.0, 500.0]]))
