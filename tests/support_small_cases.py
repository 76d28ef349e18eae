"""Random cases of the small kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support_kernels import draw

NAN = float("nan")

# heads, kv_heads, dim, v_dim, rotary, the form of norms if there are any, that of the rotation, float32 tables,
# and what else is asked for
ROPE = [
    (32, 8, 128, 128, 128, "", "llama", False),
    (16, 8, 128, 128, 128, "llama", "llama", False),
    (4, 1, 256, 256, 256, "gemma", "llama", False),
    (14, 2, 64, 64, 64, "", "llama", True),
    (32, 32, 80, 80, 32, "", "llama", False),
    (6, 2, 96, 96, 96, "llama", "llama", False),
    (9, 3, 64, 64, 0, "", "llama", False),
    (5, 5, 192, 128, 64, "", "llama", True),
    (8, 4, 256, 256, 64, "gemma", "llama", False),
    (3, 1, 40, 24, 20, "llama", "llama", True),
    (8, 1, 64, 64, 64, "", "gpt_oss", False),
    (6, 3, 128, 128, 128, "", "cohere", False),
    (4, 2, 48, 48, 24, "olmo", "cohere", True),
    (4, 2, 96, 96, 24, "llama", "gpt_oss", False),
    (6, 2, 128, 128, 64, "", "glm", False),
    (8, 2, 96, 96, 64, "olmo", "llama", False, "v_norm"),
    (4, 2, 40, 40, 24, "llama", "ernie", True),
    (4, 1, 64, 40, 0, "olmo", "llama", False, "q_factor", "v_norm"),
    (8, 2, 128, 128, 128, "olmo", "llama", False, "q_factor", "v_norm"),
    (4, 2, 48, 48, 48, "", "ernie", False, "q_factor"),
]


def parts(merged: torch.Tensor, shape: tuple[Any, ...]) -> list[torch.Tensor]:
    """q, k and v as views of one tensor, as a merged projection leaves them."""
    heads, kv_heads, dim, v_dim = shape[:4]
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim)]
    pieces = merged.split([count * each for count, each in sizes], dim=1)
    return [piece.unflatten(1, size) for piece, size in zip(pieces, sizes, strict=True)]


def rope_case(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> dict[str, Any]:
    heads, kv_heads, dim, v_dim, rotary, norm, turn, wide, *more = shape
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, most))
    slots = rng.permutation(2 * tokens)[:tokens]
    slots[rng.random(tokens) < 0.2] = -1
    merged = draw(rng, tokens, heads * dim + kv_heads * (dim + v_dim), dtype=dtype)
    if rng.random() < 0.5:  # padding may hold anything
        merged[torch.from_numpy(slots < 0)] = NAN
    table = dtype if not wide else torch.float32
    width = rotary // 2 if turn == "gpt_oss" else rotary
    angle = torch.from_numpy(rng.uniform(-9, 9, (tokens, width)).astype(np.float32))
    if rng.random() < 0.5:  # as GPT-OSS has it
        angle = angle.T.contiguous().T
    given: dict[str, Any] = {
        "merged": merged,
        "cos": angle.cos().to(table) if rotary else None,
        "sin": angle.sin().to(table) if rotary else None,
        "k_cache": torch.full((2 * tokens, kv_heads, dim), NAN, dtype=dtype),
        "v_cache": torch.full((2 * tokens, kv_heads, v_dim), NAN, dtype=dtype),
        "slots": torch.from_numpy(slots),
        "q_out": torch.full((tokens, heads, dim), NAN, dtype=dtype) if rng.random() < 0.5 else None,
        "eps": 1e-5,
        "norm": norm or "llama",
        "turn": turn,
    }
    if norm:
        given |= {"q_weight": draw(rng, dim, dtype=dtype), "k_weight": draw(rng, dim, dtype=dtype)}
    if "q_factor" in more:
        given["q_factor"] = draw(rng, tokens, dtype=dtype)
    return given | {"v_norm": "v_norm" in more}


# hidden, residual, form, inner_weight, and what else is asked for
NORM = [
    (4096, True, "llama", False, ()), (4096, False, "llama", False, ()), (1024, True, "gemma", True, ()),
    (2560, True, "gemma", False, ()), (640, False, "gemma", False, ()), (576, True, "llama", False, ("multiplier",)),
    (8192, True, "llama", False, ()), (16384, True, "llama", False, ()), (2880, True, "llama", True, ("eps",)),
    (75, True, "gemma", True, ("lose",)), (2048, True, "olmo", True, ("no norm",)), (75, True, "olmo", True, ("lose",)),
    (640, True, "olmo", False, ()), (1024, True, "cohere", False, ("first",)), (75, False, "cohere", False, ()),
    (80, True, "cohere", True, ("first", "lose")), (96, True, "llama", False, ("no norm", "multiplier", "first")),
    (512, True, "llama", False, ("lose", "multiplier")), (1536, True, "olmo", True, ("scale", "elsewhere")),
    (75, True, "olmo", False, ("scale",)), (640, True, "olmo", True, ("no norm", "scale")),
]  # fmt: skip


def norm_case(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> dict[str, Any]:
    hidden, residual, form, inner, more = shape
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, most))
    return {
        "x": 3.0 * draw(rng, tokens, hidden, dtype=dtype),
        "residual": draw(rng, tokens, hidden, dtype=dtype) if residual else None,
        "weight": None if "no norm" in more else draw(rng, hidden, dtype=dtype),
        "eps": 1e-5,
        "form": form,
        "inner_eps": 0.3 if "eps" in more else None,
        "multiplier": 0.22 if "multiplier" in more else 1.0,
        "first": draw(rng, tokens, hidden, dtype=dtype) if "first" in more else None,
        "scale": draw(rng, 1, dtype=dtype) if "scale" in more else None,
        "keep": "lose" not in more,
        "summed": torch.full((tokens, hidden), NAN, dtype=dtype) if "elsewhere" in more else None,
        "inner_weight": draw(rng, hidden, dtype=dtype) if inner else None,
        "out": torch.full((tokens, hidden), NAN, dtype=dtype) if rng.random() < 0.5 else None,
    }
