"""Adapters on every path that a call may take: as on a GPU, with little memory, with options, interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_adapters import (
    EVERY,
    NEW_TOKENS,
    PAGES,
    assert_each,
    build,
    generate,
    having,
    lora,
    prompts,
    thrice,
    wrapped,
)
from support_calls import answers, failing, noted
from support_device_loop import Replay, run_over_references
from support_families import reference_generate
from support_fused import FORWARDS
from support_fused import fusing as fusing  # a fixture
from support_kernels import plain
from support_parity import pages_of_memory
from support_parity import watched as watched  # a fixture
from support_untouched import fingerprint
from support_word_tokenizer import word_tokenizer
from transformers import TextStreamer

from hf_batchllm import BatchConfig, BatchGenerator, GenerationInterrupted
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler

pytestmark = plain
GIVEN = prompts()
NAMES = ("a", "b", None)


# -- as on a GPU -----------------------------------------------------------------------------------------------


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The loop of a GPU over the kernels' references. A graph is only ever replayed with what it was captured with."""
    run_over_references(monkeypatch)
    names: list[str | None] = []

    class Checked(Replay):
        def __init__(self, rows: DecodeRows) -> None:
            super().__init__(rows)
            self.rows, self.name = rows, rows._runner.control.adapters.name  # type: ignore[union-attr]
            names.append(self.name)
            replay = self.replay

            def checked() -> None:
                assert self.rows._runner.control.adapters.name == self.name  # type: ignore[union-attr]
                replay()

            self.replay = checked

    def capture(self: DecodeGraphs, graph: DecodeRows) -> None:
        graph._graph = Checked(graph)  # type: ignore[assignment]
        self.captured += 1

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    return names


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("kind", "steps_per_sync"),
    [("lora", None), ("lora", 8), ("saved", 8), ("transformers", None), ("ia3", 8), ("qwen3", None)],
)
def test_running_ahead_in_graphs_and_fused(
    kind: str, steps_per_sync: int | None, captured: list[str | None], watched: list[Any]
) -> None:
    given, names = thrice(GIVEN)
    config = BatchConfig(steps_per_sync=steps_per_sync, **PAGES)
    result = generate(kind, given, names, config, max_new_tokens=12, eos_token_id=None)
    assert_each(kind, given, names, result, 12)
    assert set(captured) == set(NAMES)


@pytest.mark.gpu
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], EVERY])
@pytest.mark.parametrize("steps_per_sync", [1, 8])
def test_on_a_gpu(targets: list[str], steps_per_sync: int) -> None:
    model = wrapped(lora(targets), lora(targets, use_rslora=True)).to("cuda")
    given, names = thrice(prompts(12))
    options = {"max_new_tokens": 24, "eos_token_id": None}
    with BatchGenerator(model, steps_per_sync=steps_per_sync, **PAGES | {"page_size": 16}) as generator:
        before = [each.requires_grad for each in model.parameters()]
        result = generator.generate(given, adapter=names, **options)
        assert "graph" in result.report.graphs
        assert [each.requires_grad for each in model.parameters()] == before
    same = 0
    for prompt, name, row in zip(given, names, result, strict=True):
        with having(model, name):
            same += row.token_ids == reference_generate(model, prompt, **options)
    assert same >= 0.9 * len(given)


def test_fused_layers_leave_what_is_adapted_to_peft(fusing: list[int], watched: list[Any]) -> None:
    given, names = thrice(GIVEN)
    models = {
        "projections": wrapped(lora(["down_proj"]), lora(["o_proj"])),  # which fused layers call as modules
        "all": wrapped(lora(EVERY), lora(EVERY)),
    }
    for kind, model in models.items():
        fusing.clear()
        result = answers(model, given, PAGES, adapter=names, max_new_tokens=NEW_TOKENS)
        for prompt, name, row in zip(given, names, result, strict=True):
            with having(model, name):
                assert row.token_ids == reference_generate(model, prompt, max_new_tokens=NEW_TOKENS)
        assert set(fusing) == {FORWARDS if kind == "projections" else FORWARDS - 6}


# -- little memory, schedulers ---------------------------------------------------------------------------------


def test_little_memory(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given, names = thrice(prompts(8, kind="prefix"))
    preempted = noted(monkeypatch, GroupScheduler, "_preempt", lambda self, request: request)
    config = BatchConfig(
        kv_memory=pages_of_memory(build("lora"), 16, 8), keep_prefixes=3, scheduler=GroupScheduler(), **PAGES
    )
    never = [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]  # who may stop is not counted in full
    result = generate("lora", given, names, config, max_new_tokens=20, stopping_criteria=never)
    assert_each("lora", given, names, result, 20)
    assert result.report.preemptions == len(preempted) > 2


@pytest.mark.parametrize("scheduler", ["fifo", FifoScheduler()])
def test_other_schedulers(scheduler: Any) -> None:
    given, names = thrice(GIVEN)
    assert_each("lora", given, names, generate("lora", given, names, BatchConfig(scheduler=scheduler, **PAGES)))


def test_when_time_is_over_all_end() -> None:
    given, names = thrice(GIVEN)
    result = generate("lora", given, names, max_time=0.0)
    assert {row.finish_reason for row in result} == {"time"}


# -- options ---------------------------------------------------------------------------------------------------


def test_rows_of_a_tensor() -> None:
    ids = torch.tensor([[0, 0, 7, 8, 9], [3, 4, 5, 6, 7], [0, 7, 7, 8, 9]])
    mask = (ids > 0).long()
    names = ["b", None, "a"]
    tensors = BatchGenerator(build("lora"), **PAGES).generate(
        ids, attention_mask=mask, adapter=names, max_new_tokens=4, pad_token_id=0, eos_token_id=None
    )
    for row, keep, name, out in zip(ids, mask, names, tensors, strict=True):
        prompt = row[keep > 0].tolist()
        result = generate("lora", [prompt], name, max_new_tokens=4, eos_token_id=None)
        assert out.tolist() == [*row.tolist(), *result[0].token_ids]


BEAMS = {"num_beams": 3, "do_sample": False}


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [{"guidance_scale": 2.5}, BEAMS, BEAMS | {"guidance_scale": 2.5}],
    ids=["guided", "beams", "guided beams"],
)
def test_what_runs_the_model_between_steps_has_the_adapter(options: dict[str, Any]) -> None:
    """Guidance: transformers' processor for it calls the model once more for each token."""
    model, (given, names) = wrapped(lora(), lora(["gate_proj", "o_proj"])), thrice(GIVEN[:3])
    before = fingerprint(model)
    result = answers(model, given, PAGES, adapter=names, max_new_tokens=5, **options)
    assert fingerprint(model) == before
    for row, name in zip(result, names, strict=True):
        with having(model, name):
            assert row.token_ids == reference_generate(model, row.prompt_token_ids, max_new_tokens=5, **options)


def test_log_probabilities_of_prompts_too() -> None:
    given, names = thrice(GIVEN[:3])
    both = generate("lora", given, names, logprobs=2, prompt_logprobs=1)
    for name in NAMES:
        alone = generate("lora", given, name, logprobs=2, prompt_logprobs=1)
        for row, other in zip(both, alone, strict=True):
            if names[row.index] == name:
                for ours, theirs in ((row.logprobs, other.logprobs), (row.prompt_logprobs, other.prompt_logprobs)):
                    assert len(ours) == len(theirs)
                    for one, two in zip(ours, theirs, strict=True):
                        assert (one is None) == (two is None)
                        assert one is None or one == pytest.approx(two, abs=1e-4)


def test_a_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = word_tokenizer()
    for name in NAMES:
        result = generate("lora", [GIVEN[0]], [name], streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out.split() == tokenizer.decode(result[0].token_ids).split()


# -- interrupts ------------------------------------------------------------------------------------------------


def test_an_interrupt_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(build("lora"))
    generator = BatchGenerator(build("lora"), **PAGES)

    with monkeypatch.context() as patch:
        failing(patch, ModelRunner, "launch", {1}, KeyboardInterrupt)
        with pytest.raises(GenerationInterrupted):
            generator.generate(GIVEN, adapter="b", max_new_tokens=2)
    assert fingerprint(build("lora")) == before
    assert_each("lora", GIVEN, ["b"] * 6, generator.generate(GIVEN, adapter="b", max_new_tokens=NEW_TOKENS))
