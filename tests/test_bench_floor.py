"""The floor: the least time of a run, held against counts of its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hf_batchllm.bench.contenders import Ours
from hf_batchllm.bench.floor import Mixture, NoFloorError, Rates, Shape, floor_of, measure_rates, with_shares
from hf_batchllm.bench.workload import SHAPES, PromptGroup, Workload, load_model
from hf_batchllm.patches.fusable_experts import mixtures

RATES = Rates(780e12, 4.2e12)


def dense(hidden: int, heads: int, kv_heads: int, inner: int, layers: int, vocabulary: int) -> Shape:
    """With heads of 128: q and o, k and v, gate, up and down."""
    of_a_layer = 2 * hidden * 128 * (heads + kv_heads) + 3 * hidden * inner
    kv_bytes = 2 * kv_heads * 128 * 2 * layers
    return Shape(heads, 128, hidden * vocabulary, layers * of_a_layer, kv_bytes, (None,) * layers)


LLAMA_8B = dense(4096, 32, 8, 14336, 32, 128256)
QWEN_06B = dense(1024, 16, 8, 3072, 28, 151936)


@pytest.mark.parametrize(
    ("shape", "workload", "seconds"),
    [
        (LLAMA_8B, Workload(800, 2000, 200, 100, degree=16), 7.40),
        (LLAMA_8B, Workload(800, 2000, 200, 100, degree=4), 13.89),
        (LLAMA_8B, Workload(200, 2000, 200, 100, degree=1), 9.97),
        (LLAMA_8B, Workload(832, 2000, 200, 100, degree=64), 6.00),
        (LLAMA_8B, Workload(256, 0, 128, 512, degree=1), 4.67),
        (QWEN_06B, Workload(256, 0, 128, 512, degree=1), 1.610),
    ],
    ids=str,
)
def test_the_floor_of_well_known_runs(shape: Shape, workload: Workload, seconds: float) -> None:
    """Worked out elsewhere from the same counts, at 780 TFLOP/s and 4.2 TB/s."""
    assert floor_of(shape, workload.groups, RATES).seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("name", "shape"), [("llama-8b", LLAMA_8B), ("qwen3-0.6b", QWEN_06B)])
def test_a_shape_is_read_off_the_model(name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(None, name, torch.device("meta"), torch.bfloat16)
    # A model without weights is no model to generate with; its sizes are all that counts here.
    monkeypatch.setattr("hf_batchllm.model.inspection.architecture._single_device", lambda *args: torch.device("cpu"))
    assert Shape.of(model) == shape


def test_models_of_other_kinds() -> None:
    windows = Shape.of(build("gemma3")).windows
    assert None in windows and len(set(windows)) == 2
    jamba = Shape.of(build("jamba"))
    assert jamba.state_bytes and jamba.mixtures and len(jamba.windows) == 1
    for name in ("jetmoe", "zamba"):  # Zamba multiplies head by head, by parameters of the mixer's own
        with pytest.raises(NoFloorError, match="mixture of experts"):
            Shape.of(build(name))


def test_experts_that_are_linear_layers_in_a_list_have_no_floor() -> None:
    """A token meets few of them, and only the code of their layer says which."""
    model = copy.deepcopy(build("llama"))
    model.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
    with pytest.raises(NoFloorError, match="mixture of experts"):
        Shape.of(model)


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "name",
    ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoeshared", "ernie4_5_moe", "glm4_moe", "gemma4_moe"],
)
def test_the_matrices_of_a_mixture_are_all_counted(name: str) -> None:
    """Once for each token, or once for each expert: embeddings, biases and norms are no products."""
    model = build(name)
    shape = Shape.of(model)
    top = getattr(model.config, "moe_k", None) or getattr(model.config, "top_k_experts", None)
    assert shape.mixtures and {(each.experts, each.top) for each in shape.mixtures} == {(4, top or 2)}
    weights = {
        id(parameter): parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not name.endswith(("_bias", "embed_tokens.weight", "embed_tokens_per_layer.weight"))
    }
    own_head = {id(model.get_output_embeddings().weight)} & set(weights)
    counted = shape.linear_weights + bool(own_head) * shape.head_weights
    assert counted + sum(each.experts * each.weights for each in shape.mixtures) == sum(weights.values())
    of_one = sum(each.top * each.weights for each in shape.mixtures)
    assert shape.met_weights == shape.linear_weights + of_one


# Of Qwen3-30B-A3B: 48 layers of attention and router; experts of 3 x 2,048 x 768.
QWEN_30B = dense(2048, 32, 4, 0, 48, 151936)
QWEN_30B = replace(
    QWEN_30B,
    linear_weights=QWEN_30B.linear_weights + 48 * 128 * 2048,
    mixtures=(Mixture(128, 8, 3 * 2048 * 768),) * 48,
)


def test_a_step_reads_the_experts_that_its_rows_meet() -> None:
    one, few, many = QWEN_30B.step_bytes(np.array([1, 16, 4096]))
    expert = 2 * 48 * 3 * 2048 * 768
    always = 2 * (QWEN_30B.linear_weights + 2048 * 151936)
    assert one == pytest.approx(always + 8 * expert)
    assert few == pytest.approx(always + 128 * (1 - (120 / 128) ** 16) * expert)
    assert many == pytest.approx(always + 128 * expert)
    # Half of all experts get no token of the run: then no step meets them.
    uneven = replace(QWEN_30B, mixtures=(replace(QWEN_30B.mixtures[0], shares=(1 / 8,) * 64 + (0.0,) * 64),) * 48)
    assert uneven.step_bytes(np.array([4096]))[0] == pytest.approx(always + 64 * expert)
    assert uneven.experts_met(np.array([4096, 4096])) == pytest.approx(64)
    assert QWEN_30B.experts_met(np.array([1])) == pytest.approx(8) and LLAMA_8B.experts_met(np.array([1])) == 0


def test_steps_draw_as_many_experts_as_chance_lets_them() -> None:
    """The expected number, beside steps that are drawn."""
    shares = np.array([0.9, 0.5, 0.3, 0.2, 0.1, 0.0])
    drawn = np.random.default_rng(0).random((4000, 5, len(shares))) < shares  # [steps, rows, experts]
    met = Mixture(6, 2, 1, shares=tuple(shares)).met(np.array([5, 1, 5]))
    assert met == pytest.approx([drawn.any(1).sum(1).mean(), 2, met[0]], rel=0.02)


def test_the_floor_of_a_mixture() -> None:
    """256 x 128 -> 512, by hand: products of 3 billion weights a token, and 61 GB in nearly every step."""
    found = floor_of(QWEN_30B, Workload(256, 0, 128, 512, degree=1).groups, RATES)
    a_token = 2 * (QWEN_30B.linear_weights + 48 * 8 * 3 * 2048 * 768)
    head = 2 * 2048 * 151936
    rows = 256 * 511
    assert found.products_seconds == pytest.approx(
        (a_token * (256 * 128 + rows) + head * (256 + rows)) / 780e12, rel=0.01
    )
    step = QWEN_30B.step_bytes(np.array([256]))[0] / 4.2e12 - 256 * (a_token + head) / 780e12
    assert found.weights_seconds == pytest.approx(511 * step) and found.experts_met == pytest.approx(128, rel=1e-4)
    assert 256 * 512 / found.seconds == pytest.approx(15_500, rel=0.05)
    # Fewer experts met, or a dense model of as many weights a token: less to read.
    dense = replace(QWEN_30B, linear_weights=QWEN_30B.met_weights, mixtures=())
    assert floor_of(dense, Workload(256, 0, 128, 512, degree=1).groups, RATES).seconds < found.seconds / 2


def test_prompts_read_the_weights_once_at_least() -> None:
    for group in (PromptGroup(0, [20], [1]), PromptGroup(10, [5, 5], [1, 1])):
        found = floor_of(QWEN_30B, [group], RATES)
        assert found.seconds >= QWEN_30B.step_bytes(np.array([20]))[0] / RATES.copy
        assert found.experts_met == 0
    # Shared prefixes: each step of the longest answer reads them as well, if there is so little else to do.
    longer = floor_of(QWEN_30B, [PromptGroup(10, [5, 5], [1, 9])], RATES)
    reads = QWEN_30B.step_bytes(np.array([20, *[1] * 8])).sum()
    assert longer.weights_seconds + longer.products_seconds == pytest.approx(reads / RATES.copy, rel=1e-2)


def test_steps_of_a_run_meet_about_as_many_experts_as_said() -> None:
    """And no fewer: an answer's tokens resemble each other, so rows of different answers meet somewhat more."""
    fields = SHAPES["qwen3-30b-a3b"] | {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 2048, "head_dim": 16}
    fields |= {"num_attention_heads": 4, "num_experts": 64, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    modules, rows = [each.module for each in mixtures(model)], 12
    workload = Workload(rows, 0, 8, 24, 1)
    prompts = workload.prompts(2048)
    met: list[int] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: met.append(len(given[1].unique()))) for module in modules
    ]
    ours = Ours(model)
    with pytest.warns(UserWarning, match="hooks"):
        answers = ours(prompts, workload.answers)
    assert int(ours.report.timeline.running.max()) == rows
    for hook in hooks:
        hook.remove()
    expected = with_shares(Shape.of(model), model, prompts, answers).experts_met(np.array([rows]))
    in_steps = np.mean(met[-2 * 23 :])
    assert 0.8 * in_steps < expected < in_steps


def test_shares_are_counted_over_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")
    shape, modules = Shape.of(model), [each.module for each in mixtures(model)]
    prompts, answers = [[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14]]
    hooks = [len(module._forward_pre_hooks) for module in modules]
    counted = with_shares(shape, model, prompts, answers)
    found = counted.mixtures
    assert counted.routed_tokens == 2 + 1  # an answer's last token is not read
    chosen: list[torch.Tensor] = []
    own = type(modules[0]).forward

    def watched(self: Any, states: torch.Tensor, indices: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        chosen.append(indices)
        return own(self, states, indices, *rest)

    monkeypatch.setattr(type(modules[0]), "forward", watched)
    for prompt, answer in zip(prompts, answers, strict=True):
        model(torch.tensor([prompt + answer[:-1]]))
    for nth, each in enumerate(found):
        met = torch.cat([chosen[nth][3:], chosen[nth + len(found)][2:]])  # [tokens, top]
        assert each.shares == pytest.approx((torch.bincount(met.flatten(), minlength=4) / 3).tolist())
        assert sum(each.shares) == pytest.approx(each.top)
    assert [len(module._forward_pre_hooks) for module in modules] == hooks
    # Answers of one token read none: then the prompts' tokens count.
    assert with_shares(shape, model, prompts, [[1], [2]]).routed_tokens == 5


def test_answers_of_different_lengths_cost_what_they_are() -> None:
    one, two = (floor_of(LLAMA_8B, [PromptGroup(0, [100], [new])], RATES) for new in (50, 300))
    both = floor_of(LLAMA_8B, [PromptGroup(0, [100, 100], [50, 300])], RATES)
    for name in ("operations", "kv_bytes", "prompt_tokens", "decode_tokens"):
        assert getattr(both, name) == pytest.approx(getattr(one, name) + getattr(two, name))
    # Two rows read the weights together: the longer answer takes them as often as there are steps.
    assert both.weights_seconds < one.weights_seconds + two.weights_seconds
    assert both.weights_seconds == pytest.approx(two.weights_seconds, rel=0.1)


def test_a_window_reads_no_further_than_it_is_wide() -> None:
    near, wide = (replace(LLAMA_8B, windows=(keys,) * 32) for keys in (64, 10_000))
    group = [PromptGroup(500, [10, 10], [100, 100])]
    assert floor_of(wide, group, RATES) == floor_of(LLAMA_8B, group, RATES)
    needs = floor_of(near, group, RATES)
    # 99 steps of two rows, no more than 64 keys each; and the prefix is read once for both while it is in sight.
    assert 99 * 64 * near.kv_bytes < needs.kv_bytes < 2 * 99 * 65 * near.kv_bytes
    assert needs.operations < floor_of(LLAMA_8B, group, RATES).operations


def test_the_rates_are_rates() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert rates.operations > 1e8 and rates.copy > 1e8 and "TFLOP/s and" in str(rates)
