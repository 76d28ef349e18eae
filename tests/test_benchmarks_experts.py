"""The bench of experts: the layers that it makes, what they read at least, and that both ways give the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support_fused import TWINS

from hf_batchllm.bench.shapes import SHAPES, layer_products

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "benchmarks"))

import bench_experts
import calibrate_experts
from bench_support.expert_layers import NAMES, ExpertShape, experts_of, with_tokens

LESS = {
    "qwen3-30b-a3b": {"hidden_size": 64, "num_experts": 16, "moe_intermediate_size": 32},
    "gpt-oss-20b": {"hidden_size": 64, "num_local_experts": 8, "intermediate_size": 32},
    "mixtral-8x7b": {"hidden_size": 64, "intermediate_size": 32},
}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def test_the_shapes_are_those_of_the_models() -> None:
    assert set(NAMES) == set(LESS)
    shapes = {name: ExpertShape.of(name) for name in NAMES}
    assert shapes["qwen3-30b-a3b"] == ExpertShape(128, 8, 2048, 768)
    assert shapes["gpt-oss-20b"] == ExpertShape(32, 4, 2880, 2880)
    assert shapes["mixtral-8x7b"] == ExpertShape(8, 2, 4096, 14336)
    for name, shape in shapes.items():
        one_layer = 2 * 1.5 * shape.experts * shape.up_weights
        assert shape.layers >= 2 and shape.layers * one_layer >= 3e9
        with pytest.raises(ValueError, match="has experts"):
            layer_products(name)


def test_the_floor_is_reading_for_few_tokens_and_computing_for_many() -> None:
    shape = ExpertShape(128, 8, 2048, 768)
    up, down = shape.floors(16, met=80, copy=4e12, matmul=8e14)
    assert up == pytest.approx(1e3 * 80 * 2 * 768 * 2048 * 2 / 4e12) == 2 * down
    up, down = shape.floors(100_000, met=128, copy=4e12, matmul=8e14)
    assert up == pytest.approx(1e3 * 2 * 800_000 * 2 * 768 * 2048 / 8e14) == 2 * down


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_ours_and_theirs_agree(name: str) -> None:
    found = experts_of(name, 2, "cpu", torch.float32, **LESS[name] | FEW_HEADS)
    assert len(found) == 2
    for layer in with_tokens(found, 5):
        assert layer.x.shape == (5, 64) and layer.indices.shape == (5, SHAPES[name]["num_experts_per_tok"])
        assert layer.met == len(set(layer.indices.flatten().tolist()))
        torch.testing.assert_close(layer.ours(TWINS.experts), layer.theirs(), rtol=1e-4, atol=1e-6)
        (up, bias), (down, _) = layer.weight("gate_up_proj"), layer.weight("down_proj")
        assert up.shape[1:] == (64, 64) and down.shape[1:] == (64, 32) and (bias is not None) == ("gpt" in name)


def test_tokens_that_resemble_each_other_meet_fewer_experts() -> None:
    found = experts_of("qwen3-30b-a3b", 2, "cpu", torch.float32, **LESS["qwen3-30b-a3b"] | FEW_HEADS)

    def met(alike: float) -> int:
        return sum(layer.met for layer in with_tokens(found, 12, alike))

    assert met(20.0) < met(0.0)


def test_a_line_has_a_column_for_each_head() -> None:
    figures = {"tokens": 8192, "met": 127.9, "differ": 3e-3, "dense_ms": None, "theirs_ms": None}
    times = ("floor", "up_floor", "down_floor", "route", "up", "down", "sum")
    figures |= {f"{name}_ms": 1.25 for name in times} | {"ms": 5.0}
    line = bench_experts.line_of("qwen3-30b-a3b", figures)
    assert len(line) == len(bench_experts.HEAD) and "  25%" in line and line.count(" -") == 2
    full = bench_experts.line_of("qwen3-30b-a3b", figures | {"dense_ms": 2.0, "theirs_ms": 12.5})
    assert len(full) == len(line) and " 2.5x" in full and "  80%" in full


@torch.no_grad()
def test_the_kernels_are_timed_on_what_the_one_before_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the twins: their results are those of the whole."""
    monkeypatch.setattr(bench_experts, "KERNELS", TWINS.experts)
    monkeypatch.setattr(bench_experts, "DTYPE", torch.float32)
    found = experts_of("mixtral-8x7b", 2, "cpu", torch.float32, **LESS["mixtral-8x7b"] | FEW_HEADS)
    (layer, _) = with_tokens(found, 6)
    pieces = bench_experts.pieces_of(layer, ExpertShape(8, 2, 64, 32))
    assert list(pieces) == ["route", "up", "down", "sum"]
    made = [piece() for piece in pieces.values()]
    torch.testing.assert_close(made[-1], layer.ours(TWINS.experts))


def test_the_tiles_to_try_suit_the_rows_that_an_expert_has() -> None:
    shape = ExpertShape(128, 8, 2048, 768)
    assert [calibrate_experts.row_sizes(shape, tokens)[-1] for tokens in (16, 256, 1024, 8192)] == [16, 32, 64, 128]
    found = experts_of("gpt-oss-20b", 2, "cpu", torch.float32, **LESS["gpt-oss-20b"] | FEW_HEADS)
    jobs = calibrate_experts.jobs_of(shape, with_tokens(found, 1)[0], 256)
    assert {job.rows for job in jobs} == {16, 32} and {job.which for job in jobs} == {"up", "down"}
    assert all(job.transposed and job.biased and job.gating.interleaved for job in jobs)
    assert len(set(jobs)) == len(jobs)
