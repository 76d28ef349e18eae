"""What the benchmark works out: the least time of a run, the lengths of a workload, how busy a device was."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hf_batchllm.bench.contenders import Ours
from hf_batchllm.bench.device_time import BusySpan, Gap, device_time_table, kind_of, time_of
from hf_batchllm.bench.floor import Shape, floor_of
from hf_batchllm.bench.gpu_busy import busy_share_of, gpu_busy
from hf_batchllm.bench.machine_rates import Rates, measure_rates
from hf_batchllm.bench.matrices import Mixture, NoFloorError, matrices_of
from hf_batchllm.bench.models import load_model
from hf_batchllm.bench.routing_shares import with_measured_shares
from hf_batchllm.bench.shapes import SHAPES
from hf_batchllm.bench.workload import Mix, MixedGroups, PromptGroup, Workload

RATES = Rates(780e12, 4.2e12)
LLAMA_8B = Shape(
    hidden=4096,
    heads=32,
    head_dim=128,
    vocabulary=128256,
    linear_weights=6_979_321_856,
    kv_bytes=2 * 8 * 128 * 2 * 32,
    windows=(None,) * 32,
    query_key_value=(32 + 2 * 8) * 128,
    mlp_width=14336,
    gated=True,
)
QWEN_06B = Shape(
    hidden=1024,
    heads=16,
    head_dim=128,
    vocabulary=151936,
    linear_weights=28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072),
    kv_bytes=2 * 8 * 128 * 2 * 28,
    windows=(None,) * 28,
    query_key_value=(16 + 2 * 8) * 128,
    mlp_width=3072,
    gated=True,
)


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
    assert floor_of(shape, workload.as_groups(), RATES).seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("name", "shape"), [("llama-8b", LLAMA_8B), ("qwen3-0.6b", QWEN_06B)])
def test_a_shape_is_read_off_the_model(name: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(None, name, torch.device("meta"), torch.bfloat16)
    # A model without weights is no model to generate with; its sizes are all that counts here.
    monkeypatch.setattr("hf_batchllm.model.architecture._single_device", lambda *args: torch.device("cpu"))
    assert Shape.of(model) == shape


def test_models_of_other_kinds() -> None:
    windows = Shape.of(build("gemma3")).windows
    assert None in windows and len(set(windows)) == 2
    assert not Shape.of(build("gpt2")).gated
    jamba = Shape.of(build("jamba"))
    assert jamba.state_bytes and jamba.mixtures and (jamba.layers, jamba.layers_in_all) == (1, 3)
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
QWEN_30B = Shape(
    hidden=2048,
    heads=32,
    head_dim=128,
    vocabulary=151936,
    linear_weights=48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048),
    kv_bytes=2 * 4 * 128 * 2 * 48,
    windows=(None,) * 48,
    query_key_value=(32 + 2 * 4) * 128,
    mlp_width=6144,
    gated=True,
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
    found = floor_of(QWEN_30B, Workload(256, 0, 128, 512, degree=1).as_groups(), RATES)
    a_token = 2 * (QWEN_30B.linear_weights + 48 * 8 * 3 * 2048 * 768)
    head = 2 * 2048 * 151936
    rows = 256 * 511
    assert found.products == pytest.approx((a_token * (256 * 128 + rows) + head * (256 + rows)) / 780e12, rel=0.01)
    step = QWEN_30B.step_bytes(np.array([256]))[0] / 4.2e12 - 256 * (a_token + head) / 780e12
    assert found.weights == pytest.approx(511 * step) and found.needs.experts_met == pytest.approx(128, rel=1e-4)
    assert 256 * 512 / found.seconds == pytest.approx(15_500, rel=0.05)
    # Fewer experts met, or a dense model of as many weights a token: less to read.
    dense = replace(QWEN_30B, linear_weights=QWEN_30B.met_weights, mixtures=())
    assert floor_of(dense, Workload(256, 0, 128, 512, degree=1).as_groups(), RATES).seconds < found.seconds / 2


def test_prompts_read_the_weights_once_at_least() -> None:
    for group in (PromptGroup(0, [20], [1]), PromptGroup(10, [5, 5], [1, 1])):
        found = floor_of(QWEN_30B, [group], RATES)
        assert found.seconds >= QWEN_30B.step_bytes(np.array([20]))[0] / RATES.copy
        assert found.needs.experts_met == 0
    # Shared prefixes: each step of the longest answer reads them as well, if there is so little else to do.
    longer = floor_of(QWEN_30B, [PromptGroup(10, [5, 5], [1, 9])], RATES)
    reads = QWEN_30B.step_bytes(np.array([20, *[1] * 8])).sum()
    assert longer.weights + longer.products == pytest.approx(reads / RATES.copy, rel=1e-2)


def test_steps_of_a_run_meet_about_as_many_experts_as_said() -> None:
    """And no fewer: an answer's tokens resemble each other, so rows of different answers meet somewhat more."""
    fields = SHAPES["qwen3-30b-a3b"] | {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 2048, "head_dim": 16}
    fields |= {"num_attention_heads": 4, "num_experts": 64, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    mixtures, rows = matrices_of(model).mixtures, 12
    workload = Workload(rows, 0, 8, 24, 1)
    prompts = workload.prompts(2048)
    met: list[int] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: met.append(len(given[1].unique()))) for module, _ in mixtures
    ]
    ours = Ours(model)
    with pytest.warns(UserWarning, match="hooks"):
        answers = ours.run(prompts, workload.answers)
    assert {size.rows for size in ours.scheduler.sizes} == {0, rows}
    for hook in hooks:
        hook.remove()
    found, _ = with_measured_shares(model, mixtures, prompts, answers)
    expected = np.mean([each.met(np.array([rows])) for each in found])
    in_steps = np.mean(met[-2 * 23 :])
    assert 0.8 * in_steps < expected < in_steps


def test_shares_are_counted_over_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3_moe")
    mixtures = matrices_of(model).mixtures
    prompts, answers = [[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14]]
    hooks = [len(module._forward_pre_hooks) for module, _ in mixtures]
    found, tokens = with_measured_shares(model, mixtures, prompts, answers)
    assert tokens == 2 + 1  # an answer's last token is not read
    chosen: list[torch.Tensor] = []
    own = type(mixtures[0][0]).forward

    def watched(self: Any, states: torch.Tensor, indices: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        chosen.append(indices)
        return own(self, states, indices, *rest)

    monkeypatch.setattr(type(mixtures[0][0]), "forward", watched)
    for prompt, answer in zip(prompts, answers, strict=True):
        model(torch.tensor([prompt + answer[:-1]]))
    for nth, each in enumerate(found):
        met = torch.cat([chosen[nth][3:], chosen[nth + len(found)][2:]])  # [tokens, top]
        assert each.shares == pytest.approx((torch.bincount(met.flatten(), minlength=4) / 3).tolist())
        assert sum(each.shares) == pytest.approx(each.top)
    assert [len(module._forward_pre_hooks) for module, _ in mixtures] == hooks
    # Answers of one token read none: then the prompts' tokens count.
    assert with_measured_shares(model, mixtures, prompts, [[1], [2]])[1] == 5


def test_answers_of_different_lengths_cost_what_they_are() -> None:
    one, two = (floor_of(LLAMA_8B, [PromptGroup(0, [100], [new])], RATES) for new in (50, 300))
    both = floor_of(LLAMA_8B, [PromptGroup(0, [100, 100], [50, 300])], RATES)
    for name in ("operations", "kv_bytes", "elementwise_bytes", "prompt_tokens", "decode_tokens"):
        assert getattr(both.needs, name) == pytest.approx(getattr(one.needs, name) + getattr(two.needs, name))
    # Two rows read the weights together: the longer answer takes them as often as there are steps.
    assert both.weights < one.weights + two.weights
    assert both.weights == pytest.approx(two.weights, rel=0.1)
    assert both.alone and not floor_of(LLAMA_8B, [PromptGroup(5, [100], [50])], RATES).alone


def test_a_window_reads_no_further_than_it_is_wide() -> None:
    near = Shape(**{**vars(LLAMA_8B), "windows": (64,) * 32})
    wide = Shape(**{**vars(LLAMA_8B), "windows": (10_000,) * 32})
    group = [PromptGroup(500, [10, 10], [100, 100])]
    assert floor_of(wide, group, RATES).needs == floor_of(LLAMA_8B, group, RATES).needs
    needs = floor_of(near, group, RATES).needs
    # 99 steps of two rows, no more than 64 keys each; and the prefix is read once for both while it is in sight.
    assert 99 * 64 * near.kv_bytes < needs.kv_bytes < 2 * 99 * 65 * near.kv_bytes
    assert needs.operations < floor_of(LLAMA_8B, group, RATES).needs.operations


def test_what_the_small_operations_must_read_and_write() -> None:
    per_layer = 8 * 4096 + 2 * 6144 + 3 * 14336
    needs = floor_of(LLAMA_8B, [PromptGroup(0, [10], [5])], RATES).needs
    assert needs.elementwise_bytes == (10 + 4) * 32 * per_layer * 2


def test_the_rates_are_rates() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert rates.operations > 1e8 and rates.copy > 1e8 and "TFLOP/s and" in str(rates)


def test_the_lengths_of_a_mix() -> None:
    mix = Mix(4000)
    prompts, answers = zip(*mix.lengths(), strict=True)
    for lengths, mean, median in ((prompts, 218, 100), (answers, 201, 112)):
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.07)
        assert statistics.median(lengths) == pytest.approx(median, rel=0.07)
        assert min(lengths) >= 4 and 1500 < max(lengths) <= 2048
    assert mix.lengths() == Mix(4000).lengths() != Mix(4000, seed=1).lengths()
    few = Mix(20, own=200, new=100)
    given = few.prompts(500)
    assert [len(prompt) for prompt in given] == [length for length, _ in few.lengths()]
    assert max(map(len, given)) <= 200 and max(few.answers) <= 100 and len(set(few.answers)) > 5
    assert few.first(5).prompts(500) == given[:5] and few.first(5).answers == few.answers[:5]
    assert max(few.cut_short(3).answers) == 3 and few.cut_short(3).prompts(500) == given
    assert [(*group.own, *group.new) for group in few.as_groups()] == few.lengths()
    with pytest.raises(ValueError, match="--new must be at least 1"):
        Mix(3, new=0)


def test_groups_of_mixed_lengths() -> None:
    mixed = MixedGroups(400, degree=8, seed=3)
    groups = mixed.as_groups()
    assert len(groups) == 50 and sum(len(group.own) for group in groups) == 400
    assert statistics.median(group.shared for group in groups) == pytest.approx(2000, rel=0.3)
    assert min(mixed.answers) == 10 and 1500 < max(mixed.answers) <= 2048
    assert statistics.median(mixed.answers) == pytest.approx(205, rel=0.4)
    few = replace(mixed, requests=6, degree=3, shared=20, own=5)
    given = few.prompts(500)
    assert [len(prompt) for prompt in given] == [length for length, _ in few.lengths()]
    assert sorted(map(len, few.grouped(500))) == sorted(map(len, given)) and few.grouped(500) != given
    assert sorted(few.answers) == sorted(new for group in few.as_groups() for new in group.new)
    assert max(few.cut_short(3).answers) == 3 and few.cut_short(3).prompts(500) == given
    assert few.first(2).requests == 2 == len(few.first(2).prompts(500))
    assert replace(few, open_ended=True).answers == [2048] * 6
    with pytest.raises(ValueError, match="--shared and --degree"):
        MixedGroups(3, shared=0)


def test_the_groups_of_a_workload() -> None:
    groups = Workload(7, 20, 4, 2, degree=3).as_groups()
    assert [len(group.own) for group in groups] == [3, 3, 1]
    assert groups[0] == PromptGroup(20, [4] * 3, [2] * 3)


def test_how_busy_a_device_was() -> None:
    def spans(*pairs: tuple[int, int]) -> np.ndarray:
        return np.array(pairs, dtype=np.int64)

    # Prompts until 500; the last six tenths of what follows begin at 700. Two kernels overlap, one lies in another.
    given = spans((0, 490), (500, 690), (690, 750), (740, 800), (900, 1000), (910, 920))
    busy = busy_share_of(given, prompts_until=500)
    assert busy is not None and busy.share == pytest.approx((100 + 100) / 300) and busy.seconds == pytest.approx(300e-9)
    # A clock that tells another time says nothing: the last six tenths of everything.
    for elsewhere in (-1, 5000):
        busy = busy_share_of(given, prompts_until=elsewhere)
        assert busy is not None and busy.seconds == pytest.approx(600e-9)
        assert busy.share == pytest.approx((90 + 190 + 110 + 100) / 600)
    assert busy_share_of(spans((0, 10), (10, 20)), -1).share == 1.0  # type: ignore[union-attr]
    assert busy_share_of(np.zeros((0, 2), dtype=np.int64), 0) is None
    assert gpu_busy(torch.device("cpu"), lambda: None, lambda: 0) is None


def test_where_a_devices_time_goes() -> None:
    ms = 1_000_000
    spans = [
        BusySpan("nvjet_tst_128x256", 0, 4 * ms),
        BusySpan("_attend_chunks", 4 * ms, 6 * ms),  # the last with prompts
        BusySpan("_act_and_mul", 6 * ms + 5_000, 7 * ms),  # 5 us later
        BusySpan("_attend_items", 9 * ms, 12 * ms),  # two at a time
        BusySpan("_attend_items", 10 * ms, 11 * ms),
        BusySpan("void at::native::elementwise_kernel<128, 4>(int)", 11 * ms, 13 * ms),
    ]
    found = time_of(spans)
    assert found is not None and found.total == pytest.approx(0.013) and found.kernels == 6
    assert sum(found.parts) == pytest.approx(found.total)
    assert found.seconds["products"] == [0.004, 0] and found.seconds["attention of prompts"] == [0.002, 0]
    assert found.seconds["attention of answers"] == [0, pytest.approx(0.003)]
    assert found.seconds["other kernels"] == [0, pytest.approx(0.001)]
    assert found.seconds["idle, under 10 us at a time"] == [0, pytest.approx(5e-6)]
    assert found.seconds["idle, longer"] == [0, pytest.approx(0.002)]
    assert found.gaps[-1] == Gap(pytest.approx(0.007), pytest.approx(0.002), "_act_and_mul", "_attend_items")
    said = device_time_table(found)
    assert "0.013 s" not in said and "0.01 s and 6 kernels" in said and "2.00 ms at   0.007 s" in said
    assert kind_of("splitKreduce_kernel") == "products" and kind_of("Memcpy HtoD (Pinned -> Device)") == "copies"
    assert time_of([]) is None


def test_what_the_profiler_noted_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in: there is no GPU here."""

    class Event:
        def __init__(self, begin: int, end: int, kind: torch.autograd.DeviceType, name: str = "kernel") -> None:
            self.times, self.kind, self.label = (begin, end), kind, name

        def start_ns(self) -> int:
            return self.times[0]

        def duration_ns(self) -> int:
            return self.times[1] - self.times[0]

        def device_type(self) -> torch.autograd.DeviceType:
            return self.kind

        def name(self) -> str:
            return self.label

    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [Event(0, 50, gpu), Event(60, 100, gpu), Event(0, 100, cpu), Event(0, 100, gpu, "ProfilerStep#1")]

    class Profile:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

        def __init__(self, activities: list[Any]) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None:
            assert ran == ["run", "synchronize"]

    ran: list[str] = []
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CUDA})
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ran.append("synchronize"))
    busy = gpu_busy(torch.device("cuda"), lambda: ran.append("run"), lambda: -1)
    assert busy is not None and busy.share == pytest.approx(50 / 60)
    Profile.profiler = SimpleNamespace()
    ran.clear()
    assert gpu_busy(torch.device("cuda"), lambda: ran.append("run"), lambda: -1) is None
