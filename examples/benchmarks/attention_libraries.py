"""FlashInfer's and FlashAttention-3's attention on our batches, and the table of all rivals (attention_rivals.py)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from attention import Problem
from attention_rivals import (
    Paging,
    Pairs,
    Unfit,
    Way,
    begins,
    flash_decode,
    flex_decode,
    flex_prefill,
    gathered,
    int32,
    padded_decode,
    plain_prompts,
    repage,
    sdpa_prefill,
)
from torch.nn.attention import SDPBackend

WORKSPACE = 512 << 20


def flashinfer_decode(problem: Problem, tensor_cores: bool) -> tuple[Callable[..., torch.Tensor], Pairs]:
    paging = repage(problem.batch.slots, 16)
    tables = [int32(problem, values) for values in (paging.begin, paging.page, paging.last)]
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    buffers = {name: table.clone() for name, table in zip(names, tables, strict=True)}
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem), "NHD", use_cuda_graph=True, use_tensor_cores=tensor_cores, **buffers
    )
    wrapper.plan(*tables, *_heads(problem), 16, **_dtypes(problem))
    return _of_pairs(problem, wrapper), gathered(problem, paging.source)


def flashinfer_cascade(problem: Problem) -> tuple[Callable[..., torch.Tensor], Pairs]:
    paging = repage(problem.batch.slots, 16)
    levels = cascade_levels(problem, paging)
    tables = [[int32(problem, values) for values in each] for each in zip(*levels, strict=True)]
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    buffers = {f"{name}_buf_arr": [table.clone() for table in each] for name, each in zip(names, tables, strict=True)}
    wrapper = importlib.import_module("flashinfer").MultiLevelCascadeAttentionWrapper(
        2, _workspace(problem), "NHD", use_cuda_graph=True, **buffers
    )
    wrapper.plan(*tables, *_heads(problem), 16, **_dtypes(problem))
    return _of_pairs(problem, wrapper), gathered(problem, paging.source)


def cascade_levels(problem: Problem, paging: Paging) -> list[tuple[np.ndarray, ...]]:
    """For prefixes, then for rows: (first query rows, first pages, pages, tokens in the last page)."""
    prefixes, degrees = problem.batch.prefixes, problem.batch.degrees
    if (prefixes < 16).any():
        raise Unfit("for batches in which every group shares a page")
    size = paging.source.shape[1]
    whole = prefixes // size  # pages that a group shares
    first = begins(degrees)  # the groups' first rows
    shared = [paging.page[paging.begin[row] :][:count] for row, count in zip(first[:-1], whole, strict=True)]
    rows = zip(paging.begin[:-1], np.repeat(whole, degrees), paging.begin[1:], strict=True)
    own = [paging.page[begin + skip : end] for begin, skip, end in rows]
    return [
        (first, begins(whole), np.concatenate(shared), np.full(len(whole), size)),
        (np.arange(len(own) + 1), begins(map(len, own)), np.concatenate(own), paging.last),
    ]


def _of_pairs(problem: Problem, wrapper: Any) -> Callable[..., torch.Tensor]:
    return lambda k, v: wrapper.run(problem.q, (k, v))


def _heads(problem: Problem) -> tuple[int, int, int]:
    return problem.q.shape[1], problem.kv_heads, problem.dim


def _dtypes(problem: Problem) -> dict[str, torch.dtype]:
    return {"q_data_type": problem.q.dtype, "kv_data_type": problem.q.dtype}


def _workspace(problem: Problem) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=problem.q.device)


def fa3_decode(problem: Problem, page: int) -> tuple[Callable[..., torch.Tensor], Pairs]:
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    paging = repage(problem.batch.slots, page)
    pages = np.diff(paging.begin)
    table = np.zeros((len(pages), pages.max()), dtype=np.int32)
    table[np.arange(pages.max()) < pages[:, None]] = paging.page
    options = {"cache_seqlens": int32(problem, problem.batch.lengths), "page_table": int32(problem, table)}
    q = problem.q[:, None]  # [rows, 1, heads, dim]
    return lambda k, v: function(q, k, v, **options)[:, 0], gathered(problem, paging.source)


def fa3_prefill(problem: Problem) -> tuple[Callable[..., torch.Tensor], Pairs]:
    function = importlib.import_module("flash_attn_interface").flash_attn_func
    index = plain_prompts(problem)
    q = problem.q.unflatten(0, index.shape)  # [prompts, tokens, heads, dim]

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(q, k, v, causal=True)
        return (out[0] if isinstance(out, tuple) else out).flatten(0, 1)

    return step, gathered(problem, index)


DECODE: dict[str, dict[str, Way]] = {
    "sdpa-flash": {"packed": partial(flash_decode, packed=True), "gqa": partial(flash_decode, packed=False)},
    "sdpa-cudnn": {
        name: partial(padded_decode, backend=SDPBackend.CUDNN_ATTENTION, packed=name == "packed")
        for name in ("packed", "gqa")
    },
    "flex": {"default": flex_decode, "3 stages": partial(flex_decode, BLOCK_N=64, num_warps=2, num_stages=3)},
    "flashinfer": {
        "tensor cores": partial(flashinfer_decode, tensor_cores=True),
        "no tensor cores": partial(flashinfer_decode, tensor_cores=False),
    },
    "cascade": {"pages of 16": flashinfer_cascade},
    "fa3": {f"pages of {size}": partial(fa3_decode, page=size) for size in (16, 128)},
}
PREFILL: dict[str, dict[str, Way]] = {
    "sdpa-flash": {"gqa": partial(sdpa_prefill, backend=SDPBackend.FLASH_ATTENTION)},
    "sdpa-cudnn": {"gqa": partial(sdpa_prefill, backend=SDPBackend.CUDNN_ATTENTION)},
    "flex": {"causal": flex_prefill},
    "fa3": {"plain": fa3_prefill},
}
NEEDS = {"flashinfer": "flashinfer", "cascade": "flashinfer", "fa3": "flash_attn_interface"}


def chosen(text: str, rivals: dict[str, dict[str, Way]]) -> tuple[list[str], list[str]]:
    """(rivals asked for that are installed, rivals that are not). ``flashinfer`` includes its cascade."""
    asked = list(rivals) if text == "all" else [] if text == "none" else text.split(",")
    if "flashinfer" in asked and "cascade" in rivals and "cascade" not in asked:
        asked.append("cascade")
    if unknown := [name for name in asked if name not in rivals]:
        raise SystemExit(f"--rivals: no {', '.join(unknown)}; there are {', '.join(rivals)}, none and all")
    missing = [name for name in asked if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None]
    return [name for name in asked if name not in missing], missing
