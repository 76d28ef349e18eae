"""Other libraries' attention on the same batches, to time beside ours.

Each rival gets the same queries, keys and values in its own form, and is checked against the same reference before it
is timed. Only attention is timed, without planning and without bringing K and V into that form.

- sdpa-flash, sdpa-cudnn: torch's ``scaled_dot_product_attention``. In decode each row has its own K and V, padded to
  the longest row and masked; flash takes no mask, and gets rows of several lengths one after the other through
  ``varlen_attn``. The better of ``enable_gqa`` and of passing heads that share K and V as query rows.
- flex: torch's FlexAttention, compiled; in decode over our own pages, with a block mask.
- flashinfer: its decode wrapper (the better of with and without tensor cores), and its paged and ragged prefill
  wrappers; cascade is its wrapper for shared prefixes. Pages of 16.
- fa2, fa3: FlashAttention's ``flash_attn_with_kvcache`` over pages (of 256; the better of 16 and 128), and
  ``flash_attn_func`` for prompts.

For libraries whose pages cannot have holes, the tokens of a prefix after its last full page are copied to each row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from . import paged_rivals as paged
from .attention_batches import PAGE
from .attention_problem import Make, Problem, Step, Unfit, plain_prompts
from .gpu_timing import graph_ms

TOLERANCE = 8e-3  # bfloat16 weights and output against float32


@dataclass
class Outcome:
    ms: float | None
    notes: list[str] = field(default_factory=list)  # why the rival, or one way to run it, failed
    unfit: bool = False  # whether the rival is not made for such a batch

    def __str__(self) -> str:
        return f"{self.ms:.4f}" if self.ms is not None else "-" if self.unfit else "failed"


def check(problem: Problem, got: torch.Tensor) -> float:
    error = float((got.float() - problem.want).norm() / problem.want.norm())
    if not error < TOLERANCE:
        raise ValueError(f"its result is wrong: relative error {error:.1e}")
    return error


def time_rival(ways: dict[str, Make], problem: Problem, replays: int) -> Outcome:
    """The time of the best way to run a rival."""
    outcome, unfit = Outcome(None), []
    for way, make in ways.items():
        steps: list[Step] = []
        try:
            steps = make(problem)
            check(problem, steps[0]())
            for step in steps:
                step()
            torch.cuda.synchronize()
            ms = graph_ms(lambda steps=steps: [step() for step in steps], replays) / len(steps)
            outcome.ms = min(ms, outcome.ms or ms)
        except Unfit as reason:
            unfit.append(str(reason))
        except Exception as error:  # a rival may fail in any way: that is reported, and the others go on
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            outcome.notes.append(f"{way}: {type(error).__name__}: {' / '.join(lines[:2])[:200]}")
        del steps
        torch.cuda.empty_cache()
    if outcome.ms is None and not outcome.notes:
        outcome.unfit = True
        outcome.notes = unfit
    return outcome


# torch's scaled_dot_product_attention


def padded_decode(backend: SDPBackend, packed: bool) -> Make:
    def make(problem: Problem) -> list[Step]:
        lengths = problem.lengths
        if (problem.rows > 1).any():
            raise Unfit("for decode rows")
        longest = -(-lengths.max() // 64) * 64 if (lengths != lengths[0]).any() else lengths[0]
        index = np.stack([np.pad(each, (0, longest - len(each)), mode="edge") for each in problem.slots])
        mask = None
        if (lengths != lengths[0]).any():
            seen = torch.from_numpy(np.arange(longest) < lengths[:, None]).to(problem.q.device)
            mask = torch.zeros_like(seen, dtype=problem.q.dtype).masked_fill_(~seen, float("-inf"))[:, None, None]
        shape = (len(lengths), problem.kv_heads, -1, problem.dim) if packed else (len(lengths), -1, 1, problem.dim)
        q = problem.q.reshape(shape)

        def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=not packed)
            return out.reshape(problem.q.shape)

        return [lambda k=k, v=v: step(k, v) for k, v in problem.gathered(index, heads_first=True)]

    return make


def flash_decode(packed: bool) -> Make:
    def make(problem: Problem) -> list[Step]:
        if (problem.lengths == problem.lengths[0]).all():
            return padded_decode(SDPBackend.FLASH_ATTENTION, packed)(problem)
        if not packed:
            raise Unfit("flash takes no mask")
        from torch.nn.attention.varlen import varlen_attn

        rows, heads, dim = problem.q.shape
        group = heads // problem.kv_heads
        q = problem.q.view(rows, problem.kv_heads, group, dim).transpose(1, 2).reshape(rows * group, -1, dim)
        begin_q = problem.int32(np.arange(rows + 1) * group)
        begin_k = problem.int32(np.concatenate([[0], np.cumsum(problem.lengths)]))
        longest = int(problem.lengths.max())

        def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = varlen_attn(q, k, v, begin_q, begin_k, group, longest)
            return out.view(rows, group, -1, dim).transpose(1, 2).reshape(problem.q.shape)

        return [lambda k=k, v=v: step(k, v) for k, v in problem.gathered(np.concatenate(problem.slots))]

    return make


def sdpa_prefill(backend: SDPBackend) -> Make:
    def make(problem: Problem) -> list[Step]:
        index = plain_prompts(problem)
        q = problem.q.unflatten(0, index.shape).transpose(1, 2).contiguous()

        def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        return [lambda k=k, v=v: step(k, v) for k, v in problem.gathered(index, heads_first=True)]

    return make


# FlexAttention


def _compiled(problem: Problem) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()  # each batch is compiled separately, and the number of compilations is limited
    return torch.compile(flex_attention, dynamic=False) if problem.q.is_cuda else flex_attention


def flex_decode(**kernel_options: int) -> Make:
    def make(problem: Problem) -> list[Step]:
        if (problem.rows > 1).any():
            raise Unfit("for decode rows")
        pages = problem.caches[0][0].shape[0]
        seen = torch.zeros(len(problem.slots), pages * PAGE, dtype=torch.bool, device=problem.q.device)
        for row, slots in zip(seen, problem.slots, strict=True):
            row[torch.from_numpy(slots).to(row.device)] = True
        # [part or all of it seen, rows]
        counts = np.zeros((2, len(problem.slots)), dtype=np.int64)
        indices = np.zeros((2, len(problem.slots), pages), dtype=np.int64)
        for row, slots in enumerate(problem.slots):
            page, tokens = np.unique(slots // PAGE, return_counts=True)
            for whole in (0, 1):
                mine = page[(tokens == PAGE) == whole]
                counts[whole, row] = len(mine)
                indices[whole, row, : len(mine)] = mine
        part, whole = (
            (problem.int32(count)[:, None, None], problem.int32(index)[:, None, None])
            for count, index in zip(counts, indices, strict=True)
        )
        mask = BlockMask.from_kv_blocks(
            *part, *whole, BLOCK_SIZE=(128, PAGE), seq_lengths=(1, pages * PAGE),
            mask_mod=lambda b, h, q, kv: seen[b, kv],
        )  # fmt: skip
        attend = _compiled(problem)
        q = problem.q[:, :, None]  # [rows, heads, 1, dim]
        options = {"kernel_options": kernel_options} if problem.q.is_cuda and kernel_options else {}

        def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (k, v))  # [1, kv_heads, slots, dim]
            return attend(q, k, v, block_mask=mask, enable_gqa=True, **options)[:, :, 0]

        return [lambda k=k, v=v: step(k, v) for k, v in problem.caches]

    return make


def flex_prefill(problem: Problem) -> list[Step]:
    index = plain_prompts(problem)
    mask = create_block_mask(
        lambda b, h, q, kv: kv <= q, None, None, index.shape[1], index.shape[1], device=problem.q.device
    )
    attend = _compiled(problem)
    q = problem.q.unflatten(0, index.shape).transpose(1, 2).contiguous()

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return [lambda k=k, v=v: step(k, v) for k, v in problem.gathered(index, heads_first=True)]


DECODE: dict[str, dict[str, Make]] = {
    "sdpa-flash": {"packed": flash_decode(True), "gqa": flash_decode(False)},
    "sdpa-cudnn": {way: padded_decode(SDPBackend.CUDNN_ATTENTION, way == "packed") for way in ("packed", "gqa")},
    "flex": {"default": flex_decode(), "3 stages": flex_decode(BLOCK_N=64, num_warps=2, num_stages=3)},
    "flashinfer": {"tensor cores": paged.flashinfer_decode(True), "no tensor cores": paged.flashinfer_decode(False)},
    "cascade": {"pages of 16": paged.flashinfer_cascade},
    "fa2": {"pages of 256": paged.flash_attn_decode("fa2", 256)},
    "fa3": {f"pages of {size}": paged.flash_attn_decode("fa3", size) for size in (16, 128)},
}
PREFILL: dict[str, dict[str, Make]] = {
    "sdpa-flash": {"gqa": sdpa_prefill(SDPBackend.FLASH_ATTENTION)},
    "sdpa-cudnn": {"gqa": sdpa_prefill(SDPBackend.CUDNN_ATTENTION)},
    "flex": {"causal": flex_prefill},
    "flashinfer": {"ragged": paged.flashinfer_ragged, "paged": paged.flashinfer_paged},
    "fa2": {"plain": paged.flash_attn_prefill("fa2")},
    "fa3": {"plain": paged.flash_attn_prefill("fa3")},
}
NEEDS = {"flashinfer": "flashinfer", "cascade": "flashinfer"} | paged.MODULES


def chosen(text: str, rivals: dict[str, dict[str, Make]]) -> tuple[list[str], list[str]]:
    """(rivals asked for that are installed, rivals that are not). ``flashinfer`` includes its cascade."""
    asked = list(rivals) if text == "all" else [] if text == "none" else text.split(",")
    if "flashinfer" in asked and "cascade" in rivals and "cascade" not in asked:
        asked.append("cascade")
    if unknown := [name for name in asked if name not in rivals]:
        raise SystemExit(f"--rivals: no {', '.join(unknown)}; there are {', '.join(rivals)}, none and all")
    missing = [name for name in asked if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None]
    return [name for name in asked if name not in missing], missing
