"""Other libraries' attention on the same batches, to time beside ours.

Each rival gets the same queries, keys and values in its own form, and is checked against the same reference before it
is timed. Only attention is timed, without planning and without bringing K and V into that form.

- sdpa-flash, sdpa-cudnn: torch's ``scaled_dot_product_attention``. In decode each row has its own K and V, padded to
  the longest row and masked; flash takes no mask, and gets rows of several lengths one after the other through
  ``varlen_attn``. The better of ``enable_gqa`` and of passing heads that share K and V as query rows.
- flex: torch's FlexAttention, compiled; in decode over our own pages, with a block mask.
- flashinfer: its decode wrapper (the better of with and without tensor cores); cascade is its wrapper for shared
  prefixes. Pages of 16.
- fa3: FlashAttention's ``flash_attn_with_kvcache`` over pages (the better of 16 and 128), and ``flash_attn_func`` for
  prompts.

For libraries whose pages cannot have holes, the tokens of a prefix after its last full page are copied to each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from attention import PAGE, Problem
from common import graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

GATHERED_BYTES = 1 << 30  # of K and V that a graph goes over: more than the L2 cache holds
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # K and V of each cache, in a rival's form
Way = Callable[[Problem], tuple[Callable[..., torch.Tensor], Pairs]]  # a step, which takes K and V, gives rows


class Unfit(Exception):
    """Raised for a problem that a rival is not made for."""


@dataclass
class Outcome:
    ms: float | None
    notes: list[str] = field(default_factory=list)  # why the rival, or one way to run it, failed
    unfit: bool = False  # whether the rival is not made for such a batch

    def __str__(self) -> str:
        return f"{self.ms:.4f}" if self.ms is not None else "-" if self.unfit else "failed"


def time_rival(ways: dict[str, Way], problem: Problem, replays: int) -> Outcome:
    """The time of the best way to run a rival."""
    outcome, unfit = Outcome(None), []
    for name, way in ways.items():
        pairs: Pairs = []
        try:
            step, pairs = way(problem)
            problem.check(step(*pairs[0]))
            run = partial(_each, step, pairs)
            run()
            torch.cuda.synchronize()
            ms = graph_ms(run, replays) / len(pairs)
            outcome.ms = min(ms, outcome.ms or ms)
        except Unfit as reason:
            unfit.append(str(reason))
        except Exception as error:  # a rival may fail in any way: that is reported, and the others go on
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            outcome.notes.append(f"{name}: {type(error).__name__}: {' / '.join(lines[:2])[:200]}")
        step = run = None  # type: ignore[assignment]  # what they hold is freed
        del pairs
        torch.cuda.empty_cache()
    if outcome.ms is None and not outcome.notes:
        outcome.unfit, outcome.notes = True, unfit
    return outcome


def _each(step: Callable[..., torch.Tensor], pairs: Pairs) -> list[torch.Tensor]:
    return [step(k, v) for k, v in pairs]


# K and V in other forms


@dataclass(frozen=True)
class Paging:
    """The same K and V in the pages of other libraries, where only the last page of a reader may be partly filled.

    If a prefix ends inside a page, each reader has a page of its own there.
    """

    source: np.ndarray  # [pages, size]  the slot that each place is a copy of
    page: np.ndarray  # a reader's pages are [begin[i], begin[i + 1])
    begin: np.ndarray  # [readers + 1]
    last: np.ndarray  # [readers]  tokens in the last page


def repage(slots: Sequence[np.ndarray], size: int) -> Paging:
    lengths = np.array([len(each) for each in slots])
    pages = -(-lengths // size)
    filled = np.concatenate([np.append(each, np.repeat(each[-1:], -len(each) % size)) for each in slots])
    places = filled.reshape(-1, size)
    # Readers of the same first and last slot read the same page.
    key = places[:, 0] * (int(filled.max()) + 1) + places[:, -1]
    _, example, page = np.unique(key, return_index=True, return_inverse=True)
    number = np.random.default_rng(2).permutation(len(example))
    source = np.empty((len(example), size), dtype=np.int64)
    source[number] = places[example]
    return Paging(source, number[page], begins(pages), lengths - (pages - 1) * size)


def begins(counts: Iterable[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(list(counts))])


def int32(problem: Problem, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(problem.q.device)


def gathered(problem: Problem, index: np.ndarray, heads_first: bool = False) -> Pairs:
    """K and V at these slots [..., kv_heads, dim], from enough caches to exceed the L2 cache.

    With ``heads_first`` an index [readers, keys] gives [readers, kv_heads, keys, dim].
    """
    size = 2 * index.size * problem.kv_heads * problem.dim * problem.q.element_size()
    places = torch.from_numpy(index).to(problem.q.device)

    def one(cache: torch.Tensor) -> torch.Tensor:
        flat = cache.flatten(0, 1)
        if not heads_first:
            return flat[places]
        made = flat.new_empty(len(index), problem.kv_heads, index.shape[1], problem.dim)
        for row, place in enumerate(places):
            made[row] = flat[place].transpose(0, 1)
        return made

    count = max(1, min(len(problem.caches), -(-GATHERED_BYTES // size)))
    return [(one(k), one(v)) for k, v in problem.caches[:count]]


def plain_prompts(problem: Problem) -> np.ndarray:
    """Slots [prompts, tokens]; raises Unfit unless the batch is nothing but prompts of one length."""
    rows, lengths = problem.batch.readers.rows, problem.batch.lengths
    if (rows != rows[0]).any() or (lengths != rows).any():
        raise Unfit("for prompts of one length, without prefixes")
    return np.stack(problem.batch.slots)


# torch


def padded_decode(problem: Problem, backend: SDPBackend, packed: bool) -> tuple[Callable[..., torch.Tensor], Pairs]:
    slots, lengths, q = problem.batch.slots, problem.batch.lengths, problem.q
    ragged = (lengths != lengths[0]).any()
    longest = -(-lengths.max() // 64) * 64 if ragged else lengths[0]
    index = np.stack([np.pad(each, (0, longest - len(each)), mode="edge") for each in slots])
    mask = None
    if ragged:
        seen = torch.from_numpy(np.arange(longest) < lengths[:, None]).to(q.device)
        mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))[:, None, None]
    shaped = q.reshape(
        (len(lengths), problem.kv_heads, -1, problem.dim) if packed else (len(lengths), -1, 1, problem.dim)
    )

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(shaped, k, v, attn_mask=mask, enable_gqa=not packed)
        return out.reshape(q.shape)

    return step, gathered(problem, index, heads_first=True)


def flash_decode(problem: Problem, packed: bool) -> tuple[Callable[..., torch.Tensor], Pairs]:
    lengths = problem.batch.lengths
    if (lengths == lengths[0]).all():
        return padded_decode(problem, SDPBackend.FLASH_ATTENTION, packed)
    if not packed:
        raise Unfit("flash takes no mask")
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, dim = problem.q.shape
    group = heads // problem.kv_heads
    q = problem.q.view(rows, problem.kv_heads, group, dim).transpose(1, 2).reshape(rows * group, -1, dim)
    begin_q, begin_k = (int32(problem, each) for each in (np.arange(rows + 1) * group, begins(lengths)))
    longest = int(lengths.max())

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = varlen_attn(q, k, v, begin_q, begin_k, group, longest)
        return out.view(rows, group, -1, dim).transpose(1, 2).reshape(problem.q.shape)

    return step, gathered(problem, np.concatenate(problem.batch.slots))


def sdpa_prefill(problem: Problem, backend: SDPBackend) -> tuple[Callable[..., torch.Tensor], Pairs]:
    index = plain_prompts(problem)
    q = problem.q.unflatten(0, index.shape).transpose(1, 2).contiguous()

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return step, gathered(problem, index, heads_first=True)


def _compiled(problem: Problem) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()  # each batch is compiled separately, and the number of compilations is limited
    return torch.compile(flex_attention, dynamic=False) if problem.q.is_cuda else flex_attention


def flex_decode(problem: Problem, **kernel_options: int) -> tuple[Callable[..., torch.Tensor], Pairs]:
    pages, slots = problem.caches[0][0].shape[0], problem.batch.slots
    seen = torch.zeros(len(slots), pages * PAGE, dtype=torch.bool, device=problem.q.device)
    # [part or all of it seen, rows]
    counts = np.zeros((2, len(slots), 1, 1), dtype=np.int64)
    indices = np.zeros((2, len(slots), 1, 1, pages), dtype=np.int64)
    for row, mine in enumerate(slots):
        seen[row, torch.from_numpy(mine).to(seen.device)] = True
        page, tokens = np.unique(mine // PAGE, return_counts=True)
        for whole in (0, 1):
            these = page[(tokens == PAGE) == whole]
            counts[whole, row] = len(these)
            indices[whole, row, 0, 0, : len(these)] = these
    blocks = [int32(problem, each) for pair in zip(counts, indices, strict=True) for each in pair]
    mask = BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=(128, PAGE), seq_lengths=(1, pages * PAGE), mask_mod=lambda b, h, q, kv: seen[b, kv]
    )
    attend, q = _compiled(problem), problem.q[:, :, None]  # [rows, heads, 1, dim]
    options = {"kernel_options": kernel_options} if problem.q.is_cuda and kernel_options else {}

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (k, v))  # [1, kv_heads, slots, dim]
        return attend(q, k, v, block_mask=mask, enable_gqa=True, **options)[:, :, 0]

    return step, problem.caches


def flex_prefill(problem: Problem) -> tuple[Callable[..., torch.Tensor], Pairs]:
    index = plain_prompts(problem)
    length, device = index.shape[1], problem.q.device
    mask = create_block_mask(lambda b, h, q, kv: kv <= q, None, None, length, length, device=device)
    attend, q = _compiled(problem), problem.q.unflatten(0, index.shape).transpose(1, 2).contiguous()

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return step, gathered(problem, index, heads_first=True)
