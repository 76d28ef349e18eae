"""``output_scores`` and ``output_logits`` with tensors: step by step what ``generate`` gives along the same tokens."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support_families import FAMILIES, build, family_params
from support_parity import pages_of_memory, watched  # noqa: F401
from support_step_tensors import BOTH, PAD, PENALTY, batch, drawing, stock
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_batchllm import BatchGenerator, accelerated
from hf_batchllm.engine.extra_outputs import ExtraOutputs

FAMILY = "llama"


def ours(family: str = FAMILY, **config: Any) -> BatchGenerator:
    return BatchGenerator(build(family), **{"min_shared_tokens": 1, "page_size": 8, **config})


def assert_same(got: Any, expected: Any, width: int, eos: int | None = None, names: Any = ("scores", "logits")) -> None:
    """Rows that have ended hold zeros."""
    assert type(got) is GenerateDecoderOnlyOutput
    assert torch.equal(got.sequences[:, width:], expected.sequences[:, -got.sequences.shape[1] + width :])
    ended = torch.zeros(len(got.sequences), dtype=torch.bool)
    steps = got.sequences.shape[1] - width
    for step in range(steps):
        for name in names:
            mine, theirs = getattr(got, name), getattr(expected, name)
            assert isinstance(mine, tuple) and len(mine) == len(theirs) == steps
            assert mine[step].shape == theirs[step].shape and mine[step].dtype == theirs[step].dtype == torch.float32
            assert not mine[step][ended].any()
            torch.testing.assert_close(mine[step][~ended], theirs[step][~ended], atol=1e-4, rtol=1e-4)
        ended |= got.sequences[:, width + step] == eos


GREEDY: list[dict[str, Any]] = [
    {},
    {**PENALTY, "min_new_tokens": 3, "eos_token_id": 100},
    {"suppress_tokens": [5, 6], "bad_words_ids": [[7], [87, 9]]},
]


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gemma3", "gpt_oss", "opt"]))
@pytest.mark.parametrize("options", GREEDY, ids=" ".join)
def test_greedy_on_left_padded_rows(family: str, options: dict[str, Any]) -> None:
    ids, mask = batch()
    given = {"attention_mask": mask, "max_new_tokens": 6, **BOTH, **options}
    assert_same(
        ours(family).generate(input_ids=ids, **given), stock(family, ids, **given), 20, options.get("eos_token_id")
    )


def test_padding_on_the_right_changes_nothing() -> None:
    (ids, mask), (left, left_mask) = batch("right"), batch()
    got = ours().generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, **BOTH)
    assert_same(got, stock(FAMILY, left, attention_mask=left_mask, max_new_tokens=6, **BOTH), 20)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"temperature": 2.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.5, "min_p": 0.1, **PENALTY},
    ],
    ids=" ".join,
)
def test_sampled_along_our_own_tokens(options: dict[str, Any], samples: int) -> None:
    ids, mask = batch()
    given = {"attention_mask": mask, "do_sample": True, "num_return_sequences": samples, "max_new_tokens": 6}
    given |= {"eos_token_id": list(range(20)), **BOTH, **options}
    got = ours().generate(input_ids=ids, seed=3, **given)
    tokens = got.sequences[:, 20:]
    with drawing(tokens):
        expected = stock(FAMILY, ids, **given)
    ended = (tokens < 20).cumsum(dim=1).cumsum(dim=1) > 1
    assert ended.any() and not ended.all(dim=0).any()
    assert torch.equal(got.sequences, expected.sequences)
    for step in range(tokens.shape[1]):
        run = ~ended[:, step]
        assert not got.scores[step][~run].any() and not got.logits[step][~run].any()
        torch.testing.assert_close(got.scores[step][run], expected.scores[step][run], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.logits[step][run], expected.logits[step][run], atol=1e-4, rtol=1e-4)


@pytest.mark.some_cases
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("config", [{"max_batch_tokens": 3}, {"page_size": 1}, {"scheduler": "fifo"}], ids=str)
def test_steps_of_any_make_up(config: dict[str, Any]) -> None:
    ids, mask = batch(rows=12)
    memory = pages_of_memory(build(FAMILY), 96 // config.get("page_size", 8), config.get("page_size", 8))
    given = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": 1000, **BOTH}
    generator = ours(kv_memory=memory, **config)
    assert_same(generator.generate(input_ids=ids, **given), stock(FAMILY, ids, **given), 20)
    report = generator.last_report
    assert report is not None and (report.preemptions > 0 or "scheduler" in config)


def test_transition_scores_are_those_of_generate() -> None:
    model: Any = build(FAMILY)
    ids, mask = batch()
    plain = stock(FAMILY, ids, attention_mask=mask, max_new_tokens=8)
    eos = plain[0, 22].item()
    given = {"attention_mask": mask, "max_new_tokens": 8, "eos_token_id": eos, **BOTH, **PENALTY}
    got, expected = ours().generate(input_ids=ids, **given), stock(FAMILY, ids, **given)
    assert torch.equal(got.sequences, expected.sequences)
    new = got.sequences[:, 20:]
    ended = (new == eos).cumsum(dim=1).cumsum(dim=1) > 1
    assert ended.any()
    for normalise in (False, True):
        mine = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=normalise)
        theirs = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=normalise)
        assert mine.isfinite().all()
        torch.testing.assert_close(mine[~ended], theirs[~ended], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["scores", "logits"])
def test_either_alone(name: str) -> None:
    ids, mask = batch()
    given = {"attention_mask": mask, "max_new_tokens": 4, "return_dict_in_generate": True, f"output_{name}": True}
    given |= {"pad_token_id": PAD, **PENALTY}
    got = ours().generate(input_ids=ids, **given)
    expected = stock(FAMILY, ids, **given)
    assert list(got.keys()) == list(expected.keys()) and got.attentions is None and got.hidden_states is None
    assert_same(got, expected, 20, names=[name])


def test_without_a_dict_they_are_ignored_as_in_generate() -> None:
    ids, mask = batch()
    got = ours().generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, output_scores=True, output_logits=True)
    assert torch.equal(got, stock(FAMILY, ids, attention_mask=mask, max_new_tokens=4))


def test_asked_for_by_a_config() -> None:
    ids, mask = batch()
    config = GenerationConfig(max_new_tokens=4, **BOTH)
    got = ours().generate(ids, config, attention_mask=mask)
    assert_same(got, stock(FAMILY, ids, generation_config=config, attention_mask=mask), 20)


def test_under_accelerated() -> None:
    ids, mask = batch()
    model: Any = build(FAMILY)
    expected = stock(FAMILY, ids, attention_mask=mask, max_new_tokens=5, **BOTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with accelerated(model), torch.inference_mode():
            got = model.generate(ids, attention_mask=mask, max_new_tokens=5, **BOTH)
            assert model.generate.last_report is not None
    assert_same(got, expected, 20)


def test_half_precision_comes_out_in_float32() -> None:
    model: Any = FAMILIES[FAMILY]().to(torch.bfloat16)
    ids, mask = batch()
    got = BatchGenerator(model).generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, **BOTH)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=3, **BOTH)
    for mine, theirs in zip(got.logits + got.scores, expected.logits + expected.scores, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(got.logits[0], expected.logits[0], atol=0.2, rtol=0.05)
    assert got.logits[0].data_ptr() != got.scores[0].data_ptr()


def test_the_device_does_these_itself() -> None:
    from hf_batchllm.inputs.resolve_options import resolve_options

    for own in ({}, {"logprobs": 0}, {"logprobs": 32}):
        options = resolve_options(build(FAMILY), None, {"max_new_tokens": 2, **own})
        assert ExtraOutputs([options]).why_by_host is None
