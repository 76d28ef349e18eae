"""Each kernel with what it is launched with, in the shapes that matter: for the compiler, so all tensors are empty."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from support_small_cases import NORM, ROPE, norm_case, parts, rope_case

from hf_batchllm.kernels.lists.sampling_recipes import Recipe, RecipeTable, RowRecipes
from hf_batchllm.kernels.lists.spans import Spans
from hf_batchllm.kernels.lists.token_edits import Decays, Forced, History, Target, TargetLists
from hf_batchllm.kernels.lists.work_lists import CHUNK_FIELDS, ENTRY_FIELDS, ITEM_FIELDS, PrefillWork
from hf_batchllm.kernels.reference.experts_torch import Gating
from hf_batchllm.kernels.reference.gated_ops_torch import NormForm
from hf_batchllm.kernels.reference.routing_torch import Rule
from hf_batchllm.kernels.triton import (
    convolution_triton,
    decode_triton,
    delta_rule_triton,
    digest_triton,
    experts_triton,
    fixed_attention_triton,
    gated_ops_triton,
    layer_ops_triton,
    pages_triton,
    penalties_triton,
    prefill_triton,
    routing_triton,
    sample_triton,
    selective_scan_triton,
    state_space_triton,
    token_edits_triton,
    token_masks_triton,
    top_k_top_p_triton,
    top_logprobs_triton,
    typical_eta_triton,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VOCABULARY, ROWS, GROUP, KV_HEADS = 151_936, 3, 4, 2


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _ints(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.int32)


def decode(dim: int, dtype: torch.dtype, tile: int, brief: bool = False, full: bool = False) -> None:
    """``full``: with a window, a soft cap and causal items."""
    q, pages = zeros(ROWS, KV_HEADS * GROUP, dim, dtype=dtype), zeros(4, 64, KV_HEADS, dim, dtype=dtype)
    work = SimpleNamespace(
        items={tile: _ints(1, ITEM_FIELDS)}, counts={tile: _ints(1)}, entries=_ints(1, ENTRY_FIELDS),
        row_parts=_ints(ROWS + 1), causal=full, brief=brief,
    )  # fmt: skip
    part, lse = zeros(1, KV_HEADS * GROUP, dim, dtype=FP32), zeros(1, KV_HEADS * GROUP, dtype=FP32)
    options: dict[str, Any] = {"window": 100, "softcap": 20.0} if full else {}
    decode_triton.attend_items(tile, q, pages, pages, q, part, lse, work, _ints(ROWS), 0.3, **options)  # type: ignore[arg-type]


def merge(dim: int, dtype: torch.dtype) -> None:
    heads = KV_HEADS * GROUP
    work = SimpleNamespace(row_parts=_ints(ROWS + 1))
    part, lse = zeros(1, heads, dim, dtype=FP32), zeros(1, heads, dtype=FP32)
    decode_triton.merge_parts(zeros(ROWS, heads, dim, dtype=dtype), part, lse, work)  # type: ignore[arg-type]


def fixed_parts(dim: int, dtype: torch.dtype, tile: int, full: bool = False) -> None:
    q, pages = zeros(ROWS, KV_HEADS * GROUP, dim, dtype=dtype), zeros(4, 64, KV_HEADS, dim, dtype=dtype)
    work = SimpleNamespace(
        items={tile: _ints(1, ITEM_FIELDS)}, counts={tile: _ints(1)}, entries=_ints(1, ENTRY_FIELDS),
        row_parts=_ints(ROWS + 1),
    )  # fmt: skip
    parts = zeros(1, KV_HEADS * GROUP, dim, dtype=FP32), zeros(1, KV_HEADS * GROUP, 2, dtype=FP32)
    options: dict[str, Any] = {"window": 100, "softcap": 20.0} if full else {}
    boxes = (pages_triton.by_page(pages),) * 2
    fixed_attention_triton.attend_fixed(
        tile, q, pages, pages, boxes, q, *parts, work, _ints(ROWS), 0.3, **options  # type: ignore[arg-type]
    )  # fmt: skip
    fixed_attention_triton.merge_fixed(q, *parts, work)  # type: ignore[arg-type]


def prefill(dim: int, dtype: torch.dtype, full: bool = False) -> None:
    q, pages = zeros(ROWS, KV_HEADS * GROUP, dim, dtype=dtype), zeros(4, 64, KV_HEADS, dim, dtype=dtype)
    tile = prefill_triton.launch_options(GROUP, dim, dim, dtype.itemsize)["tile"]
    work = PrefillWork(_ints(1, CHUNK_FIELDS), _ints(1), _ints(1, ENTRY_FIELDS), tile)
    options: dict[str, Any] = {"window": 100, "softcap": 20.0, "sinks": q[0, :, 0].contiguous()} if full else {}
    prefill_triton.attend_chunks(q, pages, pages, q, work, 0.3, **options)


def experts(tokens: int, interleaved: bool = False, dtype: torch.dtype = BF16) -> None:
    """Of Qwen3-30B-A3B's shape, with fewer experts; interleaved as in GPT-OSS."""
    count, hidden, inter, top = 16, 2048, 768, 8
    tile = experts_triton.rows_of_a_tile(tokens * top, count, dtype)
    choice, rows = routing_triton.choose(zeros(tokens, count, dtype=dtype), Rule(top), tile, dtype, None)
    routing_triton.rows_of_experts(choice.indices, count, tile)
    up, down = zeros(count, 2 * inter, hidden, dtype=dtype), zeros(count, hidden, inter, dtype=dtype)
    up_bias = down_bias = None
    if interleaved:
        up, down = up.transpose(1, 2).contiguous().transpose(1, 2), down.transpose(1, 2).contiguous().transpose(1, 2)
        up_bias, down_bias = zeros(count, 2 * inter, dtype=dtype), zeros(count, hidden, dtype=dtype)
    gating = Gating("gpt_oss", 7.0, interleaved=True) if interleaved else Gating()
    made = experts_triton.up_products(zeros(tokens, hidden, dtype=dtype), up, up_bias, rows, top, gating)
    experts_triton.sum_of_shares(experts_triton.down_products(made, down, down_bias, rows), choice.shares)


def sampling() -> None:
    logits, numbers = zeros(ROWS, VOCABULARY), _ints(4, ROWS)
    recipes = [Recipe(1.2, 0.5, 40, 0.9, 0.1), Recipe(temperature=0)]
    by_row = RowRecipes(RecipeTable(recipes, VOCABULARY, "cpu"), numbers[3])
    seed = torch.zeros(ROWS, dtype=torch.int64)
    sample_triton.gumbel_sample(logits, by_row, seed, *numbers[:3], threshold=zeros(ROWS, dtype=FP32))
    sample_triton.gumbel_sample(logits, 0.7, seed, *numbers[:3], threshold=None)
    sample_triton.greedy(logits)


def before_sampling() -> None:
    logits, line, minimum = zeros(ROWS, VOCABULARY, dtype=FP32), _ints(ROWS), _ints(ROWS)
    recipes = [Recipe(1.2, 0.5, 40, 0.9, 0.1), Recipe(temperature=0)]
    by_row = RowRecipes(RecipeTable(recipes, VOCABULARY, "cpu"), _ints(ROWS))
    top_k_top_p_triton.cutoffs(logits, temperature=1.0, top_k=None, top_p=None, min_p=None, by_row=by_row)
    seen, eos = _ints(ROWS, VOCABULARY // 32), torch.zeros(2, 2, dtype=torch.int64)
    penalties_triton.penalise(
        logits, by_row=by_row, seen=seen, line=line, penalty=1.2, eos=eos, made=minimum, minimum=minimum
    )
    penalties_triton.mark_seen(seen, torch.zeros(ROWS, dtype=torch.int64), VOCABULARY, line)
    for out in (logits, None):
        token_masks_triton.mask_tokens(logits, seen, line=line, out=out)
    top_logprobs_triton.note_top_logprobs(logits, line.long(), _ints(ROWS, 4, 20), zeros(ROWS, 4, 21, dtype=FP32), line)


def edits() -> None:
    """Of single logits, and what typical-p and its kin cut off."""
    scores, of_rows = zeros(ROWS, VOCABULARY, dtype=FP32), _ints(ROWS)
    lists = TargetLists.of([[Target(3, 1.0, sequences={(1, 2): 1.0})], [Target(4)]], "cpu")
    history = History(_ints(500), of_rows, of_rows, of_rows, 100)
    token_edits_triton.edit_tokens(scores, lists, of_rows, of_rows, history)
    token_edits_triton.ban_repeats(scores, _ints(2, 2), of_rows, history)
    token_edits_triton.force_tokens(scores, Forced(_ints(2), lists), of_rows, of_rows, of_rows, of_rows)
    token_edits_triton.grow_ends(scores, Decays(lists, _ints(2), zeros(2, 5, dtype=FP32)), of_rows, of_rows)
    token_edits_triton.append_tokens(history, of_rows.long())
    table = RecipeTable([Recipe(typical_p=0.9), Recipe(epsilon=0.1, eta=0.1)], VOCABULARY, "cpu")
    for logits in (scores, scores.to(BF16)):
        typical_eta_triton.typical_eta_cuts(logits, table, of_rows, scores[:, 0].contiguous())


def fused_layers() -> None:
    for case in (0, 8):
        given = rope_case(case, ROPE[case], BF16, 4)
        layer_ops_triton.rope_and_write(*parts(given.pop("merged"), ROPE[case]), **given)
    layer_ops_triton.add_rms_norm(**norm_case(0, NORM[0], BF16, 4))
    digest_triton.digest(torch.zeros(1 << 16, dtype=torch.uint8))


def delta_rule(lengths: list[int]) -> None:
    """Of Qwen3.5's shape."""
    spans, heads, tokens = Spans.of(lengths, [-1, 0, 1], [0, 2, 1]), 32, sum(lengths)
    convolution_triton.short_convolution(zeros(tokens, 256), zeros(256, 4), None, zeros(3, 3, 256), spans, "silu")
    q, v, beta = zeros(tokens, 16, 128), zeros(tokens, heads, 128), zeros(tokens, heads)
    states = zeros(3, heads, 128, 128, dtype=FP32)
    delta_rule_triton.delta_rule(q, q, v, beta.float(), beta, states, spans, normalise=True)


def state_space(lengths: list[int]) -> None:
    """Of Granite 4 H small's shape, and Mamba's."""
    spans, heads, tokens = Spans.of(lengths, [-1, 0, 1], [0, 2, 1]), 128, sum(lengths)
    wide, of_head = zeros(tokens, heads * 64 + 2 * 128), zeros(heads)
    x, keys = wide[:, : heads * 64].unflatten(1, (heads, 64)), wide[:, heads * 64 :].unflatten(1, (2, 128))
    states = zeros(3, heads, 64, 128, dtype=FP32)
    dt = zeros(tokens, heads)
    state_space_triton.state_space(x, dt, of_head.float(), keys[:, :1], keys[:, 1:], of_head, of_head, states, spans)
    x, key, of_channel = zeros(tokens, 256), zeros(tokens, 16), zeros(256)
    states, rates = zeros(3, 256, 16, dtype=FP32), zeros(256, 16, dtype=FP32)
    selective_scan_triton.selective_scan(x, x, rates, key, key, of_channel, x, of_channel, states, spans)


def gated_ops() -> None:
    of_head, of_token, heads = zeros(32), zeros(ROWS, 32), zeros(ROWS, 32, 128)
    gated_ops_triton.decay_and_beta(of_token, of_token, of_head, of_head)
    gated_ops_triton.gated_norm(heads, heads, zeros(128), 1e-6, NormForm())
    wide = zeros(ROWS, 1, 8192)
    gated_ops_triton.gated_norm(wide, wide, zeros(8192), 1e-6, NormForm(gate_first=True))


RECIPES: dict[str, Callable[[], None]] = {
    **{
        f"decode, {tile} lines, head {dim}": (lambda tile=tile, dim=dim: decode(dim, BF16, tile))
        for tile in (16, 64)
        for dim in (64, 128, 256)
    },
    "decode, 16 lines, head 128, one page each": lambda: decode(128, BF16, 16, brief=True),
    "decode, 64 lines, head 128, all options": lambda: decode(128, BF16, 64, full=True),
    **{f"prompts, head {dim}": (lambda dim=dim: prefill(dim, BF16)) for dim in (64, 128, 256)},
    "prompts, head 128, all options": lambda: prefill(128, FP16, full=True),
    **{f"decode, 64 lines, head {dim}, float32": (lambda dim=dim: decode(dim, FP32, 64)) for dim in (128, 256)},
    **{f"prompts, head {dim}, float32": (lambda dim=dim: prefill(dim, FP32)) for dim in (128, 256)},
    "merge, head 128": lambda: merge(128, BF16),
    **{
        f"fixed parts, {tile} lines, head {dim}": (lambda tile=tile, dim=dim: fixed_parts(dim, BF16, tile))
        for tile in (16, 64)
        for dim in (128, 256)
    },
    "fixed parts, 128 lines, head 128": lambda: fixed_parts(128, BF16, 128),
    "fixed parts, 128 lines, head 64, all options": lambda: fixed_parts(64, FP16, 128, full=True),
    "experts, 8 rows each": lambda: experts(16),
    "experts, 20 rows each": lambda: experts(40),
    "experts, 96 rows each": lambda: experts(192),
    "experts, many rows": lambda: experts(1024),
    "experts of GPT-OSS, few rows": lambda: experts(16, interleaved=True),
    "experts of GPT-OSS, many rows": lambda: experts(1024, interleaved=True),
    "experts, float32": lambda: experts(16, dtype=FP32),
    "drawing a token": sampling,
    "before a token is drawn": before_sampling,
    "single logits, typical, epsilon and eta": edits,
    "fused layers": fused_layers,
    "delta rule, decode": lambda: delta_rule([1, 1, 1]),
    "delta rule, prompts": lambda: delta_rule([500, 300, 7]),
    "state spaces, decode": lambda: state_space([1, 1, 1]),
    "state spaces, prompts": lambda: state_space([500, 300, 7]),
    "gates and norms": gated_ops,
}
