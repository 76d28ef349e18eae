"""``output_scores`` and ``output_logits`` with tensors: step by step what ``generate`` gives along the same tokens,
whether the host puts them together or the device that picks the tokens."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support_device_loop import DEVICES, model_on, run_over_references
from support_families import FAMILIES, build, family_params
from support_parity import pages_of_memory
from support_parity import watched as watched  # a fixture
from support_step_tensors import BOTH, PAD, PENALTY, WIDTH, batch, drawing, stock
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_batchllm import BatchGenerator, accelerated
from hf_batchllm.engine.extra_outputs import ExtraOutputs
from hf_batchllm.inputs.padded_batch import take_padded
from hf_batchllm.inputs.resolve_options import resolve_options
from hf_batchllm.sampling.step_tensors import StepTensors

FAMILY = "llama"
Tensors = tuple[torch.Tensor, torch.Tensor]  # ids and mask
RECORD = StepTensors.record


@pytest.fixture(params=["host", *DEVICES])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the model is. But for "host" its loop is the GPU's, and the host puts nothing together."""

    def record(*_: Any) -> None:
        raise AssertionError("the host waited for scores")

    if request.param == "host":
        return "cpu"
    monkeypatch.setattr(StepTensors, "record", record)
    if request.param == "cpu":
        run_over_references(monkeypatch)
    return request.param


by_host = pytest.mark.parametrize("device", ["host"], indirect=True)
by_device = pytest.mark.parametrize("device", DEVICES, indirect=True)


def generated(
    device: str, rows: Tensors, family: str = FAMILY, config: dict[str, Any] | None = None, **given: Any
) -> tuple[Any, BatchGenerator]:
    ids, mask = (each.to(device) for each in rows)
    settings = {"min_shared_tokens": 1, "page_size": 8, **(config or {})}
    with BatchGenerator(model_on(device, family), **settings) as ours:
        return ours.generate(input_ids=ids, attention_mask=mask, **given), ours


def assert_as_generate(
    got: Any, rows: Tensors, family: str = FAMILY, seed: Any = None, names: Any = ("scores", "logits"), **given: Any
) -> torch.Tensor:
    """Along the same tokens. Rows that have ended hold zeros. Returns [rows, steps], which rows had ended."""
    assert type(got) is GenerateDecoderOnlyOutput
    tokens, ends = got.sequences[:, WIDTH:].cpu(), given.get("eos_token_id")
    with drawing(tokens):
        expected = stock(rows[0], family, attention_mask=rows[1], **given)
    assert torch.equal(tokens, expected.sequences[:, WIDTH:])
    is_end = torch.isin(tokens, torch.tensor([] if ends is None else ends))
    ended = is_end.cumsum(dim=1).cumsum(dim=1) > 1
    for name in names:
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == tokens.shape[1]
        for step, (own, its) in enumerate(zip(mine, theirs, strict=True)):
            assert own.shape == its.shape and own.dtype == its.dtype == torch.float32
            assert own.device == got.sequences.device and not own.cpu()[ended[:, step]].any()
            run = ~ended[:, step]
            torch.testing.assert_close(own.cpu()[run], its[run], atol=2e-4, rtol=2e-4)
    return ended


DRAWN = {"do_sample": True, "eos_token_id": list(range(20))}
SOON = {"eos_token_id": list(range(60, 97))}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, soon over": SOON,
    "penalty and a minimum": {**PENALTY, "min_new_tokens": 3, "eos_token_id": 100},
    "edits": {"suppress_tokens": [5, 6], "bad_words_ids": [[7], [87, 9]]},
    "edits and a penalty": {"suppress_tokens": [5, 6], "bad_words_ids": [[7], [87, 9]], **PENALTY, **SOON},
    "all tokens": {**DRAWN, "top_k": 0},
    "samples of all tokens": {**DRAWN, "top_k": 0, "num_return_sequences": 3},
    "top_k and top_p": {**DRAWN, "temperature": 2.5, "top_k": 20, "top_p": 0.9},
    "samples of top_k and top_p": {**DRAWN, "temperature": 2.5, "top_k": 20, "top_p": 0.9, "num_return_sequences": 3},
    "min_p": {**DRAWN, "temperature": 1.7, "min_p": 0.1, **PENALTY},
    "samples of min_p": {**DRAWN, "temperature": 2.5, "min_p": 0.1, **PENALTY, "num_return_sequences": 3},
    "typical_p": {**DRAWN, "top_k": 0, "typical_p": 0.8, "temperature": 1.3},
    "epsilon": {**DRAWN, "top_k": 0, "epsilon_cutoff": 0.01, "renormalize_logits": True},
    "top_h": {**DRAWN, "top_h": 0.5, "temperature": 1.5},
    "top_h and others": {
        **{**DRAWN, "top_h": 0.8, "top_k": 3, "min_p": 0.02, "remove_invalid_values": True, "suppress_tokens": [5]}
    },
    "forced end and a bias": {
        **{**DRAWN, "top_k": 30, "renormalize_logits": True, "forced_eos_token_id": 3},
        "sequence_bias": [[[7], 3.0], [[30], -2.0]],
    },
}


@pytest.mark.some_cases
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("options", OPTIONS)
def test_tensors_are_those_of_generate(device: str, options: str, steps: int) -> None:
    given = {"max_new_tokens": 7, "seed": 3, **BOTH, **OPTIONS[options]}
    got, _ = generated(device, batch(), config={"page_size": 16, "steps_per_sync": steps}, **given)
    ended = assert_as_generate(got, batch(), **given)
    assert ended.any() or given.get("eos_token_id", 100) == 100
    assert not ended.all(dim=0).any()


@pytest.mark.some_cases
@by_host
@pytest.mark.parametrize("family", family_params(["gemma3", "gpt_oss", "opt"]))
@pytest.mark.parametrize("options", ["greedy", "penalty and a minimum", "edits"])
def test_families(device: str, family: str, options: str) -> None:
    given = {"max_new_tokens": 6, **BOTH, **OPTIONS[options]}
    got, _ = generated(device, batch(), family, **given)
    assert_as_generate(got, batch(), family, **given)


@by_host
def test_padding_on_the_right_changes_nothing(device: str) -> None:
    given = {"max_new_tokens": 6, **BOTH}
    assert_as_generate(generated(device, batch("right"), **given)[0], batch(), **given)


CUT: list[Any] = [  # and so many pages of memory
    ("host", {"max_batch_tokens": 3}, 12),
    ("host", {"page_size": 1}, 96),
    ("host", {"scheduler": "fifo"}, 12),
    ("cpu", {"page_size": 16, "steps_per_sync": 4}, 8),
    pytest.param("cuda", {"page_size": 16, "steps_per_sync": 4}, 8, marks=pytest.mark.gpu),
]


@pytest.mark.some_cases
@pytest.mark.parametrize(("device", "config", "pages"), CUT, indirect=["device"], ids=str)
def test_steps_of_any_make_up(device: str, config: dict[str, Any], pages: int, watched: list[Any]) -> None:
    """Where memory is short sequences start anew, and put the same down again."""
    memory = pages_of_memory(model_on(device, FAMILY), pages, config.get("page_size", 8))
    rows, given = batch(rows=12), {"max_new_tokens": 40 if pages == 8 else 20, "eos_token_id": 1000, **BOTH}
    got, ours = generated(device, rows, config={"kv_memory": memory, **config}, **given)
    assert_as_generate(got, rows, **given)
    report = ours.last_report
    assert report is not None and (report.preemptions > 0 or "scheduler" in config)


@by_host
def test_transition_scores_are_those_of_generate(device: str) -> None:
    model: Any = build(FAMILY)
    ids, mask = rows = batch()
    eos = stock(ids, attention_mask=mask, max_new_tokens=8)[0, 22].item()
    given = {"max_new_tokens": 8, "eos_token_id": eos, **BOTH, **PENALTY}
    got, expected = generated(device, rows, **given)[0], stock(ids, attention_mask=mask, **given)
    ended = assert_as_generate(got, rows, **given)
    assert ended.any()
    for normalise in (False, True):
        mine, theirs = (
            model.compute_transition_scores(each.sequences, each.scores, normalize_logits=normalise)
            for each in (got, expected)
        )
        assert mine.isfinite().all()
        torch.testing.assert_close(mine[~ended], theirs[~ended], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["scores", "logits"])
def test_either_alone(device: str, name: str) -> None:
    ids, mask = rows = batch()
    given = {"max_new_tokens": 4, "return_dict_in_generate": True, f"output_{name}": True, "pad_token_id": PAD}
    got, _ = generated(device, rows, **given, **PENALTY)
    assert list(got.keys()) == list(stock(ids, attention_mask=mask, **given).keys())
    assert got.attentions is None and got.hidden_states is None
    assert_as_generate(got, rows, names=[name], **given, **PENALTY)


@by_host
def test_asked_for_by_a_config_and_without_a_dict(device: str) -> None:
    config, (ids, mask) = GenerationConfig(max_new_tokens=4, **BOTH), batch()
    got, _ = generated(device, batch(), generation_config=config)
    assert_as_generate(got, batch(), generation_config=config)
    ignored, _ = generated(device, batch(), max_new_tokens=4, output_scores=True, output_logits=True)
    assert torch.equal(ignored, stock(ids, attention_mask=mask, max_new_tokens=4)), "as in generate"


@by_host
def test_under_accelerated(device: str) -> None:
    ids, mask = rows = batch()
    model, given = build(FAMILY), {"max_new_tokens": 5, **BOTH}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        with accelerated(model):
            got = model.generate(ids, attention_mask=mask, **given)
            assert model.generate.last_report is not None
    assert_as_generate(got, rows, **given)


@by_host
def test_half_precision_comes_out_in_float32(device: str) -> None:
    model: Any = FAMILIES[FAMILY]().to(torch.bfloat16)
    ids, mask = batch()
    got, expected = (
        run(ids, attention_mask=mask, max_new_tokens=3, **BOTH)
        for run in (BatchGenerator(model).generate, model.generate)
    )
    for mine, theirs in zip(got.logits + got.scores, expected.logits + expected.scores, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(got.logits[0], expected.logits[0], atol=0.2, rtol=0.05)
    assert got.logits[0].data_ptr() != got.scores[0].data_ptr()


# -- by the device ---------------------------------------------------------------------------------------------


@by_device
@pytest.mark.parametrize("eos", [range(97), range(60, 97)])
def test_each_step_has_memory_of_its_own(device: str, eos: range) -> None:
    """Somebody who keeps one need not keep the others, nor steps that nobody came to."""
    given = {"max_new_tokens": 12, "eos_token_id": [*eos], **BOTH}
    got, _ = generated(device, batch(), **given)
    assert (len(got.scores) == 1) == (eos.start == 0)
    for each in (*got.scores, *got.logits):
        assert each.untyped_storage().nbytes() == 4 * each.numel()
    assert_as_generate(got, batch(), **given)


@by_device
@pytest.mark.parametrize("rows", [90, 104])
def test_a_head_that_is_narrower_or_wider_than_the_embedding(device: str, rows: int) -> None:
    model = copy.deepcopy(model_on(device, FAMILY))
    weight = model.lm_head.weight.detach()[[place % 80 for place in range(rows)]]
    model.lm_head = torch.nn.Linear(weight.shape[1], rows, bias=False, device=device)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    ids, mask = (each.to(device) for each in batch())
    given = {"attention_mask": mask, "max_new_tokens": 4, "eos_token_id": 1000, **BOTH}
    with BatchGenerator(model, page_size=16) as ours:
        got = ours.generate(input_ids=ids.clamp(max=80), **given)
    expected = model.generate(ids.clamp(max=80), **given)
    for mine, theirs in zip(got.logits + got.scores, expected.logits + expected.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)


@by_device
def test_where_there_is_no_room_for_all_steps(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host puts them together, as rows grow."""

    def make_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(StepTensors, "record", RECORD)
    monkeypatch.setattr(StepTensors, "make_room", make_room)
    given = {"max_new_tokens": 4, "eos_token_id": 1000, **BOTH}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got, _ = generated(device, batch(), **given)
    assert_as_generate(got, batch(), **given)
    said = [str(each.message) for each in seen if "as they may, which is not free" in str(each.message)]
    assert len(said) == (device == "cuda")


def test_what_takes_half_of_the_memory_is_left_to_the_host() -> None:
    padded = take_padded(None, {"input_ids": torch.tensor([[5, 6]])})
    options = resolve_options(build(FAMILY), None, {"max_new_tokens": 2, **BOTH}, padded)
    outputs = ExtraOutputs([options])
    taken = outputs.results_bytes(2, 97)
    outputs.fit_into(2 * taken, 2, 97)
    assert outputs.why_by_host is None
    outputs.fit_into(2 * taken - 2, 2, 97)
    assert outputs.why_by_host is not None
    assert outputs.why_by_host.startswith("`output_scores` and `output_logits` would take ")


def test_the_device_does_these_itself() -> None:
    for own in ({}, {"logprobs": 0}, {"logprobs": 32}):
        options = resolve_options(build(FAMILY), None, {"max_new_tokens": 2, **own})
        assert ExtraOutputs([options]).why_by_host is None
