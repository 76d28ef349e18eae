"""Where the host picks the tokens, the model runs in graphs all the same: the tokens are those of ``generate``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support_calls import answers, failing, flipping_head, noted
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import reference_generate
from support_parity import mixed_prompts, pages_of_memory
from transformers import GenerationConfig, LogitsProcessor, WatermarkingConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.collector import TokenCollector
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.seats import Seats
from hf_batchllm.sampling.host_sampler import HostSampler

PROMPTS = mixed_prompts(2)[:12]


class NoThirds(LogitsProcessor):
    """Forbids tokens by the length of the sequence, writing to the scores that it is given."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids.shape[1] % 3 :: 3] = -torch.inf
        return scores


class Doubles(LogitsProcessor):
    """Counts its calls, and prefers what the sequence ends with."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[0, int(input_ids[0, -1])] += 0.7 * self.calls
        return scores


MANY = {"logprobs": 40}  # more than the device finds: the host picks the tokens, by code of nobody's own
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"logits_processor": [NoThirds()]}),
    ("gemma3", {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1]), (5 * int(ids[-1]) + 1) % 97, 3]}),
    ("gpt2", {"watermarking_config": WatermarkingConfig(bias=2.5), "no_repeat_ngram_size": 2}),
]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each decode step that went through the graphs."""
    return noted(monkeypatch, DecodeGraphs, "run", lambda self, batch, *_: batch.attention.rows)


@pytest.mark.some_cases
@pytest.mark.parametrize("memory", [200, 20])
@pytest.mark.parametrize(("family", "options"), CASES)
def test_tokens_are_those_of_generate(
    family: str, options: dict[str, Any], memory: int, device: str, replayed: list[int]
) -> None:
    model = model_on(device, family)
    given = {"max_new_tokens": 10, "eos_token_id": list(range(0, 97, 7)), "pad_token_id": 0, **options}
    alone = [reference_generate(model, prompt, **given) for prompt in PROMPTS]
    with BatchGenerator(model, kv_memory=pages_of_memory(model, memory, 16), page_size=16) as generator:
        result = generator.generate(PROMPTS, **given)
        again = generator.generate(PROMPTS, logprobs=1, **given)
    assert result.token_ids == again.token_ids == alone
    assert len(replayed) > 8 and max(replayed) > 4
    assert all(len(row.logprobs) == len(row.token_ids) for row in again)


def test_processors_with_a_state_of_their_own(device: str) -> None:
    model = model_on(device, "llama")
    given = {"max_new_tokens": 9, "eos_token_id": None}
    alone = [reference_generate(model, prompt, logits_processor=[Doubles()], **given) for prompt in PROMPTS]
    result = answers(model, PROMPTS, logits_processor=lambda index, ids: [Doubles()], **given)
    assert result.token_ids == alone


def test_a_processor_is_asked_once_for_each_token_and_never_beyond_the_end(device: str) -> None:
    """The next step is on its way before the host has seen an end."""
    asked: dict[int, list[int]] = {}

    def watching(index: int, ids: list[int]) -> list[Any]:
        def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            asked.setdefault(index, []).append(ids.shape[1] - len(PROMPTS[index]))
            return scores

        return [look]

    given = {"max_new_tokens": 12, "eos_token_id": list(range(0, 97, 5)), "logits_processor": watching}
    result = answers(model_on(device, "llama"), PROMPTS, {"page_size": 16}, **given)
    assert asked == {row.index: list(range(len(row.token_ids))) for row in result}
    assert len({len(tokens) for tokens in result.token_ids}) > 3 and result.report.idle_tokens > 0


@pytest.mark.parametrize("steps", [1, None])
def test_the_host_works_while_the_device_does(steps: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is launched before the tokens of the one before it are taken down; with ``steps_per_sync=1``, after."""
    happened: list[str] = []
    run, collect = DecodeGraphs.run, TokenCollector.collect
    monkeypatch.setattr(DecodeGraphs, "run", lambda *given: happened.append("run") or run(*given))
    monkeypatch.setattr(TokenCollector, "collect", lambda *given: happened.append("collect") or collect(*given))
    config = {"page_size": 16, "steps_per_sync": steps}
    answers(model_on(device, "llama"), PROMPTS[:3], config, max_new_tokens=8, eos_token_id=None, **MANY)
    ahead = happened.index("run") < happened.index("collect")
    assert ahead == (steps is None) and happened.count("run") >= 7


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("what", "when", "new", "steps"),
    [
        *[("__call__", when, 5, None) for when in ({1}, {2}, {5}, {2, 3})],
        *[("prepare", when, 5, None) for when in ({1}, {2}, {5})],
        ("__call__", {1}, 1, None),
        ("__call__", {2}, 5, 1),
    ],
)
def test_tokens_are_picked_in_parts_where_memory_runs_out(
    what: str, when: set[int], new: int, steps: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each is taken down once."""

    def run() -> Any:
        config = {"page_size": 16, "steps_per_sync": steps}
        return answers(model_on(device, "llama"), PROMPTS, config, max_new_tokens=new, eos_token_id=None, **MANY)

    expected = run()
    calls = failing(monkeypatch, HostSampler, what, when, torch.OutOfMemoryError("CUDA out of memory"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    assert calls[0] >= max(when) and result.token_ids == expected.token_ids
    picked = [[[next(iter(each)) for each in row.logprobs] for row in rows] for rows in (result, expected)]
    assert picked[0] == picked[1]
    said = [str(each.message) for each in caught if "picked in smaller parts" in str(each.message)]
    assert len(said) == (what == "__call__")


@pytest.mark.parametrize("at", [1, 4, 9])
def test_nobody_is_asked_again_where_memory_runs_out_after_picking(
    at: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    class Counts(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return scores.roll(calls[0] % 3, dims=1)

    def tokens() -> Any:
        calls[0] = 0
        given = {"max_new_tokens": 10, "logits_processor": [Counts()]}
        return answers(model_on(device, "llama"), [PROMPTS[0]], {"page_size": 16}, **given).token_ids

    expected = tokens()
    stores = failing(monkeypatch, Seats, "store", {at}, torch.OutOfMemoryError("CUDA out of memory"))
    assert tokens() == expected
    assert calls[0] == 10 and stores[0] > 10


@pytest.mark.parametrize(
    ("option", "at", "more"),
    [("stopping_criteria", 11, MANY), ("logits_processor", 4, {})],
    ids=["criterion", "processor"],
)
def test_code_that_changes_the_model_is_heard(option: str, at: int, more: dict[str, Any], device: str) -> None:
    """A graph that was captured before would know nothing of it."""
    model, prompt = model_on(device, "llama"), PROMPTS[0]
    given: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None}
    with flipping_head(model, option, len(prompt) + at) as code:
        alone = reference_generate(model, prompt, **given, **code)
    with flipping_head(model, option, len(prompt) + at) as code:
        result = answers(model, [prompt], {"fuse": False, "page_size": 16}, **given, **code, **more)
    assert result.token_ids == [alone] and "from 2 graphs" in result.report.graphs


def test_samples_are_those_that_the_device_would_draw(device: str) -> None:
    asked: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 10, "num_return_sequences": 2}
    model = model_on(device, "llama")
    by_device = answers(model, PROMPTS, **asked)
    by_host = answers(model, PROMPTS, logits_processor=[lambda ids, scores: scores], **asked)
    assert by_device.token_ids == by_host.token_ids


def test_configs_of_which_one_needs_the_host(device: str) -> None:
    configs = [GenerationConfig(max_new_tokens=8, do_sample=False) for _ in PROMPTS]
    configs[1] = GenerationConfig(max_new_tokens=8, watermarking_config=WatermarkingConfig(bias=2.5))
    model = model_on(device, "llama")
    result = answers(model, PROMPTS, generation_config=configs)
    marked = [{}, {"watermarking_config": configs[1].watermarking_config}, *([{}] * (len(PROMPTS) - 2))]
    for prompt, own, row in zip(PROMPTS, marked, result, strict=True):
        assert row.token_ids == reference_generate(model, prompt, max_new_tokens=8, **own)
