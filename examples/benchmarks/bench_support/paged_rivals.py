"""FlashInfer and FlashAttention over pages, if installed: see attention_rivals.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import torch

from .attention_batches import Paging, repage
from .attention_problem import Make, Problem, Step, Unfit, plain_prompts

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
