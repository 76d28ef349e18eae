"""Drafts in the loop of a GPU: each guessed token is a row of its own, and the device draws the tokens of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on, run_over_twins
from support_drafts import NEW_TOKENS, ON_A_GPU, PROMPTS, SAMPLED, assert_same, both, guess_from
from support_drafts import always as always  # a fixture
from support_parity import pages_of_memory
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.graph_launcher import GraphLauncher
from hf_batchllm.engine.drafts import drafts_ahead
from hf_batchllm.engine.loop import Engine
from hf_batchllm.model.torch_attention import TorchBackend
from hf_batchllm.model.triton_attention import TritonBackend
from hf_batchllm.planning.step import Step

CONFIGS: list[dict[str, Any]] = [
    {}, {"share_prefixes": False}, {"cuda_graphs": False}, {"steps_per_sync": 1}, {"scheduler": "fifo"},
    {"keep_prefixes": 4}, {"steps_per_sync": 6, "min_shared_tokens": 4},
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, SAMPLED, {"eos_token_id": list(range(0, 97, 13))}, {"logprobs": 2, "prompt_logprobs": 1},
    SAMPLED | {"logprobs": 1, "eos_token_id": [3, 50, 60, 61]}, {"min_new_tokens": 6, "eos_token_id": [1, 2, 3, 4, 5]},
]  # fmt: skip


def told(result: BatchResult) -> list[Any]:
    return [(each.token_ids, each.finish_reason, each.logprobs, each.prompt_logprobs) for each in result]


@pytest.mark.some_cases
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_the_same(
    device: str, config: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafted = both(device, monkeypatch, config, **options)
    near = [[each.token_ids for each in result] for result in (plain, drafted)]
    assert near[0] == near[1]
    assert [each.finish_reason for each in plain] == [each.finish_reason for each in drafted]
    assert [len(each.logprobs or []) for each in plain] == [len(each.logprobs or []) for each in drafted]
    ours, theirs = drafted.report, plain.report
    assert ours is not None and theirs is not None
    assert 0 < ours.accepted_tokens < ours.drafted_tokens
    assert ours.new_tokens == theirs.new_tokens
    assert ours.computed_tokens == theirs.computed_tokens
    assert f"{ours.accepted_tokens:,} of them right" in str(ours)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3", "mixtral", "gpt2", "phi3"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_families(device: str, family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*both(device, monkeypatch, {}, family=family, **options))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("guessed", [15, 16, 17, 30])
def test_long_drafts(device: str, guessed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay decode rows, where a part of a prompt as long would not be."""
    plain, drafted = both(device, monkeypatch, {}, 0.0, guessed=guessed)
    assert_same(plain, drafted)
    assert drafted.report is not None and drafted.report.steps < 0.7 * (plain.report.steps if plain.report else 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_over_plain_pytorch(refused: bool, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend on a GPU without kernels, and layers that kernels refuse: there each row is by itself."""
    run_over_twins(monkeypatch)
    if refused:
        monkeypatch.setattr(TritonBackend, "refusal", lambda self, _: self._refusals.setdefault(0, "no such shape"))
    else:
        monkeypatch.setattr(
            "hf_batchllm.model.model_in_use.make_backend",
            lambda config, device, storage, _: TorchBackend(storage, device),
        )
        monkeypatch.setattr("hf_batchllm.engine.wiring.graphs_for", lambda *_: None)
    assert_same(*both("cpu", monkeypatch, {}, family=family))


@pytest.mark.usefixtures("always")
def test_where_memory_is_short_steps_run_ahead_as_ever(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft runs until steps may be of any size again, and none of them waits for one."""
    model = model_on(device, "llama")
    options: dict[str, Any] = {"max_new_tokens": 300, "progress": False}
    launched: list[Step] = []
    own = Engine._launch

    def launch(self: Engine, step: Step) -> Any:
        launched.append(step)
        if len(launched) == 1:
            raise torch.OutOfMemoryError("no memory for this one")
        return own(self, step)

    with BatchGenerator(model, **ON_A_GPU | {"steps_per_sync": 32}) as generator:
        plain = generator.generate(PROMPTS, **options)
        guess_from(plain, monkeypatch, 0.2)
        monkeypatch.setattr(Engine, "_launch", launch)
        drafted = generator.generate(PROMPTS, prompt_lookup_num_tokens=5, **options)
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert sum(step.times == 1 and not step.drafts and not step.chunks for step in launched) < 20


@pytest.mark.usefixtures("always")
def test_in_little_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"kv_memory": pages_of_memory(model_on(device, "llama"), 24, 16)}
    assert_same(*both(device, monkeypatch, config, max_new_tokens=60))


@pytest.mark.usefixtures("always")
def test_some_look_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those nothing is guessed: the device would put guesses down as tokens of theirs."""

    configs = [
        GenerationConfig(max_new_tokens=NEW_TOKENS, repetition_penalty=1.3 if place % 2 else 1.0) for place in range(8)
    ]
    model = model_on(device, "llama")
    with BatchGenerator(model, **ON_A_GPU) as generator:
        plain = generator.generate(PROMPTS, configs, progress=False)
    for config in configs:
        config.prompt_lookup_num_tokens = 5
    with BatchGenerator(model, **ON_A_GPU) as generator:
        guess_from(plain, monkeypatch, 0.2)
        with pytest.warns(UserWarning, match="no tokens are guessed for 4 prompts: the GPU looks back"):
            drafted = generator.generate(PROMPTS, configs, progress=False)
    assert [each.token_ids for each in plain] == [each.token_ids for each in drafted]
    assert drafted.report is not None and drafted.report.accepted_tokens > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"repetition_penalty": 1.2}, "looks back at"),
        ({"output_scores": True, "return_dict_in_generate": True}, "scores"),
    ],
    ids=["penalty", "scores"],
)
def test_where_there_are_none_a_warning_says_so(device: str, options: dict[str, Any], why: str) -> None:
    asked = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 4, "progress": False, **options}
    prompts: Any = [[1, 2, 1, 2]]
    if "output_scores" in options:
        prompts = torch.tensor(prompts, device=device)
    with (
        BatchGenerator(model_on(device, "llama"), **ON_A_GPU) as generator,
        pytest.warns(UserWarning, match=f"no effect here.*{why}"),
    ):
        generator.generate(prompts, **asked)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("tokens", [400, 60])
def test_graphs_are_captured_before_the_first_step_with_drafts(
    device: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While bursts run; where few tokens are to come, of one size."""
    monkeypatch.setattr(drafts_ahead, "_BURSTS_FOR_GRAPHS", 100)
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda _: True)
    made: list[tuple[int, bool]] = []  # of each graph, its rows, and whether steps with drafts had run before
    seen, own, own_run = [False], DecodeGraphs._make, DecodeGraphs.run

    def make(self: DecodeGraphs, kind: Any) -> Any:
        if kind.drafts:
            made.append((kind.rows, seen[0]))
        return own(self, kind)

    def run(self: DecodeGraphs, batch: Any, steps_to_come: int) -> Any:
        seen[0] |= batch.draft_rows is not None
        return own_run(self, batch, steps_to_come)

    monkeypatch.setattr(DecodeGraphs, "_make", make)
    monkeypatch.setattr(DecodeGraphs, "run", run)
    assert_same(*both(device, monkeypatch, {"steps_per_sync": 8}, max_new_tokens=tokens))
    assert made == [(64, False)]
