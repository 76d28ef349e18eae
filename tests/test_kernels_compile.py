"""The small kernels go through Triton's compiler for a Hopper card: its interpreter takes what that one refuses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from support_kernels import plain
from support_small_cases import NORM, ROPE, norm_case, parts, rope_case

from hf_batchllm.kernels.lists.sampling_recipes import Recipe, RecipeTable, RowRecipes
from hf_batchllm.kernels.lists.spans import Spans
from hf_batchllm.kernels.lists.work_lists import CHUNK_FIELDS, ENTRY_FIELDS, PrefillWork
from hf_batchllm.kernels.reference.experts_torch import Gating
from hf_batchllm.kernels.reference.gated_ops_torch import NormForm
from hf_batchllm.kernels.reference.routing_torch import Rule
from hf_batchllm.kernels.triton import (
    convolution_triton,
    delta_rule_triton,
    experts_triton,
    gated_ops_triton,
    layer_ops_triton,
    penalties_triton,
    prefill_hopper,
    routing_triton,
    sample_triton,
    selective_scan_triton,
    state_space_triton,
    token_masks_triton,
    top_k_top_p_triton,
)

pytestmark = [
    plain,
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="Triton has no compiler for Hopper here"),
]
VOCABULARY, ROWS = 3000, 3
BF16 = torch.bfloat16


class Names(list[str]):
    """Of kernels, in their order, beside the last code of each."""

    def __init__(self) -> None:
        super().__init__()
        self.ptx: dict[str, str] = {}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """The names of kernels that were compiled where they would have been launched."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.runtime import jit

    target = GPUTarget("cuda", 90, 32)
    backend, names = CUDABackend(target), Names()

    def compile_it(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        find = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, kinds, rest = find(*given, **options)
        chosen, signature, constants, attributes = self._pack_args(backend, options, bound, kinds, rest)
        kind = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
        source = kind(self, signature, constants, attributes)
        made = triton.compile(source, target=target, options=chosen.__dict__)
        names.append(self.fn.__name__)
        names.ptx[self.fn.__name__] = made.asm["ptx"]

    monkeypatch.setattr(jit.JITFunction, "run", compile_it)
    yield names
    assert names


@pytest.mark.parametrize(
    ("seeds", "temperature", "cut"),
    [(1, 0.7, False), (ROWS, 0.7, True), (1, "of each row", True), (ROWS, "of each row", False),
     (ROWS, "the best of some", False), (1, "the best of some", True)],
)  # fmt: skip
def test_sampling(compiled: list[str], seeds: int, temperature: Any, cut: bool) -> None:
    logits, numbers = torch.zeros(ROWS, VOCABULARY, dtype=BF16), torch.zeros(4, ROWS, dtype=torch.int32)
    if isinstance(temperature, str):
        recipes = [Recipe(temperature=0.5), Recipe(temperature=0 if "best" in temperature else 0.8)]
        temperature = RowRecipes(RecipeTable(recipes, VOCABULARY, "cpu"), numbers[3])
    edge = torch.zeros(ROWS) if cut else None
    seed = torch.zeros(seeds, dtype=torch.int64)
    sample_triton.gumbel_sample(logits, temperature, seed, *numbers[:3], threshold=edge)
    assert compiled == ["_noisy_weight_of_block", "_draw_from_best_block"]


def test_what_goes_before_and_after_sampling(compiled: list[str]) -> None:
    logits = torch.zeros(ROWS, VOCABULARY, dtype=BF16)
    which, line = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    seen = torch.zeros(ROWS, VOCABULARY // 32 + 1, dtype=torch.int32)
    sample_triton.greedy(logits)
    recipes = [Recipe(1.2, 0.5, 40, 0.9, 0.1), Recipe(temperature=0)]
    by_row = RowRecipes(RecipeTable(recipes, VOCABULARY, "cpu"), which)
    top_k_top_p_triton.cutoffs(logits, temperature=1.0, top_k=None, top_p=None, min_p=None, by_row=by_row)
    eos, minimum = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int32)
    penalties_triton.penalise(
        logits, by_row=by_row, seen=seen, line=line, penalty=1.2, eos=eos, made=minimum, minimum=minimum
    )
    penalties_triton.mark_seen(seen, torch.zeros(ROWS, dtype=torch.int64), VOCABULARY, line)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_masks_of_grammars(compiled: list[str], dtype: torch.dtype) -> None:
    logits, bits = (
        torch.zeros(ROWS, VOCABULARY, dtype=dtype),
        torch.zeros(ROWS, -(-VOCABULARY // 32), dtype=torch.int32),
    )
    token_masks_triton.mask_tokens(logits, bits)
    token_masks_triton.mask_tokens(logits, bits, line=torch.zeros(ROWS, dtype=torch.int32), out=logits)


@pytest.mark.parametrize("case", range(0, len(ROPE), 2))
def test_rotation(compiled: list[str], case: int) -> None:
    given = rope_case(case, ROPE[case], BF16, 4)
    layer_ops_triton.rope_and_write(*parts(given.pop("merged"), ROPE[case]), **given)


@pytest.mark.parametrize("case", range(0, len(NORM), 2))
def test_norm(compiled: list[str], case: int) -> None:
    layer_ops_triton.add_rms_norm(**norm_case(case, NORM[case], BF16, 4))


@pytest.mark.parametrize(("interleaved", "tokens"), [(False, 512), (True, 4)], ids=["wide", "narrow"])
def test_experts(compiled: list[str], interleaved: bool, tokens: int) -> None:
    experts, hidden, inter, top = 4, 256, 128, 2
    groups = {"groups": 2, "top_groups": 1, "group_best": 2}
    rule = Rule(top, "sigmoid", **groups) if interleaved else Rule(top)
    logits, bias = torch.zeros(tokens, experts, dtype=BF16), torch.zeros(experts) if interleaved else None
    tile = experts_triton.rows_of_a_tile(tokens * top, experts, BF16)
    choice, rows = routing_triton.choose(logits, rule, tile, BF16, bias)
    routing_triton.rows_of_experts(choice.indices, experts, tile)
    up, down = (torch.zeros(experts, *shape, dtype=BF16) for shape in ((2 * inter, hidden), (hidden, inter)))
    up_bias, down_bias = (torch.zeros(experts, size, dtype=BF16) for size in (2 * inter, hidden))
    if interleaved:
        up, down = up.transpose(1, 2).contiguous().transpose(1, 2), down.transpose(1, 2).contiguous().transpose(1, 2)
    gating = Gating("gpt_oss", 7.0, interleaved=True) if interleaved else Gating()
    x = torch.zeros(tokens, hidden, dtype=BF16)
    made = experts_triton.up_products(x, up, up_bias if interleaved else None, rows, top, gating)
    made = experts_triton.down_products(made, down, down_bias if interleaved else None, rows)
    experts_triton.sum_of_shares(made, choice.shares)
    assert len(compiled) == 5


def test_prefill_in_gluon(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no interpreter at all. Two sides compile in half the time of three."""
    monkeypatch.setattr(prefill_hopper, "sides", lambda qk_dim, v_dim: 2)
    q, pages = torch.zeros(1, 8, 64, dtype=BF16), torch.zeros(1, 32, 2, 64, dtype=BF16)
    lists = [torch.zeros(1, fields, dtype=torch.int32) for fields in (CHUNK_FIELDS, 1, ENTRY_FIELDS)]
    work = PrefillWork(*lists, 2 * prefill_hopper.LINES)
    prefill_hopper.attend_chunks(
        q, pages, pages, q, work, 0.3, 20.0, blocks=1, window=100, caps=True, sinks=q[0, :, 0].contiguous()
    )
    assert compiled == ["_attend_chunks"]


@pytest.mark.parametrize("lengths", [[1] * ROWS, [5, 1, 3]], ids=["rows", "prompts"])
def test_states(compiled: list[str], lengths: list[int]) -> None:
    spans = Spans.of(lengths, [-1, 0, 1], [0, 2, 1])
    tokens, heads = sum(lengths), 4

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    convolution_triton.short_convolution(zeros(tokens, 256), zeros(256, 4), None, zeros(3, 3, 256), spans, "silu")
    for decay in (zeros(tokens, heads), zeros(tokens, heads, 128)):
        states = zeros(3, heads, 128, 128, dtype=torch.float32)
        q, v = zeros(tokens, 2, 128), zeros(tokens, heads, 128)
        delta_rule_triton.delta_rule(q, q, v, decay.float(), zeros(tokens, heads), states, spans, normalise=True)
    states, of_head = zeros(3, heads, 64, 128, dtype=torch.float32), zeros(heads)
    x, dt, key = zeros(tokens, heads, 64), zeros(tokens, heads), zeros(tokens, 1, 128)
    state_space_triton.state_space(x, dt, of_head.float(), key, key, of_head, of_head, states, spans)
    x, key, of_channel = zeros(tokens, 256), zeros(tokens, 16), zeros(256)
    states, rates = zeros(3, 256, 16, dtype=torch.float32), zeros(256, 16, dtype=torch.float32)
    selective_scan_triton.selective_scan(x, x, rates, key, key, of_channel, x, of_channel, states, spans)
    convolutions = ["_short_convolution"] if spans.single else ["_short_convolution", "_keep_inputs"]
    by_head = ["_delta_rule"] if spans.single else ["_solve_chunks", "_walk_chunks"]
    rules = [*by_head, "_delta_rule"]  # by head, by key
    spaces = ["_state_space"] if spans.single else ["_decays_in_chunks", "_space_in_chunks"]
    assert compiled == [*convolutions, *rules, *spaces, "_selective_scan"]


def test_the_elementwise_work_of_layers_that_carry_a_state(compiled: Names) -> None:
    of_head, of_token = torch.zeros(4, dtype=BF16), torch.zeros(ROWS, 4, dtype=BF16)
    gated_ops_triton.decay_and_beta(of_token, of_token, of_head, of_head)
    heads = torch.zeros(ROWS, 4, 128, dtype=BF16)
    gated_ops_triton.gated_norm(heads, heads, torch.zeros(128, dtype=BF16), 1e-6, NormForm())
    wide, weight = torch.zeros(ROWS, 1, 8192, dtype=BF16), torch.zeros(8192, dtype=BF16)
    gated_ops_triton.gated_norm(wide, wide, weight, 1e-6, NormForm(gate_first=True))
    assert compiled == ["_decay_and_beta", "_gated_norm", "_gated_norm"]
    assert_no_register_is_spilled(compiled)


def test_a_walk_through_chunks_waits_for_no_memory(compiled: Names) -> None:
    """At the shape of Qwen3.5: no register is spilled, and the state meets tensor cores of a whole warp group."""
    tokens, heads, spans = 800, 32, Spans.of([500, 300], [-1, 0], [0, 1])
    q, v = torch.zeros(tokens, 16, 128, dtype=BF16), torch.zeros(tokens, heads, 128, dtype=BF16)
    states, beta = torch.zeros(2, heads, 128, 128), torch.zeros(tokens, heads, dtype=BF16)
    delta_rule_triton.delta_rule(q, q, v, beta.float(), beta, states, spans, normalise=True)
    assert compiled == ["_solve_chunks", "_walk_chunks"]
    assert "wgmma.mma_async" in compiled.ptx["_walk_chunks"]
    assert_no_register_is_spilled(compiled)


def test_a_state_space_walks_through_chunks_likewise(compiled: Names) -> None:
    """At the shape of Granite 4 H small."""
    tokens, heads, spans = 800, 128, Spans.of([500, 300], [-1, 0], [0, 1])
    wide, of_head = torch.zeros(tokens, heads * 64 + 2 * 128, dtype=BF16), torch.zeros(heads, dtype=BF16)
    x, keys = wide[:, : heads * 64].unflatten(1, (heads, 64)), wide[:, heads * 64 :].unflatten(1, (2, 128))
    b, c = keys[:, :1], keys[:, 1:]
    dt, states = torch.zeros(tokens, heads, dtype=BF16), torch.zeros(2, heads, 64, 128)
    state_space_triton.state_space(x, dt, of_head.float(), b, c, of_head, of_head, states, spans)
    assert compiled == ["_decays_in_chunks", "_space_in_chunks"]
    assert "wgmma.mma_async" in compiled.ptx["_space_in_chunks"]
    assert_no_register_is_spilled(compiled)


def assert_no_register_is_spilled(compiled: Names) -> None:
    for name in compiled:
        said = assembled(compiled.ptx[name])
        print(name, said)
        assert "0 bytes spill stores, 0 bytes spill loads" in said


def assembled(ptx: str) -> str:
    """What the assembler says of registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", "-o", os.devnull, "-"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
