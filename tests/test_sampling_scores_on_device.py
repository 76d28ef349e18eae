"""What tokens are drawn from, where the device picks them: ``output_scores``, ``output_logits``, and log-probabilities
after processors. They are held against ``generate`` along the same tokens, and against transformers' processors."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_distributions import processors_of
from support_families import build, logits_of_rows, random_prompts
from support_parity import pages_of_memory
from support_step_tensors import BOTH, PENALTY, batch, drawing, stock
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.extra_outputs import ExtraOutputs
from hf_batchllm.engine.loop import Engine
from hf_batchllm.inputs.padded_batch import take_padded
from hf_batchllm.inputs.resolve_options import resolve_options
from hf_batchllm.sampling.step_tensors import StepTensors

FAMILY, WIDTH = "llama", 20
SAMPLED: list[dict[str, Any]] = [
    {"top_k": 0},
    {"temperature": 2.5, "top_k": 20, "top_p": 0.9, "num_return_sequences": 3},
    {"temperature": 1.7, "min_p": 0.1, **PENALTY},
    {"top_k": 0, "typical_p": 0.8, "temperature": 1.3},
    {"top_k": 0, "epsilon_cutoff": 0.01, "renormalize_logits": True},
    {"top_h": 0.5, "temperature": 1.5},
    {"top_h": 0.8, "top_k": 3, "min_p": 0.02, "remove_invalid_values": True, "suppress_tokens": [5]},
    {"top_k": 30, "renormalize_logits": True, "forced_eos_token_id": 3, "sequence_bias": [[[7], 3.0], [[30], -2.0]]},
]
GREEDY: list[dict[str, Any]] = [{}, {"suppress_tokens": [5, 6], "bad_words_ids": [[7], [87, 9]], **PENALTY}]


@pytest.fixture
def by_device(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The host puts nothing together."""

    def record(*_: Any) -> None:
        raise AssertionError("the host waited for scores")

    monkeypatch.setattr(StepTensors, "record", record)
    return device


def generator(device: str, **config: Any) -> BatchGenerator:
    return BatchGenerator(model_on(device, FAMILY), **{"min_shared_tokens": 1, "page_size": 16, **config})


def assert_as_generate(got: Any, ids: torch.Tensor, mask: torch.Tensor, eos: set[int], **given: Any) -> torch.Tensor:
    """Along the same tokens. Rows that have ended hold zeros. Returns [steps, rows], which rows had ended."""
    tokens = got.sequences[:, WIDTH:].cpu()
    with drawing(tokens):
        expected = stock(FAMILY, ids, attention_mask=mask, **given)
    assert torch.equal(got.sequences.cpu(), expected.sequences)
    is_end = torch.tensor([[token in eos for token in row] for row in tokens.tolist()])
    ended = is_end.cumsum(dim=1).cumsum(dim=1) > 1
    for name in ("scores", "logits"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert len(mine) == len(theirs) == tokens.shape[1]
        for step, (own, its) in enumerate(zip(mine, theirs, strict=True)):
            run = ~ended[:, step]
            assert own.dtype == torch.float32 and own.device == got.sequences.device
            assert not own.cpu()[~run].any()
            torch.testing.assert_close(own.cpu()[run], its[run], atol=2e-4, rtol=2e-4)
    return ended.T


@pytest.mark.some_cases
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("options", [{"do_sample": True, "seed": 3, **each} for each in SAMPLED] + GREEDY, ids=str)
def test_tensors_are_those_of_generate(by_device: str, options: dict[str, Any], steps: int) -> None:
    ids, mask = batch()
    eos = set(range(0 if options.get("do_sample") else 60, 20 if options.get("do_sample") else 97))
    given = {"max_new_tokens": 7, "eos_token_id": sorted(eos), **BOTH, **options}
    with generator(by_device, steps_per_sync=steps) as ours:
        got = ours.generate(input_ids=ids.to(by_device), attention_mask=mask.to(by_device), **given)
    given.pop("seed", None)
    assert assert_as_generate(got, ids, mask, eos, **given).any()


def test_where_memory_is_short(by_device: str) -> None:
    """Sequences start anew, and put the same down again."""
    ids, mask = batch(rows=12)
    memory = pages_of_memory(model_on(by_device, FAMILY), 8, 16)
    given = {"max_new_tokens": 40, "eos_token_id": 1000, **BOTH}
    with generator(by_device, kv_memory=memory, steps_per_sync=4) as ours:
        got = ours.generate(input_ids=ids.to(by_device), attention_mask=mask.to(by_device), **given)
        assert ours.last_report is not None and ours.last_report.preemptions
    assert_as_generate(got, ids, mask, set(), **given)


@pytest.mark.parametrize("eos", [range(97), range(60, 97)])
def test_each_step_has_memory_of_its_own(by_device: str, eos: range) -> None:
    """Somebody who keeps one need not keep the others, nor steps that nobody came to."""
    ids, mask = batch()
    given = {"max_new_tokens": 12, "eos_token_id": [*eos], **BOTH}
    with generator(by_device) as ours:
        got = ours.generate(input_ids=ids.to(by_device), attention_mask=mask.to(by_device), **given)
    assert (len(got.scores) == 1) == (eos.start == 0)
    for each in (*got.scores, *got.logits):
        assert each.untyped_storage().nbytes() == 4 * each.numel()
    assert_as_generate(got, ids, mask, set(eos), **given)


@pytest.mark.parametrize("rows", [90, 104])
def test_a_head_that_is_narrower_or_wider_than_the_embedding(by_device: str, rows: int) -> None:
    model = copy.deepcopy(model_on(by_device, FAMILY))
    weight = model.lm_head.weight.detach()[[place % 80 for place in range(rows)]]
    model.lm_head = torch.nn.Linear(weight.shape[1], rows, bias=False, device=by_device)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    ids, mask = (each.to(by_device) for each in batch())
    given = {"attention_mask": mask, "max_new_tokens": 4, "eos_token_id": 1000, **BOTH}
    with BatchGenerator(model, page_size=16) as ours:
        got = ours.generate(input_ids=ids.clamp(max=80), **given)
    expected = model.generate(ids.clamp(max=80), **given)
    for mine, theirs in zip(got.logits + got.scores, expected.logits + expected.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)


def test_where_there_is_no_room_for_all_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host puts them together, as rows grow."""

    def make_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(StepTensors, "make_room", make_room)
    ids, mask = batch()
    given = {"max_new_tokens": 4, "eos_token_id": 1000, **BOTH}
    with generator(device) as ours, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = ours.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **given)
    assert_as_generate(got, ids, mask, set(), **given)
    said = [str(each.message) for each in seen if "as they may, which is not free" in str(each.message)]
    assert len(said) == (device == "cuda")


def test_either_alone_and_beside_logprobs(by_device: str) -> None:
    ids, mask = batch()
    shared = {"max_new_tokens": 4, "return_dict_in_generate": True, "pad_token_id": 0, **PENALTY}
    given = {"input_ids": ids.to(by_device), "attention_mask": mask.to(by_device)}
    with generator(by_device) as ours:
        whole = ours.generate(**given, **{**shared, **BOTH})
        for name in ("scores", "logits"):
            got = ours.generate(**given, **shared, **{f"output_{name}": True})
            assert {*got.keys()} - {"cache", "past_key_values"} == {"sequences", name}
            for mine, theirs in zip(got[name], whole[name], strict=True):
                torch.testing.assert_close(mine, theirs)


def test_what_takes_half_of_the_memory_is_left_to_the_host() -> None:
    model = build(FAMILY)
    padded = take_padded(None, {"input_ids": torch.tensor([[5, 6]])})
    options = resolve_options(model, None, {"max_new_tokens": 2, **BOTH}, padded)
    outputs = ExtraOutputs([options])
    taken = outputs.results_bytes(2, 97)
    outputs.fit_into(2 * taken, 2, 97)
    assert outputs.why_by_host is None
    outputs.fit_into(2 * taken - 2, 2, 97)
    assert outputs.why_by_host is not None
    assert outputs.why_by_host.startswith("`output_scores` and `output_logits` would take ")


# -- log-probabilities after processors ------------------------------------------------------------------------


class OfScores(BatchGenerator):
    _logprobs_of_scores = True  # as generate_batch and rollouts have them


PROMPTS = random_prompts(random.Random(5), 97, "mixed", 18)[:8]


def assert_of_scores(model: Any, result: BatchResult, k: int, options: list[dict[str, Any]]) -> None:
    rows = [(*row.prompt_token_ids, *row.token_ids) for row in result]
    for row, ids, logits in zip(result, rows, logits_of_rows(model, rows), strict=True):
        prompt, given = len(row.prompt_token_ids), options[row.index]
        processors = processors_of(model, prompt, **given)
        assert row.logprobs is not None and len(row.logprobs) == len(row.token_ids)
        for made, entry in enumerate(row.logprobs):
            before = torch.tensor([ids[: prompt + made]])
            scores = processors(before, logits[prompt + made - 1][None].float().cpu())
            wanted = scores.log_softmax(dim=-1)[0]
            assert row.token_ids[made] in entry and len(entry) in (k, k + 1)
            for token, value in entry.items():
                assert value == pytest.approx(wanted[token].item(), abs=3e-4)
            assert list(entry.values())[:k] == pytest.approx(wanted.topk(k).values.tolist(), abs=3e-4)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("steps", [1, 6])
def test_logprobs_are_those_that_tokens_were_drawn_with(
    device: str, k: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, *given: depths.append(self.depth) or run(self, *given))
    kinds: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 0.7, "top_k": 0},
        {"do_sample": True, "temperature": 1.6, "top_p": 0.8, "top_k": 0},
        {"do_sample": False, "suppress_tokens": [3, 4], "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 12, "min_p": 0.05, "renormalize_logits": True},
        {"do_sample": True, "top_h": 0.6, "temperature": 1.3, "top_k": 0},
    ]
    options = [kinds[place % 5] for place in range(len(PROMPTS))]
    model = model_on(device, FAMILY)
    with OfScores(model, steps_per_sync=steps, page_size=16) as ours:
        for some in ([options[0]] * len(options), options):
            configs = [GenerationConfig(max_new_tokens=6, eos_token_id=1, **each) for each in some]
            result = ours.generate(PROMPTS, configs, logprobs=k, seed=4, progress=False)
            assert_of_scores(model, result, k, [{"eos_token_id": 1, **each} for each in some])
    assert depths == [steps, steps]
