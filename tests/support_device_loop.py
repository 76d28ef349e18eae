"""The GPU's loop wherever a test runs: natively on a GPU; on a CPU over the kernels' references, nothing captured.

And an oracle that does not care how it was run: each token is held against the logits that transformers' own forward
gives for everything before it, under the noise of its seed, prompt, sample and position.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from support_attention_references import FIXED_REFERENCES, REFERENCES
from support_distributions import processors_of
from support_families import build, logits_of_rows
from support_fused import REFERENCES as FUSED_REFERENCES
from support_parity import NEAR_TIE, Row

from hf_batchllm import BatchResult
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.kernels.reference.sample_torch import exponential
from hf_batchllm.model.attention.fixed_triton_attention import FixedTritonBackend
from hf_batchllm.model.attention.triton_attention import TritonBackend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Key = tuple[int, int]  # prompt and sample


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        run_over_references(monkeypatch)
    return request.param


class Replay:
    """In the place of a captured graph."""

    def __init__(self, rows: DecodeRows) -> None:
        self._rows: DecodeRows | None = rows

    def replay(self) -> None:
        assert self._rows is not None
        with self._rows._runner.surroundings():  # in which a graph was captured
            self._rows._run()

    def reset(self) -> None:
        self._rows = None


def run_over_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a call does on a GPU is done on a CPU: work lists, graphs' fixed memory, fused layers, tokens picked
    on the device. What would be captured is run again in its place."""

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> TritonBackend:
        if config.invariant:
            return FixedTritonBackend(FIXED_REFERENCES, REFERENCES, storage, device, notices, (4, 2))
        return TritonBackend(REFERENCES, storage, device, notices, (4, 2))

    def graphs_for(config: Any, runner: Any, *others: Any) -> DecodeGraphs:
        return DecodeGraphs(runner, runner.backend, *others, config.cuda_graphs)

    def capture(self: DecodeGraphs, graph: DecodeRows) -> None:
        graph._graph = Replay(graph)  # type: ignore[assignment]
        self.captured += 1

    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
    monkeypatch.setattr("hf_batchllm.engine.devices.graphs_for", graphs_for)
    monkeypatch.setattr("hf_batchllm.sampling.device_options.may_pick_on", lambda *_: True)
    monkeypatch.setattr("hf_batchllm.sampling.token_picking.may_pick_on", lambda *_: True)
    monkeypatch.setattr("hf_batchllm.sampling.logprobs.may_pick_on", lambda *_: True)
    monkeypatch.setattr(
        "hf_batchllm.model.model_in_use.fused_kernels", lambda config, _: FUSED_REFERENCES if config.fuse else None
    )
    monkeypatch.setattr(DecodeGraphs, "_capture", capture)


def model_on(device: str, family: str) -> Any:
    """The family's float32 model, the same object at every call: leave it as you found it."""
    return build(family) if device == "cpu" else _on_gpu(family)


@functools.cache
def _on_gpu(family: str) -> Any:
    return copy.deepcopy(build(family)).to("cuda")


_SCORES: dict[tuple[str, str, Row, Row, str], torch.Tensor] = {}


def _scores(device: str, family: str, rows: Sequence[tuple[Row, Row]], options: str) -> list[torch.Tensor]:
    """What each token of each (prompt, new tokens) was chosen from, [tokens, vocabulary], as transformers' forward and
    processors have it."""
    model, given = model_on(device, family), _OPTIONS[options]
    new = sorted({row for row in rows if (device, family, *row, options) not in _SCORES})
    every = logits_of_rows(model, [prompt + tokens for prompt, tokens in new])
    for (prompt, tokens), whole in zip(new, every, strict=True):
        logits = whole[len(prompt) - 1 : -1].float().cpu()
        if given:
            processors, ids = processors_of(model, len(prompt), **given), torch.tensor([prompt + tokens])
            steps = [processors(ids[:, : len(prompt) + made], logits[made][None]) for made in range(len(tokens))]
            logits = torch.cat(steps)
        _SCORES[device, family, prompt, tokens, options] = logits
    return [_SCORES[device, family, *row, options] for row in rows]


_OPTIONS: dict[str, dict[str, Any]] = {}


def behind(
    device: str,
    family: str,
    prompts: Sequence[Sequence[int]],
    rows: dict[Key, Sequence[int]],
    seed: int | None = None,
    **options: Any,
) -> dict[Key, torch.Tensor]:
    """For each row, how far each of its tokens is behind the best there was: 0, or less than rounding's size.

    With a ``seed``, after the noise that the row's place in the list gives. ``options`` are those of sampling.
    """
    name = str(sorted(options.items(), key=str))
    _OPTIONS[name] = options
    found = {}
    pairs = [(tuple(prompts[index]), tuple(tokens)) for (index, _), tokens in rows.items()]
    for ((index, sample), tokens), own in zip(rows.items(), _scores(device, family, pairs, name), strict=True):
        scores = own.double()
        if seed is not None:
            made, vocabulary = (torch.arange(size) for size in scores.shape)
            key = (torch.tensor([number]) for number in (seed, index, sample))
            scores = scores - exponential(vocabulary[None], *key, made[:, None]).log()
        chosen = scores.gather(1, torch.tensor(tokens, dtype=torch.long)[:, None])[:, 0]
        found[index, sample] = scores.max(dim=1).values - chosen
    return found


def rows_of(result: Iterable[Any]) -> dict[Key, list[int]]:
    return {(generation.index, generation.sample): generation.token_ids for generation in result}


def assert_best(
    device: str,
    family: str,
    prompts: Sequence[Sequence[int]],
    result: Iterable[Any],
    new_tokens: int | Sequence[int],
    stops: Iterable[int] = (),
    seed: int | None = None,
    **options: Any,
) -> None:
    """Every token is the best there was after those before it, and every row ends where it should.

    ``new_tokens`` may be one limit for each prompt.
    """
    result, stops = list(result), set(stops)
    rows = rows_of(result)
    assert len(rows) == len(result)
    chosen = {"eos_token_id": sorted(stops) or None, **options} if options else {}
    gaps = behind(device, family, prompts, rows, seed, **chosen)
    for generation in result:
        where, tokens = f"{family}: prompt {generation.index}, sample {generation.sample}", generation.token_ids
        assert generation.prompt_token_ids == list(prompts[generation.index])
        gap = gaps[generation.index, generation.sample]
        far = (gap >= NEAR_TIE).nonzero()
        assert not len(far), f"{where}: token {int(far[0])} of {len(gap)} is {float(gap[far[0]])} behind the best"
        limit = new_tokens if isinstance(new_tokens, int) else new_tokens[generation.index]
        ends = next((at for at, token in enumerate(tokens) if token in stops), None)
        assert len(tokens) == (limit if ends is None else min(limit, ends + 1)), where
        assert generation.finish_reason == ("length" if ends is None else "stop"), where


def assert_same_rows(results: Sequence[BatchResult], least: float = 0.95) -> None:
    """But for those that rounding decides, of which there are few."""
    first, *others = (rows_of(result) for result in results)
    for other in others:
        assert other.keys() == first.keys()
        same = sum(other[key] == first[key] for key in first)
        assert same >= least * len(first), f"{len(first) - same} of {len(first)} rows differ"


def assert_adds_up(generator: Any, prompts: Sequence[Sequence[int]], result: BatchResult, steps_per_sync: int) -> None:
    """Whatever went through the model was asked for, or is named as what it is."""
    report = result.report
    assert report is not None
    decoded = sum(max(len(tokens) - 1, 0) for tokens in result.token_ids)
    assert report.new_tokens == sum(map(len, result.token_ids))
    assert report.computed_tokens == generator.plan(prompts).computed_tokens
    idle = report.model_tokens - report.computed_tokens - report.recomputed_tokens - decoded
    assert report.idle_tokens == idle
    assert 0 <= idle <= (steps_per_sync * len(result) if steps_per_sync > 1 else 0)
