"""Where the host picks the tokens, the model runs in graphs all the same: the tokens are those of ``generate``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import reference_generate
from support_parity import mixed_prompts, pages_of_memory
from transformers import GenerationConfig, LogitsProcessor, WatermarkingConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.seats import Seats
from hf_batchllm.engine.loop import Engine
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
    seen: list[int] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(
        DecodeGraphs, "run", lambda self, batch, *rest: seen.append(batch.attention.rows) or run(self, batch, *rest)
    )
    return seen


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
        result = generator.generate(PROMPTS, progress=False, **given)
        again = generator.generate(PROMPTS, progress=False, logprobs=1, **given)
    assert result.token_ids == again.token_ids == alone
    assert len(replayed) > 8 and max(replayed) > 4
    assert all(len(row.logprobs) == len(row.token_ids) for row in again)


def test_processors_with_a_state_of_their_own(device: str) -> None:
    model = model_on(device, "llama")
    alone = [
        reference_generate(model, prompt, max_new_tokens=9, eos_token_id=None, logits_processor=[Doubles()])
        for prompt in PROMPTS
    ]
    with BatchGenerator(model) as generator:
        result = generator.generate(
            PROMPTS,
            max_new_tokens=9,
            eos_token_id=None,
            logits_processor=lambda index, ids: [Doubles()],
            progress=False,
        )
    assert result.token_ids == alone


def test_a_processor_is_asked_once_for_each_token_and_never_beyond_the_end(device: str) -> None:
    """The next step is on its way before the host has seen an end."""
    asked: dict[int, list[int]] = {}

    def watching(index: int, ids: list[int]) -> list[Any]:
        def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            asked.setdefault(index, []).append(ids.shape[1] - len(PROMPTS[index]))
            return scores

        return [look]

    model = model_on(device, "llama")
    with BatchGenerator(model, page_size=16) as generator:
        result = generator.generate(
            PROMPTS, max_new_tokens=12, eos_token_id=list(range(0, 97, 5)), logits_processor=watching, progress=False
        )
    assert asked == {row.index: list(range(len(row.token_ids))) for row in result}
    assert len({len(tokens) for tokens in result.token_ids}) > 3 and result.report.idle_tokens > 0


@pytest.mark.parametrize("steps", [1, None])
def test_the_host_works_while_the_device_does(steps: int | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is launched before the tokens of the one before it are taken down; with ``steps_per_sync=1``, after."""
    happened: list[str] = []
    run, collect = DecodeGraphs.run, Engine.collect
    monkeypatch.setattr(DecodeGraphs, "run", lambda *given: happened.append("run") or run(*given))
    monkeypatch.setattr(Engine, "collect", lambda *given: happened.append("collect") or collect(*given))
    with BatchGenerator(model_on(device, "llama"), page_size=16, steps_per_sync=steps) as generator:
        generator.generate(PROMPTS[:3], max_new_tokens=8, eos_token_id=None, progress=False, **MANY)
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
        with BatchGenerator(model_on(device, "llama"), page_size=16, steps_per_sync=steps) as generator:
            return generator.generate(PROMPTS, max_new_tokens=new, eos_token_id=None, progress=False, **MANY)

    expected, calls, inner = run(), 0, getattr(HostSampler, what)

    def fails(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in when:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(*given)

    monkeypatch.setattr(HostSampler, what, fails)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    assert calls >= max(when) and result.token_ids == expected.token_ids
    picked = [[[next(iter(each)) for each in row.logprobs] for row in rows] for rows in (result, expected)]
    assert picked[0] == picked[1]
    said = [str(each.message) for each in caught if "picked in smaller parts" in str(each.message)]
    assert len(said) == (what == "__call__")


def test_a_processor_that_keeps_state_is_not_asked_again_where_memory_runs_out(device: str) -> None:
    class Keeps(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return scores

    keeps = Keeps()
    with (
        BatchGenerator(model_on(device, "llama"), page_size=16) as generator,
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        generator.generate(PROMPTS, max_new_tokens=5, eos_token_id=None, logits_processor=[keeps], progress=False)
    assert keeps.calls == 20 and any("may keep state" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("at", [1, 4, 9])
def test_nobody_is_asked_again_where_memory_runs_out_after_picking(
    at: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, stores, store = [0], [0], Seats.store

    class Counts(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return scores.roll(calls[0] % 3, dims=1)

    def fails_once(self: Seats, *given: Any) -> None:
        stores[0] += 1
        if stores[0] == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        store(self, *given)

    def tokens() -> Any:
        calls[0] = 0
        with BatchGenerator(model_on(device, "llama"), page_size=16) as generator:
            return generator.generate([PROMPTS[0]], progress=False, max_new_tokens=10, logits_processor=[Counts()])

    expected = tokens().token_ids
    monkeypatch.setattr(Seats, "store", fails_once)
    assert tokens().token_ids == expected
    assert calls[0] == 10 and stores[0] > 10


def test_a_criterion_that_changes_the_model_is_heard(device: str) -> None:
    model, prompt = model_on(device, "llama"), PROMPTS[0]
    head = model.lm_head.weight

    def flips(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] == len(prompt) + 11:
            model.lm_head.weight = torch.nn.Parameter(head.data.flip(0).contiguous(), requires_grad=False)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    given: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "stopping_criteria": [flips]}
    try:
        alone = reference_generate(model, prompt, **given)
        model.lm_head.weight = head
        with BatchGenerator(model, fuse=False, page_size=16) as generator:
            result = generator.generate([prompt], progress=False, **given, **MANY)
    finally:
        model.lm_head.weight = head
    assert result.token_ids == [alone] and "from 2 graphs" in result.report.graphs


def test_samples_are_those_that_the_device_would_draw(device: str) -> None:
    asked: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 10, "num_return_sequences": 2}
    with BatchGenerator(model_on(device, "llama")) as generator:
        by_device = generator.generate(PROMPTS, progress=False, **asked)
        by_host = generator.generate(PROMPTS, progress=False, logits_processor=[lambda ids, scores: scores], **asked)
    assert by_device.token_ids == by_host.token_ids


def test_a_processor_that_changes_the_model_is_heard(device: str) -> None:
    """A graph that was captured before would know nothing of it."""
    model = model_on(device, "llama")
    head = model.lm_head.weight.data

    def flips(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPTS[0]) + 4:
            model.lm_head.weight = torch.nn.Parameter(head.flip(0).contiguous(), requires_grad=False)
        return scores

    def run(generate: Any) -> list[int]:
        before = model.lm_head.weight
        try:
            tokens: list[int] = generate()
            return tokens
        finally:
            model.lm_head.weight = before

    alone = run(
        lambda: reference_generate(model, PROMPTS[0], max_new_tokens=12, eos_token_id=None, logits_processor=[flips])
    )
    with BatchGenerator(model, fuse=False) as generator:
        ours = run(
            lambda: generator.generate(
                [PROMPTS[0]], max_new_tokens=12, eos_token_id=None, logits_processor=[flips], progress=False
            ).token_ids[0]
        )
    assert ours == alone


def test_configs_of_which_one_needs_the_host(device: str) -> None:
    configs = [GenerationConfig(max_new_tokens=8, do_sample=False) for _ in PROMPTS]
    configs[1] = GenerationConfig(max_new_tokens=8, watermarking_config=WatermarkingConfig(bias=2.5))
    model = model_on(device, "llama")
    with BatchGenerator(model) as generator:
        result = generator.generate(PROMPTS, configs, progress=False)
    marked = [{}, {"watermarking_config": configs[1].watermarking_config}, *([{}] * (len(PROMPTS) - 2))]
    for prompt, own, row in zip(PROMPTS, marked, result, strict=True):
        assert row.token_ids == reference_generate(model, prompt, max_new_tokens=8, **own)
