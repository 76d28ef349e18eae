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

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from attention import PAGE, Make, Paging, Problem, Step, Unfit, plain_prompts, repage
from common import graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

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


# FlashInfer

WORKSPACE = 512 << 20


def _flashinfer_tables(problem: Problem, paging: Paging) -> list[torch.Tensor]:
    return [problem.int32(values) for values in (paging.begin, paging.page, paging.last)]


def _flashinfer_steps(problem: Problem, paging: Paging, run: Callable[..., torch.Tensor]) -> list[Step]:
    return [lambda pair=pair: run(problem.q, pair) for pair in problem.gathered(paging.source)]


def flashinfer_decode(tensor_cores: bool) -> Make:
    def make(problem: Problem) -> list[Step]:
        flashinfer = importlib.import_module("flashinfer")
        if (problem.rows > 1).any():
            raise Unfit("for decode rows")
        paging = repage(problem.slots, 16)
        tables = _flashinfer_tables(problem, paging)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(problem), "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=tables[0].clone(), paged_kv_indices_buffer=tables[1].clone(),
            paged_kv_last_page_len_buffer=tables[2].clone(),
        )  # fmt: skip
        dtype = problem.q.dtype
        wrapper.plan(
            *tables, problem.q.shape[1], problem.kv_heads, problem.dim, 16, q_data_type=dtype, kv_data_type=dtype
        )
        return _flashinfer_steps(problem, paging, wrapper.run)

    return make


def flashinfer_cascade(problem: Problem) -> list[Step]:
    flashinfer = importlib.import_module("flashinfer")
    paging = repage(problem.slots, 16)
    levels = cascade_levels(problem, paging)
    tables = [[problem.int32(values) for values in each] for each in zip(*levels, strict=True)]
    buffers = [[values.clone() for values in each] for each in tables]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, _workspace(problem), "NHD", use_cuda_graph=True, qo_indptr_buf_arr=buffers[0],
        paged_kv_indptr_buf_arr=buffers[1], paged_kv_indices_buf_arr=buffers[2],
        paged_kv_last_page_len_buf_arr=buffers[3],
    )  # fmt: skip
    dtype = problem.q.dtype
    wrapper.plan(*tables, problem.q.shape[1], problem.kv_heads, problem.dim, 16, q_data_type=dtype, kv_data_type=dtype)
    return _flashinfer_steps(problem, paging, wrapper.run)


def cascade_levels(problem: Problem, paging: Paging) -> list[tuple[np.ndarray, ...]]:
    """For prefixes, then for rows: (first query rows, first pages, pages, tokens in the last page)."""
    if problem.prefixes is None or problem.degrees is None or (problem.prefixes < 16).any():
        raise Unfit("for batches in which every group shares a page")
    size = paging.source.shape[1]
    whole = problem.prefixes // size  # pages that a group shares
    first = np.concatenate([[0], np.cumsum(problem.degrees)])  # the groups' first rows
    shared = [paging.page[paging.begin[row] :][:count] for row, count in zip(first[:-1], whole, strict=True)]
    skipped = np.repeat(whole, problem.degrees)
    own = [
        paging.page[begin + skip : end]
        for begin, skip, end in zip(paging.begin[:-1], skipped, paging.begin[1:], strict=True)
    ]
    rows = np.arange(len(own) + 1)
    return [
        (first, np.concatenate([[0], np.cumsum(whole)]), np.concatenate(shared), np.full(len(whole), size)),
        (rows, np.concatenate([[0], np.cumsum([len(each) for each in own])]), np.concatenate(own), paging.last),
    ]


def flashinfer_paged(problem: Problem) -> list[Step]:
    flashinfer = importlib.import_module("flashinfer")
    paging = repage(problem.slots, 16)
    tables = [problem.int32(np.concatenate([[0], np.cumsum(problem.rows)])), *_flashinfer_tables(problem, paging)]
    buffers = [values.clone() for values in tables]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(problem), "NHD", use_cuda_graph=True, qo_indptr_buf=buffers[0], paged_kv_indptr_buf=buffers[1],
        paged_kv_indices_buf=buffers[2], paged_kv_last_page_len_buf=buffers[3],
    )  # fmt: skip
    dtype = problem.q.dtype
    wrapper.plan(
        *tables, problem.q.shape[1], problem.kv_heads, problem.dim, 16, causal=True, q_data_type=dtype,
        kv_data_type=dtype,
    )  # fmt: skip
    return _flashinfer_steps(problem, paging, wrapper.run)


def flashinfer_ragged(problem: Problem) -> list[Step]:
    flashinfer = importlib.import_module("flashinfer")
    if (problem.rows != problem.lengths).any():
        raise Unfit("for prompts without prefixes")
    begin = problem.int32(np.concatenate([[0], np.cumsum(problem.rows)]))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(problem), "NHD", use_cuda_graph=True, qo_indptr_buf=begin.clone(), kv_indptr_buf=begin.clone()
    )
    dtype = problem.q.dtype
    wrapper.plan(
        begin, begin, problem.q.shape[1], problem.kv_heads, problem.dim, causal=True, q_data_type=dtype,
        kv_data_type=dtype,
    )  # fmt: skip
    pairs = problem.gathered(np.concatenate(problem.slots))
    return [lambda k=k, v=v: wrapper.run(problem.q, k, v) for k, v in pairs]


def _workspace(problem: Problem) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=problem.q.device)


# FlashAttention 2 and 3

MODULES = {"fa2": "flash_attn", "fa3": "flash_attn_interface"}


def flash_attn_decode(name: str, page: int) -> Make:
    def make(problem: Problem) -> list[Step]:
        if (problem.rows > 1).any():
            raise Unfit("for decode rows")
        function = importlib.import_module(MODULES[name]).flash_attn_with_kvcache
        paging = repage(problem.slots, page)
        pages = np.diff(paging.begin)
        table = np.zeros((len(pages), pages.max()), dtype=np.int32)
        table[np.arange(pages.max()) < pages[:, None]] = paging.page
        options = {
            "cache_seqlens": problem.int32(problem.lengths),
            {"fa2": "block_table", "fa3": "page_table"}[name]: problem.int32(table),
        }
        q = problem.q[:, None]  # [rows, 1, heads, dim]
        pairs = problem.gathered(paging.source)
        return [lambda k=k, v=v: function(q, k, v, **options)[:, 0] for k, v in pairs]

    return make


def flash_attn_prefill(name: str) -> Make:
    def make(problem: Problem) -> list[Step]:
        function = importlib.import_module(MODULES[name]).flash_attn_func
        index = plain_prompts(problem)
        q = problem.q.unflatten(0, index.shape)  # [prompts, tokens, heads, dim]

        def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = function(q, k, v, causal=True)
            return (out[0] if isinstance(out, tuple) else out).flatten(0, 1)

        return [lambda k=k, v=v: step(k, v) for k, v in problem.gathered(index)]

    return make


DECODE: dict[str, dict[str, Make]] = {
    "sdpa-flash": {"packed": flash_decode(True), "gqa": flash_decode(False)},
    "sdpa-cudnn": {way: padded_decode(SDPBackend.CUDNN_ATTENTION, way == "packed") for way in ("packed", "gqa")},
    "flex": {"default": flex_decode(), "3 stages": flex_decode(BLOCK_N=64, num_warps=2, num_stages=3)},
    "flashinfer": {"tensor cores": flashinfer_decode(True), "no tensor cores": flashinfer_decode(False)},
    "cascade": {"pages of 16": flashinfer_cascade},
    "fa2": {"pages of 256": flash_attn_decode("fa2", 256)},
    "fa3": {f"pages of {size}": flash_attn_decode("fa3", size) for size in (16, 128)},
}
PREFILL: dict[str, dict[str, Make]] = {
    "sdpa-flash": {"gqa": sdpa_prefill(SDPBackend.FLASH_ATTENTION)},
    "sdpa-cudnn": {"gqa": sdpa_prefill(SDPBackend.CUDNN_ATTENTION)},
    "flex": {"causal": flex_prefill},
    "flashinfer": {"ragged": flashinfer_ragged, "paged": flashinfer_paged},
    "fa2": {"plain": flash_attn_prefill("fa2")},
    "fa3": {"plain": flash_attn_prefill("fa3")},
}
NEEDS = {"flashinfer": "flashinfer", "cascade": "flashinfer"} | MODULES


def chosen(text: str, rivals: dict[str, dict[str, Make]]) -> tuple[list[str], list[str]]:
    """(rivals asked for that are installed, rivals that are not). ``flashinfer`` includes its cascade."""
    asked = list(rivals) if text == "all" else [] if text == "none" else text.split(",")
    if "flashinfer" in asked and "cascade" in rivals and "cascade" not in asked:
        asked.append("cascade")
    if unknown := [name for name in asked if name not in rivals]:
        raise SystemExit(f"--rivals: no {', '.join(unknown)}; there are {', '.join(rivals)}, none and all")
    missing = [name for name in asked if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None]
    return [name for name in asked if name not in missing], missing
